from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cli import invoke, parsed
from typer.main import get_command

from lightning_hetero import __version__
from lightning_hetero.cli import doctor, output, planning, profile, reasons, system, timeline
from lightning_hetero.cli.app import app
from lightning_hetero.cli.explain import best_of_both
from lightning_hetero.cli.options import Request, load_plan
from lightning_hetero.cli.planning import Outcome
from lightning_hetero.cli.simulate import last_stalls, longest
from lightning_hetero.errors import ConfigError, PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile, OperatorProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane
from lightning_hetero.ir.schedule import Lane
from lightning_hetero.ir.stalls import op_of_block
from lightning_hetero.ir.trace import Span
from lightning_hetero.planners import PLANNERS
from lightning_hetero.planners.evaluation import simulation
from lightning_hetero.units import GIB, MIB

PRESET = ["--preset-model", "gpt:layers=6,hidden=2048,heads=16", "--batch", "8", "--sequence", "512"]
MACHINE = ["--device", "rtx3090", "--host-memory", "64GiB", "--disk", "980pro"]


def _block(name: str, *, params: int = 20 * 10**6, pinned: bool = False) -> BlockProfile:
    operators = tuple(OperatorProfile(name=f"op{i}", flop=1e9 * (i + 1), bytes=40 * MIB) for i in range(3))
    return BlockProfile(
        name=name,
        num_params=params,
        num_trainable_params=params,
        forward_s=0.010,
        backward_s=0.020,
        forward_flop=1e10,
        activation_bytes=140 * MIB,
        boundary_bytes=20 * MIB,
        transient_bytes=30 * MIB,
        operators=operators,
        pinned=pinned,
    )


MODEL = ModelProfile(
    name="tiny",
    tokens=4096,
    compute_itemsize=2,
    constant_device_bytes=100 * MIB,
    constant_host_bytes=100 * MIB,
    blocks=(_block("embed", pinned=True), *(_block(f"layers.{i}") for i in range(6))),
)
HARDWARE = HardwareProfile(
    name="bench",
    device_memory_bytes=2 * GIB,
    host_memory_bytes=8 * GIB,
    disk_capacity_bytes=100 * GIB,
    device_flop_per_s=1e13,
    link_h2d_bytes_per_s=10e9,
    link_d2h_bytes_per_s=10e9,
    disk_read_bytes_per_s=2e9,
    disk_write_bytes_per_s=1e9,
    disk_duplex=False,
    host_dram_bytes_per_s=50e9,
    cpu_update_params_per_s=1e9,
    device_update_params_per_s=20e9,
    cpu_downcast_params_per_s=4e9,
    source={"link_h2d_bytes_per_s": "measured on a Tuesday"},
    contention={"compute|update": 1.25},
)


@pytest.fixture(autouse=True)
def _own_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test leaves a measurement that later runs on this machine would trust."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist gives its workers the width of a terminal


@pytest.fixture
def profiles(tmp_path: Path) -> list[str]:
    """Options that name the files of a small model and a small machine."""
    model, hardware = tmp_path / "model.json", tmp_path / "hardware.json"
    model.write_text(MODEL.to_json(), encoding="utf-8")
    hardware.write_text(HARDWARE.to_json(), encoding="utf-8")
    return ["--model-profile", str(model), "--hardware-profile", str(hardware)]


@pytest.fixture
def plan_file(tmp_path: Path, profiles: list[str]) -> Path:
    path = tmp_path / "plan.json"
    invoke("plan", *profiles, "--out", path)
    return path


# ---- starting -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], ["torch", "lightning", "cvxpy", "rich", "matplotlib", "numpy", "lightning_hetero.planners"]),
        (["plan", *PRESET, *MACHINE, "--planner", "zero_offload"], ["torch", "lightning", "matplotlib"]),
    ],
    ids=["help", "plan"],
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


def test_the_version_is_that_of_the_package() -> None:
    assert invoke("--version").stdout == f"lightning-hetero {__version__}\n"


# ---- refusals -----------------------------------------------------------------------------------------------------------------

