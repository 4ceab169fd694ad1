"""Moves blocks while a model trains: to the tiers of another plan, or to files with state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from lightning_hetero._native import NativePart, PartGeometry, file_bytes
from lightning_hetero.errors import OutOfDiskError
from lightning_hetero.handles.offloaded_parameter import restore
from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import BlockPlan, Tier
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.store.live.geometry import geometry_of
from lightning_hetero.store.live.mirrors import mirror_files
from lightning_hetero.store.live.moved_weights import bring_back_all
from lightning_hetero.store.live.moves import move
from lightning_hetero.store.live.native_parts import close_native, open_native
from lightning_hetero.units import format_bytes


def move_block(
    executor: Executor,
    block: Block,
    placed: BlockPlan,
    geometries: Mapping[Part, PartGeometry],
    arrived: Callable[[Part], list[NativePart]],
) -> None:
    """Moves a block's weights and state to the tiers of its new plan, while the executor rests."""
    before = block.plan
    same_weights = (before.weights is Tier.DISK) == (placed.weights is Tier.DISK)
    same_state = (before.state is Tier.DISK) == (placed.state is Tier.DISK)
    where = (before.weights, before.state, before.update)
    if where != (placed.weights, placed.state, placed.update) or executor.residency.is_away(block):
        executor.residency.leave(block)
    if not (same_weights and same_state):
        executor.residency.bring(block, force=True)
        for part in block.parts:
            move(executor.store, part, geometries.get(part), arrived)
    block.plan = placed
    if not same_state:
        for part in block.parts:
            executor.updater.move_state(part)


def growth(block: Block, placed: BlockPlan, model: ModelShape) -> int:
    """Bytes of host memory that the move of a block takes; negative if it frees memory."""
    shape = model.blocks[block.index]
    tiers = ((shape.weight_bytes, block.plan.weights, placed.weights), (shape.state_bytes, block.plan.state, placed.state))
    return sum(size * ((after is not Tier.DISK) - (before is not Tier.DISK)) for size, before, after in tiers)


def reopen(executor: Executor, part: Part, num_state: int) -> None:
    """Opens a part anew, with state: its parameters have begun to train.

    Raises:
        OutOfDiskError: ``disk_capacity`` has no room for its files. Nothing has changed.
    """
    store, placed = executor.store, part.block.plan
    identifier, before, part.slots = store.files.next_id(), part.slots, 2
    geometry = geometry_of(part, identifier, num_state=num_state, weights=placed.weights, state=placed.state)
    mirrored = mirror_files(part, geometry) if executor.context.run.mirror is not None else ()
    size, room = sum(2 * file_bytes(g) for g in (geometry, *mirrored)), store.files.room_bytes() - store.files.added_bytes
    if size > room:
        part.slots = before
        raise OutOfDiskError(
            f"{part.names[0]!r} was frozen and trains now. Its weights and state need {format_bytes(size)} of files; disk_capacity "
            f"leaves {format_bytes(max(int(room), 0))}. Raise disk_capacity, or keep it frozen."
        )
    store.files.added_bytes += size
    bring_back_all(part.block)
    executor.residency.bring(part.block)
    executor.residency.leave(part.block)
    if part.native is not None:
        close_native(store, part)
    part.in_place = None
    open_native(store, part, geometry)
    store.flush(part)
    executor.enter()


def close_parts(executor: Executor, block: Block, parts: Iterable[Part]) -> None:
    """Brings a block of a parked session into memory, and closes some of its native parts."""
    executor.residency.bring(block, force=True)
    for part in parts:
        restore(part.params)
        if part.native is not None:
            close_native(executor.store, part)


def open_cut_parts(executor: Executor, block: Block) -> None:
    """Moves a block of a parked session, whose parts have been cut, back to its tier."""
    store, placed = executor.store, block.plan
    executor.residency.parameters.learn_parts(block)
    if not block.weights_on_disk:
        return
    for part in block.parts:
        if part.native is None:
            number = store.files.next_id()
            open_native(store, part, geometry_of(part, number, num_state=0, weights=placed.weights, state=placed.state))
            store.flush(part)
    executor.residency.parameters.hide(block)
    executor.residency.weights.release(block)
    for part in block.parts:
        store.barrier(part)
