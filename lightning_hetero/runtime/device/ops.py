"""What each op of a schedule does on a device with memory of its own, and which lane runs it.

[Note: Whose turn]
The thread that computes issues ops, in the order of the schedule; lanes run them. What an op has to know (hyper-parameters, the
scale of gradients, which gradients there are) is read off as it is issued; what it works on (gradients on the host, staged state,
memory) belongs to the lanes until its event has passed. The store has one user at a time: ops that touch it hold
:attr:`DeviceOps._turn`, and the thread that computes touches it only once all lanes are empty, or while it holds the turn.
It does so for the verdict on updates that were tried, and to commit a step with the state of the loop; by then these updates, or
all of the step, have been handed to the engine. Inside it waits for no lane.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_hetero._native import Ticket as NativeTicket
from lightning_hetero.ir.plan import UpdateLane
from lightning_hetero.ir.schedule import NO_BLOCK, Lane, Op, OpKind, Payload
from lightning_hetero.runtime.activations.block import Activations
from lightning_hetero.runtime.activations.swaps import SwapFiles
from lightning_hetero.runtime.device import HostGradient
from lightning_hetero.runtime.device.residents import DeviceResidents
from lightning_hetero.runtime.lanes import Event, OpEvent, Ticket
from lightning_hetero.runtime.updates import DueUpdate
from lightning_hetero.store.live.blocks import Block

Key = tuple[OpKind, int]

_SLICE_S = 0.2  # how late it is noticed that an update will not run


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


class _Trial:
    """An update that runs before the verdict.

    Args:
        due: The update.
        tickets: Its tickets, once it has run.
        divided: Its gradients have been divided by the loss's scale, if there is one.
    """

    def __init__(self, due: DueUpdate, tickets: list[NativeTicket], *, divided: bool) -> None:
        self.due, self.tickets, self.divided = due, tickets, divided
        self.handed = threading.Event()

    def wait(self, end: OpEvent) -> None:
        """Waits until it has run, or never will: ``end`` is that of its op."""
        while not self.handed.wait(_SLICE_S) and not end.settled():
            pass


class DeviceOps(DeviceResidents):
    """Gives ops to lanes.

    Args:
        blocks: As for :class:`DeviceResidents`.
        files: Files for activations that go to the disk; ``None`` where none do.
        **common: As for :class:`DeviceResidents`.
    """

    def __init__(self, blocks: Sequence[Block], *, files: SwapFiles | None = None, **common: Any) -> None:
        super().__init__(blocks, **common)
        self.files = files
        self._turn = self.speculation.turn = threading.RLock()
        self._tries: dict[int, bool] = {}  # block whose update is tried -> whether its gradients were divided before they left
        self._trial: _Trial | None = None  # the update that is being submitted, if it is tried
        self._ends: dict[Key, Event] = {}  # the latest op of each kind and block, of this step
        self._updating: list[OpEvent] = []  # updates on the CPU that may not have been handed to the engine yet
        self._marked: tuple[int, Event] = -1, All(())  # the latest mark, and the anchor at which it was made
        self._follow_activations()

    def _follow_activations(self) -> None:
        self.activations = Activations(self.lanes, weights=self.weights.reference, files=self.files, poison=self._poison)

        def moves(block: Block) -> bool:  # what a root saves is its blocks' own, and its hooks would stand before theirs
            return self.is_away(block) or (self.lanes.counts and not block.spec.pinned)

        follow = self.activations.block
        self._saved = [follow(b.name, b.spec.module, b.plan, index=b.index, weights_move=moves(b)) for b in self.blocks]

    # ---- to the lanes -------------------------------------------------------------------------------------------------------

    def _submit(self, op: Op, after: Sequence[Event]) -> Event:
        """Gives one op to its lane; what reality has overtaken does nothing."""
        if op.payload is Payload.ACTIVATIONS:
            after = (*after, self._mark(op.at)) if _follows_compute(op) else after
            end = self._ends[op.kind, op.block] = self._saved[op.block].swap(op, after)
            return end
        block = None if op.block == NO_BLOCK else self.blocks[op.block]
        is_late = block is not None and (op.kind, op.lane) == (OpKind.UPDATE, Lane.CPU) and not self._is_early(block)
        if is_late and block is not None:
            self._take_rest(block)  # its own GRAD could not take them yet
            after = (*after, *self.side.gradients.arriving(block))
        run = self._run_of(op)
        if run is None:
            return All(after)
        after = () if op.kind is OpKind.COMMIT else after
        if _follows_compute(op):
            after = (*after, self._mark(op.at))
        # The commit follows all updates as they are handed to the engine, not as they end: that lane is theirs.
        end = self.lanes.submit(replace(op, lane=Lane.CPU) if op.kind is OpKind.COMMIT else op, run, after)
        if self._trial is not None:
            trial, self._trial = self._trial, None
            self.speculation.remember(trial.due, trial.tickets, partial(trial.wait, end))
        if op.lane is Lane.COMPUTE:
            self.lanes.compute_waits([end])  # raises what it raised
        elif (op.kind, op.lane) == (OpKind.UPDATE, Lane.CPU):
            self._updating.append(end)
        if block is not None and (op.kind is OpKind.GRAD or (op.kind, op.lane) == (OpKind.UPDATE, Lane.CPU)):
            self.side.gradients.sent(block, end)
        elif block is not None and (op.kind, op.payload) == (OpKind.SWAP_OUT, Payload.STATE):
            self.side.updates.returning(block, end)
        self._ends[op.kind, op.block] = end
        return end

    def _take_rest(self, block: Block) -> None:
        """Gradients of a backward that has ended leave, where they are still on the device."""
        if _are_here(block):
            op = Op(id=-1, kind=OpKind.GRAD, block=block.index, lane=Lane.D2H, at=-1, payload=Payload.GRADIENTS)
            run = self._gradients_of(block)
            end = self._ends[op.kind, op.block] = self.lanes.submit(op, run, (self._mark(op.at),))
            self.side.gradients.sent(block, end)

    def _mark(self, at: int) -> Event:
        """Compute has come to this anchor."""
        if at < 0 or self._marked[0] != at:
            self._marked = at, self.lanes.mark()
        return self._marked[1]

    # ---- what they do -------------------------------------------------------------------------------------------------------

    def _run_of(self, op: Op) -> Callable[[], Iterable[Ticket]] | None:
        """What the op does; read off now is all that may change before its turn comes."""
        if op.kind is OpKind.COMMIT:
            return self._commit if self.commits else None
        if op.kind is OpKind.MIRROR:
            return None  # where the batch ends, once all hooks have run (`KeptSteps.keep`)
        block, side = self.blocks[op.block], self.side
        match op.kind, op.payload, op.lane:
            case OpKind.FETCH, Payload.WEIGHTS, _:
                return partial(self._fetch_weights, block, again=self._is_redone and self.speculation.is_due(block))
            case OpKind.FETCH, Payload.STATE, _:
                return None if self._is_redone and self._is_overtaken(op) else self._opening(block)
            case OpKind.RELEASE, _, Lane.DISK_READ:
                return partial(self._release_host, block)
            case OpKind.RELEASE, _, _:
                return None if block.uses else partial(side.weights.free, block)
            case OpKind.UPLOAD, _, _:
                return partial(side.weights.upload, block)
            case OpKind.GRAD, _, _:
                return None if self._is_early(block) else self._gradients_of(block)
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

    @property
    def _is_redone(self) -> bool:
        """Whether the verdict that is under way has discarded what was tried."""
        return self.updater.verdict is not None and self.speculation.redoes

    def _fetch_weights(self, block: Block, *, again: bool) -> Sequence[Ticket]:
        """``again``: weights that are in memory are on their way back there since the update that changed them was discarded."""
        with self._turn:
            if again and block.resident:
                return [part.last_write for part in block.parts if part.last_write is not None]
            return self._start_fetch(block, ())

    def _opening(self, block: Block) -> Callable[[], Iterable[Ticket]] | None:
        early = self.deferred and self.updater.verdict is None
        if early and (self._armed is None or not self.speculation.hopes(block, self._armed)):
            return None

        def run() -> Sequence[Ticket]:
            with self._turn:
                if early and not self.speculation.may_be_tried(block.parts):
                    return []
                return self.updater.open(block, priority=self._urgency(block), after=(), speculative=early)

        return run

    def _release_host(self, block: Block) -> Sequence[Ticket]:
        with self._turn:
            return self._give_back(block)

    def _update_of(self, block: Block) -> Callable[[], Iterable[Ticket]] | None:
        """The update of what of the block has gradients; ``None`` if none may run now."""
        binding, early = self.updater.verdict or self._armed, self.updater.verdict is None
        tries = early and block.index in self._tries
        if binding is None or self._is_early(block) or (self._all_wait and early and not tries):
            return None
        if self.updater.renews(block, binding):
            self.lanes.drain()
            self.updater.cancel_opened([block])
        again = None if early else self.speculation.again(block, self.updater.scale)
        prepared = self.updater.prepare(block, binding)
        if prepared is not None and block.plan.update is UpdateLane.DEVICE:
            return prepared
        dues = [due for due in (again, prepared) if due is not None]
        if not dues:
            return None
        self.hide(block)
        tickets = self._latest[block.index] = []
        if tries:
            self._trial = _Trial(self.speculation.scaled(dues[0]), tickets, divided=self._tries[block.index])
            return partial(self._try, self._trial)

        def run() -> Sequence[Ticket]:
            with self._turn:
                for due in dues:
                    tickets.extend(due(priority=self._urgency(block)))
            return tickets

        return run

    def _gradients_of(self, block: Block) -> Callable[[], Iterable[Ticket]]:
        """GRAD; what an update that is tried has to know of the gradients is taken before they leave."""
        binding, gradients = self._armed, self.side.gradients
        params = [p for p in block.params() if p.grad is not None]
        early = self.deferred and self.updater.verdict is None
        if early and binding is not None and self.speculation.hopes(block, binding):
            whole = self._tries[block.index] = not any(p in gradients for p in block.params())  # nothing to add to on the host
            if whole:
                self.speculation.divide([p for p in params if self.updater.owners.get(id(p)) is binding], binding)
        run = gradients.take(block)
        self._marked = (
            -1,
            All(()),
        )  # compute may have been given more since the last mark: divisions, norms, copies in another order
        return run

    def _try(self, trial: _Trial) -> Sequence[Ticket]:
        """An UPDATE before the verdict: it runs if it can be taken back, else after the verdict."""
        try:
            with self._turn:
                if self.speculation.may_be_tried(one.part for one in trial.due.parts):
                    if not trial.divided:
                        self.speculation.divide_on_host(trial.due)
                    trial.tickets.extend(trial.due(priority=self._urgency(trial.due.block), speculative=True))
        finally:
            trial.handed.set()
        return trial.tickets

    def _is_early(self, block: Block) -> bool:
        """Whether backward may still add to the block's gradients, or they are of one that the user runs."""
        return self.updater.verdict is None and bool(not self._in_backward or block.grads_left or block.early_unsafe)

    def _end_of_update(self, block: Block) -> Callable[[], Iterable[Ticket]] | None:
        """STORE is the second half of the engine's UPDATE, which it waits for."""
        tickets = self._latest.get(block.index)
        return None if tickets is None else lambda: tickets

    def _commit(self) -> Sequence[Ticket]:
        with self._turn:
            ticket = self.store.commit()
        return [] if ticket is None else [ticket]


def _are_here(block: Block) -> bool:
    """Whether gradients of the block are on the device."""
    return any(p.numel() and p.grad is not None and type(p.grad) is not HostGradient for p in block.params())


def _follows_compute(op: Op) -> bool:
    """Whether the op works on what compute made, or takes away what compute has used."""
    return op.kind in (OpKind.GRAD, OpKind.SWAP_OUT) or (op.kind, op.lane) == (OpKind.RELEASE, Lane.H2D)
