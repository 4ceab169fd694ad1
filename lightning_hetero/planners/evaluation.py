"""Evaluates a plan for a machine: lowers it as the runtime does, checks it, simulates it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_hetero.errors import PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan, Prediction
from lightning_hetero.ir.schedule import Schedule, Updates
from lightning_hetero.ir.step_seconds import StepSeconds
from lightning_hetero.lowering import CacheSizes, cache_sizes, check, fitted, steady, step_signatures
from lightning_hetero.planners.gathering import gathering
from lightning_hetero.planners.one_rank import as_run
from lightning_hetero.sim import Simulation, simulate
from lightning_hetero.units import format_bytes


def simulation(
    plan: Plan,
    model: ModelProfile,
    hardware: HardwareProfile,
    *,
    updates: Updates = Updates.IN_BACKWARD,
    keep_trace: bool = False,
    prove: bool = False,
) -> Simulation:
    """Simulates a plan in steady state; of a machine with several devices, one of its ranks.

    Args:
        plan: The plan; it is resolved and fitted (``lowering.fitted``).
        model: The model's profile.
        hardware: The machine's profile.
        updates: When updates may run: during backward, or only once all gradients are known.
        keep_trace: Keep spans and the timeline of memory.
        prove: Prove the schedules' invariants first.

    Raises:
        PlanError: A tier is too small for the plan; ``RateError`` where the machine has no rate for
            work that it needs.
        ConfigError: The plan does not fit the model.
        ScheduleError: A bug of ours in the lowering, found by ``prove``.
    """
    plan, model, hardware = _as_run(plan, model, hardware)
    space, schedules = _lowered(plan, model, hardware, updates)
    if prove:
        _check(plan, model, space, schedules)
    return simulate(schedules, plan, model, hardware, sizes=space, keep_trace=keep_trace)


def speculation(plan: Plan, model: ModelProfile, hardware: HardwareProfile) -> StepSeconds:
    """Simulates a plan's step with and without speculation.

    Args:
        plan: The plan; patterns are resolved.
        model: The model's profile.
        hardware: The machine's profile.

    Raises:
        PlanError: A tier is too small for it; speculation takes spare memory for weights that no
            file has.
        ConfigError: The plan does not fit the model.
    """
    waiting, kept, redone = (
        simulation(plan, model, hardware, updates=updates).prediction.iteration_s
        for updates in (Updates.AFTER_VERDICT, Updates.SPECULATIVE, Updates.REDONE)
    )
    return StepSeconds(waiting_s=waiting, kept_s=kept, redone_s=redone)


def proved(plan: Plan, model: ModelProfile, hardware: HardwareProfile, *, updates: Updates = Updates.IN_BACKWARD) -> Plan:
    """The resolved plan, after the check of its schedules, without a simulation.

    Raises:
        PlanError: A tier is too small for it.
        ConfigError: The plan does not fit the model.
        ScheduleError: A bug of ours in the lowering.
    """
    plan, model, hardware = _as_run(plan, model, hardware)
    space, schedules = _lowered(plan, model, hardware, updates)
    _check(plan, model, space, schedules)
    return plan


def _as_run(plan: Plan, model: ModelProfile, hardware: HardwareProfile) -> tuple[Plan, ModelProfile, HardwareProfile]:
    """The plan, resolved and fitted, and what one rank has of model and machine."""
    plan = plan.resolve(b.name for b in model.blocks)
    model, hardware = as_run(plan, model, hardware)
    return fitted(gathering(plan, hardware), model.shape(), device=hardware.copies_weights), model, hardware


def _lowered(
    plan: Plan, model: ModelProfile, hardware: HardwareProfile, updates: Updates
) -> tuple[CacheSizes, tuple[Schedule, ...]]:
    """The memory that a fitted plan leaves, and the schedules of one step."""
    space = cache_sizes(plan, model, hardware, updates=updates)
    return space, steady(plan, model.shape(), step_signatures(plan, updates=updates), sizes=space)


def _check(plan: Plan, model: ModelProfile, space: CacheSizes, schedules: Sequence[Schedule]) -> None:
    for schedule in schedules:
        check(schedule, plan, model.shape(), capacity_bytes=space.host_cache_bytes, device_capacity_bytes=space.device_cache_bytes)


def evaluated(plan: Plan, model: ModelProfile, hardware: HardwareProfile, *, updates: Updates = Updates.IN_BACKWARD) -> Plan:
    """The resolved plan with its prediction, after the check of its schedules.

    Raises:
        PlanError: A tier is too small for it; ``RateError`` where the machine has no rate for work
            that it needs.
        ConfigError: The plan does not fit the model.
        ScheduleError: A bug of ours in the lowering.
    """
    plan, model, hardware = _as_run(plan, model, hardware)
    predicted = simulation(plan, model, hardware, updates=updates, prove=True).prediction
    _check_peaks(plan, predicted, hardware)
    return replace(plan, predicted=predicted)


def with_paper_optimum(found: Plan, optimum: Plan | None, refusal: PlanError | None) -> Plan:
    """Adds the optimum of the paper's equations to another plan, and why it was not taken.

    ``decisions["paper_optimum"]`` then has the optimum's ``objective_s``, its decisions, and the
    ``reason``.

    Args:
        found: The plan.
        optimum: The optimum of the equations, as a plan before it is evaluated.
        refusal: Why it was refused; ``None``: it was not.
    """
    if optimum is None or refusal is None:
        return found
    if (optimum.objective_s, optimum.decisions) == (found.objective_s, found.decisions):
        return found
    paper = {"objective_s": optimum.objective_s, **optimum.decisions, "reason": str(refusal)}
    return replace(found, decisions={**found.decisions, "paper_optimum": paper})


def peaks(predicted: Prediction, hardware: HardwareProfile) -> tuple[tuple[str, int, int], ...]:
    """Name, peak and capacity of each tier, in bytes.

    Where device and host have one memory, the host's peak is that of both.
    """
    host, capacity = predicted.host_peak_bytes, hardware.host_memory_bytes
    both = predicted.device_peak_bytes + host if hardware.unified_memory else host
    return (
        ("device", predicted.device_peak_bytes, capacity if hardware.shared_memory else hardware.device_memory_bytes),
        ("host", both, capacity),
        ("disk", predicted.disk_bytes, hardware.disk_capacity_bytes),
    )


def _check_peaks(plan: Plan, predicted: Prediction, hardware: HardwareProfile) -> None:
    """Refuses what exceeds a tier at some moment although its needs and caches fit."""
    remedies = {
        "device": "place weights or state on the host, recompute or swap activations, or use a smaller batch",
        "host": "add host memory, or place state or weights on disk",
        "disk": "add disks, or place state on the host",
    }
    over = [(need - have, tier, need, have) for tier, need, have in peaks(predicted, hardware) if need > have]
    if over:
        short, tier, need, have = max(over)
        raise PlanError(
            f"plan {plan.name!r} needs {format_bytes(need)} of {tier} memory at its peak; {hardware.name!r} has "
            f"{format_bytes(have)}: {format_bytes(short)} too little. To make it fit, {remedies[tier]}.",
            tier=tier,
            shortfall_bytes=short,
        )
