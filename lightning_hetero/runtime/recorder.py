"""Records what happened as a :class:`~lightning_hetero.ir.trace.Trace`; costs nothing while it is off."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_hetero._native import Ticket
from lightning_hetero.ir.trace import Span, Trace

_LANES = {"FETCH": "disk_read", "RELEASE": "compute", "UPDATE": "cpu", "COMMIT": "disk_write"}


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
        self._watched: list[tuple[int, str, str, Ticket]] = []

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

    def watch(self, kind: str, block: str, tickets: list[Ticket]) -> list[Ticket]:
        """Remembers tickets of an op; their times are read once they are done."""
        if self.enabled:
            self._watched += [(self.step, kind, block, t) for t in tickets]
        return tickets

    def end_step(self) -> None:
        """One optimizer step is over."""
        self.step += 1
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
        self._collect()
        self._watched = []

    def _collect(self) -> None:
        waiting = []
        for step, kind, block, ticket in self._watched:
            times = ticket.times()
            if not times.done_ns:
                waiting.append((step, kind, block, ticket))
                continue
            start = (times.started_ns or times.submitted_ns) / 1e9
            moved = times.bytes_read + times.bytes_written
            self._spans.append(
                Span(
                    step=step,
                    name=f"{kind} {block}",
                    lane=_LANES[kind],
                    start_s=start,
                    end_s=times.done_ns / 1e9,
                    num_bytes=moved,
                )
            )
        self._watched = waiting
