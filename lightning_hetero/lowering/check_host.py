"""The invariants of a machine whose device is the host's own CPU; ``check`` says what they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from lightning_hetero.errors import ScheduleError
from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Plan, Tier, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import NO_BLOCK, Anchor, Lane, Op, OpKind, Payload, Phase, Schedule, Updates
from lightning_hetero.lowering.chains import Chain, carried_into, chains_of
from lightning_hetero.lowering.lower import expected_anchors, last_kept, last_step
from lightning_hetero.lowering.placement import placements, speculates, updates_in_backward
from lightning_hetero.units import format_bytes


class HostCheck:
    """Walks the ops in the order of issue, anchor by anchor, and keeps what is where."""

    has_device = False

    def __init__(self, schedule: Schedule, plan: Plan, model: ModelShape, capacity_bytes: int) -> None:
        self.schedule, self.plan, self.model, self.capacity_bytes = schedule, plan, model, capacity_bytes
        self.placed = placements(plan, model, device=self.has_device)
        self.behind: list[int] = []  # op -> bit set of itself and all ops that it waits for
        self.last: dict[tuple[int, Chain], Op] = {}  # the latest op of each chain
        self.resident = set(schedule.resident_before)
        self.resident_bytes = sum(self.placed[b].shape.weight_bytes for b in self.resident)
        self.fetched: dict[int, int] = {}  # block -> the FETCH that brought its weights
        self.opened: dict[int, int] = {}  # block -> the FETCH of its state
        self.updated: dict[int, int] = {}  # block -> its UPDATE
        self.speculates = speculates(plan, schedule.signature.updates)
        self.speculated: dict[int, int] = {}  # block -> its UPDATE before the verdict
        self.update_ended: dict[int, int] = {}  # block -> its UPDATE, or what follows from it
        self.stored: dict[int, int] = {}  # block -> its STORE
        self.mirrored: dict[int, int] = {}  # block -> its MIRROR
        self.released = 0  # bit set of all RELEASEs so far
        self.waited = 0  # bit set of the ops that compute has waited for
        self.using: list[int] = []  # ops that use up gradients, in the place of which a backward's may come once it has waited
        self.last_use = {a.block: i for i, a in enumerate(schedule.anchors)}

    def run(self) -> None:
        """Checks the schedule.

        Raises:
            ScheduleError: The first broken invariant.
        """
        self.check_anchors()
        self.check_edges()
        self.check_begin()
        by_anchor: dict[int, list[Op]] = {}
        for op in self.schedule.ops:
            by_anchor.setdefault(op.at, []).append(op)
        for index, anchor in enumerate(self.schedule.anchors):
            for op in by_anchor.get(index, []):
                self.check_chain(op)
                self.check_op(op, anchor)
                for chain in self.chains(op):
                    self.last[op.block, chain] = op
            self.waited |= self.union(anchor.needs)
            if anchor.phase is not Phase.VERDICT:
                self.check_anchor(index, anchor)
        self.check_end()

    # ---- before and after the walk ------------------------------------------------------------------------------------------

    def check_anchors(self) -> None:
        """Anchors are those of the signature, and wait for ops that exist."""
        signature, anchors = self.schedule.signature, self.schedule.anchors
        if [(a.phase, a.block) for a in anchors] != [(a.phase, a.block) for a in expected_anchors(signature)]:
            got = " ".join(map(str, anchors))
            self.fail("acyclic", None, NO_BLOCK, f"anchors {got} are not those of the signature {signature}")
        for index, anchor in enumerate(anchors):
            if any(not 0 <= i < len(self.schedule.ops) or self.schedule.ops[i].at > index for i in anchor.needs):
                got = f"anchor {index} ({anchor}) waits for ops {anchor.needs}, not all issued by then"
                self.fail("acyclic", None, anchor.block, got)

    def check_edges(self) -> None:
        """Ids, blocks, edges and anchors of ops make sense."""
        at = 0
        for index, op in enumerate(self.schedule.ops):
            if op.id != index:
                self.fail("acyclic", op, op.block, f"has id {op.id}, its place is {index}")
            if not (op.kind is OpKind.COMMIT and op.block == NO_BLOCK) and not 0 <= op.block < len(self.model.blocks):
                self.fail("acyclic", op, NO_BLOCK, f"names block {op.block} of {len(self.model.blocks)}")
            if any(not 0 <= i < index for i in op.after):
                self.fail("acyclic", op, op.block, f"waits for ops {op.after}; allowed: ids from 0 to {index - 1}")
            if not at <= op.at < len(self.schedule.anchors):
                last = len(self.schedule.anchors) - 1
                self.fail("acyclic", op, op.block, f"is issued at anchor {op.at}; allowed: {at} to {last}")
            at = op.at
            self.behind.append(self.union(op.after) | 1 << index)

    def check_begin(self) -> None:
        """What is said to be in memory may be there; and the first forward waits for all of the last step if it must."""
        for block in self.resident:
            if not self.placed[block].on_disk:
                self.fail("resident", None, block, "is in resident_before, but its weights do not live on disk")
        if not self.plan.priority and self.schedule.anchors:
            first = self.schedule.anchors[0]
            missing = [edge for edge in last_step(self.placed, self.schedule.signature.order) if edge not in first.carried]
            if missing:
                kind, block = missing[0]
                got = f"anchor 0 ({first}) does not wait for its {kind.value} of the step before, as a plan without priority must"
                self.fail("order", None, block, got)
        for edge in last_kept(self.placed, self.schedule.signature.order):
            if edge not in self.schedule.anchors[0].carried:
                got = (
                    f"anchor 0 ({self.schedule.anchors[0]}) does not wait for its {edge[0].value} of the step before, which is kept"
                )
                self.fail("order", None, edge[1], got)

    def check_end(self) -> None:
        """Nothing is missing, and what is left in memory is what the schedule says."""
        if self.schedule.signature.updates is not Updates.NONE:
            for block in dict.fromkeys(self.schedule.signature.order):
                if self.placed[block].trainable and block not in self.updated:
                    self.fail("update", None, block, "is trainable and is not updated")
        for block, update in self.updated.items():
            if self.schedule.signature.updates is Updates.REDONE and self.speculated.get(block) == update:
                self.fail("update", self.schedule.ops[update], block, "is discarded by the verdict and not updated again")
            if self.placed[block].stored and self.stored.get(block, -1) < update:
                self.fail("order", self.schedule.ops[update], block, "is updated and not stored")
            if self.placed[block].mirrored_bytes and self.mirrored.get(block, -1) < update:
                self.fail("order", self.schedule.ops[update], block, "is updated and what of it lives in memory is not kept")
        if bool(self.stored or self.mirrored) != any(op.kind is OpKind.COMMIT for op in self.schedule.ops):
            self.fail("commit", None, NO_BLOCK, "STOREs or MIRRORs without a COMMIT, or a COMMIT without any")
        if self.resident != self.schedule.resident_after:
            got, said = sorted(self.resident), sorted(self.schedule.resident_after)
            self.fail("resident", None, NO_BLOCK, f"the step ends with blocks {got} in memory, resident_after says {said}")

    # ---- ops ----------------------------------------------------------------------------------------------------------------

    def chains(self, op: Op) -> tuple[Chain, ...]:
        """The chains that an op belongs to."""
        return chains_of(op.kind, op.lane, op.payload, device=self.has_device)

    def check_chain(self, op: Op) -> None:
        """The op follows the one before on the same bytes, in this step or an earlier one."""
        for chain in self.chains(op):
            previous = self.last.get((op.block, chain))
            if previous is not None and not self.behind[op.id] >> previous.id & 1:
                self.fail("order", op, op.block, f"does not wait for the block's op before it ({previous})")
            if previous is None:
                for kind, block in carried_into(chain, op.kind, op.block, self.placed[op.block]):
                    if (kind, block) not in op.carried:
                        self.fail("order", op, op.block, f"does not wait for the block's {kind.value} of the step before")

    def check_op(self, op: Op, anchor: Anchor) -> None:
        """One op, at the anchor that issues it."""
        match op.kind, op.payload, op.lane:
            case OpKind.FETCH, Payload.WEIGHTS, Lane.DISK_READ:
                self.check_fetch(op)
            case OpKind.FETCH, Payload.STATE, Lane.DISK_READ:
                self.check_opened(op)
            case OpKind.RELEASE, Payload.WEIGHTS, Lane.DISK_READ:
                self.check_release(op, anchor)
            case OpKind.UPDATE, Payload.STATE, Lane.CPU | Lane.COMPUTE:
                self.check_update(op)
            case OpKind.STORE, Payload.WEIGHTS | Payload.STATE, Lane.DISK_WRITE:
                self.check_store(op)
            case OpKind.MIRROR, Payload.WEIGHTS | Payload.STATE, Lane.DISK_WRITE:
                self.check_mirror(op)
            case OpKind.COMMIT, Payload.NONE, Lane.DISK_WRITE:
                if not self.after_verdict(op):
                    self.fail("commit", op, op.block, "comes before the verdict")
                writes = (*self.stored.values(), *self.mirrored.values())
                if op.id != len(self.schedule.ops) - 1 or any(not self.behind[op.id] >> w & 1 for w in writes):
                    self.fail("commit", op, op.block, "is not the last op, or does not wait for every STORE and MIRROR")
            case _:
                what = f"{op.kind.value} {op.payload.value} on lane {op.lane.value!r}"
                self.fail("order", op, op.block, f"is a kind of op that this machine does not run: {what}")

    def check_fetch(self, op: Op) -> None:
        """Weights come from disk."""
        again = op.block in self.resident and self.may_redo(op)  # in the place of what was discarded
        if not self.placed[op.block].on_disk or (op.block in self.resident and not again):
            self.fail("resident", op, op.block, "fetches weights that do not live on disk, or are in memory")
        if op.block in self.opened and op.block not in self.updated:
            self.fail("resident", op, op.block, "fetches weights whose update is open")
        if op.block in self.speculated and not self.after_verdict(op):
            self.fail("resident", op, op.block, "fetches weights on which there is no verdict yet")
        if self.released & ~self.behind[op.id]:
            self.fail("capacity", op, op.block, "does not wait for every RELEASE before it, whose memory it takes over")
        self.resident_bytes += 0 if again else self.placed[op.block].shape.weight_bytes
        self.resident.add(op.block)
        self.fetched[op.block] = op.id
        if self.resident_bytes > self.capacity_bytes:
            need, room = format_bytes(self.resident_bytes), format_bytes(self.capacity_bytes)
            self.fail("capacity", op, op.block, f"brings weights that live on disk to {need}; allowed: {room}")

    def check_opened(self, op: Op) -> None:
        """State comes from disk."""
        again = self.opened.get(op.block, -1) < self.speculated.get(op.block, -1) and self.may_redo(op)
        if self.placed[op.block].plan.state is not Tier.DISK or (op.block in self.opened and not again):
            self.fail("order", op, op.block, "opens state that does not live on disk, or opens it twice")
        self.check_one_by_one(op)
        self.check_kept(op)
        self.opened[op.block] = op.id

    def check_one_by_one(self, op: Op) -> None:
        """Under a naive order one block's update is over, its writes included, before the next one's begins."""
        if self.plan.update_order is not UpdateOrder.NAIVE or not self.placed[op.block].on_cpu:
            return
        for block, end in self.update_ended.items():
            if block != op.block and self.placed[block].on_cpu and not self.behind[op.id] >> end & 1:
                self.fail("update", op, op.block, f"does not wait for the end of block {block}'s update, as the plan says")

    def check_release(self, op: Op, anchor: Anchor) -> None:
        """Host memory is given back."""
        if op.block not in self.resident:
            self.fail("resident", op, op.block, "releases weights that are not in memory")
        self.check_unused(op, anchor)
        self.resident.remove(op.block)
        self.resident_bytes -= self.placed[op.block].shape.weight_bytes
        self.fetched.pop(op.block, None)
        self.released |= 1 << op.id

    def check_unused(self, op: Op, anchor: Anchor) -> None:
        """Nothing uses the host memory that is given back."""
        if op.block == anchor.block:
            self.fail("resident", op, op.block, f"releases weights that {anchor} uses")
        if op.block in self.opened and op.block not in self.updated:
            self.fail("resident", op, op.block, "releases weights whose update is open")

    def check_update(self, op: Op) -> None:
        """An update: when, where, with what."""
        updates, placed = self.schedule.signature.updates, self.placed[op.block]
        again = op.block in self.updated
        if updates is Updates.NONE or not placed.trainable or (again and not self.may_redo(op)):
            self.fail("update", op, op.block, f"is frozen, is updated twice, or the step has no updates ({updates.value})")
        if op.at <= self.last_use.get(op.block, len(self.schedule.anchors)):
            self.fail("update", op, op.block, f"is updated at anchor {op.at}, before its last backward has ended")
        if self.must_follow_verdict(op.block) and self.schedule.anchors[op.at].phase is not Phase.VERDICT:
            self.fail("update", op, op.block, "is updated before the verdict")
        lane = Lane.COMPUTE if placed.plan.update is UpdateLane.DEVICE else Lane.CPU
        if op.lane is not lane:
            self.fail("update", op, op.block, f"is updated on lane {op.lane.value!r}, the plan says {lane.value!r}")
        opened = self.opened.get(op.block, -1)
        if placed.plan.state is Tier.DISK and opened <= self.updated.get(op.block, -1):
            self.fail("order", op, op.block, "is updated without a FETCH of its state" + " after the verdict" * again)
        if again and op.block in self.resident and self.fetched.get(op.block, -1) < self.updated[op.block]:
            self.fail("resident", op, op.block, "is updated again, and its weights in memory are those that were discarded")
        self.check_one_by_one(op)
        self.check_kept(op)
        if self.speculates and not self.after_verdict(op):
            self.speculated[op.block] = op.id
        self.updated[op.block] = self.update_ended[op.block] = op.id
        if not self.has_device:
            self.using.append(op.id)

    def must_follow_verdict(self, block: int) -> bool:
        """Whether the block's update may not run during backward."""
        if self.speculates:
            return not self.placed[block].revocable
        after = not updates_in_backward(self.plan, self.schedule.signature.updates)
        return after or self.placed[block].plan.update is UpdateLane.DEVICE

    def after_verdict(self, op: Op) -> bool:
        """Whether the op follows the verdict."""
        return self.schedule.anchors[op.at].phase is Phase.VERDICT

    def may_redo(self, op: Op) -> bool:
        """Whether the verdict has discarded the update of the op's block, which is to be done again."""
        latest = self.updated.get(op.block)
        redone = self.schedule.signature.updates is Updates.REDONE and self.after_verdict(op)
        return redone and latest is not None and latest == self.speculated.get(op.block)

    def check_store(self, op: Op) -> None:
        """What an update has made goes to the disk."""
        previous = self.last.get((op.block, Chain.HOST))
        if not self.placed[op.block].stored or previous is None or previous.kind is not OpKind.UPDATE:
            self.fail("order", op, op.block, "does not follow the UPDATE of a block with a file")
        if (OpKind.COMMIT, NO_BLOCK) not in op.carried:
            self.fail("commit", op, op.block, "does not wait for the COMMIT of the step before")
        self.stored[op.block] = self.update_ended[op.block] = op.id

    def check_mirror(self, op: Op) -> None:
        """What an update has made in memory goes to the disk."""
        placed, previous = self.placed[op.block], self.last.get((op.block, Chain.HOST))
        # Weights on disk may have left memory since, and come back.
        repeated = previous is not None and (previous.kind, previous.lane) == (OpKind.MIRROR, Lane.DISK_WRITE)
        follows = op.block in self.updated and previous is not None and not repeated
        if op.num_bytes != placed.mirrored_bytes or not follows:
            self.fail("order", op, op.block, f"does not follow the UPDATE of a block with {placed.mirrored_bytes} B to keep")
        if (OpKind.COMMIT, NO_BLOCK) not in op.carried or not self.after_verdict(op):
            self.fail("commit", op, op.block, "does not wait for the COMMIT of the step before, or comes before the verdict")
        self.mirrored[op.block] = op.id

    def check_kept(self, op: Op) -> None:
        """Memory that a MIRROR of the step before writes from does not change before that has ended."""
        if self.placed[op.block].mirrored_bytes and (OpKind.MIRROR, op.block) not in op.carried:
            self.fail("order", op, op.block, "does not wait for the block's MIRROR of the step before")

    # ---- anchors ------------------------------------------------------------------------------------------------------------

    def check_anchor(self, index: int, anchor: Anchor) -> None:
        """What a forward or backward needs is there."""
        block = anchor.block
        if self.placed[block].on_disk:
            self.check_present(index, anchor, self.resident, self.fetched)
        pending = anchor.phase is Phase.FORWARD and self.placed[block].trainable and block not in self.fetched
        if pending and (OpKind.UPDATE, block) not in anchor.carried:
            self.fail("order", None, block, f"anchor {index} ({anchor}) does not wait for the UPDATE of the step before")
        if anchor.phase is Phase.BACKWARD and not self.speculates:
            self.check_waiting(index, anchor, self.plan.gradient_depth, "blocks wait for their update")

    def check_present(self, index: int, anchor: Anchor, held: set[int], arriving: dict[int, int]) -> None:
        """The anchor's weights are in memory and have been waited for."""
        block = anchor.block
        if block not in held:
            self.fail("resident", None, block, f"is not in memory when anchor {index} ({anchor}) begins")
        if block in arriving and not self.waited >> arriving[block] & 1:
            op = self.schedule.ops[arriving[block]]
            self.fail("resident", op, block, f"is not waited for by anchor {index} ({anchor})")

    def check_waiting(self, index: int, anchor: Anchor, allowed: int, what: str) -> None:
        """Fewer than ``allowed`` of the ops may not have been waited for: the anchor's own gradients take the last place."""
        self.using = [i for i in self.using if not self.waited >> i & 1]
        if len(self.using) >= allowed:
            got = f"anchor {index} ({anchor}) begins while {len(self.using)} {what}"
            self.fail("gradients", self.schedule.ops[self.using[0]], anchor.block, f"{got}; allowed: {allowed - 1}")

    def union(self, ids: Iterable[int]) -> int:
        """All ops that some ops wait for, and themselves, as a bit set."""
        mask = 0
        for i in ids:
            mask |= self.behind[i]
        return mask

    def fail(self, rule: str, op: Op | None, block: int, text: str) -> NoReturn:
        """Refuses the schedule.

        Raises:
            ScheduleError: Always.
        """
        name = "" if block == NO_BLOCK else f" block {block} ({self.model.blocks[block].name!r})"
        around = "" if op is None else "\n".join(["", *(f"    {o}" for o in self.schedule.ops[max(0, op.id - 3) : op.id + 3])])
        raise ScheduleError(f"rule {rule!r}:{'' if op is None else f' op {op.id} {op.kind.value}'}{name} {text}.{around}")
