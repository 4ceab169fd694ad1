"""Lanes: in-order queues that run the ops of a schedule beside compute.

``contract`` says what lanes do, ``base`` what their events are. ``engine`` gives ops to the native
engine if the device is the host. ``queue`` has lanes with a thread each: ``emulated`` is a device
made of CPU memory, ``streams`` are one with streams. ``collectives`` has what ranks that share a
model do on the lane ``net``, or on ``peer`` over the links of ``peers``. ``backends`` has what a
backend of torch has of its own.
"""

from __future__ import annotations

from lightning_hetero.lanes.base import All, Event, Moment, OpEvent, passed_at
from lightning_hetero.lanes.contract import Lanes
from lightning_hetero.lanes.emulated import EmulatedDevice, EmulatedLanes
from lightning_hetero.lanes.engine import EngineLanes, EngineOp
from lightning_hetero.lanes.stream_device import StreamDevice

Device = EmulatedDevice | StreamDevice
"""A device that has memory of its own."""

__all__ = [
    "All",
    "Device",
    "EmulatedDevice",
    "EmulatedLanes",
    "EngineLanes",
    "EngineOp",
    "Event",
    "Lanes",
    "Moment",
    "OpEvent",
    "passed_at",
]
