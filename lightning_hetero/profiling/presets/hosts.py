"""Hosts by name: the rates of their memory and their CPU updates.

A CPU update moves 28 bytes per parameter and a downcast 8 (it reads 4, and writes 2 through a line
that is read first), both at the speed of the memory. Memory reaches 0.8 of its nominal bandwidth,
as STREAM usually does.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hetero.profiling.presets.figures import Figure, find

_UPDATE_BYTES, _DOWNCAST_BYTES = 28, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One kind of host.

    Attributes:
        name: Its name in the table.
        dram_bytes_per_s: Bandwidth that its memory reaches, all sockets, bytes/s.
    """

    name: str
    dram_bytes_per_s: Figure

    @property
    def update_params_per_s(self) -> Figure:
        """Adam on all cores, elements/s."""
        return self.dram_bytes_per_s.times(1 / _UPDATE_BYTES, f"memory-bound, {_UPDATE_BYTES} bytes a parameter,")

    @property
    def downcast_params_per_s(self) -> Figure:
        """fp32 to 16 bit on all cores, elements/s."""
        return self.dram_bytes_per_s.times(1 / _DOWNCAST_BYTES, f"memory-bound, {_DOWNCAST_BYTES} bytes a parameter,")


def _host(name: str, gb_per_s: float, what: str) -> Host:
    return Host(name=name, dram_bytes_per_s=Figure(0.8 * gb_per_s * 1e9, f"0.8 (assumed) of {gb_per_s:g} GB/s: {what}"))


HOSTS: dict[str, Host] = {
    h.name: h
    for h in (
        _host("desktop-ddr5", 89.6, "2 channels of DDR5-5600"),
        _host("server-ddr4", 204.8, "8 channels of DDR4-3200, one socket"),
        _host("server-ddr5", 307.2, "8 channels of DDR5-4800, one socket"),
        _host("gb10", 273, "NVIDIA DGX Spark datasheet, 128 GB of LPDDR5X"),
        _host("grace", 384, "NVIDIA Grace datasheet, 480 GB of LPDDR5X"),
        # The hosts of the papers.
        _host("xeon-5320x2", 375.4, "Intel Xeon Gold 5320 datasheet, 8 channels of DDR4-2933, two sockets (LoHan, table III)"),
        _host("epyc-7713", 204.8, "AMD EPYC 7713 datasheet, 8 channels of DDR4-3200, one socket (AutoHete, section 4.1)"),
        _host("xeon-4214rx2", 230.4, "Intel Xeon Silver 4214R datasheet, 6 channels of DDR4-2400, two sockets (ProTrain, C.2)"),
        _host("xeon-8480x2", 614.4, "Intel Xeon Platinum 8480+ datasheet, 8 channels of DDR5-4800, two sockets (ProTrain, C.2)"),
        _host(
            "xeon-8468x2",
            614.4,
            "Intel Xeon Platinum 8468 datasheet, 8 channels of DDR5-4800, two sockets (Deep Optimizer States, 5.1)",
        ),
        _host(
            "xeon-6152x2", 256, "Intel Xeon Gold 6152 datasheet, 6 channels of DDR4-2666, two sockets (Deep Optimizer States, 5.4)"
        ),
    )
}


def host(name: str) -> Host:
    """The host of that name.

    Raises:
        ConfigError: There is no such preset; lists the known ones.
    """
    return find("host", HOSTS, name)
