"""Rates of work alone and beside other work: short repetitions in turn, and the median of them."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

_WARM_SHARE = 0.2  # of a window: until all loads are up to speed
_Step = tuple[float, float, float]  # begin, end, units


class Load:
    """Work of one kind, in steps of some ten milliseconds, for as long as somebody measures.

    Contract: one thread at a time calls :meth:`step`; that of a load with ``foreground`` is the one that measures, since torch's
    CPU threads belong to the thread that calls torch.
    """

    name: str
    foreground: bool = False

    def step(self) -> float:
        """Does one step; returns its units: bytes, elements or FLOP. Steps may overlap, so long as each returns what one took."""
        raise NotImplementedError

    def settle(self) -> None:
        """Waits for what steps have left under way."""

    def close(self) -> None:
        """Gives memory and files back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rates(loads: Sequence[Load], seconds: float) -> dict[str, float]:
    """Runs loads at the same time for a while.

    Only steps count that lie within a window in which all of them run; where a load has no such step, all its steps do.

    Args:
        loads: At most one of them with ``foreground``.
        seconds: How long; each load goes on until all have got there.

    Returns:
        Units a second by the load's name.

    Raises:
        Exception: What a step raised.
    """
    front = [load for load in loads if load.foreground]
    assert len(front) <= 1, "torch's threads belong to one thread"
    steps: dict[str, list[_Step]] = {load.name: [] for load in loads}
    errors: list[BaseException] = []
    end = time.perf_counter() + seconds
    arrived = threading.Event()
    lock, waiting = threading.Lock(), [len(loads)]

    def run(load: Load) -> None:
        try:
            done = False
            while not arrived.is_set():
                begin = time.perf_counter()
                units = load.step()
                now = time.perf_counter()
                steps[load.name].append((begin, now, units))
                if not done and now >= end:
                    done = True
                    with lock:
                        waiting[0] -= 1
                        if not waiting[0]:
                            arrived.set()
            load.settle()
        except BaseException as error:
            errors.append(error)
            arrived.set()

    threads = [threading.Thread(target=run, args=(load,), daemon=True) for load in loads if load not in front]
    for thread in threads:
        thread.start()
    try:
        for load in front:
            run(load)
    finally:
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    first = end - (1 - _WARM_SHARE) * seconds
    return {name: _rate(rows, first, end) for name, rows in steps.items()}


def _rate(rows: Sequence[_Step], first: float, last: float) -> float:
    within = [r for r in rows if r[0] >= first and r[1] <= last] or rows
    return sum(r[2] for r in within) / sum(r[1] - r[0] for r in within)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A median.

    Attributes:
        value: It.
        spread: Largest minus smallest, over the median.
        repetitions: Of how many it is.
    """

    value: float
    spread: float
    repetitions: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Measured:
        """The median of values that are not negative."""
        rows = list(values)
        middle = statistics.median(rows)
        return cls(value=middle, spread=(max(rows) - min(rows)) / middle if middle else 0.0, repetitions=len(rows))

    def __str__(self) -> str:
        return f"median of {self.repetitions} repetitions, spread {100 * self.spread:.0f} %"


Round = Mapping[frozenset[str], Mapping[str, float]]


def rounds(experiments: Sequence[Sequence[Load]], *, seconds: float, repetitions: int) -> list[Round]:
    """Runs every experiment once a round, so that a machine that drifts slows all of them alike; the first round is dropped.

    Args:
        experiments: Loads that run at the same time.
        seconds: For everything together; an experiment with several loads, which varies more, gets twice the time of one load.
        repetitions: Rounds that count; the dropped one is half as long.

    Returns:
        For each round the rates by the names of the loads that ran together.
    """
    shares = [min(2, len(loads)) for loads in experiments]
    each = seconds / (sum(shares) * (repetitions + 0.5))
    out: list[Round] = []
    for number in range(repetitions + 1):
        window = each if number else each / 2
        done = {
            frozenset(load.name for load in loads): rates(loads, share * window)
            for loads, share in zip(experiments, shares, strict=True)
        }
        if number:
            out.append(done)
    return out


def alone(results: Sequence[Round], name: str) -> Measured:
    """The rate of one load with nothing beside it."""
    return Measured.of(done[frozenset({name})][name] for done in results)


def slowdown(results: Sequence[Round], mine: frozenset[str], others: frozenset[str]) -> Measured:
    """How many times longer loads take beside others; at least 1.

    Loads that belong together, such as reads and writes, count by the sum of what each reaches of its own rate alone.
    """
    return Measured.of(max(1.0, progress(done, mine, mine) / progress(done, mine, mine | others)) for done in results)


def progress(done: Round, mine: frozenset[str], running: frozenset[str]) -> float:
    """The sum over ``mine`` of the rate while ``running`` run, over that alone: 1 for one load, 2 for two that do not disturb."""
    return sum(done[running][name] / done[frozenset({name})][name] for name in mine)
