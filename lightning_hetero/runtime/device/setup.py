"""Opens a device: its lanes, and what the runtime keeps there."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hetero.lanes import Device, EmulatedDevice, EmulatedLanes, EngineLanes, Lanes
from lightning_hetero.lanes.streams import StreamLanes
from lightning_hetero.runtime.device.device_updates import DeviceUpdates
from lightning_hetero.runtime.device.gradients import HostGradients
from lightning_hetero.runtime.device.weights import DeviceWeights
from lightning_hetero.store.live.tier_store import TierStore


@dataclass(frozen=True, slots=True)
class DeviceSide:
    """What the runtime keeps for one model on a device with memory of its own."""

    lanes: Lanes
    weights: DeviceWeights
    gradients: HostGradients  # that have left it
    updates: DeviceUpdates  # with the state there


def lanes_of(device: Device | None, arena_bytes: int, *, poison: bool) -> Lanes:
    """The lanes of one device; ``arena_bytes`` of a partitioned one are for weights and state."""
    if device is None:
        return EngineLanes(poison=poison)
    if isinstance(device, EmulatedDevice):
        return EmulatedLanes(device, poison=poison)
    return StreamLanes(
        device.device, memory_bytes=arena_bytes, poison=poison, staging_bytes=device.staging_bytes,
        backend=device.backend,
    )  # fmt: skip


def side_of(device: Device | None, lanes: Lanes, store: TierStore) -> DeviceSide | None:
    """What the runtime keeps on a device with memory of its own; ``None`` for the host."""
    if device is None:
        return None
    weights = DeviceWeights(lanes)
    updates = DeviceUpdates(lanes, weights, store)
    return DeviceSide(lanes=lanes, weights=weights, gradients=HostGradients(lanes), updates=updates)
