"""Lanes: in-order queues that run the ops of a schedule beside compute.

``base`` says what they are; ``inline`` is where the device is the host, ``emulated`` a device made of CPU memory, ``cuda`` one
with streams.
"""

from __future__ import annotations

from lightning_hetero.runtime.lanes.base import Device, DeviceMemory, Event, Lanes, Moment, OpEvent, Ticket, passed_at
from lightning_hetero.runtime.lanes.emulated import EmulatedDevice, EmulatedLanes
from lightning_hetero.runtime.lanes.inline import InlineLanes

__all__ = [
    "Device",
    "DeviceMemory",
    "EmulatedDevice",
    "EmulatedLanes",
    "Event",
    "InlineLanes",
    "Lanes",
    "Moment",
    "OpEvent",
    "Ticket",
    "passed_at",
]
