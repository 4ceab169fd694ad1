"""Everything that a GPU can show, in three calls of at most nine minutes each: see README.md beside
this.

    tests/gpu/run tests OUT                            # preflight, then each file of tests/gpu
    tests/gpu/run steps OUT --before EARLIER           # benchmarks/gpu_step.py without a planner
    tests/gpu/run auto OUT --before EARLIER --wheels W # its plan "auto", then the papers' ablations

``OUT/result.json`` has what this call and those before it found. ``--before`` is the directory
of an earlier call, on a machine that keeps nothing. Options after ``--`` go to gpu_step.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILES = ("test_lanes.py", "test_device_weights.py", "test_device_updates.py", "test_activations.py", "test_training.py",
         "test_out_of_memory.py", "test_ranks.py")  # fmt: skip  # lanes first: all others need them
WITHOUT_PLANNER = (
    "peak",
    "overhead",
    "zero_offload",
    "zero_infinity",
    "fsdp2",
    "fsdp2_recompute",
    "deepspeed_cpu",
    "deepspeed_nvme",
)
FILE_S = 100  # a file's time limit
KEPT = ("result.json", "steps.jsonl", "model.json", "hardware-*.json")  # which a later call goes on from
PYTEST = ("-n0", "-q", "-ra", "-p", "no:cacheprovider", "--timeout=60", "--timeout-method=thread", "-o", "faulthandler_timeout=45")
HIDING = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda cls, name, *rest: None if name.split(".")[0] in {packages} else find(name, *rest))
"""


@dataclass
class Call:
    """One call: what it runs, how long it may take, and where results go."""

    args: argparse.Namespace
    begin_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.out: Path = self.args.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        if self.args.before is not None and self.args.before.resolve() != self.out:
            for file in (file for pattern in KEPT for file in self.args.before.glob(pattern)):
                shutil.copy(file, self.out / file.name)
        file = self.out / "result.json"
        self.result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        if self.args.device != "cuda":
            self.env["GPU_TESTS_ON"] = "foreign"

    @property
    def left_s(self) -> float:
        """Seconds until the call must be over; some are kept for the results."""
        return 60 * self.args.minutes - 10 - (time.monotonic() - self.begin_s)

    def note(self, name: str, value: object) -> None:
        """Writes a result at once: what comes later may end the machine."""
        self.result[name] = value
        (self.out / "result.json").write_text(json.dumps(self.result))

    def run(self, name: str, *words: object, limit_s: float) -> tuple[int | None, str]:
        """Runs a program with its own time limit; returns its status, ``None`` past the limit, and
        its output.
        """
        limit_s = max(1.0, min(limit_s, self.left_s))
        print(f"== {name}: at most {limit_s:.0f} s", flush=True)
        with (self.out / f"{self.args.call}.log").open("a+") as log:
            log.write(f"== {name}\n")
            log.flush()
            first = log.tell()
            child = subprocess.Popen(
                list(map(str, words)), stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=self.env, start_new_session=True
            )
            try:
                status: int | None = child.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # also what it has left behind
                child.wait()
            log.seek(first)
            output = log.read()
        print("\n".join(line for line in output.splitlines()[-40:] if not line.startswith("{")), flush=True)
        return status, output

    def hide(self, packages: list[str], folder: Path) -> None:
        """Programs that are run cannot import these packages, as if they were not installed."""
        (folder / "sitecustomize.py").write_text(HIDING.format(packages=packages))
        self.env["PYTHONPATH"] = os.pathsep.join([str(folder), self.env["PYTHONPATH"]])

    def build(self) -> bool:
        """The native library, unless the environment names one."""
        if "LIGHTNING_HETERO_LIBRARY" not in self.env:
            library = ROOT / "build" / "gpu" / "libhetero.so"
            self.env["LIGHTNING_HETERO_LIBRARY"] = str(library)
            if not library.exists():
                made = ["sh", "-c", "cmake -S native -B build/gpu -G Ninja && cmake --build build/gpu"]
                status, output = self.run("build", *made, limit_s=240)
                self.note("build", {"status": status, "output": output[-2000:] if status else ""})
                return status == 0
        return True


