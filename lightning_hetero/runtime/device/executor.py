"""Executes a schedule for a device that has memory of its own: the same steps, with ops that run on lanes beside compute.

[Note: Whose turn]
The thread that computes issues ops, in the order of the schedule; lanes run them. What an op has to know (hyper-parameters, the
scale of gradients, which gradients there are) is read off as it is issued; what it works on (gradients on the host, staged state,
memory) belongs to the lanes until its event has passed. The store has one user at a time: ops that touch it hold
:attr:`DeviceExecutor._turn`, and the thread that computes touches it only once all lanes are empty.

[Note: Strays]
A use of a block that the schedule does not foresee ends the schedule for the rest of the batch: lanes drain, and from then on each
use brings its weights, and each block's update follows the verdict. The next batch is expected to use the blocks as this one did.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lightning_hetero._native import READY
from lightning_hetero.errors import DeviceMemoryError
from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Plan, Tier, UpdateLane
from lightning_hetero.ir.schedule import NO_BLOCK, Lane, Op, OpKind, Payload, Phase
from lightning_hetero.lowering import DeviceRoom
from lightning_hetero.runtime.activations.block import Activations
from lightning_hetero.runtime.activations.swaps import SwapFiles
from lightning_hetero.runtime.device import DeviceSide, HostGradient
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.runtime.lanes import Event, Lanes, Ticket
from lightning_hetero.runtime.optimizers import OptimizerBinding
from lightning_hetero.store.blocks import Block, Part
from lightning_hetero.store.geometry import versions
from lightning_hetero.store.mirrors import writes_of

Key = tuple[OpKind, int]


class All:
    """Passes when all of some events have: the end of an op that had nothing to do."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = tuple(events)

    def done(self) -> bool:
        """Whether all have passed."""
        return all(event.done() for event in self.events)

    def wait(self) -> None:
        """Waits for all."""
        for event in self.events:
            event.wait()


