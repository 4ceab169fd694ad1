"""AutoHete: how many blocks to recompute, to offload the weights of, and to update on the CPU: an integer programme of three.

Source: "AutoHete: An Automatic and Efficient Heterogeneous Training System for LLMs". The formulas are in
``autohete_formulas.py``; what the paper leaves open is marked [inferred] and discussed in docs/planners/autohete.md.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any, Literal

from lightning_hetero.errors import ConfigError, PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.lowering import fitted, rooms
from lightning_hetero.planners.autohete_formulas import Costs, Counts, PerBlock, costs, device_bytes, host_bytes, iteration_s
from lightning_hetero.planners.evaluation import evaluated, with_paper_optimum
from lightning_hetero.units import format_bytes

Method = Literal["exact", "milp"]

_JUDGEMENTS = 32  # refusals that lead to another search; most come before anything is simulated
_DEEPEST = 1024  # what Plan.prefetch_depth allows


def exact(k: Costs) -> Counts | None:
    """The counts of least T_iter that fit, by a search that leaves nothing out; ``None`` if nothing fits.

    One more checkpointed block never makes a step faster: its recomputation costs ``t_fp``, and hides at most as much waiting.
    So for each ``o`` and ``p`` the fewest checkpointed blocks that fit are best, and they become fewer as ``p`` grows: all pairs
    take time quadratic in L. Of equally fast counts the ones that offload least win.
    """
    best: tuple[float, Counts] | None = None
    for o in range(k.least_offloaded, min(k.num_blocks, k.most_offloaded) + 1):
        if host_bytes(k, o) > k.host_memory_bytes:
            break
        c = k.num_blocks
        for p in range(o + 1):
            if device_bytes(k, Counts(checkpoint=c, offload_params=p, offload_optimizer=o)) > k.device_memory_bytes:
                continue
            while c:
                fewer = Counts(checkpoint=c - 1, offload_params=p, offload_optimizer=o)
                if device_bytes(k, fewer) > k.device_memory_bytes:
                    break
                c -= 1
            counts = Counts(checkpoint=c, offload_params=p, offload_optimizer=o)
            seconds = iteration_s(k, counts)
            if best is None or seconds < best[0]:
                best = seconds, counts
    return best[1] if best else None


def relieved(k: Costs, n: Counts) -> Counts:
    """The counts with the weights of further blocks offloaded, for as long as that costs no time by eq. 6.

    Where weights are offloaded at all, memory that is free on the device serves to prefetch them; the formulas see no difference.
    """
    while n.offload_params and n.offload_params < n.offload_optimizer:
        more = replace(n, offload_params=n.offload_params + 1)
        if iteration_s(k, more) > iteration_s(k, n):
            break
        n = more
    return n


def milp(k: Costs) -> Counts | None:
    """The same optimum as an integer programme in cvxpy, solved by HiGHS; ``None`` if nothing fits.

    The paper's switches C, P, O of each block, ordered by insights 1 and 2 and ``P <= O``; its counts are their sums. Blocks in
    both C and P shorten the wait, so that a continuous V below both of them takes their product's value.

    Source: section 3.2.1 (switches), eqs. 1 to 6.
    """
    cp: Any = import_module("cvxpy")  # takes a second, and has no types

    blocks = k.num_blocks
    c, p, o = (cp.Variable(blocks, boolean=True) for _ in range(3))
    v, forward, backward = cp.Variable(blocks, nonneg=True), cp.Variable(), cp.Variable()
    # Bytes and seconds in units in which everything is near 1: solvers' tolerances are absolute.
    size, span = float(k.device_memory_bytes), k.forward_s.sum(0, blocks) + k.backward_s.sum(0, blocks)

    def total(column: PerBlock, switches: Any, unit: float) -> Any:
        return cp.sum(cp.multiply([value / unit for value in column.values], switches))

    device = total(k.boundary_bytes, c, size) + total(k.activation_bytes, 1 - c, size) + total(k.weight_bytes, 1 - p, size)
    device += total(k.state_bytes, 1 - o, size)
    slots = k.activation_bytes.largest + k.weight_bytes.largest + k.constant_device_bytes
    sync = total(k.recomputed_stall_s, v, span) + total(k.stall_s, p - v, span)
    computed = total(k.forward_s, c, span) + total(k.device_update_s, 1 - o, span) + sync
    one_block = k.backward_s[blocks - 1] + k.download_s[blocks - 1]
    constraints = [
        p <= o,
        v <= c,
        v <= p,
        device <= (k.device_memory_bytes - slots) / size,
        total(k.weight_bytes, o, size) + total(k.state_bytes, o, size) <= (k.host_memory_bytes - k.constant_host_bytes) / size,
        cp.sum(o) >= k.least_offloaded,
        cp.sum(o) <= min(blocks, k.most_offloaded),
        forward >= k.forward_s.sum(0, blocks) / span,
        forward >= total(k.upload_s, o, span) + k.forward_s[blocks - 1] / span,
        backward >= k.backward_s.sum(0, blocks) / span + computed,
        backward >= one_block / span + total(k.cpu_update_s, o, span),
    ]
    if blocks > 1:
        constraints += [c[:-1] >= c[1:], o[:-1] <= o[1:], p[1:] <= p[:-1] + 1 - o[:-1]]
    problem = cp.Problem(cp.Minimize(forward + backward), constraints)
    problem.solve(solver=cp.HIGHS, mip_rel_gap=1e-9)
    if problem.status != cp.OPTIMAL:
        return None
    checkpoint, offload_params, offload_optimizer = (round(float(x.value.sum())) for x in (c, p, o))
    return Counts(checkpoint=checkpoint, offload_params=offload_params, offload_optimizer=offload_optimizer)


METHODS = {"exact": exact, "milp": milp}


def prefetch_leads(k: Costs, n: Counts) -> tuple[int, ...]:
    """How many blocks ahead backward can launch each prefetch of offloaded weights, in the order of backward.

    Memory over backward, as eq. 1 counts it: when a block's backward ends, its activations and its offloaded weights are free.
    Every prefetch starts one block ahead, as eq. 4 has it; then, in the order of backward, each is advanced for as long as its
    weights fit from there on, and never past the one before it, since one lane serves them all.

    Source: section 3.2.2, "we will advance a parameter prefetching operation if enough GPU memory is available before it".
    """
    last, first = k.num_blocks, k.num_blocks - n.offload_optimizer
    offloaded = range(first + n.offload_params - 1, first - 1, -1)  # in the order of backward, whose step t runs block last-1-t
    fixed = device_bytes(k, n) - int(k.weight_bytes.largest) - _stored_bytes(k, n, last)
    used = [fixed + _stored_bytes(k, n, last - step) for step in range(last)]
    launched = {block: max(last - 2 - block, 0) for block in offloaded}
    for block, step in launched.items():
        for held in range(step, last - block):
            used[held] += int(k.weight_bytes[block])
    earliest = 0
    for block in offloaded:
        while launched[block] > earliest and used[launched[block] - 1] + k.weight_bytes[block] <= k.device_memory_bytes:
            launched[block] -= 1
            used[launched[block]] += int(k.weight_bytes[block])
        earliest = launched[block]
    return tuple(last - 1 - block - launched[block] for block in offloaded)


def _stored_bytes(k: Costs, n: Counts, blocks: int) -> int:
    """Activations that the first ``blocks`` blocks hold between forward and backward, bytes."""
    checkpointed = min(n.checkpoint, blocks)
    return int(k.boundary_bytes.sum(0, checkpointed) + k.activation_bytes.sum(checkpointed, blocks))


def prefetch_depth(k: Costs, n: Counts) -> int:
    """The depth at which every prefetch of backward fits: the least lead of those that memory keeps from starting with backward."""
    leads = prefetch_leads(k, n)
    top = n.offload_optimizer - n.offload_params  # blocks whose backward runs before that of the first offloaded one
    limited = [lead for index, lead in enumerate(leads) if lead < top + index]
    return min(_DEEPEST, max(1, min(limited, default=max(leads, default=1))))


def plan(
    model: ModelProfile,
    hardware: HardwareProfile,
    *,
    method: Method = "exact",
    priority: bool = True,
    updates: Updates = Updates.IN_BACKWARD,
) -> Plan:
    """AutoHete's plan: the fastest counts by eqs. 1 to 6, backward prefetches as early as device memory allows.

    ``decisions`` has ``checkpoint``, ``offload_params`` and ``offload_optimizer``. Where the device is the host there is nothing to
    offload and activations stay: the first two are 0, and the third is how many blocks the CPU threads update during backward.

    The counts are the optimum by the formulas if it fits this runtime too, which holds a few things more (gradients, a second
    block's weights while one is fetched ahead); else they are the optimum with less memory, and
    ``decisions["paper_optimum"]`` says what the optimum was and why it was not taken.

    Args:
        model: The model.
        hardware: The machine.
        method: ``"exact"`` searches all counts; ``"milp"`` solves the programme with cvxpy. They agree on the time.
        priority: Earlier blocks' gradients and updates first; the next forward begins once its first blocks are updated
            (section 3.3).
        updates: When updates may run: during backward, or only once all gradients are known.

    Raises:
        ConfigError: An unknown method.
        PlanError: Nothing fits; AutoHete has no disk tier.
    """
    if method not in METHODS:
        raise ConfigError(f"method={method!r}; allowed: {list(METHODS)}.")
    k = costs(model, hardware)
    if k.least_offloaded > k.most_offloaded:
        raise PlanError(
            f"autohete cannot update model {model.name!r} on {hardware.name!r}: cpu_update_params_per_s="
            f"{hardware.cpu_update_params_per_s:g}, device_update_params_per_s={hardware.device_update_params_per_s:g}, "
            f"link_h2d_bytes_per_s={hardware.link_h2d_bytes_per_s:g}, link_d2h_bytes_per_s={hardware.link_d2h_bytes_per_s:g}. "
            f"Measure or give the rates that are 0: an update on the device, or one on the CPU and the links to it."
        )
    if hardware.shared_memory:
        return evaluated(_emit(model, k, _in_place(k), priority=priority), model, hardware, updates=updates)
    refusal = first_refusal = optimum = None
    for slots in (2, 1):  # weights on their way: one block's while another's are in use, or if that does not fit no prefetches
        tight = k
        for _ in range(_JUDGEMENTS):
            counts = METHODS[method](tight)
            if counts is None:
                break
            optimum = optimum or _emit(model, k, counts, priority=priority)
            counts = relieved(tight, counts)
            emitted = fitted(_emit(model, k, counts, priority=priority), model.shape(), device=not hardware.shared_memory)
            try:
                _check_slots(emitted, slots, model, hardware)
                return with_paper_optimum(evaluated(emitted, model, hardware, updates=updates), optimum, first_refusal)
            except PlanError as error:
                if error.tier not in (Tier.DEVICE, Tier.HOST):
                    raise
                refusal, first_refusal = error, first_refusal or error
            # The runtime needs more than the formulas know of: search for counts that need that much less by the formulas.
            missing = max(refusal.shortfall_bytes, 1)
            if refusal.tier == Tier.DEVICE:
                tight = replace(tight, device_memory_bytes=device_bytes(k, counts) - missing)
            else:
                tight = replace(tight, host_memory_bytes=host_bytes(k, counts.offload_optimizer) - missing)
    raise refusal or _infeasible(model, hardware, k)


def _check_slots(plan: Plan, slots: int, model: ModelProfile, hardware: HardwareProfile) -> None:
    """Refuses a plan that leaves the device less than that many of its largest offloaded blocks' weights."""
    sizes = [b.weight_bytes for b, row in zip(model.shape().blocks, plan.blocks, strict=True) if row.weights is Tier.HOST]
    if sizes:
        rooms(replace(plan, device_cache_bytes=slots * max(sizes)), model, hardware)


def _in_place(k: Costs) -> Counts:
    """The fastest counts where the device is the host: memory is one, so that nothing but the lane of updates is left to choose."""
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
        gradient_depth=min(_DEEPEST, max(1, n.offload_optimizer)),  # eq. 2: every such block has a place for its gradients
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
