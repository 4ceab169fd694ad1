"""Bounds on the time of a step, and the programme that finds them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.holistic import DEVICE, MB, MODEL, OWN_CPU, TIGHT, block_of, model_of
from support.machines import ROOMY

from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.plan import BlockPlan, Saved, Tier, UpdateLane
from lightning_hetero.planners import PLANNERS
from lightning_hetero.planners.holistic.block_choices import placements, policies
from lightning_hetero.planners.holistic.bounds import Matrices, Quantity, SpareMemory, rows, uses
from lightning_hetero.planners.holistic.relaxation import Practice, Relaxation
from lightning_hetero.planners.holistic.segments import segments

# ---- bounds --------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("in_place", "held"), [(0, 20 * MB), (20 * MB, 0)])
def test_frozen_weights_hold_one_slot_on_disk_or_none(in_place: int, held: int) -> None:
    block = replace(MODEL.blocks[1], num_trainable_params=0, in_place_bytes=in_place)
    taken = uses(block, BlockPlan(name="b", weights=Tier.DISK, update=UpdateLane.CPU), MODEL, ROOMY)
    assert taken[Quantity.DISK_HELD] == held


def test_uses_if_the_device_is_the_host_move_nothing() -> None:
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


def test_updates_bound_the_time_after_forward() -> None:
    slow = replace(ROOMY, cpu_update_params_per_s=1e8)  # 0.1 s a block, 0.7 s all; compute takes 0.21 s
    nothing_waits = _bound_s(BlockPlan(name="*"), slow)
    # All updates follow the last block's backward and come before its next forward: its compute,
    # 0.03 s, is beside none of them.
    assert nothing_waits == pytest.approx(0.7 + 0.03)
    last_first = replace(slow, cpu_update_params_per_s=1e9)
    # The first block's gradients, update and weights follow all compute: 2 ms each way, 10 ms
    # between.
    assert _bound_s(BlockPlan(name="*"), last_first) == pytest.approx(7 * 0.03 + 0.014)


def test_contention_makes_two_kinds_of_work_take_longer_than_the_longer() -> None:
    placed = BlockPlan(name="*")
    quiet = _bound_s(placed, replace(OWN_CPU, cpu_update_params_per_s=7e8))
    crowded = _bound_s(
        placed, replace(OWN_CPU, cpu_update_params_per_s=7e8, contention={"compute|update": 2.0, "update|compute": 2.0})
    )
    assert crowded == pytest.approx(7 * 0.03 + 0.1)  # together they are no faster than one after the other
    assert quiet < crowded


# ---- the programme -------------------------------------------------------------------------------


def test_segments_cover_the_model_and_are_short_at_its_ends() -> None:
    found = segments(model_of(20))
    assert [(s.start, s.stop) for s in found] == [(0, 1), (1, 2), (2, 4), (4, 18), (18, 20), (20, 21)]
    uneven = replace(MODEL, blocks=tuple(block_of(f"b{i}", params=MB * (i + 1)) for i in range(5)))
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


def test_the_bound_of_a_machine_without_choice_equals_its_plan() -> None:
    alone = replace(ROOMY, link_h2d_bytes_per_s=0.0, disk_capacity_bytes=0)
    assert Relaxation(MODEL, alone).bound_s() == pytest.approx(7 * 0.031)


def test_the_bound_recomputes_only_as_memory_requires() -> None:
    # 980 MB of weights and state leave 520 MB, 25 MB of them for one block's transients and
    # gradients: 205 MB of 700 MB must go. Of each block 50 MB cost a fifth of its forward.
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
    model = replace(MODEL, blocks=(block_of("layers.0", params=MB, saved=160 * MB),))
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
