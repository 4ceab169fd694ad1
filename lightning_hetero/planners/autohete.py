"""AutoHete: how many blocks to recompute, to offload the weights of, and to update on the CPU: an integer programme of three.

Source: "AutoHete: An Automatic and Efficient Heterogeneous Training System for LLMs". What the paper leaves open is marked
[inferred] and discussed in docs/planners/autohete.md.

[Note: Which blocks]
Checkpointing goes to the first ``c`` blocks (insight 1), the CPU optimizer to the last ``o`` (insight 2). Only a block whose
optimizer runs on the CPU can have its weights offloaded (``p <= o``), so these are the first ``p`` of the last ``o`` [inferred].
Blocks that are both checkpointed and parameter-offloaded are then ``v = min(p, max(0, c - (L - o)))``: a function of all three
counts, as the paper says it is (docs/adr/0006-autohete-blocks-in-both-sets.md).

[Note: Blocks that differ]
Where the paper multiplies a count by a block's figure, the sum over those blocks stands here. Where it adds one more block's memory
(``L - c + 1``), the largest block's stands; where it adds one block's time (``t_fp``, ``t_bp + t_d2h``), the last block's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from itertools import accumulate
from typing import Any, Literal

from lightning_hetero.errors import ConfigError, PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.lowering import fitted, rooms
from lightning_hetero.planners.judge import judged
from lightning_hetero.units import format_bytes

Method = Literal["exact", "milp"]

_JUDGEMENTS = 32  # refusals that lead to another search; most come before anything is simulated
_DEEPEST = 1024  # what Plan.prefetch_depth allows


class PerBlock:
    """One figure per block in the order of forward, and the sum over any run of blocks in constant time.

    Args:
        values: The figures.
    """

    def __init__(self, values: Iterable[float]) -> None:
        self.values = tuple(values)
        self.largest = max(self.values)
        self._ends = tuple(accumulate(self.values, initial=0))

    def sum(self, start: int, stop: int) -> float:
        """Sum over blocks ``start`` to ``stop - 1``."""
        return self._ends[stop] - self._ends[start]

    def __getitem__(self, index: int) -> float:
        return self.values[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The three decisions.

    Attributes:
        checkpoint: c, blocks that are recomputed in backward.
        offload_params: p, blocks whose weights leave the device between uses.
        offload_optimizer: o, blocks that the CPU updates.
    """

    checkpoint: int
    offload_params: int
    offload_optimizer: int


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The symbols of equations 1 to 6.

    Attributes:
        forward_s: t_fp, seconds.
        backward_s: t_bp, seconds.
        upload_s: t_h2d, seconds for a block's weights.
        download_s: t_d2h, seconds for a block's gradients.
        cpu_update_s: t_cpu, seconds.
        device_update_s: t_gpu, seconds.
        weight_bytes: 2 M_p.
        state_bytes: 12 M_p.
        activation_bytes: 2 M_a.
        boundary_bytes: 2 M_a', what a checkpointed block still saves.
        constant_device_bytes: M_gc.
        constant_host_bytes: M_cc.
        device_memory_bytes: M_gpu.
        host_memory_bytes: M_cpu.
        least_offloaded: Fewest blocks that the CPU must update: all that are trained, where the device cannot.
        most_offloaded: Most blocks that the CPU can update: none, where it or the link cannot.
    """

    forward_s: PerBlock
    backward_s: PerBlock
    upload_s: PerBlock
    download_s: PerBlock
    cpu_update_s: PerBlock
    device_update_s: PerBlock
    weight_bytes: PerBlock
    state_bytes: PerBlock
    activation_bytes: PerBlock
    boundary_bytes: PerBlock
    constant_device_bytes: int
    constant_host_bytes: int
    device_memory_bytes: int
    host_memory_bytes: int
    least_offloaded: int
    most_offloaded: int

    @property
    def num_blocks(self) -> int:
        """L."""
        return len(self.forward_s.values)

    @cached_property
    def stall_s(self) -> PerBlock:
        """``max(t_h2d - t_bp, 0)``, seconds."""
        return PerBlock(max(up - back, 0.0) for up, back in zip(self.upload_s.values, self.backward_s.values, strict=True))

    @cached_property
    def recomputed_stall_s(self) -> PerBlock:
        """``max(t_h2d - t_fp - t_bp, 0)``, seconds."""
        return PerBlock(
            max(stall - forward, 0.0) for stall, forward in zip(self.stall_s.values, self.forward_s.values, strict=True)
        )


def costs(model: ModelProfile, hardware: HardwareProfile) -> Costs:
    """The formulas' symbols from the profiles. Where the device is the host, copies take no time."""
    shape, shared = model.shape(), hardware.shared_memory

    def seconds(amounts: Iterable[int], rate: float) -> PerBlock:  # what a rate of 0 cannot do is excluded by the counts' bounds
        return PerBlock(amount / rate if rate else 0.0 for amount in amounts)

    trained = [b.num_trainable_params for b in shape.blocks]
    first_trained = next((i for i, params in enumerate(trained) if params), len(trained))
    linked = shared or (hardware.link_h2d_bytes_per_s > 0 and hardware.link_d2h_bytes_per_s > 0)
    return Costs(
        forward_s=PerBlock(b.forward_s for b in model.blocks),
        backward_s=PerBlock(b.backward_s for b in model.blocks),
        upload_s=seconds((b.weight_bytes for b in shape.blocks), 0.0 if shared else hardware.link_h2d_bytes_per_s),
        download_s=seconds((b.gradient_bytes for b in shape.blocks), 0.0 if shared else hardware.link_d2h_bytes_per_s),
        cpu_update_s=seconds(trained, hardware.cpu_update_params_per_s),
        device_update_s=seconds(trained, hardware.device_update_params_per_s),
        weight_bytes=PerBlock(b.weight_bytes for b in shape.blocks),
        state_bytes=PerBlock(b.state_bytes for b in shape.blocks),
        activation_bytes=PerBlock(b.activation_bytes for b in shape.blocks),
        boundary_bytes=PerBlock(b.boundary_bytes for b in shape.blocks),
        constant_device_bytes=model.constant_device_bytes,
        constant_host_bytes=model.constant_host_bytes,
        device_memory_bytes=hardware.device_memory_bytes,
        host_memory_bytes=hardware.host_memory_bytes,
        least_offloaded=0 if hardware.device_update_params_per_s else len(trained) - first_trained,
        most_offloaded=len(trained) if linked and hardware.cpu_update_params_per_s else 0,
    )


