"""Where the weights of blocks are on a device with memory of its own: in use, behind the door, on their way in and out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_hetero._native import READY
from lightning_hetero.errors import DeviceMemoryError
from lightning_hetero.ir.plan import Tier, UpdateLane
from lightning_hetero.ir.schedule import Lane
from lightning_hetero.runtime.device import DeviceSide
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.runtime.lanes import Lanes
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.store.live.geometry import versions
from lightning_hetero.store.live.mirrors import writes_of


class DeviceResidents(Executor):
    """The blocks of one model, some of which are on the device at a time.

    Args:
        blocks: As for :class:`Executor`.
        lanes: The device.
        side: Weights, gradients and updates there.
        **common: As for :class:`Executor`.
    """

    def __init__(self, blocks: Sequence[Block], *, lanes: Lanes, side: DeviceSide, **common: Any) -> None:
        super().__init__(blocks, **common)
        self.lanes, self.side = lanes, side
        self.copies = self.weights = side.weights
        self._renewed: set[int] = set()  # blocks that no schedule has updated since their last use
        self._inside: set[int] = set()  # blocks that have their place on the device
        self._in_batch = self._evaluates = False

    # ---- places -------------------------------------------------------------------------------------------------------------

    def is_away(self, block: Block) -> bool:
        """Whether the block's weights live below the device."""
        return block.plan.weights is not Tier.DEVICE

    def is_released(self, block: Block) -> bool:
        """Weights that live on the device and that the CPU updates are behind the door between two batches.

        So whoever writes them then, even as ``param.data``, writes the host's copy too, which the next update starts from.
        """
        return self.is_away(block) or (not self._in_batch and self._comes_from_below(block))

    def _comes_from_below(self, block: Block) -> bool:
        trained = self.model.blocks[block.index].num_trainable_params > 0
        return self.is_away(block) or (trained and block.plan.update is UpdateLane.CPU)

    def is_on_host(self, block: Block) -> bool:
        """Weights that live on the device, and that it updates, are there alone."""
        return block.index not in self._inside or self._comes_from_below(block)

    # ---- use ----------------------------------------------------------------------------------------------------------------

    def open(self, block: Block) -> None:
        """A use of the block begins: its parameters are tensors on the device until :meth:`shut`."""
        if not block.uses:
            self.weights.bind(block)
        super().open(block)

    def shut(self, block: Block) -> None:
        """A use of the block ends; what user code has written to its weights goes to the host."""
        block.uses = max(0, block.uses - 1)
        if block.uses:
            return
        # An evaluation computes with weights that user code has put in their place for a while, as it left them.
        stays = self._evaluates and not self.is_away(block)
        if not stays and self.weights.changed(block) and block.plan.update is UpdateLane.CPU:
            self.lanes.drain()
            self._bring_to_host(block)
            self.weights.download(block)
        if self.is_away(block):
            self.weights.unbind(block)
        if self.is_released(block):
            self.hide(block)

    def settle(self, part: Part) -> None:
        """Waits until the part's weights are final; parameters that live on the device become ordinary again."""
        self.lanes.drain()
        super().settle(part)
        if not self.is_away(part.block) and self.weights.holds(part.block):
            self.weights.bind(part.block)

    def bring(self, *blocks: Block, force: bool = False) -> None:
        """Weights into host memory, now."""
        self.lanes.drain()
        super().bring(*blocks, force=force)

    def provide(self, block: Block) -> None:
        """Weights onto the device, now."""
        self._provide(block)

    def _provide(self, block: Block) -> None:
        """Brings a block's newest weights to the device, now, whatever the schedule says."""
        self.lanes.drain()
        self._renewed.discard(block.index)
        if self.weights.holds(block) and not self.weights.is_outdated(block):
            return
        self._bring_to_host(block)
        while True:
            try:
                self.weights.upload(block)
                return
            except DeviceMemoryError:
                held = [b for b in self.blocks if b is not block and not b.uses and self.is_away(b) and self.weights.holds(b)]
                if not held:
                    raise
                # In a cycle over the blocks, the one used last comes again last.
                self.weights.free(max(held, key=lambda b: (b.index - block.index) % len(self.blocks)))

    def _bring_to_host(self, block: Block) -> None:
        if not block.resident:
            self._fetch(block, self._make_room(block))
        for part in block.parts:
            self.store.revoke(part)  # whoever computes with it before the verdict on its update needs what was before
            if part.last_write is not None:
                part.last_write.wait(READY)
                part.last_write = None

    def end_batch(self) -> None:
        """As for :class:`Executor`."""
        self._in_batch = self._evaluates = False
        for block in self.blocks:
            if not block.uses and self.is_released(block):
                self.hide(block)

    @contextmanager
    def on_host(self, block: Block, *, whole: bool) -> Iterator[None]:
        """As for :class:`Executor`; what lives on the device alone has host memory only for so long, until it is mirrored."""
        if not whole or (block.plan.update is UpdateLane.CPU and not self.weights.changed(block)):
            yield
            return
        self.weights.changed(block)  # brings back what was moved
        changed = [part for part in block.parts if part.mirrored_versions != versions(part)]
        begin_s = time.monotonic()
        weights = [part for part in changed if self.weights.lend(part)]
        states = [part for part in changed if self.side.updates.lend(part)]
        if weights or states:
            geometries = [part.native.geometry for part in states if part.native is not None]
            moved = sum(part.weight_bytes for part in weights) + sum(4 * g.num_state * g.num_elements for g in geometries)
            self.recorder.did("MIRROR", block.name, Lane.D2H, begin_s, moved)
        yield
        for part in block.parts:
            for ticket in writes_of(part):  # ops of the device know nothing of them
                ticket.wait()
        for part in weights if not self.is_on_host(block) else ():
            part.arena.drop()
        for part in states:
            self.side.updates.drop(part)

    # ---- begin and end ------------------------------------------------------------------------------------------------------

    def move_in(self) -> None:
        """What lives on the device goes there; other blocks are in host memory, or on disk.

        Raises:
            DeviceMemoryError: The device is too small for it.
        """
        try:
            self._enter()
        except DeviceMemoryError:  # what stayed there may lie in the way
            for block in self.blocks:
                self.leave(block)
            self._enter()

    def _enter(self) -> None:
        for block in self.blocks:
            if block.index in self._inside:
                continue
            self._inside.add(block.index)
            if self.is_away(block):
                self.weights.adopt(block)
            else:
                self.weights.bind_resident(block, host_copy=self._comes_from_below(block))
            if self.is_released(block):
                self.hide(block)
            for part in block.parts:
                if part.native is not None and part.native.geometry.num_state and block.plan.update is UpdateLane.DEVICE:
                    move = self.side.updates.keep if block.plan.state is Tier.DEVICE else self.side.updates.borrow
                    move(part)

    def set_aside(self, num_bytes: int) -> None:
        """Another plan needs other memory for weights and state: everything leaves the device, while the executor rests.

        Raises:
            OutOfMemoryBudgetError: The device has not so much free.
        """
        if num_bytes != self.lanes.memory().capacity_bytes:
            for block in self.blocks:
                self.leave(block)
            self.lanes.resize(num_bytes)

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """Between two batches: inside, nothing of the model is on the device, and its memory is free for others."""
        self.rest()
        num_bytes = self.lanes.memory().capacity_bytes
        self.set_aside(0)
        try:
            yield
        finally:
            self.set_aside(num_bytes)
            self.move_in()

    def leave(self, block: Block) -> None:
        """Brings a block's weights and state back into the engine's memory; nothing of it is under way."""
        self._inside.discard(block.index)
        self.weights.withdraw(block)
        for part in block.parts:
            if part.state_home is not None:
                self.side.updates.withdraw(part)
