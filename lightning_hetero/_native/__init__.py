"""The native core behind ctypes: the trust boundary.

Everything that reaches C goes through here and is checked here: dtype codes, bounds, alignment,
lifetimes. Memory is named by integer addresses; neither torch nor numpy is imported. Calls release
the GIL. Every failure becomes a class of ``lightning_hetero.errors`` (or ``TimeoutError``) that
carries the native text.

What the C interface and the files call a *block* is a *part* in Python: a block of the model has
one part for each dtype, trainability and optimizer among its parameters.
"""

from __future__ import annotations

from lightning_hetero._native.engine import DONE, MAX_DISKS, READY, Engine, EngineStats, Segment, Ticket, TicketTimes
from lightning_hetero._native.geometry import PartGeometry, file_bytes
from lightning_hetero._native.kernels import (
    ADAMW,
    MAXIMIZE,
    Hyper,
    Isa,
    adam,
    digest,
    force_isa,
    isa,
    move_like_adam,
    sum_of_squares,
)
from lightning_hetero._native.library import ABI_VERSION, BF16, F16, F32, LIBRARY_ENV, U8, library_path
from lightning_hetero._native.store import Arena, InPlacePart, NativePart, Patch, RunFile, Store

__all__ = [
    "ABI_VERSION",
    "ADAMW",
    "BF16",
    "DONE",
    "F16",
    "F32",
    "LIBRARY_ENV",
    "MAXIMIZE",
    "MAX_DISKS",
    "READY",
    "U8",
    "Arena",
    "Engine",
    "EngineStats",
    "Hyper",
    "InPlacePart",
    "Isa",
    "NativePart",
    "PartGeometry",
    "Patch",
    "RunFile",
    "Segment",
    "Store",
    "Ticket",
    "TicketTimes",
    "adam",
    "digest",
    "file_bytes",
    "force_isa",
    "isa",
    "library_path",
    "move_like_adam",
    "sum_of_squares",
]
