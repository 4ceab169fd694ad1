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

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_hetero._native import DONE, READY, Ticket
from lightning_hetero.errors import OutOfMemoryBudgetError
from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Plan, Tier, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import (
    NO_BLOCK,
    Anchor,
    Lane,
    Op,
    OpKind,
    Payload,
    Phase,
    Schedule,
    StepSignature,
    Updates,
    urgency,
)  # fmt: skip
from lightning_hetero.lowering import DeviceRoom, lower
from lightning_hetero.runtime.anchors import Watcher
from lightning_hetero.runtime.door import OffloadedParameter, Residency, offload, restore
from lightning_hetero.runtime.heap import Heap
from lightning_hetero.runtime.optimizers import OptimizerBinding, Rule
from lightning_hetero.runtime.recorder import Recorder
from lightning_hetero.runtime.sources import DeviceCopies, WeightSource
from lightning_hetero.runtime.speculation import Speculation
from lightning_hetero.runtime.updates import Updater
from lightning_hetero.store.blocks import Block, Part
from lightning_hetero.store.tiers import TierStore
from lightning_hetero.units import format_bytes

_SCHEDULES_KEPT = 64
_LONG_ORDER = 4  # steps that use blocks more often than this on average (token by token generation) get no schedule


class Access:
    """What the door knows of one parameter (``runtime.door.Record``)."""

    __slots__ = ("_executor", "_index", "_part")

    def __init__(self, executor: Executor, part: Part, index: int) -> None:
        self._executor, self._part, self._index = executor, part, index

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self._part.names[self._index]

    @property
    def state(self) -> Residency:
        """Released where the weights live on a lower tier, whether cached or not; else only an update can be pending."""
        return Residency.RELEASED if self._executor.is_released(self._part.block) else Residency.PENDING

    def wait(self) -> None:
        """Waits for a pending update; refuses what a closed store has left without content."""
        if not self._part.block.resident:
            self._executor.store.check_open(self._part, self.name)
        self._executor.settle(self._part)

    def source(self) -> WeightSource:
        """Where the weights are."""
        return WeightSource(self._executor.store, self._part, self._index, self._executor.settle, self._executor.copies)


