"""The speed of each kind of work on a machine, and the links that it uses.

[Note: Links]
A link is a bandwidth that lanes share. Host DRAM is one: copies, CPU updates and disk transfers
compete for it. The two directions of the PCIe link are two links. A disk that is not duplex is one
link whose capacity is time, one second per second: a byte read takes ``1 / disk_read_bytes_per_s``
of it and a byte written ``1 / disk_write_bytes_per_s``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import prod

from lightning_hetero.errors import RateError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.schedule import Lane

_UPDATE_BYTES = 28  # per parameter: see cpu_update_bytes


class Work(IntEnum):
    """A kind of work. :attr:`Demand.speed` is in its unit, given below."""

    COMPUTE = 0  # forward or backward; seconds without other work
    DEVICE_UPDATE = 1  # parameters; if the device is the host's CPU, bytes as for CPU_UPDATE
    H2D = 2  # bytes
    D2H = 3  # bytes
    CPU_UPDATE = 4  # bytes of host memory that the kernel moves
    DISK_READ = 5  # bytes
    DISK_WRITE = 6  # bytes
    COLLECTIVE = 7  # bytes, in host memory
    PEER = 8  # bytes of collectives between devices


LANES: Mapping[Work, Lane] = {
    Work.COMPUTE: Lane.COMPUTE,
    Work.DEVICE_UPDATE: Lane.COMPUTE,
    Work.H2D: Lane.H2D,
    Work.D2H: Lane.D2H,
    Work.CPU_UPDATE: Lane.CPU,
    Work.DISK_READ: Lane.DISK_READ,
    Work.DISK_WRITE: Lane.DISK_WRITE,
    Work.COLLECTIVE: Lane.NET,
    Work.PEER: Lane.PEER,
}

# The names that HardwareProfile.contention uses.
_CONTENDER: Mapping[Work, str] = {
    Work.COMPUTE: "compute",
    Work.DEVICE_UPDATE: "compute",
    Work.H2D: "copy",
    Work.D2H: "copy",
    Work.CPU_UPDATE: "update",
    Work.DISK_READ: "disk",
    Work.DISK_WRITE: "disk",
    Work.COLLECTIVE: "net",
    Work.PEER: "peer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The demand of one kind of work.

    Attributes:
        speed: Units per second without other work.
        uses: Links, and the share of each that one unit takes.
    """

    speed: float
    uses: Mapping[str, float]


