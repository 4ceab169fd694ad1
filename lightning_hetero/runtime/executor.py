"""The runtime of one model: follows a batch from anchor to anchor.

``begin_step`` chooses the schedule of a batch. ``forward_begins`` and ``backward_begins`` are its
anchors, and ``handover`` is its verdict. ``runtime.step`` walks the schedule between them,
``runtime.handlers`` does the ops, ``runtime.residency`` knows where weights are, and
``lanes`` runs ops.

[Note: Strays]
If a batch uses a block in a way that the schedule does not foresee, the block is served on demand,
and the next batch is expected to use the blocks like this one. On a device with memory of its own
this also ends the schedule for the rest of the batch: lanes drain, each use brings its weights, and
each block's update follows the verdict. Gradients stay on the device, unless the host has gradients
of an earlier batch. So sums are made in autograd's order, and code that clips or reads gradients
sees all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from torch import Tensor

from lightning_hetero.errors import DeviceMemoryError, OutOfMemoryBudgetError, UnsupportedError
from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Plan, UpdateOrder
from lightning_hetero.ir.schedule import Phase, Schedule, StepSignature, Updates
from lightning_hetero.lanes import Event
from lightning_hetero.runtime.activations.autocast import is_followed
from lightning_hetero.runtime.anchors import Inputs, Watcher
from lightning_hetero.runtime.batch import Batch
from lightning_hetero.runtime.context import RunContext
from lightning_hetero.runtime.early_changes import TOO_LATE
from lightning_hetero.runtime.gradient_room import GradientRoom
from lightning_hetero.runtime.handlers import Handlers, Key
from lightning_hetero.runtime.optimizers import OptimizerBinding, Rule
from lightning_hetero.runtime.residency.choice import residency_of
from lightning_hetero.runtime.speculation import Speculation
from lightning_hetero.runtime.step import Schedules, Step
from lightning_hetero.store.live.blocks import Block
from lightning_hetero.store.live.moved_weights import bring_back_all


class Executor:
    """The runtime of one model, on any device."""

    def __init__(self, context: RunContext) -> None:
        run = context.run
        self.context, self.batch = context, Batch()
        self.blocks, self.store, self.updater, self.lanes = run.blocks, run.store, run.updater, run.lanes
        self.recorder, self.heap, self.device = run.recorder, run.heap, run.side
        self.slices, self.residency = run.slices, residency_of(context)
        self._apart = None if (there := run.slices or run.side) is None else there.gradients  # gradients that have left compute
        self.speculation = Speculation(run.store, run.turn, run.lanes)  # updates that run before the verdict
        self.speculation.enabled = context.placement.rules.speculates
        self.handlers = Handlers(context, self.batch, self.speculation, self.residency)
        self.watcher: Watcher | None = None  # is told of anchors, too
        self._room = GradientRoom(run, self.residency.weights)
        self._schedules = Schedules(self.plan, context.model)
        self._step: Step | None = None  # None: there is no schedule for the rest of the batch
        self._before: dict[Key, Event] = {}  # the latest op of each kind and block, of the steps before
        self._handed_over = True  # since the last batch was armed
        self._between = True  # no batch is under way
        self._outside = False  # what runs is no batch of the Trainer: a callback computes, or code after the fit
        self._held: set[int] = set()  # blocks that stay open for the rest of the batch
        self._in_backward_of: Block | None = None
        self._at: Block | None = None  # whose anchor was the last one, in this phase

    # ---- what it is doing ------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.context.placement.plan

    @property
    def model(self) -> ModelShape:
        """The blocks' sizes."""
        return self.context.model

    @property
    def may_defer(self) -> bool:
        """Whether the host has room for all gradients at once."""
        return self.context.placement.may_defer

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of the batch under way."""
        return None if self._step is None else self._step.schedule

    @property
    def armed(self) -> bool:
        """Whether the batch under way ends in an optimizer's ``step``."""
        return self.batch.armed is not None

    @property
    def where(self) -> str:
        """The place of compute in the step, for errors."""
        phase = "in backward" if self.batch.in_backward else "in forward"
        return phase if self._at is None else f"{phase}, at block {self._at.name!r}"

    @property
    def has_begun(self) -> bool:
        """Whether the step under way has made an update that cannot be taken back."""
        return self.updater.has_begun and not self.speculation.trying  # which can take back all of them

    # ---- the step --------------------------------------------------------------------------------

    def arm(self, binding: OptimizerBinding | None) -> None:
        """The batch ends in this optimizer's ``step``: updates may run once gradients are complete.

        ``None``: the batch has ended, maybe without the ``step``, which a loss scaler may skip.
        """
        if binding is None and not self._handed_over:
            self.speculation.observe(True)
            self.speculation.skip()
        if binding is None:
            self.batch.waits = False
        self.batch.armed, self._handed_over = binding, binding is None

    def begin_step(self, *, training: bool, outside: bool = False) -> None:
        """Begins a batch, with the schedule for the order of blocks in the last one of its kind.

        ``outside``: it is no batch of the Trainer, so code may write weights between uses.
        """
        self._outside = outside
        waits = training and self.handlers.all_wait
        shrinks = self.residency.weights.begin_batch(waits=waits)
        if training and self.device is not None:
            self.device.gradients.begin_batch(waits=waits)
        last, self._between = self._end_step(training=training, goes_on=not shrinks), False
        self._schedules.begin_batch(training=training)
        self._close_all(opened=last is None)
        if shrinks:
            self.residency.weights.shrink()
        self._at = None
        defers = bool(self.context.placement.rules.deferred)
        self.speculation.begin(training=training and self.armed and defers and not self.batch.probing)
        self._follow(self._expected(), last)
        self.updater.begin_step()
        if training:
            self._room.forward_begins()
            with torch._C.DisableTorchFunctionSubclass():  # handles would answer in Python
                for block in self.blocks:
                    block.grads_left = {id(p) for p in block.params() if p.requires_grad}
                    block.early_unsafe = False
        if self.handlers.activations is not None:
            self.handlers.activations.begin_batch()

    def _end_step(self, *, training: bool, goes_on: bool = True) -> Schedule | None:
        """The next step begins. Returns the schedule that it ``goes_on`` from if that is whole."""
        last = self._step.schedule if goes_on and self._step is not None and self._step.is_whole else None
        self.residency.begin_batch(training=training, whole=last is not None)
        if self._outside:
            self.residency.end_batch()
        self._before |= self.handlers.ends
        self.handlers.begin_batch()
        return last

    def _follow(self, signature: StepSignature | None, last: Schedule | None) -> None:
        """Begins the schedule of a step; ``last`` is what :meth:`_end_step` returned."""
        before, self._step = self._step, None
        if signature is not None:
            left = [] if before is None or last is None else before.left_out()
            held = self.residency.held(last)
            schedule = self._schedules.lowered(signature, *held, self.residency.weights.capacity_bytes)
            self._step = Step(schedule, held, self.handlers, self.lanes, self.recorder, self._before, self.batch.serial, left)

    def end_batch(self) -> None:
        """A batch ends."""
        self._between = True
        self.residency.end_batch()

    def _expected(self) -> StepSignature | None:
        updates = Updates.NONE
        if self._schedules.training and self.batch.armed is not None:
            updates = Updates.AFTER_VERDICT if self.handlers.all_wait else Updates.IN_BACKWARD
            updates = Updates.SPECULATIVE if self.speculation.trying else updates
        return self._schedules.signature(updates)

    def _close_all(self, *, opened: bool) -> None:
        """Closes what the last batch left open; ``opened``: also updates without gradients."""
        self.batch.in_backward = False
        if self.residency.casts.entered:
            self.residency.casts.close()
        self._close_backward()
        self._held.clear()
        self.speculation.skip()
        for block in self.blocks:
            while block.uses:  # held, or an exception left it open
                self.residency.shut(block)
        if opened:
            self.updater.cancel_opened(self.blocks)

    def forward_begins(self, block: Block, inputs: Inputs = ((), {})) -> None:
        """An anchor: submits its ops and waits for the block's weights."""
        if self._between and not torch.is_grad_enabled():  # a callback, or code after the fit, evaluates the model
            self.begin_step(training=False, outside=True)
        if block.trained is not None:
            self._trained_begins(block.trained)
        if self.batch.in_backward:
            if block is not self._in_backward_of:  # recomputation: autograd has moved on to this block
                self._close_backward()
        else:
            self._used(block)
            self._room.reaches(block)
        with self.recorder.waiting(f"F {block.name}"):
            self._reach(Phase.FORWARD, block)
            self.residency.open(block)
        casts = self.residency.casts
        if torch.is_autocast_enabled(casts.device_type) and self.residency.is_away(block):
            casts.enter(block)
        if self.watcher is not None:
            self.watcher.forward_begins(block, inputs)
        saved = self.handlers.saved
        if saved and not is_followed():
            saved[block.index].enter(*inputs)

    def _trained_begins(self, block: Block) -> None:
        """The forward of a frozen block begins: the anchor of its trained part, which is pinned.

        A recomputation in backward comes before the update of the trained part.
        """
        if self.batch.in_backward:
            self.residency.ensure(block)
        else:
            self._used(block)
            with self.recorder.waiting(f"F {block.name}"):
                self._reach(Phase.FORWARD, block)
        self.residency.open(block)

    def _used(self, block: Block) -> None:
        self._schedules.seen.append(block.index)
        block.early_unsafe |= self._schedules.training and not torch.is_grad_enabled()

    def forward_ends(self, block: Block, output: object = None) -> None:
        """The use of the block is over."""
        if self.handlers.saved:
            self.handlers.saved[block.index].leave(output)
        if self.residency.casts.entered:
            self.residency.casts.leave(block)
        if self.watcher is not None:
            self.watcher.forward_ends(block)
        self.residency.shut(block)
        if block.trained is not None:
            self.residency.shut(block.trained)

    def backward_begins(self, block: Block) -> None:
        """An anchor, as ``forward_begins``. It also ends the previous block's backward."""
        if block is not self._in_backward_of and not block.spec.pinned:
            self._next_backward(block)
        if self.watcher is not None:
            self.watcher.backward_begins(block)

    def _next_backward(self, block: Block) -> None:
        with self.recorder.waiting(f"B {block.name}"):
            self._close_backward()
            self._room.make_room(block)
            self._reach(Phase.BACKWARD, block)
            if self._schedules.is_last_backward(block.index):
                self._room.give_way(block)
            if self.device is not None:
                self.device.gradients.give_back(block)
            else:  # a ticket holds its gradients until somebody asks whether it is done
                self.handlers.look_at_updates()
            self._in_backward_of = block
            self.residency.open(block)
            if torch.is_grad_enabled():
                self.hold(block)

    def _close_backward(self) -> None:
        if self._in_backward_of is not None:
            block, self._in_backward_of = self._in_backward_of, None
            self.residency.shut(block)

    def await_verdict(self, why: str) -> None:
        """Before backward: lets updates of this step wait until all gradients are known.

        Raises:
            OutOfMemoryBudgetError: The host has no room for all gradients. It says ``why``.
        """
        if not self.handlers.all_wait and not self.may_defer:
            raise OutOfMemoryBudgetError(
                f"{why} Or raise host_memory: then all updates of the step wait for all gradients, which do not fit now."
            )
        self.batch.waits, self.speculation.trying = True, False

    def take_back(self, why: str) -> None:
        """After backward: undoes updates of this step, which then wait for the verdict.

        Raises:
            UnsupportedError: An update has begun that cannot be taken back. It says ``why``.
        """
        if self.has_begun:
            raise UnsupportedError(why)
        if self.speculation.trying:
            self.speculation.discard()

    def wait_handed(self) -> None:
        """Waits until the engine has the updates that were issued."""
        for end in self.handlers.updating:
            end.handed()

    def changed_early(self, what: str) -> None:
        """Code changes before the verdict what updates may have read: see :meth:`take_back`."""
        self.take_back(TOO_LATE.format(what=what))

    def backward_starts(self, loss: Tensor | None = None) -> None:
        """Backward, from ``loss``, will write gradients: waits until nothing reads the old ones.

        Gradients of an earlier batch that a device has exposed become ordinary ones.
        """
        self.batch.in_backward, self._at = True, None
        if self._apart is not None:
            self._apart.begin_backward(self.blocks)
        with self.recorder.waiting("backward"):
            if self.device is None:
                self.handlers.wait_updates()
            self._room.backward_begins(loss)

    def backward_ends(self) -> None:
        """The backward of the last block has ended."""
        self.batch.in_backward = False
        self._close_backward()
        self.recorder.leave()
        self.updater.backward_ends()

    def check_gradients(self) -> None:
        """After backward: refuses gradients that no update can use, before clipping or a callback.

        From here on clipping and callbacks also see gradients that have left a device.
        """
        for block in self.blocks:
            self.updater.check_gradients(block)
        self.show_gradients()

    def show_gradients(self) -> None:
        """Code outside backward finds all gradients, those too that have left a device."""
        if self.device is not None:
            for block in self.blocks:  # if no GRAD ran, or one ran before all gradients were there
                self.handlers.gather(block)
        self.handlers.reduce_left()
        if self._apart is not None:
            self._apart.expose()

    def handover(self, binding: OptimizerBinding, scale: float) -> None:
        """``optimizer.step()``: the verdict. Submits the ops that are left and returns at once.

        Raises:
            UnsupportedError: What updates have read is not the same any more.
        """
        self.backward_ends()
        if changed := self.updater.early.changed(binding):
            self.changed_early(changed)
            self.updater.read_anew()
        if self.speculation.trying:
            self.speculation.notice_changes()
        self._handed_over = True
        if self._apart is not None:
            self._apart.conceal()
        self.updater.verdict, self.updater.scale = binding, scale
        self._verdict(scale)
        if self._step is not None:
            self._step.finish()
        self.handlers.update_rest(binding, one_by_one=self.plan.update_order is UpdateOrder.NAIVE)
        if self.device is None:
            self.updater.cancel_opened(self.blocks)
        if self.batch.commits:
            self.handlers.commit()
        if self._apart is not None:
            self._apart.expose()  # gradients that stay, and those of another optimizer
        if self.updater.rules.keep_gradients and not self.updater.rules.waits and binding.rule is Rule.NATIVE:
            self.handlers.keep_gradients()
        self.updater.begin_step()
        self.recorder.end_step()
        if self.batch.serial or (self.updater.rules.waits and self.device is not None):
            self.lanes.drain()
            self.store.files.wait_for_commit()
        elif self.updater.rules.waits:
            self.handlers.wait_updates()
        else:
            self.handlers.settle_held()

    def mirror(self) -> None:
        """Ends a kept step: the engine gets the writes of everything that lives in memory."""
        with self.recorder.of_last_step():
            done = set() if self._step is None else self._step.mirror()
            for block in self.blocks:
                if block.index not in done and any(part.mirrors for part in block.parts):
                    self.handlers.mirror_now(block)
        self.handlers.wait_handed()

    def commit(self, *, always: bool = False) -> None:
        """Commits the writes; ``always``: even if no block has changed. Hands it to the engine."""
        with self.recorder.of_last_step():
            self.handlers.commit(always=always)
        self.handlers.wait_handed()

    def _verdict(self, scale: float) -> None:
        """Keeps speculative updates, or changes to the schedule that repeats discarded ones."""
        if self.speculation.trying:
            self.speculation.keep(scale)
            if self.speculation.redoes and self._step is not None:
                redone = replace(self._step.schedule.signature, updates=Updates.REDONE)
                capacity_bytes = self.residency.weights.capacity_bytes
                self._step.schedule = self._schedules.lowered(redone, *self._step.held, capacity_bytes)
        self.speculation.observe(self.speculation.discarded)

    # ---- anchors ---------------------------------------------------------------------------------

    def _reach(self, phase: Phase, block: Block) -> None:
        """Submits the ops up to this anchor, and waits for what it needs."""
        if self._apart is not None and self.batch.in_backward:  # a repeated forward comes before its backward
            phase = Phase.BACKWARD
            if block is self._at:
                return
        index = None if self._step is None or self.residency.is_stale(block) else self._step.find(phase, block.index)
        if index is None and phase is Phase.FORWARD and not self._schedules.training:
            index = self._begin_pass(block)
        self._at = block
        if index is None or self._step is None:
            self._stray(block)
            return
        needs = self._step.reach(index)
        if self.handlers.activations is not None:
            self.handlers.activations.swapper.sweep(needs)
        self.residency.ensure(block)

    def _begin_pass(self, block: Block) -> int | None:
        """If a batch without training uses a block again, begins the schedule of another pass.

        Returns the block's anchor in it; ``None`` if the batch goes on with the schedule it has.
        """
        signature = self._schedules.next_pass(self.schedule)
        if signature is None or (self.device is not None and torch.is_grad_enabled()):
            return None
        self._follow(signature, self._end_step(training=False))
        return None if self._step is None else self._step.find(Phase.FORWARD, block.index)

    def _stray(self, block: Block) -> None:
        """See [Note: Strays]."""
        if self.device is not None or not (self.plan.priority or self.batch.in_backward):
            self.lanes.drain()  # ops under way may still bring the device's copy of the weights, or free it
        if not self.residency.unforeseen(block):
            self._step = None

    def hold(self, block: Block) -> None:
        """Keeps the block open for the batch: a graph without an anchor uses its weights.

        Examples are ``create_graph=True`` and graphs built inside :meth:`Session.materialized`.
        """
        if block.index not in self._held:
            self._held.add(block.index)
            self.residency.open(block)

    # ---- rest ------------------------------------------------------------------------------------

    def give_up(self, *, gradients: bool) -> None:
        """Drops activations and ops, and maybe ``gradients``, of the batches since the last update.

        Waits for that update. Weights and state are then its results.
        """
        for _ in range(2):  # the second time raises errors that are not about memory
            try:
                self.lanes.drain()
            except (DeviceMemoryError, torch.OutOfMemoryError):
                continue
            break
        self._forget_ops()
        self._schedules.seen = []
        if self.handlers.activations is not None:
            self.handlers.activations.begin_batch()
        self._close_all(opened=True)
        if gradients:
            for param in [param for block in self.blocks for param in block.params()]:
                param.grad = None
            if self._apart is not None:
                self._apart.drop()

    def _forget_ops(self) -> None:
        self._step = None
        self._before.clear()
        self.handlers.forget()

    def rest(self) -> None:
        """Between two batches: leaves no block in use, no op under way, no write uncommitted."""
        self.lanes.drain()
        self._schedules.learn()
        self._close_all(opened=True)
        self.drain()
        for block in self.blocks:
            bring_back_all(block)
            for part in block.parts:
                self.store.barrier(part)
        self.store.commit()
        self.store.files.wait_for_commit()
        self._forget_ops()

    def drain(self) -> None:
        """Waits for all updates under way."""
        for block in self.blocks:
            for part in block.parts:
                self.residency.settle(part)
                self.residency.parameters.free(part)
        self.handlers.wait_updates()

    @contextmanager
    def handed(self, *, whole: bool) -> Iterator[None]:
        """Between two batches: the engine has all updates. Inside, only the caller uses it.

        Waits only for ops that a record names; see [Note: One user of the store].

        ``whole``: the step is kept, so a device's results come to host memory or are lent later.
        """
        self.wait_handed()
        for block in self.blocks:
            bring_back_all(block)
        self.residency.wait_for_record(self._before | self.handlers.ends, whole=whole)
        if whole:
            self.mirror()
        with self.context.run.turn:
            yield

    # ---- begin and end ---------------------------------------------------------------------------

    def enter(self) -> None:
        """Puts blocks that have left back on the device, during a step. This ends its schedule."""
        if self.device is not None:
            self._step = None
        self.residency.enter()

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """Between two batches: inside, the model is not on the device, and its memory is free."""
        self.rest()
        num_bytes = self.lanes.memory().capacity_bytes
        self.residency.set_aside(0)
        try:
            yield
        finally:
            self.residency.set_aside(num_bytes)
            self.residency.move_in()

    def install(self, context: RunContext) -> None:
        """Changes to another plan, at rest. On host and disk the blocks are in place."""
        self.context = context
        self.residency.install(context)
        self._schedules.install(self.plan, context.model)
        self.speculation.enabled = context.placement.rules.speculates
        self.speculation.worth.forget()
        self._forget_ops()
        self.handlers.install(context)
        self.residency.move_in()

    def relearn(self, model: ModelShape) -> None:
        """Parameters have joined an optimizer: updates their blocks from the next step on."""
        self.context = replace(self.context, model=model)
        self.residency.install(self.context)
        self._schedules.install(self.plan, model)

    def finish(self) -> None:
        """Ends training, after an error too: leaves nothing half open."""
        if self.device is not None:
            self.lanes.drain()
        self.batch.in_backward = False
        self._close_backward()
        self.speculation.skip()
        self.updater.begin_step()
        self.updater.cancel_opened(self.blocks)
        self.drain()
        for block in self.blocks:
            block.uses = 0
            bring_back_all(block)
        self.heap.close()

    def stop(self) -> None:
        """Closes the lanes. The device's memory is free if everything has left it."""
        try:
            if self.device is not None:
                self.device.gradients.close(self.blocks)
            if self.handlers.activations is not None:
                self.handlers.activations.close()
            if not self.lanes.memory().used_bytes:
                with suppress(RuntimeError):  # a device that has failed
                    self.lanes.resize(0)
        finally:
            self.lanes.close()

    def let_go(self) -> None:
        """Forgets the model: it belongs to another owner."""
        self._forget_ops()
        self.residency.parameters.forget()
        self.updater.own([])
        self.heap.close()
