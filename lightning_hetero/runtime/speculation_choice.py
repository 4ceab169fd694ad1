"""Whether updates before the verdict are worth trying: learned from what steps take.

[Note: Worth of trying]
Three kinds of steps are told apart: those that tried and whose verdict kept it, those that tried and whose verdict discarded it,
and those that waited for the verdict. What a step costs beyond its backward comes after its verdict, while the next forward runs.
So its seconds are those from its verdict to the next one, and count where the next step goes the same way, trying or waiting. Of
each kind the median of the latest ones counts, which a validation or a checkpoint in between does not move.

From the three follows the share of discards at which trying and waiting take equally long (``ir.step_seconds``). Until they are
known a given one holds: the simulator's, if there is one. Once several verdicts have discarded, a few steps wait and a few try, to
measure what is missing; before, nothing is lost by trying. Where steps wait, a few try again after many, at first after
``_PATIENCE`` of them and each time after twice as many: what was measured first may have been something else, such as a cold disk.

No choice changes a bit of the result.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from enum import Enum

from lightning_hetero.clock import now_s
from lightning_hetero.ir.step_seconds import StepSeconds

_GIVEN = 0.25  # where nothing is known: a discard costs three times what a kept step saves
_MEMORY = 16  # verdicts that the share of discards remembers
_LATEST = 8  # steps of a kind whose median counts
_ENOUGH = 3  # so many make a median
_TRIES = 4 * _ENOUGH  # in a row, to see some verdicts of either kind
_PATIENCE = 128


class Kind(Enum):
    """What a step did, and what its verdict was."""

    KEPT = "kept"
    REDONE = "redone"
    WAITED = "waited"


class Worth:
    """Chooses, step by step, between trying and waiting; see [Note: Worth of trying].

    Args:
        clock: Seconds; only differences count.

    Attributes:
        given: The share of discards up to which trying pays as long as too little has been measured.
        fixed: If not ``None``, the one that holds whatever is measured.
        discard_rate: Share of the latest verdicts that discarded, or would have.
    """

    fixed: float | None = None

    def __init__(self, clock: Callable[[], float] = now_s) -> None:
        self.given = _GIVEN
        self.discard_rate = 0.0
        self._clock = clock
        self._patience = _PATIENCE
        self.forget()

    def forget(self) -> None:
        """Steps are others from now on: there is another plan."""
        self._seconds: dict[Kind, deque[float]] = {kind: deque(maxlen=_LATEST) for kind in Kind}
        self._last: tuple[Kind, float] | None = None
        self._waited = 0  # steps in a row
        self._tries = _TRIES  # steps that try whatever is known, once waiting has been measured

    @property
    def measured(self) -> StepSeconds | None:
        """Medians of what was measured; ``None`` as long as there is too little of it."""
        if any(len(seconds) < _ENOUGH for seconds in self._seconds.values()):
            return None
        kept, redone, waited = (statistics.median(self._seconds[kind]) for kind in Kind)
        return StepSeconds(kept_s=kept, redone_s=redone, waiting_s=waited)

    @property
    def _has_waited(self) -> bool:
        return len(self._seconds[Kind.WAITED]) >= _ENOUGH

    @property
    def break_even(self) -> float:
        """The share of discards up to which steps try."""
        if self.fixed is not None:
            return self.fixed
        found = self.measured
        return self.given if found is None else found.break_even

    @property
    def tries(self) -> bool:
        """Whether the next step shall try."""
        if self.fixed is None:
            if not self._has_waited and self.discard_rate > 1 / _MEMORY:
                return False
            if self._tries:
                return True
        return self.discard_rate <= self.break_even

    def verdict(self, *, tried: bool, discarded: bool) -> None:
        """One more verdict, of a step that tried or waited; ``discarded``: what it tried, or would have tried, was wrong."""
        now = self._clock()
        self.discard_rate += (discarded - self.discard_rate) / _MEMORY
        if self._last is not None:
            kind, since = self._last
            if (kind is not Kind.WAITED) == tried:
                self._seconds[kind].append(now - since)
        self._last = ((Kind.REDONE if discarded else Kind.KEPT) if tried else Kind.WAITED), now
        if self._has_waited:
            self._tries = max(0, self._tries - tried)
        self._waited = 0 if tried else self._waited + 1
        if self._waited >= self._patience:
            self._patience *= 2
            self._waited, self._tries = 0, _TRIES
            for kind in (Kind.KEPT, Kind.REDONE):  # new ones soon outnumber these
                self._seconds[kind] = deque(list(self._seconds[kind])[-_ENOUGH:], maxlen=_LATEST)
