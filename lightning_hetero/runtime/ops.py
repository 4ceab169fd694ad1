"""What each op of a schedule does where compute is the CPU: the engine's threads are its lanes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_hetero._native import DONE, READY, Ticket
from lightning_hetero.ir.plan import Tier, UpdateLane
from lightning_hetero.ir.schedule import Lane, Op, OpKind, Payload, urgency
from lightning_hetero.runtime.optimizers import OptimizerBinding, Rule
from lightning_hetero.runtime.residency import ResidentBlocks
from lightning_hetero.runtime.speculation import Speculation
from lightning_hetero.store.live.blocks import Block


class EngineOps(ResidentBlocks):
    """Gives ops to the engine.

    Args:
        blocks: As for :class:`ResidentBlocks`.
        deferred: Updates follow the verdict on all gradients instead of running during backward.
        **common: As for :class:`ResidentBlocks`.

    Attributes:
        serial: Nothing overlaps: compute waits for whatever it issues to be done. For measuring compute alone.
        speculation: Updates that run before the verdict where that can be taken back.
    """

    def __init__(self, blocks: Sequence[Block], *, deferred: bool, **common: Any) -> None:
        super().__init__(blocks, **common)
        self.deferred = deferred
        self.serial = False
        self.speculation = Speculation(self.store)
        self._armed: OptimizerBinding | None = None
        self._in_backward = False  # Lightning's own, which leaves the gradients of the step
        self._in_flight: list[Ticket] = []
        self._latest: dict[int, list[Ticket]] = {}  # block -> its latest update, which ends with its STORE

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
        return []  # COMMIT follows the last update in `handover`, or MIRRORs where the batch ends (`KeptSteps.keep`)

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

    # ---- updates ----------------------------------------------------------------------------------------------------------

    def _update(self, block: Block, binding: OptimizerBinding | None, after: Sequence[Ticket]) -> list[Ticket]:
        """Updates what of the block has gradients for ``binding``; during backward only blocks whose gradients are all complete."""
        if binding is None or binding.rule is Rule.WHOLE:
            return []
        early = self.updater.verdict is not binding
        if early and not self._in_backward:  # one that the user runs: its gradients are not those of the step
            return []
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
            others = self._latest.get(block.index, ()) if self.updater.has_several else ()  # maybe of this step
            self._latest[block.index] = [*(t for t in others if t.poll() != DONE), *tickets]
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
