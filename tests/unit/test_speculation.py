"""What speculative updates are worth, by simulation, and what they take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.machines import MB, ROOMY

from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.ir.step_seconds import StepSeconds
from lightning_hetero.lowering.needs import Purpose, needs_of
from lightning_hetero.planners.evaluation import simulation, speculation

OWN_CPU = replace(ROOMY, name="cpu", shared_memory=True, disk_read_bytes_per_s=1e9, disk_write_bytes_per_s=1e9)
LAYERS, PARAMS = 8, 5 * MB


def _block(index: int) -> BlockProfile:
    return BlockProfile(
        name=f"layers.{index}", num_params=PARAMS, num_trainable_params=PARAMS, forward_flop=1e9, forward_s=0.05, backward_s=0.2,
        activation_bytes=MB, boundary_bytes=MB, transient_bytes=MB,
    )  # fmt: skip


MODEL = ModelProfile(
    name="m", tokens=1, compute_itemsize=4, constant_device_bytes=0, constant_host_bytes=0,
    blocks=tuple(_block(i) for i in range(LAYERS)),
)  # fmt: skip
DISK = Plan(name="disk", blocks=(BlockPlan(name="*", weights=Tier.DISK, state=Tier.DISK),))
STATE_ON_DISK = Plan(name="state", blocks=(BlockPlan(name="*", state=Tier.DISK),))


def test_kept_updates_overlap_backward_and_discarded_ones_cost_more_than_waiting() -> None:
    worth = speculation(DISK, MODEL, OWN_CPU)
    unclipped = simulation(DISK, MODEL, OWN_CPU).prediction.iteration_s
    assert worth.kept_s < worth.waiting_s < worth.redone_s
    assert worth.kept_s <= 1.05 * unclipped
    assert 0 < worth.break_even < 1
    assert worth.expected_s(worth.break_even) == pytest.approx(worth.waiting_s)


def test_if_nothing_is_on_disk_there_is_nothing_to_speculate_with() -> None:
    worth = speculation(Plan(name="host", blocks=(BlockPlan(name="*"),)), MODEL, OWN_CPU)
    assert worth.kept_s == worth.redone_s == worth.waiting_s
    assert worth.break_even == 0


@pytest.mark.parametrize("weights", [*Tier])
def test_kept_updates_overlap_backward_beside_a_device_too(weights: Tier) -> None:
    machine = replace(ROOMY, disk_read_bytes_per_s=2e8, disk_write_bytes_per_s=2e8)
    plan = Plan(name="state", blocks=(BlockPlan(name="*", weights=weights, state=Tier.DISK),))
    worth = speculation(plan, MODEL, machine)
    assert worth.kept_s < worth.waiting_s < worth.redone_s
    assert 0 < worth.break_even < 1


def test_gradients_of_speculative_updates_stay_on_the_host_until_the_verdict() -> None:
    plan = DISK.resolve(b.name for b in MODEL.blocks)
    tries, one = (Updates.SPECULATIVE, Updates.REDONE), PARAMS * 4
    every = (Updates.IN_BACKWARD, Updates.AFTER_VERDICT, *tries)
    peaks = {u: simulation(plan, MODEL, ROOMY, updates=u).prediction.host_peak_bytes for u in every}
    needs = {u: needs_of(plan, MODEL, shared_memory=False, updates=u).host[Purpose.GRADIENTS] for u in every}
    for updates in tries:
        assert needs[updates] == needs[Updates.AFTER_VERDICT] == LAYERS * one
        # The last block's leave the device after the verdict, which gives those back that are not
        # needed any more.
        assert peaks[updates] in (peaks[Updates.AFTER_VERDICT], peaks[Updates.AFTER_VERDICT] - one)
        assert peaks[updates] > peaks[Updates.IN_BACKWARD]


@pytest.mark.parametrize(("kept", "redone", "expected"), [(3.0, 4.0, 0.0), (1.0, 2.0, 1.0), (1.0, 5.0, 0.25)])
def test_the_break_even_is_a_share_of_steps(kept: float, redone: float, expected: float) -> None:
    assert StepSeconds(waiting_s=2.0, kept_s=kept, redone_s=redone).break_even == expected


@pytest.mark.parametrize(("plan", "spare"), [(DISK, 0), (STATE_ON_DISK, LAYERS * PARAMS * 4)], ids=["disk", "state"])
def test_weights_that_no_file_has_are_copied(plan: Plan, spare: int) -> None:
    plan = plan.resolve(b.name for b in MODEL.blocks)
    waits, speculates = (needs_of(plan, MODEL, shared_memory=True, updates=u).host for u in (Updates.AFTER_VERDICT, Updates.REDONE))
    assert speculates == {**waits, Purpose.SPARE: spare}
    peaks = [
        simulation(plan, MODEL, OWN_CPU, updates=u).prediction.host_peak_bytes for u in (Updates.AFTER_VERDICT, Updates.REDONE)
    ]
    # The simulator counts what is really copied: not the last block of backward, whose update the
    # verdict precedes.
    assert peaks[1] - peaks[0] <= spare
    assert (peaks[1] > peaks[0]) == (spare > 0)
