"""What each op of a schedule does, on every device.

One table maps (op kind, payload, lane) to a handler.

The thread that computes calls a handler when it submits the op. The handler reads everything that
may change before the op runs: hyper-parameters, the scale of gradients, which gradients there are.
It returns the op's *run*, which the lane calls, or ``None`` if there is nothing to do. Then the op
ends when the ops before it have ended.

[Note: One user of the store]
Lanes may run ops in threads of their own. Until an op has ended, the lanes own what it works on:
gradients on the host, staged state, memory. The store has one user at a time. A run that uses it
holds ``Run.turn``. The thread that computes uses it only if all lanes are empty, or while it holds
the turn: for the verdict on speculative updates, and to commit a step with the state of the loop.
By then the engine has these updates, or the whole step. Inside a turn that thread waits for no
lane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from lightning_hetero._native import Ticket
from lightning_hetero.errors import HeteroError
from lightning_hetero.ir.plan import Tier, UpdateLane
from lightning_hetero.ir.schedule import COLLECTIVES, NO_BLOCK, Lane, Op, OpKind, Payload, urgency
from lightning_hetero.lanes import All, Event, OpEvent
from lightning_hetero.runtime.activations.block import Activations, BlockActivations
from lightning_hetero.runtime.batch import Batch
from lightning_hetero.runtime.context import RunContext
from lightning_hetero.runtime.device import DeviceSide
from lightning_hetero.runtime.gradients_in_use import GradientsInUse
from lightning_hetero.runtime.optimizers import OptimizerBinding, Rule
from lightning_hetero.runtime.rank_ops import RankOps, Run
from lightning_hetero.runtime.residency import Residency
from lightning_hetero.runtime.speculation import Speculation, Trial
from lightning_hetero.runtime.updates import DueUpdate
from lightning_hetero.runtime.weights_in_code import WeightsInCode
from lightning_hetero.store.live.blocks import Block

_READ_REDUCED = ((OpKind.UPDATE, Payload.STATE), (OpKind.SWAP_IN, Payload.GRADIENTS))

Key = tuple[OpKind, int]


class Handlers:
    """Gives ops to their lanes."""

    def __init__(self, context: RunContext, batch: Batch, speculation: Speculation, residency: Residency) -> None:
        self.ends: dict[Key, Event] = {}  # the latest op of each kind and block, of this step
        self.updating: list[OpEvent] = []  # updates that may not have ended yet
        self.in_use = GradientsInUse()  # gradients that these read
        self._batch, self._speculation, self._residency = batch, speculation, residency
        run = context.run
        self._blocks, self._lanes, self._store, self._updater = run.blocks, run.lanes, run.store, run.updater
        self._recorder, self._poison, self._turn, self._side = run.recorder, run.poison, run.turn, run.side
        self._slices = run.slices
        self._ranks = None if run.slices is None else RankOps(context, run.slices, batch)
        self._in_code = WeightsInCode(residency, on_device=run.side is not None)
        self._latest: dict[int, list[Ticket]] = {}  # block -> its latest update, whose write-back is the STORE
        self._ending: list[OpEvent] = []  # MIRRORs and COMMITs
        self._write_mirrors, self._commits_always = run.mirror, False
        self._lifted: dict[int, DueUpdate] = {}  # block -> its update, which has what it reads on the device of a rank
        self._trial: Trial | None = None  # the update that is being submitted, if it is speculative
        self._marked: tuple[int, Event] = -1, All(())  # the anchor of the latest mark, and the mark
        self.saved: list[BlockActivations] = []  # what forwards of each block save; empty if the device is the host
        self.activations: Activations | None = None  # of all blocks, on a device with memory of its own
        self.install(context)

    def install(self, context: RunContext) -> None:
        """Changes to another plan, while the lanes are empty."""
        placement = context.placement
        self._deferred, self._lowest_first = bool(placement.rules.deferred), placement.plan.priority
        if self.activations is not None:
            self.activations.close()
        if self._side is not None:
            self.activations = self._follow_activations(self._side, context)

    def _follow_activations(self, side: DeviceSide, context: RunContext) -> Activations:
        weights, casts = side.weights.reference, self._residency.casts
        activations = Activations(self._lanes, weights=weights, casts=casts, files=context.files, poison=self._poison)

        def moves(block: Block) -> bool:  # a root saves for its blocks, and its hooks would come before theirs
            return self._residency.is_away(block) or (self._lanes.counts and not block.spec.pinned)

        follow = activations.block
        self.saved = [follow(b.name, b.spec.module, b.plan, index=b.index, weights_move=moves(b)) for b in self._blocks]
        return activations

    def begin_batch(self) -> None:
        """Begins another batch."""
        self.ends = {}
        self._ending.clear()
        if self._side is not None:
            self._marked = -1, All(())
            self.look_at_updates()

    def look_at_updates(self) -> None:
        """Forgets updates that have ended."""
        self.updating = [end for end in self.updating if not end.ended()]

    def forget(self) -> None:
        """Forgets all ops: nothing is under way."""
        self.ends = {}
        self.updating.clear()
        self._latest.clear()

    @property
    def all_wait(self) -> bool:
        """Whether updates wait for the verdict on all gradients."""
        return self._deferred or self._batch.probing or self._batch.waits

    # ---- to the lanes ----------------------------------------------------------------------------

    def submit(self, op: Op, after: Sequence[Event]) -> Event:
        """Gives one op to its lane; returns its end."""
        side = self._side
        if side is not None:
            if op.payload is Payload.ACTIVATIONS:
                after = (*after, self._mark(op.at)) if (op.kind, op.lane) in _AFTER_COMPUTE else after
                moved = self.ends[op.kind, op.block] = self.saved[op.block].swap(op, after)
                return moved
            if op.kind is OpKind.UPDATE and op.lane is Lane.CPU and not self._is_early(block := self._blocks[op.block]):
                after = (*after, *self._take_rest(block, side))  # a late update also sends gradients that no GRAD sent
        if self._ranks is not None and (op.kind, op.payload) in _READ_REDUCED:
            reduced = self.ends.get((OpKind.REDUCE, op.block))
            after = (*after, *self._ranks.await_reduced(self._blocks[op.block], reduced))
        run = TABLE[op.kind, op.payload, op.lane](self, op)
        if run is None:
            waits = [event for event in after if not event.done()]
            if waits:  # edges of the next step may lead to these through this op
                self.ends.setdefault((op.kind, op.block), All(waits))
            return All(after)
        if op.lane in COLLECTIVES:
            run = partial(self._on_ranks.slices.collectives.on_lane, run)
        if side is None:
            end = self._lanes.submit(op, run, after)
            if end.error is not None:
                self._lanes.drain()  # raises it, or an earlier one
        elif op.lane is Lane.DISK_WRITE and op.kind in (OpKind.MIRROR, OpKind.COMMIT):
            # They follow all updates into the engine, so they use the lane of updates.
            lent = self.ends.get((OpKind.MIRROR, op.block))
            end = self._lanes.submit(replace(op, lane=Lane.CPU), run, () if lent is None else (lent,))
        else:
            placed = self._in_this_thread(op, after) if op.kind is OpKind.UPDATE and op.lane is Lane.CPU else op
            end = self._lanes.submit(placed, run, (*after, self._mark(op.at)) if (op.kind, op.lane) in _AFTER_COMPUTE else after)
            if op.kind in _NOTED:
                self._note(op, end, side)
        if self._trial is not None:
            trial, self._trial = self._trial, None
            self._speculation.submitted(trial, end)
        if op.kind is OpKind.UPDATE and (side is None or op.lane is Lane.CPU):
            self.updating.append(end)
            if self._updater.verdict is None and not self.all_wait:
                self._updater.show_taken(self._blocks[op.block], self._updater.updated)
        elif op.kind in (OpKind.MIRROR, OpKind.COMMIT):
            self._ending.append(end)
        elif op.lane in COLLECTIVES:
            self._on_ranks.slices.collectives.follow(end)
        self.ends[op.kind, op.block] = end
        return end

    def _in_this_thread(self, op: Op, after: Sequence[Event]) -> Op:
        """An optimizer's own code reads hyper-parameters as it runs: before its ``step`` ends."""
        binding = self._updater.verdict or self._batch.armed
        if binding is None or binding.rule is Rule.NATIVE:
            return op
        for event in after:
            event.wait()
        return replace(op, lane=Lane.COMPUTE)

    def wait_handed(self) -> None:
        """Waits until the engine has the MIRRORs and COMMITs so far."""
        for end in self._ending:
            end.handed()
        self._ending.clear()

    def update_now(self, block: Block, *, after: Sequence[Event] = ()) -> Event:
        """Submits an update that the schedule does not have; returns its end."""
        plan, side = block.plan, self._side
        lane = Lane.CPU if plan.update is UpdateLane.CPU else Lane.COMPUTE
        self._residency.renewed.add(block.index)
        if side is None or lane is Lane.CPU:
            if side is not None:
                keys = [(kind, block.index) for kind in (OpKind.UPLOAD, OpKind.GATHER)]  # of weights that the update writes
                after = [*after, *side.gradients.arriving(block), *(self.ends[key] for key in keys if key in self.ends)]
            updated = self._submit_now(OpKind.UPDATE, block, lane, after)
            if Tier.DISK in (plan.weights, plan.state):
                self._submit_now(OpKind.STORE, block, Lane.DISK_WRITE, (updated,))
            return updated
        if self._slices is None:
            self._residency.provide(block)
        if (last := self.ends.get((OpKind.SWAP_OUT, block.index))) is not None:  # for another optimizer
            after = [*after, last]
        arrived = [self._submit_now(OpKind.SWAP_IN, block, Lane.H2D, after)] if plan.state is Tier.HOST else []
        if self._slices is not None:
            arrived.append(self._submit_now(OpKind.SWAP_IN, block, Lane.H2D, after, Payload.GRADIENTS))
        updated = self._submit_now(OpKind.UPDATE, block, lane, arrived)
        after = (updated,)
        if plan.state is Tier.HOST:
            after = (self._submit_now(OpKind.SWAP_OUT, block, Lane.D2H, after),)
        if plan.weights is Tier.HOST or self._slices is not None:
            self._submit_now(OpKind.SWAP_OUT, block, Lane.D2H, after, Payload.WEIGHTS)
        return updated

    def update_rest(self, binding: OptimizerBinding, *, one_by_one: bool) -> None:
        """Runs updates that no op of the schedule has run."""
        if binding.rule is Rule.WHOLE:
            self._updater.update_whole(binding)
            return
        computed = []
        for block in self._blocks:
            if self._updater.has_work(block, binding) or self._speculation.is_due(block):
                end = self.update_now(block, after=self.updating if one_by_one else ())
                if block.plan.update is UpdateLane.DEVICE:
                    computed.append(end)
        self._lanes.compute_waits(computed)

    def wait_updates(self) -> None:
        """Waits until updates have read their gradients and written weights."""
        self.in_use.check()
        for end in self.updating:
            end.wait()
        self.updating.clear()

    def keep_gradients(self) -> None:
        """A step has issued its updates, and gradients stay: code may not write them meanwhile."""
        if self._side is not None or self._slices is not None or not self.updating:  # some updates read copies
            return
        updated, named = self._updater.updated, list[tuple[str, nn.Parameter]]()
        for block in self._blocks:
            for part in block.parts:
                named += [(part.names[i], p) for i, p in enumerate(part.params) if id(p) in updated]
        self.in_use.follow(named)

    def settle_held(self) -> None:
        """A step has issued its updates. Weights that code holds are new as this returns."""
        if self.updating and self._slices is None:
            self._in_code.settle(self._blocks)

    def reduce_left(self) -> None:
        """Backward has ended: submits REDUCEs of what no REDUCE has taken."""
        slices, side, after = self._slices, self._side, list[Event]()
        if slices is None:
            return
        # Of batches that accumulate, the last one reduces those of pinned blocks, if it is known.
        every = self._batch.armed is not None or self._updater.rules.waits
        blocks = [block for block in self._blocks if every or not block.spec.pinned]
        if side is not None and not slices.on_devices:  # gradients that are on their way
            after = [end for b in blocks for end in (*self._take_rest(b, side), *side.gradients.arriving(b))]
        elif slices.on_devices:  # these REDUCEs add to what earlier GRADs bring
            after = slices.gradients.arriving(*self._blocks)
        for block in slices.gradients.left(blocks):
            self._submit_now(OpKind.REDUCE, block, slices.lane, after, Payload.GRADIENTS)

    def _submit_now(
        self, kind: OpKind, block: Block, lane: Lane, after: Sequence[Event] = (), payload: Payload = Payload.STATE
    ) -> Event:
        """Submits an op that the schedule does not have."""
        key = kind, block.index
        before = self.ends.get(key)
        end = self.submit(Op(id=-1, kind=kind, block=block.index, lane=lane, at=-1, payload=payload), after)
        if before is not None and self.ends[key] is not before:  # in the same batch, for another optimizer
            self.ends[key] = All((before, end))
        return end

    def mirror_now(self, block: Block) -> None:
        """Submits MIRRORs that the schedule does not have."""
        lent = (self._submit_now(OpKind.MIRROR, block, Lane.D2H),) if self._residency.lends(block) else ()
        self._submit_now(OpKind.MIRROR, block, Lane.DISK_WRITE, lent)

    def commit(self, *, always: bool = False) -> Event:
        """Submits a COMMIT; ``always``: it writes a record even if no block has changed."""
        self._commits_always = always
        return self.submit(Op(id=-1, kind=OpKind.COMMIT, block=NO_BLOCK, lane=Lane.DISK_WRITE, at=-1), ())

    def gather(self, block: Block) -> None:
        """Backward has ended: adds the device's gradients to those on the host, if it has any."""
        side = self._side
        if side is not None and (here := side.gradients.ids()) and not here.isdisjoint(map(id, block.params())):
            self._take_rest(block, side)

    # ---- what they do ----------------------------------------------------------------------------

    def _fetch(self, op: Op) -> Run | None:
        """FETCH weights: from the disk to the host."""
        block = self._blocks[op.block]
        # If an update was discarded, the old weights are already on their way back to memory.
        again = self._updater.verdict is not None and self._speculation.redoes and self._speculation.is_due(block)
        if self._side is None and not again and not self._residency.weights.fits(block):
            return None

        def run() -> Sequence[Ticket]:
            with self._turn:
                if again and block.resident:
                    return [part.last_write for part in block.parts if part.last_write is not None]
                return self._residency.weights.start_fetch(block, self._lanes.behind)

        return run

    def _open_state(self, op: Op) -> Run | None:
        """FETCH state: it streams from the disk into staging memory before the gradients come."""
        block, verdict = self._blocks[op.block], self._updater.verdict
        if self._batch.serial or self._batch.waits:  # each update reads its own state
            return None
        is_kept = self._speculation.redoes and not self._speculation.is_due(block)
        if verdict is not None and is_kept and not self._updater.has_work(block, verdict):
            return None  # only discarded updates run again
        early, armed = self._deferred and verdict is None, self._batch.armed
        if early and (armed is None or not self._speculation.is_wanted(block, armed)):
            return None

        def run() -> Sequence[Ticket]:
            with self._turn:
                if early and not self._speculation.can_take_back(block.parts):
                    return []
                return self._updater.open(block, priority=self._urgency(block), after=self._lanes.behind, speculative=early)

        return run

    def _release(self, op: Op) -> Run | None:
        """RELEASE on the host."""
        block = self._blocks[op.block]
        if self._side is None and (block.uses or not block.weights_on_disk):
            return None
        if self._slices is not None and self._slices.on_devices:
            self._slices.leave(block)

        def run() -> Sequence[Ticket]:
            with self._turn:
                return self._residency.weights.give_back(block)

        return run

    def _free(self, op: Op) -> Run | None:
        """RELEASE on the device."""
        block = self._blocks[op.block]
        return None if block.uses else partial(self._on_device.weights.free, block)

    def _upload(self, op: Op) -> Run:
        """UPLOAD: weights come to the device, or this rank's slice of them."""
        weights, exchange = self._on_device.weights, self._slices is not None and self._slices.on_devices
        return partial(weights.upload_slice if exchange else weights.upload, self._blocks[op.block])

    def _reduce(self, op: Op) -> Run | None:
        """REDUCE of the block's gradients over all ranks."""
        block = self._blocks[op.block]
        return self._on_ranks.reduce(op, block, may_change=self._may_change(block), all_wait=self.all_wait)

    def _send_gradients(self, op: Op) -> Run | None:
        """GRAD: gradients leave the device, or a slice of their sum."""
        block = self._blocks[op.block]
        if self._slices is not None and self._slices.on_devices:
            return self._slices.gradients.bring(block)
        return None if self._may_change(block) else self._gradients_of(block, self._on_device)

    def _update(self, op: Op) -> Run | None:
        """UPDATE; on the device of one of several ranks, of the slices that have come there."""
        if op.lane is Lane.COMPUTE and self._slices is not None:
            return self._lifted.pop(op.block, None)
        return self._begin_update(op)

    def _begin_update(self, op: Op) -> Run | None:
        """UPDATE, or SWAP_IN of slices for it: everything in the block that has gradients."""
        block, updater, side = self._blocks[op.block], self._updater, self._side
        early = updater.verdict is None
        binding = updater.verdict or self._batch.armed
        if binding is None or binding.rule is Rule.WHOLE or (early and self._is_early(block)):
            return None
        waits = early and self.all_wait
        tries = waits and self._speculation.may_try(block, binding, on_device=side is not None)
        if waits and not tries:
            return None
        if block.index in self._residency.casts.blocks:
            self._residency.parameters.keep_casts(block, trained=True)
        self._residency.before_update(block)
        work = updater.work(block, binding)
        if side is not None and any(one.new for one in work):
            self._lanes.drain()
            updater.cancel_opened([block])
        again = None if early else self._speculation.again(block, updater.scale)
        due = updater.prepare(block, binding, work)
        if due is not None and binding.rule is not Rule.NATIVE:
            return partial(self._update_in_python, block, due)
        if due is not None and side is not None and block.plan.update is UpdateLane.DEVICE:
            if self._slices is None:
                return due
            self._lifted[block.index] = due
            self._residency.parameters.hide(block)
            return due.lift
        return self._update_native(block, [one for one in (again, due) if one is not None], tries=tries)

    def _update_native(self, block: Block, dues: Sequence[DueUpdate], *, tries: bool) -> Run | None:
        if not dues:
            return None
        if self._side is not None:  # on the host the update reads the parameters' gradients first
            self._residency.parameters.hide(block)
        if tries:
            trial = self._trial = self._speculation.trial(dues[0], on_device=self._side is not None)
            self._latest[block.index] = trial.tickets
            return partial(self._try, trial)
        tickets = self._latest[block.index] = []

        def run() -> Sequence[Ticket]:
            with self._turn:
                is_open = any(part.opened is not None for part in block.parts)
                for due in dues:
                    tickets.extend(due(priority=self._urgency(block), after=self._lanes.behind))
            if self._side is None:
                if not is_open and block.plan.state is Tier.DISK:
                    self._recorder.watch("FETCH state", block.name, tickets, lane=Lane.DISK_READ)
                self._residency.parameters.hide(block)
            return tickets

        return run

    def _try(self, trial: Trial) -> Sequence[Ticket]:
        """An UPDATE before the verdict."""
        block = trial.due.block
        tickets = self._speculation.run(trial, priority=self._urgency(block), after=self._lanes.behind)
        if self._side is None:
            self._residency.parameters.hide(block)
        return tickets

    def _update_in_python(self, block: Block, due: DueUpdate) -> Sequence[Ticket]:
        """UPDATE by the optimizer's own code."""
        with self._residency.at_hand(block):
            tickets = due()
        if tickets or self._slices is not None:
            self._residency.parameters.hide(block)
            self._latest[block.index] = tickets
        return tickets

    def _store_updated(self, op: Op) -> Run | None:
        """STORE: the engine writes as part of UPDATE, so this waits for that."""
        tickets = self._latest.pop(op.block, None)
        return None if tickets is None else lambda: tickets

    def _return_weights(self, op: Op) -> Run:
        """SWAP_OUT weights: the host gets those that the device has updated."""
        side = self._on_device
        return partial(side.weights.download if self._slices is None else side.updates.put_down, self._blocks[op.block])

    def _lend(self, op: Op) -> Run:
        """MIRROR on ``d2h``: data that only the device has gets host memory until it is on disk."""
        self._marked = -1, All(())  # hooks may have given compute more to do since the last mark
        return partial(self._residency.lend, self._blocks[op.block])

    def _mirror(self, op: Op) -> Run | None:
        """MIRROR: the part of a block that lives in memory is written to the disk."""
        block, mirror = self._blocks[op.block], self._write_mirrors
        if mirror is None:
            return None

        def run() -> Sequence[Ticket]:
            with self._turn:
                tickets = mirror(block, self._lanes.behind)
            self._residency.take_back(block, tickets)
            return tickets

        return run

    def _commit(self, op: Op) -> Run:
        """COMMIT: one record makes the step's writes valid."""
        always = self._commits_always

        def run() -> Sequence[Ticket]:
            with self._turn:
                ticket = self._store.commit(always=always)
            return [] if ticket is None else [ticket]

        return run

    @property
    def _on_ranks(self) -> RankOps:
        if self._ranks is None:
            raise HeteroError("an op for several ranks came where one process has all of the model.")
        return self._ranks

    @property
    def _on_device(self) -> DeviceSide:
        if self._side is None:
            raise HeteroError("an op for a device with memory of its own came where the device is the host.")
        return self._side

    def _urgency(self, block: Block) -> int:
        return urgency(OpKind.UPDATE, Payload.STATE, block.index, lowest_first=self._lowest_first)

    def _is_early(self, block: Block) -> bool:
        """Whether backward may still change the block's gradients, or the user runs a backward.

        On several ranks the block's REDUCE has asked all of them.
        """
        if self._slices is None:
            return self._may_change(block)
        return self._updater.verdict is None and not (self._batch.in_backward and self._slices.gradients.are_complete(block))

    def _may_change(self, block: Block) -> bool:
        return self._updater.verdict is None and bool(not self._batch.in_backward or block.grads_left or block.early_unsafe)

    def _take_rest(self, block: Block, side: DeviceSide) -> tuple[Event, ...]:
        """Sends gradients that are still on the device after backward; returns the end of that."""
        exchanges = self._slices is not None and self._slices.on_devices
        if not exchanges and side.gradients.are_left(block):
            op = Op(id=-1, kind=OpKind.GRAD, block=block.index, lane=Lane.D2H, at=-1, payload=Payload.GRADIENTS)
            run = self._gradients_of(block, side)
            end = self.ends[op.kind, op.block] = self._lanes.submit(op, run, (self._mark(op.at),))
            side.gradients.sent(block, end)
            return (end,)
        return ()

    def _gradients_of(self, block: Block, side: DeviceSide) -> Run:
        """GRAD. A speculative update reads what it needs of the gradients before they leave."""
        binding, gradients = self._batch.armed, side.gradients
        early = self._deferred and self._updater.verdict is None
        if early and binding is not None and self._speculation.is_wanted(block, binding):
            mine = [p for p in block.params() if p.grad is not None and self._updater.owners.get(id(p)) is binding]
            self._speculation.leave(block, mine, binding, whole=gradients.ids().isdisjoint(map(id, block.params())))
        run = gradients.take(block, shown=self._slices is None and (binding is None or self.all_wait))
        self._marked = -1, All(())  # compute may have more to do since the last mark, such as norms
        return run

    def _note(self, op: Op, end: OpEvent, side: DeviceSide) -> None:
        """Tells the device's side which op works on gradients or state now."""
        block = self._blocks[op.block]
        if op.kind is OpKind.GRAD and self._slices is not None and self._slices.on_devices:
            self._slices.gradients.sent(block, end)
        elif op.kind is OpKind.GRAD or (op.kind is OpKind.UPDATE and op.lane is Lane.CPU):
            side.gradients.sent(block, end)
        elif op.kind is OpKind.SWAP_OUT and op.payload is Payload.STATE:
            side.updates.returning(block, end)

    def _mark(self, at: int) -> Event:
        """The event that compute has come to this anchor."""
        if at < 0 or self._marked[0] != at:
            self._marked = at, self._lanes.mark()
        return self._marked[1]


