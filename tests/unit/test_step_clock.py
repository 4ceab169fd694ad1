"""The time of steps, by the clock of a device that is behind the host."""

from __future__ import annotations

from lightning_hetero.lanes import Moment
from lightning_hetero.planning.step_clock import StepClock


class Device:
    """Compute passes the moments that it is asked for when the test says so."""

    def __init__(self) -> None:
        self.at_s = 0.0  # where the device's clock will be as it comes to the next moment
        self.behind = False
        self.passed = 0
        self._asked = 0

    def now(self) -> Moment:
        number, at_s = self._asked, self.at_s
        self._asked += 1
        return lambda: at_s if not self.behind or number < self.passed else None

    def catch_up(self) -> None:
        self.passed = self._asked


def batch(clock: StepClock, device: Device, seconds: float, *, stepped: bool = True) -> float | None:
    clock.batch_begins()
    device.at_s += seconds
    clock.batch_ended(stepped=stepped)
    device.at_s += 100.0  # loading
    return clock.take()


def test_where_the_host_computes_a_step_is_known_at_once() -> None:
    device = Device()
    clock = StepClock(device.now)
    assert [batch(clock, device, seconds) for seconds in (1.0, 2.0)] == [1.0, 2.0]
    assert batch(clock, device, 3.0, stepped=False) is None
    assert batch(clock, device, 4.0) == 7.0


def test_a_device_that_is_behind_shows_a_step_later_how_long_it_took() -> None:
    device = Device()
    clock = StepClock(device.now)
    device.behind = True
    assert batch(clock, device, 1.0) is None
    device.catch_up()
    assert batch(clock, device, 2.0) == 1.0
    device.catch_up()
    assert batch(clock, device, 3.0) == 2.0
    clock.forget()
    device.catch_up()
    assert clock.take() is None


def test_time_in_which_the_clock_is_stopped_does_not_count() -> None:
    device = Device()
    clock = StepClock(device.now)
    clock.batch_begins()
    device.at_s += 1.0
    with clock.stopped():
        device.at_s += 50.0
    device.at_s += 2.0
    clock.batch_ended(stepped=True)
    assert clock.take() == 3.0
