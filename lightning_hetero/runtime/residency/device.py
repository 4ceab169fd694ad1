"""Weights on a device with memory of its own: in use, behind the door, on their way in and out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from lightning_hetero.errors import DeviceMemoryError
from lightning_hetero.ir.plan import Tier, UpdateLane
from lightning_hetero.ir.schedule import OpKind, Schedule
from lightning_hetero.lowering import DeviceRoom
from lightning_hetero.runtime.activations.autocast import WeightCasts
from lightning_hetero.runtime.context import RunContext
from lightning_hetero.runtime.device import DeviceSide, DeviceWeights
from lightning_hetero.runtime.lanes import Event, Ticket
from lightning_hetero.runtime.residency.doors import Doors
from lightning_hetero.runtime.residency.host import wait_written
from lightning_hetero.runtime.residency.host_weights import HostWeights
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.store.live.geometry import versions
from lightning_hetero.store.live.mirrors import readers_of


class DeviceResidency:
    """See :class:`~lightning_hetero.runtime.residency.Residency`.

    Args:
        context: The run.
        side: Weights, gradients and updates on the device.

    Attributes:
        renewed: Blocks that an op outside the schedule has updated since their last use.
    """

    def __init__(self, context: RunContext, side: DeviceSide) -> None:
        run = context.run
        self._blocks, self._store = run.blocks, run.store
        self._lanes, self._side = run.lanes, side
        self.casts = WeightCasts(run.lanes.device_type, side.weights.reference)
        self.doors = Doors(self, run.blocks, run.store, self.casts)
        self.weights = HostWeights(context)
        self.renewed: set[int] = set()
        self._inside: set[int] = set()  # blocks that have their place on the device
        self._in_batch = self._evaluates = False
        self._lent: dict[int, tuple[list[Part], list[Part]]] = {}  # weights and state of blocks that the host has until MIRROR ends
        self._cache_bytes = context.device_cache_bytes

    @property
    def copies(self) -> DeviceWeights:
        """What the device holds of the weights."""
        return self._side.weights

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
        trained = self.weights.model.blocks[block.index].num_trainable_params > 0
        return self.is_away(block) or (trained and block.plan.update is UpdateLane.CPU)

    def is_on_host(self, block: Block) -> bool:
        """Weights that live on the device, and that it updates, are there alone."""
        return block.index not in self._inside or self._comes_from_below(block)

    # ---- a batch ------------------------------------------------------------------------------------------------------------

    def held(self, last: Schedule | None) -> tuple[frozenset[int], DeviceRoom]:
        """What the batch before leaves once its ops have ended, or what is there now."""
        copies = self._side.weights
        written = [b for b in self._blocks if copies.is_written(b)]
        for block in written:  # whoever wrote has waited for all lanes
            copies.free(block)
        if last is not None:
            resident, device = last.resident_after, last.device_after - {b.index for b in written}
        else:
            resident = frozenset(b.index for b in self.weights.held())
            current = [b for b in self._blocks if copies.holds(b) and not copies.is_outdated(b)]
            device = frozenset(b.index for b in current if self._comes_from_below(b))
        return resident, DeviceRoom(resident=device, capacity_bytes=self._cache_bytes)

    def room_before(self, schedule: Schedule) -> DeviceRoom:
        """What there was as the schedule began."""
        return DeviceRoom(resident=schedule.device_before, capacity_bytes=self._cache_bytes)

    def begin_batch(self, *, training: bool, whole: bool) -> None:
        """Weights that live on the device come from behind the door as they are used."""
        if not whole:
            self._lanes.drain()
            self._side.updates.give_back()
        self._in_batch, self._evaluates = True, not training

    def end_batch(self) -> None:
        """Weights that the CPU updates go behind the door."""
        self._in_batch = self._evaluates = False
        for block in self._blocks:
            if not block.uses and self.is_released(block):
                self.doors.hide(block)

    def unforeseen(self, block: Block) -> bool:
        """Brings the block's weights; the rest of the schedule does not know what is on the device now."""
        if self._side.weights.is_outdated(block):
            self.provide(block)
        else:
            self.ensure(block)
        return False

    def ensure(self, block: Block) -> None:
        """Brings the block's weights if the device does not hold them as they are now."""
        if block.index in self.renewed or not self._side.weights.holds(block):
            self.provide(block)

    # ---- use ----------------------------------------------------------------------------------------------------------------

    def open(self, block: Block) -> None:
        """A use of the block begins: its parameters are tensors on the device until :meth:`shut`."""
        if not block.uses:
            self._side.weights.bind(block)
        self.doors.open(block)

    def shut(self, block: Block) -> None:
        """A use of the block ends; what user code has written to its weights goes to the host."""
        block.uses = max(0, block.uses - 1)
        if block.uses:
            return
        if block.index in self.casts.blocks:
            self.casts.drop(block)
        copies, away = self._side.weights, self.is_away(block)
        # An evaluation computes with weights that user code has put in their place for a while, as it left them.
        stays = self._evaluates and not away
        if not stays and copies.changed(block) and block.plan.update is UpdateLane.CPU:
            self._lanes.drain()
            self._bring_to_host(block)
            copies.download(block)
        if away:
            copies.unbind(block)
        if self.is_released(block):
            self.doors.hide(block)

    def at_hand(self, block: Block) -> AbstractContextManager[None]:
        """The UPDATE is on lane ``compute``: all of the block is on the device."""
        return nullcontext()

    def provide(self, block: Block) -> None:
        """Brings a block's newest weights to the device, now, whatever the schedule says."""
        self._lanes.drain()
        copies = self._side.weights
        self.renewed.discard(block.index)
        if copies.holds(block) and not copies.is_outdated(block):
            return
        self._bring_to_host(block)
        while True:
            try:
                copies.upload(block)
                return
            except DeviceMemoryError:
                held = [b for b in self._blocks if b is not block and not b.uses and self.is_away(b) and copies.holds(b)]
                if not held:
                    raise
                # In a cycle over the blocks, the one used last comes again last.
                copies.free(max(held, key=lambda b: (b.index - block.index) % len(self._blocks)))

    def _bring_to_host(self, block: Block) -> None:
        self.weights.bring(block)
        for part in block.parts:
            wait_written(self._store, part)

    def bring(self, *blocks: Block, force: bool = False) -> None:
        """Brings weights into host memory, now."""
        self._lanes.drain()
        self.weights.bring(*blocks, force=force)
        for part in [part for block in blocks for part in block.parts]:
            self.settle(part)

    def release(self, block: Block) -> None:
        """Gives the block's host memory back, unless it is in use."""
        self.weights.release(block)

    def settle(self, part: Part) -> None:
        """Waits until the part's weights are final; parameters that live on the device become ordinary again."""
        self._lanes.drain()
        wait_written(self._store, part)
        if not readers_of(part):
            self.doors.restore(part)
        copies, block = self._side.weights, part.block
        if not self.is_away(block) and copies.holds(block):
            if copies.is_outdated(block):
                copies.upload(block)
            copies.bind(block)

    # ---- begin and end ------------------------------------------------------------------------------------------------------

    def install(self, context: RunContext) -> None:
        """Goes on with another plan."""
        self.weights.install(context)
        self._cache_bytes = context.device_cache_bytes

    def move_in(self) -> None:
        """What lives on the device goes there; other blocks are in host memory, or on disk.

        Raises:
            DeviceMemoryError: The device is too small for it.
        """
        try:
            self.enter()
        except DeviceMemoryError:  # what stayed there may lie in the way
            for block in self._blocks:
                self.leave(block)
            self.enter()

    def enter(self) -> None:
        """Blocks that have no place on the device get one."""
        for block in self._blocks:
            if block.index in self._inside:
                continue
            self._inside.add(block.index)
            if self.is_away(block):
                self._side.weights.adopt(block)
            else:
                self._side.weights.bind_resident(block, host_copy=self._comes_from_below(block))
            if self.is_released(block):
                self.doors.hide(block)
            for part in block.parts:
                if part.native is not None and part.native.geometry.num_state and block.plan.update is UpdateLane.DEVICE:
                    move = self._side.updates.keep if block.plan.state is Tier.DEVICE else self._side.updates.borrow
                    move(part)

    def leave(self, block: Block) -> None:
        """Brings a block's weights and state back into the engine's memory; nothing of it is under way."""
        self._inside.discard(block.index)
        self._side.weights.withdraw(block)
        for part in block.parts:
            if part.state_home is not None:
                self._side.updates.withdraw(part)

    def set_aside(self, num_bytes: int) -> None:
        """Another plan needs other memory for weights and state: everything leaves the device, while the executor rests.

        Raises:
            OutOfMemoryBudgetError: The device has not so much free.
        """
        if num_bytes != self._lanes.memory().capacity_bytes:
            for block in self._blocks:
                self.leave(block)
            self._lanes.resize(num_bytes)

    # ---- a step that is kept ------------------------------------------------------------------------------------------------

    def wait_for_record(self, latest: Callable[[OpKind, int], Event | None], *, whole: bool) -> None:
        """Waits for what the record of a step names: what the device has updated and that lives on the host."""
        behind = False
        for block in self._blocks:
            changed = whole and self._side.weights.changed(block)  # also brings back what was moved
            if block.plan.update is UpdateLane.CPU:
                behind |= changed
            elif whole or block.weights_on_disk:
                last = latest(OpKind.SWAP_OUT, block.index)
                if last is not None:
                    last.wait()
        if behind:  # user code has written to weights that the CPU has updated
            self._lanes.drain()

    def lends(self, block: Block) -> bool:
        """Whether the device has weights or state that the host has not; brings back what was moved."""
        changed = self._side.weights.changed(block)
        if block.plan.update is UpdateLane.CPU:
            return changed
        return any(part.mirrored_versions != versions(part) for part in block.parts)

    def lend(self, block: Block) -> list[Ticket]:
        """MIRROR on ``d2h``: host memory gets what the device has alone, until :meth:`take_back`."""
        changed = [part for part in block.parts if part.mirrored_versions != versions(part)]
        weights = [part for part in changed if self._side.weights.lend(part)]
        self._lent[block.index] = weights, [part for part in changed if self._side.updates.lend(part)]
        return []

    def take_back(self, block: Block, tickets: Sequence[Ticket]) -> None:
        """What was lent is on the disk once ``tickets`` are done; then its host memory goes back to the system."""
        weights, states = self._lent.pop(block.index, ([], []))
        if weights or states:
            for ticket in tickets:
                ticket.wait()
        for part in weights if not self.is_on_host(block) else ():
            part.arena.drop()
        for part in states:
            self._side.updates.drop(part)
