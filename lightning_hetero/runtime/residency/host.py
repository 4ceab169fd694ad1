"""Weights if the device is the host: in host memory, or on disk and cached in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_hetero._native import READY
from lightning_hetero.ir.schedule import Schedule
from lightning_hetero.lowering import DeviceRoom
from lightning_hetero.runtime.activations.autocast import WeightCasts
from lightning_hetero.runtime.context import RunContext
from lightning_hetero.runtime.residency import Residency
from lightning_hetero.store.live.blocks import Block
from lightning_hetero.store.live.geometry import versions
from lightning_hetero.store.live.moved_weights import bring_back_all


class HostResidency(Residency):
    """See :class:`~lightning_hetero.runtime.residency.Residency`."""

    def __init__(self, context: RunContext) -> None:
        super().__init__(context, WeightCasts("cpu"))
        self._strayed = False  # the batch has used a block outside its schedule

    def is_away(self, block: Block) -> bool:
        """Whether the block's weights live on disk."""
        return block.weights_on_disk

    def is_released(self, block: Block) -> bool:
        """The parameters of a block on disk are handles between two uses."""
        return block.weights_on_disk

    def held(self, last: Schedule | None) -> tuple[frozenset[int], DeviceRoom | None]:
        """The blocks in memory now, which ops change as they are submitted."""
        held = self.weights.held()
        for block in held:  # a batch without backward has not waited for every FETCH
            for part in block.parts:
                if part.last_write is not None and part.last_write.poll() < READY:
                    self.renewed.add(block.index)
        return frozenset(b.index for b in held), None

    def begin_batch(self, *, training: bool, whole: bool) -> None:
        """Waits for weights that were brought outside a schedule."""
        if self._strayed or not whole:
            self._strayed = False
            for part in [part for block in self._blocks for part in block.parts]:
                self.settle(part)

    def unforeseen(self, block: Block) -> bool:
        """Brings the block's weights; the schedule still holds, without an edge to the fetch."""
        self._strayed = True
        self.weights.bring(block)
        self.weights.bring_next(block)
        self.bring(block)
        return True

    def ensure(self, block: Block) -> None:
        """Brings weights that are not in memory, or that an op outside the schedule may write."""
        if self._strayed or not block.resident or block.index in self.renewed:
            self.renewed.discard(block.index)
            self.bring(block)

    def open(self, block: Block) -> None:
        """A use of the block begins: its parameters are ordinary tensors."""
        self.parameters.open(block)
        if block.uses == 1:
            for part in block.parts:
                part.versions = versions(part)

    def provide(self, block: Block) -> None:
        """Brings weights into host memory, now."""
        self.bring(block)

    @contextmanager
    def at_hand(self, block: Block) -> Iterator[None]:
        """Weights are in memory, and parameters ordinary tensors."""
        self.bring(block)
        self.open(block)
        try:
            yield
        finally:
            self.shut(block)

    def shut(self, block: Block) -> None:
        """A use of the block ends."""
        block.uses = max(0, block.uses - 1)
        if block.uses:
            return
        if block.index in self.casts.blocks:
            self.casts.drop(block)
        if block.weights_on_disk:
            bring_back_all(block)
        changed = self.parameters.changed(block)
        if block.weights_on_disk:
            for part in changed:
                part.dirty = True
            self.parameters.hide(block)
        else:
            self.parameters.guard(block)
