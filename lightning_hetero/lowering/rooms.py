"""What a plan leaves of each tier's memory for caches and staging: the rooms that a schedule may fill."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRoom:
    """Device memory for weights that live below the device.

    Attributes:
        resident: Blocks of which the device holds a valid copy as the step begins.
        capacity_bytes: Bytes for such copies.
    """

    resident: frozenset[int] = frozenset()
    capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rooms:
    """Memory that a plan leaves for what comes and goes during a step.

    Attributes:
        host_cache_bytes: Host memory for weights that live on disk.
        device_cache_bytes: Device memory for weights that live below the device; ``None`` where the device is the host's own CPU.
        staging_bytes: Host memory through which state on disk streams.
    """

    host_cache_bytes: int
    device_cache_bytes: int | None
    staging_bytes: int
