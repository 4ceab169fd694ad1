"""Everything that the library raises on purpose. Each message says what, got, allowed, remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A hint for a mistyped name: ``" Did you mean 'disk'?"``, or nothing if no known name resembles it."""
    close = difflib.get_close_matches(str(name), list(known), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


class HeteroError(Exception):
    """Base of all errors of this library."""


class ConfigError(HeteroError, ValueError):
    """An option, a plan or a model that cannot work as given."""


class UnsupportedError(HeteroError, RuntimeError):
    """Something that this library does not do, named, with what to use instead."""


class OffloadedAccessError(HeteroError, RuntimeError):
    """Weights were read while they live on another tier, outside the door that materializes them."""


class ForkedProcessError(HeteroError, RuntimeError):
    """A child of fork uses what its parent's threads serve: weights that are not in memory, the session, a checkpoint's writer."""


class OutOfMemoryBudgetError(HeteroError, MemoryError):
    """A tier's budget is too small for what must live there.

    Attributes:
        needed_bytes: The smallest budget that would do; 0 where it is not known.
        tier: ``"host"`` or ``"device"``.
    """

    def __init__(self, message: str, needed_bytes: int = 0, tier: str = "host") -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.tier = tier


class DeviceMemoryError(OutOfMemoryBudgetError):
    """The device's memory has no gap that is large enough: too much is in use, or what is in use lies badly.

    Attributes:
        free_bytes: What is free in all.
        largest_gap_bytes: The largest run of free addresses.
        capacity_bytes: What the memory holds at most.
    """

    def __init__(self, message: str, *, needed_bytes: int, free_bytes: int, largest_gap_bytes: int, capacity_bytes: int) -> None:
        super().__init__(message, needed_bytes, "device")
        self.free_bytes = free_bytes
        self.largest_gap_bytes = largest_gap_bytes
        self.capacity_bytes = capacity_bytes


class BatchMemoryError(OutOfMemoryBudgetError, RuntimeError):
    """The device's memory is too small for a batch, and the step cannot begin again with less.

    It is a ``RuntimeError`` with torch's own words in it, so that Lightning's batch size finder takes it for what it is.
    """


class PlanError(HeteroError, ValueError):
    """No plan fits the machine: names the tightest tier, the shortfall and the cheapest remedy.

    Attributes:
        tier: The tightest tier: ``"device"``, ``"host"`` or ``"disk"``.
        shortfall_bytes: How much is missing there.
    """

    def __init__(self, message: str, *, tier: str = "", shortfall_bytes: int = 0) -> None:
        super().__init__(message)
        self.tier = tier
        self.shortfall_bytes = shortfall_bytes


class RateError(PlanError, ConfigError):
    """A plan needs work for which the machine's profile has no rate: such a plan cannot be costed, and does not run there."""


class NativeMissingError(HeteroError, ImportError):
    """The native library is missing or of another version."""


class ScheduleError(HeteroError, RuntimeError):
    """A schedule breaks one of its invariants: names op, block and rule. A bug of ours, or an edited schedule."""


class StoreError(HeteroError, OSError):
    """A transfer or a file of the disk tier failed. After it nothing more is written."""


class OutOfDiskError(StoreError):
    """The disk or the quota is full; raised when the store is laid out, before training."""


class StoreBusyError(StoreError):
    """Another process uses the store."""


class StoreCorruptError(StoreError):
    """Bytes read back are not those that were written: names block, chunk, file and offset."""


class CheckpointMissingError(HeteroError, FileNotFoundError):
    """A checkpoint, or a part of one, is nowhere: names what, the step, and the places that were tried."""


class CheckpointWriteError(HeteroError, OSError):
    """A checkpoint could not be written in the background: names the step, the file or place, and the cause."""


class VerificationError(HeteroError, AssertionError):
    """``verify=N`` found a tensor that is not the reference's: names step, tensor, index and both values."""