REFUSALS: list[tuple[list[str], str]] = [
    (["plan"], "Got neither of --model-profile and --preset-model"),
    (["plan", *PRESET, "--model-profile", "m.json"], "Got both of --model-profile"),
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
    (["plan", *PRESET[:2], "--batch", "100000", "--sequence", "4096", *MACHINE], "Cheapest remedy: a batch "),
    (["plan", "--colour"], "No such option: --colour"),
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


# ---- plan ---------------------------------------------------------------------------------------------------------------------


def test_plan_prints_one_object_with_the_planners_own_words(profiles: list[str]) -> None:
    from lightning_hetero.planners import PLANNERS

    got = parsed("plan", *profiles, "--planner", "zero_offload")
    plan = PLANNERS["zero_offload"](MODEL, HARDWARE)
    assert got.pop("planning_s") > 0
    assert got == output.plain(
        {"planner": "zero_offload", "objective_s": plan.objective_s, "decisions": plan.decisions, "predicted": plan.predicted}
    )


def test_plan_uses_presets(tmp_path: Path) -> None:
    got = parsed("plan", *PRESET, *MACHINE)
    assert got["planner"] == "holistic"
    assert got["predicted"]["iteration_s"] > 0
    text = invoke("plan", *PRESET, *MACHINE).stdout
    assert "rtx3090, 64.0 GiB host, 980pro" in text
    assert "gpt:layers=6" in text


def test_the_papers_optimum_is_readable_where_the_plan_is_another(tmp_path: Path) -> None:
    model = ["--preset-model", "gpt:layers=4,hidden=5120,heads=40", "--batch", "24", "--sequence", "1024"]
    where = ["--device", "rtx4080", "--host-memory", "256GiB", "--disk", "p5510x12"]
    text = invoke("plan", *model, *where, "--planner", "lohan", "--out", tmp_path / "plan.json").stdout
    paper = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))["decisions"]["paper_optimum"]
    for shown in (text, invoke("explain", tmp_path / "plan.json").stdout):
        words = " ".join(shown.split())
        assert f"paper's optimum {output.seconds(paper['objective_s'])} by the planner's own formula (this plan: " in words
        assert "; case 3 " in words
        assert f"not taken because {paper['reason']}" in words
        assert "paper_optimum" not in shown
        assert "objective_s" not in shown


def test_precision_and_devices_reach_the_profiles() -> None:
    model, hardware = Request(
        preset_model="gpt2", batch=1, sequence=64, precision="32", device="a100-40", host_memory="8GiB", devices=4, link="pcie3"
    ).profiles()
    assert model.compute_itemsize == 4
    assert hardware.world_size == 4
    _, other = Request(preset_model="gpt2", batch=1, sequence=64, device="a100-40", host_memory="8GiB").profiles()
    assert hardware.link_h2d_bytes_per_s < other.link_h2d_bytes_per_s
    _, paper = Request(preset_model="gpt2", batch=1, sequence=64, machine="lohan-rtx4090", host_memory="128GiB").profiles()
    assert paper.host_memory_bytes == 128 * GIB


def test_all_planners_stand_side_by_side_and_those_without_a_plan_say_why(profiles: list[str]) -> None:
    from lightning_hetero.planners import PLANNERS

    got = parsed("plan", *profiles, "--planner", "all")
    assert [row["planner"] for row in got] == list(PLANNERS)
    by_name = {row["planner"]: row for row in got}
    assert "device" in by_name["resident"]["error"]  # 140M parameters at 16 bytes exceed 2 GiB
    assert by_name["resident"]["tier"] == "device"
    assert by_name["resident"]["shortfall_bytes"] > 0
    best = min(row["predicted"]["iteration_s"] for row in got if "predicted" in row)
    assert by_name["holistic"]["predicted"]["iteration_s"] <= best * (1 + 1e-9)
    text = invoke("plan", *profiles, "--planner", "all").stdout
    assert all(name in text for name in PLANNERS)
    assert "no plan" in text


