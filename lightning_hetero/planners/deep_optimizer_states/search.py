"""Deep Optimizer States' search: every stride, with as many static residents as the device holds.

Source: "Deep Optimizer States: Towards Scalable Training of Transformer Models Using Interleaved
Offloading", sections 4.1 to 4.3. What the paper leaves open is marked [inferred] and discussed in
docs/planners/deep_optimizer_states.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from lightning_hetero.cost import Rates, Work, backward_s, cpu_update_bytes
from lightning_hetero.errors import PlanError, RateError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.lowering import cache_sizes
from lightning_hetero.lowering.rank_rules import rules_of
from lightning_hetero.planners.deep_optimizer_states.formulas import lanes, strides, update_rates, update_ratio, update_s
from lightning_hetero.planners.evaluation import evaluated


def candidates(model: ModelProfile, hardware: HardwareProfile, *, saved: Saved, updates: Updates) -> list[tuple[float, int | None]]:
    """All strides and none, each with a lower bound of the step's seconds, best first."""
    num_subgroups = sum(1 for b in model.blocks if b.num_trainable_params)
    fewest, most = sorted(_most_residents(model, hardware, stride=s, saved=saved, updates=updates) for s in (1, None))
    found = []
    for stride in (None, *range(1, num_subgroups - fewest + 1)):
        # How many subgroups have room there depends on how many visit it.
        plans = (emit(model, hardware, stride=stride, static_residents=r, saved=saved) for r in range(fewest, most + 1))
        found.append((min(_least_s(plan, model, hardware) for plan in plans), stride))
    return sorted(found, key=lambda candidate: candidate[0])


def _least_s(plan: Plan, model: ModelProfile, hardware: HardwareProfile) -> float:
    """Seconds of compute and of the busiest side of the update phase; infinite without a rate."""
    rates, compute_s = Rates(hardware), 0.0
    on_cpu = on_device = up = 0.0
    for block, row in zip(model.blocks, plan.blocks, strict=True):
        compute_s += block.forward_s + backward_s(block, row)
        if row.update is UpdateLane.CPU:
            on_cpu += block.num_trainable_params
            up += model.weight_bytes(block)
        else:
            on_device += block.num_trainable_params
            up += (row.state is Tier.HOST) * model.state_bytes(block)
    work = Work.CPU_UPDATE if hardware.shared_memory else Work.DEVICE_UPDATE
    try:
        device_s = rates.alone_s(work, cpu_update_bytes(on_device) if hardware.shared_memory else on_device)
        up_s = 0.0 if hardware.shared_memory else rates.alone_s(Work.H2D, up)
        return compute_s + max(rates.alone_s(Work.CPU_UPDATE, cpu_update_bytes(on_cpu)), device_s, up_s)
    except RateError:
        return math.inf


def _most_residents(model: ModelProfile, hardware: HardwareProfile, *, stride: int | None, saved: Saved, updates: Updates) -> int:
    """As many static residents as the device has room for, by what plans need of it."""
    num_subgroups = sum(1 for b in model.blocks if b.num_trainable_params)
    low, high = 0, 0 if hardware.shared_memory or not hardware.device_update_params_per_s else num_subgroups
    while low < high:
        middle = (low + high + 1) // 2
        placed = emit(model, hardware, stride=stride, static_residents=middle, saved=saved)
        low, high = (middle, high) if _fits_device(placed, model, hardware, updates) else (low, middle - 1)
    return low


def with_most_residents(
    model: ModelProfile, hardware: HardwareProfile, *, stride: int | None, saved: Saved, updates: Updates
) -> Plan:
    """The evaluated plan with as many static residents as fit."""
    residents = _most_residents(model, hardware, stride=stride, saved=saved, updates=updates)
    while True:
        try:
            placed = emit(model, hardware, stride=stride, static_residents=residents, saved=saved)
            return evaluated(placed, model, hardware, updates=updates)
        except PlanError as error:
            if error.tier != Tier.DEVICE or not residents:
                raise
            residents -= 1


def _fits_device(placed: Plan, model: ModelProfile, hardware: HardwareProfile, updates: Updates) -> bool:
    try:
        cache_sizes(placed, model, hardware, updates=updates)
    except PlanError as error:
        return error.tier != Tier.DEVICE
    return True


def emit(model: ModelProfile, hardware: HardwareProfile, *, stride: int | None, static_residents: int, saved: Saved) -> Plan:
    """The decisions as a plan, before it is evaluated.

    Args:
        model: The model.
        hardware: The machine.
        stride: Every how many subgroups one is updated on the device.
        static_residents: Subgroups at the end whose state lives there.
        saved: What becomes of the activations of blocks that can be recomputed.
    """
    rates = update_rates(model, hardware)
    k = update_ratio(rates)
    sizes = [b.num_trainable_params / hardware.world_size for b in model.blocks if b.num_trainable_params]
    placed = lanes(len(sizes), stride=stride, static_residents=static_residents)
    tiers = [Tier.HOST] * (len(sizes) - static_residents) + [Tier.DEVICE] * static_residents
    states = iter(zip(tiers, placed, strict=True))
    rows = tuple(_rows(model, states, saved))
    compute_s = sum(b.forward_s + backward_s(b, row) for b, row in zip(model.blocks, rows, strict=True))
    plan = Plan(
        name="deep_optimizer_states",
        blocks=rows,
        update_order=UpdateOrder.AFTER_BACKWARD,  # an update phase follows backward (section 3)
        priority=False,  # the next forward waits for it
        objective_s=compute_s + update_s(rates, sizes, stride=stride, static_residents=static_residents),
        decisions={
            "k": None if math.isinf(k) else k,
            "paper_strides": list(strides(k)),
            "stride": stride,
            "static_residents": static_residents,
        },
    )
    return rules_of(hardware).nearest(plan)


def _rows(model: ModelProfile, states: Iterator[tuple[Tier, UpdateLane]], saved: Saved) -> Iterator[BlockPlan]:
    for block in model.blocks:
        tier, lane = next(states) if block.num_trainable_params else (Tier.DEVICE, UpdateLane.DEVICE)
        kept = Saved.KEEP if block.pinned else saved
        yield BlockPlan(name=block.name, weights=Tier.DEVICE, state=tier, update=lane, saved=kept)