class Executor:
    """The runtime of one model.

    Args:
        blocks: The model's blocks, bound to memory, with resolved plans.
        plan: The resolved plan.
        model: The blocks' sizes.
        store: The tiers.
        updater: Runs the updates of one part.
        capacity_bytes: Host bytes for weights that live on disk.
        deferred: Updates follow the verdict on all gradients instead of running during backward.
        recorder: Records spans; may be off.
        heap: Gives free memory back when the process exceeds its budget.
        poison: Fill released memory with NaN instead of only dropping it (tests).

    Attributes:
        serial: Nothing overlaps: compute waits for whatever it issues to be done. For measuring compute alone.
        copies: What a device with memory of its own holds of the weights; ``None`` where the device is the host.
        watcher: Who looks on, if anybody does.
        commits: ``optimizer.step()`` commits. Where the training loop's state belongs to a step, its end commits instead.
        speculation: Updates that run before the verdict where that can be taken back.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        *,
        plan: Plan,
        model: ModelShape,
        store: TierStore,
        updater: Updater,
        capacity_bytes: int,
        deferred: bool,
        recorder: Recorder,
        heap: Heap,
        poison: bool = False,
    ) -> None:
        self.blocks = list(blocks)
        self.plan, self.model, self.store, self.updater = plan, model, store, updater
        self.capacity_bytes = capacity_bytes
        self.deferred = deferred
        self.recorder = recorder
        self.heap = heap
        self.serial = False
        self.copies: DeviceCopies | None = None
        self.commits = True
        self.watcher: Watcher | None = None
        self.speculation = Speculation(store)
        self._handed_over = True  # since the last batch was armed
        self._poison = poison
        self._access = {id(p): Access(self, part, i) for b in blocks for part in b.parts for i, p in enumerate(part.params)}
        self._orders = dict.fromkeys((True, False), tuple(range(len(self.blocks))))
        self._schedules: dict[tuple[StepSignature, frozenset[int], DeviceRoom | None], Schedule] = {}
        self._schedule: Schedule | None = None
        self._cursor = 0  # the next anchor expected
        self._issued = 0  # the next op to issue
        self._tickets: dict[int, list[Ticket]] = {}  # op -> its tickets
        self._seen: list[int] = []
        self._training = False
        self._in_backward = False
        self._backward_block: Block | None = None
        self._armed: OptimizerBinding | None = None
        self._held: set[int] = set()
        self._releases: list[Ticket] = []
        self._in_flight: list[Ticket] = []
        self._latest: dict[int, list[Ticket]] = {}  # block -> its latest update, which ends with its STORE

    # ---- the step ---------------------------------------------------------------------------------------------------------

    def arm(self, binding: OptimizerBinding | None) -> None:
        """Says that the batch ends in ``binding``'s ``step``: updates may run as soon as a block's gradients are complete.

        ``None``: it has ended, maybe without the ``step``, which a loss scaler skips where gradients overflow.
        """
        if binding is None and not self._handed_over:
            self.speculation.skip()
            self.speculation.observe(True)
        self._armed, self._handed_over = binding, binding is None

    def begin_step(self, *, training: bool) -> None:
        """A batch begins: picks the schedule for the order of blocks that the last such batch used."""
        self._learn()
        self._close_all()
        self._training = training
        self._seen = []
        self._cursor = self._issued = 0
        self._tickets = {}
        self.speculation.begin(training=training and self._armed is not None and self.deferred)
        self._schedule = self._schedule_for(training)
        self.updater.begin_step()
        if training:
            self.heap.forward_begins()
            for block in self.blocks:
                block.grads_left = {id(p) for p in block.params() if p.requires_grad}
                block.early_unsafe = False

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

    def rest(self) -> None:
        """Between two batches: no block is in use, nothing is under way, and all that was written is committed."""
        self._learn()
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
        """Brings a block back to host and disk, while the executor rests: its place on a device is given up."""

    def adopt(self, plan: Plan, *, model: ModelShape, capacity_bytes: int, deferred: bool, device_cache_bytes: int = 0) -> None:
        """Goes on with another plan, while the executor rests; on host and disk the blocks are where it wants them."""
        self.plan, self.model, self.capacity_bytes, self.deferred = plan, model, capacity_bytes, deferred
        self._schedules.clear()

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
            self.heap.check()
            self._reach(Phase.BACKWARD, block)
            # A ticket holds its gradients until it has been seen to be done.
            self._in_flight = [t for t in self._in_flight if t.poll() != DONE]
            self._backward_block = block
            self.open(block)
            if torch.is_grad_enabled():
                self.hold(block)

    def backward_starts(self) -> None:
        """Backward writes gradients: whatever still reads those of the last step must be over."""
        self._in_backward = True
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
        self.recorder.watch("COMMIT", "", [ticket] if ticket is not None else [], lane=Lane.DISK_WRITE)

    def _verdict(self, scale: float) -> None:
        """What was tried is kept; or it has been taken back, and the step goes on with the schedule that updates it again."""
        if self.speculation.trying:
            self.speculation.keep(scale)
            if self.speculation.redoes and self._schedule is not None:
                redone = replace(self._schedule.signature, updates=Updates.REDONE)
                self._schedule = self._lowered(redone, self._schedule.resident_before, None)
        self.speculation.observe(self.speculation.discarded)

    def clip(self, params: Iterable[nn.Parameter], max_norm: float) -> None:
        """Clips gradients by their global norm, before ``optimizer.step()``."""
        self.speculation.clip(params, max_norm)

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

    def _issue(self, op: Op, after: Sequence[Ticket]) -> list[Ticket]:
        """Runs one op; an op that reality has overtaken does nothing."""
        if self.updater.verdict is not None and self.speculation.redoes and self._is_overtaken(op):
            return []
        match op.kind, op.payload:
            case OpKind.FETCH, Payload.WEIGHTS:
                block = self.blocks[op.block]
                if self.updater.verdict is not None and self.speculation.redoes and block.resident:
                    return self._restored(block)
                return self._fetch(block, after) if self._fits(block) else []
            case OpKind.FETCH, Payload.STATE:
                if self.serial:  # one update after the other: its state is read when its turn comes
                    return []
                block = self.blocks[op.block]
                early = self.deferred and self.updater.verdict is None
                if early and (self._armed is None or not self.speculation.may_try(block, self._armed)):
                    return []
                tickets = self.updater.open(block, priority=self._urgency(block), after=after, speculative=early)
                return self.recorder.watch("FETCH state", block.name, tickets, lane=Lane.DISK_READ)
            case OpKind.RELEASE, _:
                return self.release(self.blocks[op.block])
            case OpKind.UPDATE, _:
                return self._update(self.blocks[op.block], self._armed, after)
            case OpKind.STORE, _:  # the second half of the engine's update
                return self._latest.get(op.block, [])
        return []  # COMMIT follows the last update in `handover`

    def _is_overtaken(self, op: Op) -> bool:
        """After a verdict that discards, only what was tried is updated again."""
        if (op.kind, op.payload) != (OpKind.FETCH, Payload.STATE) or self.updater.verdict is None:
            return False
        block = self.blocks[op.block]
        return not (self.speculation.is_due(block) or self.updater.has_work(block, self.updater.verdict))

    def _restored(self, block: Block) -> list[Ticket]:
        """Weights on their way back into memory since the update that had changed them was discarded."""
        if not self.speculation.is_due(block):
            return []
        tickets = [part.last_write for part in block.parts if part.last_write is not None]
        return self.recorder.watch("FETCH", block.name, tickets, lane=Lane.DISK_READ)

    def _urgency(self, block: Block) -> int:
        return urgency(OpKind.UPDATE, Payload.STATE, block.index, lowest_first=self.plan.priority)

    def open(self, block: Block) -> None:
        """A use of the block begins: its parameters are ordinary ones until :meth:`shut`."""
        block.uses += 1
        for param in block.params():
            if type(param) is OffloadedParameter:
                restore(param)
        if block.uses == 1:
            for part in block.parts:
                part.versions = sum(p._version for p in part.params)

    def is_away(self, block: Block) -> bool:
        """Whether the block's weights live on a lower tier than where it computes."""
        return block.weights_on_disk

    def is_released(self, block: Block) -> bool:
        """Whether the block's weights are behind the door while it is not in use."""
        return self.is_away(block)

    def end_batch(self) -> None:
        """A batch is over: from here to the next one nobody computes with the weights."""

    def is_on_host(self, block: Block) -> bool:
        """Whether the host has memory for the block's weights, as far as it has memory for any that are not fetched."""
        return True

    def shut(self, block: Block) -> None:
        """A use of the block ends."""
        block.uses = max(0, block.uses - 1)
        if block.uses == 0 and block.weights_on_disk:
            for part in block.parts:
                part.dirty |= part.versions != sum(p._version for p in part.params)
            self.hide(block)

    def hold(self, block: Block) -> None:
        """Keeps the block open for the rest of the batch: a graph that no anchor announces holds its weights.

        Such are a graph of gradients (``create_graph=True``), and one that was built with :meth:`Session.materialized` weights.
        """
        if block.index not in self._held:
            self._held.add(block.index)
            self.open(block)

    def _close_backward(self) -> None:
        if self._backward_block is not None:
            block, self._backward_block = self._backward_block, None
            self.shut(block)

    def hide(self, block: Block) -> None:
        """Puts the door before the block's parameters."""
        for param in block.params():
            if type(param) is nn.Parameter:
                offload(param, self._access[id(param)])

    # ---- residency --------------------------------------------------------------------------------------------------------

    def _fetch(self, block: Block, after: Sequence[Ticket]) -> list[Ticket]:
        return self.recorder.watch("FETCH", block.name, self._start_fetch(block, after), lane=Lane.DISK_READ)

    def _start_fetch(self, block: Block, after: Sequence[Ticket]) -> list[Ticket]:
        if block.resident:
            return []
        block.resident = True
        waits = [*after, *self._releases]
        first = urgency(OpKind.FETCH, Payload.WEIGHTS, block.index, lowest_first=self.plan.priority)
        return [self.store.fetch(p, priority=first, after=waits) for p in block.parts if p.native is not None]

    def release(self, block: Block) -> list[Ticket]:
        """Gives the block's weight memory back, unless it is in use."""
        tickets = [] if block.uses or not block.weights_on_disk else self._give_back(block)
        return self.recorder.watch("RELEASE", block.name, tickets, lane=Lane.COMPUTE)

    def _give_back(self, block: Block) -> list[Ticket]:
        if not block.resident:
            return []
        self.updater.cancel_opened([block])
        block.resident = False
        first = urgency(OpKind.RELEASE, Payload.WEIGHTS, block.index, lowest_first=self.plan.priority)
        tickets = [self.store.release(p, priority=first) for p in block.parts if p.native is not None]
        if self._poison:
            self._fill_with_nan(block, tickets)
        self._releases = [t for t in self._releases if not t.poll()] + tickets
        return tickets

    def _fill_with_nan(self, block: Block, released: Sequence[Ticket]) -> None:
        for ticket in released:
            ticket.wait()
        for part in block.parts:
            for i, param in enumerate(part.params):
                if param.is_floating_point():
                    part.memory(i).fill_(float("nan"))

    def _make_room(self, block: Block) -> list[Ticket]:
        """Evicts for a block that the schedule did not foresee: in a cycle over the blocks, the one used last comes again last."""
        need, n = self.model.blocks[block.index].weight_bytes, len(self.blocks)
        tickets: list[Ticket] = []
        resident = [b for b in self.blocks if b.resident and b.weights_on_disk]
        used = sum(self.model.blocks[b.index].weight_bytes for b in resident)
        for victim in sorted((b for b in resident if not b.uses), key=lambda b: (b.index - block.index) % n, reverse=True):
            if used + need <= self.capacity_bytes:
                break
            tickets += self.release(victim)
            used -= self.model.blocks[victim.index].weight_bytes
        if used + need > self.capacity_bytes:
            raise OutOfMemoryBudgetError(
                f"block {block.name!r} needs {format_bytes(need)} of host memory, but blocks in use at the same time hold "
                f"{format_bytes(used)} of the {format_bytes(self.capacity_bytes)} for weights on disk. Raise host_memory, or "
                f"choose block_cls so that blocks do not contain each other's uses."
            )
        return tickets

    def _prefetch_next(self, block: Block) -> None:
        following = [b for b in self.blocks[block.index + 1 :] if b.weights_on_disk][:1]
        for b in following:
            if self._fits(b):
                self._fetch(b, [])

    def _fits(self, block: Block) -> bool:
        """Whether the block's weights fit beside those that are in memory."""
        sizes = self.model.blocks
        used = sum(sizes[b.index].weight_bytes for b in self.blocks if b.resident and b.weights_on_disk)
        return used + sizes[block.index].weight_bytes <= self.capacity_bytes

    def bring(self, block: Block, *, force: bool = False) -> None:
        """Weights into memory, now; ``force`` goes beyond the budget."""
        if not block.resident:
            self._fetch(block, [] if force else self._make_room(block))
        for part in block.parts:
            self.settle(part)

    def provide(self, block: Block) -> None:
        """Weights to where the block computes, now."""
        self.bring(block)

    def settle(self, part: Part) -> None:
        """Waits until the part's weights are final; parameters that live in memory become ordinary again."""
        if part.last_write is not None:
            part.last_write.wait(READY)
            part.last_write = None
        if not self.is_released(part.block):
            for param in part.params:
                if type(param) is OffloadedParameter:
                    restore(param)

    # ---- updates ----------------------------------------------------------------------------------------------------------

    def _update(self, block: Block, binding: OptimizerBinding | None, after: Sequence[Ticket]) -> list[Ticket]:
        """Updates what of the block has gradients for ``binding``; during backward only blocks whose gradients are all complete."""
        if binding is None or binding.rule is Rule.WHOLE:
            return []
        early = self.updater.verdict is not binding
        if early and (block.grads_left or block.early_unsafe or (self.deferred and not self.speculation.may_try(block, binding))):
            return []
        in_python = binding.rule is Rule.BLOCKWISE and self.updater.has_work(block, binding)
        if in_python and not block.resident:
            self._fetch(block, self._make_room(block))
        if in_python:
            for part in block.parts:
                self.settle(part)
            self.open(block)
        opened = any(part.opened is not None for part in block.parts)
        try:
            tickets = self._run(block, binding, after, tries=early and self.deferred)
        finally:
            if in_python:
                self.shut(block)
        if tickets:
            self.hide(block)
            self._in_flight += tickets
            self._latest[block.index] = tickets
        self._record(block, tickets, opened=opened)
        return tickets

    def _run(self, block: Block, binding: OptimizerBinding, after: Sequence[Ticket], *, tries: bool) -> list[Ticket]:
        """Runs what of the block is due, and again what was taken back."""
        again = None if tries else self.speculation.again(block, self.updater.scale)
        tickets = [] if again is None else again(priority=self._urgency(block), after=after)
        due = self.updater.prepare(block, binding)
        if due is None:
            return tickets
        if tries:
            due = self.speculation.measured(due)
        tickets += due(priority=self._urgency(block), after=after, speculative=tries)
        if tries:
            self.speculation.remember(due, tickets)
        return tickets

    def _record(self, block: Block, tickets: list[Ticket], *, opened: bool) -> None:
        """The ops that one update of the engine stands for."""
        if not opened and block.plan.state is Tier.DISK:
            self.recorder.watch("FETCH state", block.name, tickets, lane=Lane.DISK_READ)
        on_cpu = block.plan.update is UpdateLane.CPU
        self.recorder.watch("UPDATE", block.name, tickets, lane=Lane.CPU if on_cpu else Lane.COMPUTE)
        if Tier.DISK in (block.plan.weights, block.plan.state):
            self.recorder.watch("STORE", block.name, tickets, lane=Lane.DISK_WRITE)

    def _wait_in_flight(self, what: int = READY) -> None:
        for ticket in self._in_flight:
            ticket.wait(what)
        self._in_flight.clear()

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
        self._wait_in_flight()

    # ---- schedules --------------------------------------------------------------------------------------------------------

    def _schedule_for(self, training: bool) -> Schedule | None:
        order = self._orders[training]
        if len(order) > _LONG_ORDER * max(1, len(self.blocks)):
            return None
        updates = Updates.NONE
        if training and self._armed is not None:
            updates = Updates.AFTER_VERDICT if self._all_wait else Updates.IN_BACKWARD
            updates = Updates.SPECULATIVE if self.speculation.trying else updates
        signature = StepSignature(order=order, training=training, updates=updates)
        return self._lowered(signature, *self._held_now())

    def _lowered(self, signature: StepSignature, resident: frozenset[int], device: DeviceRoom | None) -> Schedule:
        key = (signature, resident, device)
        if key not in self._schedules:
            if len(self._schedules) >= _SCHEDULES_KEPT:  # a model that skips layers at random has a new order every step
                self._schedules.clear()
            self._schedules[key] = lower(
                self.plan, self.model, signature, resident=resident, capacity_bytes=self.capacity_bytes, device=device
            )
        return self._schedules[key]

    def _held_now(self) -> tuple[frozenset[int], DeviceRoom | None]:
        """Blocks on disk whose weights are in memory, and what a device with memory of its own has room for and holds."""
        return frozenset(b.index for b in self.blocks if b.weights_on_disk and b.resident), None

    @property
    def _all_wait(self) -> bool:
        """Whether updates wait for the verdict on all gradients."""
        return self.deferred

    def _learn(self) -> None:
        """The next batch of this kind is expected to use the blocks as this one did."""
        if self._seen and tuple(self._seen) != self._orders[self._training]:
            self._orders[self._training] = tuple(self._seen)

    def describe(self) -> dict[str, Any]:
        """The schedule of the step under way, for reports."""
        return {"schedule": None if self._schedule is None else self._schedule.to_text()}
