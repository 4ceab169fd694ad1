"""Records what happened as a :class:`~lightning_hetero.ir.trace.Trace`; costs nothing while it is off.

[Note: Three ops in one]
FETCH state, UPDATE and STORE of a block are one task of the engine, which reads, computes and writes chunk by chunk. Of such a task
the engine knows when it began, when its new weights were there (READY) and when all was written (DONE). So FETCH state lasts until
READY, UPDATE from the gradients' arrival until READY, and STORE from there until DONE: their spans overlap, as the work does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from lightning_hetero._native import Ticket
from lightning_hetero.errors import HeteroError
from lightning_hetero.ir.schedule import Lane, Op, OpKind, Payload
from lightning_hetero.ir.trace import Span, Trace
from lightning_hetero.runtime.lanes import OpEvent


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


@dataclass(frozen=True, slots=True)
class _Followed:
    """An op on a lane of a device."""

    step: int
    order: int
    op: Op
    block: str
    end: OpEvent


class Recorder:
    """Collects spans while ``enabled``.

    Args:
        enabled: Whether anything is recorded.
        steps: Optimizer steps that are kept, the latest ones; bounds memory.

    Attributes:
        waited_s: Seconds that compute has spent in the runtime, issuing and waiting, since the start; counted even while disabled.
    """

    def __init__(self, *, enabled: bool, steps: int = 16) -> None:
        self.enabled = enabled
        self.step = 0
        self.waited_s = 0.0
        self._keep = steps
        self._spans: list[Span] = []
        self._watched: list[_Watched] = []
        self._followed: list[_Followed] = []
        self._order = 0

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """A span on the compute lane for the time that compute spends issuing and waiting at an anchor."""
        start = time.monotonic()
        try:
            yield
        finally:
            end = time.monotonic()
            self.waited_s += end - start
            if self.enabled:
                self._spans.append(
                    Span(step=self.step, name=f"wait {name}", lane="compute", start_s=start, end_s=end, waited_for=name)
                )

    @contextmanager
    def span(self, name: str, lane: str = "compute") -> Iterator[None]:
        """A span around a piece of compute."""
        if not self.enabled:
            yield
            return
        start = time.monotonic()
        yield
        self._spans.append(Span(step=self.step, name=name, lane=lane, start_s=start, end_s=time.monotonic()))

    def watch(self, kind: str, block: str, tickets: list[Ticket], *, lane: Lane) -> list[Ticket]:
        """Remembers an op that has just been issued; its times are read once its tickets are done."""
        if self.enabled and tickets:
            self._watched.append(_Watched(self.step, self._order, kind, block, lane, time.monotonic(), tuple(tickets)))
            self._order += 1
        return tickets

    def follow(self, op: Op, block: str, end: OpEvent) -> None:
        """Remembers an op that has just been given to its lane."""
        if self.enabled:
            self._followed.append(_Followed(self.step, self._order, op, block, end))
            self._order += 1

    def end_step(self) -> None:
        """One optimizer step is over."""
        self.step += 1
        self._order = 0
        if not self.enabled:
            return
        self._collect()
        oldest = self.step - self._keep
        self._spans = [s for s in self._spans if s.step >= oldest]

    def trace(self) -> Trace:
        """What was recorded so far."""
        self._collect()
        return Trace(spans=tuple(sorted(self._spans, key=lambda s: s.start_s)))

    def close(self) -> None:
        """The engine is about to go: tickets cannot be asked any more."""
        for op in self._watched:
            if op.kind != "FETCH state":  # of an update that nobody hands gradients any more; else UPDATE stands for it
                with suppress(HeteroError):
                    for ticket in op.tickets:
                        ticket.wait()
        self._collect()
        self._watched = []

    def _collect(self) -> None:
        waiting = []
        for op in self._watched:
            times = [ticket.times() for ticket in op.tickets]
            if not all(t.done_ns for t in times):
                waiting.append(op)
                continue
            ran = [t for t in times if t.started_ns]  # an update that was taken back may never have started
            if not ran:
                continue
            start, end = min(t.started_ns for t in ran) / 1e9, max(t.done_ns for t in ran) / 1e9
            moved = sum(t.bytes_read for t in ran), sum(t.bytes_written for t in ran)
            if op.kind in ("UPDATE", "STORE"):
                start = max(start, op.issued_s)
            if op.kind in ("FETCH state", "UPDATE"):
                end = max(t.ready_ns or t.done_ns for t in ran) / 1e9
            self._spans.append(
                Span(
                    step=op.step,
                    name=f"{op.kind} {op.block}",
                    lane=op.lane.value,
                    start_s=start,
                    end_s=max(start, end),
                    num_bytes={"FETCH": moved[0], "FETCH state": moved[0], "UPDATE": 0}.get(op.kind, moved[1]),
                    order=op.order,
                )
            )
        self._watched = waiting
        self._followed = [f for f in self._followed if not self._ended(f)]

    def _ended(self, followed: _Followed) -> bool:
        op, times = followed.op, followed.end.times()
        if times is None:
            return False
        plain = op.payload in (Payload.WEIGHTS, Payload.NONE) or op.kind in (OpKind.UPDATE, OpKind.STORE, OpKind.GRAD)
        self._spans.append(
            Span(
                step=followed.step,
                name=f"{op.kind.value if plain else f'{op.kind.value} {op.payload.value}'} {followed.block}",
                lane=op.lane.value,
                start_s=times[0],
                end_s=times[1],
                num_bytes=op.num_bytes,
                order=followed.order,
            )
        )
        return True