def device_bytes(k: Costs, n: Counts) -> int:
    """Peak device memory, which is where forward turns into backward, bytes.

    ``2 M_a' c + 2 M_a (L - c + 1) + 2 M_p (L - p + 1) + 12 M_p (L - o) + M_gc``; see [Note: Blocks that differ]. Source: eq. 1.
    """
    last, first_offloaded = k.num_blocks, k.num_blocks - n.offload_optimizer
    activations = k.boundary_bytes.sum(0, n.checkpoint) + k.activation_bytes.sum(n.checkpoint, last) + k.activation_bytes.largest
    offloaded = k.weight_bytes.sum(first_offloaded, first_offloaded + n.offload_params)
    weights = k.weight_bytes.sum(0, last) - offloaded + k.weight_bytes.largest
    return int(activations + weights + k.state_bytes.sum(0, first_offloaded)) + k.constant_device_bytes


def host_bytes(k: Costs, offload_optimizer: int) -> int:
    """Host memory: ``14 M_p o + M_cc``, bytes; weights and gradients of a block share their place. Source: eq. 2."""
    first, last = k.num_blocks - offload_optimizer, k.num_blocks
    return int(k.weight_bytes.sum(first, last) + k.state_bytes.sum(first, last)) + k.constant_host_bytes


def forward_s(k: Costs, offload_optimizer: int) -> float:
    """Seconds of forward: ``max(t_fp L, t_h2d o + t_fp)``; every block that the CPU updates is uploaded once. Source: eq. 3."""
    last = k.num_blocks
    return max(k.forward_s.sum(0, last), k.upload_s.sum(last - offload_optimizer, last) + k.forward_s[last - 1])


def both(k: Costs, n: Counts) -> int:
    """v, blocks that are both checkpointed and parameter-offloaded; see [Note: Which blocks]."""
    return min(n.offload_params, max(0, n.checkpoint - (k.num_blocks - n.offload_optimizer)))


def sync_s(k: Costs, n: Counts) -> float:
    """Seconds for which backward waits for weights that are fetched one block ahead.

    ``v max(t_h2d - t_fp - t_bp, 0) + (p - v) max(t_h2d - t_bp, 0)``. Source: eq. 4.
    """
    first = k.num_blocks - n.offload_optimizer
    v = both(k, n)
    return k.recomputed_stall_s.sum(first, first + v) + k.stall_s.sum(first + v, first + n.offload_params)


def backward_s(k: Costs, n: Counts) -> float:
    """Seconds of backward: the device's work and its waiting, or the CPU's work.

    ``max(t_bp L + t_fp c + t_gpu (L - o) + t_sync, t_bp + t_d2h + t_cpu o)``. Source: eq. 5.
    """
    last, first = k.num_blocks, k.num_blocks - n.offload_optimizer
    device = k.backward_s.sum(0, last) + k.forward_s.sum(0, n.checkpoint) + k.device_update_s.sum(0, first) + sync_s(k, n)
    return max(device, k.backward_s[last - 1] + k.download_s[last - 1] + k.cpu_update_s.sum(first, last))


def iteration_s(k: Costs, n: Counts) -> float:
    """Seconds of one step: ``T_fwd + T_bwd``. Source: eq. 6."""
    return forward_s(k, n.offload_optimizer) + backward_s(k, n)


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
    block's weights while one is fetched ahead); else they are the optimum with less memory.

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
        return judged(_emit(model, k, _in_place(k), priority=priority), model, hardware, updates=updates)
    refusal: PlanError | None = None
    for slots in (2, 1):  # weights on their way: one block's while another's are in use, or if that does not fit no prefetches
        tight = k
        for _ in range(_JUDGEMENTS):
            counts = METHODS[method](tight)
            if counts is None:
                break
            counts = relieved(tight, counts)
            emitted = fitted(_emit(model, k, counts, priority=priority), model.shape(), device=not hardware.shared_memory)
            try:
                _check_slots(emitted, slots, model, hardware)
                return judged(emitted, model, hardware, updates=updates)
            except PlanError as error:
                if error.tier not in (Tier.DEVICE, Tier.HOST):
                    raise
                refusal = error
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
    """The counts as a plan, before it is judged."""
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