def tests(call: Call) -> bool:
    """The preflight, then every file in a process of its own: after an error that sticks to the GPU
    all that follows fails.
    """
    device = "cuda" if call.args.device == "cuda" else "cpu"
    size = ("--bytes", 1 << 26) if call.args.device != "cuda" else ()
    words = ["tests/gpu/preflight.py", "--dir", call.args.dir, "--device", device, *size]
    status, output = call.run("preflight", sys.executable, *words, limit_s=90)
    call.note("preflight", last_json(output) or {"status": status, "output": output[-2000:]})
    passed = True
    for name in call.args.files:
        if call.left_s < 5:
            call.note("tests", {**call.result.get("tests", {}), name: {"outcome": "too late"}})
            passed = False
            continue
        begin = time.monotonic()
        status, output = call.run(
            name, sys.executable, "-m", "pytest", *PYTEST, f"tests/gpu/{name}", limit_s=call.args.file_seconds
        )
        outcome = {None: "out of time", 0: "passed", 5: "no tests"}.get(status, f"status {status}")
        last = next((line for line in reversed(output.splitlines()) if re.search(r"\d+ (passed|failed|skipped|error)", line)), "")
        failures = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        row = {"outcome": outcome, "seconds": time.monotonic() - begin, "summary": last, "failures": failures}
        call.note("tests", {**call.result.get("tests", {}), name: row})
        passed &= status in (0, 5)
    return passed


def steps(call: Call, *options: object, name: str = "steps") -> bool:
    """gpu_step.py until the call's time is over; its log has what it measured by then."""
    words = [sys.executable, "benchmarks/gpu_step.py", "--device", call.args.device, "--cap", call.args.cap, "--dir", call.args.dir]
    words += [
        "--minutes",
        max(0.1, call.left_s / 60 - 1.5),
        "--continue",
        call.out / "steps.jsonl",
        *map(str, options),
        *call.args.rest,
    ]
    status, output = call.run(name, *words, limit_s=call.left_s)
    call.note(name, last_json(output) or {"status": status, "output": output[-2000:]})
    return status == 0


def measured(log: Path) -> list[str]:
    """What an earlier call has measured: bars compare with it, and it is not measured again."""
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    known = {row["what"] for row in rows if row["result"] is not None}
    return [name for name in WITHOUT_PLANNER if name in known]


def auto(call: Call) -> bool:
    """The plan of our own planner, which needs a solver, then the papers' ablations."""
    with tempfile.TemporaryDirectory() as site:
        if call.args.wheels is not None:
            wheels = sorted(call.args.wheels.glob("*.whl"))
            pip = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "-q",
                "--no-index",
                "--no-deps",
                "--no-compile",
                "--target",
                site,
                *wheels,
            ]
            if call.run("wheels", *pip, limit_s=90)[0] == 0:
                call.env["PYTHONPATH"] += os.pathsep + site
        passed = steps(call, "--only", "auto", *measured(call.out / "steps.jsonl"), "--profiles", call.out, name="auto")
        profiles = [call.out / "model.json", call.out / f"hardware-{call.args.cap}.json"]
        if not all(file.exists() for file in profiles):
            call.note("ablations", "no profiles: the call before this one writes them")
            return False
        words = ["--plans", Path(site, "plans"), "--model-profile", profiles[0], "--hardware-profile", profiles[1]]
        if call.run("plans", sys.executable, "benchmarks/ablation.py", *words, limit_s=120)[0] != 0:
            return False
        return steps(call, "--variants", Path(site, "plans"), name="ablations") and passed


def perform(call: Call) -> bool:
    """Whether all of the call went well."""
    if call.args.call == "steps":
        only = () if "--only" in call.args.rest else ("--only", *WITHOUT_PLANNER)
        return steps(call, *only, "--profiles", call.out)
    return tests(call) if call.args.call == "tests" else auto(call)


def last_json(output: str) -> Any:
    """The JSON that a program has printed last; ``None`` if there is none."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except json.JSONDecodeError:
                return None
    return None


def main() -> None:
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    words, rest = sys.argv[1:end], sys.argv[end + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=("tests", "steps", "auto"))
    parser.add_argument("out", type=Path, help="a directory for the results")
    parser.add_argument("--before", type=Path, help="the results of an earlier call, to go on from")
    parser.add_argument("--minutes", type=float, default=9, help="of the whole call")
    parser.add_argument("--wheels", type=Path, help="wheels of packages that the machine lacks, for auto")
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda", help="emulated: a trial without a GPU")
    parser.add_argument("--cap", default="24GiB", help="device memory that a contestant may use")
    parser.add_argument(
        "--hide", nargs="+", default=[], help="packages that programs cannot import: those that the machine lacks, in a trial"
    )
    parser.add_argument("--files", nargs="+", default=FILES, help="of tests/gpu")
    parser.add_argument("--file-seconds", type=float, default=FILE_S)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk")
    args = parser.parse_args(words)
    args.rest = rest
    call = Call(args)
    with tempfile.TemporaryDirectory() as folder:
        call.hide(args.hide, Path(folder))
        passed = call.build() and perform(call)
    raise SystemExit(int(not passed))


if __name__ == "__main__":
    main()
