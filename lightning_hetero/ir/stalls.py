"""The waits of compute and their causes, computed from a simulated or measured trace.

[Note: Blame]
An op that does not start when it is issued waits for an op that it depends on, or for
the op before it on its lane. The one of these that ends last is to blame: without it the wait would
have been shorter. Followed back from a wait of compute, the blame is a chain: compute waits for an
UPLOAD, which waited for a FETCH, which waited for its turn on the disk. The wait is split along
that chain: an op gets the time from its start on, and the op that it waited for gets the time
before. The rest at the chain's end passed before its first op was issued.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_hetero.ir.trace import WAIT, Span, Trace

_SLACK_S = 1e-4  # agreement of the clocks of threads and engine: an op may seem to end this late after its waiter began
_CHAIN = 64  # most ops of a chain of blame


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """One wait of compute.

    Attributes:
        step: The optimizer step.
        at: The anchor that compute could not pass: ``"F model.layers.3"``.
        start_s: When compute reached it, on the trace's clock.
        seconds: The duration.
        waited_for: The op that ended last; empty: the runtime itself took the time.
        chain: The ops to blame, latest first, each with its seconds; see [Note: Blame].
    """

    step: int
    at: str
    start_s: float
    seconds: float
    waited_for: str
    chain: tuple[tuple[str, float], ...]


def with_reasons(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Fills in every empty :attr:`Span.waited_for`, in the order of starts.

    Args:
        spans: Spans of whole steps; a span may wait for one of the step before.
    """
    ordered = sorted(spans, key=lambda s: (s.start_s, s.end_s, s.lane, s.name))
    index = _Index(ordered)
    return tuple(s if s.waited_for or s.wait_s <= 0 else replace(s, waited_for=index.reason(s)) for s in ordered)


def stalls(trace: Trace) -> tuple[Stall, ...]:
    """All waits of compute, in order."""
    index = _Index(trace.spans)
    return tuple(index.stall(span) for span in trace.spans if span.is_wait and span.end_s > span.start_s)


def blame(found: Iterable[Stall]) -> dict[str, float]:
    """Seconds of waiting by the op that is waited for, longest first.

    The empty name is the runtime itself.
    """
    totals: dict[str, float] = {}
    for stall in found:
        totals[stall.waited_for] = totals.get(stall.waited_for, 0.0) + stall.seconds
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def describe(step: int, found: Sequence[Stall], *, most: int = 3) -> str:
    """One line about a step.

    For example ``"step 3: compute waited 0.17 s: 0.12 s for UPDATE of model.layers.3, 0.05 s for
    FETCH of model.layers.4"``.

    Args:
        step: The step.
        found: Stalls, of this step and others.
        most: The number of ops to name; the others are summed up.
    """
    of_step = [stall for stall in found if stall.step == step]
    total_s = sum(stall.seconds for stall in of_step)
    if not total_s:
        return f"step {step}: compute waited for nothing"
    ranked = list(blame(of_step).items())
    parts = [f"{seconds:.3g} s for {op_of_block(name)}" for name, seconds in ranked[:most]]
    if rest := sum(seconds for _, seconds in ranked[most:]):
        parts.append(f"{rest:.3g} s for {len(ranked) - most} more")
    return f"step {step}: compute waited {total_s:.3g} s: {', '.join(parts)}"


def op_of_block(name: str) -> str:
    """A span's name in words: ``"UPDATE of model.layers.3"``."""
    what, _, block = name.rpartition(" ")
    return f"{what} of {block}" if what and block else name.strip() or "the runtime"


class _Index:
    """Finds spans by name and by lane."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._named: dict[str, list[Span]] = {}
        self._lanes: dict[str, list[Span]] = {}
        for span in sorted(spans, key=lambda s: s.start_s):
            if not span.is_wait:
                self._named.setdefault(span.name, []).append(span)
                if span.order >= 0:
                    self._lanes.setdefault(span.lane, []).append(span)
        for row in self._lanes.values():
            row.sort(key=lambda s: s.end_s)
        self._starts: Mapping[str, list[float]] = {name: [s.start_s for s in row] for name, row in self._named.items()}
        self._ends: Mapping[str, list[float]] = {lane: [s.end_s for s in row] for lane, row in self._lanes.items()}

    def reason(self, span: Span) -> str:
        """The op that ended last during the span's wait, of those it waited for."""
        begin_s, end_s = (span.start_s, span.end_s) if span.is_wait else (span.issued_s or 0.0, span.start_s)
        found = [(min(s.end_s, end_s), s.name) for name in span.after if (s := self._before(name, end_s)) is not None]
        ahead = None if span.is_wait else self._ahead(span, end_s)
        if ahead is not None:
            found.append((ahead.end_s, ahead.name))
        late = [(ended_s, name) for ended_s, name in found if ended_s > begin_s]
        return max(late, key=lambda row: row[0])[1] if late else ""  # of equals, the one that it depends on

    def stall(self, wait: Span) -> Stall:
        """Splits a wait along the chain of blame."""
        parts: list[tuple[str, float]] = []
        left_s, name = wait.end_s, wait.waited_for
        for _ in range(_CHAIN):
            span = self._before(name, left_s) if left_s > wait.start_s else None
            if span is None:
                break
            since_s = max(wait.start_s, span.start_s)
            if left_s > since_s:
                parts.append((name, left_s - since_s))
            left_s, name = since_s, span.waited_for
        if left_s > wait.start_s:
            parts.append(("", left_s - wait.start_s))
        return Stall(
            step=wait.step, at=wait.name.removeprefix(WAIT), start_s=wait.start_s, seconds=wait.end_s - wait.start_s,
            waited_for=wait.waited_for, chain=tuple(parts),
        )  # fmt: skip

    def _before(self, name: str, at_s: float) -> Span | None:
        """The latest span of this name that began before a moment.

        At the moment itself only spans without duration.
        """
        row = self._named.get(name, [])
        place = bisect_right(self._starts.get(name, []), at_s) - 1
        while place >= 0 and row[place].start_s >= at_s and row[place].end_s > row[place].start_s:
            place -= 1
        return row[place] if place >= 0 else None

    def _ahead(self, span: Span, at_s: float) -> Span | None:
        """The op on the span's lane that ended last before a moment."""
        row = self._lanes.get(span.lane, [])
        place = bisect_right(self._ends.get(span.lane, []), at_s + _SLACK_S) - 1
        while place >= 0 and row[place].start_s >= span.start_s:
            place -= 1
        return row[place] if place >= 0 else None
