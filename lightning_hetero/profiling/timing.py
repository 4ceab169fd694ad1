"""Rates of work alone and beside other work: medians of short repetitions in turns."""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from lightning_hetero.clock import now_s

_WARM_SHARE = 0.2  # of a window, until all loads have reached their speed
_Step = tuple[float, float, float]  # begin, end, units


class Load:
    """Work of one kind, in steps of tens of milliseconds.

    Contract: one thread at a time calls :meth:`step`. For a load with ``foreground`` it is the
    measuring thread, because torch's CPU threads belong to the thread that calls torch.
    """

    name: str
    foreground: bool = False

    def step(self) -> float:
        """Does one step and returns its units: bytes, elements or FLOP. Steps may overlap."""
        raise NotImplementedError

    def settle(self) -> None:
        """Waits for work of steps that is still in flight."""

    def close(self) -> None:
        """Frees memory and files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rates(loads: Sequence[Load], seconds: float) -> dict[str, float]:
    """Runs loads at the same time for a while.

    Only steps within a window count in which all loads run; if a load has no such step, all its
    steps count.

    Args:
        loads: The loads, at most one of them with ``foreground``.
        seconds: The duration; each load continues until all have reached it.

    Returns:
        Units per second by the load's name.

    Raises:
        Exception: A step raised it.
    """
    front = [load for load in loads if load.foreground]
    assert len(front) <= 1, "torch's threads belong to one thread"
    steps: dict[str, list[_Step]] = {load.name: [] for load in loads}
    errors: list[BaseException] = []
    end = now_s() + seconds
    arrived = threading.Event()
    lock, waiting = threading.Lock(), [len(loads)]

    def run(load: Load) -> None:
        try:
            done = False
            while not arrived.is_set():
                begin = now_s()
                units = load.step()
                now = now_s()
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
        value: The median.
        spread: Largest minus smallest value, divided by the median.
        repetitions: The number of values.
        noise: Median distance of a value from the median, divided by the median.
    """

    value: float
    spread: float
    repetitions: int
    noise: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Measured:
        """The median of values that are not negative."""
        rows = list(values)
        middle = statistics.median(rows)
        spread, away = max(rows) - min(rows), statistics.median(abs(row - middle) for row in rows)
        relative = 1 / middle if middle else 0.0
        return cls(value=middle, spread=spread * relative, repetitions=len(rows), noise=away * relative)

    def __str__(self) -> str:
        return f"median of {self.repetitions} repetitions, spread {100 * self.spread:.0f} %"


class Neighbours:
    """CPU time of other processes since the start, on the CPUs that this process may use."""

    def __init__(self) -> None:
        self._begin = self._now()

    def share(self) -> float:
        """The share of the CPUs' time since the start, 0 to 1.

        Kernel time does not count: disk I/O runs there.
        """
        begin, end = self._begin, self._now()
        passed_s = (end[0] - begin[0]) * len(os.sched_getaffinity(0))
        return min(1.0, max(0.0, (end[1] - begin[1]) / passed_s)) if passed_s > 0 else 0.0

    @staticmethod
    def _now() -> tuple[float, float]:
        import psutil  # takes long to import, and only measurements ask

        every = psutil.cpu_times(percpu=True)
        mine = [every[cpu] for cpu in os.sched_getaffinity(0) if cpu < len(every)]
        used = sum(cpu.user + cpu.nice + cpu.steal for cpu in mine)  # user includes guest time
        return now_s(), used - os.times().user


Round = Mapping[frozenset[str], Mapping[str, float]]


def rounds(experiments: Sequence[Sequence[Load]], *, seconds: float, repetitions: int) -> list[Round]:
    """Runs every experiment once per round, so that drift of the machine affects all of them.

    An experiment with a single load first runs once without counting, to touch its memory.

    Args:
        experiments: Loads that run at the same time.
        seconds: Total time; an experiment with several loads, which varies more, gets twice the
            time of one load. If steps take longer, there are fewer rounds, but at least one.
        repetitions: Rounds.

    Returns:
        For each round the rates by the names of the loads that ran together.
    """
    shares = [min(2, len(loads)) for loads in experiments]
    warm = [loads for loads in experiments if len(loads) == 1]
    each = seconds / (sum(shares) * repetitions + len(warm) / 2)
    begin_s = now_s()
    for loads in warm:
        rates(loads, each / 2)
    out: list[Round] = []
    round_s = 0.0
    while len(out) < repetitions and (not out or now_s() + round_s <= begin_s + seconds):
        round_begin_s = now_s()
        out.append(
            {
                frozenset(load.name for load in loads): rates(loads, share * each)
                for loads, share in zip(experiments, shares, strict=True)
            }
        )
        round_s = now_s() - round_begin_s
    return out


def alone(results: Sequence[Round], name: str) -> Measured:
    """The rate of one load without other work."""
    return Measured.of(done[frozenset({name})][name] for done in results)


def slowdown(results: Sequence[Round], mine: frozenset[str], others: frozenset[str]) -> Measured:
    """The factor by which other loads slow loads down, at least 1.

    Loads that belong together, such as reads and writes, count by the sum of the shares that each
    reaches of its rate alone.
    """
    return Measured.of(max(1.0, progress(done, mine, mine) / progress(done, mine, mine | others)) for done in results)


def progress(done: Round, mine: frozenset[str], running: frozenset[str]) -> float:
    """The sum over ``mine`` of each rate beside ``running``, divided by its rate alone."""
    return sum(done[running][name] / done[frozenset({name})][name] for name in mine)
