"""Lanes: in-order queues that run the ops of a schedule beside compute.

``base`` defines them. ``engine`` gives ops to the native engine if the device is the host.
``emulated`` is a device made of CPU memory, ``cuda`` one with streams. ``InlineLanes`` run every
op at once.
"""

from __future__ import annotations

from lightning_hetero.runtime.lanes.base import All, Event, Moment, OpEvent, passed_at
from lightning_hetero.runtime.lanes.cuda_device import CudaDevice
from lightning_hetero.runtime.lanes.emulated import EmulatedDevice, EmulatedLanes
from lightning_hetero.runtime.lanes.engine import EngineLanes, EngineOp
from lightning_hetero.runtime.lanes.queue import InlineLanes, Lanes

Device = EmulatedDevice | CudaDevice
"""A device that has memory of its own."""

__all__ = [
    "All",
    "Device",
    "EmulatedDevice",
    "EmulatedLanes",
    "EngineLanes",
    "EngineOp",
    "Event",
    "InlineLanes",
    "Lanes",
    "Moment",
    "OpEvent",
    "passed_at",
]
