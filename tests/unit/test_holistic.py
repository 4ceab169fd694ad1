from __future__ import annotations

import math
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from support.machines import ROOMY

from lightning_hetero.errors import ConfigError, PlanError
from lightning_hetero.ir.activations import saved_bytes
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile, OperatorProfile
from lightning_hetero.ir.plan import BlockPlan, Saved, Tier, UpdateLane
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.planners import PLANNERS
from lightning_hetero.planners.evaluation import evaluated
from lightning_hetero.planners.holistic import plan
from lightning_hetero.planners.holistic.block_choices import INPUT, placements, policies
from lightning_hetero.planners.holistic.bounds import Matrices, Quantity, SpareMemory, rows, uses
from lightning_hetero.planners.holistic.evaluator import Evaluator
from lightning_hetero.planners.holistic.relaxation import Practice, Relaxation, Relaxed
from lightning_hetero.planners.holistic.rounding import Demotion, rounded, rule
from lightning_hetero.planners.holistic.segments import segments
from lightning_hetero.planners.micro_batches import split

MB, GB = 10**6, 10**9
DEVICE = (Tier.DEVICE, Tier.DEVICE, UpdateLane.DEVICE)
CPU = (Tier.HOST, Tier.HOST, UpdateLane.CPU)


def _block(
    name: str, *, params: int = 10 * MB, pinned: bool = False, forward_s: float = 0.01, saved: int = 100 * MB
) -> BlockProfile:
    """Half of what it saves is the output of one operator that is cheap to repeat, four tenths that of a dear one."""
    return BlockProfile(
        name=name,
        num_params=params,
        num_trainable_params=params,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        forward_flop=100.0,
        activation_bytes=saved,
        boundary_bytes=saved // 10,
        transient_bytes=5 * MB,
        operators=(
            OperatorProfile(name="cheap", flop=20.0, bytes=saved // 2),
            OperatorProfile(name="dear", flop=80.0, bytes=saved * 4 // 10),
        ),
        pinned=pinned,
    )


def _model(layers: int = 6, **changes: object) -> ModelProfile:
    blocks = (_block("embedding", pinned=True), *(_block(f"layers.{i}") for i in range(layers)))
    fields = {
        "name": "m",
        "tokens": 8,
        "compute_itemsize": 2,
        "constant_device_bytes": 0,
        "constant_host_bytes": 0,
        "blocks": blocks,
    }
    return ModelProfile(**(fields | changes))  # type: ignore[arg-type]


MODEL = _model()  # 7 blocks of 20 MB of weights, 20 MB of gradients, 120 MB of state; 700 MB of activations
# Updates on the CPU are slower than compute, so nothing is gained by them where everything fits.
SLOW_CPU = replace(ROOMY, name="slow cpu", cpu_update_params_per_s=1e7)
TIGHT = replace(ROOMY, name="tight", device_memory_bytes=500 * MB)
OWN_CPU = replace(
    ROOMY, name="own cpu", shared_memory=True, link_h2d_bytes_per_s=0.0, link_d2h_bytes_per_s=0.0, device_update_params_per_s=0.0
)


# ---- bounds ------------------------------------------------------------------------------------------------------------------


def test_uses_of_a_resident_block() -> None:
    block = MODEL.blocks[1]
    taken = uses(block, BlockPlan(name="b", weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE), MODEL, ROOMY)
    expected = dict.fromkeys(Quantity, 0.0) | {
        Quantity.COMPUTE_S: 0.03,
        Quantity.DEVICE_UPDATE: 10 * MB,
        Quantity.DEVICE_HELD: 140 * MB,
        Quantity.DEVICE_SAVED: 100 * MB,
        Quantity.DEVICE_GRADIENTS: 20 * MB,
        Quantity.FORWARD_S: 0.01,
    }
    assert dict(zip(Quantity, taken, strict=True)) == pytest.approx(expected)


def test_uses_of_a_block_on_disk_whose_activations_leave() -> None:
    placed = BlockPlan(
        name="b",
        weights=Tier.DISK,
        state=Tier.DISK,
        saved=Saved.SWAP_HOST,
        operators={"cheap": Saved.RECOMPUTE, "dear": Saved.SWAP_DISK},
    )
    taken = uses(MODEL.blocks[1], placed, MODEL, ROOMY, micro_batches=2)
    expected = dict.fromkeys(Quantity, 0.0) | {
        Quantity.COMPUTE_S: 2 * (0.03 + 0.2 * 0.01),  # a fifth of the FLOP is repeated
        Quantity.CPU_UPDATE: 280 * MB,
        Quantity.FRESH: 20 * MB,
        Quantity.PASSED_CPU: 20 * MB,
        Quantity.GRADIENTS: 20 * MB,
        Quantity.SWAPPED: 40 * MB,
        Quantity.SWAPPED_DISK: 40 * MB,
        Quantity.STATE_READ: 120 * MB,
        Quantity.STORED: 140 * MB,
        Quantity.PASSED_DISK: 20 * MB,
        Quantity.DEVICE_SAVED: 10 * MB,
        Quantity.DISK_HELD: 2 * 140 * MB + 40 * MB,
        Quantity.FORWARD_S: 0.01,
    }
    assert dict(zip(Quantity, taken, strict=True)) == pytest.approx(expected)


def test_uses_where_the_device_is_the_host_move_nothing() -> None:
    taken = uses(MODEL.blocks[1], BlockPlan(name="b"), MODEL, OWN_CPU)
    copies = (
        Quantity.FRESH,
        Quantity.PASSED_CPU,
        Quantity.PASSED_DEVICE,
        Quantity.GRADIENTS,
        Quantity.STATE_UP,
        Quantity.STATE_DOWN,
        Quantity.SWAPPED,
    )
    assert not any(taken[use] for use in copies)
    assert taken[Quantity.CPU_UPDATE] == 280 * MB


def _bound_s(placed: BlockPlan, hardware: HardwareProfile, **rooms: float) -> float:
    taken = np.array([uses(b, placed, MODEL, hardware) for b in MODEL.blocks])
    left = np.array([rooms.get(room.name, 0.0) for room in SpareMemory])
    return float(Matrices(rows(MODEL, hardware)).largest(taken[None], left[None])[0])


def test_a_resident_plan_takes_its_compute_and_its_updates() -> None:
    resident = BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE)
    assert _bound_s(resident, ROOMY) == pytest.approx(7 * (0.03 + 0.001))


def test_a_slow_link_bounds_by_the_weights_that_pass_it() -> None:
    slow = replace(ROOMY, link_h2d_bytes_per_s=1e8)
    assert _bound_s(BlockPlan(name="*"), slow) == pytest.approx(2 * 7 * 0.2)  # new weights for forward, again for backward
    cached = _bound_s(BlockPlan(name="*"), slow, PASSED_CPU=60 * MB)  # three blocks stay at the turn to backward
    assert cached == pytest.approx((2 * 7 - 3) * 0.2)


def test_updates_bound_what_follows_forward() -> None:
    slow = replace(ROOMY, cpu_update_params_per_s=1e8)  # 0.1 s a block, 0.7 s all; compute takes 0.21 s
    nothing_waits = _bound_s(BlockPlan(name="*"), slow)
    # All updates follow the last block's backward and come before its next forward: its compute, 0.03 s, is beside none of them.
    assert nothing_waits == pytest.approx(0.7 + 0.03)
    last_first = replace(slow, cpu_update_params_per_s=1e9)
    # The first block's gradients, update and weights follow all compute: 2 ms each way, 10 ms between.
    assert _bound_s(BlockPlan(name="*"), last_first) == pytest.approx(7 * 0.03 + 0.014)


def test_contention_makes_two_kinds_of_work_take_longer_than_the_longer() -> None:
    placed = BlockPlan(name="*")
    quiet = _bound_s(placed, replace(OWN_CPU, cpu_update_params_per_s=7e8))
    crowded = _bound_s(
        placed, replace(OWN_CPU, cpu_update_params_per_s=7e8, contention={"compute|update": 2.0, "update|compute": 2.0})
    )
    assert crowded == pytest.approx(7 * 0.03 + 0.1)  # together they are no faster than one after the other
    assert quiet < crowded


# ---- the programme -----------------------------------------------------------------------------------------------------------


def test_segments_cover_the_model_and_are_short_at_its_ends() -> None:
    found = segments(_model(20))
    assert [(s.start, s.stop) for s in found] == [(0, 1), (1, 2), (2, 4), (4, 18), (18, 20), (20, 21)]
    uneven = replace(MODEL, blocks=tuple(_block(f"b{i}", params=MB * (i + 1)) for i in range(5)))
    assert [len(s) for s in segments(uneven)] == [1] * 5


def test_measured_times_do_not_part_equal_blocks() -> None:
    blocks = tuple(replace(b, forward_s=0.01 * (1 + 0.01 * i)) for i, b in enumerate(MODEL.blocks))
    found = segments(replace(MODEL, blocks=blocks))
    assert len(found) == len(segments(MODEL))
    assert sum(len(s) * s.block.forward_s for s in found) == pytest.approx(sum(b.forward_s for b in blocks))
    assert all(s.least.forward_s <= s.block.forward_s for s in found)


def test_placements_are_those_that_the_machine_can_do() -> None:
    layer, pinned = MODEL.blocks[1], MODEL.blocks[0]
    assert len(placements(layer, ROOMY)) == 10
    assert all(weights is not Tier.DISK for weights, _, _ in placements(pinned, ROOMY))
    no_disk = replace(ROOMY, disk_capacity_bytes=0)
    assert not any(Tier.DISK in (weights, state) for weights, state, _ in placements(layer, no_disk))
    no_link = replace(ROOMY, link_h2d_bytes_per_s=0.0)
    assert placements(layer, no_link) == (DEVICE,)
    assert policies(no_link) == (Saved.KEEP, Saved.RECOMPUTE)
    assert policies(OWN_CPU) == (Saved.KEEP,)
    assert all(weights is not Tier.DEVICE or state is Tier.DEVICE for weights, state, _ in placements(layer, OWN_CPU))
    frozen = replace(layer, num_trainable_params=0)
    assert [weights for weights, _, _ in placements(frozen, ROOMY)] == [Tier.DEVICE, Tier.HOST, Tier.DISK]


def test_the_bound_of_a_machine_that_has_no_choice_is_that_of_its_plan() -> None:
    alone = replace(ROOMY, link_h2d_bytes_per_s=0.0, disk_capacity_bytes=0)
    assert Relaxation(MODEL, alone).bound_s() == pytest.approx(7 * 0.031)


def test_the_bound_recomputes_just_what_memory_asks_for() -> None:
    # 980 MB of weights and state leave 520 MB, 25 MB of them for one block's transients and gradients: 205 MB of 700 MB must go. Of
    # each block 50 MB cost a fifth of its forward.
    alone = replace(ROOMY, device_memory_bytes=1500 * MB, link_h2d_bytes_per_s=0.0, disk_capacity_bytes=0)
    bound = Relaxation(MODEL, alone).bound_s()
    assert bound == pytest.approx(7 * 0.031 + 205 / 50 * 0.2 * 0.01)


def test_the_relaxation_says_how_much_a_tier_lacks() -> None:
    no_disk = replace(TIGHT, disk_capacity_bytes=0, host_memory_bytes=300 * MB)
    assert Relaxation(MODEL, no_disk).bound_s() is None
    found = Relaxation(MODEL, no_disk).lacking(Tier.HOST, Practice())
    assert found is not None
    short, _ = found
    assert Relaxation(MODEL, replace(no_disk, host_memory_bytes=300 * MB + short)).bound_s() is not None
    assert Relaxation(MODEL, replace(no_disk, host_memory_bytes=300 * MB + short - MB)).bound_s() is None


def test_the_bound_lets_state_come_to_the_device_in_the_place_of_activations() -> None:
    model = replace(MODEL, blocks=(_block("layers.0", params=MB, saved=160 * MB),))
    tight = replace(
        ROOMY, device_memory_bytes=180 * MB, host_memory_bytes=50 * MB, disk_capacity_bytes=0, link_h2d_bytes_per_s=1e10
    )
    visiting = PLANNERS["deep_optimizer_states"](model, replace(tight, cpu_update_params_per_s=1e6))
    bound = Relaxation(model, replace(tight, cpu_update_params_per_s=1e6)).bound_s()
    assert {(b.state, b.update) for b in visiting.blocks} == {(Tier.HOST, UpdateLane.DEVICE)}
    assert bound is not None
    assert bound <= visiting.predicted.iteration_s * (1 + 1e-6)


def test_more_of_anything_never_raises_the_bound() -> None:
    least = Relaxation(MODEL, TIGHT).bound_s()
    assert least is not None
    for key in (
        "device_memory_bytes",
        "host_memory_bytes",
        "link_h2d_bytes_per_s",
        "cpu_update_params_per_s",
        "disk_read_bytes_per_s",
    ):
        more = Relaxation(MODEL, replace(TIGHT, **{key: 2 * getattr(TIGHT, key)})).bound_s()  # type: ignore[arg-type]
        assert more is not None
        assert more <= least * (1 + 1e-6), key


# ---- whole blocks ------------------------------------------------------------------------------------------------------------


def _shares(relaxation: Relaxation, share: float) -> Relaxed:
    """A share of all blocks is resident, the others' weights and state are on the host; everything that is saved is kept."""
    shares = []
    for place in range(len(relaxation.segments)):
        mine: dict[str | None, dict[object, float]] = {}
        for column in relaxation.columns:
            if column.segment == place:
                wanted = {DEVICE: share, CPU: 1 - share, Saved.KEEP: 1.0}
                mine.setdefault(column.what, {})[column.choice] = wanted.get(column.choice, 0.0)
        shares.append(mine)
    busy = dict.fromkeys(("compute", "h2d", "d2h", "cpu", "disk_read", "disk_write"), 0.1)
    return Relaxed(seconds=1.0, busy_s=busy, shares=tuple(shares), waiting_bytes=0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.5, 10), (0.25, 5), (1.0, 20)])
