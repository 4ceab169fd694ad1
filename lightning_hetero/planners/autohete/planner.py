"""AutoHete: the numbers of blocks to recompute, to offload and to update on the CPU.

Source: "AutoHete: An Automatic and Efficient Heterogeneous Training System for LLMs". The formulas
are in ``formulas.py``, the search is in ``search.py``. What the paper leaves open is marked
[inferred] and discussed in docs/planners/autohete.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from lightning_hetero.errors import ConfigError, PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.lowering import cache_sizes, fitted
from lightning_hetero.lowering.rank_rules import rules_of
from lightning_hetero.planners.autohete.formulas import Costs, Counts, costs, device_bytes, host_bytes, iteration_s
from lightning_hetero.planners.autohete.search import DEEPEST, METHODS, prefetch_depth, relieved
from lightning_hetero.planners.evaluation import evaluated, with_paper_optimum
from lightning_hetero.planners.one_rank import one_rank
from lightning_hetero.units import format_bytes

Method = Literal["exact", "milp"]

_EVALUATIONS = 32  # refusals that lead to another search; most come before anything is simulated


def plan(
    model: ModelProfile,
    hardware: HardwareProfile,
    *,
    method: Method = "exact",
    priority: bool = True,
    updates: Updates = Updates.IN_BACKWARD,
) -> Plan:
    """AutoHete's plan: the fastest counts by eqs. 1 to 6, with the earliest prefetches.

    ``decisions`` has ``checkpoint``, ``offload_params`` and ``offload_optimizer``. Where the device
    is the host there is nothing to offload and activations stay: the first two are 0, and the third
    is how many blocks the CPU threads update during backward.

    The counts are the optimum by the formulas if it fits this runtime too, which holds a few things
    more (gradients, a second block's weights while one is fetched ahead); else they are the optimum
    with less memory, and ``decisions["paper_optimum"]`` says what the optimum was and why it was
    not taken.

    Args:
        model: The model.
        hardware: The machine.
        method: ``"exact"`` searches all counts; ``"milp"`` solves the programme with cvxpy. They
            agree on the time.
        priority: Earlier blocks' gradients and updates first; the next forward begins once its
            first blocks are updated (section 3.3).
        updates: When updates may run: during backward, or only once all gradients are known.

    Raises:
        ConfigError: An unknown method.
        PlanError: Nothing fits; AutoHete has no disk tier.
    """
    if method not in METHODS:
        raise ConfigError(f"method={method!r}; allowed: {list(METHODS)}.")
    model, hardware = one_rank(model, hardware)
    k = costs(model, hardware)
    if k.least_offloaded > k.most_offloaded:
        raise PlanError(
            f"autohete cannot update model {model.name!r} on {hardware.name!r}: cpu_update_params_per_s="
            f"{hardware.cpu_update_params_per_s:g}, device_update_params_per_s={hardware.device_update_params_per_s:g}, "
            f"link_h2d_bytes_per_s={hardware.link_h2d_bytes_per_s:g}, link_d2h_bytes_per_s={hardware.link_d2h_bytes_per_s:g}. "
            f"Measure or give the rates that are 0: an update on the device, or one on the CPU and the links to it."
        )
    if hardware.shared_memory:
        in_place = rules_of(hardware).nearest(_emit(model, k, _in_place(k), priority=priority))
        return evaluated(in_place, model, hardware, updates=updates)
    refusal = first_refusal = optimum = None
    for slots in (2, 1):  # with prefetches, or without if they do not fit
        tight = k
        for _ in range(_EVALUATIONS):
            counts = METHODS[method](tight)
            if counts is None:
                break
            optimum = optimum or rules_of(hardware).nearest(_emit(model, k, counts, priority=priority))
            counts = relieved(tight, counts)
            emitted = rules_of(hardware).nearest(_emit(model, k, counts, priority=priority))
            emitted = fitted(emitted, model.shape(), device=hardware.copies_weights)
            try:
                _check_slots(emitted, slots, model, hardware)
                return with_paper_optimum(evaluated(emitted, model, hardware, updates=updates), optimum, first_refusal)
            except PlanError as error:
                if error.tier not in (Tier.DEVICE, Tier.HOST):
                    raise
                refusal, first_refusal = error, first_refusal or error
            # The runtime needs more than the formulas know of: search for counts that need that
            # much less by the formulas.
            missing = max(refusal.shortfall_bytes, 1)
            if refusal.tier == Tier.DEVICE:
                tight = replace(tight, device_memory_bytes=device_bytes(k, counts) - missing)
            else:
                tight = replace(tight, host_memory_bytes=host_bytes(k, counts.offload_optimizer) - missing)
    raise refusal or _infeasible(model, hardware, k)


def _check_slots(plan: Plan, slots: int, model: ModelProfile, hardware: HardwareProfile) -> None:
    """Refuses a plan that leaves less device memory than ``slots`` of its largest blocks."""
    sizes = [b.weight_bytes for b, row in zip(model.shape().blocks, plan.blocks, strict=True) if row.weights is Tier.HOST]
    if sizes:
        cache_sizes(replace(plan, device_cache_bytes=slots * max(sizes)), model, hardware)


def _in_place(k: Costs) -> Counts:
    """The fastest counts if the device is the host: only the lane of updates can be chosen."""
    candidates = range(k.least_offloaded, min(k.num_blocks, k.most_offloaded) + 1)
    return min(
        (Counts(checkpoint=0, offload_params=0, offload_optimizer=o) for o in candidates),
        key=lambda counts: iteration_s(k, counts),
    )


def _emit(model: ModelProfile, k: Costs, n: Counts, *, priority: bool) -> Plan:
    """The counts as a plan, before it is evaluated."""
    first = k.num_blocks - n.offload_optimizer
    rows = []
    for index, block in enumerate(model.blocks):
        on_cpu, offloaded = index >= first, first <= index < first + n.offload_params
        rows.append(
            BlockPlan(
                name=block.name,
                weights=Tier.HOST if offloaded else Tier.DEVICE,
                state=Tier.HOST if on_cpu else Tier.DEVICE,
                update=UpdateLane.CPU if on_cpu else UpdateLane.DEVICE,
                saved=Saved.RECOMPUTE if index < n.checkpoint else Saved.KEEP,
            )
        )
    return Plan(
        name="autohete",
        blocks=tuple(rows),
        prefetch_depth=prefetch_depth(k, n),
        gradient_depth=min(DEEPEST, max(1, n.offload_optimizer)),  # eq. 2: a place for each
        priority=priority,
        objective_s=iteration_s(k, n),
        decisions={
            "checkpoint": n.checkpoint,
            "offload_params": n.offload_params,
            "offload_optimizer": n.offload_optimizer,
        },
    )


def _infeasible(model: ModelProfile, hardware: HardwareProfile, k: Costs) -> PlanError:
    """Why nothing fits: the host where more of it would do, else the device."""
    blocks, most = k.num_blocks, min(k.num_blocks, k.most_offloaded)
    all_offloaded = (Counts(checkpoint=blocks, offload_params=o, offload_optimizer=o) for o in range(k.least_offloaded, most + 1))
    least = {n.offload_optimizer: device_bytes(k, n) for n in all_offloaded}
    name = f"no plan of autohete fits model {model.name!r} on {hardware.name!r}"
    enough = next((o for o, needed in least.items() if needed <= k.device_memory_bytes), None)
    if enough is not None:
        missing = host_bytes(k, enough) - k.host_memory_bytes
        return PlanError(
            f"{name}: the device can do with the optimizer of {enough} of {blocks} blocks on the host, which needs "
            f"{format_bytes(k.host_memory_bytes + missing)} there; {format_bytes(k.host_memory_bytes)} are allowed, "
            f"{format_bytes(missing)} are missing. Cheapest remedy: a planner that uses the disk, such as 'lohan' or 'holistic'. "
            f"Else raise host_memory by that much.",
            tier=Tier.HOST.value,
            shortfall_bytes=missing,
        )
    missing = min(least.values()) - k.device_memory_bytes
    return PlanError(
        f"{name}: with all that can be offloaded and recomputed the device needs {format_bytes(min(least.values()))}; "
        f"{format_bytes(k.device_memory_bytes)} are allowed, {format_bytes(missing)} are missing. Cheapest remedy: a smaller batch "
        f"or sequence, which shrinks activations; then smaller blocks or a larger device.",
        tier=Tier.DEVICE.value,
        shortfall_bytes=missing,
    )
