"""One training step, from top to bottom: the cursor of a schedule.

At each anchor the step submits the ops up to it. Then compute waits for the ops that the anchor
needs and, from earlier steps, for the ops that it carries (``reach``). Autograd runs compute; the
step only sees where compute is.

- ``F:0 … F:n``, the forwards: weights come, and wait for their update of the step before.
- ``B:n … B:0``, the backwards in reverse order. While one runs, the gradients of the one before
  leave and its block is updated.
- ``V``, the verdict: all gradients are known. ``finish`` submits the updates that are left.
- The step ends: ``mirror`` submits MIRRORs, and a COMMIT follows. Both come after updates that the
  schedule does not have and, if steps are kept, after the hooks of the training loop.

Only edges order ops: :class:`Step` turns ``after`` and ``carried`` into events that lanes wait for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.schedule import Lane, OpKind, Phase, Schedule, StepSignature, Updates
from lightning_hetero.lanes import Event, Lanes
from lightning_hetero.lowering import DeviceRoom, lower
from lightning_hetero.runtime.handlers import Handlers, Key
from lightning_hetero.runtime.recorder import Recorder

_END = (OpKind.MIRROR, OpKind.COMMIT)
_ARRIVALS = ((OpKind.UPLOAD, Lane.H2D), (OpKind.GATHER, Lane.PEER))
_KEPT = 64
_LONG_ORDER = 4  # training steps that use blocks more often on average get no schedule


@dataclass(eq=False, repr=False, slots=True)
class Step:
    """One batch on its way through a schedule."""

    schedule: Schedule  # the verdict may change to another one that is the same until then
    held: tuple[frozenset[int], DeviceRoom | None]  # weights in memory as it began, as ``Residency.held`` gave them
    handlers: Handlers
    lanes: Lanes
    recorder: Recorder  # is told the ops that compute waits for
    before: Mapping[Key, Event]  # the latest op of each kind and block, of earlier steps
    serial: bool  # compute waits for each op to end
    left: list[Event]  # what brings weights and the step before has left out: the first anchor waits for it
    _anchor: int = 0  # the next one
    _op: int = 0  # the next one
    _ends: list[Event] = field(default_factory=list)  # of the ops so far, by their ids
    _waited: set[int] = field(default_factory=set)  # ops that anchors have waited for

    @property
    def is_whole(self) -> bool:
        """Whether all ops have been submitted."""
        ops = self.schedule.ops
        return self._op == len(ops) or ops[self._op].kind in _END

    def find(self, phase: Phase, block: int) -> int | None:
        """The next anchor of this phase and block; ``None`` if the schedule expects none."""
        anchors = self.schedule.anchors
        for index in range(self._anchor, len(anchors)):
            anchor = anchors[index]
            if anchor.block == block and anchor.phase is phase:
                return index
        return None

    def reach(self, index: int) -> list[Event]:
        """Compute has come to an anchor, maybe past others. Returns the ops that it needs."""
        passed = self.schedule.anchors[self._anchor : index + 1]
        self._submit_through(index)
        self._anchor = index + 1
        needs = []
        for op in passed[-1].needs:
            needs.append(self._ends[op])
        self._waited.update(passed[-1].needs)
        waits = [*needs, *self.left]
        self.left = []
        for anchor in passed:
            for key in anchor.carried:
                if key in self.before:
                    waits.append(self.before[key])
        if self.recorder.enabled:
            self.recorder.needs = self.recorder.names(waits)
        self.lanes.compute_waits(waits)
        return needs

    def left_out(self) -> list[Event]:
        """What brings weights and compute has not waited for, as it has not come to their anchors.

        The step is whole. The next one finds the weights on the device, so it has no edge to these.
        """
        left = self.left
        for anchor in self.schedule.anchors:
            for op in anchor.needs:
                one = self.schedule.ops[op]
                if op not in self._waited and (one.kind, one.lane) in _ARRIVALS:
                    left.append(self._ends[op])
        return left

    def finish(self) -> None:
        """The verdict: submits all ops that are left, except MIRRORs and COMMIT."""
        self._submit_through(len(self.schedule.anchors) - 1)

    def mirror(self) -> set[int]:
        """The step has ended: submits its MIRRORs; returns their blocks."""
        ops, blocks = self.schedule.ops, set[int]()
        if not self.is_whole:
            return blocks
        while self._op < len(ops) and ops[self._op].kind is OpKind.MIRROR:
            blocks.add(ops[self._op].block)
            self._submit_next()
        return blocks

    def _submit_through(self, index: int) -> None:
        ops, computed = self.schedule.ops, []
        while self._op < len(ops) and ops[self._op].at <= index and ops[self._op].kind not in _END:
            end = self._submit_next()
            if self.serial:
                end.wait()
            elif ops[self._op - 1].lane is Lane.COMPUTE:
                computed.append(end)
        if computed:
            self.lanes.compute_waits(computed)

    def _submit_next(self) -> Event:
        op = self.schedule.ops[self._op]
        self._op += 1
        after = []
        for one in op.after:
            after.append(self._ends[one])
        for key in op.carried:
            if key in self.before:
                after.append(self.before[key])
        end = self.handlers.submit(op, after)
        self._ends.append(end)
        return end


class Schedules:
    """The schedules of one plan: a batch is expected to go as the last one of its kind."""

    def __init__(self, plan: Plan, model: ModelShape) -> None:
        self.seen: list[int] = []  # the blocks that the batch under way has used
        self.training = False  # whether it trains
        self._orders = dict.fromkeys((True, False), tuple(range(len(model.blocks))))
        self.install(plan, model)

    def install(self, plan: Plan, model: ModelShape) -> None:
        """Changes to another plan. The orders that were seen stay."""
        self._plan, self._model = plan, model
        self._lowered: dict[tuple[StepSignature, frozenset[int], DeviceRoom | None, int], Schedule] = {}

    def begin_batch(self, *, training: bool) -> None:
        """Another batch begins."""
        self.learn()
        self.training = training

    def learn(self) -> None:
        """The batch has ended: expects the next one of its kind to use the blocks in this order.

        Of a batch that goes over the model many times without training, as generation token by
        token, expects the first pass.
        """
        order, self.seen = self.seen, []
        if order:
            self._orders[self.training] = tuple(order if self.training or not self._is_long(order) else _first_pass(order))

    def next_pass(self, passing: Schedule | None) -> StepSignature | None:
        """The next pass of a batch without training, which begins with the last block it has used.

        It is expected to be like the one that ends, or like the one that was expected
        (``passing``) if it ended early. ``None``: the block has not been used before, or it is used
        twice in a row.
        """
        most = _LONG_ORDER * len(self._model.blocks) + 1
        if len(self.seen) > 3 * most:  # what is between the first and the last passes does not count
            del self.seen[most:-most]
        order = _last_pass(self.seen)
        if order is None:
            return None
        expected = () if passing is None else passing.signature.order
        return StepSignature(order=expected if expected[: len(order)] == order else order, training=False)

    def is_last_backward(self, block: int) -> bool:
        """Whether only backwards of pinned blocks follow that of this one."""
        for index in self.seen:
            if not self._model.blocks[index].pinned:
                return index == block
        return False

    def _is_long(self, order: Sequence[int]) -> bool:
        return len(order) > _LONG_ORDER * max(1, len(self._model.blocks))

    def signature(self, updates: Updates) -> StepSignature | None:
        """The expected step; ``None`` if it is too long for a schedule."""
        order = self._orders[self.training]
        if self._is_long(order):
            return None
        return StepSignature(order=order, training=self.training, updates=updates)

    def lowered(
        self, signature: StepSignature, resident: frozenset[int], device: DeviceRoom | None, capacity_bytes: int
    ) -> Schedule:
        """The schedule of a step; ``capacity_bytes`` of host memory are for weights on disk."""
        key = (signature, resident, device, capacity_bytes)
        if key not in self._lowered:
            if len(self._lowered) >= _KEPT:  # a model that skips layers at random has a new order every step
                self._lowered.clear()
            self._lowered[key] = lower(
                self._plan, self._model, signature, resident=resident, capacity_bytes=capacity_bytes, device=device
            )
        return self._lowered[key]


def _first_pass(seen: Sequence[int]) -> Sequence[int]:
    """The uses up to the first block that is used again, but not twice in a row."""
    before = set[int]()
    for index, block in enumerate(seen):
        if block in before and block != seen[index - 1]:
            return seen[:index]
        before.add(block)
    return seen


def _last_pass(seen: Sequence[int]) -> tuple[int, ...] | None:
    """The uses since the last block was used before; ``None`` if that is at most one use ago."""
    for index in range(len(seen) - 2, -1, -1):
        if seen[index] == seen[-1]:
            return tuple(seen[index:-1]) if index < len(seen) - 2 else None
    return None