def test_rounding_keeps_the_shares_of_a_run(share: float, count: int, grouped: bool) -> None:
    relaxation = Relaxation(_model(20), ROOMY)
    chosen = rounded(_shares(relaxation, share), relaxation.segments, grouped=grouped)
    layers = [choices[None] for choices in chosen[1:]]
    assert layers.count(DEVICE) == count
    if grouped:
        assert layers == [DEVICE] * count + [CPU] * (20 - count)


def test_the_first_block_is_rounded_towards_the_device() -> None:
    relaxation = Relaxation(replace(MODEL, blocks=MODEL.blocks[1:]), ROOMY)  # without the one that is pinned
    assert rounded(_shares(relaxation, 0.3), relaxation.segments, grouped=False)[0][None] == DEVICE
    assert rounded(_shares(relaxation, 0.1), relaxation.segments, grouped=False)[0][None] == CPU


def test_a_rule_says_what_becomes_of_everything() -> None:
    block = MODEL.blocks[1]
    found = rule(block, {None: CPU, "cheap": Saved.RECOMPUTE, "dear": Saved.SWAP_HOST, INPUT: Saved.SWAP_DISK})
    assert (found.weights, found.state, found.update) == CPU
    totals = saved_bytes(block, found)
    assert (totals.kept, totals.to_host, totals.to_disk, totals.recomputed) == (0, 40 * MB, 10 * MB, 50 * MB)
    assert found == BlockPlan(name=block.name, saved=Saved.RECOMPUTE, boundary=Saved.SWAP_DISK, operators={"dear": Saved.SWAP_HOST})


