"""Records what happened as a :class:`~lightning_hetero.ir.trace.Trace`; costs nothing while it is off.

[Note: Three ops in one]
FETCH state, UPDATE and STORE of a block are one task of the engine, which reads, computes and writes chunk by chunk. Of such a task
the engine knows when it began, when its new weights were there (READY) and when all was written (DONE). So FETCH state lasts until
READY, UPDATE from the gradients' arrival until READY, and STORE from there until DONE: their spans overlap, as the work does.

[Note: What compute does]
The runtime sees compute only at anchors, where it issues and waits. What lies between two of these stays is the compute of the
first one's anchor. When a stay begins and ends is asked of :attr:`Recorder.now`: the host's clock, or where compute is a stream,
the stream's, which is read once the stream has come that far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from lightning_hetero._native import Ticket
from lightning_hetero.clock import now_s
from lightning_hetero.errors import HeteroError
from lightning_hetero.ir.schedule import NO_BLOCK, Lane, OpKind
from lightning_hetero.ir.stalls import with_reasons
from lightning_hetero.ir.trace import WAIT, Span, Trace
from lightning_hetero.runtime.lanes import All, EngineOp, Event, Lanes, Moment, OpEvent
from lightning_hetero.runtime.lanes.op import QueuedOp
from lightning_hetero.runtime.lanes.queue import host_moment


@dataclass(frozen=True, slots=True)
class _Watched:
    """An op under way."""

    step: int
    order: int
    kind: str
    block: str
    lane: Lane
    issued_s: float
    tickets: tuple[Ticket, ...]
    after: tuple[str, ...]
    queued: OpEvent | None = None  # an op of a schedule


@dataclass(frozen=True, slots=True)
class _Stay:
    """Compute at an anchor, in the runtime."""

    step: int
    anchor: str  # empty: the last anchor's compute has ended
    begin: Moment
    end: Moment
    after: tuple[str, ...]


class Recorder:
    """Collects spans while ``enabled``.

    Args:
        enabled: Whether anything is recorded.
        steps: Optimizer steps that are kept, the latest ones; bounds memory.

    Attributes:
        waited_s: Seconds that compute has spent in the runtime, issuing and waiting, since the start; counted even while disabled.
        now: What knows the moment that compute has come to; takes a name for profilers.
        settle: Called before a wait begins: there a profiler lets compute catch up with the host, so that it counts as no wait.
        needs: What compute waits for at the anchor where it is, by name; set by who waits.
    """

    def __init__(self, *, enabled: bool, steps: int = 16) -> None:
        self.enabled = enabled
        self.step = 0
        self.waited_s = 0.0
        self.now: Callable[[str], Moment] = host_moment
        self.settle: Callable[[], object] = float
        self.needs: tuple[str, ...] = ()
        self._blocks: tuple[str, ...] = ()
        self._keep = steps
        self._spans: list[Span] = []
        self._watched: list[_Watched] = []
        self._stays: deque[_Stay] = deque()
        self._order = 0
        self._last_order = 0  # of the step that has just ended
        self._late = False

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """A wait on the compute lane for the time that compute spends issuing and waiting at an anchor."""
        self.settle()
        start_s = now_s()
        begin = self.now("") if self.enabled else None
        try:
            yield
        finally:
            self.waited_s += now_s() - start_s
            if begin is not None:
                self._stays.append(_Stay(self.step, name, begin, self.now(name), self.needs))
                self.needs = ()

    def leave(self) -> None:
        """The compute of the last anchor has ended."""
        if self.enabled and self._stays and self._stays[-1].anchor:
            now = self.now("")
            self._stays.append(_Stay(self.step, "", now, now, ()))

    @contextmanager
    def of_last_step(self) -> Iterator[None]:
        """What is submitted inside belongs to the step that has just ended."""
        self._late = True
        try:
            yield
        finally:
            self._late = False

    def watch(self, kind: str, block: str, tickets: list[Ticket], *, lane: Lane) -> list[Ticket]:
        """Remembers an op that has just been issued; its times are read once its tickets are done."""
        if self.enabled and tickets:
            step, order = self._next()
            self._watched.append(_Watched(step, order, kind, block, lane, now_s(), tuple(tickets), ()))
        return tickets

    def _next(self) -> tuple[int, int]:
        """The step of the op that is being issued, and its place there."""
        order = self._last_order if self._late else self._order
        self._last_order += self._late
        self._order += not self._late
        return self.step - self._late, order

    def observe(self, lanes: Lanes, blocks: Sequence[str]) -> None:
        """Follows what lanes do, if enabled.

        Args:
            lanes: The lanes.
            blocks: The names of the blocks.
        """
        if self.enabled:
            lanes.timed = True
            lanes.observer = self._follow
            self.now, self._blocks = lanes.now, tuple(blocks)

    def _follow(self, queued: OpEvent) -> None:
        """Remembers an op that is being given to its lane."""
        op, lane = queued.op, queued.op.lane
        if op.kind is OpKind.RELEASE:
            lane = Lane.COMPUTE  # it takes no time of the lane
        elif lane is Lane.CPU and op.kind in (OpKind.MIRROR, OpKind.COMMIT):
            lane = Lane.DISK_WRITE  # whatever thread hands it over
        block = "" if op.block == NO_BLOCK else self._blocks[op.block]
        after = self.names(queued.after)
        step, order = self._next()
        self._watched.append(_Watched(step, order, op.what, block, lane, queued.submitted_s, (), after, queued))

    def names(self, events: Iterable[Event]) -> tuple[str, ...]:
        """What the ops that end with these events are called."""
        names: list[str] = []
        for event in events:
            if isinstance(event, QueuedOp | EngineOp):
                op = event.op
                names.append(f"{op.what} {'' if op.block == NO_BLOCK else self._blocks[op.block]}")
            elif isinstance(event, All):  # of an op that had nothing to do
                names += self.names(event.events)
        return tuple(names)

    def end_step(self) -> None:
        """One optimizer step is over."""
        self.step += 1
        self._last_order, self._order = self._order, 0
        if not self.enabled:
            return
        self._collect()
        oldest = self.step - self._keep
        self._spans = [s for s in self._spans if s.step >= oldest]

    def trace(self) -> Trace:
        """What was recorded so far, with reasons."""
        self._collect()
        return Trace(spans=with_reasons(self._spans))

    def close(self) -> None:
        """The engine is about to go: tickets cannot be asked any more."""
        for op in self._watched:
            if op.kind != "FETCH state":  # of an update that nobody hands gradients any more; else UPDATE stands for it
                with suppress(HeteroError):
                    for ticket in op.tickets if op.queued is None else op.queued.tickets:
                        ticket.wait()
        self._collect()
        self._watched = []

    def _collect(self) -> None:
        self._collect_compute()
        self._watched = [op for op in self._watched if not self._ended(op)]

    def _ended(self, op: _Watched) -> bool:
        """Whether the op is over; it has become a span then."""
        tickets: Sequence[Any] = op.tickets
        since_s, num_bytes, lane_times = op.issued_s, 0, None
        if op.queued is not None:
            lane_times = op.queued.times()
            if lane_times is None:
                return op.queued.settled() and op.queued.error is not None
            tickets, since_s, num_bytes = op.queued.tickets, lane_times[0], op.queued.op.num_bytes
        times = [ticket.times() for ticket in tickets]
        if not all(t.done_ns for t in times):
            return False
        ran = [t for t in times if t.started_ns]  # an update that was taken back may never have started
        if ran:
            start_s, end_s = min(t.started_ns for t in ran) / 1e9, max(t.done_ns for t in ran) / 1e9
            if op.kind in ("UPDATE", "STORE"):
                start_s = max(start_s, since_s)
            if op.kind in ("FETCH state", "UPDATE"):
                end_s = max(t.ready_ns or t.done_ns for t in ran) / 1e9
            moved = sum(t.bytes_read for t in ran), sum(t.bytes_written for t in ran)
            num_bytes = {"FETCH": moved[0], "FETCH state": moved[0], "UPDATE": 0}.get(op.kind, moved[1])
        elif lane_times is not None and op.lane is not Lane.DISK_WRITE:  # with nothing to write it is none
            start_s, end_s = lane_times
        else:
            return True
        self._spans.append(
            Span(
                step=op.step, name=f"{op.kind} {op.block}", lane=op.lane.value, start_s=start_s, end_s=max(start_s, end_s),
                num_bytes=num_bytes, order=op.order, issued_s=op.issued_s, after=op.after,
            )
        )  # fmt: skip
        return True

    def _collect_compute(self) -> None:
        """Spans of stays, and of what compute did between them; the last one stays, for its compute has not ended."""
        while len(self._stays) > 1:
            stay, following = self._stays[0], self._stays[1]
            begin_s, end_s, next_s = stay.begin(), stay.end(), following.begin()
            if begin_s is None or end_s is None or next_s is None:
                return
            self._stays.popleft()
            if stay.anchor:
                wait = Span(
                    step=stay.step, name=f"{WAIT}{stay.anchor}", lane=Lane.COMPUTE.value, start_s=begin_s, end_s=end_s,
                    after=stay.after,
                )  # fmt: skip
                self._spans += (wait, replace(wait, name=stay.anchor, start_s=end_s, end_s=next_s, after=()))
