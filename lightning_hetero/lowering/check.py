"""The invariants that every schedule keeps, whoever wrote it: proved on the data, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NoReturn

from lightning_hetero.errors import ScheduleError
from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Plan, Tier, UpdateLane
from lightning_hetero.ir.schedule import NO_BLOCK, Anchor, Lane, Op, OpKind, Payload, Phase, Schedule, Updates
from lightning_hetero.units import format_bytes


def check(schedule: Schedule, plan: Plan, model: ModelShape, *, capacity_bytes: int) -> None:
    """Proves that a schedule is safe to run, or says what is not.

    - *acyclic*: ids count from 0, edges lead to earlier ids, ops are issued in order by anchors that exist.
    - *resident*: weights that live on disk are in memory, and have been waited for, when a forward or backward begins;
      what is in use, or opened and not yet updated, is not released.
    - *capacity*: they never take more than ``capacity_bytes``, and no FETCH takes over memory before it is given back.
    - *order*: ops of one block are chained, within a step and across steps (state FETCH, UPDATE, STORE; carried STORE, UPDATE).
    - *update*: each trainable block is updated once, after its last backward, exactly if the signature has updates.
    - *gradients*: no more blocks than ``plan.gradient_depth`` wait for their update.
    - *commit*: one COMMIT, last, after every STORE; every STORE follows the COMMIT of the step before.

    Args:
        schedule: The schedule of one step.
        plan: The resolved plan it was lowered from.
        model: The blocks' sizes.
        capacity_bytes: Host bytes for weights that live on disk.

    Raises:
        ScheduleError: The first broken invariant, with op, block, rule and the ops around it.
    """
    _Check(schedule, plan, model, capacity_bytes).run()


@dataclass
class _Check:
    schedule: Schedule
    plan: Plan
    model: ModelShape
    capacity_bytes: int
    behind: list[int] = field(default_factory=list)  # op -> bit set of itself and all ops that it waits for
    last: dict[int, Op] = field(default_factory=dict)  # block -> its latest op
    fetched: dict[int, int] = field(default_factory=dict)  # block -> the FETCH that brought its weights
    opened: dict[int, int] = field(default_factory=dict)  # block -> the FETCH of its state
    updated: dict[int, int] = field(default_factory=dict)  # block -> its UPDATE
    released: int = 0  # bit set of all RELEASEs so far
    stored: int = 0  # bit set of all STOREs so far
    stored_blocks: set[int] = field(default_factory=set)
    waited: int = 0  # bit set of the ops that compute has waited for

    def run(self) -> None:
        self._check_anchors()
        self._check_edges()
        self.resident = set(self.schedule.resident_before)
        self.last_use = {a.block: i for i, a in enumerate(self.schedule.anchors)}
        by_anchor: dict[int, list[Op]] = {}
        for op in self.schedule.ops:
            by_anchor.setdefault(op.at, []).append(op)
        for block in self.resident:
            if self.plan.blocks[block].weights is not Tier.DISK:
                self._fail("resident", None, block, "is in resident_before, but its weights do not live on disk")
        for index, anchor in enumerate(self.schedule.anchors):
            for op in by_anchor.get(index, []):
                self._check_op(op, anchor)
            self._check_anchor(index, anchor)
        self._check_end()

    def _check_anchors(self) -> None:
        signature, anchors = self.schedule.signature, self.schedule.anchors
        expected = [(Phase.FORWARD, b) for b in signature.order]
        if signature.training:
            expected += [(Phase.BACKWARD, b) for b in reversed(signature.order)] + [(Phase.VERDICT, NO_BLOCK)]
        if [(a.phase, a.block) for a in anchors] != expected:
            got = " ".join(map(str, anchors))
            self._fail("acyclic", None, NO_BLOCK, f"anchors {got} are not those of the signature {signature}")
        for index, anchor in enumerate(anchors):
            if any(not 0 <= i < len(self.schedule.ops) or self.schedule.ops[i].at > index for i in anchor.needs):
                got = f"anchor {index} ({anchor}) waits for ops {anchor.needs}, not all issued by then"
                self._fail("acyclic", None, anchor.block, got)

    def _check_edges(self) -> None:
        at = 0
        for index, op in enumerate(self.schedule.ops):
            if op.id != index:
                self._fail("acyclic", op, op.block, f"has id {op.id}, its place is {index}")
            if not (op.kind is OpKind.COMMIT and op.block == NO_BLOCK) and not 0 <= op.block < len(self.model.blocks):
                self._fail("acyclic", op, NO_BLOCK, f"names block {op.block} of {len(self.model.blocks)}")
            if any(not 0 <= i < index for i in op.after):
                self._fail("acyclic", op, op.block, f"waits for ops {op.after}; allowed: ids from 0 to {index - 1}")
            if not at <= op.at < len(self.schedule.anchors):
                self._fail(
                    "acyclic", op, op.block, f"is issued at anchor {op.at}; allowed: {at} to {len(self.schedule.anchors) - 1}"
                )
            at = op.at
            self.behind.append(self._union(op.after) | 1 << index)

    def _check_op(self, op: Op, anchor: Anchor) -> None:
        if op.block != NO_BLOCK:
            self._check_chain(op)
        match op.kind, op.payload:
            case OpKind.FETCH, Payload.WEIGHTS:
                self._check_fetch(op)
            case OpKind.FETCH, Payload.STATE:
                if self.plan.blocks[op.block].state is not Tier.DISK or op.block in self.opened:
                    self._fail("order", op, op.block, "opens state that does not live on disk, or opens it twice")
                self.opened[op.block] = op.id
            case OpKind.RELEASE, _:
                self._check_release(op, anchor)
            case OpKind.UPDATE, _:
                self._check_update(op)
            case OpKind.STORE, _:
                self._check_store(op)
            case OpKind.COMMIT, _:
                if op.id != len(self.schedule.ops) - 1 or self.stored & ~self.behind[op.id]:
                    self._fail("commit", op, op.block, "is not the last op, or does not wait for every STORE")
            case _:
                self._fail("order", op, op.block, "is a kind of op that this version does not run")
        self.last[op.block] = op

    def _check_chain(self, op: Op) -> None:
        previous = self.last.get(op.block)
        if previous is not None and not self.behind[op.id] >> previous.id & 1:
            self._fail("order", op, op.block, f"does not wait for the block's op before it ({previous})")
        if previous is None and self._is_stored(op.block) and (OpKind.STORE, op.block) not in op.carried:
            self._fail("order", op, op.block, "does not wait for the block's STORE of the step before")

    def _check_fetch(self, op: Op) -> None:
        if self.plan.blocks[op.block].weights is not Tier.DISK or op.block in self.resident:
            self._fail("resident", op, op.block, "fetches weights that do not live on disk, or are in memory")
        if op.block in self.opened:
            self._fail("resident", op, op.block, "fetches weights whose update is open")
        if self.released & ~self.behind[op.id]:
            self._fail("capacity", op, op.block, "does not wait for every RELEASE before it, whose memory it takes over")
        self.resident.add(op.block)
        self.fetched[op.block] = op.id
        used = sum(self.model.blocks[b].weight_bytes for b in self.resident)
        if used > self.capacity_bytes:
            need, room = format_bytes(used), format_bytes(self.capacity_bytes)
            self._fail("capacity", op, op.block, f"brings weights that live on disk to {need}; allowed: {room}")

    def _check_release(self, op: Op, anchor: Anchor) -> None:
        if op.block not in self.resident:
            self._fail("resident", op, op.block, "releases weights that are not in memory")
        if op.block == anchor.block:
            self._fail("resident", op, op.block, f"releases weights that {anchor} uses")
        if op.block in self.opened and op.block not in self.updated:
            self._fail("resident", op, op.block, "releases weights whose update is open")
        self.resident.remove(op.block)
        self.fetched.pop(op.block, None)
        self.released |= 1 << op.id

    def _check_update(self, op: Op) -> None:
        updates, placed = self.schedule.signature.updates, self.plan.blocks[op.block]
        if updates is Updates.NONE or op.block in self.updated or not self.model.blocks[op.block].num_trainable_params:
            self._fail("update", op, op.block, f"is frozen, is updated twice, or the step has no updates ({updates.value})")
        if op.at <= self.last_use.get(op.block, len(self.schedule.anchors)):
            self._fail("update", op, op.block, f"is updated at anchor {op.at}, before its last backward has ended")
        verdict = updates is Updates.AFTER_VERDICT or placed.update is UpdateLane.DEVICE
        if verdict and self.schedule.anchors[op.at].phase is not Phase.VERDICT:
            self._fail("update", op, op.block, "is updated before the verdict")
        lane = Lane.COMPUTE if placed.update is UpdateLane.DEVICE else Lane.CPU
        if op.lane is not lane:
            self._fail("update", op, op.block, f"is updated on lane {op.lane.value!r}, the plan says {lane.value!r}")
        if placed.state is Tier.DISK and op.block not in self.opened:
            self._fail("order", op, op.block, "is updated without a FETCH of its state")
        self.updated[op.block] = op.id

    def _check_store(self, op: Op) -> None:
        previous = self.last.get(op.block)
        if not self._is_stored(op.block) or previous is None or previous.kind is not OpKind.UPDATE:
            self._fail("order", op, op.block, "does not follow the UPDATE of a block with a file")
        if (OpKind.COMMIT, NO_BLOCK) not in op.carried:
            self._fail("commit", op, op.block, "does not wait for the COMMIT of the step before")
        self.stored |= 1 << op.id
        self.stored_blocks.add(op.block)

    def _check_anchor(self, index: int, anchor: Anchor) -> None:
        self.waited |= self._union(anchor.needs)
        block = anchor.block
        if anchor.phase is Phase.VERDICT:
            return
        if self.plan.blocks[block].weights is Tier.DISK:
            if block not in self.resident:
                self._fail("resident", None, block, f"is not in memory when anchor {index} ({anchor}) begins")
            if block in self.fetched and not self.waited >> self.fetched[block] & 1:
                self._fail(
                    "resident", self.schedule.ops[self.fetched[block]], block, f"is not waited for by anchor {index} ({anchor})"
                )
        pending = anchor.phase is Phase.FORWARD and self.model.blocks[block].num_trainable_params and block not in self.fetched
        if pending and (OpKind.UPDATE, block) not in anchor.carried:
            self._fail("order", None, block, f"anchor {index} ({anchor}) does not wait for the UPDATE of the step before")
        waiting = [i for i in self.updated.values() if not self.waited >> i & 1]
        if anchor.phase is Phase.BACKWARD and len(waiting) >= self.plan.gradient_depth:
            got = f"anchor {index} ({anchor}) begins while {len(waiting)} blocks wait for their update"
            self._fail("gradients", self.schedule.ops[waiting[0]], block, f"{got}; allowed: {self.plan.gradient_depth - 1}")

    def _check_end(self) -> None:
        if self.schedule.signature.updates is not Updates.NONE:
            for block in dict.fromkeys(self.schedule.signature.order):
                if self.model.blocks[block].num_trainable_params and block not in self.updated:
                    self._fail("update", None, block, "is trainable and is not updated")
        for block in self.updated:
            if self._is_stored(block) and block not in self.stored_blocks:
                self._fail("order", self.schedule.ops[self.updated[block]], block, "is updated and not stored")
        if bool(self.stored) != any(op.kind is OpKind.COMMIT for op in self.schedule.ops):
            self._fail("commit", None, NO_BLOCK, "STOREs without a COMMIT, or a COMMIT without STOREs")
        if self.resident != self.schedule.resident_after:
            got, said = sorted(self.resident), sorted(self.schedule.resident_after)
            self._fail("resident", None, NO_BLOCK, f"the step ends with blocks {got} in memory, resident_after says {said}")

    def _is_stored(self, block: int) -> bool:
        trainable = self.model.blocks[block].num_trainable_params > 0
        return trainable and Tier.DISK in (self.plan.blocks[block].weights, self.plan.blocks[block].state)

    def _union(self, ids: Iterable[int]) -> int:
        mask = 0
        for i in ids:
            mask |= self.behind[i]
        return mask

    def _fail(self, rule: str, op: Op | None, block: int, text: str) -> NoReturn:
        name = "" if block == NO_BLOCK else f" block {block} ({self.model.blocks[block].name!r})"
        around = "" if op is None else "\n".join(["", *(f"    {o}" for o in self.schedule.ops[max(0, op.id - 3) : op.id + 3])])
        raise ScheduleError(f"rule {rule!r}:{'' if op is None else f' op {op.id} {op.kind.value}'}{name} {text}.{around}")