def test_a_rule_does_not_recompute_what_no_operator_accounts_for() -> None:
    block = replace(MODEL.blocks[1], forward_flop=200.0)  # half of it belongs to no operator
    found = rule(block, {None: CPU, "cheap": Saved.RECOMPUTE, "dear": Saved.RECOMPUTE})
    assert found.saved is Saved.KEEP
    assert found.operators == {"cheap": Saved.RECOMPUTE, "dear": Saved.RECOMPUTE}


def test_demotion_frees_what_is_asked_for_and_never_fills_the_device() -> None:
    relaxation = Relaxation(_model(20), ROOMY)
    relaxed = _shares(relaxation, 0.5)
    for tier in (Tier.DEVICE, Tier.HOST):
        chosen = rounded(relaxed, relaxation.segments, grouped=True)
        before = _held(relaxation, chosen)
        assert Demotion(relaxation, relaxed).demote(chosen, tier, 300 * MB)
        after = _held(relaxation, chosen)
        assert before[tier] - after[tier] >= 300 * MB
        assert after[Tier.DEVICE] <= before[Tier.DEVICE]


def test_what_a_full_tier_loses_goes_to_no_other_that_was_full() -> None:
    relaxation = Relaxation(_model(20), ROOMY)
    relaxed = _shares(relaxation, 0.0)
    chosen = rounded(relaxed, relaxation.segments, grouped=True)
    for block in chosen:
        block |= {"cheap": Saved.SWAP_HOST, "dear": Saved.SWAP_DISK}
    demotion = Demotion(relaxation, relaxed)
    assert demotion.demote(chosen, Tier.HOST, 500 * MB)
    before = _held(relaxation, chosen)
    assert demotion.demote(chosen, Tier.DISK, 200 * MB)  # the host would be the cheapest place
    after = _held(relaxation, chosen)
    assert before[Tier.DISK] - after[Tier.DISK] >= 200 * MB
    assert after[Tier.HOST] <= before[Tier.HOST]


