"""LoHan (Ratel): weights and state on disk, updates during backward, swapped activations.

Source: "LoHan: Low-Cost High-Performance Framework to Fine-Tune 100B Model on a Consumer GPU". The
formulas are in ``formulas.py``, the search is in ``search.py``. What the paper leaves open is
marked [inferred] and discussed in docs/planners/lohan.md.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from lightning_hetero.errors import ConfigError, PlanError
from lightning_hetero.ir.activations import saved_bytes
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.lowering import needs_of
from lightning_hetero.lowering.rank_rules import rules_of
from lightning_hetero.planners.evaluation import evaluated, with_paper_optimum
from lightning_hetero.planners.lohan.formulas import InterBlock, Quantities, iteration_s, quantities, swap_order
from lightning_hetero.planners.lohan.search import METHODS, SwapChoice, at_most, least_layers
from lightning_hetero.planners.one_rank import one_rank

Method = Literal["walk", "convex"]

_EVALUATIONS = 32  # refusals that lead to another choice; most come before anything is simulated


def plan(
    model: ModelProfile,
    hardware: HardwareProfile,
    *,
    method: Method = "walk",
    inter_block: InterBlock = "first",
    update_order: UpdateOrder = UpdateOrder.OVERLAPPED,
    updates: Updates = Updates.IN_BACKWARD,
) -> Plan:
    """LoHan's plan: weights and state on disk, CPU updates in backward, activations swapped.

    ``decisions`` has ``swapped_bytes`` (all bytes that leave the device in a step, blocks' inputs
    among them), ``swapped_operators`` (``"block.operator"``, best first) and ``case``. Where the
    device is the host there is nothing to swap: activations stay, the formulas are evaluated with
    ``A = 0`` and ``F_r = 0``, which is what case 2 comes to without a link.

    Args:
        model: The model.
        hardware: The machine.
        method: ``"walk"`` is Algorithm 1, exact over whole layers in linear time; ``"convex"``
            solves the programme with cvxpy.
        inter_block: See [Note: Inter-block activations] in ``formulas.py``.
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
    model, hardware = one_rank(model, hardware)
    placed, layers = rules_of(hardware).nearest(_placed(model, update_order)), swap_order(model)
    if hardware.shared_memory:
        return evaluated(_keeping(placed, quantities(model, hardware, host_bytes=math.inf)), model, hardware, updates=updates)
    first_refusal = optimum = None
    for depth in (placed.prefetch_depth, 1):  # transfers take memory: fewer if needed
        placed = replace(placed, prefetch_depth=depth)
        q = quantities(model, hardware, host_bytes=_host_room(placed, model, hardware), inter_block=inter_block)
        swap = METHODS[method](q, layers)
        for _ in range(_EVALUATIONS):
            emitted = _swapping(placed, model, q, swap)
            optimum = optimum or emitted
            try:
                return with_paper_optimum(evaluated(emitted, model, hardware, updates=updates), optimum, first_refusal)
            except PlanError as error:
                refusal, first_refusal = error, first_refusal or error
            # The runtime needs more than the formulas know of: keep less on the host, or have less
            # on its way on the device.
            if refusal.tier == Tier.HOST and q.host_bytes > 0:
                held = min(q.host_bytes, emitted.decisions["swapped_bytes"])
                q = replace(q, host_bytes=max(0.0, held - refusal.shortfall_bytes))
                swap = at_most(q, METHODS[method](q, layers), layers, swap.swapped_bytes)
            elif refusal.tier == Tier.DEVICE and depth == 1 and len(swap.layers) > least_layers(q, layers):
                less = swap.swapped_bytes - max(1, refusal.shortfall_bytes) * len(model.blocks)
                swap = at_most(q, swap, layers, less)
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
    """Places weights and state as the builtin plan ``disk``; activations follow later."""
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
    """MEM: host memory left beside weights, gradients, updates and the process, bytes."""
    needs = needs_of(placed, model, shared_memory=False, ranks=hardware.ranks, gathers_in_place=hardware.gathers_in_place)
    return hardware.host_memory_bytes - sum(needs.host.values()) - max(needs.host_caches, default=0)


def _keeping(placed: Plan, q: Quantities) -> Plan:
    """The plan where the device is the host: nothing is swapped or recomputed."""
    decisions = {"swapped_bytes": 0, "swapped_operators": [], "case": 2}
    return replace(placed, objective_s=iteration_s(q, 0.0, 0.0), decisions=decisions)


def _swapping(placed: Plan, model: ModelProfile, q: Quantities, swap: SwapChoice) -> Plan:
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
