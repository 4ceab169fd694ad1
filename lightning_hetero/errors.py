"""All errors of the library. Each message says what, got, allowed, remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CLOSE, _AS_CLOSE = 0.66, 0.05  # similarity of a mistyped name: at least, and at most this far below the best


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A hint for a mistyped name: ``" Did you mean 'disk'?"``; empty if no known name is close.

    Case and dashes before a name do not count. Several names are proposed if they are about equally
    close.
    """
    typed = str(name).lower().lstrip("-")
    likeness = {one: difflib.SequenceMatcher(None, typed, one.lower().lstrip("-")).ratio() for one in known}
    best = max(likeness.values(), default=0.0)
    close = [one for one in likeness if likeness[one] >= max(_CLOSE, best - _AS_CLOSE)]
    close.sort(key=lambda one: -likeness[one])
    return f" Did you mean {' or '.join(map(repr, close[:3]))}?" if close else ""


class HeteroError(Exception):
    """Base of all errors of this library."""


class ConfigError(HeteroError, ValueError):
    """An option, a plan or a model that cannot work as given."""


class UnsupportedError(HeteroError, RuntimeError):
    """Something that this library does not support. The message names an alternative."""


class OffloadedAccessError(HeteroError, RuntimeError):
    """Weights were read while they live on another tier, other than by a supported access."""


class ForkedProcessError(HeteroError, RuntimeError):
    """A forked child uses work of its parent's threads.

    Examples are weights that are not in memory, the session, and a checkpoint's writer.
    """


class OutOfMemoryBudgetError(HeteroError, MemoryError):
    """A tier's budget is too small for the data that must live there.

    Attributes:
        needed_bytes: The smallest sufficient budget; 0 if it is not known.
        tier: ``"host"`` or ``"device"``.
    """

    def __init__(self, message: str, needed_bytes: int = 0, tier: str = "host") -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.tier = tier


class DeviceMemoryError(OutOfMemoryBudgetError):
    """The device's memory has no gap that is large enough: it is full or fragmented.

    Attributes:
        free_bytes: Free bytes in total.
        largest_gap_bytes: The largest range of free addresses.
        capacity_bytes: The capacity of the memory.
    """

    def __init__(
        self, message: str, *, needed_bytes: int = 0, free_bytes: int = 0, largest_gap_bytes: int = 0, capacity_bytes: int = 0
    ) -> None:
        super().__init__(message, needed_bytes, "device")
        self.free_bytes = free_bytes
        self.largest_gap_bytes = largest_gap_bytes
        self.capacity_bytes = capacity_bytes


class BatchMemoryError(OutOfMemoryBudgetError, RuntimeError):
    """The device's memory is too small for a batch, and the step cannot be repeated with less.

    It is a ``RuntimeError`` with torch's own words in it, so that Lightning's batch size finder
    recognizes it.
    """


class PlanError(HeteroError, ValueError):
    """No plan fits the machine: names the tightest tier, the shortfall and the cheapest remedy.

    Attributes:
        tier: The tightest tier: ``"device"``, ``"host"`` or ``"disk"``.
        shortfall_bytes: Bytes that are missing there.
    """

    def __init__(self, message: str, *, tier: str = "", shortfall_bytes: int = 0) -> None:
        super().__init__(message)
        self.tier = tier
        self.shortfall_bytes = shortfall_bytes


class RateError(PlanError, ConfigError):
    """A plan needs work for which the machine's profile has no rate, so it cannot be costed."""


class NativeMissingError(HeteroError, ImportError):
    """The native library is missing or of another version."""


class ScheduleError(HeteroError, RuntimeError):
    """A schedule breaks an invariant: a bug, or an edited schedule. Names op, block and rule."""


class StoreError(HeteroError, OSError):
    """A transfer or a file of the disk tier failed. Nothing more is written afterwards."""


class OutOfDiskError(StoreError):
    """The disk, the quota or ``disk_capacity`` is too small: before training, or in a step."""


class StoreBusyError(StoreError):
    """Another process uses the store."""


class StoreCorruptError(StoreError):
    """Bytes that were read differ from those written: names block, chunk, file and offset.

    Attributes:
        fault: The same as data, if it is in one of a block's files.
    """

    def __init__(self, message: str, fault: object = None) -> None:
        super().__init__(message)
        self.fault = fault


class DataEndedError(ConfigError):
    """On a resume the data has fewer batches than had been used of the epoch.

    Attributes:
        batches: How many it has.
    """

    def __init__(self, message: str, batches: int = 0) -> None:
        super().__init__(message)
        self.batches = batches


class CheckpointMissingError(HeteroError, FileNotFoundError):
    """A checkpoint or a piece of one is missing: names it, the step, and the tried places."""


class CheckpointWriteError(HeteroError, OSError):
    """A background write of a checkpoint failed: names the step, the file, and the cause."""


class VerificationError(HeteroError, AssertionError):
    """``verify=N`` found a difference: names step, tensor, index and both values."""
