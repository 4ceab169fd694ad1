"""Whole machines, combined from a device, a host and disks, and the machines of the papers.

All devices share the figures of the host (memory, its bandwidth, CPU rates, disks). The figures of
a device (memory, FLOP/s, its link, its update rate, collectives) are those of one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.profiling.presets.devices import LINKS, PEERS, Device
from lightning_hetero.profiling.presets.devices import device as device_named
from lightning_hetero.profiling.presets.disks import disk as disk_named
from lightning_hetero.profiling.presets.figures import Figure, find
from lightning_hetero.profiling.presets.hosts import host as host_named
from lightning_hetero.units import GIB, format_bytes, parse_bytes

_NONE = Figure(0.0, "none")
_MEETING = Figure(50e-6, "50 us (assumed)")  # of a few numbers, by processes of one host
_WHOLE = ("device_memory_bytes", "host_memory_bytes", "disk_capacity_bytes")


def machine(
    *,
    device: str,
    host_memory: str | int,
    disk: str | None = None,
    count: int = 1,
    host: str | None = None,
    link: str | None = None,
    peers: str | int | None = None,
) -> HardwareProfile:
    """A machine from presets, without measurements.

    Args:
        device: A name of ``devices.DEVICES``.
        host_memory: Host memory that training may use, such as ``"256GiB"`` or a number of bytes. A
            device in that memory shares it.
        disk: A name of ``disks.DISKS``, with ``x12`` for twelve; ``None``: no disk.
        count: Devices that train together.
        host: A name of ``hosts.HOSTS``; ``None``: one of the device's generation.
        link: A name of ``devices.LINKS``; ``None``: the device's own.
        peers: What connects several devices: a name of ``devices.PEERS``, or bytes/s that one of
            them sends, such as ``"10GB"``; ``None``: the device's own, or nothing but the host.

    Raises:
        ConfigError: A name is unknown, a size is no size, ``count`` is not positive.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"count={count!r}; allowed: a whole number of devices, at least 1.")
    chosen = device_named(device)
    memory = parse_bytes(host_memory, name="host_memory")
    figures = _figures(chosen, memory=memory, disk=disk, count=count, host=host, link=link)
    devices = chosen.name if count == 1 else f"{count} x {chosen.name}"
    name = ", ".join([devices, f"{format_bytes(memory)} host", *([disk] if disk is not None else [])])
    if peers is not None:
        figures |= _between(peers, count)
    found = _profile(name, figures, duplex=disk is not None and disk_named(disk).duplex, count=count)
    if not chosen.in_host_memory:
        return found
    return replace(found, unified_memory=True, device_memory_bytes=min(found.device_memory_bytes, memory))


def _figures(chosen: Device, *, memory: int, disk: str | None, count: int, host: str | None, link: str | None) -> dict[str, Figure]:
    cpu = host_named(host if host is not None else chosen.host)
    disks = disk_named(disk) if disk is not None else None
    copies = find("link", LINKS, link if link is not None else chosen.link)
    return {
        "device_memory_bytes": chosen.memory_bytes,
        "host_memory_bytes": Figure(memory, "given"),
        "disk_capacity_bytes": disks.capacity_bytes if disks else _NONE,
        "device_flop_per_s": chosen.flop_per_s,
        "link_h2d_bytes_per_s": copies,
        "link_d2h_bytes_per_s": copies,
        "disk_read_bytes_per_s": disks.read_bytes_per_s if disks else _NONE,
        "disk_write_bytes_per_s": disks.write_bytes_per_s if disks else _NONE,
        "host_dram_bytes_per_s": cpu.dram_bytes_per_s,
        "cpu_update_params_per_s": cpu.update_params_per_s,
        "device_update_params_per_s": chosen.update_params_per_s,
        "cpu_downcast_params_per_s": cpu.downcast_params_per_s,
        "collective_bytes_per_s": _NONE if count == 1 else copies.times(0.5, "0.5 (assumed: through host memory, there and back)"),
        "peer_bytes_per_s": _NONE if count == 1 else chosen.peer_bytes_per_s.times(0.75, "0.75 (assumed)"),
        "meeting_s": _NONE if count == 1 else _MEETING,
    }


