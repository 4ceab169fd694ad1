"""Vector clocks, and memory that remembers who used it: finds uses that nothing orders, whatever
the timing.

An *actor* does one thing after the other: a host thread, a stream, the native engine's queue of one
part. It hands its clock on as it wakes or allows somebody: who *joins* that clock comes after
everything that the actor did before. Two uses of the same bytes by different actors, of which at
least one writes, conflict unless the later one's clock has the earlier one. Sources: Lamport,
"Time, Clocks, and the Ordering of Events in a Distributed System" (1978); the epochs are those of
Flanagan and Freund, "FastTrack" (2009).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

Clock = dict[int, int]
"""By actor: how much of what it did has happened before."""

_numbers = count()


class Actor:
    """Does one thing after the other. ``name`` is for errors."""

    def __init__(self, name: str, *, is_stream: bool = False) -> None:
        self.name, self.is_stream = name, is_stream
        self.number = next(_numbers)
        self.clock: Clock = {self.number: 1}

    def join(self, clock: Mapping[int, int]) -> None:
        """Comes after everything that the clock has."""
        mine = self.clock
        for number, time in clock.items():
            if mine.get(number, 0) < time:
                mine[number] = time

    def hand_on(self) -> Clock:
        """The clock of everything so far; what the actor does from now on is later."""
        handed = dict(self.clock)
        self.clock[self.number] += 1
        return handed

    def knows(self, clock: Mapping[int, int], of: Actor) -> bool:
        """Whether the other actor's part of a clock has happened before."""
        return self.clock.get(of.number, 0) >= clock.get(of.number, 0)


class Use(NamedTuple):
    """Some bytes are read or written."""

    actor: Actor
    time: int  # on the actor's own clock
    name: str
    writes: bool

    def is_before(self, clock: Mapping[int, int]) -> bool:
        return clock.get(self.actor.number, 0) >= self.time

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} by {self.name} on {self.actor.name}"


@dataclass(slots=True)
class _Run:
    """Bytes with the same history: the last write, and by actor the last read since."""

    start: int
    end: int
    write: Use | None = None
    reads: dict[int, Use] = field(default_factory=dict)

    def uses(self) -> list[Use]:
        return [*([] if self.write is None else [self.write]), *self.reads.values()]


class Memory:
    """Addresses and who used them last. Not thread-safe.

    ``conflict`` is told of each pair of uses without an order: the earlier, the later.
    """

    def __init__(self, conflict: Callable[[Use, Use], object]) -> None:
        self._conflict = conflict
        self._starts: list[int] = []
        self._runs: list[_Run] = []

    def use(self, start: int, end: int, use: Use, clock: Mapping[int, int]) -> None:
        """Bytes are used; ``clock`` is the user's."""
        rows = self._cut(start, end)
        for run in rows:
            others = run.uses() if use.writes else [] if run.write is None else [run.write]
            for other in others:
                if not other.is_before(clock):
                    self._conflict(other, use)
        if use.writes:
            self._replace(start, end, [_Run(start, end, use)])
            return
        filled, at = list[_Run](), start
        for run in rows:
            if at < run.start:
                filled.append(_Run(at, run.start, None, {use.actor.number: use}))
            run.reads[use.actor.number] = use
            filled.append(run)
            at = run.end
        if at < end:
            filled.append(_Run(at, end, None, {use.actor.number: use}))
        self._replace(start, end, filled)

    def end(self, start: int, end: int, use: Use, clock: Mapping[int, int], *, matters: Callable[[Use], bool]) -> None:
        """Bytes are freed: uses that matter must have happened before. All are forgotten."""
        for run in self._cut(start, end):
            for other in run.uses():
                if matters(other) and not other.is_before(clock):
                    self._conflict(other, use)
        self._replace(start, end, [])

    def _cut(self, start: int, end: int) -> list[_Run]:
        """The runs of these bytes, none of which reaches beyond them."""
        for at in (start, end):
            index = bisect_right(self._starts, at) - 1
            if index >= 0 and self._runs[index].start < at < self._runs[index].end:
                low = self._runs[index]
                high = _Run(at, low.end, low.write, dict(low.reads))
                low.end = at
                self._starts.insert(index + 1, at)
                self._runs.insert(index + 1, high)
        return self._runs[bisect_left(self._starts, start) : bisect_left(self._starts, end)]

    def _replace(self, start: int, end: int, runs: list[_Run]) -> None:
        where = slice(bisect_left(self._starts, start), bisect_left(self._starts, end))
        self._starts[where] = [run.start for run in runs]
        self._runs[where] = runs
