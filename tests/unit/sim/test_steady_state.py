"""The steady state of a repeated step, and the effort of finding it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.effort import python_calls
from support.simulations import (
    CPU,
    FAST_CPU,
    GPU,
    HOST_STEP,
    MIB,
    ON_DISK,
    ON_HOST,
    RESIDENT,
    disk_model,
    disk_step,
    make_op,
    model_of,
    plan_of,
    schedule_of,
    simulated,
)

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.plan import Tier
from lightning_hetero.ir.schedule import Lane, OpKind, Payload, StepSignature, Updates
from lightning_hetero.lowering import cache_sizes, lower, steady
from lightning_hetero.sim import simulate

# ---- steady state --------------------------------------------------------------------------------


def test_a_step_that_leaves_all_as_it_found_it_is_reported() -> None:
    """The first step finds all weights up to date; the others wait for what the step before has
    left.
    """
    simulation = simulated(HOST_STEP, plan_of(ON_HOST, ON_HOST), model_of(10, 60), steps=8)
    assert simulation.iterations_s == (7, 10)
    assert simulation.steady
    assert simulation.prediction.iteration_s == 10


def test_one_step_shows_no_steady_state() -> None:
    simulation = simulated(HOST_STEP, plan_of(ON_HOST, ON_HOST), model_of(10, 60), steps=1)
    assert simulation.iterations_s == (7,)
    assert not simulation.steady


def test_steps_that_never_settle_are_averaged_without_the_first() -> None:
    """A copy of 9 s in each step of 6 s that nothing waits for: the lane falls behind for ever."""
    schedule = schedule_of(2, [make_op(OpKind.GRAD, 0, Lane.D2H, 4, Payload.GRADIENTS, num_bytes=90)])
    simulation = simulated(schedule, plan_of(ON_HOST, ON_HOST), model_of(1, 1), steps=5)
    assert simulation.iterations_s == (6, 6, 6, 6, 6)
    assert not simulation.steady
    assert simulation.busy == {"compute": 1, "d2h": 1}  # nothing is copied in the first


def test_steps_that_take_turns_are_averaged_over_their_cycle() -> None:
    """Writes take longer than compute; what of them spills into the next step differs from step to
    step.
    """
    model = model_of(*[2**20] * 8)
    blocks = tuple(replace(b, forward_s=0.01, backward_s=0.02) for b in model.blocks)
    model, plan = replace(model, blocks=blocks), plan_of(*[ON_DISK] * 8)
    hardware = replace(CPU, disk_read_bytes_per_s=2e8, disk_write_bytes_per_s=2e8, cpu_update_params_per_s=8e8)
    signature = StepSignature(order=tuple(range(8)), training=True, updates=Updates.IN_BACKWARD)
    everything = frozenset(range(8))
    schedule = lower(plan, model.shape(), signature, resident=everything, capacity_bytes=32 * MIB)
    simulation = simulated(schedule, plan, model, hardware, staging=40 * MIB, steps=12)
    assert simulation.steady
    *_, a, b, c = simulation.iterations_s
    assert len({a, b, c}) == 3
    assert simulation.prediction.iteration_s == pytest.approx((a + b + c) / 3)
    assert simulation.prediction.iteration_s >= 8 * 12 * 2**20 / 2e8  # what has to be written


def test_the_same_plan_always_gives_the_same_simulation() -> None:
    model, plan = disk_model()
    assert simulated(disk_step(open_at=1), plan, model, FAST_CPU) == simulated(disk_step(open_at=1), plan, model, FAST_CPU)


# ---- refusals ------------------------------------------------------------------------------------


def test_a_plan_that_needs_impossible_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="cpu_update_params_per_s=0"):
        simulated(HOST_STEP, plan_of(ON_HOST, ON_HOST), model_of(10, 20), replace(GPU, cpu_update_params_per_s=0.0))


# ---- effort --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", Tier)
def test_a_step_of_100_blocks_is_simulated_with_little_effort(tier: Tier) -> None:
    model = model_of(*[7_000_000] * 100)
    blocks = tuple(replace(b, forward_s=0.05, backward_s=0.1) for b in model.blocks)
    model = replace(model, blocks=blocks)
    placed = {Tier.DEVICE: RESIDENT, Tier.HOST: ON_HOST, Tier.DISK: ON_DISK}[tier]
    plan, hardware = plan_of(*[placed] * 100), replace(CPU, host_memory_bytes=60 * 2**30, disk_capacity_bytes=2**40)
    hardware = replace(hardware, disk_read_bytes_per_s=2e9, disk_write_bytes_per_s=2e9, cpu_update_params_per_s=1e9)
    space = cache_sizes(replace(plan, host_cache_bytes=2**30), model, hardware)
    schedules = steady(plan, model.shape(), sizes=space)

    steps = len(simulate(schedules, plan, model, hardware, sizes=space).iterations_s)
    assert python_calls(lambda: simulate(schedules, plan, model, hardware, sizes=space)) < 80_000 * steps  # some 40 ms each
