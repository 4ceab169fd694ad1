"""LoHan (Ratel): weights and state on disk, updates while backward runs, and as many activations swapped as pays.

Source: "LoHan: Low-Cost High-Performance Framework to Fine-Tune 100B Model on a Consumer GPU". What the paper leaves open is marked
[inferred] and discussed in docs/planners/lohan.md.

[Note: Layers]
What the paper calls a layer is an operator with a saved output (:class:`lightning_hetero.ir.model.OperatorProfile`): its output is
swapped whole, or computed again. The paper's ``2P`` is the bytes of all weights, or of all gradients, and ``12P`` those of the
optimizer state, as the profile gives them: sums over blocks, which may differ, be frozen, or compute in fp32.

[Note: Inter-block activations]
A block is recomputed from its input, so a plan swaps the inputs of all blocks whatever else it swaps. Algorithm 1 as printed only
asks that the swapped *amount* reaches their size; the authors' code swaps them first, and no recomputation is spared by them. Both
readings are here (``inter_block="amount"`` and ``"first"``); docs/adr/0005-lohan-inter-block-activations.md compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import accumulate
from typing import Any, Literal

from lightning_hetero.errors import ConfigError, PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.lowering import needs_of
from lightning_hetero.planners.judge import judged

InterBlock = Literal["amount", "first"]
Method = Literal["walk", "convex"]

_JUDGEMENTS = 32  # refusals that lead to another choice; most come before anything is simulated
_SLACK = 1e-9  # relative: iteration times this close to the programme's optimum count as optimal


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One operator's saved output; see [Note: Layers].

    Attributes:
        block: The block's name.
        operator: The operator's name in the block.
        flop: FLOP that recomputing it costs.
        num_bytes: Bytes of the output.
    """

    block: str
    operator: str
    flop: float
    num_bytes: int

    @property
    def name(self) -> str:
        """``"block.operator"``."""
        return f"{self.block}.{self.operator}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantities:
    """The symbols of equations 1 to 7, from the profiles.

    Attributes:
        forward_flop: F, FLOP of one forward of all blocks.
        weight_bytes: 2P, bytes of all weights as they compute.
        gradient_bytes: 2P, bytes of all gradients.
        read_bytes: 14P, what one step's updates read from disk: state and weights, bytes.
        written_bytes: 14P, what they write, bytes.
        flop_per_s: THP, FLOP/s.
        upload_bytes_per_s: BW_G of the direction host to device, bytes/s.
        download_bytes_per_s: BW_G of the direction device to host, bytes/s.
        disk_read_bytes_per_s: BW_S2M, bytes/s.
        disk_write_bytes_per_s: BW_M2S, bytes/s.
        disk_duplex: Reads and writes overlap; the paper's disks are simplex, so that their times add.
        host_bytes: MEM, host memory left for activations, bytes.
        boundary_bytes: A_interBlock, the inputs of all blocks that may swap, bytes.
        swapped_first_bytes: Bytes that are swapped before any layer is: 0 or ``boundary_bytes``.
        kept_flop: FLOP of one forward of pinned blocks, which backward never repeats.
    """

    forward_flop: float
    weight_bytes: float
    gradient_bytes: float
    read_bytes: float
    written_bytes: float
    flop_per_s: float
    upload_bytes_per_s: float
    download_bytes_per_s: float
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    disk_duplex: bool
    host_bytes: float
    boundary_bytes: float
    swapped_first_bytes: float = 0.0
    kept_flop: float = 0.0

    @property
    def dropped_flop(self) -> float:
        """F_r where nothing is swapped: FLOP of one forward of all that backward may have to repeat."""
        return self.forward_flop - self.kept_flop

    def disk_s(self, read_bytes: float, written_bytes: float) -> float:
        """Seconds of reads and writes that share the disk, or overlap where it is duplex [inferred]."""
        read, write = read_bytes / self.disk_read_bytes_per_s, written_bytes / self.disk_write_bytes_per_s
        return max(read, write) if self.disk_duplex else read + write


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """A choice of activations to swap.

    Attributes:
        layers: The layers, best first.
        swapped_bytes: A, all swapped bytes.
        iteration_s: T_iter there, seconds.
        case: 1: T_iter rises from the least that may be swapped on; 2: it falls to the last layer; 3: its minimum is between.
    """

    layers: tuple[Layer, ...]
    swapped_bytes: int
    iteration_s: float
    case: Literal[1, 2, 3]