def test_a_narrow_screen_compares_what_fits_it(profiles: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(
        "lightning_hetero.planners.PLANNERS", {name: PLANNERS[name] for name in ("resident", "host", "zero_infinity")}
    )
    shown = invoke("plan", *profiles, "--planner", "all").stdout
    assert max(map(len, shown.splitlines())) <= 80
    (row,) = (line for line in shown.splitlines() if line.startswith(" host "))
    assert len(re.findall(r"[\d.]+ (?:m?s|[MG]iB|B)\b|\d\.\d\d", row)) == 5  # step, x best, device, host, disk


def test_the_fastest_of_all_plans_is_written(profiles: list[str], tmp_path: Path) -> None:
    got = parsed("plan", *profiles, "--planner", "all", "--out", tmp_path / "best.json")
    plan = Plan.load(tmp_path / "best.json")
    assert plan.predicted is not None
    assert plan.predicted.iteration_s == min(row["predicted"]["iteration_s"] for row in got if "predicted" in row)


def test_a_plan_that_nothing_fits_exits_2_with_tier_and_shortfall(tmp_path: Path, profiles: list[str]) -> None:
    small = replace(HARDWARE, device_memory_bytes=50 * MIB)
    Path(profiles[-1]).write_text(small.to_json(), encoding="utf-8")
    got = parsed("plan", *profiles, code=2)
    assert got["tier"] == "device"
    assert got["shortfall_bytes"] > 0
    every = parsed("plan", *profiles, "--planner", "all", "--out", tmp_path / "plan.json", code=2)
    assert "planners finds a plan that fits" in every["error"]
    assert not (tmp_path / "plan.json").exists()


def test_planner_options_are_json_or_text_and_reach_the_planners_that_know_them() -> None:
    assert planning.parse_options(["k=3", "rate=1.5", "mode=fast", "flag=true", "text=a=b"]) == {
        "k": 3,
        "rate": 1.5,
        "mode": "fast",
        "flag": True,
        "text": "a=b",
    }
    calls: dict[str, dict[str, Any]] = {}

    def knows(model: ModelProfile, hardware: HardwareProfile, *, k: int = 1) -> Plan:
        calls["knows"] = {"k": k}
        return Plan(name="knows", blocks=())

    def ignorant(model: ModelProfile, hardware: HardwareProfile) -> Plan:
        calls["ignorant"] = {}
        raise PlanError("too small", tier="host", shortfall_bytes=7)

    planners = {"knows": knows, "ignorant": ignorant}
    found = planning.run(planners, MODEL, HARDWARE, {"k": 3})
    assert calls == {"knows": {"k": 3}, "ignorant": {}}
    assert found[0].plan is not None
    row = found[1].to_json()
    assert (row["error"], row["tier"], row["shortfall_bytes"]) == ("too small", "host", 7)
    with pytest.raises(ConfigError, match=r"unknown planner options \['j'\]; allowed: knows: k; ignorant: none"):
        planning.run(planners, MODEL, HARDWARE, {"j": 1})


def test_an_option_with_few_values_is_one_of_them() -> None:
    chosen: list[Saved] = []

    def choosy(model: ModelProfile, hardware: HardwareProfile, *, saved: Saved = Saved.KEEP) -> Plan:
        chosen.append(saved)
        return Plan(name="choosy", blocks=())

    planning.run({"choosy": choosy}, MODEL, HARDWARE, {"saved": "recompute"})
    assert chosen == [Saved.RECOMPUTE]
    with pytest.raises(ConfigError, match="--option saved=never; allowed: keep, recompute"):
        planning.run({"choosy": choosy}, MODEL, HARDWARE, {"saved": "never"})


# ---- a plan's origin ----------------------------------------------------------------------------------------------------------


def test_a_plan_remembers_its_origin_relative_to_its_file(plan_file: Path, tmp_path: Path) -> None:
    assert Plan.load(plan_file).origin == {"model_profile": "model.json", "hardware_profile": "hardware.json"}
    (moved := tmp_path / "elsewhere").mkdir()
    for name in ("plan.json", "model.json", "hardware.json"):
        (tmp_path / name).rename(moved / name)
    _, request = load_plan(moved / "plan.json", Request())
    assert request.profiles() == (MODEL, HARDWARE)


def test_options_replace_what_the_plan_remembers() -> None:
    kept = Request(preset_model="gpt2", batch=8, sequence=512, device="rtx4090", host_memory="64GiB", disk="980pro")
    assert Request().or_else(kept) == kept
    assert Request(batch=16).or_else(kept) == replace(kept, batch=16)
    assert Request(disk="980prox2").or_else(kept) == replace(kept, disk="980prox2")
    file = Path("m.json")
    assert Request(model_profile=file).or_else(kept) == replace(
        kept, model_profile=file, preset_model=None, batch=None, sequence=None
    )
    assert Request(hardware_profile=file).or_else(kept) == Request(
        preset_model="gpt2", batch=8, sequence=512, hardware_profile=file
    )
    paper = Request(machine="lohan-rtx4090").or_else(kept)
    assert (paper.machine, paper.device, paper.host_memory) == ("lohan-rtx4090", None, "64GiB")
    assert Request(device="rtx3090", host_memory="1GiB").or_else(Request(machine="lohan-rtx4090")).machine is None


@pytest.mark.parametrize("origin", [{"colour": "red"}, {"batch": "8"}, {"device": 7}])
def test_an_origin_that_means_nothing_is_refused(origin: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(Plan(name="mine", blocks=(BlockPlan(name="*"),), origin=origin).to_json(), encoding="utf-8")
    assert "the plan's origin has" in parsed("explain", path, code=2)["error"]


def test_a_plan_without_origin_needs_options(tmp_path: Path, profiles: list[str]) -> None:
    path = tmp_path / "mine.json"
    path.write_text(Plan(name="mine", blocks=(BlockPlan(name="*"),)).to_json(), encoding="utf-8")
    assert "does not name its model" in parsed("simulate", path, code=2)["error"]
    assert parsed("simulate", path, *profiles)["plan"] == "mine"


def test_planning_anew_uses_the_options_that_the_plan_was_made_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, profiles: list[str]
) -> None:
    from lightning_hetero.planners import PLANNERS

    asked: list[tuple[int, str]] = []

    def picky(model: ModelProfile, hardware: HardwareProfile, *, k: int = 1, mode: str = "slow") -> Plan:
        asked.append((k, mode))
        return replace(PLANNERS["zero_offload"](model, hardware), name="picky")

    monkeypatch.setattr("lightning_hetero.planners.PLANNERS", {"picky": picky})
    path = tmp_path / "plan.json"
    invoke("plan", *profiles, "--planner", "picky", "--option", "k=3", "--option", "mode=fast", "--out", path)
    invoke("explain", path)
    assert len(asked) == 6  # once, as it is, and for four changes
    assert set(asked) == {(3, "fast")}


# ---- explain ------------------------------------------------------------------------------------------------------------------


def test_explain_says_what_is_where_why_and_what_else(plan_file: Path) -> None:
    from lightning_hetero.planners import PLANNERS

    got = parsed("explain", plan_file)
    names = [name for group in got["placement"] for name in group["blocks"]]
    assert sorted(names) == sorted(b.name for b in MODEL.blocks)
    assert sum(got["where"]["state"].values()) == 12 * 7 * 20 * 10**6
    assert sum(got["where"]["activations"].values()) == 7 * 140 * MIB
    assert got["tiers"]["device"]["peak_bytes"] <= 2 * GIB
    assert 0 < max(got["lanes"].values()) <= 1 + 1e-9
    influences = got["binding"]["influences"]
    assert influences == sorted(influences, key=lambda i: -i["saved_share"])
    assert {row["planner"] for row in got["runner_ups"]} == set(PLANNERS) - {"holistic"}
    times = [row["predicted"]["iteration_s"] for row in got["runner_ups"] if "predicted" in row]
    assert times == sorted(times)
    assert times[0] >= got["predicted"]["iteration_s"] * (1 - 1e-9)
    changes = {row["change"]: row for row in got["what_ifs"]}
    assert set(changes) == {"as it is, planned anew", "+32 GiB host memory", "+1 SSD", "2x batch", "2x link"}
    iteration_s = got["predicted"]["iteration_s"]
    for change in set(changes) - {"2x batch"}:
        assert changes[change]["predicted"]["iteration_s"] <= iteration_s * (1 + 1e-9), change
    assert changes["2x batch"]["predicted"]["iteration_s"] > iteration_s * 1.1
    assert changes["2x batch"]["tokens"] == 2 * MODEL.tokens
    text = invoke("explain", plan_file).stdout
    for words in ("What is where", "Why not otherwise", "Lanes", "Binding: ", "other planners", "What if (planned by holistic)"):
        assert words in text


def test_a_plan_is_kept_where_the_planner_finds_nothing_better() -> None:
    roomy = replace(HARDWARE, device_memory_bytes=8 * GIB)
    plan = PLANNERS["full_recompute"](MODEL, roomy)
    quicker = replace(roomy, device_update_params_per_s=2 * roomy.device_update_params_per_s)
    scenario = reasons.Scenario(change="quicker", model=MODEL, hardware=quicker)
    nothing = Outcome(planner="x", error=PlanError("no plan"))
    kept = best_of_both(scenario, plan, nothing)
    assert kept.kept
    assert kept.iteration_s < Outcome(planner="x", plan=plan).iteration_s
    faster = Outcome(planner="x", plan=PLANNERS["resident"](MODEL, quicker))
    assert best_of_both(scenario, plan, faster) is faster
    small = replace(scenario, hardware=replace(HARDWARE, device_memory_bytes=GIB // 8))
    assert best_of_both(small, plan, nothing) is nothing


def test_a_plan_of_a_person_is_compared_with_the_default_planners(tmp_path: Path, profiles: list[str]) -> None:
    path = tmp_path / "mine.json"
    rule = BlockPlan(name="*", weights=Tier.HOST, state=Tier.HOST, saved=Saved.RECOMPUTE)
    path.write_text(Plan(name="mine", blocks=(rule,)).to_json(), encoding="utf-8")
    got = parsed("explain", path, *profiles)
    assert got["planner"] == "mine"
    assert got["what_if_planner"] == "holistic"
    assert "holistic" in {row["planner"] for row in got["runner_ups"]}
    kept = next(a for a in got["alternatives"] if a["change"] == "activations: keep all")
    assert kept["iteration_s"] < got["predicted"]["iteration_s"]  # one block less is computed twice


def test_what_does_not_fit_says_how_much_is_missing(profiles: list[str]) -> None:
    rule = BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.HOST, saved=Saved.RECOMPUTE)
    plan = Plan(name="mine", blocks=(rule,)).resolve(b.name for b in MODEL.blocks)
    tight = replace(HARDWARE, device_memory_bytes=_least_device_memory(plan))
    found = {a.change: a for a in reasons.alternatives(plan, MODEL, tight)}
    keep = found["activations: keep all"]
    assert keep.iteration_s is None
    assert keep.tier == "device"
    assert 0 < keep.shortfall_bytes <= 120 * MIB  # what one block's forward would keep more


def _least_device_memory(plan: Plan) -> int:
    """The least memory, by bisection, in which the plan fits."""
    from lightning_hetero.planners.evaluation import evaluated

    low, high = 0, HARDWARE.device_memory_bytes
    while high - low > MIB:
        middle = (low + high) // 2
        try:
            evaluated(plan, MODEL, replace(HARDWARE, device_memory_bytes=middle))
            high = middle
        except PlanError:
            low = middle
    return high


def test_the_slowest_resource_binds() -> None:
    def first(hardware: HardwareProfile, rule: BlockPlan) -> reasons.Influence:
        plan = Plan(name="mine", blocks=(replace(rule, name="embed", weights=Tier.HOST), rule)).resolve(
            b.name for b in MODEL.blocks
        )
        return reasons.influences(plan, MODEL, hardware)[0]

    disk = BlockPlan(name="*", weights=Tier.HOST, state=Tier.DISK)
    host = BlockPlan(name="*", weights=Tier.HOST, state=Tier.HOST)
    slow_disk = first(replace(HARDWARE, disk_read_bytes_per_s=2e8, disk_write_bytes_per_s=1e8), disk)
    assert slow_disk.resource == "disk"
    assert slow_disk.saved_share == pytest.approx(1 - 1 / 1.1, rel=0.1)  # nearly all of the step is the disk's
    assert first(replace(HARDWARE, cpu_update_params_per_s=1e8), host).resource == "CPU updates"
    assert first(replace(HARDWARE, link_d2h_bytes_per_s=1e8), host).resource == "link device → host"
    slow = replace(MODEL, blocks=tuple(replace(b, forward_s=1.0, backward_s=2.0) for b in MODEL.blocks))
    plan = Plan(name="mine", blocks=(host,)).resolve(b.name for b in slow.blocks)
    assert reasons.influences(plan, slow, HARDWARE)[0].resource == "compute"


def test_groups_put_together_what_is_placed_alike() -> None:
    names = ["embed", *(f"layers.{i}" for i in range(6))]
    other = BlockPlan(name="layers.3", state=Tier.DISK)
    plan = Plan(name="mine", blocks=(other, BlockPlan(name="*"))).resolve(names)
    common, single = reasons.groups(plan)
    assert common.names(plan) == "embed … layers.2, layers.4 … layers.5"
    assert single.names(plan) == "layers.3"
    alternating = Plan(
        name="mine",
        blocks=tuple(BlockPlan(name=f"b{i}", update=UpdateLane.DEVICE if i % 2 else UpdateLane.CPU) for i in range(10)),
    )
    assert [g.names(alternating) for g in reasons.groups(alternating)] == ["b0 … b8, with gaps", "b1 … b9, with gaps"]


def test_one_more_drive_is_one_of_the_same_kind() -> None:
    request = Request(device="rtx4090", host_memory="64GiB", disk="980prox2")
    before, after = request.hardware(), reasons.with_one_more_drive(request, request.hardware())
    assert after.disk_read_bytes_per_s == pytest.approx(1.5 * before.disk_read_bytes_per_s)
    assert after.disk_capacity_bytes == pytest.approx(1.5 * before.disk_capacity_bytes)
    none = Request(device="rtx4090", host_memory="64GiB")
    assert none.hardware().disk_read_bytes_per_s == 0
    assert reasons.with_one_more_drive(none, none.hardware()).disk_read_bytes_per_s > 0
    file = Request(hardware_profile=Path("h.json"))
    assert reasons.with_one_more_drive(file, HARDWARE).disk_write_bytes_per_s == 2e9
    bare = replace(HARDWARE, disk_read_bytes_per_s=0.0, disk_write_bytes_per_s=0.0, disk_capacity_bytes=0)
    assert reasons.with_one_more_drive(file, bare).disk_capacity_bytes > 0
    paper = Request(machine="lohan-rtx4090")
    assert reasons.with_one_more_drive(paper, paper.hardware()).disk_capacity_bytes > paper.hardware().disk_capacity_bytes


def test_twice_the_batch_of_a_profile_is_twice_its_work() -> None:
    double = reasons.scaled_batch(MODEL, 2)
    assert double.tokens == 2 * MODEL.tokens
    assert double.blocks[1].activation_bytes == 280 * MIB
    assert double.blocks[1].operators[2].flop == 6e9
    assert double.blocks[1].num_params == MODEL.blocks[1].num_params
    preset = Request(preset_model="gpt2", batch=4, sequence=256, device="rtx4090", host_memory="64GiB")
    model, hardware = preset.profiles()
    found = {s.change: s for s in reasons.scenarios(preset, model, hardware)}
    assert found["2x batch"].model == replace(preset, batch=8).model(hardware)


def test_a_cpu_only_machine_has_no_link_to_widen() -> None:
    shared = replace(HARDWARE, shared_memory=True)
    changes = [s.change for s in reasons.scenarios(Request(hardware_profile=Path("h.json")), MODEL, shared)]
    assert changes == ["+32 GiB host memory", "+1 SSD", "2x batch"]


# ---- simulate -----------------------------------------------------------------------------------------------------------------


def test_simulate_writes_a_chrome_trace_and_a_picture(plan_file: Path, tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "timeline.png"
    got = parsed("simulate", plan_file, "--trace", trace, "--timeline", picture)
    assert got["predicted"] == json.loads(plan_file.read_text(encoding="utf-8"))["predicted"]
    assert got["steady"] is True
    assert sum(row["seconds"] for row in got["stalls"]) == pytest.approx(sum(got["waits_s"].values()))
    assert all(row["waited_for"] for row in got["stalls"])
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert {"compute", "h2d"} <= {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert any(e["name"] == "F layers.5" for e in events)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert picture.stat().st_size > 20_000
    text = invoke("simulate", plan_file, "--timeline", tmp_path / "timeline.svg").stdout
    assert "Lanes" in text
    assert "Wrote the timeline to" in text
    assert "optimizer update" in (tmp_path / "timeline.svg").read_text(encoding="utf-8")


def test_a_plan_that_splits_the_batch_computes_its_parts(tmp_path: Path, profiles: list[str]) -> None:
    rule = BlockPlan(name="*", weights=Tier.DEVICE, saved=Saved.RECOMPUTE)
    times = {}
    for parts in (1, 2):
        path = tmp_path / f"{parts}.json"
        path.write_text(Plan(name="mine", blocks=(rule,), micro_batches=parts).to_json(), encoding="utf-8")
        got = parsed("simulate", path, *profiles)
        times[parts] = got["busy"]["compute"] * got["predicted"]["iteration_s"]
        explained = parsed("explain", path, *profiles)
        assert explained["predicted"] == got["predicted"]
        assert sum(explained["where"]["activations"].values()) == 7 * 140 * MIB // parts
    # The same work in halves; how much of it runs beside updates, which slow it down, differs a little.
    assert times[2] == pytest.approx(times[1], rel=0.02)


def test_a_picture_that_cannot_be_drawn_exits_2(plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Name a .png" in parsed("simulate", plan_file, "--timeline", tmp_path / "timeline.doc", code=2)["error"]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
        refused = parsed("simulate", plan_file, "--timeline", tmp_path / "timeline.png", code=2)["error"]
    assert "needs matplotlib" in refused
    assert "pip install" in refused


def test_a_plan_that_no_longer_fits_exits_2(plan_file: Path, profiles: list[str]) -> None:
    Path(profiles[-1]).write_text(replace(HARDWARE, host_memory_bytes=400 * MIB).to_json(), encoding="utf-8")
    got = parsed("simulate", plan_file, code=2)
    assert got["shortfall_bytes"] > 0


def test_a_picture_shows_the_steady_step_with_what_crosses_its_ends() -> None:
    """Updates outlast backward: what the step finds at its begin is what it leaves at its end."""
    hardware = replace(HARDWARE, cpu_update_params_per_s=4e8)
    plan = planning.planners("zero_infinity")["zero_infinity"](MODEL, hardware)
    plan = replace(plan, priority=True)
    simulated = simulation(plan, MODEL, hardware, keep_trace=True)
    assert simulated.steady
    begin, end = timeline.window(simulated)
    assert end - begin == pytest.approx(simulated.prediction.iteration_s)
    begin, end = begin - 1e-6, end - 1e-6  # what ends exactly as the step does crosses it, too
    lanes = timeline.bars(timeline.spans(simulated), begin, end)
    bars = [(lane, bar) for lane, row in lanes.items() if lane is not Lane.COMPUTE for bar in row]
    found = {(lane, bar.kind, bar.label) for lane, bar in bars if bar.start_s == 0}
    left = {(lane, bar.kind, bar.label) for lane, bar in bars if bar.end_s == end - begin}
    assert found
    assert found == left


def test_the_longest_waits_of_a_step_are_named_with_what_was_done_meanwhile() -> None:
    hardware = replace(HARDWARE, cpu_update_params_per_s=4e8)
    plan = planning.planners("zero_infinity")["zero_infinity"](MODEL, hardware)
    simulated = simulation(plan, MODEL, hardware, keep_trace=True)
    rows = last_stalls(simulated)
    assert sum(row.seconds for row in rows) == pytest.approx(sum(simulated.waits.values()))
    shown = longest(simulated, most=1)
    before, time, waited_for, meanwhile = (str(next(iter(column.cells))) for column in shown.columns)
    assert shown.row_count == 1
    assert before == rows[0].at
    assert time == output.seconds(rows[0].seconds)
    assert waited_for == op_of_block(rows[0].waited_for)
    assert "UPDATE" in meanwhile


def test_bars_of_one_lane_that_overlap_get_their_own_tracks_and_are_cut_to_the_window() -> None:
    def span(name: str, lane: Lane, start: float, end: float) -> Span:
        return Span(step=0, name=name, lane=lane.value, start_s=start, end_s=end)

    spans = [
        span("F layers.0", Lane.COMPUTE, 0.0, 1.0),
        span("wait F layers.1", Lane.COMPUTE, 1.0, 1.5),
        span("RELEASE layers.0", Lane.COMPUTE, 1.2, 1.2),
        span("UPDATE layers.12", Lane.CPU, 0.5, 2.5),
        span("UPDATE layers.3", Lane.CPU, 1.0, 2.0),
        span("FETCH state layers.3", Lane.DISK_READ, 0.0, 0.4),
        span("FETCH layers.4", Lane.DISK_READ, 1.0, 4.0),
    ]
    found = timeline.bars(spans, 0.5, 3.0)
    assert [(b.kind, b.start_s, b.end_s, b.track) for b in found[Lane.COMPUTE]] == [("F", 0.0, 0.5, 0), ("wait", 0.5, 1.0, 0)]
    assert [(b.label, b.track) for b in found[Lane.CPU]] == [("12", 0), ("3", 1)]
    assert [(b.kind, b.end_s) for b in found[Lane.DISK_READ]] == [("FETCH", 2.5)]


# ---- profile ------------------------------------------------------------------------------------------------------------------


def test_profile_shows_every_figure_with_its_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    def measure(**options: Any) -> HardwareProfile:
        asked.append(options)
        return HARDWARE

    monkeypatch.setattr("lightning_hetero.profiling.hardware.measure", measure)
    text = invoke("profile", "--path", tmp_path, "--refresh", "--out", tmp_path / "here.json").stdout
    assert HardwareProfile.load(tmp_path / "here.json") == HARDWARE
    assert "measured on a Tuesday" in text
    assert "compute beside update" in text
    assert HardwareProfile.from_json(json.dumps(parsed("profile"))) == HARDWARE
    assert [(a["path"], a["refresh"]) for a in asked] == [(tmp_path, True), (None, False)]


def test_figures_have_their_units() -> None:
    rows = {name: value for name, value, _ in profile.rows(HARDWARE)}
    assert rows["device memory"] == "2.0 GiB"
    assert rows["disk read"] == "1.9 GiB/s"
    assert rows["cpu update"] == "1.00 Gparams/s"
    assert rows["device"] == "10.0 TFLOP/s"
    assert rows["collective"] == "none"
    assert rows["disk duplex"] == "no"
    assert rows["compute beside update"] == "1.25 x as long"


def test_without_a_machine_the_plan_is_for_this_one(monkeypatch: pytest.MonkeyPatch, profiles: list[str]) -> None:
    monkeypatch.setattr("lightning_hetero.profiling.hardware.measure", lambda: HARDWARE)
    here, named = (parsed("plan", *options, "--planner", "zero_offload") for options in (profiles[:2], profiles))
    assert here["predicted"] == named["predicted"]


# ---- doctor -------------------------------------------------------------------------------------------------------------------


def test_doctor_finds_nothing_wrong_with_a_good_place(tmp_path: Path) -> None:
    report = doctor.examine(tmp_path)
    topics = {"versions", "processor", "native_library", "memory", "huge_pages", "torch", "device", "disk"}
    assert set(report.facts) == topics
    got = parsed("doctor", "--path", tmp_path, code=1 if report.problems else 0)
    assert topics | {"ok", "problems", "notes"} == set(got)
    assert got["ok"] == (not got["problems"])
    assert got["native_library"]["disk_io"] in ("io_uring", "pool")
    assert got["native_library"]["disk_io_reason"]
    assert got["memory"]["total_bytes"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert got["disk"]["path"] == str(tmp_path)
    assert got["disk"]["free_bytes"] > 0
    assert list(tmp_path.iterdir()) == []
    text = invoke("doctor", "--path", tmp_path, code=1 if report.problems else 0).stdout
    assert "instruction set" in text


@pytest.mark.parametrize(("path", "problem"), [("/dev/shm", "host memory"), ("/nowhere", "cannot be looked at")])
def test_doctor_names_what_is_wrong_with_a_place(path: str, problem: str) -> None:
    got = parsed("doctor", "--path", path, code=1)
    assert any(problem in text and path in text for text in got["problems"])
    assert "problem" in invoke("doctor", "--path", path, code=1).stdout


def test_doctor_names_a_missing_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lightning_hetero._native import library

    monkeypatch.setenv(library.LIBRARY_ENV, str(tmp_path / "missing.so"))
    library.functions.cache_clear()
    try:
        got = parsed("doctor", "--path", tmp_path, code=1)
    finally:
        library.functions.cache_clear()
    assert any("missing.so cannot be used" in text for text in got["problems"])


def test_doctor_says_why_io_uring_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lightning_hetero.errors import UnsupportedError

    def backend(wanted: str) -> str:
        if wanted == "io_uring":
            raise UnsupportedError("io_uring_setup: Operation not permitted (a seccomp profile)")
        return "pool"

    monkeypatch.setattr(doctor, "_io_backend", backend)
    report = doctor.examine(tmp_path)
    assert report.facts["native_library"]["disk_io"] == "pool"
    assert "seccomp" in report.facts["native_library"]["disk_io_reason"]
    assert any("threads instead of io_uring" in note for note in report.notes)


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_doctor_warns_of_a_control_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lightning_hetero.store.capacity.available_memory_bytes", lambda: GIB)
    monkeypatch.setattr("lightning_hetero.store.capacity.total_memory_bytes", lambda: 2 * GIB)
    report = doctor.examine(tmp_path)
    assert report.facts["memory"]["control_group_limit_bytes"] == 2 * GIB
    assert any(note.startswith("A control group leaves 1.0 GiB of the ") for note in report.notes)


def test_huge_pages_are_read(tmp_path: Path) -> None:
    files = {
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "proc/meminfo": "MemTotal: 100 kB\nHugePages_Total:       8\nHugePages_Free:        5\nHugepagesize:       2048 kB\n",
    }
    assert system.huge_pages(_write(tmp_path, files)) == {
        "transparent": "madvise",
        "page_bytes": 2 * MIB,
        "reserved": 8,
        "free": 5,
    }
    assert system.huge_pages(tmp_path / "nothing")["transparent"] == "unavailable"


def test_direct_io_is_tried_and_leaves_nothing(tmp_path: Path) -> None:
    error = system.direct_io_error(tmp_path)
    assert isinstance(error, str)
    assert list(tmp_path.iterdir()) == []
    assert system.direct_io_error(tmp_path / "missing")


# ---- the page ----


PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")


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


# ---- numbers ------------------------------------------------------------------------------------------------------------------


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
