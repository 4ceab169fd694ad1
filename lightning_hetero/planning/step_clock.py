"""The time that steps take, by the clock of the device that computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_hetero.lanes import Moment

_Intervals = list[tuple[Moment, Moment]]


class StepClock:
    """Seconds of optimizer steps, without what comes between their batches, such as loading.

    The host may be ahead of the device by a step, so the time of a step may be known a step later.

    ``now`` returns the moment that compute has come to.
    """

    def __init__(self, now: Callable[[], Moment]) -> None:
        self._now = now
        self._begin = now()
        self._current: _Intervals = []  # of the step under way
        self._ended: deque[_Intervals] = deque()  # steps whose time has not been asked for
        self.last_s: float | None = None  # of the last step that was taken
        self.steps = 0  # that have ended

    def batch_begins(self) -> None:
        """The time of a step goes on."""
        self._begin = self._now()

    def batch_ended(self, *, stepped: bool) -> None:
        """A batch is over; ``stepped``: with it a step."""
        self._current.append((self._begin, self._now()))
        if stepped:
            self.steps += 1
            self._ended.append(self._current)
            self._current = []

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The time in the context does not count."""
        self._current.append((self._begin, self._now()))
        try:
            yield
        finally:
            self._begin = self._now()

    def take(self) -> float | None:
        """Seconds of the oldest step not taken; ``None`` if none has ended on the device."""
        seconds = 0.0
        for begin, end in self._ended[0] if self._ended else ():
            begin_s, end_s = begin(), end()
            if begin_s is None or end_s is None:
                return None
            seconds += end_s - begin_s
        if not self._ended:
            return None
        self._ended.popleft()
        self.last_s = seconds
        return seconds

    def forget(self) -> None:
        """Drops the steps whose time is not known: another plan is in force."""
        self._ended.clear()
