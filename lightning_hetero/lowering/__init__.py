"""Lowering: plan → schedule, pure; the memory it may fill; and the invariants every schedule must keep."""

from lightning_hetero.lowering.check import check
from lightning_hetero.lowering.lower import lower
from lightning_hetero.lowering.rooms import DeviceRoom, Rooms

__all__ = ["DeviceRoom", "Rooms", "check", "lower"]