def _held(relaxation: Relaxation, chosen: list[dict[str | None, object]]) -> dict[Tier, float]:
    held = dict.fromkeys(Tier, 0.0)
    for column in relaxation.columns:
        segment = relaxation.segments[column.segment]
        count = sum(chosen[i][column.what] == column.choice for i in range(segment.start, segment.stop))
        for tier, size in relaxation.held_bytes(column).items():
            held[tier] += size * count / len(segment)
    return held


def test_an_evaluator_simulates_each_plan_once_and_no_more_than_allowed() -> None:
    evaluator = Evaluator(MODEL, ROOMY, updates=Updates.IN_BACKWARD, evaluations=1)
    first = PLANNERS["host"](MODEL, ROOMY)
    assert evaluator.seconds(first) == evaluator.seconds(replace(first, name="another name")) == first.objective_s
    assert evaluator.evaluations == 1
    other = replace(first, gradient_depth=1)
    assert evaluator.exhausted
    assert evaluator.seconds(other) == float("inf")
    assert evaluator.seconds(other, always=True) < float("inf")


# ---- the planner -------------------------------------------------------------------------------------------------------------


def test_everything_stays_on_the_device_where_it_fits() -> None:
    found = plan(MODEL, SLOW_CPU)
    assert found.name == "holistic"
    assert {(b.weights, b.state, b.update, b.saved) for b in found.blocks} == {(*DEVICE, Saved.KEEP)}
    assert found.decisions["start"] == "resident"
    assert found.objective_s == pytest.approx(7 * 0.031)