class Rates:
    """The rates of one machine.

    Args:
        hardware: The machine.

    Attributes:
        hardware: The machine.
        capacity: The capacity of each link per second; see [Note: Links].
    """

    def __init__(self, hardware: HardwareProfile) -> None:
        self.hardware = hardware
        h = hardware
        update = float(h.cpu_update_params_per_s * _UPDATE_BYTES)
        self.capacity: dict[str, float] = {"dram": h.host_dram_bytes_per_s, "h2d": h.link_h2d_bytes_per_s}
        self.capacity |= {"d2h": h.link_d2h_bytes_per_s, "cpu": update, "net": h.collective_bytes_per_s, "disk": 1.0}
        self.capacity["peer"] = h.peer_bytes_per_s
        # The profile's key for each kind of work, and the resulting rate.
        self._speeds: dict[Work, tuple[str, float]] = {
            Work.COMPUTE: ("device_flop_per_s", 1.0),
            Work.DEVICE_UPDATE: ("device_update_params_per_s", h.device_update_params_per_s),
            Work.H2D: ("link_h2d_bytes_per_s", h.link_h2d_bytes_per_s),
            Work.D2H: ("link_d2h_bytes_per_s", h.link_d2h_bytes_per_s),
            Work.CPU_UPDATE: ("cpu_update_params_per_s", update),
            Work.DISK_READ: ("disk_read_bytes_per_s", h.disk_read_bytes_per_s),
            Work.DISK_WRITE: ("disk_write_bytes_per_s", h.disk_write_bytes_per_s),
            Work.COLLECTIVE: ("collective_bytes_per_s", h.collective_bytes_per_s),
            Work.PEER: ("peer_bytes_per_s", h.peer_bytes_per_s),
        }
        if h.shared_memory:  # the same native threads run it, after backward instead of during it
            self._speeds[Work.DEVICE_UPDATE] = self._speeds[Work.CPU_UPDATE]
        self._demands: dict[Work, Demand] = {}

    def demand(self, work: Work) -> Demand:
        """The demand of a kind of work.

        Raises:
            RateError: The machine cannot do this work: the profile has no rate for it.
        """
        if work not in self._demands:
            key, speed = self._speeds[work]
            if speed <= 0:
                raise RateError(
                    f"hardware profile {self.hardware.name!r} has {key}=0, so this machine cannot run the plan's work on lane "
                    f"{LANES[work].value!r}. Measure or give {key}, or choose a plan without that work."
                )
            self._demands[work] = Demand(speed=speed, uses=self._uses(work))
        return self._demands[work]

    def _uses(self, work: Work) -> dict[str, float]:
        shared = self.hardware.shared_memory
        match work:
            case Work.H2D:
                return {"h2d": 1.0, "dram": 1.0}
            case Work.D2H:
                return {"d2h": 1.0, "dram": 1.0}
            case Work.CPU_UPDATE:
                return {"cpu": 1.0, "dram": 1.0}
            case Work.DEVICE_UPDATE:
                return {"cpu": 1.0, "dram": 1.0} if shared else {}
            case Work.DISK_READ | Work.DISK_WRITE:
                disk = {} if self.hardware.disk_duplex else {"disk": 1.0 / self._speeds[work][1]}
                return disk | {"dram": 1.0}
            case Work.COLLECTIVE:
                return {"net": 1.0}
            case Work.PEER:
                return {"peer": 1.0}
            case _:
                return {}

    def speed(self, work: Work, beside: Collection[Work]) -> float:
        """Units per second beside other work, by ``hardware.contention``; links do not count.

        Work on links slows down by the factor that was measured beside each *kind* of other work.
        Beside several kinds it slows down by the factor measured beside all of them or, if there is
        none, by the product. More kinds never make it faster. Copies in both directions at once
        slow down by ``"copy|copy"``, and by the other factors as well, because other kinds were
        measured beside both directions.
        """
        mine, known = self._contender(work), self.hardware.contention
        both_ways = any(LANES[o] is not LANES[work] and self._contender(o) == mine for o in beside)
        own = max(1.0, known.get(f"{mine}|{mine}", 1.0)) if both_ways else 1.0
        others = sorted({self._contender(o) for o in beside} - {mine, ""})
        factors = [max(1.0, known.get(f"{mine}|{other}", 1.0)) for other in others]
        together = known.get(f"{mine}|{'+'.join(others)}") if len(others) > 1 else None
        return self.demand(work).speed / (own * (prod(factors) if together is None else max(together, *factors)))

    def slowdown(self, work: Work, other: Work) -> float:
        """The factor by which other work slows this work, by ``hardware.contention``.

        1 if a link is slower anyway.
        """
        demand = self.demand(work)
        links = [self.capacity[link] / use for link, use in demand.uses.items()]
        return min([demand.speed, *links]) / min([self.speed(work, [other]), *links])

    def _contender(self, work: Work) -> str:
        if work is Work.DEVICE_UPDATE and self.hardware.shared_memory:
            return "update"
        return _CONTENDER.get(work, "")

    def alone_s(self, work: Work, amount: float) -> float:
        """Seconds of ``amount`` units without other work."""
        if amount <= 0:
            return 0.0
        demand = self.demand(work)
        return amount / min([demand.speed, *(self.capacity[link] / use for link, use in demand.uses.items())])


def cpu_update_bytes(num_params: float) -> float:
    """Host memory traffic of Adam on the CPU, bytes: 28 per parameter.

    It reads and writes exp_avg, exp_avg_sq and the fp32 weights (24 bytes). Full precision also
    reads an fp32 gradient (4); 16 bit reads a 16-bit gradient and writes the 16-bit weights (2 +
    2).

    Source: benchmarks/update.py (the kernel is as fast as a loop that only moves these bytes).
    """
    return num_params * _UPDATE_BYTES
