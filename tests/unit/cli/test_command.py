"""The command itself: how it starts, what it refuses, how it writes numbers, and its page in the
documentation.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from support.cli import MACHINE, MODEL, PRESET, invoke, parsed
from typer.main import get_command

from lightning_hetero import __version__
from lightning_hetero.cli import doctor, output
from lightning_hetero.cli.app import app
from lightning_hetero.ir.cluster_plan import CLUSTER_PLANNERS
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan, Tier
from lightning_hetero.planners import PLANNERS

# ---- starting ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], ["torch", "lightning", "cvxpy", "rich", "matplotlib", "numpy", "lightning_hetero.planners"]),
        (["plan", *PRESET, *MACHINE, "--planner", "zero_offload"], ["torch", "lightning", "matplotlib", "highspy", "scipy"]),
        (["plan", *PRESET, *MACHINE], ["torch", "lightning", "matplotlib", "cvxpy"]),
    ],
    ids=["help", "plan", "search"],
)
def test_a_command_imports_no_more_than_it_needs(arguments: list[str], absent: list[str]) -> None:
    code = (
        "import json, sys\n"
        "from lightning_hetero.cli.app import app\n"
        "try:\n    app(sys.argv[1:])\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "print('\\n' + json.dumps(sorted(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    loaded = set(json.loads(run.stdout.splitlines()[-1]))
    assert not loaded & set(absent)


def test_the_module_runs_as_the_command() -> None:
    run = subprocess.run([sys.executable, "-m", "lightning_hetero.cli", "--help"], capture_output=True, text=True, check=True)
    for command in ("doctor", "profile", "plan", "explain", "simulate"):
        assert f"\n  {command} " in run.stdout
    assert "Exit codes: 0 success" in run.stdout


def test_the_version_equals_the_packages() -> None:
    assert invoke("--version").stdout == f"lightning-hetero {__version__}\n"


# ---- refusals ------------------------------------------------------------------------------------


REFUSALS: list[tuple[list[str], str]] = [
    (["plan"], "Got none of --model-profile, --preset-model, --model"),
    (["plan", *PRESET, "--model-profile", "m.json"], "Got --model-profile, --preset-model of --model-profile"),
    (["plan", "--preset-model", "gpt2"], "--preset-model gpt2 needs --batch and --sequence"),
    (["plan", "--model-profile", "m.json", "--batch", "8"], "--batch, --sequence, --precision go with --preset-model"),
    (["plan", *PRESET[:-1], "0"], "--sequence"),
    (["plan", *PRESET, "--precision", "8"], "--precision"),
    (["plan", "--preset-model", "gtp2", *PRESET[2:], *MACHINE], "gtp2"),
    (["plan", *PRESET, "--device", "rtx4090"], "a machine needs --device and --host-memory"),
    (["plan", *PRESET, "--device", "rtx9090", "--host-memory", "1GiB"], "rtx9090"),
    (["plan", *PRESET, *MACHINE[:-1], "floppy"], "floppy"),
    (["plan", *PRESET, "--device", "rtx4090", "--host-memory", "lots"], "'lots' is not a size"),
    (["plan", *PRESET, "--hardware-profile", "h.json", *MACHINE], "--hardware-profile is a whole machine"),
    (["plan", *PRESET, "--machine", "lohan-rtx4090", *MACHINE], "--machine lohan-rtx4090 has its device"),
    (["plan", *PRESET, "--machine", "lohan-rtx9090"], "lohan-rtx9090"),
    (["plan", *PRESET, *MACHINE, "--planner", "oracle"], "--planner 'oracle'; allowed: "),
    (["plan", *PRESET, *MACHINE, "--option", "fast"], "--option 'fast'; allowed: KEY=VALUE"),
    (["plan", *PRESET, *MACHINE, "--option", "colour=red"], "unknown planner options ['colour']"),
    (["plan", *PRESET, *MACHINE, "--out", "/nowhere/plan.json"], "'/nowhere/plan.json' cannot be written"),
    (["plan", *PRESET, "--hardware-profile", "missing.json"], "'missing.json' does not exist"),
    (["explain", "missing.json"], "plan file 'missing.json' does not exist"),
    (["simulate", "missing.json"], "plan file 'missing.json' does not exist"),
    (["export", "missing.ckpt", "out"], "checkpoint 'missing.ckpt' does not exist"),
    (["verify", "missing.ckpt"], "'missing.ckpt' does not exist"),
    (["plan", *PRESET, "--device", "rtx4090", "--host-memory", "256"], 'Allowed: "256GiB"'),
    (["plan", *PRESET, *MACHINE, "--planner", "lohn"], "Did you mean 'lohan'?"),
    (["plan", *PRESET, *MACHINE, "--option", "micro_batch=2"], "Did you mean 'micro_batches'?"),
    (["plan", *PRESET, *MACHINE, "--option", "updates=after_verdit"], "Did you mean 'after_verdict'"),
    (["plan", *PRESET, *MACHINE, "--option", "seconds=fast"], '--option seconds="fast"; allowed: a number.'),
    (["plan", *PRESET, *MACHINE, "--option", "evaluations=2.5"], "--option evaluations=2.5; allowed: a whole number or null."),
    (["plan", *PRESET, *MACHINE, "--planner", "lohan", "--option", "method=wlak"], "allowed: walk, convex. Did you mean 'walk'?"),
    (["plan", *PRESET, "--quantize", "nf5"], "'nf5' is not one of 'nf4', 'nf4-double', 'int8'. Did you mean 'nf4'?"),
    (["export", "a", "b", "--dtype", "bfloat"], "Invalid value for '--dtype': 'bfloat' is not one of"),
    (["plan", "--preset-model", "gpt:layer=2,hidden=64,heads=2", *PRESET[2:], *MACHINE], "Did you mean 'layers'?"),
    (["plan-cluster", "2xa100-80", *PRESET, "--micro-batches", "4", "--planner", "wale"], "Did you mean 'whale'"),
    (["plan", *PRESET[:2], "--batch", "100000", "--sequence", "4096", *MACHINE], "Cheapest remedy: a batch "),
    (["plan", "--colour"], "No such option: --colour"),
    (["plan", "--bacth", "3"], "No such option: --bacth. Did you mean '--batch'?"),
    (["simulat"], "No such command 'simulat'. Did you mean 'simulate'?"),
    ([], "Missing command"),
]


@pytest.mark.parametrize(("arguments", "reason"), REFUSALS, ids=[reason[:40] for _, reason in REFUSALS])
def test_a_wrong_request_exits_2_with_its_reason(arguments: list[str], reason: str) -> None:
    result = invoke(*arguments, code=2)
    assert reason in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stdout == ""
    if arguments:
        result = invoke(*arguments, "--json", code=2)
        assert reason in json.loads(result.stdout)["error"]
        assert reason in result.stderr


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "other"}', '{"name": "x"}'])
@pytest.mark.parametrize("option", ["--model-profile", "--hardware-profile"])
def test_a_broken_profile_exits_2_and_is_named(text: str, option: str, tmp_path: Path, profiles: list[str]) -> None:
    (broken := tmp_path / "broken.json").write_text(text, encoding="utf-8")
    arguments = [str(broken) if previous == option else a for previous, a in zip(["", *profiles], profiles, strict=False)]
    assert "broken.json" in parsed("plan", *arguments, code=2)["error"]


def test_a_fault_of_ours_exits_1_with_its_place(monkeypatch: pytest.MonkeyPatch, profiles: list[str]) -> None:
    def broken(model: ModelProfile, hardware: HardwareProfile) -> Plan:
        raise KeyError("layer 7")

    monkeypatch.setattr("lightning_hetero.planners.PLANNERS", {"broken": broken})
    result = invoke("plan", *profiles, "--planner", "broken", "--json", code=1)
    assert json.loads(result.stdout) == {"error": "KeyError: 'layer 7'"}
    assert "in broken" in result.stderr


# ---- words and columns ---------------------------------------------------------------------------


def words_of(command: str) -> str:
    return " ".join(invoke(command, "--help").stdout.split())


def heads(shown: str) -> set[str]:
    """The heads of tables, and the names of the rows in tables of names and values."""
    lines = shown.splitlines()
    above = [lines[i - 1] for i, line in enumerate(lines) if line.strip() and set(line.strip()) == {"─"}]
    named = [line for line in lines if re.match(r" [a-z][\w' ]*?  +\S", line)]
    found = {word for line in above for word in re.split(r"  +", line.strip()) if word}
    return found | {re.split(r"  +", line.strip())[0] for line in named}


@pytest.mark.parametrize(
    "arguments",
    [["plan"], ["plan", "--planner", "all"], ["explain"], ["simulate"], ["inspect"], ["verify"], ["plan-cluster"]],
    ids=["plan", "plan all", "explain", "simulate", "inspect", "verify", "plan-cluster"],
)
def test_help_explains_the_words_of_the_tables(arguments: list[str], plan_file: Path, profiles: list[str], tmp_path: Path) -> None:
    command, *more = arguments
    given = [*more, *profiles] if command == "plan" else [str(plan_file)]
    if command in ("inspect", "verify"):
        torch.save({"state_dict": {"w": torch.zeros(3)}, "global_step": 1, "epoch": 0}, tmp_path / "x.ckpt")
        given = [str(tmp_path / "x.ckpt")]
    elif command == "plan-cluster":
        given = ["2xa100-80+2xrtx4090", *PRESET, "--micro-batches", "4"]
    explained = words_of(command)
    shown = heads(invoke(command, *given).stdout)
    assert len(shown) > 3
    rows = {"path", "tensors", "name", "dtype", "shape", "epoch", "cluster", "devices", "micro-batches"} | set(CLUSTER_PLANNERS)
    rows |= {
        "blocks",
        "count",
        "parameters",
        "planner",
        "plan",
        "time",
        "state",
        "what",
        "block",
        "throughput",
        "against this plan",
    }
    rows |= {
        "of the step",
        "against this plan",
        "step",
        "lane",
        "peak of a step",
        "capacity",
        "device",
        "host",
        "disk",
        "recomputed",
        "tier",
    }
    for word in shown - rows - {block.name for block in MODEL.blocks} - set(PLANNERS):
        assert re.search(rf"\b{re.escape(word.removesuffix(' bytes'))}", explained), word


@pytest.mark.parametrize("command", [*get_command(app).commands])  # type: ignore[attr-defined]
def test_help_fits_80_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    assert [line for line in invoke(command, "--help").stdout.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("command", ["plan", "plan all", "explain", "simulate", "plan-cluster", "doctor"])
def test_tables_fit_80_columns_without_cut_words(
    command: str, plan_file: Path, profiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long texts go on in the next line; what a wide terminal shows is all there."""
    cluster = ["plan-cluster", "2xa100-80", *PRESET, "--micro-batches", "4"]
    calls = {"plan": ["plan", *profiles], "plan all": ["plan", *profiles, "--planner", "all"], "plan-cluster": cluster}
    calls["doctor"] = ["doctor", "--path", str(plan_file.parent)]
    arguments = calls.get(command, [command, str(plan_file)])
    monkeypatch.setattr(doctor, "examine", cache(doctor.examine))  # free memory differs from run to run
    monkeypatch.setenv("COLUMNS", "400")
    wide = invoke(*arguments).stdout
    monkeypatch.setenv("COLUMNS", "80")
    narrow = invoke(*arguments).stdout
    before_plans = re.split(r"\n[^\n]*\(each phase ", wide)[0]  # the narrow list of plans has fewer columns
    words = {word for word in before_plans.split() if len(word) <= 16 and not any(map(str.isdigit, word))}
    assert words - set(narrow.split()) <= {"ms", "µs", "s"}  # times differ from run to run
    assert [line for line in narrow.splitlines() if len(line.rstrip()) > 80] == []
    assert "…" not in narrow.replace(" … ", "")


