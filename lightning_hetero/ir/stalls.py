"""Why compute waits, and for what: read off a trace, be it simulated or measured.

[Note: Blame]
What does not start as it is issued waits for an op that it depends on, or for the one before it on its lane. Of all these the
one that ends last is to blame, since without it the wait would have been shorter. Followed back from a wait of compute, the blame
is a chain: compute waits for an UPLOAD, which has waited for a FETCH, which has waited for its turn on the disk. The wait is split
along that chain: an op is given the time from its start on, the one that it waited for the time before. What is left at the
chain's end went by before its first op was issued.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_hetero.ir.trace import WAIT, Span, Trace

_SLACK_S = 1e-4  # clocks of threads and of the engine agree that well: an op may seem to end so late after what waited for it began
_CHAIN = 64  # ops that blame is followed back through


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """One wait of compute.

    Attributes:
        step: The optimizer step.
        at: The anchor that compute could not pass: ``"F model.layers.3"``.
        start_s: When it came there, on the trace's clock.
        seconds: How long.
        waited_for: The op that came last; empty: the time went by in the runtime itself.
        chain: Where the seconds went, latest first: ops with the seconds that each is to blame for; see [Note: Blame].
    """

    step: int
    at: str
    start_s: float
    seconds: float
    waited_for: str
    chain: tuple[tuple[str, float], ...]


def with_reasons(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Fills in :attr:`Span.waited_for` where it is empty, in the order of starts.

    Args:
        spans: Of whole steps: what a span waits for may be in the step before.
    """
    ordered = sorted(spans, key=lambda s: (s.start_s, s.end_s, s.lane, s.name))
    index = _Index(ordered)
    return tuple(s if s.waited_for or s.wait_s <= 0 else replace(s, waited_for=index.reason(s)) for s in ordered)


def stalls(trace: Trace) -> tuple[Stall, ...]:
    """All waits of compute, in order."""
    index = _Index(trace.spans)
    return tuple(index.stall(span) for span in trace.spans if span.is_wait and span.end_s > span.start_s)


def blame(found: Iterable[Stall]) -> dict[str, float]:
    """Seconds of waiting by the op that is waited for, longest first; under the empty name what the runtime itself took."""
    totals: dict[str, float] = {}
    for stall in found:
        totals[stall.waited_for] = totals.get(stall.waited_for, 0.0) + stall.seconds
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def describe(step: int, found: Sequence[Stall], *, most: int = 3) -> str:
    """One line: ``"step 3: compute waited 0.17 s: 0.12 s for UPDATE of model.layers.3, 0.05 s for FETCH of model.layers.4"``.

    Args:
        step: The step.
        found: Stalls, of this step and others.
        most: Ops that are named; the rest is summed up.
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
    """A span's name as people say it: ``"UPDATE of model.layers.3"``."""
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
        """What ended last of what the span waited for, while it did."""
        begin_s, end_s = (span.start_s, span.end_s) if span.is_wait else (span.issued_s or 0.0, span.start_s)
        found = [(min(s.end_s, end_s), s.name) for name in span.after if (s := self._before(name, end_s)) is not None]
        ahead = None if span.is_wait else self._ahead(span, end_s)
        if ahead is not None:
            found.append((ahead.end_s, ahead.name))
        late = [(ended_s, name) for ended_s, name in found if ended_s > begin_s]
        return max(late, key=lambda row: row[0])[1] if late else ""  # of equals what it depends on

    def stall(self, wait: Span) -> Stall:
        """Splits a wait along the chain of those to blame."""
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
        """The latest span of this name that began before a moment; at the moment itself only what takes no time."""
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
