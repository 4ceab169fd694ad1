"""Executes a schedule around autograd.

One training step, from top to bottom:
``begin_step`` picks the schedule · each anchor issues the ops up to itself and waits for what its block needs
(``forward_begins``, ``backward_begins``) · ``backward_ends`` · ``handover`` issues the updates that are left, then the commit.
The schedule's edges become the engine's: an op waits for the tickets of the ops ``after`` which it comes, an anchor for those that
it needs and those that it carries.

Compute runs inline in the calling thread; the disk and update lanes are the engine's threads. An anchor that the schedule does not
expect is served on demand, and the next step's schedule follows the order that was seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero._native import DONE, READY, Ticket
from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Plan, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import (
    NO_BLOCK,
    Anchor,
    Lane,
    OpKind,
    Payload,
    Phase,
    Schedule,
    Updates,
)  # fmt: skip
from lightning_hetero.lowering import DeviceRoom
from lightning_hetero.runtime.anchors import Watcher
from lightning_hetero.runtime.optimizers import OptimizerBinding, Rule
from lightning_hetero.runtime.schedules import Schedules
from lightning_hetero.runtime.sums import RoomForGradients
from lightning_hetero.store.live.blocks import Block


class Executor(RoomForGradients):
    """The runtime of one model.

    Args:
        blocks: The model's blocks, bound to memory, with resolved plans.
        plan: The resolved plan.
        model: The blocks' sizes.
        capacity_bytes: Host bytes for weights that live on disk.
        **common: As for :class:`RoomForGradients`.

    Attributes:
        watcher: Who looks on, if anybody does.
        probing: Nobody knows yet whether a device is large enough for the batch, so that updates wait until it is over.
        commits: ``optimizer.step()`` commits. Where the training loop's state belongs to a step, its end commits instead.
    """

    def __init__(self, blocks: Sequence[Block], *, plan: Plan, model: ModelShape, capacity_bytes: int, **common: Any) -> None:
        super().__init__(blocks, plan=plan, model=model, capacity_bytes=capacity_bytes, **common)
        self.commits, self.probing = True, False
        self.watcher: Watcher | None = None
        self._handed_over = True  # since the last batch was armed
        self._schedules = Schedules(plan, model, capacity_bytes)
        self._schedule: Schedule | None = None
        self._cursor = 0  # the next anchor expected
        self._issued = 0  # the next op to issue
        self._tickets: dict[int, list[Ticket]] = {}  # op -> its tickets
        self._seen: list[int] = []
        self._training = False
        self._backward_block: Block | None = None

    # ---- the step ---------------------------------------------------------------------------------------------------------

    def arm(self, binding: OptimizerBinding | None) -> None:
        """Says that the batch ends in ``binding``'s ``step``: updates may run as soon as a block's gradients are complete.

        ``None``: it has ended, maybe without the ``step``, which a loss scaler skips where gradients overflow.
        """
        if binding is None and not self._handed_over:
            self.speculation.observe(True)
            self.speculation.skip()
        self._armed, self._handed_over = binding, binding is None

    @property
    def armed(self) -> bool:
        """Whether the batch under way ends in an optimizer's ``step``."""
        return self._armed is not None

    def begin_step(self, *, training: bool) -> None:
        """A batch begins: picks the schedule for the order of blocks that the last such batch used."""
        self._schedules.learn(self._seen, training=self._training)
        self._close_all()
        self._training = training
        self._seen = []
        self._cursor = self._issued = 0
        self._tickets = {}
        self.speculation.begin(training=training and self._armed is not None and self.deferred and not self.probing)
        self._schedule = self._schedule_for(training)
        self.updater.begin_step()
        if training:
            self.heap.forward_begins(self.weights_coming())
            for block in self.blocks:
                block.grads_left = {id(p) for p in block.params() if p.requires_grad}
                block.early_unsafe = False

    def _schedule_for(self, training: bool) -> Schedule | None:
        updates = Updates.NONE
        if training and self._armed is not None:
            updates = Updates.AFTER_VERDICT if self._all_wait else Updates.IN_BACKWARD
            updates = Updates.SPECULATIVE if self.speculation.trying else updates
        signature = self._schedules.signature(updates, training=training)
        return None if signature is None else self._schedules.lowered(signature, *self._held_now())

    def _held_now(self) -> tuple[frozenset[int], DeviceRoom | None]:
        """Blocks on disk whose weights are in memory, and what a device with memory of its own has room for and holds."""
        return frozenset(b.index for b in self.blocks if b.weights_on_disk and b.resident), None

    @property
    def _all_wait(self) -> bool:
        """Whether updates wait for the verdict on all gradients."""
        return self.deferred or self.probing

    def _close_all(self) -> None:
        """What the last batch left open is closed."""
        self._in_backward = False
        self._close_backward()
        self._held.clear()
        self.speculation.skip()
        for block in self.blocks:
            while block.uses:  # held, or left open by an exception
                self.shut(block)
        self._cancel_opened()

    def _cancel_opened(self) -> None:
        """Takes updates back that were opened, and that no gradients will come for."""
        self.updater.cancel_opened(self.blocks)

    @property
    def watched(self) -> bool:
        """Observer: whether there is a :attr:`watcher`."""
        return self.watcher is not None

    def forward_begins(self, block: Block, inputs: Any = ()) -> None:
        """Observer: issues what the anchor triggers and waits for the block's weights."""
        if self._in_backward:
            if block is not self._backward_block:  # recomputation: autograd has moved on to this block
                self._close_backward()
        else:
            self._seen.append(block.index)
            if self._training and not torch.is_grad_enabled():
                block.early_unsafe = True
        with self.recorder.waiting(f"F {block.name}"):
            self._reach(Phase.FORWARD, block)
            self.open(block)
        if self.watcher is not None:
            self.watcher.forward_begins(block, inputs)

    def forward_ends(self, block: Block, output: Any = None) -> None:
        """Observer: the use is over."""
        if self.watcher is not None:
            self.watcher.forward_ends(block)
        self.shut(block)

    def backward_begins(self, block: Block) -> None:
        """Observer: as ``forward_begins``; also ends the previous block's backward."""
        if block is not self._backward_block and not block.spec.pinned:
            self._next_backward(block)
        if self.watcher is not None:
            self.watcher.backward_begins(block)

    def _next_backward(self, block: Block) -> None:
        with self.recorder.waiting(f"B {block.name}"):
            self._close_backward()
            self.make_room(block)
            self._reach(Phase.BACKWARD, block)
            if block.index == next((i for i in self._seen if not self.blocks[i].spec.pinned), None):
                self.give_way(block)
            # A ticket holds its gradients until it has been seen to be done.
            self._in_flight = [t for t in self._in_flight if t.poll() != DONE]
            self._backward_block = block
            self.open(block)
            if torch.is_grad_enabled():
                self.hold(block)

    def _close_backward(self) -> None:
        if self._backward_block is not None:
            block, self._backward_block = self._backward_block, None
            self.shut(block)

    def backward_starts(self, loss: Tensor | None = None) -> None:
        """Backward, from ``loss``, writes gradients: whatever still reads those of the last step must be over."""
        self._in_backward = True
        if loss is not None:
            self.learn_sums(loss)
        with self.recorder.waiting("backward"):
            self._wait_in_flight()
            self.heap.backward_begins()

    def backward_ends(self) -> None:
        """The last block has been left."""
        self._in_backward = False
        self._close_backward()
        self.recorder.leave()

    def check_gradients(self) -> None:
        """A backward has succeeded: refuses gradients that no update can use, before clipping or a callback meets them."""
        for block in self.blocks:
            self.updater.check_gradients(block)

    def handover(self, binding: OptimizerBinding, scale: float) -> None:
        """``optimizer.step()``: hyper-parameters and verdict are known; issues what is left and returns without waiting for it."""
        self.backward_ends()
        self._handed_over = True
        self.updater.begin_verdict(binding, scale)
        self._verdict(scale)
        if self._schedule is not None:
            self._issue_through(len(self._schedule.anchors) - 1)
        if binding.rule is Rule.WHOLE:
            self.updater.update_whole(binding)
        else:
            one_by_one = self.plan.update_order is UpdateOrder.NAIVE
            for block in self.blocks:  # what no op could update, or none speaks of
                self._update(block, binding, self._in_flight if one_by_one else ())
        self.updater.cancel_opened(self.blocks)
        if self.commits:
            self.commit()
        self.updater.begin_step()
        self.recorder.end_step()
        if self.serial:
            self._wait_in_flight(DONE)
            self.store.files.wait_for_commit()
        elif self.updater.waits or any(b.plan.update is UpdateLane.DEVICE and self._latest.get(b.index) for b in self.blocks):
            self._wait_in_flight()  # where the device is the host, its updates are part of the step

    def commit(self, *, always: bool = False) -> None:
        """Makes what was written a step; ``always``: even if no block has changed."""
        ticket = self.store.commit(always=always)
        tickets = [] if ticket is None else [ticket]
        self.recorder.watch("COMMIT", "", tickets, lane=Lane.DISK_WRITE, late=not self.commits)

    def _verdict(self, scale: float) -> None:
        """What was tried is kept; or it has been taken back, and the step goes on with the schedule that updates it again."""
        if self.speculation.trying:
            self.speculation.keep(scale)
            if self.speculation.redoes and self._schedule is not None:
                redone = replace(self._schedule.signature, updates=Updates.REDONE)
                self._schedule = self._schedules.lowered(redone, self._schedule.resident_before, self._room_before(self._schedule))
        self.speculation.observe(self.speculation.discarded)

    def _room_before(self, schedule: Schedule) -> DeviceRoom | None:
        """What a device with memory of its own had room for and held as the schedule began."""
        return None

    def clip(self, params: Iterable[nn.Parameter], max_norm: float) -> None:
        """Clips gradients by their global norm, before ``optimizer.step()``."""
        self.speculation.clip(params, max_norm)

    def end_batch(self) -> None:
        """A batch is over: from here to the next one nobody computes with the weights."""

    # ---- anchors ----------------------------------------------------------------------------------------------------------

    def _reach(self, phase: Phase, block: Block) -> None:
        """Issues the ops up to this anchor and waits for what it needs."""
        index = self._find(phase, block.index)
        if index is not None and self._schedule is not None:
            passed = self._schedule.anchors[self._cursor : index + 1]
            self._issue_through(index)
            if self.recorder.enabled:
                self.recorder.needs = self._names(passed[-1].needs, [key for anchor in passed for key in anchor.carried])
            self._cursor = index + 1
            for op in passed[-1].needs:
                for ticket in self._tickets.get(op, ()):
                    ticket.wait(READY)
            for anchor in passed:
                self._wait_carried(anchor)
        elif not self.plan.priority and not self._in_backward:
            self._wait_in_flight(DONE)
        if not block.resident:
            self._fetch(block, self._make_room(block))
        if index is None:
            self._prefetch_next(block)
        for part in block.parts:
            self.settle(part)

    def _wait_carried(self, anchor: Anchor) -> None:
        """Waits for updates of earlier steps: an UPDATE is over once its weights are there, a STORE once it is on the disk."""
        ends = {OpKind.UPDATE: READY, OpKind.STORE: DONE}
        for kind, block in anchor.carried:
            for ticket in self._latest.get(block, ()):
                ticket.wait(ends[kind])

    def _find(self, phase: Phase, block: int) -> int | None:
        if self._schedule is None:
            return None
        anchors = self._schedule.anchors
        return next((i for i in range(self._cursor, len(anchors)) if (anchors[i].phase, anchors[i].block) == (phase, block)), None)

    def _issue_through(self, index: int) -> None:
        assert self._schedule is not None
        ops = self._schedule.ops
        while self._issued < len(ops) and ops[self._issued].at <= index:
            op = ops[self._issued]
            self._issued += 1
            after = [ticket for i in op.after for ticket in self._tickets[i]]
            if self.recorder.enabled:
                self.recorder.after = self._names(op.after, op.carried)
            tickets = self._issue(op, after)
            # What follows an op that did nothing follows what came before it. An opened update that waits for gradients is not
            # waited for: nothing may depend on when they come.
            opened = (op.kind, op.payload) == (OpKind.FETCH, Payload.STATE)
            self._tickets[op.id] = after if opened else tickets or after
            if self.serial:
                for ticket in tickets:
                    ticket.wait(DONE)

        self.recorder.after = ()

    def _names(self, ops: Iterable[int], carried: Iterable[tuple[OpKind, int]]) -> tuple[str, ...]:
        """What the recorder calls ops of the schedule, and of earlier steps."""
        assert self._schedule is not None
        of_step = [self._schedule.ops[i] for i in ops]
        named = [(op.what, op.block) for op in of_step] + [(kind.value, block) for kind, block in carried]
        return tuple(f"{what} {'' if block == NO_BLOCK else self.blocks[block].name}" for what, block in named)

    # ---- rest and end -----------------------------------------------------------------------------------------------------

    def rest(self) -> None:
        """Between two batches: no block is in use, nothing is under way, and all that was written is committed."""
        self._schedules.learn(self._seen, training=self._training)
        self._seen = []
        self._close_all()
        self.drain()
        for block in self.blocks:
            for part in block.parts:
                self.store.barrier(part)
        self.store.commit()
        self.store.files.wait_for_commit()
        self._schedule = None
        self._tickets = {}
        self._latest.clear()

    def leave(self, block: Block) -> None:
        """Brings a block back to host and disk, while nothing of it is under way: its place on a device is given up."""

    def enter(self, block: Block) -> None:
        """Takes a block that has left to its place on the device again, during a step."""

    def adopt(self, plan: Plan, *, model: ModelShape, capacity_bytes: int, deferred: bool, device_cache_bytes: int = 0) -> None:
        """Goes on with another plan, while the executor rests; on host and disk the blocks are where it wants them."""
        self.plan, self.model, self.capacity_bytes, self.deferred = plan, model, capacity_bytes, deferred
        self._schedules.adopt(plan, model, capacity_bytes)
        self.speculation.worth.forget()

    @contextmanager
    def handed(self, *, whole: bool) -> Iterator[None]:
        """Between two batches: the engine has all updates so far, and inside nobody but the caller gives it anything.

        ``whole``: what devices have made is in host memory, or stays where it is until :meth:`on_host`.
        """
        yield

    @contextmanager
    def on_host(self, block: Block, *, whole: bool) -> Iterator[None]:
        """Inside :meth:`handed`; ``whole``: inside, host memory has what updates of the block have made."""
        yield

    def relearn(self, model: ModelShape) -> None:
        """Parameters have joined an optimizer: from the next step on their blocks are updated like others."""
        self.model = model
        self._schedules.adopt(self.plan, model, self.capacity_bytes)

    def finish(self) -> None:
        """The end of training, orderly or not: nothing is left half open."""
        self._in_backward = False
        self._close_backward()
        self.speculation.skip()
        self.updater.cancel_opened(self.blocks)
        self.drain()
        for block in self.blocks:
            block.uses = 0
        self.heap.close()

    def stop(self) -> None:
        """Nothing is issued any more."""

    def let_go(self) -> None:
        """The model is another's from now on."""
        self._tickets.clear()
        self._latest.clear()
        self._access.clear()
        self.updater.own([])
        self.heap.close()

    def drain(self) -> None:
        """Waits for all updates under way."""
        for block in self.blocks:
            for part in block.parts:
                self.settle(part)
                self.free(part)
        self._wait_in_flight()

    def describe(self) -> dict[str, Any]:
        """The schedule of the step under way, for reports."""
        return {"schedule": None if self._schedule is None else self._schedule.to_text()}