def test_resident_may_be_preferred_though_something_is_a_little_faster() -> None:
    fastest = plan(MODEL, ROOMY, prefer_resident=0.0)
    assert fastest.decisions["start"] != "resident"  # the CPU updates some blocks meanwhile
    preferred = plan(MODEL, ROOMY, prefer_resident=0.1)
    assert preferred.decisions["start"] == "resident"
    assert fastest.objective_s is not None
    assert preferred.objective_s is not None
    assert fastest.objective_s < preferred.objective_s < 1.1 * fastest.objective_s


def test_where_the_device_is_the_host_resident_is_preferred_unless_told_otherwise() -> None:
    close = replace(OWN_CPU, cpu_update_params_per_s=1e10, host_dram_bytes_per_s=1e12)  # updates take 7 ms, compute 210 ms
    assert plan(MODEL, close).decisions["start"] == "resident"
    assert plan(MODEL, close, prefer_resident=0.0).decisions["start"] != "resident"


def test_resident_is_preferred_within_the_margin_and_not_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fastest_s, resident_s = plan(MODEL, ROOMY, prefer_resident=0.0).objective_s, PLANNERS["resident"](MODEL, ROOMY).objective_s
    assert fastest_s is not None
    assert resident_s is not None
    gain = resident_s / fastest_s - 1
    assert gain > 0
    for margin, chosen in ((1.01 * gain, True), (0.99 * gain, False)):
        assert (plan(MODEL, ROOMY, prefer_resident=margin).decisions["start"] == "resident") is chosen
        monkeypatch.setattr("lightning_hetero.planners.holistic.planner._MARGIN", margin)
        assert (plan(MODEL, ROOMY).decisions["start"] == "resident") is chosen
    assert plan(MODEL, ROOMY, prefer_resident=math.inf).decisions["start"] == "resident"


@pytest.mark.parametrize(
    "hardware",
    [
        ROOMY,
        TIGHT,
        replace(TIGHT, host_memory_bytes=600 * MB),
        replace(TIGHT, disk_capacity_bytes=0),
        replace(TIGHT, link_h2d_bytes_per_s=1e9, cpu_update_params_per_s=1e8),
        replace(OWN_CPU, host_memory_bytes=1300 * MB),
    ],
)
def test_no_other_planner_is_faster_and_none_beats_the_bound(hardware: HardwareProfile) -> None:
    ours = plan(MODEL, hardware, prefer_resident=0.0)
    assert ours.predicted is not None
    bound = ours.decisions["lower_bound_s"]
    assert ours.decisions["gap"] == pytest.approx(ours.predicted.iteration_s / bound - 1)
    for name, planner in PLANNERS.items():
        if name == "holistic":
            continue
        try:
            other = planner(MODEL, hardware)
        except PlanError:
            continue
        assert other.predicted is not None
        assert ours.predicted.iteration_s <= other.predicted.iteration_s * (1 + 1e-9), name
        assert bound <= other.predicted.iteration_s * (1 + 1e-9), name


