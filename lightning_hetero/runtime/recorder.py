"""Records a run as a :class:`~lightning_hetero.ir.trace.Trace`. It costs nothing while it is off.

[Note: Three ops in one]
FETCH state, UPDATE and STORE of a block are one task of the engine, which reads, computes and
writes chunk by chunk. The engine knows when the task began, when its new weights were in place
(READY) and when all was written (DONE). So FETCH state lasts until READY, UPDATE from the arrival
of the gradients until READY, and STORE from then until DONE. Their spans overlap, as the work does.

[Note: What compute does]
The runtime sees compute only at anchors, where it issues and waits. Between two of these stays
compute works for the first one's anchor. :attr:`Recorder.now` gives the times of a stay: those of
the host's clock, or of the stream that computes, which are read once the stream has come that far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from lightning_hetero._native import Ticket, TicketTimes
from lightning_hetero.clock import now_s
from lightning_hetero.errors import HeteroError
from lightning_hetero.ir.schedule import NO_BLOCK, Lane, OpKind
from lightning_hetero.ir.stalls import with_reasons
from lightning_hetero.ir.trace import WAIT, Span, Trace
from lightning_hetero.lanes import All, EngineOp, Event, Lanes, Moment, OpEvent
from lightning_hetero.lanes.contract import host_moment
from lightning_hetero.lanes.op import QueuedOp

_KEPT_STEPS = 16  # whose spans are kept


@runtime_checkable
class _Timed(Protocol):
    def times(self) -> TicketTimes: ...


@dataclass(frozen=True, slots=True)
class _Watched:
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


class _Wait:
    """Compute is in the runtime. Not a generator, because each anchor makes one."""

    __slots__ = ("_begin", "_name", "_recorder", "_start_s")

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __enter__(self) -> None:
        recorder = self._recorder
        recorder.catch_up()
        self._start_s = now_s()
        self._begin = recorder.now("") if recorder.enabled else None

    def __exit__(self, *_: object) -> None:
        recorder = self._recorder
        recorder.waited_s += now_s() - self._start_s
        if self._begin is not None:
            recorder._stays.append(_Stay(recorder.step, self._name, self._begin, recorder.now(self._name), recorder.needs))
            recorder.needs = ()


@dataclass(eq=False, repr=False)
class Recorder:
    """Collects spans while ``enabled``."""

    enabled: bool
    step: int = 0
    waited_s: float = 0.0  # that compute has spent in the runtime since the start; counted even while disabled
    now: Callable[[str], Moment] = host_moment  # gives the moment that compute has come to; takes a name for profilers
    # Called before a wait. There a profiler lets compute catch up with the host, so that this time
    # is not part of the wait.
    catch_up: Callable[[], object] = float
    needs: tuple[str, ...] = ()  # the names of the ops that compute waits for now
    _blocks: tuple[str, ...] = ()
    _spans: list[Span] = field(default_factory=list)
    _watched: list[_Watched] = field(default_factory=list)
    _stays: deque[_Stay] = field(default_factory=deque)
    _order: int = 0
    _last_order: int = 0  # of the step that has just ended
    _late: bool = False

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Records the time that compute spends in the runtime at an anchor as a wait."""
        return _Wait(self, name)

    def leave(self) -> None:
        """The compute of the last anchor has ended."""
        if self.enabled and self._stays and self._stays[-1].anchor:
            now = self.now("")
            self._stays.append(_Stay(self.step, "", now, now, ()))

    @contextmanager
    def of_last_step(self) -> Iterator[None]:
        """Ops that are submitted inside belong to the step that has just ended."""
        self._late = True
        try:
            yield
        finally:
            self._late = False

    def watch(self, kind: str, block: str, tickets: list[Ticket], *, lane: Lane) -> list[Ticket]:
        """Records an op that has just been issued, once its tickets are done."""
        if self.enabled and tickets:
            step, order = self._next()
            self._watched.append(_Watched(step, order, kind, block, lane, now_s(), tuple(tickets), ()))
        return tickets

    def _next(self) -> tuple[int, int]:
        """The step of the op that is being issued, and its place in the step."""
        order = self._last_order if self._late else self._order
        self._last_order += self._late
        self._order += not self._late
        return self.step - self._late, order

    def observe(self, lanes: Lanes, blocks: Sequence[str]) -> None:
        """Records the ops of lanes, if enabled; ``blocks`` has the names of the blocks."""
        self._blocks = tuple(blocks)
        if self.enabled:
            self.switch(lanes, on=True)

    def switch(self, lanes: Lanes, *, on: bool) -> None:
        """Begins or ends recording, between two steps; what was recorded stays."""
        self.enabled, lanes.timed = on, on
        lanes.observer = self._follow if on else None
        self._stays.clear()  # a stay without its neighbours has no times
        if on:
            self.now = lanes.now

    def _follow(self, queued: OpEvent) -> None:
        """Remembers an op that is being given to its lane."""
        op, lane = queued.op, queued.op.lane
        if op.kind is OpKind.RELEASE:
            lane = Lane.COMPUTE  # it takes no time of the lane
        elif lane is Lane.CPU and op.kind in (OpKind.MIRROR, OpKind.COMMIT):
            lane = Lane.DISK_WRITE  # any thread may hand it over
        block = "" if op.block == NO_BLOCK else self._blocks[op.block]
        after = self.names(queued.after)
        step, order = self._next()
        self._watched.append(_Watched(step, order, op.what, block, lane, queued.submitted_s, (), after, queued))

    def names(self, events: Iterable[Event]) -> tuple[str, ...]:
        """The names of the ops that end with these events."""
        names: list[str] = []
        for event in events:
            if isinstance(event, QueuedOp | EngineOp):
                op = event.op
                names.append(f"{op.what} {'' if op.block == NO_BLOCK else self._blocks[op.block]}")
            elif isinstance(event, All):  # the op had nothing to do
                names += self.names(event.events)
        return tuple(names)

    def end_step(self) -> None:
        """One optimizer step is over."""
        self.step += 1
        self._last_order, self._order = self._order, 0
        if not self.enabled:
            return
        self._collect()
        oldest = self.step - _KEPT_STEPS
        self._spans = [s for s in self._spans if s.step >= oldest]

    def trace(self) -> Trace:
        """The trace so far, with the reasons of waits."""
        self._collect()
        return Trace(spans=with_reasons(self._spans))

    def close(self) -> None:
        """Collects all spans before the engine closes: its tickets end with it."""
        for op in self._watched:
            if op.kind != "FETCH state":  # it may wait for gradients that never come; otherwise UPDATE covers it
                with suppress(HeteroError):
                    for ticket in op.tickets if op.queued is None else op.queued.tickets:
                        ticket.wait()
        self._collect()
        self._watched = []

    def _collect(self) -> None:
        self._collect_compute()
        self._watched = [op for op in self._watched if not self._ended(op)]

    def _ended(self, op: _Watched) -> bool:
        """Whether the op is over. Then its span is recorded."""
        tickets: Sequence[object] = op.tickets
        since_s, num_bytes, lane_times = op.issued_s, 0, None
        if op.queued is not None:
            lane_times = op.queued.times()
            if lane_times is None:
                return op.queued.ended() and op.queued.error is not None
            tickets, since_s, num_bytes = op.queued.tickets, lane_times[0], op.queued.op.num_bytes
        times = [ticket.times() for ticket in tickets if isinstance(ticket, _Timed)]
        if not all(t.done_ns for t in times):
            return False
        ran = [t for t in times if t.started_ns]  # a discarded update may never have started
        if ran:
            start_s, end_s = min(t.started_ns for t in ran) / 1e9, max(t.done_ns for t in ran) / 1e9
            if op.kind in ("UPDATE", "STORE"):
                start_s = max(start_s, since_s)
            if op.kind in ("FETCH state", "UPDATE"):
                end_s = max(t.ready_ns or t.done_ns for t in ran) / 1e9
            moved = sum(t.bytes_read for t in ran), sum(t.bytes_written for t in ran)
            num_bytes = {"FETCH": moved[0], "FETCH state": moved[0], "UPDATE": 0}.get(op.kind, moved[1])
        elif lane_times is not None and op.lane is not Lane.DISK_WRITE:  # without a write there is no span
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
        """Spans of stays and of the compute between them. The last stay is not over."""
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
