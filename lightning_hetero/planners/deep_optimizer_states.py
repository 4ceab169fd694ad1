"""Deep Optimizer States: optimizer state on the host, every ``stride``-th subgroup's update on the device.

Source: "Deep Optimizer States: Towards Scalable Training of Transformer Models Using Interleaved Offloading", sections 4.2 and 4.3.
What the paper leaves open is marked [inferred] and discussed in docs/planners/deep_optimizer_states.md.

[Note: Subgroups]
A subgroup is what is updated at once: here one block with trainable parameters, since that is what a plan places [inferred; eq. 1
does not depend on the size]. Weights and gradients are on the device, as the paper presumes (section 5.3); only state moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from lightning_hetero.cost import Rates, Work, backward_s, cpu_update_bytes
from lightning_hetero.errors import PlanError, RateError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.lowering import rooms
from lightning_hetero.planners.evaluation import evaluated


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRates:
    """What eq. 1 knows of a machine, elements/s. 0: the machine cannot do it; infinity: it takes no time.

    Attributes:
        cpu: Updates on the CPU, ``U_c``.
        device: Updates on the device, ``U_g``.
        downcast: fp32 to 16 bit on the CPU, ``D_c``.
        link: fp32 elements between host and device, each way, ``B``.
        state_words: fp32 words of state an element, moved each way for an update on the device: 3 with a master copy, else 2.
        weight_words: fp32 words of one new weight, moved to the device after an update on the CPU: 1/2 or 1.
    """

    cpu: float
    device: float
    downcast: float
    link: float
    state_words: float = 3.0
    weight_words: float = 0.5


def update_rates(model: ModelProfile, hardware: HardwareProfile) -> UpdateRates:
    """The rates of one of ``world_size`` ranks: CPU rates are those of the machine, which its ranks share [inferred].

    In full precision there is no master copy to move and nothing to downcast. Where the device is the host, nothing moves.
    """
    h = hardware
    return UpdateRates(
        cpu=h.cpu_update_params_per_s / h.world_size,
        device=h.device_update_params_per_s,
        downcast=h.cpu_downcast_params_per_s / h.world_size if model.compute_itemsize == 2 else math.inf,
        link=math.inf if h.shared_memory else h.link_h2d_bytes_per_s / 4,
        state_words=model.state_itemsize / 4,
        weight_words=model.compute_itemsize / 4,
    )


def update_ratio(rates: UpdateRates) -> float:
    """``k``, the CPU updates for each device update that keep both sides and the link busy (eq. 1).

    Infinite where device updates do not pay: the link cannot even follow the CPU's updates (a denominator of 0 or less), or there
    is no link or no update on the device [inferred]. 0 where the CPU cannot update.
    """
    if not rates.link or not rates.device:
        return math.inf
    if not rates.cpu or not rates.downcast:
        return 0.0
    spared = 1 / rates.cpu + 1 / rates.downcast - rates.weight_words / rates.link
    return (rates.state_words / rates.link + 1 / rates.device) / spared if spared > 0 else math.inf


def strides(k: float) -> tuple[int | None, ...]:
    """The paper's strides: ``k`` read as the stride of Algorithm 1 and as the ratio of eq. 1, rounded both ways [inferred].

    A ratio of ``k`` CPU updates for each device update is a stride of ``k + 1``. ``None`` is the infinite stride.
    """
    if math.isinf(k):
        return (None,)
    whole = {math.floor(k), math.ceil(k)}
    return tuple(sorted(s for s in whole | {w + 1 for w in whole} if s >= 1))


def one_rank(model: ModelProfile, hardware: HardwareProfile) -> tuple[ModelProfile, HardwareProfile]:
    """What one of ``world_size`` ranks sees: its share of what is updated, and of the host; a device and a link of its own."""
    world = hardware.world_size
    if world == 1:
        return model, hardware
    blocks = (replace(b, num_trainable_params=-(-b.num_trainable_params // world)) for b in model.blocks)
    shared = ("cpu_update_params_per_s", "cpu_downcast_params_per_s", "host_dram_bytes_per_s")
    rates = {key: getattr(hardware, key) / world for key in shared}
    rank = replace(hardware, **rates, host_memory_bytes=hardware.host_memory_bytes // world, world_size=1)
    return replace(model, blocks=tuple(blocks)), rank


def lanes(num_subgroups: int, *, stride: int | None, static_residents: int) -> tuple[UpdateLane, ...]:
    """Where each subgroup is updated (Algorithm 1, line 4); the last ``static_residents`` live on the device (section 4.1)."""

    def on_device(i: int) -> bool:
        return i >= num_subgroups - static_residents or (stride is not None and (i + 1) % stride == 0)

    return tuple(UpdateLane.DEVICE if on_device(i) else UpdateLane.CPU for i in range(num_subgroups))


def update_s(rates: UpdateRates, sizes: Sequence[float], *, stride: int | None, static_residents: int) -> float:
    """Seconds of the update phase: both sides of eq. 1, summed over all subgroups; the slower one decides.

    Args:
        rates: Those of one rank.
        sizes: Elements that it has of each subgroup.
        stride: Every how many subgroups one is updated on the device.
        static_residents: Subgroups at the end whose state lives there.
    """
    placed = lanes(len(sizes), stride=stride, static_residents=static_residents)
    moving = len(sizes) - static_residents
    resident = sum(sizes[moving:])
    visiting = sum(s for s, lane in zip(sizes[:moving], placed, strict=False) if lane is UpdateLane.DEVICE)
    on_cpu = sum(sizes) - resident - visiting
    cpu_s = _seconds(on_cpu, rates.cpu) + _seconds(on_cpu, rates.downcast)
    link_s = _seconds(rates.state_words * visiting + rates.weight_words * on_cpu, rates.link)
    return max(cpu_s, link_s + _seconds(visiting + resident, rates.device))


def _seconds(amount: float, rate: float) -> float:
    return 0.0 if not amount else amount / rate if rate else math.inf


def plan(model: ModelProfile, hardware: HardwareProfile, *, updates: Updates = Updates.IN_BACKWARD) -> Plan:
    """The plan whose stride is the best by simulation, of all strides and none, with as many static residents as the device holds.

    Activations stay on the device if they fit, else they are recomputed. ``decisions`` are ``k``, ``stride`` (``None``: no subgroup
    visits the device), ``static_residents`` and ``paper_strides``, those that eq. 1 names; ``k`` is ``None`` where it is infinite.
    Formula and simulation are those of one rank (:func:`one_rank`). Where the device is the host's own CPU, state has but one
    place: nothing is a static resident there, and the stride only says which updates the compute lane runs.

    Args:
        model: The model.
        hardware: The machine.
        updates: When updates may run: during backward, or only once all gradients are known.

    Raises:
        PlanError: Weights, gradients and activations do not fit the device, or the state does not fit the host.
    """
    model, hardware = one_rank(model, hardware)
    refusal: PlanError | None = None
    for saved in (Saved.KEEP,) if hardware.shared_memory else (Saved.KEEP, Saved.RECOMPUTE):
        best: Plan | None = None
        for least_s, stride in _candidates(model, hardware, saved=saved, updates=updates):
            if best is not None and least_s >= _iteration_s(best):
                break
            try:
                found = _with_most_residents(model, hardware, stride=stride, saved=saved, updates=updates)
            except PlanError as error:
                refusal = error
                continue
            if best is None or _iteration_s(found) < _iteration_s(best):
                best = found
        if best is not None:
            return _beside_paper(best, model, hardware, saved=saved, updates=updates)
    assert refusal is not None
    raise PlanError(
        f"deep_optimizer_states keeps all weights and gradients on the device and the state on the host. {refusal} A planner that "
        f"offloads weights too ('protrain', 'holistic') needs less of the device, one with a disk tier less of the host.",
        tier=refusal.tier,
        shortfall_bytes=refusal.shortfall_bytes,
    )


def _iteration_s(judged_plan: Plan) -> float:
    assert judged_plan.predicted is not None
    return judged_plan.predicted.iteration_s


def _beside_paper(found: Plan, model: ModelProfile, hardware: HardwareProfile, *, saved: Saved, updates: Updates) -> Plan:
    """The plan and, where the simulator takes another stride than eq. 1 names, what the best of those comes to."""
    named = strides(update_ratio(update_rates(model, hardware)))
    if found.decisions["stride"] in named:
        return found
    plans = []
    for stride in named:
        with suppress(PlanError):
            plans.append(_with_most_residents(model, hardware, stride=stride, saved=saved, updates=updates))
    if not plans:
        return found
    optimum = min(plans, key=lambda plan: plan.objective_s or 0.0)
    seconds = f"{_iteration_s(optimum):.4g} s, of this plan {_iteration_s(found):.4g} s"
    paper = {"objective_s": optimum.objective_s, "stride": optimum.decisions["stride"], "reason": f"simulated step {seconds}"}
    return replace(found, decisions={**found.decisions, "paper_optimum": paper})


def _candidates(
    model: ModelProfile, hardware: HardwareProfile, *, saved: Saved, updates: Updates
) -> list[tuple[float, int | None]]:
    """None and all strides that differ from it, each with the least seconds of a step, those that may be the fastest first."""
    num_subgroups = sum(1 for b in model.blocks if b.num_trainable_params)
    fewest, most = sorted(_most_residents(model, hardware, stride=s, saved=saved, updates=updates) for s in (1, None))
    found = []
    for stride in (None, *range(1, num_subgroups - fewest + 1)):
        # How many subgroups have room there depends on how many visit it.
        plans = (emit(model, hardware, stride=stride, static_residents=r, saved=saved) for r in range(fewest, most + 1))
        found.append((min(_least_s(plan, model, hardware) for plan in plans), stride))
    return sorted(found, key=lambda candidate: candidate[0])


def _least_s(plan: Plan, model: ModelProfile, hardware: HardwareProfile) -> float:
    """Compute, and after it the update phase, which takes as long as its busiest side; infinite without a rate for it."""
    rates, compute_s = Rates(hardware), 0.0
    on_cpu = on_device = up = 0.0
    for block, row in zip(model.blocks, plan.blocks, strict=True):
        compute_s += block.forward_s + backward_s(block, row)
        if row.update is UpdateLane.CPU:
            on_cpu += block.num_trainable_params
            up += block.num_params * model.compute_itemsize
        else:
            on_device += block.num_trainable_params
            up += (row.state is Tier.HOST) * block.num_trainable_params * model.state_itemsize
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


def _with_most_residents(
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


def _fits_device(unjudged: Plan, model: ModelProfile, hardware: HardwareProfile, updates: Updates) -> bool:
    try:
        rooms(unjudged, model, hardware, updates=updates)
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
    sizes = [b.num_trainable_params / hardware.world_size for b in model.blocks if b.num_trainable_params]  # one rank's share
    placed = lanes(len(sizes), stride=stride, static_residents=static_residents)
    tiers = [Tier.HOST] * (len(sizes) - static_residents) + [Tier.DEVICE] * static_residents
    states = iter(zip(tiers, placed, strict=True))
    rows = tuple(_rows(model, states, saved))
    compute_s = sum(b.forward_s + backward_s(b, row) for b, row in zip(model.blocks, rows, strict=True))
    return Plan(
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


def _rows(model: ModelProfile, states: Iterator[tuple[Tier, UpdateLane]], saved: Saved) -> Iterator[BlockPlan]:
    for block in model.blocks:
        tier, lane = next(states) if block.num_trainable_params else (Tier.DEVICE, UpdateLane.DEVICE)
        kept = Saved.KEEP if block.pinned else saved
        yield BlockPlan(name=block.name, weights=Tier.DEVICE, state=tier, update=lane, saved=kept)
