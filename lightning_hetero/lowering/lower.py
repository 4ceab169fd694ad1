"""Plan → schedule: one fixed lowering, pure and deterministic.

[Note: Residency]
Weights on disk share ``capacity_bytes`` of host memory. A step uses blocks in a known order (forward, then backward in
reverse), so eviction is Belady's: when memory is needed, the weights whose next use lies farthest ahead go. At the
turn from forward to backward, and from backward to the next forward, this keeps the blocks that are used again at once.

[Note: Chains]
Ops of one block run one after the other: each follows the block's previous op of this step, or the STORE of an earlier one.
RELEASEs run one after the other too, so a FETCH that follows the last of them may take over the memory of all.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace

from lightning_hetero.errors import ConfigError, OutOfMemoryBudgetError
from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Plan, Tier, UpdateLane
from lightning_hetero.ir.schedule import NO_BLOCK, Anchor, Lane, Op, OpKind, Payload, Phase, Schedule, StepSignature, Updates
from lightning_hetero.units import format_bytes


def lower(plan: Plan, model: ModelShape, signature: StepSignature, *, resident: frozenset[int], capacity_bytes: int) -> Schedule:
    """Lowers a resolved plan to the schedule of one step.

    Args:
        plan: A resolved plan: ``plan.blocks[i]`` places ``model.blocks[i]``.
        model: The blocks' sizes.
        signature: The step.
        resident: Blocks with weights on disk whose weights are in memory as the step begins.
        capacity_bytes: Host bytes for weights that live on disk.

    Raises:
        ConfigError: A block whose weights must stay in memory has them on disk.
        OutOfMemoryBudgetError: A block with weights on disk does not fit ``capacity_bytes``.
    """
    for shape, placed in zip(model.blocks, plan.blocks, strict=True):
        if placed.weights is Tier.DISK and shape.pinned:
            raise ConfigError(
                f"plan {plan.name!r} places the weights of block {shape.name!r} on 'disk'; they are used outside a repeated "
                f"block, so they must stay in memory. Allowed: 'device', 'host'. Put a rule for this block before the one that "
                f"matches it."
            )
        if placed.weights is Tier.DISK and shape.weight_bytes > capacity_bytes:
            raise OutOfMemoryBudgetError(
                f"block {shape.name!r} needs {format_bytes(shape.weight_bytes)} of host memory for its weights; "
                f"{format_bytes(capacity_bytes)} are left for weights that live on disk. Raise host_memory, or choose smaller "
                f"blocks with block_cls."
            )
    return _Lowering(plan, model, signature, set(resident), capacity_bytes).run()


@dataclass
class _Lowering:
    plan: Plan
    model: ModelShape
    signature: StepSignature
    resident: set[int]
    capacity_bytes: int
    ops: list[Op] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)  # block -> its latest op
    last_release: int | None = None
    fetched: dict[int, int] = field(default_factory=dict)  # block -> FETCH op of its weights
    opened: set[int] = field(default_factory=set)  # blocks whose state has a FETCH op
    updated: dict[int, int] = field(default_factory=dict)  # block -> UPDATE op, in the order of issue

    def run(self) -> Schedule:
        before = frozenset(self.resident)
        self.anchors = self._expected_anchors()
        self.uses = [None if a.phase is Phase.VERDICT else a.block for a in self.anchors]
        self.positions: dict[int, list[int]] = {}
        for index, use in enumerate([*self.uses, *self.signature.order]):
            self.positions.setdefault(NO_BLOCK if use is None else use, []).append(index)
        self.last_use = {block: index for index, block in enumerate(self.uses)}
        anchors = tuple(self._begin(index, anchor) for index, anchor in enumerate(self.anchors))
        return Schedule(
            signature=self.signature,
            anchors=anchors,
            ops=tuple(self.ops),
            resident_before=before,
            resident_after=frozenset(self.resident),
        )

    def _expected_anchors(self) -> list[Anchor]:
        order = self.signature.order
        anchors = [Anchor(phase=Phase.FORWARD, block=b) for b in order]
        if self.signature.training:
            anchors += [Anchor(phase=Phase.BACKWARD, block=b) for b in reversed(order)]
            anchors.append(Anchor(phase=Phase.VERDICT, block=NO_BLOCK))
        return anchors

    def _begin(self, index: int, anchor: Anchor) -> Anchor:
        """Issues everything that one anchor issues; returns the anchor with what it waits for."""
        if index and self.anchors[index - 1].phase is Phase.BACKWARD:
            self._close(index, self.anchors[index - 1].block)
        if anchor.phase is Phase.VERDICT:
            self._verdict(index)
            return anchor
        block = anchor.block
        if self._on_disk(block) and block not in self.resident:
            self._fetch(index, block, keep={block})
        needs = [self.fetched[block]] if block in self.fetched else []
        # Weights that stayed in memory may still be waiting for their update of the step before.
        pending = anchor.phase is Phase.FORWARD and not needs and self.model.blocks[block].num_trainable_params
        self._prefetch(index)
        if anchor.phase is Phase.BACKWARD:
            self._open(index)
            # Gradients of this block become host memory: the oldest of those that wait must have been used up.
            issued = list(self.updated.values())
            needs += issued[-self.plan.gradient_depth :][:1] if len(issued) >= self.plan.gradient_depth else []
        return replace(anchor, needs=tuple(needs), carried=((OpKind.UPDATE, block),) if pending else ())

    def _close(self, index: int, block: int) -> None:
        """The backward of ``block`` has ended: its last one issues the update."""
        in_backward = self.signature.updates is Updates.IN_BACKWARD and self.plan.blocks[block].update is UpdateLane.CPU
        if in_backward and self.last_use[block] < index:
            self._update(index, block)

    def _verdict(self, index: int) -> None:
        if self.signature.updates is Updates.NONE:
            return
        for block in dict.fromkeys(self.signature.order):
            if block not in self.updated:
                self._update(index, block)
        stores = tuple(op.id for op in self.ops if op.kind is OpKind.STORE)
        if stores:
            self._emit(OpKind.COMMIT, NO_BLOCK, Lane.DISK_WRITE, index, after=stores)

    def _update(self, index: int, block: int) -> None:
        shape, placed = self.model.blocks[block], self.plan.blocks[block]
        if not shape.num_trainable_params:
            return
        if placed.state is Tier.DISK and block not in self.opened:
            self._open_state(index, block)
        lane = Lane.COMPUTE if placed.update is UpdateLane.DEVICE else Lane.CPU
        self.updated[block] = self._emit(OpKind.UPDATE, block, lane, index, Payload.STATE, shape.state_bytes)
        if self._is_stored(block):
            payload = Payload.STATE if placed.state is Tier.DISK else Payload.WEIGHTS
            stored = shape.weight_bytes + (shape.state_bytes if placed.state is Tier.DISK else 0)
            commit = ((OpKind.COMMIT, NO_BLOCK),)
            self._emit(OpKind.STORE, block, Lane.DISK_WRITE, index, payload, stored, carried=commit)

    def _open(self, index: int) -> None:
        """State of the blocks whose backward comes next may stream towards the host already.

        An opened block keeps its weights until it is updated, and only memory that no use needs before may be kept: so
        blocks open in the order of their last use, up to the first one whose weights have yet to come.
        """
        if self.signature.updates is not Updates.IN_BACKWARD:
            return
        for ahead, block in enumerate(self.uses[index:], index):
            if block is None or (self._on_disk(block) and block not in self.resident):
                return
            due = self.last_use[block] == ahead and block not in self.opened and self.model.blocks[block].num_trainable_params
            if due and self.plan.blocks[block].state is Tier.DISK:
                self._open_state(index, block)

    def _open_state(self, index: int, block: int) -> None:
        self._emit(OpKind.FETCH, block, Lane.DISK_READ, index, Payload.STATE, self.model.blocks[block].state_bytes)
        self.opened.add(block)

    def _prefetch(self, index: int) -> None:
        """Fetches the weights of the next uses, as many as the plan's depth and the memory allow."""
        ahead = dict.fromkeys(b for b in self.uses[index + 1 :] if b is not None and b != self.uses[index] and self._on_disk(b))
        keep = {b for b in (self.uses[index],) if b is not None}
        for block in list(ahead)[: self.plan.prefetch_depth]:
            keep.add(block)
            if block not in self.resident and not self._fetch(index, block, keep):
                return

    def _fetch(self, index: int, block: int, keep: set[int]) -> bool:
        """Brings weights into memory, in place of those outside ``keep`` whose next use is farthest.

        False, and nothing issued, if that is not enough.
        """
        size = self.model.blocks[block].weight_bytes
        excess = sum(self.model.blocks[b].weight_bytes for b in self.resident) + size - self.capacity_bytes
        victims = []
        for victim in sorted(self.resident - keep, key=lambda b: (self._next_use(index, b), b), reverse=True):
            if excess <= 0:
                break
            victims.append(victim)
            excess -= self.model.blocks[victim].weight_bytes
        if excess > 0:
            return False
        for victim in victims:
            self._release(index, victim)
        self.fetched[block] = self._emit(OpKind.FETCH, block, Lane.DISK_READ, index, Payload.WEIGHTS, size, self._after_release())
        self.resident.add(block)
        return True

    def _release(self, index: int, block: int) -> None:
        size = self.model.blocks[block].weight_bytes
        self.last_release = self._emit(OpKind.RELEASE, block, Lane.DISK_READ, index, Payload.WEIGHTS, size, self._after_release())
        self.resident.remove(block)
        self.fetched.pop(block, None)

    def _after_release(self) -> tuple[int, ...]:
        return () if self.last_release is None else (self.last_release,)

    def _next_use(self, index: int, block: int) -> int:
        """The anchor that uses ``block`` next, counting into the next step."""
        positions = self.positions.get(block, [])
        following = bisect_left(positions, index)
        return positions[following] if following < len(positions) else len(self.anchors) * 2

    def _on_disk(self, block: int) -> bool:
        return self.plan.blocks[block].weights is Tier.DISK

    def _is_stored(self, block: int) -> bool:
        trainable = self.model.blocks[block].num_trainable_params > 0
        return trainable and Tier.DISK in (self.plan.blocks[block].weights, self.plan.blocks[block].state)

    def _emit(
        self,
        kind: OpKind,
        block: int,
        lane: Lane,
        at: int,
        payload: Payload = Payload.NONE,
        num_bytes: int = 0,
        after: tuple[int, ...] = (),
        carried: tuple[tuple[OpKind, int], ...] = (),
    ) -> int:
        if block in self.last:
            after = tuple(sorted({*after, self.last[block]}))
        elif block != NO_BLOCK and self._is_stored(block):
            carried = ((OpKind.STORE, block), *carried)
        op = Op(
            id=len(self.ops),
            kind=kind,
            block=block,
            lane=lane,
            at=at,
            payload=payload,
            num_bytes=num_bytes,
            after=after,
            carried=carried,
        )
        self.ops.append(op)
        if block != NO_BLOCK:
            self.last[block] = op.id
        return op.id