# ---- the page ------------------------------------------------------------------------------------


PAGE = (Path(__file__).parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")


def test_every_command_and_option_is_documented_and_no_other() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    sections = dict(part.split("\n", 1) for part in PAGE.split("\n## ")[1:])
    assert set(commands) <= set(sections)
    for name, command in commands.items():
        real = {flag for p in command.params for flag in p.opts if flag.startswith("--")} - {"--json", "--help"}
        shared = _documented(sections["The model and the machine"]) if "--hardware-profile" in real else set()
        assert _documented(sections[name]) | shared == real, name


def _documented(section: str) -> set[str]:
    """The options in the first column of the tables."""
    rows = re.findall(r"^\| (`--.*?) \| ", section, re.MULTILINE)
    return set(re.findall(r"--[a-z-]+", "".join(rows)))


def test_documented_planners_are_the_real_ones() -> None:
    from lightning_hetero.planners import PLANNERS

    (row,) = re.findall(r"^\| `--planner NAME` \| (.*) \|$", PAGE, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == {*PLANNERS, "all"}


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (output.seconds(0), "0 s"),
        (output.seconds(123.456), "123 s"),
        (output.seconds(1.2345), "1.23 s"),
        (output.seconds(0.0123), "12.3 ms"),
        (output.seconds(0.5), "500 ms"),
        (output.seconds(45e-6), "45.0 µs"),
        (output.seconds(3e-9), "0.00 µs"),
        (output.count(6.7e9), "6.70 G"),
        (output.count(1.65e14, "FLOP/s"), "165 TFLOP/s"),
        (output.count(12, "tokens/s"), "12 tokens/s"),
        (output.percent(0.123), "12 %"),
        (output.percent(0.0123), "1.2 %"),
        (output.percent(0), "0 %"),
        (output.percent(0.0003), "<0.1 %"),
        (output.count(756.259, "tokens/s"), "756 tokens/s"),
        (output.change(0.9, 1.0), "-10.0 %"),
        (output.change(1.0001, 1.0), "the same"),
    ],
)
def test_numbers_are_written_for_people(text: str, expected: str) -> None:
    assert text == expected


def test_json_has_no_infinity() -> None:
    value = {"k": float("inf"), "tier": Tier.DISK, "path": Path("a"), "rows": (1, float("nan"))}
    assert output.plain(value) == {"k": None, "tier": "disk", "path": "a", "rows": [1, None]}