def _between(peers: str | int, count: int) -> dict[str, Figure]:
    """What one of several devices sends to others: through the host, over a link of its own."""
    if count == 1:
        raise ConfigError(f"peers={peers!r} is what connects several devices, and there is one. Give count, or leave peers out.")
    if isinstance(peers, str) and not peers[:1].isdigit():
        rate = find("peers", PEERS, peers).times(0.75, "0.75 (assumed)")
        if peers in LINKS:
            return {"collective_bytes_per_s": rate, "peer_bytes_per_s": _NONE}
        return {"peer_bytes_per_s": rate}
    return dict.fromkeys(("collective_bytes_per_s", "peer_bytes_per_s"), Figure(float(parse_bytes(peers, name="peers")), "given"))


def _profile(name: str, figures: Mapping[str, Figure], *, duplex: bool, count: int) -> HardwareProfile:
    values: dict[str, Any] = {key: int(figure.value) if key in _WHOLE else figure.value for key, figure in figures.items()}
    source = {key: figure.source for key, figure in figures.items()}
    source["disk_duplex"] = "reads and writes share an SSD: LoHan, section IV-D" if figures["disk_capacity_bytes"].value else "none"
    return HardwareProfile(name=name, disk_duplex=duplex, world_size=count, gathers_in_place=count > 1, source=source, **values)


# ---- the papers' machines ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperMachine:
    """A machine of one of the papers; see :func:`machine` for its parts.

    Attributes:
        where: The place in the paper that describes it.
        device: Preset.
        host: Preset.
        host_gib: Host memory, GiB.
        count: Devices that train together.
        disk: Preset.
        link: Preset; ``None``: the device's own.
        figures: Figures that the paper measured, by the profile's key.
        most: The paper's upper limits of figures, for any number of disks.
    """

    where: str
    device: str
    host: str
    host_gib: int
    count: int = 1
    disk: str | None = None
    link: str | None = None
    figures: Mapping[str, Figure] = field(default_factory=dict)
    most: Mapping[str, Figure] = field(default_factory=dict)


_LOHAN_LINK = Figure(22.9e9, "LoHan, section III-C: swapping 213 GiB of activations out takes 10 s")
_LOHAN_DISKS = Figure(28e9, "LoHan, section III-C: 182 GB read and 182 GB written take 13 s with 12 disks, taken as equally fast")
_DOS_V100, _DOS_H100 = "Deep Optimizer States, section 5.4", "Deep Optimizer States, section 5.1"
_DOS_RANKS = 4


def _lohan(device: str) -> PaperMachine:
    return PaperMachine(
        where="LoHan, table III",
        device=device,
        host="xeon-5320x2",
        host_gib=768,
        disk="p5510x12",
        figures={"link_h2d_bytes_per_s": _LOHAN_LINK, "link_d2h_bytes_per_s": _LOHAN_LINK},
        most={"disk_read_bytes_per_s": _LOHAN_DISKS, "disk_write_bytes_per_s": _LOHAN_DISKS},
    )


def _dos(*, device: float, cpu: float, downcast: float, link: float, where: str) -> dict[str, Figure]:
    """The paper's input of eq. 1, elements/s: one device and its link, and the whole CPU."""
    paper = f"Deep Optimizer States, {where}"
    copies = Figure(4 * link, f"{paper}: B = {link:.3g} fp32/s, one device's")
    return {
        "device_update_params_per_s": Figure(device / _DOS_RANKS, f"{paper}: U_g = {device:.3g} of {_DOS_RANKS} devices"),
        "cpu_update_params_per_s": Figure(cpu, f"{paper}: U_c = {cpu:.3g} of all cores"),
        "cpu_downcast_params_per_s": Figure(downcast, f"{paper}: D_c = {downcast:.3g} of all cores"),
        "link_h2d_bytes_per_s": copies,
        "link_d2h_bytes_per_s": copies,
    }


