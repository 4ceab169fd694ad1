"""Lowering: plan → schedule, pure; the memory it may fill; and the invariants every schedule must keep."""

from lightning_hetero.lowering.check import check
from lightning_hetero.lowering.lower import lower
from lightning_hetero.lowering.needs import Needs, Purpose, needs_of, needs_of_shape, num_slots
from lightning_hetero.lowering.placed_blocks import fitted, lent_bytes, mirrored_bytes
from lightning_hetero.lowering.rooms import DeviceRoom, Rooms, budgeted, rooms
from lightning_hetero.lowering.steady import steady, step_signatures

__all__ = [
    "DeviceRoom",
    "Needs",
    "Purpose",
    "Rooms",
    "budgeted",
    "check",
    "fitted",
    "lent_bytes",
    "lower",
    "mirrored_bytes",
    "needs_of",
    "needs_of_shape",
    "num_slots",
    "rooms",
    "steady",
    "step_signatures",
]
