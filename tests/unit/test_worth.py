"""Whether to try updates before the verdict, learned on machines whose steps take set times by a
virtual clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from lightning_hetero.ir.step_seconds import StepSeconds
from lightning_hetero.runtime.speculation_choice import Worth


class Machine:
    """What follows a verdict takes as long as ``times`` says; now and then a validation follows
    too.

    Args:
        times: Seconds by what the step did.
        rate: Share of verdicts that discard.
    """

    def __init__(self, times: StepSeconds, rate: float, *, seed: int = 0, given: float | None = None) -> None:
        self.now, self.times, self.rate = 0.0, times, rate
        self.tried: list[bool] = []
        self.worth = Worth(lambda: self.now)
        self.worth.given = self.worth.given if given is None else given
        self._random = random.Random(seed)

    def run(self, steps: int) -> float:
        """Seconds of so many steps, validations left out."""
        took = 0.0
        for step in range(steps):
            tried, discarded = self.worth.tries, self._random.random() < self.rate
            self.worth.verdict(tried=tried, discarded=discarded)
            took += (self.times.redone_s if discarded else self.times.kept_s) if tried else self.times.waiting_s
            self.now += (self.times.redone_s if discarded else self.times.kept_s) if tried else self.times.waiting_s
            self.now += 100.0 * (step % 10 == 9)
            self.tried.append(tried)
        return took


GPT2_ON_DISK = StepSeconds(kept_s=1.0, redone_s=1.24, waiting_s=1.21)  # at a rate of 50 % trying was measured to be faster
DEAR = StepSeconds(kept_s=1.0, redone_s=3.0, waiting_s=1.05)


@pytest.mark.parametrize(
    ("times", "rate"),
    [(GPT2_ON_DISK, 0.5), (GPT2_ON_DISK, 1.0), (GPT2_ON_DISK, 0.1), (DEAR, 0.1), (DEAR, 0.5), (DEAR, 1.0)],
)
def test_the_faster_way_is_found(times: StepSeconds, rate: float) -> None:
    machine = Machine(times, rate)
    machine.run(60)
    best = min(times.expected_s(rate), times.waiting_s)
    assert machine.run(600) <= 600 * best * 1.1, "waiting, it tries again now and then"
    tries = sum(machine.tried[-600:]) / 600
    assert tries > 0.9 if times.expected_s(rate) < times.waiting_s else tries < 0.15


def test_given_seconds_hold_until_enough_is_measured() -> None:
    for given, tries in ((0.25, False), (0.6, True)):
        machine = Machine(GPT2_ON_DISK, 0.0, given=given)
        machine.worth.discard_rate = 0.5
        for _ in range(20):
            machine.worth.verdict(tried=False, discarded=True)  # nothing of what trying takes is known
            machine.worth.discard_rate = 0.5
        machine.worth._tries = 0
        assert machine.worth.measured is None
        assert machine.worth.tries is tries


def test_without_discards_no_step_waits() -> None:
    machine = Machine(DEAR, 0.0)
    machine.run(100)
    assert all(machine.tried)


def test_measurements_on_a_cold_disk_are_repeated() -> None:
    """Trying took ten times as long at first."""
    machine = Machine(StepSeconds(kept_s=10.0, redone_s=12.0, waiting_s=1.21), 0.5)
    machine.run(50)
    assert not any(machine.tried[-10:])
    machine.times = GPT2_ON_DISK
    machine.run(600)
    assert all(machine.tried[-50:])


def test_another_plan_is_measured_anew() -> None:
    machine = Machine(GPT2_ON_DISK, 0.5)
    machine.run(100)
    found = machine.worth.measured
    assert found is not None
    for field in ("kept_s", "redone_s", "waiting_s"):
        assert getattr(found, field) == pytest.approx(getattr(GPT2_ON_DISK, field))
    machine.worth.forget()
    assert machine.worth.measured is None
    assert machine.worth.break_even == 0.25


def test_a_fixed_choice_is_not_learned() -> None:
    checks: list[tuple[float, Callable[[bool], bool]]] = [(1.0, lambda tried: tried), (-1.0, lambda tried: not tried)]
    for fixed, expected in checks:
        machine = Machine(DEAR if fixed > 0 else GPT2_ON_DISK, 0.5)
        machine.worth.fixed = fixed
        machine.run(100)
        assert all(expected(tried) for tried in machine.tried)
