from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_hetero.cost import Rates, Work
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.sim.links import Flow, SharedRates, max_min

MACHINE = HardwareProfile(
    name="toy", device_memory_bytes=1, host_memory_bytes=1, disk_capacity_bytes=1, device_flop_per_s=1.0,
    link_h2d_bytes_per_s=10.0, link_d2h_bytes_per_s=10.0, disk_read_bytes_per_s=4.0, disk_write_bytes_per_s=2.0, disk_duplex=False,
    host_dram_bytes_per_s=100.0, cpu_update_params_per_s=3.0, device_update_params_per_s=1.0, cpu_downcast_params_per_s=0.0,
)  # fmt: skip


def _flow(speed: float, **uses: float) -> Flow:
    return Flow(speed=speed, uses=uses)


@pytest.mark.parametrize(
    ("flows", "expected"),
    [
        ([_flow(3)], [3]),
        ([_flow(9, a=1)], [9]),
        ([_flow(20, a=1)], [12]),
        ([_flow(9, a=1), _flow(9, a=1)], [6, 6]),
        ([_flow(2, a=1), _flow(99, a=1)], [2, 10]),
        # Who can use less leaves it to the others: 2, then 5 each.
        ([_flow(2, a=1), _flow(99, a=1), _flow(99, a=1)], [2, 5, 5]),
        # A unit may take more of one link than of another: 2x + x = 12.
        ([_flow(99, a=2), _flow(99, a=1)], [4, 4]),
        # The first stops at b, so that the second gets what is left of a.
        ([_flow(99, a=1, b=1), _flow(99, a=1)], [3, 9]),
    ],
)
def test_links_are_shared_max_min(flows: list[Flow], expected: list[float]) -> None:
    assert max_min(flows, {"a": 12.0, "b": 3.0}) == pytest.approx(expected)


def _rates(machine: HardwareProfile, *works: Work) -> dict[Work, float]:
    rates = SharedRates(Rates(machine)).of(sum(1 << w for w in works))
    return {w: rate for w, rate in zip(Work, rates, strict=True) if rate}


def test_both_directions_of_the_link_run_at_full_speed_unless_memory_is_too_slow() -> None:
    assert _rates(MACHINE, Work.H2D, Work.D2H) == {Work.H2D: 10, Work.D2H: 10}
    assert _rates(replace(MACHINE, host_dram_bytes_per_s=12.0), Work.H2D, Work.D2H) == {Work.H2D: 6, Work.D2H: 6}


def test_copies_and_disk_slow_an_update_by_their_memory_traffic() -> None:
    # 3 parameters a second are 84 bytes a second; 100 less 10 and 10 and 4 are left.
    rates = _rates(MACHINE, Work.CPU_UPDATE, Work.H2D, Work.D2H, Work.DISK_READ)
    assert rates == pytest.approx({Work.CPU_UPDATE: 76, Work.H2D: 10, Work.D2H: 10, Work.DISK_READ: 4})


def test_times_add_on_a_disk_that_is_not_duplex() -> None:
    rates = _rates(MACHINE, Work.DISK_READ, Work.DISK_WRITE)
    assert rates[Work.DISK_READ] / 4 + rates[Work.DISK_WRITE] / 2 == pytest.approx(1)
    assert _rates(replace(MACHINE, disk_duplex=True), Work.DISK_READ, Work.DISK_WRITE) == {Work.DISK_READ: 4, Work.DISK_WRITE: 2}


def test_a_slower_kind_leaves_the_link_to_others_instead_of_paying_twice() -> None:
    """What contention takes from an update already makes room in memory: the disk does not slow it
    down again.
    """
    machine = replace(MACHINE, contention={"update|disk": 1.2})
    assert _rates(machine, Work.CPU_UPDATE, Work.DISK_READ) == pytest.approx({Work.CPU_UPDATE: 70, Work.DISK_READ: 4})
