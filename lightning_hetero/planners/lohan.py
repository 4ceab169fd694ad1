"""LoHan (Ratel): weights and state on disk, updates while backward runs, and as many activations swapped as pays.

Source: "LoHan: Low-Cost High-Performance Framework to Fine-Tune 100B Model on a Consumer GPU". The formulas are in
``lohan_formulas.py``; what the paper leaves open is marked [inferred] and discussed in docs/planners/lohan.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import accumulate
from typing import Any, Literal

from lightning_hetero.errors import ConfigError, PlanError
from lightning_hetero.ir.activations import saved_bytes
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.lowering import needs_of
from lightning_hetero.planners.evaluation import evaluated, with_paper_optimum
from lightning_hetero.planners.lohan_formulas import InterBlock, Layer, Quantities, iteration_s, quantities, swap_order

Method = Literal["walk", "convex"]

_JUDGEMENTS = 32  # refusals that lead to another choice; most come before anything is simulated
_SLACK = 1e-9  # relative: iteration times this close to the programme's optimum count as optimal


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """A choice of activations to swap.

    Attributes:
        layers: The layers, best first.
        swapped_bytes: A of the formulas; all swapped bytes under the reading ``"first"``.
        iteration_s: T_iter there, seconds.
        case: 1: T_iter rises from the least that may be swapped on; 2: it falls to the last layer; 3: its minimum is between.
    """

    layers: tuple[Layer, ...]
    swapped_bytes: int
    iteration_s: float
    case: Literal[1, 2, 3]


def _amounts(q: Quantities, layers: Sequence[Layer]) -> list[float]:
    """A when the first 0, 1, 2, … layers are swapped."""
    return list(accumulate((layer.num_bytes for layer in layers), initial=q.swapped_first_bytes))


def _points(q: Quantities, layers: Sequence[Layer]) -> list[tuple[float, float]]:
    """A and T_iter when the first 0, 1, 2, … layers are swapped."""
    spared = accumulate((layer.flop for layer in layers), initial=0.0)
    return [(a, iteration_s(q, a, max(0.0, q.dropped_flop - f))) for a, f in zip(_amounts(q, layers), spared, strict=True)]


def _least(q: Quantities, layers: Sequence[Layer]) -> int:
    """The fewest layers with which A reaches A_interBlock; all of them where it cannot."""
    return next((k for k, a in enumerate(_amounts(q, layers)) if a >= q.boundary_bytes), len(layers))


def _swap(q: Quantities, layers: Sequence[Layer], count: int) -> Swap:
    case: Literal[1, 2, 3] = 1 if count == _least(q, layers) else 2 if count == len(layers) else 3
    swapped, seconds = _points(q, layers[:count])[count]
    return Swap(layers=tuple(layers[:count]), swapped_bytes=int(swapped), iteration_s=seconds, case=case)


def _at_most(q: Quantities, swap: Swap, layers: Sequence[Layer], swapped_bytes: float) -> Swap:
    """The best choice that swaps no more than that, but at least A_interBlock: T_iter is convex, so it is the longest one.

    The case stays what it is without that limit.
    """
    count = max((k for k, a in enumerate(_amounts(q, layers)) if a <= swapped_bytes), default=0)
    return replace(_swap(q, layers, max(_least(q, layers), min(count, len(swap.layers)))), case=swap.case)


def walk(q: Quantities, layers: Sequence[Layer]) -> Swap:
    """Takes layers in order until one does not improve T_iter; up to A_interBlock, layers are taken whatever they do.

    T_iter is convex in A, so that the first layer which does not improve it is past the minimum. The layer that ends the walk is
    not swapped. The paper tests ``A >= A_interBlock`` with that layer in A and then leaves it out, which can end below
    A_interBlock; here A is tested without it [inferred].

    Args:
        q: The symbols.
        layers: As :func:`swap_order` gives them.

    Source: Algorithm 1.
    """
    points = _points(q, layers)
    count = _least(q, layers)
    while count < len(layers) and points[count + 1][1] < points[count][1]:
        count += 1
    return _swap(q, layers, count)


def relaxed(q: Quantities, layers: Sequence[Layer]) -> tuple[float, float]:
    """The convex programme: minimise ``T_f + T_b`` over ``A = sum x_l A_l``, ``0 <= x_l <= 1``, ``A >= A_interBlock``.

    Epigraph form, ``F_r = F - sum x_l FLOP_l``; a linear programme in cvxpy, solved by HiGHS. Where T_iter is flat, the least A
    of all optimal ones is returned.

    Returns:
        A in bytes, which may cut through a layer, and T_iter there in seconds.

    Source: section IV-D (convexity of T_iter).
    """
    cp: Any = import_module("cvxpy")  # takes a second, and has no types

    least, most = _points(q, layers)[0][0], _points(q, layers)[-1][0]
    if not layers:
        return least, iteration_s(q, least, q.dropped_flop)
    # Bytes and seconds in units in which everything is near 1: solvers' tolerances are absolute.
    size, span = max(most, 1.0), iteration_s(q, least, q.forward_flop)
    x, forward, backward = cp.Variable(len(layers)), cp.Variable(), cp.Variable()
    swapped = least / size + cp.sum(cp.multiply([layer.num_bytes / size for layer in layers], x))
    spared = cp.sum(cp.multiply([layer.flop / q.flop_per_s / span for layer in layers], x))
    spill = cp.pos(swapped - q.host_bytes / size) if math.isfinite(q.host_bytes) else 0.0

    def disk(read: Any, write: Any) -> Any:
        read_s = read * size / q.disk_read_bytes_per_s / span
        write_s = write * size / q.disk_write_bytes_per_s / span
        return cp.maximum(read_s, write_s) if q.disk_duplex else read_s + write_s

    fixed_forward = max(q.forward_flop / q.flop_per_s, q.weight_bytes / q.upload_bytes_per_s) / span
    fixed_backward = max(q.gradient_bytes / q.download_bytes_per_s, 2 * q.forward_flop / q.flop_per_s) / span
    constraints = [
        x >= 0,
        x <= 1,
        swapped >= min(q.boundary_bytes, most) / size,
        forward >= fixed_forward,
        forward >= swapped * (size / q.download_bytes_per_s / span),
        forward >= disk(q.weight_bytes / size, spill),
        backward >= fixed_backward,
        backward >= (2 * q.forward_flop + q.dropped_flop) / q.flop_per_s / span - spared,
        backward >= (q.weight_bytes / size + swapped) * (size / q.upload_bytes_per_s / span),
        backward >= disk(q.read_bytes / size + spill, q.written_bytes / size),
    ]
    total = forward + backward
    cp.Problem(cp.Minimize(total), constraints).solve(solver=cp.HIGHS)
    least_time = float(total.value)
    cp.Problem(cp.Minimize(swapped), [*constraints, total <= least_time * (1 + _SLACK)]).solve(solver=cp.HIGHS)
    return float(swapped.value) * size, least_time * span


def convex(q: Quantities, layers: Sequence[Layer]) -> Swap:
    """The whole layers nearest to the convex programme's optimum: with or without the layer that it cuts, whichever is faster.

    Args:
        q: The symbols.
        layers: As :func:`swap_order` gives them.
    """
    swapped, _ = relaxed(q, layers)
    points, least = _points(q, layers), _least(q, layers)
    tolerance = _SLACK * max(points[-1][0], 1.0)
    below = max((k for k, (a, _) in enumerate(points) if a <= swapped + tolerance), default=0)
    count = min((k for k in (below, min(below + 1, len(layers))) if k >= least), key=lambda k: points[k][1], default=least)
    return _swap(q, layers, count)


METHODS: Mapping[str, Callable[[Quantities, Sequence[Layer]], Swap]] = {"walk": walk, "convex": convex}


def plan(
    model: ModelProfile,
    hardware: HardwareProfile,
    *,
    method: Method = "walk",
    inter_block: InterBlock = "first",
    update_order: UpdateOrder = UpdateOrder.OVERLAPPED,
    updates: Updates = Updates.IN_BACKWARD,
) -> Plan:
    """LoHan's plan: weights and state on disk, CPU updates while backward runs, activations swapped or recomputed.

    ``decisions`` has ``swapped_bytes`` (all bytes that leave the device in a step, blocks' inputs among them),
    ``swapped_operators`` (``"block.operator"``, best first) and ``case``. Where the device is the host there is nothing to swap:
    activations stay, the formulas are evaluated with ``A = 0`` and ``F_r = 0``, which is what case 2 comes to without a link.

    Args:
        model: The model.
        hardware: The machine.
        method: ``"walk"`` is Algorithm 1, exact over whole layers in linear time; ``"convex"`` solves the programme with cvxpy.
        inter_block: See [Note: Inter-block activations] in ``lohan_formulas.py``.
        update_order: For the paper's ablation (section V-D).
        updates: When updates may run: during backward, or only once all gradients are known.

    Raises:
        ConfigError: An unknown method or reading.
        PlanError: No disk, or the plan does not fit.
    """
    if method not in METHODS:
        raise ConfigError(f"method={method!r}; allowed: {list(METHODS)}.")
    if inter_block not in ("amount", "first"):
        raise ConfigError(f"inter_block={inter_block!r}; allowed: ['amount', 'first'].")
    _check_rates(hardware)
    placed, layers = _placed(model, update_order), swap_order(model)
    if hardware.shared_memory:
        return evaluated(_keeping(placed, quantities(model, hardware, host_bytes=math.inf)), model, hardware, updates=updates)
    first_refusal = optimum = None
    for depth in (placed.prefetch_depth, 1):  # what is on its way takes memory: a step behind, if that is what it needs to fit
        placed = replace(placed, prefetch_depth=depth)
        q = quantities(model, hardware, host_bytes=_host_room(placed, model, hardware), inter_block=inter_block)
        swap = METHODS[method](q, layers)
        for _ in range(_JUDGEMENTS):
            emitted = _swapping(placed, model, q, swap)
            optimum = optimum or emitted
            try:
                return with_paper_optimum(evaluated(emitted, model, hardware, updates=updates), optimum, first_refusal)
            except PlanError as error:
                refusal, first_refusal = error, first_refusal or error
            # The runtime needs more than the formulas know of: keep less on the host, or have less on its way on the device.
            if refusal.tier == Tier.HOST and q.host_bytes > 0:
                held = min(q.host_bytes, emitted.decisions["swapped_bytes"])
                q = replace(q, host_bytes=max(0.0, held - refusal.shortfall_bytes))
                swap = _at_most(q, METHODS[method](q, layers), layers, swap.swapped_bytes)
            elif refusal.tier == Tier.DEVICE and depth == 1 and len(swap.layers) > _least(q, layers):
                less = swap.swapped_bytes - max(1, refusal.shortfall_bytes) * len(model.blocks)
                swap = _at_most(q, swap, layers, less)
            else:
                break
    raise refusal


def _check_rates(hardware: HardwareProfile) -> None:
    """Refuses a machine that cannot do what LoHan does."""
    needed = {"disk_read_bytes_per_s": Tier.DISK, "disk_write_bytes_per_s": Tier.DISK, "cpu_update_params_per_s": Tier.HOST}
    if not hardware.shared_memory:
        needed |= {"link_h2d_bytes_per_s": Tier.HOST, "link_d2h_bytes_per_s": Tier.HOST}
    for key, tier in needed.items():
        if not getattr(hardware, key):
            raise PlanError(
                f"lohan keeps weights and state on disk and updates them on the CPU, and hardware profile {hardware.name!r} has "
                f"{key}=0. Measure or give it, or choose a planner that needs no {tier.value}, such as "
                f"{'autohete' if tier is Tier.DISK else 'resident'!r}.",
                tier=tier.value,
            )


def _placed(model: ModelProfile, update_order: UpdateOrder) -> Plan:
    """Where weights and state live, before anything is said of activations; as the builtin plan ``disk``."""
    rows = (
        BlockPlan(
            name=block.name,
            weights=Tier.HOST if block.pinned else Tier.DISK,
            state=Tier.DISK if block.num_trainable_params else Tier.HOST,
            update=UpdateLane.CPU,
        )
        for block in model.blocks
    )
    # Equation 1 adds the stages up: the next forward waits for the updates.
    return Plan(name="lohan", blocks=tuple(rows), update_order=update_order, priority=False)


def _host_room(placed: Plan, model: ModelProfile, hardware: HardwareProfile) -> int:
    """MEM: host memory beside what prefetched weights, gradients in flight, updates and the process itself take, bytes."""
    needs = needs_of(placed, model, shared_memory=False)
    return hardware.host_memory_bytes - sum(needs.host.values()) - max(needs.host_caches, default=0)


def _keeping(placed: Plan, q: Quantities) -> Plan:
    """The plan where the device is the host: nothing is swapped or recomputed."""
    decisions = {"swapped_bytes": 0, "swapped_operators": [], "case": 2}
    return replace(placed, objective_s=iteration_s(q, 0.0, 0.0), decisions=decisions)


def _swapping(placed: Plan, model: ModelProfile, q: Quantities, swap: Swap) -> Plan:
    """The plan that swaps blocks' inputs and the chosen layers, to host memory as far as it goes.

    What comes back first stays in host memory: the last blocks' activations [inferred].
    """
    chosen = {(layer.block, layer.operator) for layer in swap.layers}
    room = q.host_bytes

    def swapped(num_bytes: int) -> Saved:
        nonlocal room
        if num_bytes > room:
            return Saved.SWAP_DISK
        room -= num_bytes
        return Saved.SWAP_HOST

    rows = []
    for block, row in reversed(list(zip(model.blocks, placed.blocks, strict=True))):
        if block.pinned:
            rows.append(row)
            continue
        boundary = swapped(block.boundary_bytes) if block.boundary_bytes else Saved.KEEP
        operators = {o.name: swapped(o.bytes) for o in block.operators if (block.name, o.name) in chosen}
        rows.append(replace(row, saved=Saved.RECOMPUTE, boundary=boundary, operators=operators))
    rows.reverse()
    leaving = [saved_bytes(block, row) for block, row in zip(model.blocks, rows, strict=True) if not block.pinned]
    return replace(
        placed,
        blocks=tuple(rows),
        objective_s=swap.iteration_s,
        decisions={
            "swapped_bytes": sum(s.to_host + s.to_disk for s in leaving),
            "swapped_operators": [layer.name for layer in swap.layers],
            "case": swap.case,
        },
    )
