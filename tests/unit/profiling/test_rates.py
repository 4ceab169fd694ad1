"""Rates of loads that run at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import psutil
import pytest
from support.profiling import COMPUTE, DISK

from lightning_hetero.profiling import hardware, timing
from lightning_hetero.profiling.timing import Load, Measured, alone, progress, rates, rounds, slowdown


class _Clock(threading.local):
    """Every thread has a time of its own, which only its steps advance: what else the machine does
    cannot be seen.
    """

    now_s = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(timing, "now_s", lambda: clock.now_s)
    return clock


class _Sleeper(Load):
    def __init__(self, clock: _Clock, name: str, step_s: float, *, foreground: bool = False, fails_at: int = 0) -> None:
        self.clock, self.name, self.foreground = clock, name, foreground
        self.step_s, self.fails_at = step_s, fails_at
        self.threads: set[threading.Thread] = set()
        self.steps = 0
        self.settled = 0

    def step(self) -> float:
        self.threads.add(threading.current_thread())
        self.steps += 1
        if self.steps == self.fails_at:
            raise OSError("broken")
        self.clock.now_s += self.step_s
        return 5.0

    def settle(self) -> None:
        self.settled += 1


def test_a_rate_is_units_over_the_time_that_they_took(clock: _Clock) -> None:
    got = rates([_Sleeper(clock, "a", 0.01), _Sleeper(clock, "b", 0.02, foreground=True)], 0.3)
    assert got["a"] == pytest.approx(5 / 0.01)
    assert got["b"] == pytest.approx(5 / 0.02)


def test_a_step_longer_than_the_window_counts_all_the_same(clock: _Clock) -> None:
    went_on = threading.Event()

    class Slow(_Sleeper):
        def step(self) -> float:
            assert went_on.wait(60), "the quick load has to go on beside the slow one"
            return super().step()

    class Quick(_Sleeper):
        def step(self) -> float:
            if clock.now_s > 0.15:
                went_on.set()
            return super().step()

    got = rates([Slow(clock, "slow", 0.2), Quick(clock, "quick", 0.01)], 0.05)
    assert got["slow"] == pytest.approx(5 / 0.2)


def test_loads_with_torchs_threads_run_where_they_are_measured(clock: _Clock) -> None:
    front, back = _Sleeper(clock, "front", 0.01, foreground=True), _Sleeper(clock, "back", 0.01)
    rates([back, front], 0.05)
    assert front.threads == {threading.current_thread()}
    assert threading.current_thread() not in back.threads
    assert (front.settled, back.settled) == (1, 1)


def test_an_error_of_a_load_ends_the_others_and_is_raised(clock: _Clock) -> None:
    healthy, broken = _Sleeper(clock, "healthy", 0.01, foreground=True), _Sleeper(clock, "broken", 0.01, fails_at=3)
    with pytest.raises(OSError, match="broken"):
        rates([healthy, broken], 1e9)  # more steps than anybody waits for


def test_a_load_alone_runs_once_before_it_counts(clock: _Clock) -> None:
    load = _Sleeper(clock, "a", 0.005, foreground=True)
    results = rounds([[load]], seconds=1.0, repetitions=3)
    assert load.settled == 1 + len(results) >= 3
    assert alone(results, "a").repetitions == len(results)


def test_rounds_end_in_time_but_for_the_first(clock: _Clock) -> None:
    slow = _Sleeper(clock, "a", 0.5, foreground=True)
    assert len(rounds([[slow]], seconds=0.2, repetitions=5)) == 1
    assert len(rounds([[slow]], seconds=2.2, repetitions=4)) == 3
    assert len(rounds([[slow]], seconds=99.0, repetitions=5)) == 5


@dataclass
class _Cpu:
    user: float
    nice: float = 0.0
    system: float = 0.0
    idle: float = 0.0
    iowait: float = 0.0
    steal: float = 0.0
    guest: float = 0.0


@dataclass
class _Counters:
    """The counters of a machine with four CPUs. This process may use CPUs 1 and 2."""

    now_s: float = 100.0
    own_user_s: float = 7.0
    cpus: list[_Cpu] = field(default_factory=lambda: [_Cpu(user=50.0 + i) for i in range(4)])


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> _Counters:
    counters = _Counters()
    monkeypatch.setattr(timing, "now_s", lambda: counters.now_s)
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [replace(cpu) for cpu in counters.cpus])
    monkeypatch.setattr(os, "times", lambda: SimpleNamespace(user=counters.own_user_s))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2})
    return counters


@pytest.mark.parametrize("kind", ["user", "nice", "steal"])
def test_cpu_time_of_other_processes_is_seen(counters: _Counters, kind: str) -> None:
    neighbours = timing.Neighbours()
    counters.now_s += 10
    setattr(counters.cpus[1], kind, getattr(counters.cpus[1], kind) + 4)
    setattr(counters.cpus[2], kind, getattr(counters.cpus[2], kind) + 1)
    assert neighbours.share() == pytest.approx(5 / (10 * 2))


def test_own_cpu_time_kernel_time_and_other_cpus_do_not_count(counters: _Counters) -> None:
    neighbours = timing.Neighbours()
    counters.now_s += 10
    counters.cpus[1].user += 6
    counters.own_user_s += 6
    for kind in ("system", "idle", "iowait"):
        setattr(counters.cpus[2], kind, 9.0)
    counters.cpus[2].user += 2
    counters.cpus[2].guest += 2  # user time includes it
    counters.cpus[0].user += 8
    assert neighbours.share() == pytest.approx(2 / (10 * 2))


@pytest.mark.parametrize(("used", "share"), [(25.0, 1.0), (-1.0, 0.0)])
def test_a_share_is_between_none_and_all(counters: _Counters, used: float, share: float) -> None:
    neighbours = timing.Neighbours()
    assert neighbours.share() == 0  # no time has passed
    counters.now_s += 10
    counters.cpus[1].user += used
    assert neighbours.share() == share


def test_this_machine_has_the_counters() -> None:
    every = psutil.cpu_times(percpu=True)
    assert any(cpu < len(every) for cpu in os.sched_getaffinity(0))
    for cpu in every:
        assert min(cpu.user, cpu.nice, cpu.steal) >= 0
    assert os.times().user > 0
    assert 0 <= timing.Neighbours().share() <= 1


def test_loads_together_get_twice_the_time_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    windows: list[tuple[int, float]] = []

    def noted(together: Sequence[Load], seconds: float) -> dict[str, float]:
        windows.append((len(together), seconds))
        return {}

    monkeypatch.setattr(timing, "rates", noted)
    a, b, c = (_Sleeper(_Clock(), name, 0.0) for name in "abc")
    rounds([[a], [a, b], [a, b, c]], seconds=10.0, repetitions=2)
    assert sum(seconds for _, seconds in windows) == pytest.approx(10)
    each = 10 / 10.5
    assert windows == [(1, each / 2), *[(1, each), (2, 2 * each), (3, 2 * each)] * 2]


def test_a_median_says_of_how_many_and_how_far_apart() -> None:
    found = Measured.of([1.0, 4.0, 2.0])
    assert (found.value, found.repetitions, found.spread) == (2.0, 3, 1.5)
    assert str(found) == "median of 3 repetitions, spread 150 %"
    assert Measured.of([0.0, 0.0]).spread == 0


def _round(together: dict[str, float], beside: dict[str, float]) -> timing.Round:
    return {
        frozenset({"read"}): {"read": 2.0},
        frozenset({"write"}): {"write": 4.0},
        COMPUTE: {"compute": 10.0},
        DISK: together,
        DISK | COMPUTE: beside,
    }


def test_reads_and_writes_that_share_a_disk_reach_one_together() -> None:
    done = _round({"read": 1.0, "write": 2.0}, {})
    assert progress(done, DISK, DISK) == 1.0
    assert progress(_round({"read": 2.0, "write": 4.0}, {}), DISK, DISK) == 2.0


def test_a_slowdown_compares_within_each_round_and_is_at_least_one() -> None:
    beside = {"read": 0.5, "write": 1.0, "compute": 8.0}
    results = [_round({"read": 1.0, "write": 2.0}, beside), _round({"read": 1.0, "write": 2.0}, beside)]
    assert slowdown(results, DISK, COMPUTE).value == 2.0
    assert slowdown(results, COMPUTE, DISK).value == 1.25
    faster = [_round({"read": 1.0, "write": 2.0}, {"read": 2.0, "write": 4.0, "compute": 11.0})]
    assert slowdown(faster, DISK, COMPUTE).value == slowdown(faster, COMPUTE, DISK).value == 1.0


def test_experiments_are_each_load_each_kind_each_pair_and_all() -> None:
    update, copy = frozenset({"update"}), frozenset({"h2d", "d2h"})
    names = ["compute", "update", "read", "write", "h2d", "d2h", "memory"]
    made = hardware._experiments(names, [COMPUTE, update, DISK, copy])
    assert [len(m) for m in made[: len(names)]] == [1] * len(names)
    assert {DISK, copy, COMPUTE | update, COMPUTE | DISK, update | copy, DISK | copy} <= set(made)
    assert made[-2:] == [update | DISK | copy, COMPUTE | update | DISK | copy]
    assert len(set(made)) == len(made)