@pytest.mark.parametrize("hardware", [ROOMY, TIGHT, replace(OWN_CPU, host_memory_bytes=2 * GB)])
def test_where_updates_wait_for_all_gradients_every_planner_predicts_that(hardware: HardwareProfile) -> None:
    ours = plan(MODEL, hardware, prefer_resident=0.0, updates=Updates.AFTER_VERDICT)
    assert ours.predicted is not None
    waiting = 0
    for name, planner in PLANNERS.items():
        try:
            found = planner(MODEL, hardware, updates=Updates.AFTER_VERDICT)
        except PlanError:
            continue
        assert found.predicted == evaluated(found, MODEL, hardware, updates=Updates.AFTER_VERDICT).predicted, name
        assert ours.predicted.iteration_s <= found.predicted.iteration_s * (1 + 1e-9), name
        with suppress(PlanError):
            waiting += found.predicted.iteration_s > evaluated(found, MODEL, hardware).predicted.iteration_s
    assert waiting >= 2  # of plans whose updates overlap backward otherwise


def test_the_joint_space_beats_all_of_its_parts_where_memory_is_short() -> None:
    ours = plan(_model(20), TIGHT)
    others = []
    for name, planner in PLANNERS.items():
        try:
            others += [planner(_model(20), TIGHT).predicted] if name != "holistic" else []
        except PlanError:
            continue
    assert ours.predicted is not None
    assert ours.predicted.iteration_s < 0.99 * min(p.iteration_s for p in others if p is not None)


def test_decisions_add_up() -> None:
    found = plan(MODEL, TIGHT)
    d = found.decisions
    for key in ("weights", "state", "update"):
        assert sum(d[key].values()) == len(MODEL.blocks)
        assert d[key] == {value: sum(getattr(b, key).value == value for b in found.blocks) for value in d[key]}
    bytes_of_all = sum(d[key] for key in ("kept_bytes", "recomputed_bytes", "swapped_host_bytes", "swapped_disk_bytes"))
    assert bytes_of_all == sum(b.activation_bytes for b in MODEL.blocks)
    assert found.objective_s == found.predicted.iteration_s  # type: ignore[union-attr]
    assert found.decisions["evaluations"] >= 1


def test_planning_is_deterministic() -> None:
    assert plan(MODEL, TIGHT) == plan(MODEL, TIGHT)


