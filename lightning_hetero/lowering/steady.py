"""The schedules of one optimizer step that follows others like it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.schedule import Schedule, StepSignature, Updates
from lightning_hetero.lowering.cache_sizes import CacheSizes, DeviceRoom
from lightning_hetero.lowering.lower import lower

_STEPS = 8


def step_signatures(plan: Plan, *, updates: Updates = Updates.IN_BACKWARD) -> tuple[StepSignature, ...]:
    """The micro-batches of one step of a model that uses its blocks once, in order.

    Args:
        plan: The resolved plan.
        updates: When updates are issued.
    """
    last = StepSignature(order=tuple(range(len(plan.blocks))), training=True, updates=updates)
    return (replace(last, updates=Updates.NONE),) * (plan.micro_batches - 1) + (last,)


def steady(
    plan: Plan, model: ModelShape, signatures: Sequence[StepSignature] | None = None, *, sizes: CacheSizes
) -> tuple[Schedule, ...]:
    """Lowers the micro-batches of one optimizer step in steady state.

    Args:
        plan: The resolved plan.
        model: The blocks' sizes.
        signatures: The micro-batches; ``None``: those of :func:`step_signatures`.
        sizes: Memory for what comes and goes.

    Returns:
        One schedule per micro-batch; each begins with what the one before leaves, the first with
        what the last leaves. Where two steps take turns, it is one of them.

    Raises:
        ConfigError: As for :func:`lower`.
        OutOfMemoryBudgetError: As for :func:`lower`.
    """
    signatures = step_signatures(plan) if signatures is None else signatures
    resident, held = frozenset[int](), frozenset[int]()
    schedules: list[Schedule] = []
    for _ in range(_STEPS):
        schedules = []
        for signature in signatures:
            room = None
            if sizes.device_cache_bytes is not None:
                room = DeviceRoom(
                    resident=held,
                    capacity_bytes=sizes.device_cache_bytes,
                    ranks=sizes.ranks,
                    shared_memory=sizes.shared_memory,
                    gathers_in_place=sizes.gathers_in_place,
                )
            capacity = sizes.host_cache_bytes
            schedules.append(lower(plan, model, signature, resident=resident, capacity_bytes=capacity, device=room))
            resident, held = schedules[-1].resident_after, schedules[-1].device_after
        if (resident, held) == (schedules[0].resident_before, schedules[0].device_before):
            break
    return tuple(schedules)
