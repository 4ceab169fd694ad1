"""Builds the executor for a device with memory of its own."""

from __future__ import annotations

from typing import Any

from lightning_hetero.runtime.device import DeviceSide, DeviceUpdates, DeviceWeights, HostGradients
from lightning_hetero.runtime.device.executor import DeviceExecutor
from lightning_hetero.runtime.lanes import Device, EmulatedDevice, EmulatedLanes
from lightning_hetero.runtime.lanes.cuda import CudaLanes
from lightning_hetero.runtime.lanes.cuda_device import CudaDevice
from lightning_hetero.runtime.lanes.queue import QueuedLanes
from lightning_hetero.runtime.placement import Placement
from lightning_hetero.store.capacity import available_memory_bytes
from lightning_hetero.store.live.blocks import Block


def executor_on(device: Device, blocks: list[Block], placement: Placement, *, poison: bool, **common: Any) -> DeviceExecutor:
    """The executor for one device.

    Args:
        device: The device.
        blocks: The model's blocks.
        placement: The plan.
        poison: Fill memory that is free or not yet filled with NaN (tests).
        **common: As for :class:`~lightning_hetero.runtime.executor.Executor`.

    Raises:
        OutOfMemoryBudgetError: The device has less free than was to be set aside.
    """
    lanes = _lanes_of(device, placement.arena_bytes, poison=poison)
    common["recorder"].observe(lanes, [block.name for block in blocks])
    weights = DeviceWeights(lanes)
    side = common["updater"].device = DeviceSide(
        weights=weights,
        gradients=HostGradients(lanes, norm_type=2.0 if placement.rules.norms else None),
        updates=DeviceUpdates(lanes, weights, common["store"]),
    )
    cache = placement.device_cache_bytes
    return DeviceExecutor(blocks, lanes=lanes, side=side, device_cache_bytes=cache, poison=poison, **common)


def _lanes_of(device: Device, arena_bytes: int, *, poison: bool) -> QueuedLanes:
    if isinstance(device, EmulatedDevice):
        return EmulatedLanes(device, poison=poison)
    assert isinstance(device, CudaDevice), "there are no other devices with memory of their own"
    return CudaLanes(
        device.device, memory_bytes=arena_bytes, poison=poison, staging_bytes=device.staging_bytes,
        host_room=available_memory_bytes, cuda=device.cuda,
    )  # fmt: skip
