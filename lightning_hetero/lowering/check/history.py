"""What has happened in a schedule up to some op: the facts that the rules look at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from lightning_hetero.errors import ScheduleError
from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.schedule import NO_BLOCK, Anchor, Lane, Op, OpKind, Payload, Phase, Schedule, Updates
from lightning_hetero.lowering.chains import Chain, chains_of
from lightning_hetero.lowering.check.swap_uses import SwapUses
from lightning_hetero.lowering.placed_blocks import gathers_on_devices, placements, speculates


class History:
    """The facts of a walk over a schedule in the order of issue. Rules read it; the walk writes it.

    Args:
        schedule: The schedule.
        plan: The resolved plan it was lowered from.
        model: The blocks' sizes.
        capacity_bytes: Host bytes for weights that live on disk.
        device_capacity_bytes: Device bytes for weights that live below the device; ``None``: the
            device is the host's own CPU.

    Attributes:
        ranks: Ranks that share the model. Where there are several, the device's copies are whole
            weights.
        on_devices: The devices of several ranks exchange weights and gradients themselves.
        arrival: The kind of op that brings weights to where they compute.
        departure: The kind of op that takes gradients from there.
        last_hop: The kind of op that brings gradients to where updates read them.
        placed: What the plan means for each block.
        behind: For each op so far a bit set of itself and all ops that it waits for.
        last: The latest op of each chain of each block.
        waited: Bit set of the ops that compute has waited for.
        last_use: For each block the index of the last anchor that uses it.
        resident: Blocks with weights on disk whose weights are in host memory, and their bytes.
        fetched: For each of them the FETCH that brought its weights.
        released: Bit set of the RELEASEs of host memory.
        held: Blocks of whose weights the device holds a valid copy. ``held_bytes`` counts those
            that live below the device.
        uploaded: For each of them the UPLOAD that brought its weights.
        coming: For each block the first of the two ops that bring its weights, unless the second
            has followed or the weights have been updated since: a GATHER, or an UPLOAD of slices.
        left: Blocks that the devices of all ranks have read from host memory that ranks share.
        released_there: Bit set of the RELEASEs of device memory.
        opened: For each block the FETCH of its state.
        updated: For each block its latest UPDATE.
        speculated: For each block its UPDATE before the verdict.
        update_ended: For each block its UPDATE, or the STORE that follows it.
        grads: For each block its GRAD or REDUCE, whichever was the last, in the order of issue.
        arrived: The ops of ``last_hop``, where there are two hops.
        agreed: The first AGREE; it is about the record of the step before.
        agreed_verdict: The last AGREE after the verdict.
        using: Ops that use up gradients and that compute has not waited for.
        state_up: For each block the SWAP_IN of its state, in the order of issue.
        state_down: For each block the SWAP_OUT of its state.
        slices_up: For each block the SWAP_IN of its slices of gradients and weights, in the order
            of issue.
        returned: For each block the SWAP_OUT of its weights.
        stored: For each block its STORE.
        mirrored: For each block its MIRROR on the lane to the disk.
        lent: MIRRORs on ``d2h``, each replaced by the MIRROR that writes the same bytes to the disk
            once there is one.
        swaps: The uses of blocks whose activations leave the device.
    """

    def __init__(
        self, schedule: Schedule, plan: Plan, model: ModelShape, capacity_bytes: int, device_capacity_bytes: int | None
    ) -> None:
        self.schedule, self.plan, self.model = schedule, plan, model
        self.has_device = device_capacity_bytes is not None
        self.ranks = schedule.ranks
        self.agreed: int | None = None
        self.agreed_verdict: int | None = None
        self.capacity_bytes, self.device_capacity_bytes = capacity_bytes, device_capacity_bytes or 0
        self.placed = placements(plan, model, device=self.has_device, ranks=self.ranks)
        self.speculates = speculates(plan, schedule.signature.updates)
        self.last_use = {a.block: i for i, a in enumerate(schedule.anchors)}
        self.behind: list[int] = []
        self.last: dict[tuple[int, Chain], Op] = {}
        self.waited = 0
        self.resident = set(schedule.resident_before)
        self.resident_bytes = sum(self.placed[b].shape.weight_bytes for b in self.resident)
        self.fetched: dict[int, int] = {}
        self.released = 0
        self.held = set(schedule.device_before)
        self.held_bytes = sum(self.copied_bytes(b) for b in self.held)
        self.uploaded: dict[int, int] = {}
        self.coming: dict[int, int] = {}
        self.left: set[int] = set()
        self.released_there = 0
        self.opened: dict[int, int] = {}
        self.updated: dict[int, int] = {}
        self.speculated: dict[int, int] = {}
        self.update_ended: dict[int, int] = {}
        self.grads: dict[int, int] = {}
        self.arrived: list[int] = []
        self.on_devices = gathers_on_devices(plan, self.ranks, shared_memory=schedule.shared_memory)
        exchanges = schedule.shared_memory or self.on_devices  # where compute is
        self.arrival = OpKind.GATHER if exchanges else OpKind.UPLOAD
        self.departure = OpKind.REDUCE if exchanges else OpKind.GRAD
        self.last_hop = OpKind.GRAD if self.ranks == 1 or self.on_devices else OpKind.REDUCE
        self.using: list[int] = []
        self.state_up: dict[int, int] = {}
        self.state_down: dict[int, int] = {}
        self.slices_up: dict[int, int] = {}
        self.returned: dict[int, int] = {}
        self.stored: dict[int, int] = {}
        self.mirrored: dict[int, int] = {}
        self.lent: list[Op] = []
        self.swaps = SwapUses(schedule.signature, self.placed)

    # ---- questions of the rules ------------------------------------------------------------------

    def chains(self, op: Op) -> tuple[Chain, ...]:
        """The chains that an op belongs to."""
        return chains_of(op.kind, op.lane, op.payload, device=self.has_device)

    def union(self, ids: Iterable[int]) -> int:
        """All ops that some ops wait for, and themselves, as a bit set."""
        mask = 0
        for i in ids:
            mask |= self.behind[i]
        return mask

    def is_behind(self, op: Op, other: int) -> bool:
        """Whether an op waits for another one, directly or through others."""
        return bool(self.behind[op.id] >> other & 1)

    def copied_bytes(self, block: int) -> int:
        """What the device's copy of a block's weights takes of its memory for such copies."""
        return self.placed[block].shape.weight_bytes * self.schedule.copies if self.placed[block].below_device else 0

    def has_waited(self, op: int) -> bool:
        """Whether compute has waited for an op."""
        return bool(self.waited >> op & 1)

    def after_verdict(self, op: Op) -> bool:
        """Whether the op follows the verdict."""
        return self.schedule.anchors[op.at].phase is Phase.VERDICT

    def may_redo(self, op: Op) -> bool:
        """Whether the verdict has discarded the block's update, so that it has to be repeated."""
        latest = self.updated.get(op.block)
        redone = self.schedule.signature.updates is Updates.REDONE and self.after_verdict(op)
        return redone and latest is not None and latest == self.speculated.get(op.block)

    def fail(self, rule: str, op: Op | None, block: int, text: str) -> NoReturn:
        """Refuses the schedule.

        Raises:
            ScheduleError: Always.
        """
        name = "" if block == NO_BLOCK else f" block {block} ({self.model.blocks[block].name!r})"
        around = "" if op is None else "\n".join(["", *(f"    {o}" for o in self.schedule.ops[max(0, op.id - 3) : op.id + 3])])
        raise ScheduleError(f"rule {rule!r}:{'' if op is None else f' op {op.id} {op.kind.value}'}{name} {text}.{around}")

    # ---- what the walk records -------------------------------------------------------------------

    def record(self, op: Op) -> None:
        """The op, which the rules allow, has been issued."""
        block = op.block
        match op.kind, op.payload, op.lane:
            case OpKind.FETCH, Payload.WEIGHTS, _:
                self.resident_bytes += 0 if block in self.resident else self.placed[block].shape.weight_bytes
                self.resident.add(block)
                self.fetched[block] = op.id
            case OpKind.FETCH, Payload.STATE, _:
                self.opened[block] = op.id
            case OpKind.RELEASE, _, Lane.DISK_READ:
                self.resident.remove(block)
                self.resident_bytes -= self.placed[block].shape.weight_bytes
                self.fetched.pop(block, None)
                self.released |= 1 << op.id
                self.left.discard(block)
            case OpKind.RELEASE, _, Lane.NET if not self.schedule.shared_memory:
                self.coming.pop(block, None)
                self.left.add(block)
            case OpKind.RELEASE, _, Lane.H2D | Lane.NET:
                self.held.remove(block)
                self.held_bytes -= self.copied_bytes(block)
                self.uploaded.pop(block, None)
                self.released_there |= 1 << op.id
            case ((OpKind.UPLOAD | OpKind.GATHER), _, _) if op.kind is self.arrival:
                self.coming.pop(block, None)
                self.held.add(block)
                self.held_bytes += 0 if self.on_devices else self.copied_bytes(block)
                self.uploaded[block] = op.id
            case OpKind.UPLOAD, _, _:  # of a slice, to its place among whole weights
                self.coming[block] = op.id
                self.held_bytes += self.copied_bytes(block)
            case OpKind.GATHER, _, _:
                self.coming[block] = op.id
                self.left.discard(block)
            case OpKind.AGREE, _, _:
                self.agreed = op.id if self.agreed is None else self.agreed
                self.agreed_verdict = op.id if self.after_verdict(op) else None
            case ((OpKind.GRAD | OpKind.REDUCE), _, _) if op.kind is self.departure:
                self.grads[block] = op.id
                self.using.append(op.id)
            case OpKind.GRAD | OpKind.REDUCE, _, _:
                self.grads[block] = op.id
                self.arrived.append(op.id)
            case OpKind.UPDATE, _, _:
                self._record_update(op)
            case OpKind.SWAP_IN | OpKind.SWAP_OUT, Payload.ACTIVATIONS, _:
                self.swaps.record(op)
            case OpKind.SWAP_IN, Payload.STATE, _:
                self.state_up[block] = op.id
            case OpKind.SWAP_IN, Payload.GRADIENTS, _:
                self.slices_up[block] = op.id
            case OpKind.SWAP_OUT, Payload.STATE, _:
                self.state_down[block] = op.id
            case OpKind.SWAP_OUT, Payload.WEIGHTS, _:
                self.returned[block] = op.id
            case OpKind.STORE, _, _:
                self.stored[block] = self.update_ended[block] = op.id
            case OpKind.MIRROR, _, Lane.D2H:
                self.lent.append(op)
            case OpKind.MIRROR, _, _:
                self.mirrored[block] = op.id
                if self.lent and self.lent[-1].block == block:
                    self.lent[-1] = op
        for chain in self.chains(op):
            self.last[block, chain] = op

    def _record_update(self, op: Op) -> None:
        if self.speculates and not self.after_verdict(op):
            self.speculated[op.block] = op.id
        self.updated[op.block] = self.update_ended[op.block] = op.id
        if not self.has_device:
            self.using.append(op.id)
        elif self.placed[op.block].through_host:  # the device's copy, if it has one, is outdated
            self.held.discard(op.block)
            self.uploaded.pop(op.block, None)
            self.coming.pop(op.block, None)

    def wait(self, anchor: Anchor) -> None:
        """Compute has waited for the ops that an anchor needs."""
        self.waited |= self.union(anchor.needs)
        self.using = [i for i in self.using if not self.has_waited(i)]
        self.swaps.leaving = [i for i in self.swaps.leaving if not self.has_waited(i)]
