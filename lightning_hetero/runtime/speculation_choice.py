"""Chooses whether a step speculates, from measured step times.

[Note: Is speculation worth it]
Steps are of three kinds: they keep what they speculated, discard it, or wait for the verdict. What
a step costs beyond its backward comes after its verdict, while the next forward runs. So the time
from its verdict to the next one counts, if the next step speculates or waits like this one: the
median of the latest steps of a kind, which a validation or a checkpoint in between does not move.

The three medians give the break-even discard rate, at which speculating and waiting take equally
long (``ir.step_seconds``). Until they are known a given rate holds: the simulator's, if there is
one. Once several verdicts have discarded, a few steps wait and a few speculate, to measure what is
missing. While steps wait, a few speculate again, at first after ``_PATIENCE`` steps and each time
after twice as many: the first measurements may have met something else, such as a cold disk.

No choice changes a bit of the result.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from enum import Enum

from lightning_hetero.clock import now_s
from lightning_hetero.ir.step_seconds import StepSeconds

_GIVEN = 0.25  # before anything is known: a discard costs three times what a kept step saves
_MEMORY = 16  # verdicts that the discard rate remembers
_LATEST = 8  # steps of a kind whose median counts
_ENOUGH = 3  # so many make a median
_TRIES = 4 * _ENOUGH  # in a row, to see some verdicts of either kind
_PATIENCE = 128


class _Kind(Enum):
    KEPT = "kept"
    REDONE = "redone"
    WAITED = "waited"


class Worth:
    """Chooses for each step whether it speculates; see [Note: Is speculation worth it]."""

    fixed: float | None = None  # a break-even rate that holds whatever is measured

    def __init__(self, clock: Callable[[], float] = now_s) -> None:
        self.given = _GIVEN  # the break-even discard rate while too little has been measured
        self.discard_rate = 0.0  # share of the latest verdicts that discarded, or would have
        self._clock = clock
        self._patience = _PATIENCE
        self.forget()

    def forget(self) -> None:
        """Forgets step times: there is another plan."""
        self._seconds: dict[_Kind, deque[float]] = {kind: deque(maxlen=_LATEST) for kind in _Kind}
        self._last: tuple[_Kind, float] | None = None
        self._waited = 0  # steps in a row
        self._tries = _TRIES  # steps that still speculate, once waiting has been measured

    @property
    def measured(self) -> StepSeconds | None:
        """The medians; ``None`` while too little has been measured."""
        if any(len(seconds) < _ENOUGH for seconds in self._seconds.values()):
            return None
        kept, redone, waited = (statistics.median(self._seconds[kind]) for kind in _Kind)
        return StepSeconds(kept_s=kept, redone_s=redone, waiting_s=waited)

    @property
    def _has_waited(self) -> bool:
        return len(self._seconds[_Kind.WAITED]) >= _ENOUGH

    @property
    def break_even(self) -> float:
        """The discard rate up to which steps speculate."""
        if self.fixed is not None:
            return self.fixed
        found = self.measured
        return self.given if found is None else found.break_even

    @property
    def tries(self) -> bool:
        """Whether the next step speculates."""
        if self.fixed is None:
            if not self._has_waited and self.discard_rate > 1 / _MEMORY:
                return False
            if self._tries:
                return True
        return self.discard_rate <= self.break_even

    def verdict(self, *, tried: bool, discarded: bool) -> None:
        """A verdict: the step ``tried`` early updates, and ``discarded`` them or would have."""
        now = self._clock()
        self.discard_rate += (discarded - self.discard_rate) / _MEMORY
        if self._last is not None:
            kind, since = self._last
            if (kind is not _Kind.WAITED) == tried:
                self._seconds[kind].append(now - since)
        self._last = ((_Kind.REDONE if discarded else _Kind.KEPT) if tried else _Kind.WAITED), now
        if self._has_waited:
            self._tries = max(0, self._tries - tried)
        self._waited = 0 if tried else self._waited + 1
        if self._waited >= self._patience:
            self._patience *= 2
            self._waited, self._tries = 0, _TRIES
            for kind in (_Kind.KEPT, _Kind.REDONE):  # new ones soon outnumber these
                self._seconds[kind] = deque(list(self._seconds[kind])[-_ENOUGH:], maxlen=_LATEST)
