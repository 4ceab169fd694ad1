"""The planners' input about a machine: capacities and rates, measured or from a datasheet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.codec import check_format, check_keys, number, parse_object, read_text

FORMAT = "lightning-hetero-hardware"
VERSION = 1

_WHOLE = ("device_memory_bytes", "host_memory_bytes", "disk_capacity_bytes", "world_size", "ranks")
# In files from when weights on disk left pageable memory; nothing does any more.
FORMER = "link_h2d_pageable_bytes_per_s"
# Only in the files of such machines, which the versions before could not read.
_LATER = {
    "unified_memory": False,
    "meeting_s": 0.0,
    "gathers_in_place": False,
    "ranks": 1,
    "peer_bytes_per_s": 0.0,
    "gathers_on_devices": False,
}
_POSITIVE = ("device_memory_bytes", "host_memory_bytes", "device_flop_per_s", "host_dram_bytes_per_s", "world_size", "ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """One machine with one kind of device.

    A rate of 0 means that the machine cannot do this work: no disk, no update on the device, no
    collective.

    Attributes:
        name: A display name.
        device_memory_bytes: Memory of one device that training may use, bytes.
        host_memory_bytes: Host memory that training may use, bytes.
        disk_capacity_bytes: Disk space that training may use, bytes.
        device_flop_per_s: FLOP/s that the device reaches on this kind of model.
        link_h2d_bytes_per_s: Host to device copies, bytes/s.
        link_d2h_bytes_per_s: Device to host copies, bytes/s.
        disk_read_bytes_per_s: Sequential reads of the disks together, bytes/s.
        disk_write_bytes_per_s: Sequential writes, bytes/s.
        disk_duplex: Whether simultaneous reads and writes do not slow each other; otherwise their
            times add.
        host_dram_bytes_per_s: Host memory bandwidth that copies, updates and disk transfers share,
            bytes/s.
        cpu_update_params_per_s: Adam on the CPU with all threads that updates may use, elements/s.
        device_update_params_per_s: Adam on the device, elements/s.
        cpu_downcast_params_per_s: fp32 to 16 bit on the CPU, elements/s.
        collective_bytes_per_s: All-gather and reduce-scatter in host memory, per device, bytes/s.
        peer_bytes_per_s: The same between the memories of devices; 0: they do not exchange
            themselves.
        world_size: Devices that train together.
        meeting_s: Seconds until all devices have met, before anything is exchanged.
        gathers_in_place: Devices of the machine read whole weights where the host has them once for
            all of them: an all-gather only waits until all weights are there.
        gathers_on_devices: Plans are for devices that exchange weights and gradients themselves
            (``Plan.gather``). Planners try both.
        ranks: N if this is the share that one of N ranks has of a machine on which they train one
            model together; then ``world_size`` is 1. Otherwise 1, and this is the whole machine.
        shared_memory: The device is the host's own CPU: there are no copies between them, and one
            budget for both.
        unified_memory: The device is another processor in the host's memory: there are copies, and
            what both use together is at most ``host_memory_bytes``. ``device_memory_bytes`` is the
            part that the device may use.
        contention: How many times longer work takes beside other work, at least 1:
            ``"compute|update"`` is compute beside CPU updates, ``"update|compute"`` those updates
            beside compute, likewise ``"disk"``, ``"copy"``, ``"net"`` and ``"peer"``, of which the
            last two are collectives in host memory and between devices. ``"copy|copy"`` is a copy
            beside one in the other direction. A missing pair is 1.
        source: For each figure, when and how it was measured, or the datasheet.
    """

    name: str
    device_memory_bytes: int
    host_memory_bytes: int
    disk_capacity_bytes: int
    device_flop_per_s: float
    link_h2d_bytes_per_s: float
    link_d2h_bytes_per_s: float
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    disk_duplex: bool
    host_dram_bytes_per_s: float
    cpu_update_params_per_s: float
    device_update_params_per_s: float
    cpu_downcast_params_per_s: float
    collective_bytes_per_s: float = 0.0
    peer_bytes_per_s: float = 0.0
    world_size: int = 1
    meeting_s: float = 0.0
    gathers_in_place: bool = False
    gathers_on_devices: bool = False
    ranks: int = 1
    shared_memory: bool = False
    unified_memory: bool = False
    contention: Mapping[str, float] = field(default_factory=dict)
    source: Mapping[str, str] = field(default_factory=dict)

    @property
    def copies_weights(self) -> bool:
        """Compute uses copies of weights: in a device's memory, or of the slices of all ranks."""
        return self.ranks > 1 or not self.shared_memory

    @property
    def may_gather_on_devices(self) -> bool:
        """Whether several devices can exchange weights and gradients themselves."""
        return (
            max(self.world_size, self.ranks) > 1 and not self.shared_memory and self.peer_bytes_per_s > 0 and self.gathers_in_place
        )

    @property
    def between_devices_bytes_per_s(self) -> float:
        """What one device sends to others in the faster way, bytes/s."""
        return max(self.collective_bytes_per_s, self.peer_bytes_per_s)

    def to_json(self) -> str:
        """The profile as JSON text."""
        rows: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in _LATER and value == _LATER[f.name]:
                continue
            rows[f.name] = dict(value) if isinstance(value, Mapping) else value
        return json.dumps(rows, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "hardware profile") -> HardwareProfile:
        """Reads :meth:`to_json`'s text.

        Args:
            text: The JSON text.
            source: A file name for errors.

        Raises:
            ConfigError: Not JSON, another format, a missing or unknown key, a value out of range.
        """
        data = parse_object(text, what="hardware profile", source=source)
        check_format(data, FORMAT, VERSION, what="hardware profile", source=source)
        names = [f.name for f in fields(cls)]
        switches = ("shared_memory", "unified_memory", "gathers_in_place", "gathers_on_devices")
        optional = ("collective_bytes_per_s", FORMER, "world_size", *_LATER, *switches, "contention", "source")
        check_keys(data, required=[n for n in names if n not in optional], optional=optional, where=source)
        values = dict(data)
        for key in values.keys() & {"disk_duplex", *switches}:
            if not isinstance(values[key], bool):
                raise ConfigError(f"{source}: {key}={values[key]!r}; allowed: true, false.")
        for key, kind in (("contention", (int, float)), ("source", (str,))):
            table = values.get(key, {})
            if not isinstance(table, dict) or not all(isinstance(v, kind) and not isinstance(v, bool) for v in table.values()):
                raise ConfigError(f"{source}: {key}={table!r}; expected an object of {'text' if kind == (str,) else 'numbers'}.")
        if not isinstance(values["name"], str):
            raise ConfigError(f"{source}: name={values['name']!r}; expected text.")
        if values.get("shared_memory") and values.get("unified_memory"):
            raise ConfigError(
                f"{source}: shared_memory=true, unified_memory=true; allowed: one of them. The first is the host's own CPU, the "
                f"second another processor in the host's memory."
            )
        if values.get("world_size", 1) != 1 and values.get("ranks", 1) != 1:
            raise ConfigError(
                f"{source}: world_size={values['world_size']!r}, ranks={values['ranks']!r}; allowed: one of them above 1. The "
                f"first is of a whole machine, the second of one rank's share."
            )
        for key in values.keys() - {"name", "disk_duplex", *switches, "contention", "source"}:
            values[key] = number(values[key], key=key, where=source, positive=key in _POSITIVE, whole=key in _WHOLE)
        values.pop(FORMER, None)
        return cls(**values)

    @classmethod
    def load(cls, path: str | Path) -> HardwareProfile:
        """Reads a profile's file.

        Raises:
            ConfigError: The file cannot be read or is not a profile.
        """
        return cls.from_json(read_text(path, what="hardware profile"), source=str(path))
