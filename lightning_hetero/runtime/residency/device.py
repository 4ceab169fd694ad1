"""Weights on a device with memory of its own: in use, as handles, on their way in and out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from lightning_hetero._native import Ticket
from lightning_hetero.errors import DeviceMemoryError
from lightning_hetero.ir.plan import Tier, UpdateLane
from lightning_hetero.ir.schedule import NO_BLOCK, OpKind, Schedule
from lightning_hetero.lanes import Event
from lightning_hetero.lowering import DeviceRoom
from lightning_hetero.runtime.activations.autocast import WeightCasts
from lightning_hetero.runtime.context import RunContext
from lightning_hetero.runtime.device import DeviceSide
from lightning_hetero.runtime.residency import Residency, changed_while_shared
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.store.live.geometry import versions
from lightning_hetero.store.live.moved_weights import bring_back_all


class DeviceResidency(Residency):
    """See :class:`~lightning_hetero.runtime.residency.Residency`."""

    def __init__(self, context: RunContext, side: DeviceSide) -> None:
        lanes, self._slices = context.run.lanes, context.run.slices
        super().__init__(context, WeightCasts(lanes.device_type, side.weights.reference))
        if self._slices is not None:
            self._slices.reads.attach(context.run.store, self._blocks, self.settle)
            self.weights.leaves = self._leave
        self._lanes, self._side, self.copies = lanes, side, side.weights
        self._inside: set[int] = set()  # blocks that have their place on the device
        self._in_batch = self._evaluates = False
        # Blocks whose weights and state have host memory until their MIRROR ends.
        self._lent: dict[int, tuple[list[Part], list[Part]]] = {}

    # ---- places ----------------------------------------------------------------------------------

    def is_away(self, block: Block) -> bool:
        """Whether the block's weights live below the device."""
        return block.plan.weights is not Tier.DEVICE

    def is_released(self, block: Block) -> bool:
        """Parameters that live there, and are new on the host first, are handles between batches.

        So code that writes them then, even as ``param.data``, also writes the host's copy, from
        which the next update starts.
        """
        if self.is_away(block) or (not self._in_batch and self._comes_from_below(block)):
            return True
        return self._slices is not None and not all(part.is_whole for part in block.parts)

    def _comes_from_below(self, block: Block) -> bool:
        through_host = block.plan.update is UpdateLane.CPU or self._slices is not None
        return self.is_away(block) or (self._is_trained(block) and through_host)

    def _is_trained(self, block: Block) -> bool:
        return self.weights.model.blocks[block.index].num_trainable_params > 0

    def _is_written_back(self, block: Block) -> bool:
        """Whether changes on the device must reach the host, and no SWAP_OUT brings them there."""
        by_swap = self._is_trained(block) and block.plan.update is UpdateLane.DEVICE
        return self._comes_from_below(block) and not by_swap

    def is_on_host(self, block: Block) -> bool:
        """Weights that live on the device and that it updates have no host memory.

        Ranks of one host have it together, and one may be reading it.
        """
        return block.index not in self._inside or self._comes_from_below(block) or self._slices is not None

    # ---- a batch ---------------------------------------------------------------------------------

    def held(self, last: Schedule | None) -> tuple[frozenset[int], DeviceRoom]:
        """The weights that the last batch leaves once its ops have ended, or those there now."""
        copies = self._side.weights
        written = copies.written_blocks()
        for block in written:  # the writer has waited for all lanes
            copies.free(block)
        if last is not None:
            resident, device = last.resident_after, last.device_after - {b.index for b in written}
        else:
            resident = frozenset(b.index for b in self.weights.held())
            current = [b for b in self._blocks if copies.holds(b) and not copies.is_outdated(b)]
            device = frozenset(b.index for b in current if self._comes_from_below(b))
        room = DeviceRoom(resident=device, capacity_bytes=self._context.placement.device_cache_bytes)
        if (slices := self._slices) is not None:
            room = replace(room, ranks=slices.collectives.shards, gathers_in_place=slices.is_shared)
        return resident, room

    def begin_batch(self, *, training: bool, whole: bool) -> None:
        """Handles become ordinary parameters as their block is used."""
        if not whole:
            self._lanes.drain()
            self._side.updates.give_back()
        self._in_batch, self._evaluates = True, not training

    def end_batch(self) -> None:
        """Parameters whose new weights come from the host become handles."""
        self._in_batch = self._evaluates = False
        for block in self._blocks:
            if not (block.uses or self.is_away(block)) and self.is_released(block):  # others are handles already
                bring_back_all(block)
                self.parameters.hide(block)

    def is_stale(self, block: Block) -> bool:
        """Code has written weights on disk, and the device has them as they were before."""
        return not block.resident and self._side.weights.is_written(block)

    def unforeseen(self, block: Block) -> bool:
        """Brings the block's weights, so that the rest of the schedule does not hold."""
        if self._side.weights.is_outdated(block):
            self.provide(block)
        else:
            self.ensure(block)
        return False

    def ensure(self, block: Block) -> None:
        """Brings the block's weights if the device does not have the newest."""
        if block.index in self.renewed or not self._side.weights.holds(block):
            self.provide(block)

    # ---- use -------------------------------------------------------------------------------------

    def open(self, block: Block) -> None:
        """A use of the block begins: its parameters are tensors on the device."""
        if not block.uses:
            self._side.weights.bind(block)
        self.parameters.open(block)

    def shut(self, block: Block) -> None:
        """A use of the block ends; weights that user code has written go to the host.

        Those of parameters that are no handles then go before their update.
        """
        block.uses = max(0, block.uses - 1)
        if block.uses:
            return
        if block.index in self.casts.blocks:
            self.casts.drop(block)
        if self.is_released(block):
            self._gather(block)
            if self.is_away(block):
                self._side.weights.unbind(block)
            self.parameters.hide(block)
        elif not self._evaluates:  # an evaluation may use weights that user code has replaced for a while
            bring_back_all(block)
            if self._slices is not None:  # a frozen block has no update that would look
                self._gather(block)

    def before_update(self, block: Block) -> None:
        """The place is the device's memory if the update changes its copy, else the host's."""
        copies = self._side.weights
        if self._slices is None and block.plan.update is UpdateLane.DEVICE:
            copies.reclaim(block)
            if copies.is_outdated(block):
                self.provide(block)
        elif block.uses or not self.is_away(block):  # else its last use has
            self._gather(block)

    @contextmanager
    def changes(self, blocks: Sequence[Block]) -> Iterator[None]:
        """Code may change weights; of ranks that share them, each rank's own slice counts then."""
        yield
        if (slices := self._slices) is None:
            return
        copies = self._side.weights
        changed = [block for block in blocks if copies.changed(block)]
        self._lanes.drain()
        for block in changed:
            copies.keep_own(block)
        (any_changed,) = slices.collectives.meet("MATERIALIZE", NO_BLOCK, bool(changed))
        for part in [part for block in blocks for part in block.parts] if any_changed else ():
            part.is_whole = False
            copies.outdate(part)

    def _gather(self, block: Block) -> None:
        """Brings weights that user code has changed on the device to where updates read them."""
        copies = self._side.weights
        if not copies.changed(block):
            return
        if self._slices is not None:
            raise changed_while_shared(block)
        if self._is_written_back(block) or (self.is_away(block) and copies.is_user_written(block)):
            self._lanes.drain()
            self._bring_to_host(block)
            copies.download(block)

    @contextmanager
    def at_hand(self, block: Block) -> Iterator[None]:
        """Nothing: the UPDATE is on lane ``compute``, and all of the block is on the device."""
        yield

    def provide(self, block: Block) -> None:
        """Brings a block's newest weights to the device, now."""
        self._lanes.drain()
        copies = self._side.weights
        self.renewed.discard(block.index)
        if copies.holds(block) and not copies.is_outdated(block):
            return
        slices = self._slices if self._slices is not None and self._slices.on_devices else None
        if slices is None:
            self._bring_to_host(block)
        else:
            self._bring_own(block)
        while True:
            try:
                if slices is None:
                    copies.upload(block)
                else:
                    copies.upload_slice(block)
                break
            except DeviceMemoryError:
                held = [b for b in self._blocks if b is not block and not b.uses and self.is_away(b) and copies.holds(b)]
                if not held:
                    raise
                # In a cycle over the blocks, the one used last is needed last.
                copies.free(max(held, key=lambda b: (b.index - block.index) % len(self._blocks)))
        if slices is not None:
            slices.gather_on_device(block, copies)()

    def _bring_own(self, block: Block) -> None:
        """Brings the newest weights that this process has to the host."""
        self.weights.bring(block)
        for part in block.parts:
            self._await_write(part)

    def _bring_to_host(self, block: Block) -> None:
        """Brings the newest weights to the host; where several ranks have them, all do so."""
        self._bring_own(block)
        if self._slices is not None and not all(part.is_whole for part in block.parts):
            self._slices.gather(block)()

    def _leave(self, block: Block) -> None:
        """The rank's slice goes back to the disk: the devices of all ranks have read it."""
        if self._slices is not None and all(part.is_whole for part in block.parts):
            self._lanes.drain()
            self._slices.release(block)()

    def bring(self, *blocks: Block, force: bool = False) -> None:
        """Brings weights into host memory, now."""
        self._lanes.drain()
        super().bring(*blocks, force=force)
        for block in blocks if self._slices is not None else ():
            self._bring_to_host(block)

    def settle(self, part: Part) -> None:
        """Waits until the part's weights are final; parameters on the device become ordinary."""
        self._lanes.drain()
        super().settle(part)
        copies, block = self._side.weights, part.block
        if not self.is_away(block) and copies.holds(block) and all(one.is_whole for one in block.parts):
            if copies.is_outdated(block):
                copies.upload(block)
            copies.bind(block)

    # ---- begin and end ---------------------------------------------------------------------------

    def move_in(self) -> None:
        """Moves to the device the blocks that live there; see :class:`Residency`."""
        try:
            self._move_in()
        except DeviceMemoryError:  # blocks that stayed there may lie in the way
            for block in self._blocks:
                self.leave(block)
            self._move_in()

    def _move_in(self) -> None:
        if self._slices is not None:  # before the cache of weights takes what is left
            self._slices.gradients.move_in(self._blocks)
        self.enter()

    def enter(self) -> None:
        """Gives blocks without a place on the device one."""
        for block in self._blocks:
            if block.index in self._inside:
                continue
            self._inside.add(block.index)
            if self.is_away(block):
                self._side.weights.prepare(block)
                if block.weights_on_disk and self._slices is None:  # ranks have slices in memory that they share
                    self.weights.buffer(block)
            else:
                if self._slices is not None:
                    self._bring_to_host(block)
                self._side.weights.bind_resident(block, host_copy=self.is_on_host(block))
            if self.is_released(block):
                self.parameters.hide(block)
            for part in block.parts:
                if part.native is not None and part.native.geometry.num_state and block.plan.update is UpdateLane.DEVICE:
                    move = self._side.updates.keep if block.plan.state is Tier.DEVICE else self._side.updates.borrow
                    move(part)

    def leave(self, block: Block) -> None:
        """Brings a block's weights and state back into the engine's memory."""
        self._inside.discard(block.index)
        self.weights.unbuffer(block)
        self._side.weights.withdraw(block)
        for part in block.parts:
            if part.state_home is not None:
                self._side.updates.withdraw(part)

    def set_aside(self, num_bytes: int) -> None:
        """Reserves another amount of device memory; see :class:`Residency`."""
        if num_bytes != self._lanes.memory().capacity_bytes:
            for block in self._blocks:
                self.leave(block)
            if self._slices is not None:
                self._slices.gradients.move_out()
            self._lanes.resize(num_bytes)

    # ---- a step that is kept ---------------------------------------------------------------------

    def wait_for_record(self, latest: Mapping[tuple[OpKind, int], Event], *, whole: bool) -> None:
        """Waits for weights and state of the record that the device has updated for the host."""
        behind = False
        for block in self._blocks:
            changed = whole and self._side.weights.changed(block)  # also copies moved weights back
            if self._is_written_back(block):
                behind |= changed
            elif (whole or block.weights_on_disk) and (last := latest.get((OpKind.SWAP_OUT, block.index))) is not None:
                last.wait()
        if behind:  # user code has written to weights that the CPU has updated
            self._lanes.drain()

    def lends(self, block: Block) -> bool:
        """Whether only the device has the newest weights or state of the block."""
        changed = self._side.weights.changed(block)  # also copies moved weights back
        if self._is_written_back(block):
            return changed
        return any(part.mirrored_versions != versions(part) for part in block.parts)

    def lend(self, block: Block) -> list[Ticket]:
        """MIRROR on ``d2h``: copies these to host memory, until :meth:`take_back`."""
        changed = [part for part in block.parts if part.mirrored_versions != versions(part)]
        weights = [part for part in changed if self._side.weights.lend(part)]
        self._lent[block.index] = weights, [part for part in changed if self._side.updates.lend(part)]
        return []

    def take_back(self, block: Block, tickets: Sequence[Ticket]) -> None:
        """Frees the host memory of :meth:`lend` once the tickets are done."""
        weights, states = self._lent.pop(block.index, ([], []))
        if weights or states:
            for ticket in tickets:
                ticket.wait()
        for part in weights if not self.is_on_host(block) else ():
            part.arena.drop()
        for part in states:
            self._side.updates.drop(part)