def quantities(
    model: ModelProfile, hardware: HardwareProfile, *, host_bytes: float, inter_block: InterBlock = "amount"
) -> Quantities:
    """The formulas' symbols.

    On a machine whose device is its host, copies take no time and nothing can overflow: links and MEM are infinite.

    Args:
        model: The model.
        hardware: The machine.
        host_bytes: MEM, host memory left for activations, bytes.
        inter_block: See [Note: Inter-block activations].
    """
    shape, shared = model.shape(), hardware.shared_memory
    trained = [b for b in shape.blocks if b.num_trainable_params]
    state = float(sum(b.state_bytes for b in shape.blocks))
    weights = float(sum(b.weight_bytes for b in shape.blocks))
    boundary = float(sum(b.boundary_bytes for b in shape.blocks if not b.pinned))
    return Quantities(
        forward_flop=sum(b.forward_flop for b in model.blocks),
        weight_bytes=weights,
        gradient_bytes=float(sum(b.gradient_bytes for b in shape.blocks)),
        read_bytes=state + weights,
        written_bytes=state + sum(b.weight_bytes for b in trained),
        flop_per_s=hardware.device_flop_per_s,
        upload_bytes_per_s=math.inf if shared else hardware.link_h2d_bytes_per_s,
        download_bytes_per_s=math.inf if shared else hardware.link_d2h_bytes_per_s,
        disk_read_bytes_per_s=hardware.disk_read_bytes_per_s,
        disk_write_bytes_per_s=hardware.disk_write_bytes_per_s,
        disk_duplex=hardware.disk_duplex,
        host_bytes=math.inf if shared else max(0.0, host_bytes),
        boundary_bytes=boundary,
        swapped_first_bytes=boundary if inter_block == "first" else 0.0,
        kept_flop=sum(b.forward_flop for b in model.blocks if b.pinned),
    )


def spilled_bytes(swapped_bytes: float, host_bytes: float) -> float:
    """Swapped bytes that exceed host memory and go to disk: ``max(0, A - MEM)``, bytes.

    Source: eq. 3, which has no clamp [inferred].
    """
    return max(0.0, swapped_bytes - host_bytes)


def forward_s(q: Quantities, swapped_bytes: float) -> float:
    """Seconds of the forward stage: computation, swapping out, uploading weights, and the disk overlap.

    ``max(F/THP, A/BW_G, 2P/BW_G, 2P/BW_S2M + spill/BW_M2S)``. Source: eqs. 2 and 4.
    """
    return max(
        q.forward_flop / q.flop_per_s,
        swapped_bytes / q.download_bytes_per_s,
        q.weight_bytes / q.upload_bytes_per_s,
        q.disk_s(q.weight_bytes, spilled_bytes(swapped_bytes, q.host_bytes)),
    )


def backward_s(q: Quantities, swapped_bytes: float, recomputed: float) -> float:
    """Seconds of the backward stage, updates included.

    ``max((2F + F_r)/THP, 2P/BW_G, (2P + A)/BW_G, (14P + spill)/BW_S2M + 14P/BW_M2S)``. Source: eq. 5.

    Args:
        q: The symbols.
        swapped_bytes: A, bytes.
        recomputed: F_r, FLOP.
    """
    return max(
        (2 * q.forward_flop + recomputed) / q.flop_per_s,
        q.gradient_bytes / q.download_bytes_per_s,
        (q.weight_bytes + swapped_bytes) / q.upload_bytes_per_s,
        q.disk_s(q.read_bytes + spilled_bytes(swapped_bytes, q.host_bytes), q.written_bytes),
    )