PAPER_MACHINES: dict[str, PaperMachine] = {
    # One GPU of three kinds in one server.
    "lohan-rtx4090": _lohan("rtx4090"),
    "lohan-rtx3090": _lohan("rtx3090"),
    "lohan-rtx4080": _lohan("rtx4080"),
    # Eight GPUs in the server; most results are with one.
    "autohete-a100": PaperMachine(where="AutoHete, section 4.1", device="a100-40", host="epyc-7713", host_gib=1024),
    "protrain-rtx3090": PaperMachine(
        where="ProTrain, appendix C.2", device="rtx3090", host="xeon-4214rx2", host_gib=384, count=4, link="pcie3"
    ),
    "protrain-a100": PaperMachine(where="ProTrain, appendix C.2", device="a100-80", host="xeon-8480x2", host_gib=1024, count=4),
    # The paper's updates and downcasts are those of four devices and of all cores, its copies those
    # of one link (docs/adr/0007).
    "dos-h100": PaperMachine(
        where=_DOS_H100,
        device="h100",
        host="xeon-8468x2",
        host_gib=512,
        count=4,
        figures={
            **_dos(device=100e9, cpu=8e9, downcast=62e9 / 4, link=12e9, where="section 1; table 1: 62 GB/s, taken as fp32 bytes"),
            "peer_bytes_per_s": Figure(133e9, f"{_DOS_H100}: 133 GB/s between devices"),
        },
    ),
    "dos-v100": PaperMachine(
        where=_DOS_V100,
        device="v100",
        host="xeon-6152x2",
        host_gib=192,
        count=4,
        figures=_dos(device=35e9, cpu=2e9, downcast=8.7e9, link=3e9, where="section 5.4"),
    ),
}


_BOX = "a common box (assumed)"
BOXES: dict[str, PaperMachine] = {
    "2x-rtx4090": PaperMachine(where=_BOX, device="rtx4090", host="server-ddr4", host_gib=128, count=2, disk="p5510"),
    "4x-rtx4090": PaperMachine(where=_BOX, device="rtx4090", host="server-ddr4", host_gib=256, count=4, disk="p5510x2"),
    "8x-rtx4090": PaperMachine(where=_BOX, device="rtx4090", host="server-ddr4", host_gib=512, count=8, disk="p5510x4"),
    "8x-a100": PaperMachine(where=_BOX, device="a100-80", host="server-ddr4", host_gib=1024, count=8, disk="p5510x4"),
    "8x-h100": PaperMachine(where=_BOX, device="h100", host="server-ddr5", host_gib=2048, count=8, disk="p5510x8"),
}
"""Boxes with several devices: devices of one kind, the links of that kind, drives."""


def paper_machine(
    name: str, *, host_memory: str | int | None = None, disk: str | None = None, count: int | None = None
) -> HardwareProfile:
    """A machine of one of the papers, or a box with several devices.

    The paper's measurements replace datasheet figures.

    Args:
        name: A name of :data:`PAPER_MACHINES` or :data:`BOXES`.
        host_memory: Host memory instead of the paper's, which papers vary.
        disk: Disk instead of the paper's.
        count: Number of devices instead of the paper's.

    Raises:
        ConfigError: A name is unknown.
    """
    paper = find("machine", {**PAPER_MACHINES, **BOXES}, name)
    world = paper.count if count is None else count
    chosen = machine(
        device=paper.device,
        host_memory=paper.host_gib * GIB if host_memory is None else host_memory,
        disk=paper.disk if disk is None else disk,
        count=world,
        host=paper.host,
        link=paper.link,
    )
    figures = {key: Figure(getattr(chosen, key), chosen.source[key]) for key in chosen.source if key != "disk_duplex"}
    if host_memory is None:
        figures["host_memory_bytes"] = Figure(chosen.host_memory_bytes, paper.where)
    figures |= {key: f for key, f in paper.figures.items() if key != "peer_bytes_per_s" or world > 1}
    figures |= {key: min(most, figures[key], key=lambda f: f.value) for key, most in paper.most.items()}
    return _profile(name, figures, duplex=chosen.disk_duplex, count=world)