# Ops that read what compute wrote, or free what compute used.
_AFTER_COMPUTE = {(kind, Lane.D2H) for kind in OpKind} | {(OpKind.SWAP_OUT, lane) for lane in Lane} | {(OpKind.RELEASE, Lane.H2D)}
_AFTER_COMPUTE |= {(OpKind.REDUCE, Lane.PEER)}
_NOTED = frozenset({OpKind.GRAD, OpKind.UPDATE, OpKind.SWAP_OUT})


TABLE: Mapping[tuple[OpKind, Payload, Lane], Callable[[Handlers, Op], Run | None]] = {
    (OpKind.FETCH, Payload.WEIGHTS, Lane.DISK_READ): Handlers._fetch,
    (OpKind.FETCH, Payload.STATE, Lane.DISK_READ): Handlers._open_state,
    (OpKind.RELEASE, Payload.WEIGHTS, Lane.DISK_READ): Handlers._release,
    (OpKind.RELEASE, Payload.WEIGHTS, Lane.H2D): Handlers._free,
    **{(OpKind.GATHER, Payload.WEIGHTS, lane): lambda h, op: h._on_ranks.gather(h._blocks[op.block]) for lane in COLLECTIVES},
    **{(OpKind.REDUCE, Payload.GRADIENTS, lane): Handlers._reduce for lane in COLLECTIVES},
    **{(OpKind.AGREE, Payload.NONE, lane): lambda h, op: h._on_ranks.agree(op) for lane in COLLECTIVES},
    (OpKind.RELEASE, Payload.WEIGHTS, Lane.NET): lambda h, op: h._on_ranks.release(h._blocks[op.block]),
    (OpKind.UPLOAD, Payload.WEIGHTS, Lane.H2D): Handlers._upload,
    (OpKind.GRAD, Payload.GRADIENTS, Lane.D2H): Handlers._send_gradients,
    (OpKind.SWAP_IN, Payload.STATE, Lane.H2D): lambda h, op: partial(h._on_device.updates.swap_in, h._blocks[op.block]),
    (OpKind.UPDATE, Payload.STATE, Lane.CPU): Handlers._update,
    (OpKind.UPDATE, Payload.STATE, Lane.COMPUTE): Handlers._update,
    (OpKind.SWAP_IN, Payload.GRADIENTS, Lane.H2D): Handlers._begin_update,
    (OpKind.SWAP_OUT, Payload.STATE, Lane.D2H): lambda h, op: partial(h._on_device.updates.swap_out, h._blocks[op.block]),
    (OpKind.SWAP_OUT, Payload.WEIGHTS, Lane.D2H): Handlers._return_weights,
    (OpKind.STORE, Payload.WEIGHTS, Lane.DISK_WRITE): Handlers._store_updated,
    (OpKind.STORE, Payload.STATE, Lane.DISK_WRITE): Handlers._store_updated,
    (OpKind.MIRROR, Payload.WEIGHTS, Lane.D2H): Handlers._lend,
    (OpKind.MIRROR, Payload.STATE, Lane.D2H): Handlers._lend,
    (OpKind.MIRROR, Payload.WEIGHTS, Lane.DISK_WRITE): Handlers._mirror,
    (OpKind.MIRROR, Payload.STATE, Lane.DISK_WRITE): Handlers._mirror,
    (OpKind.COMMIT, Payload.NONE, Lane.DISK_WRITE): Handlers._commit,
}
"""All ops but those on activations, which ``runtime.activations`` handles."""