def test_planning_is_the_same_in_every_process() -> None:
    script = (
        "from lightning_hetero.profiling import presets; from lightning_hetero.planners import PLANNERS; "
        "machine = presets.machine(device='rtx4090', host_memory='24GiB', disk='p5510'); "
        "model = presets.model('smollm2-1.7b', batch=4, sequence=512, hardware=machine); "
        "print(PLANNERS['holistic'](model, machine).to_json())"
    )
    plans = [
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert plans[0] == plans[1]
    assert "lower_bound_s" in plans[0]


def test_the_search_simulates_no_more_than_it_may() -> None:
    assert plan(_model(12), TIGHT, evaluations=3).decisions["evaluations"] <= 3


def test_a_plan_without_time_is_still_the_best_of_the_others() -> None:
    found = plan(MODEL, TIGHT, seconds=0.0)
    assert found.predicted is not None
    assert found.predicted.iteration_s <= PLANNERS["host"](MODEL, TIGHT).predicted.iteration_s


def test_where_the_device_is_the_host_activations_stay() -> None:
    found = plan(MODEL, replace(OWN_CPU, host_memory_bytes=1300 * MB))
    assert {(b.saved, b.boundary, tuple(b.operators)) for b in found.blocks} == {(Saved.KEEP, Saved.KEEP, ())}
    assert found.micro_batches == 1
    assert Tier.DISK in {b.state for b in found.blocks}


def test_updates_that_wait_for_all_gradients_are_planned_as_such() -> None:
    now = plan(MODEL, OWN_CPU, prefer_resident=0.0)
    later = plan(MODEL, OWN_CPU, prefer_resident=0.0, updates=Updates.AFTER_VERDICT)
    assert now.objective_s is not None
    assert later.objective_s is not None
    assert later.objective_s > now.objective_s


# ---- splitting the batch -----------------------------------------------------------------------------------------------------


def test_a_split_batch_has_the_same_work_in_all() -> None:
    part = split(MODEL, 4)
    assert part.tokens == 2
    assert 4 * sum(b.forward_s for b in part.blocks) == pytest.approx(sum(b.forward_s for b in MODEL.blocks))
    assert part.blocks[0].activation_bytes == 25 * MB
    assert [o.bytes for o in part.blocks[0].operators] == [12_500_000, 10 * MB]
    assert part.num_params == MODEL.num_params
    assert split(MODEL, 1) is MODEL


def test_a_batch_is_split_where_only_that_fits() -> None:
    tight = replace(ROOMY, device_memory_bytes=130 * MB, disk_capacity_bytes=0)  # one block saves 100 MB, its weights pass beside
    with pytest.raises(PlanError, match="micro_batches"):
        plan(MODEL, tight)
    found = plan(MODEL, tight, micro_batches=(1, 2, 4, 8))
    assert found.micro_batches > 1
    assert found.decisions["micro_batches"] == found.micro_batches


def test_a_batch_stays_whole_where_splitting_does_not_help() -> None:
    assert plan(MODEL, SLOW_CPU, micro_batches=(1, 2)).micro_batches == 1


@pytest.mark.parametrize("micro_batches", [(), (0,), (2.0,), (True,), (3,)])
def test_a_split_that_cannot_be_is_refused(micro_batches: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="micro_batches"):
        plan(MODEL, ROOMY, micro_batches=micro_batches)


def test_the_hosts_own_cpu_splits_no_batch() -> None:
    with pytest.raises(ConfigError, match="own CPU splits no batch"):
        plan(MODEL, OWN_CPU, micro_batches=(2,))
    assert plan(MODEL, OWN_CPU, micro_batches=(1, 2)).micro_batches == 1


# ---- nothing fits ------------------------------------------------------------------------------------------------------------


def test_an_error_names_the_tightest_tier_and_what_it_lacks() -> None:
    machine = replace(TIGHT, device_memory_bytes=300 * MB, host_memory_bytes=300 * MB, disk_capacity_bytes=800 * MB)
    with pytest.raises(PlanError, match=r"lacks .* Cheapest remedy: .* more disk; else .* more host memory; else ") as refused:
        plan(MODEL, machine)
    keys = {"disk": "disk_capacity_bytes", "host": "host_memory_bytes", "device": "device_memory_bytes"}
    key, short = keys[refused.value.tier], refused.value.shortfall_bytes
    assert short > 0
    assert plan(MODEL, replace(machine, **{key: getattr(machine, key) + short})).predicted is not None  # type: ignore[arg-type]


def test_an_error_proposes_a_disk_where_there_is_none() -> None:
    machine = replace(
        TIGHT, host_memory_bytes=300 * MB, disk_capacity_bytes=0, disk_read_bytes_per_s=0.0, disk_write_bytes_per_s=0.0
    )
    with pytest.raises(PlanError, match="more disk"):
        plan(MODEL, machine)


def test_an_error_proposes_a_smaller_batch_where_activations_are_too_many() -> None:
    machine = replace(ROOMY, device_memory_bytes=160 * MB)  # the pinned block keeps 100 MB, another one recomputes as much
    with pytest.raises(PlanError, match=r"Cheapest remedy: micro_batches=\(4,\)") as refused:
        plan(MODEL, machine)
    assert refused.value.tier == "device"
    enough = machine.device_memory_bytes + refused.value.shortfall_bytes
    assert plan(MODEL, replace(machine, device_memory_bytes=enough)).predicted is not None
    assert plan(MODEL, machine, micro_batches=(4,)).micro_batches == 4


def test_practice_never_promises_more_than_the_bound() -> None:
    for hardware in (TIGHT, replace(TIGHT, host_memory_bytes=600 * MB)):
        relaxation = Relaxation(MODEL, hardware)
        bound, start = relaxation.bound_s(), relaxation.start(Practice(slots=3, depth=1))
        assert bound is not None
        assert start is not None
        assert start.seconds >= bound * (1 - 1e-6)
