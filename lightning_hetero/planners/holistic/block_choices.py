"""The choices for a block and their costs: the variables of the relaxed programme."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from lightning_hetero.cost import Rates, Work
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Saved, Tier, UpdateLane
from lightning_hetero.lowering.needs import DEVICE_STATES
from lightning_hetero.lowering.rank_rules import rules_of
from lightning_hetero.planners.holistic.bounds import Vector, unit_s, uses
from lightning_hetero.planners.holistic.segments import BlockRun

REST = ""  # stands for what a block saves beside its input and its operators' outputs
INPUT = "\0"  # stands for its input

Placed = tuple[Tier, Tier, UpdateLane]  # weights, state, update
Choice = Placed | Saved

_D, _H, _K = Tier.DEVICE, Tier.HOST, Tier.DISK
_OWN_MEMORY: tuple[Placed, ...] = (
    (_D, _D, UpdateLane.DEVICE),
    (_D, _H, UpdateLane.DEVICE),
    (_D, _H, UpdateLane.CPU),
    (_H, _D, UpdateLane.DEVICE),
    (_H, _H, UpdateLane.DEVICE),
    (_H, _H, UpdateLane.CPU),
    (_D, _K, UpdateLane.CPU),
    (_H, _K, UpdateLane.CPU),
    (_K, _H, UpdateLane.CPU),
    (_K, _K, UpdateLane.CPU),
)
_UNTRAINED: tuple[Placed, ...] = ((_D, _D, UpdateLane.DEVICE), (_H, _H, UpdateLane.CPU), (_K, _H, UpdateLane.CPU))
_LINK_WORK, _DISK_WORK = frozenset({Work.H2D, Work.D2H}), frozenset({Work.DISK_READ, Work.DISK_WRITE})
_ONE_MEMORY: tuple[Placed, ...] = (
    (_D, _D, UpdateLane.DEVICE),
    (_H, _H, UpdateLane.CPU),
    (_H, _K, UpdateLane.CPU),
    (_K, _H, UpdateLane.CPU),
    (_K, _K, UpdateLane.CPU),
)


def placements(block: BlockProfile, hardware: HardwareProfile) -> tuple[Placed, ...]:
    """The placements that a machine allows for a block, those that move least first."""
    return _allowed(block, hardware, _able(hardware))


def _allowed(block: BlockProfile, hardware: HardwareProfile, able: frozenset[Work]) -> tuple[Placed, ...]:
    trained, shared, runs = block.num_trainable_params > 0, hardware.shared_memory, rules_of(hardware)

    def allowed(weights: Tier, state: Tier, update: UpdateLane) -> bool:
        if not runs.allows(BlockPlan(name=block.name, weights=weights, state=state, update=update), trained=trained):
            return False
        if _K in (weights, state) and (not able >= _DISK_WORK or not hardware.disk_capacity_bytes):
            return False
        if block.pinned and weights is not _D and (weights is _K or hardware.copies_weights):  # see fitted
            return False
        if not shared and not able >= _LINK_WORK and (weights, state) != (_D, _D):
            return False
        if not trained:  # without state only the tier of the weights differs
            return (weights, state, update) in _UNTRAINED
        return (Work.CPU_UPDATE if update is UpdateLane.CPU else Work.DEVICE_UPDATE) in able

    return tuple(p for p in (_OWN_MEMORY if hardware.copies_weights else _ONE_MEMORY) if allowed(*p))


def policies(hardware: HardwareProfile, block: BlockProfile | None = None) -> tuple[Saved, ...]:
    """The policies for saved tensors that a machine allows: for one block, or all unpinned ones."""
    if hardware.shared_memory or (block is not None and block.pinned):
        return (Saved.KEEP,)
    able = _able(hardware)
    disk = able >= _DISK_WORK and hardware.disk_capacity_bytes > 0
    swaps = ((Saved.SWAP_HOST, Saved.SWAP_DISK) if disk else (Saved.SWAP_HOST,)) if able >= _LINK_WORK else ()
    return (Saved.KEEP, Saved.RECOMPUTE, *swaps)


def _able(hardware: HardwareProfile) -> frozenset[Work]:
    rates = Rates(hardware)
    return frozenset(work for work in Work if unit_s(rates, work) > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One variable: the share of a segment's blocks that make one choice.

    Attributes:
        segment: The segment's place.
        what: ``None`` for a placement; else the operator, ``REST`` or ``INPUT``, whose bytes the
            choice is for.
        choice: The placement or the policy.
        taken: What the whole segment takes by it; of a policy what it takes beside keeping
            everything.
        moving_bytes: Of a placement: device memory that state and slices pass through on their way
            to an update there.
        passing_bytes: Of a placement: device memory that one block's weights pass through.
        waiting_bytes: Of a placement: host memory that one block's gradients pass through.
        fetched_bytes: Of a placement: host memory that one block's weights pass through.
    """

    segment: int
    what: str | None
    choice: Choice
    taken: Vector
    moving_bytes: float = 0.0
    passing_bytes: float = 0.0
    waiting_bytes: float = 0.0
    fetched_bytes: float = 0.0


