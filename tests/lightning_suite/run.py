"""Runs Lightning's own test-suite with a strategy swapped, and compares two such runs.

    python run.py run SOURCE --strategy auto --output baseline.json
    python run.py run SOURCE --strategy hetero_offload --output swapped.json --only baseline.json
    python run.py compare baseline.json swapped.json

With ``--ranks`` DDP on several CPU devices is swapped, instead of the default strategy on one.
`SOURCE` is a checkout of Lightning at the tag of the installed version. See README.md
beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Result = dict[str, Any]  # one test: test, outcome, ran_default, duration_s, error, skipped


def relevant(results: Mapping[str, Result]) -> list[str]:
    """Ids of the tests that run on a strategy that is swapped, and pass."""
    return sorted(test for test, result in results.items() if result["ran_default"] and result["outcome"] == "passed")


def reason_to_differ(test: str) -> str | None:
    """Why a test must behave differently with our strategy, if `expected.json` (id prefix to
    reason) says that it does.
    """
    reasons = json.loads(Path(__file__).with_name("expected.json").read_text())
    return next((reason for prefix, reason in reasons.items() if test.removeprefix("tests/").startswith(prefix)), None)


def load(path: Path) -> dict[str, Result]:
    return {result["test"]: result for result in json.loads(path.read_text())["tests"]}


def read(record: Path) -> dict[str, Result]:
    """What a run has recorded so far; of a test that ran twice, the second time."""
    lines = record.read_text().splitlines() if record.exists() else []
    return {result["test"]: result for result in map(json.loads, lines)}


def run(args: argparse.Namespace) -> int:
    """Runs the suite once; writes every test's result to `args.output`."""
    tests = args.source.resolve() / "tests"
    if not (tests / "tests_pytorch").is_dir():
        raise SystemExit(f"no tests/tests_pytorch in {args.source}: pass a checkout of Lightning's repository")
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory(prefix="lightning-suite-") as scratch:
        record = Path(scratch, "record.jsonl")
        environment = os.environ | {
            "HETERO_SUITE_STRATEGY": args.strategy,
            "HETERO_SUITE_RECORD": str(record),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(here), str(tests), os.environ.get("PYTHONPATH", "")])),
            "CUDA_VISIBLE_DEVICES": "",
        }
        if args.only:
            only = Path(scratch, "only.json")
            only.write_text(json.dumps(relevant(load(args.only))))
            environment["HETERO_SUITE_ONLY"] = str(only)
        if args.ranks:
            environment["HETERO_SUITE_RANKS"] = "1"
        command = [sys.executable, "-m", "pytest", "-p", "plugin", "-p", "no:cacheprovider", "-q", "--tb=short", "--color=no"]
        command += [f"--timeout={args.timeout}", "--continue-on-collection-errors"]
        several = ["-n", str(args.workers), *(args.tests or ["tests_pytorch"])]
        code = subprocess.run([*command, *several], cwd=tests, env=environment, check=False).returncode
        results = read(record)
        if args.ranks:  # those that start the script again, which is pytest, need a process of their own
            for test in [name for name, result in results.items() if result["skipped"].endswith("[Standalone execution]")]:
                alone = [*command, "-n", "0", test.removeprefix("tests/")]
                subprocess.run(alone, cwd=tests, env=environment | {"PL_RUN_STANDALONE_TESTS": "1"}, check=False)
            results = read(record)
    args.output.write_text(json.dumps({"strategy": args.strategy, "tests": list(results.values())}, indent=1))
    summary = Counter(result["outcome"] for result in results.values())
    print(f"{args.strategy}: {dict(summary)}; {len(relevant(results))} run on what is swapped and pass")
    # 1 means that tests failed, which `compare` judges; above that pytest itself failed.
    return code if code > 1 else 0


def compare(args: argparse.Namespace) -> int:
    """Prints the tests of the baseline that behave differently with the other strategy; 1 if there
    are any.
    """
    baseline, swapped = load(args.baseline), load(args.swapped)
    expected = relevant(baseline)
    missing = [test for test in expected if test not in swapped]
    changed = [test for test in expected if test in swapped and swapped[test]["outcome"] != "passed"]
    # A swapped run in which nothing was swapped would pass everything and prove nothing.
    idle = [test for test in expected if test in swapped and not swapped[test]["ran_default"] and test not in changed]
    by_design = {test: reason for test in changed if (reason := reason_to_differ(test)) is not None}
    changed = [test for test in changed if test not in by_design]
    for title, tests in (("not run", missing), ("passed without the strategy", idle), ("no longer pass", changed)):
        if tests:
            print(f"\n{len(tests)} {title}:")
        for test in tests:
            print(f"  {test}")
            lines = [line for line in swapped.get(test, {}).get("error", "").splitlines() if line.startswith("E ")]
            print("".join(f"      {line[1:].strip()}\n" for line in lines[:3]), end="")
    for reason, count in Counter(by_design.values()).items():
        print(f"\n{count} differ by design: {reason}")
    passed = len(expected) - len(missing) - len(idle) - len(changed) - len(by_design)
    print(f"\n{passed} of {len(expected)} behave as with Lightning's strategy, {len(by_design)} differ by design")
    return 1 if missing or idle or changed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runner = commands.add_parser("run", help="run the suite once")
    runner.add_argument("source", type=Path, help="checkout of Lightning at the installed version")
    runner.add_argument("tests", nargs="*", help="files or folders of its tests/, such as tests_fabric (default: tests_pytorch)")
    runner.add_argument("--strategy", default="hetero_offload")
    runner.add_argument("--output", type=Path, required=True)
    runner.add_argument("--only", type=Path, help="run only the tests that this result counts")
    runner.add_argument("--ranks", action="store_true", help="swap DDP on several CPU devices")
    runner.add_argument("--workers", default="1", help="xdist workers; a crashed worker is replaced (default: 1)")
    runner.add_argument("--timeout", type=int, default=120, help="seconds for one test (default: 120)")
    runner.set_defaults(command=run)
    comparer = commands.add_parser("compare", help="compare two results")
    comparer.add_argument("baseline", type=Path)
    comparer.add_argument("swapped", type=Path)
    comparer.set_defaults(command=compare)
    args = parser.parse_args()
    return int(args.command(args))


if __name__ == "__main__":
    sys.exit(main())
