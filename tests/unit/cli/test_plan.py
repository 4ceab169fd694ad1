"""`plan`: what it prints and writes, and the origin that a plan remembers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cli import HARDWARE, MACHINE, MODEL, PRESET, invoke, parsed

from lightning_hetero.cli import output, planning
from lightning_hetero.cli.options import Request, load_plan
from lightning_hetero.errors import ConfigError, PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved
from lightning_hetero.planners import PLANNERS
from lightning_hetero.units import GIB, MIB

# ---- plan ----------------------------------------------------------------------------------------


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


def test_a_narrow_screen_gets_a_narrow_comparison(profiles: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_notation_that_a_refusal_recommends_is_accepted(profiles: list[str]) -> None:
    refused = invoke("plan", *profiles, "--option", "micro_batches=(8,)", code=2).stderr
    (recommended,) = re.findall(r"such as (\[.*\])", refused)
    invoke("plan", *profiles, "--option", f"micro_batches={recommended}", "--option", "evaluations=5")


def test_a_refusal_has_remedies_that_a_person_would_try(tmp_path: Path) -> None:
    """Each one works: a smaller batch, a shorter sequence, adapters or quantized weights."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    card = ["--device", "rtx3090", "--host-memory", "4GiB", "--planner", "resident"]
    model = ["--model", tmp_path, "--sequence", "1024"]
    refused = invoke("plan", *model, "--batch", "64", *card, "--lora", "r=8,targets=q,v", code=2).stderr
    (batch,) = re.findall(r"A smaller batch: --batch (\d+) fits", refused)
    invoke("plan", *model, "--batch", batch, *card, "--lora", "r=8,targets=q,v")
    invoke("plan", *model, "--batch", int(batch) + 1, *card, "--lora", "r=8,targets=q,v", code=2)
    (sequence,) = re.findall(r"A shorter sequence: --sequence (\d+) fits", refused)
    invoke("plan", *model[:2], "--sequence", sequence, "--batch", "64", *card, "--lora", "r=8,targets=q,v")
    wide = [*model, "--batch", "1", "--precision", "32", *card]
    refused = invoke("plan", *wide, "--device", "rtx4060-laptop", code=2).stderr
    (text,) = re.findall(r"(?:Adapters|Quantized frozen weights): (.*?) fits\.", refused)
    invoke("plan", *wide, "--device", "rtx4060-laptop", *text.split())


def test_a_planner_that_leaves_a_tier_unused_is_refused_with_one_that_fits(profiles: list[str]) -> None:
    """More of a tier that the planner does not use would not help."""
    refused = invoke("plan", *profiles, "--planner", "resident", code=2).stderr
    (planner,) = re.findall(r"Another planner: --planner (\w+) fits\.", refused)
    invoke("plan", *profiles, "--planner", planner)
    without_disk = [
        "--preset-model",
        "llama-3-8b",
        "--batch",
        "1",
        "--sequence",
        "128",
        "--device",
        "rtx4090",
        "--host-memory",
        "2GiB",
    ]
    assert "Planner 'holistic' finds none either; it needs" in invoke("plan", *without_disk, "--planner", "host", code=2).stderr


def test_auto_is_named_as_the_planner_that_it_is(profiles: list[str]) -> None:
    refused = invoke("plan", *profiles, "--planner", "auto", code=2).stderr
    assert "is 'holistic'" in refused
    assert "Did you mean" not in refused


def test_seconds_of_another_machine_are_said_to_be_those(profiles: list[str], tmp_path: Path) -> None:
    model = profiles[:2]
    noted = invoke("simulate", *_planned(tmp_path, profiles), *model, "--device", "rtx4090", "--host-memory", "64GiB").stderr
    assert "not scaled to" in noted
    assert "note" not in invoke("simulate", *_planned(tmp_path, profiles)).stderr


def test_a_plan_for_another_model_is_refused_with_remedies_that_a_command_has(tmp_path: Path) -> None:
    rules = (BlockPlan(name="model.layers.9"), BlockPlan(name="*"))
    (tmp_path / "p.json").write_text(Plan(name="mine", blocks=rules).to_json())
    refused = invoke("simulate", tmp_path / "p.json", *PRESET, *MACHINE, code=2).stderr
    assert "take the model that the plan is for" in refused


def _planned(folder: Path, profiles: list[str]) -> list[str]:
    invoke("plan", *profiles, "--planner", "zero_infinity", "--out", folder / "p.json")
    return [str(folder / "p.json")]


def test_an_option_with_few_values_is_one_of_them() -> None:
    chosen: list[Saved] = []

    def choosy(model: ModelProfile, hardware: HardwareProfile, *, saved: Saved = Saved.KEEP) -> Plan:
        chosen.append(saved)
        return Plan(name="choosy", blocks=())

    planning.run({"choosy": choosy}, MODEL, HARDWARE, {"saved": "recompute"})
    assert chosen == [Saved.RECOMPUTE]
    with pytest.raises(ConfigError, match="--option saved=never; allowed: keep, recompute"):
        planning.run({"choosy": choosy}, MODEL, HARDWARE, {"saved": "never"})


# ---- a plan's origin -----------------------------------------------------------------------------


def test_a_plan_remembers_its_origin_relative_to_its_file(plan_file: Path, tmp_path: Path) -> None:
    assert Plan.load(plan_file).origin == {"model_profile": "model.json", "hardware_profile": "hardware.json"}
    (moved := tmp_path / "elsewhere").mkdir()
    for name in ("plan.json", "model.json", "hardware.json"):
        (tmp_path / name).rename(moved / name)
    _, request = load_plan(moved / "plan.json", Request())
    assert request.profiles() == (MODEL, HARDWARE)


def test_options_replace_those_in_the_plan() -> None:
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
