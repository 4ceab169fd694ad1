"""Weights of which a rank has a slice between uses; see [Note: Slices at run time]."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from lightning_hetero.errors import OutOfMemoryBudgetError
from lightning_hetero.handles.offloaded_parameter import restore
from lightning_hetero.ir.plan import Tier
from lightning_hetero.ir.schedule import Schedule
from lightning_hetero.lowering import DeviceRoom
from lightning_hetero.runtime.context import RunContext
from lightning_hetero.runtime.residency import changed_while_shared
from lightning_hetero.runtime.residency.host import HostResidency
from lightning_hetero.runtime.slices import Slices
from lightning_hetero.store.live import moved_weights
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.store.live.geometry import versions
from lightning_hetero.store.live.shared_memory import SharedArena
from lightning_hetero.units import format_bytes


class RanksResidency(HostResidency):
    """See :class:`~lightning_hetero.runtime.residency.Residency`.

    What brings weights is a collective, so all ranks do it at the same place of their programs.
    """

    def __init__(self, context: RunContext, slices: Slices) -> None:
        super().__init__(context)
        self._slices, self._lanes = slices, context.run.lanes
        self._trains = False  # a training batch is under way
        slices.reads.attach(context.run.store, self._blocks, self.settle)
        self.weights.leaves = self._leave

    def is_away(self, block: Block) -> bool:
        """Whether the rank has only a slice of the block's weights between uses."""
        return block.plan.weights is not Tier.DEVICE

    def is_released(self, block: Block) -> bool:
        """Parameters are handles where the rank has, or may have, a slice alone."""
        return self.is_away(block) or not _is_whole(block)

    def held(self, last: Schedule | None) -> tuple[frozenset[int], DeviceRoom]:
        """The blocks of whose weights on disk the rank has its slice, and those that are whole."""
        fetched = self.weights.held()
        for part in [part for block in fetched for part in block.parts]:
            self._await_write(part)  # a batch without backward has not waited for every FETCH
        whole = frozenset(b.index for b in self._blocks if _is_whole(b))
        room, slices = self._context.placement.device_cache_bytes, self._slices
        return frozenset(b.index for b in fetched), DeviceRoom(
            resident=whole, capacity_bytes=room, ranks=slices.collectives.shards, shared_memory=True,
            gathers_in_place=slices.is_shared,
        )  # fmt: skip

    def begin_batch(self, *, training: bool, whole: bool) -> None:
        """Gives back what no RELEASE has, because the last batch had no schedule to its end."""
        self._trains = training
        super().begin_batch(training=training, whole=whole)  # settles weights, so lane ``net`` is empty if not ``whole``
        for block in () if whole else self._blocks:
            if self.is_away(block) and not block.uses:
                self._slices.release(block)()

    def unforeseen(self, block: Block) -> bool:
        """Brings the block's weights, so that the rest of the schedule does not hold."""
        self._strayed = True
        self.bring(block)
        return False

    def ensure(self, block: Block) -> None:
        """Brings weights that the rank does not have whole."""
        self.renewed.discard(block.index)
        if self._strayed or not _is_whole(block):
            self.bring(block)

    def settle(self, part: Part) -> None:
        """Waits until the part's weights are final, and lane ``net`` is empty."""
        self._lanes.drain()
        super().settle(part)

    def bring(self, *blocks: Block, force: bool = False) -> None:
        """Makes weights whole, now; ``force`` exceeds the room for them."""
        for block in blocks:
            super().bring(block, force=force)
            if not _is_whole(block):
                if not force:
                    self._make_room(block)
                self._slices.gather(block)()

    def _leave(self, block: Block) -> None:
        """The rank's slice goes back to the disk: no rank may use the block any more."""
        if _is_whole(block):
            self._lanes.drain()
            self._slices.release(block)()

    def _make_room(self, block: Block) -> None:
        """Releases whole weights that are not in use; in a cycle the block used last goes first.

        Raises:
            OutOfMemoryBudgetError: Blocks in use leave too little.
        """
        if not self.is_away(block) or self._slices.is_shared:
            return
        capacity = self._context.placement.device_cache_bytes
        whole = [b for b in self._blocks if b is not block and self.is_away(b) and _is_whole(b)]
        left = capacity - _num_bytes([block, *whole])
        for victim in sorted(whole, key=lambda b: (b.index - block.index) % len(self._blocks), reverse=True):
            if left < 0 and not victim.uses:
                self._slices.release(victim)()
                left += _num_bytes([victim])
        if left < 0:
            raise OutOfMemoryBudgetError(
                f"block {block.name!r} needs {format_bytes(_num_bytes([block]))} for its whole weights; blocks in use at the same "
                f"time leave too little of the {format_bytes(capacity)} for them. Use fewer blocks at a time, give the plan "
                f"device_cache_bytes, or choose smaller blocks with block_cls."
            )

    @contextmanager
    def at_hand(self, block: Block) -> Iterator[None]:
        """The rank has its slice, and updates nothing else."""
        yield

    def open(self, block: Block) -> None:
        """A use of the block begins.

        Raises:
            UnsupportedError: Code has changed weights that all ranks read.
        """
        if not block.uses:
            _refuse_changes(block)
        super().open(block)

    def shut(self, block: Block) -> None:
        """A use of the block ends; its parameters become handles.

        Raises:
            UnsupportedError: The block's code has changed weights that all ranks read.
        """
        if block.uses == 1:
            _refuse_changes(block)
        super().shut(block)
        if not block.uses and self.is_released(block):
            self.parameters.hide(block)
            restore([part.params[index] for part in block.parts for index in part.moved])

    def changes(self, blocks: Sequence[Block]) -> AbstractContextManager[None]:
        """Code changes weights that this rank alone sees meanwhile."""
        return self._slices.apart(blocks)

    def assign(self, part: Part, index: int, value: Tensor) -> None:
        """Only this rank computes with the value. Its slice counts when the update begins.

        That follows the block's REDUCE, so no other rank computes with this memory any more. Where
        no update follows, or the place is needed before it, the block's next use is refused.
        """
        follows = self._trains and part.params[index].requires_grad and not part.block.weights_on_disk
        if not (_is_shared(part) and follows):
            super().assign(part, index, value)
            return
        restore([part.params[index]])
        before = versions(part)
        moved_weights.assign(part, index, value, stays=True, is_saved=False)
        part.versions += versions(part) - before

    def end_batch(self) -> None:
        """Callbacks of Lightning follow."""
        super().end_batch()
        self._trains = False

    def before_update(self, block: Block) -> None:
        """The rank's slice will change.

        Raises:
            UnsupportedError: Code has changed weights that all ranks read.
        """
        _refuse_changes(block)


def _refuse_changes(block: Block) -> None:
    for part in block.parts:
        if _is_shared(part) and part.versions != versions(part):
            raise changed_while_shared(block)


def _is_shared(part: Part) -> bool:
    """Whether other ranks see what this one writes to the part's memory."""
    return isinstance(part.arena, SharedArena) and part.arena.is_shared


def _is_whole(block: Block) -> bool:
    return all(part.is_whole for part in block.parts)


def _num_bytes(blocks: Iterable[Block]) -> int:
    return sum(part.weight_bytes for block in blocks for part in block.parts)
