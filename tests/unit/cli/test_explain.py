"""`explain`: where everything is, why, and what would be faster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.cli import HARDWARE, MODEL, invoke, parsed

from lightning_hetero.cli import reasons
from lightning_hetero.cli.explain import best_of_both
from lightning_hetero.cli.options import Request
from lightning_hetero.cli.planning import Outcome
from lightning_hetero.errors import PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane
from lightning_hetero.planners import PLANNERS
from lightning_hetero.report.groups import groups
from lightning_hetero.units import GIB, MIB


def test_explain_shows_placement_reasons_and_alternatives(plan_file: Path) -> None:
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
    passes = got["forward_only"]
    assert 0 <= passes["token_s"] <= passes["batch_s"] < got["predicted"]["iteration_s"]
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
    for words in (
        "no backward",
        "a generated token takes at least",
        "What is where",
        "Why not otherwise",
        "Lanes",
        "Binding: ",
        "other planners",
        "What if (planned by holistic)",
    ):
        assert words in text


def test_a_plan_is_kept_if_the_planner_finds_nothing_better() -> None:
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


def test_an_alternative_that_does_not_fit_says_how_much_is_missing(profiles: list[str]) -> None:
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


def test_groups_have_blocks_of_equal_placement() -> None:
    names = ["embed", *(f"layers.{i}" for i in range(6))]
    other = BlockPlan(name="layers.3", state=Tier.DISK)
    plan = Plan(name="mine", blocks=(other, BlockPlan(name="*"))).resolve(names)
    common, single = groups(plan)
    assert common.names(plan) == "embed … layers.2, layers.4 … layers.5"
    assert single.names(plan) == "layers.3"
    alternating = Plan(
        name="mine",
        blocks=tuple(BlockPlan(name=f"b{i}", update=UpdateLane.DEVICE if i % 2 else UpdateLane.CPU) for i in range(10)),
    )
    assert [g.names(alternating) for g in groups(alternating)] == ["b0 … b8, with gaps", "b1 … b9, with gaps"]


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
