"""A device with streams as plans see it: how much of its memory they may use.

[Note: Memory of a GPU]
Free memory is measured once the process's context exists, with the libraries that matrix products
need. It includes unused memory in torch's cache. docs/devices.md says how it is divided: neither
the part for weights and state (``Lanes.memory``) nor torch's makes room for the other.

Where it is the host's own memory, a driver counts cached files as used (NVIDIA's for GB10: free
memory is ``MemFree``). The system drops them as soon as memory is asked for, so its figure counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch

from lightning_hetero.errors import OutOfMemoryBudgetError
from lightning_hetero.lanes.backends import BACKENDS, Backend
from lightning_hetero.store.capacity import available_memory_bytes
from lightning_hetero.units import KIB, MIB, format_bytes

_MOST_STAGING, _LEAST_STAGING = 16 * MIB, 64 * KIB
_STAGING_SHARE = 256  # each direction takes at most this part of the memory to convert in
_LOST_SHARE = 32  # this part is lost in gaps and workspaces
_GAPS = "inactive_split_bytes"  # in torch's statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDevice:
    """A device with streams; see [Note: Memory of a GPU]."""

    device: torch.device
    usable_bytes: int  # memory that this process may take from now on
    backend: Backend  # what it has of its own
    left_bytes: int = 0  # memory that is left to another use

    @classmethod
    def of(cls, device: torch.device, budget_bytes: int | None) -> Self:
        """Measures the current device of this process; without a budget all that is free counts.

        Raises:
            OutOfMemoryBudgetError: Hardly anything is free.
        """
        backend = BACKENDS[device.type]
        backend.begin()
        _warm_up(device)
        if backend.is_unified(device):
            torch.accelerator.empty_cache()  # what an earlier fit has left there is not free for the host
        usable = spare_bytes(device, backend)
        found = cls(device=device, usable_bytes=usable if budget_bytes is None else min(usable, budget_bytes), backend=backend)
        if found.memory_bytes <= 0:
            raise OutOfMemoryBudgetError(
                f"{format_bytes(max(0, found.usable_bytes))} of {device}'s memory may be used, which is too little for anything. "
                f"End what else uses the device, or raise device_memory.",
                _LEAST_STAGING,
                "device",
            )
        return found

    @property
    def is_unified(self) -> bool:
        """Whether its memory is the host's own."""
        return self.backend.is_unified(self.device)

    @property
    def apart_bytes(self) -> int:
        """Memory that it takes and plans do not have."""
        return self.left_bytes + self.usable_bytes - self.memory_bytes

    def held_bytes(self) -> int:
        """What torch has taken of it."""
        return 0 if self.device.type == "cpu" else torch.accelerator.memory_reserved(self.device)

    def without(self, num_bytes: int, what: str) -> Self:
        """The device with a part of its memory left to another use, which the error names.

        Raises:
            OutOfMemoryBudgetError: Hardly anything would be left.
        """
        left = replace(self, usable_bytes=self.usable_bytes - num_bytes, left_bytes=self.left_bytes + num_bytes)
        if left.memory_bytes <= 0:
            raise OutOfMemoryBudgetError(
                f"{what} needs {format_bytes(num_bytes)} of {self.device}, of which {format_bytes(self.usable_bytes)} may be used. "
                f"Leave it out, use a smaller model, or raise device_memory.",
                num_bytes + _LEAST_STAGING,
                "device",
            )
        return left

    @property
    def staging_bytes(self) -> int:
        """Memory in which the lanes convert, for each direction."""
        return max(_LEAST_STAGING, min(_MOST_STAGING, self.usable_bytes // _STAGING_SHARE))

    @property
    def memory_bytes(self) -> int:
        """Memory for plans; see [Note: Memory of a GPU]."""
        return self.usable_bytes - 2 * self.staging_bytes - self.usable_bytes // _LOST_SHARE

    @property
    def partitioned(self) -> bool:
        """Yes: torch's allocator does not know the memory of ops."""
        return True


def spare_bytes(device: torch.device, backend: Backend) -> int:
    """What torch's allocator can still give out of a device's memory, in any pieces.

    That is the free memory and the allocator's unused whole pieces, at most this process's share.
    Gaps between tensors in use do not count.
    """
    free, total = torch.accelerator.get_memory_info(device)
    if backend.is_unified(device):
        free = max(free, min(total, available_memory_bytes()))
    stats = torch.accelerator.memory_stats(device)
    reserved, allocated, gaps = (stats.get(f"{key}.all.current", 0) for key in ("reserved_bytes", "allocated_bytes", _GAPS))
    allowed = int(backend.share(device) * total)
    return int(min(free + reserved, allowed) - allocated - gaps)


def _warm_up(device: torch.device) -> None:
    """Makes the context and loads libraries, because torch does not count their memory."""
    with torch.enable_grad():
        for dtype in (torch.float32, torch.bfloat16):
            ones = torch.ones(16, 16, dtype=dtype, device=device, requires_grad=True)
            torch.autograd.backward(torch.mm(ones, ones).sum())  # its thread has workspaces of its own
    torch.accelerator.synchronize(device)