def saved_rules(block: BlockProfile, allowed: Sequence[Saved]) -> Iterator[tuple[str, Saved, BlockPlan]]:
    """Every single choice for what a block saves, and the block's rule if all else is kept."""
    names = [o.name for o in block.operators]
    rest = block.activation_bytes - block.boundary_bytes - sum(o.bytes for o in block.operators)
    for name, policy in product(names, allowed):
        yield name, policy, BlockPlan(name=block.name, operators={name: policy})
    for policy in allowed if rest > 0 else ():
        yield REST, policy, BlockPlan(name=block.name, saved=policy, operators=dict.fromkeys(names, Saved.KEEP))
    for policy in allowed if block.boundary_bytes else ():
        if policy is not Saved.RECOMPUTE:
            yield INPUT, policy, BlockPlan(name=block.name, boundary=policy)


def columns(segments: Sequence[BlockRun], model: ModelProfile, hardware: HardwareProfile, micro_batches: int) -> Iterator[Column]:
    """All choices of all segments.

    Args:
        segments: The segments of the model.
        model: The model.
        hardware: The machine.
        micro_batches: Forwards and backwards of one step.
    """
    able = _able(hardware)
    for index, segment in enumerate(segments):
        for placed in _allowed(segment.block, hardware, able):
            yield _placed(index, segment, placed, model, hardware, micro_batches)
        yield from _saved(index, segment, policies(hardware, segment.block), model, hardware, micro_batches)


def _placed(index: int, segment: BlockRun, placed: Placed, model: ModelProfile, hardware: HardwareProfile, m: int) -> Column:
    # Whether casts of weights stay depends on the policy too, which no column of a placement knows.
    block, count, shared = replace(segment.block, cast_bytes=0), len(segment), hardware.shared_memory
    weights_bytes, gradient_bytes = model.weight_bytes(block), model.gradient_bytes(block)
    weights, state, update = placed
    on_device = not shared and update is UpdateLane.DEVICE
    slices_move = on_device and hardware.ranks > 1 and block.num_trainable_params > 0
    moving_bytes = on_device * (state is Tier.HOST) * model.state_bytes(block) + slices_move * (gradient_bytes + weights_bytes)
    rule = BlockPlan(name=block.name, weights=weights, state=state, update=update)
    return Column(
        segment=index,
        what=None,
        choice=placed,
        taken=count * uses(block, rule, model, hardware, m),
        moving_bytes=min(count, DEVICE_STATES) * moving_bytes,
        passing_bytes=hardware.ranks * weights_bytes * (not shared and weights is not Tier.DEVICE),
        waiting_bytes=gradient_bytes * (slices_move or not on_device) * (count if m > 1 else 1),
        fetched_bytes=weights_bytes * (weights is Tier.DISK),
    )


def _saved(
    index: int, segment: BlockRun, allowed: Sequence[Saved], model: ModelProfile, hardware: HardwareProfile, m: int
) -> Iterator[Column]:
    block, count = segment.least, len(segment)
    kept = uses(block, BlockPlan(name=block.name), model, hardware, m)
    for what, policy, rule in saved_rules(block, allowed):
        yield Column(segment=index, what=what, choice=policy, taken=count * (uses(block, rule, model, hardware, m) - kept))
