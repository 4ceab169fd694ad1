"""Lowering: plan → schedule, the memory that it may fill, and the checker of schedules."""

from lightning_hetero.lowering.cache_sizes import CacheSizes, DeviceRoom, cache_sizes, cache_sizes_in_budget
from lightning_hetero.lowering.check import check
from lightning_hetero.lowering.lower import lower
from lightning_hetero.lowering.needs import Needs, Purpose, needs_of, needs_of_shape, num_slots, weight_file_bytes
from lightning_hetero.lowering.placed_blocks import fitted, lent_bytes, mirrored_bytes
from lightning_hetero.lowering.steady import steady, step_signatures
from lightning_hetero.lowering.weight_cache import WINDOW, staying

__all__ = [
    "WINDOW",
    "CacheSizes",
    "DeviceRoom",
    "Needs",
    "Purpose",
    "cache_sizes",
    "cache_sizes_in_budget",
    "check",
    "fitted",
    "lent_bytes",
    "lower",
    "mirrored_bytes",
    "needs_of",
    "needs_of_shape",
    "num_slots",
    "staying",
    "steady",
    "step_signatures",
    "weight_file_bytes",
]