def iteration_s(q: Quantities, swapped_bytes: float, recomputed: float) -> float:
    """Seconds of one step: ``T_f + T_b``. Source: eq. 1."""
    return forward_s(q, swapped_bytes) + backward_s(q, swapped_bytes, recomputed)


def offloading_benefit(flop: float, num_bytes: float) -> float:
    """FLOP spared by a byte swapped, ``OB = FLOP_layer / A_layer``. Source: eq. 6."""
    return flop / num_bytes


def swap_order(model: ModelProfile) -> tuple[Layer, ...]:
    """All layers of the blocks that may swap, which pinned ones may not; the greatest offloading benefit first.

    Equal ones come operator by operator, each of all blocks, as in the authors' code: so every block swaps about as much.
    """
    layers = [
        (-offloading_benefit(operator.flop, operator.bytes), place, index, operator)
        for index, block in enumerate(model.blocks)
        for place, operator in enumerate(block.operators)
        if operator.bytes and not block.pinned  # an output without bytes is neither kept nor swapped
    ]
    return tuple(
        Layer(block=model.blocks[index].name, operator=operator.name, flop=operator.flop, num_bytes=operator.bytes)
        for _, _, index, operator in sorted(layers, key=lambda layer: layer[:3])
    )


def recomputed_flop(q: Quantities, layers: Sequence[Layer], swapped_bytes: float) -> float:
    """F_r when ``swapped_bytes`` are swapped in the order of ``layers``, linear inside a layer, FLOP.

    ``F - sum_{m<=i} FLOP_m - FLOP_{i+1} (A - sum_{n<=i} A_n) / A_{i+1}``. Source: eq. 7.
    """
    left, rest = q.dropped_flop, swapped_bytes - q.swapped_first_bytes
    for layer in layers:
        if rest <= 0:
            break
        left -= layer.flop * min(1.0, rest / layer.num_bytes)
        rest -= layer.num_bytes
    return max(0.0, left)


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
    inter_block: InterBlock = "amount",
    update_order: UpdateOrder = UpdateOrder.OVERLAPPED,
    updates: Updates = Updates.IN_BACKWARD,
) -> Plan:
    """LoHan's plan: weights and state on disk, CPU updates while backward runs, activations swapped or recomputed.

    ``decisions`` has ``swapped_bytes`` (A), ``swapped_operators`` (``"block.operator"``, best first) and ``case``. Where the device
    is the host there is nothing to swap: activations stay, the formulas are evaluated with ``A = 0`` and ``F_r = 0``, which is
    what case 2 comes to without a link.

    Args:
        model: The model.
        hardware: The machine.
        method: ``"walk"`` is Algorithm 1, exact over whole layers in linear time; ``"convex"`` solves the programme with cvxpy.
        inter_block: See [Note: Inter-block activations].
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
        return judged(_keeping(placed, quantities(model, hardware, host_bytes=math.inf)), model, hardware, updates=updates)
    for depth in (placed.prefetch_depth, 1):  # what is on its way takes memory: a step behind, if that is what it needs to fit
        placed = replace(placed, prefetch_depth=depth)
        q = quantities(model, hardware, host_bytes=_host_room(placed, model, hardware), inter_block=inter_block)
        swap = METHODS[method](q, layers)
        for _ in range(_JUDGEMENTS):
            try:
                return judged(_swapping(placed, model, q, swap), model, hardware, updates=updates)
            except PlanError as error:
                refusal = error
            # The runtime needs more than the formulas know of: keep less on the host, or have less on its way on the device.
            if refusal.tier == Tier.HOST and q.host_bytes > 0:
                held = min(q.host_bytes, swap.swapped_bytes + q.boundary_bytes)
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
    return replace(
        placed,
        blocks=tuple(reversed(rows)),
        objective_s=swap.iteration_s,
        decisions={
            "swapped_bytes": swap.swapped_bytes,
            "swapped_operators": [layer.name for layer in swap.layers],
            "case": swap.case,
        },
    )
