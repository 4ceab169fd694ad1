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

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_hetero.ir.schedule import Lane, OpKind, Phase, Schedule
from lightning_hetero.runtime.handlers import Handlers, Key
from lightning_hetero.runtime.lanes import Event, Lanes
from lightning_hetero.runtime.recorder import Recorder

_END = (OpKind.MIRROR, OpKind.COMMIT)


@dataclass(eq=False, repr=False, slots=True)
class Step:
    """One batch on its way through a schedule."""

    schedule: Schedule  # the verdict may change to another one that is the same until then
    handlers: Handlers
    lanes: Lanes
    recorder: Recorder  # is told the ops that compute waits for
    before: Mapping[Key, Event]  # the latest op of each kind and block, of earlier steps
    serial: bool  # compute waits for each op to end
    _anchor: int = 0  # the next one
    _op: int = 0  # the next one
    _ends: list[Event] = field(default_factory=list)  # of the ops so far, by their ids

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
        waits = [*needs]
        for anchor in passed:
            for key in anchor.carried:
                if key in self.before:
                    waits.append(self.before[key])
        if self.recorder.enabled:
            self.recorder.needs = self.recorder.names(waits)
        self.lanes.compute_waits(waits)
        return needs

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