class DeviceExecutor(Executor):
    """The runtime of one model on a device with memory of its own.

    Args:
        blocks: As for :class:`Executor`.
        lanes: The device.
        side: Weights, gradients and updates there.
        device_cache_bytes: Device memory for weights that live below it.
        files: Files for activations that go to the disk; ``None`` where none do.
        **common: As for :class:`Executor`.

    Attributes:
        may_defer: The host has room for all gradients at once.
        probing: Nobody knows yet whether the device is large enough for the batch, so that updates wait until it is over.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        *,
        lanes: Lanes,
        side: DeviceSide,
        device_cache_bytes: int,
        files: SwapFiles | None = None,
        **common: Any,
    ) -> None:
        super().__init__(blocks, **common)
        self.lanes, self.side, self.files = lanes, side, files
        self.copies = self.weights = side.weights
        self.device_cache_bytes = device_cache_bytes
        self._turn = threading.RLock()
        self._events: dict[int, Event] = {}  # op -> its end
        self._ends: dict[Key, Event] = {}  # the latest op of each kind and block, of this step
        self._carried: dict[Key, Event] = {}  # the same, of the steps before
        self._marked: tuple[int, Event] = -1, All(())  # the latest mark, and the anchor at which it was made
        self._held_after: tuple[frozenset[int], frozenset[int]] | None = None  # what host and device hold once all lanes are empty
        self._renewed: set[int] = set()  # blocks that no schedule has updated since their last use
        self._at: Block | None = None  # whose anchor was the last one
        self._inside: set[int] = set()  # blocks that have their place on the device
        self.probing = self.may_defer = False
        self._in_batch = False
        self._follow_activations()

    def _follow_activations(self) -> None:
        self.activations = Activations(self.lanes, weights=self.weights.reference, files=self.files, poison=self._poison)

        def moves(block: Block) -> bool:  # what a root saves is its blocks' own, and its hooks would stand before theirs
            return self.is_away(block) or (self.lanes.counts and not block.spec.pinned)

        follow = self.activations.block
        self._saved = [follow(b.name, b.spec.module, b.plan, index=b.index, weights_move=moves(b)) for b in self.blocks]

    # ---- the step ---------------------------------------------------------------------------------------------------------

    def begin_step(self, *, training: bool) -> None:
        """As for :class:`Executor`; also what the ops before this step are known by."""
        schedule = self._schedule
        whole = schedule is not None and self._issued == len(schedule.ops)
        self._held_after = (schedule.resident_after, schedule.device_after) if schedule is not None and whole else None
        if not whole:
            self.lanes.drain()
            self.side.updates.give_back()
        self._carried |= self._ends
        self._events, self._ends, self._marked = {}, {}, (-1, All(()))
        self._at = None
        self._in_batch = True
        super().begin_step(training=training)
        self.activations.begin_batch()

    def _cancel_opened(self) -> None:
        """As for :class:`Executor`; what a whole schedule has opened it has updated, or will."""
        if self._held_after is None:
            super()._cancel_opened()

    def _held_now(self) -> tuple[frozenset[int], DeviceRoom]:
        written = [b for b in self.blocks if self.weights.is_written(b)]
        for block in written:  # whoever wrote has waited for all lanes
            self.weights.free(block)
        if self._held_after is not None:
            resident, device = self._held_after
            device -= {b.index for b in written}
        else:
            resident, _ = super()._held_now()
            current = [b for b in self.blocks if self.weights.holds(b) and not self.weights.is_outdated(b)]
            device = frozenset(b.index for b in current if self._comes_from_below(b))
        return resident, DeviceRoom(resident=device, capacity_bytes=self.device_cache_bytes)

    def _comes_from_below(self, block: Block) -> bool:
        trained = self.model.blocks[block.index].num_trainable_params > 0
        return self.is_away(block) or (trained and block.plan.update is UpdateLane.CPU)

    def forward_begins(self, block: Block, inputs: Any = ((), {})) -> None:
        """As for :class:`Executor`; then what the forward saves is followed."""
        super().forward_begins(block, inputs)
        if not _is_followed():
            self._saved[block.index].enter(*inputs)

    def forward_ends(self, block: Block, output: Any = None) -> None:
        """As for :class:`Executor`."""
        self._saved[block.index].leave(output)
        super().forward_ends(block, output)

    @property
    def _all_wait(self) -> bool:
        return self.deferred or self.probing

    def backward_starts(self) -> None:
        """As for :class:`Executor`: gradients of a batch before that are still shown become ordinary ones of this one."""
        self.side.gradients.conceal()
        self._at = None
        super().backward_starts()

    def check_gradients(self) -> None:
        """As for :class:`Executor`; then gradients on the host are shown to whoever clips or looks."""
        super().check_gradients()
        self.side.gradients.expose()

    def handover(self, binding: OptimizerBinding, scale: float) -> None:
        """``optimizer.step()``: issues what is left, and returns without waiting for it."""
        self.backward_ends()
        self.side.gradients.conceal()
        self.updater.begin_verdict(binding, scale)
        committed = self._schedule is not None and self._schedule.ops and self._schedule.ops[-1].kind is OpKind.COMMIT
        if self._schedule is not None:
            self._issue_through(len(self._schedule.anchors) - 1)
        for block in self.blocks:  # what no op could update, or none speaks of
            if self.updater.has_work(block, binding):
                self._update_now(block, binding)
                committed = False
        if not committed and self.commits:
            self._submit(Op(id=-1, kind=OpKind.COMMIT, block=NO_BLOCK, lane=Lane.DISK_WRITE, at=-1), ())
        self.side.gradients.expose()  # what is kept, and what another optimizer's step will use
        self.updater.begin_step()
        self.recorder.end_step()
        if self.serial or self.updater.waits:
            self.lanes.drain()
            self.store.files.wait_for_commit()

    def _update_now(self, block: Block, binding: OptimizerBinding) -> None:
        """The update of a block for which the schedule has none."""

        def issue(kind: OpKind, lane: Lane, payload: Payload, after: Sequence[Event] = ()) -> Event:
            return self._submit(Op(id=-1, kind=kind, block=block.index, lane=lane, at=-1, payload=payload), after)

        plan = block.plan
        self._renewed.add(block.index)
        if plan.update is UpdateLane.CPU:
            issue(OpKind.UPDATE, Lane.CPU, Payload.STATE, self.side.gradients.arriving(block))
            return
        self._provide(block)
        arrived = (issue(OpKind.SWAP_IN, Lane.H2D, Payload.STATE),) if plan.state is Tier.HOST else ()
        updated = issue(OpKind.UPDATE, Lane.COMPUTE, Payload.STATE, arrived)
        if plan.state is Tier.HOST:
            updated = issue(OpKind.SWAP_OUT, Lane.D2H, Payload.STATE, (updated,))
        if plan.weights is Tier.HOST:
            issue(OpKind.SWAP_OUT, Lane.D2H, Payload.WEIGHTS, (updated,))

    # ---- ops --------------------------------------------------------------------------------------------------------------

    def _issue_through(self, index: int) -> None:
        assert self._schedule is not None
        ops = self._schedule.ops
        while self._issued < len(ops) and ops[self._issued].at <= index:
            op = ops[self._issued]
            self._issued += 1
            carried = [self._carried[key] for key in op.carried if key in self._carried]
            self._events[op.id] = end = self._submit(op, [*(self._events[i] for i in op.after), *carried])
            if self.serial:
                end.wait()

    def _submit(self, op: Op, after: Sequence[Event]) -> Event:
        """Gives one op to its lane; what reality has overtaken does nothing."""
        if op.payload is Payload.ACTIVATIONS:
            after = (*after, self._mark(op.at)) if _follows_compute(op) else after
            end = self._ends[op.kind, op.block] = self._saved[op.block].swap(op, after)
            return end
        block = None if op.block == NO_BLOCK else self.blocks[op.block]
        is_late = block is not None and (op.kind, op.lane) == (OpKind.UPDATE, Lane.CPU) and not self._is_early(block)
        if is_late and block is not None and _are_here(block):
            grad = Op(id=-1, kind=OpKind.GRAD, block=op.block, lane=Lane.D2H, at=-1, payload=Payload.GRADIENTS)
            after = (*after, self._submit(grad, ()))  # its own could not take them yet
        run = self._run_of(op)
        if run is None:
            return All(after)
        after = () if op.kind is OpKind.COMMIT else after
        if _follows_compute(op):
            after = (*after, self._mark(op.at))
        # The commit follows all updates as they are handed to the engine, not as they end: that lane is theirs.
        end = self.lanes.submit(replace(op, lane=Lane.CPU) if op.kind is OpKind.COMMIT else op, run, after)
        if op.lane is Lane.COMPUTE:
            self.lanes.compute_waits([end])  # raises what it raised
        if block is not None and (op.kind is OpKind.GRAD or (op.kind, op.lane) == (OpKind.UPDATE, Lane.CPU)):
            self.side.gradients.sent(block, end)
        elif block is not None and (op.kind, op.payload) == (OpKind.SWAP_OUT, Payload.STATE):
            self.side.updates.returning(block, end)
        self._ends[op.kind, op.block] = end
        return end

    def _mark(self, at: int) -> Event:
        """Compute has come to this anchor."""
        if at < 0 or self._marked[0] != at:
            self._marked = at, self.lanes.mark()
        return self._marked[1]

    def _run_of(self, op: Op) -> Callable[[], Iterable[Ticket]] | None:
        """What the op does; read off now is all that may change before its turn comes."""
        if op.kind is OpKind.COMMIT:
            return self._commit if self.commits else None
        block, side = self.blocks[op.block], self.side
        match op.kind, op.payload, op.lane:
            case OpKind.FETCH, Payload.WEIGHTS, _:
                return partial(self._fetch_weights, block)
            case OpKind.FETCH, Payload.STATE, _:
                return partial(self._open_state, block)
            case OpKind.RELEASE, _, Lane.DISK_READ:
                return partial(self._release_host, block)
            case OpKind.RELEASE, _, _:
                return None if block.uses else partial(side.weights.free, block)
            case OpKind.UPLOAD, _, _:
                return partial(side.weights.upload, block)
            case OpKind.GRAD, _, _:
                return None if self._is_early(block) else side.gradients.take(block)
            case OpKind.UPDATE, _, _:
                return self._update_of(block)
            case OpKind.STORE, _, _:
                return self._end_of_update(block)
            case OpKind.SWAP_IN, Payload.STATE, _:
                return partial(side.updates.swap_in, block)
            case OpKind.SWAP_OUT, Payload.STATE, _:
                return partial(side.updates.swap_out, block)
            case OpKind.SWAP_OUT, Payload.WEIGHTS, _:
                return partial(side.weights.download, block)
        raise AssertionError(f"the lowering issues no {op.kind} of {op.payload}")

    def _fetch_weights(self, block: Block) -> Sequence[Ticket]:
        with self._turn:
            return self._start_fetch(block, ())

    def _open_state(self, block: Block) -> Sequence[Ticket]:
        with self._turn:
            return self.updater.open(block, priority=self._urgency(block), after=())

    def _release_host(self, block: Block) -> Sequence[Ticket]:
        with self._turn:
            return self._give_back(block)

    def _update_of(self, block: Block) -> Callable[[], Iterable[Ticket]] | None:
        """The update of what of the block has gradients; ``None`` if none may run now."""
        binding = self.updater.verdict or self._armed
        if binding is None or self._is_early(block) or (self._all_wait and self.updater.verdict is None):
            return None
        if self.updater.renews(block, binding):
            self.lanes.drain()
            self.updater.cancel_opened([block])
        prepared = self.updater.prepare(block, binding)
        if prepared is None:
            return None
        if block.plan.update is UpdateLane.DEVICE:
            return prepared
        self.hide(block)
        tickets = self._latest[block.index] = []

        def run() -> Sequence[Ticket]:
            with self._turn:
                tickets.extend(prepared(priority=self._urgency(block)))
            return tickets

        return run

    def _is_early(self, block: Block) -> bool:
        """Whether backward may still add to the block's gradients."""
        return self.updater.verdict is None and bool(block.grads_left or block.early_unsafe)

    def _end_of_update(self, block: Block) -> Callable[[], Iterable[Ticket]] | None:
        """STORE is the second half of the engine's UPDATE, which it waits for."""
        tickets = self._latest.get(block.index)
        return None if tickets is None else lambda: tickets

    def _commit(self) -> Sequence[Ticket]:
        with self._turn:
            ticket = self.store.commit()
        return [] if ticket is None else [ticket]

    # ---- anchors ----------------------------------------------------------------------------------------------------------

    def _reach(self, phase: Phase, block: Block) -> None:
        """Issues the ops up to this anchor; what compute is given from now on comes after what it needs."""
        if self._in_backward:  # also where a forward is repeated: the block's backward follows
            phase = Phase.BACKWARD
            if block is self._at:
                return
        index = self._find(phase, block.index)
        self._at = block
        if index is None or self._schedule is None:
            self._schedule = None  # [Note: Strays]
        else:
            passed = self._schedule.anchors[self._cursor : index + 1]
            self._issue_through(index)
            self._cursor = index + 1
            carried = [self._carried[key] for anchor in passed for key in anchor.carried if key in self._carried]
            needs = [self._events[i] for i in passed[-1].needs]
            if self.recorder.enabled:
                self.recorder.needs = self.recorder.names([*needs, *carried])
            self.lanes.compute_waits([*needs, *carried])
            self.activations.sweep(needs)
        if block.index in self._renewed or not self.weights.holds(block):
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
            if part.last_write is not None:
                part.last_write.wait(READY)
                part.last_write = None

    def is_away(self, block: Block) -> bool:
        """Whether the block's weights live below the device."""
        return block.plan.weights is not Tier.DEVICE

    def is_released(self, block: Block) -> bool:
        """Weights that live on the device and that the CPU updates are behind the door between two batches.

        So whoever writes them then, even as ``param.data``, writes the host's copy too, which the next update starts from.
        """
        return self.is_away(block) or (not self._in_batch and self._comes_from_below(block))

    def end_batch(self) -> None:
        """As for :class:`Executor`."""
        self._in_batch = False
        for block in self.blocks:
            if not block.uses and self.is_released(block):
                self.hide(block)

    def is_on_host(self, block: Block) -> bool:
        """Weights that live on the device, and that it updates, are there alone."""
        return block.index not in self._inside or self._comes_from_below(block)

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
        if self.weights.changed(block) and block.plan.update is UpdateLane.CPU:
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

    def bring(self, block: Block, *, force: bool = False) -> None:
        """Weights into host memory, now."""
        self.lanes.drain()
        super().bring(block, force=force)

    def provide(self, block: Block) -> None:
        """Weights onto the device, now."""
        self._provide(block)

    # ---- rest -------------------------------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Throws away what the batches since the last update have left: gradients, activations, ops under way.

        Weights and state are those of the last update, which may still be under way and is waited for.
        """
        for _ in range(2):  # the second time raises what has nothing to do with memory
            try:
                self.lanes.drain()
            except (DeviceMemoryError, torch.OutOfMemoryError):
                continue
            break
        self._schedule, self._held_after, self._seen = None, None, []
        self._events, self._ends, self._carried = {}, {}, {}
        self.activations.begin_batch()
        self._close_all()
        for block in self.blocks:
            for param in block.params():
                param.grad = None
        self.side.gradients.drop()

    def rest(self) -> None:
        """As for :class:`Executor`."""
        self.lanes.drain()
        super().rest()

    def drain(self) -> None:
        """Waits for everything under way."""
        self.lanes.drain()
        super().drain()

    def finish(self) -> None:
        """As for :class:`Executor`."""
        self.lanes.drain()
        super().finish()

    @contextmanager
    def on_host(self, block: Block, *, whole: bool) -> Iterator[None]:
        """As for :class:`Executor`; what lives on the device alone has host memory only for so long, until it is mirrored."""
        self.lanes.drain()
        if not whole or (block.plan.update is UpdateLane.CPU and not self.weights.changed(block)):
            yield
            return
        self.weights.changed(block)  # brings back what was moved
        changed = [part for part in block.parts if part.mirrored_versions != versions(part)]
        weights = [part for part in changed if self.weights.lend(part)]
        states = [part for part in changed if self.side.updates.lend(part)]
        yield
        for part in block.parts:
            for ticket in writes_of(part):  # ops of the device know nothing of them
                ticket.wait()
        for part in weights if not self.is_on_host(block) else ():
            part.arena.drop()
        for part in states:
            self.side.updates.drop(part)

    def commit(self, *, always: bool = False) -> None:
        """As for :class:`Executor`."""
        self.lanes.drain()
        super().commit(always=always)

    # ---- begin and end ----------------------------------------------------------------------------------------------------

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

    def enter(self, block: Block) -> None:
        """As for :class:`Executor`; the schedule that knew what the device holds has ended."""
        self._schedule = None
        self._enter()

    def adopt(self, plan: Plan, *, model: ModelShape, capacity_bytes: int, deferred: bool, device_cache_bytes: int = 0) -> None:
        """As for :class:`Executor`; blocks that have left the device get their new place there."""
        super().adopt(plan, model=model, capacity_bytes=capacity_bytes, deferred=deferred)
        self.device_cache_bytes = device_cache_bytes
        self._ends, self._carried, self._held_after = {}, {}, None
        self.activations.close()
        self._follow_activations()
        self.move_in()

    def stop(self) -> None:
        """As for :class:`Executor`; the lanes end, and the device's memory is free for others if everything has left it."""
        for block in self.blocks:  # what a step has kept lies in memory of the lanes
            for param in block.params():
                if type(param.grad) is HostGradient:
                    param.grad = None
        self.side.gradients.drop()
        self.activations.close()
        if not self.lanes.memory().used_bytes:
            with suppress(RuntimeError):  # a device that has failed
                self.lanes.resize(0)
        self.lanes.close()


def _are_here(block: Block) -> bool:
    """Whether gradients of the block are on the device."""
    return any(p.grad is not None and type(p.grad) is not HostGradient for p in block.params())


def _is_followed() -> bool:
    """Whether somebody else decides what becomes of saved tensors: user code that checkpoints around its blocks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _follows_compute(op: Op) -> bool:
    """Whether the op works on what compute made, or takes away what compute has used."""
    return op.kind in (OpKind.GRAD, OpKind.SWAP_OUT) or (op.kind, op.lane) == (OpKind.RELEASE, Lane.H2D)
