"""A CUDA or ROCm device as plans see it: what of its memory they may use.

[Note: Memory of a GPU]
What is free is asked for once the process's context is there, with the libraries that matrix products need, and counts what torch
keeps of memory that it has given out before. Of that, or of ``device_memory`` where it is less, a part is left alone: staging
memory of the lanes, workspaces of libraries, and what is lost between tensors in torch's allocator. The rest is for plans: weights
and optimizer state have one run of it, set aside at once (``Lanes.memory``), and torch's allocator the other, for activations and
gradients. So a step makes no room by moving either.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from lightning_hetero.errors import OutOfMemoryBudgetError
from lightning_hetero.units import KIB, MIB, format_bytes

_MOST_STAGING, _LEAST_STAGING = 16 * MIB, 64 * KIB
_STAGING_SHARE = 256  # of the memory each direction takes at most this part to convert in
_LOST_SHARE = 32  # and this part is lost between tensors, or in workspaces
_GAPS = "inactive_split_bytes"  # in torch's statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """A device with streams; see [Note: Memory of a GPU].

    Attributes:
        device: Which one.
        usable_bytes: What this process may take of its memory from now on.
        cuda: ``torch.cuda``, or what stands in for it in tests.
    """

    device: torch.device
    usable_bytes: int
    cuda: Any = torch.cuda

    @classmethod
    def of(cls, device: torch.device, budget_bytes: int | None) -> Self:
        """Looks at a device.

        Args:
            device: It; the current one of this process.
            budget_bytes: Most that may be used; ``None``: what is free.

        Raises:
            OutOfMemoryBudgetError: Hardly anything is free.
        """
        _warm_up(device)
        usable = spare_bytes(device)
        found = cls(device=device, usable_bytes=usable if budget_bytes is None else min(usable, budget_bytes))
        if found.memory_bytes <= 0:
            raise OutOfMemoryBudgetError(
                f"{format_bytes(max(0, found.usable_bytes))} of {device}'s memory may be used, which is too little for anything. "
                f"End what else uses the device, or raise device_memory.",
                _LEAST_STAGING,
                "device",
            )
        return found

    def without(self, num_bytes: int, what: str) -> Self:
        """The device with so much of its memory left to somebody else.

        Args:
            num_bytes: How much.
            what: What for.

        Raises:
            OutOfMemoryBudgetError: Hardly anything would be left.
        """
        left = replace(self, usable_bytes=self.usable_bytes - num_bytes)
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
        """What the lanes convert in, for each direction."""
        return max(_LEAST_STAGING, min(_MOST_STAGING, self.usable_bytes // _STAGING_SHARE))

    @property
    def memory_bytes(self) -> int:
        """What plans may use: all but what is left alone."""
        return self.usable_bytes - 2 * self.staging_bytes - self.usable_bytes // _LOST_SHARE

    @property
    def partitioned(self) -> bool:
        """Yes: torch's allocator knows nothing of what ops take."""
        return True


def spare_bytes(device: torch.device) -> int:
    """What torch's allocator can still give out of a device's memory, however it is cut.

    That is what is free there and what the allocator keeps in whole pieces, at most this process's share. Gaps between tensors
    that are in use do not count.

    Args:
        device: A CUDA or ROCm device.
    """
    free, total = torch.accelerator.get_memory_info(device)
    stats = torch.accelerator.memory_stats(device)
    reserved, allocated, gaps = (stats.get(f"{key}.all.current", 0) for key in ("reserved_bytes", "allocated_bytes", _GAPS))
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return int(min(free + reserved, allowed) - allocated - gaps)


def _warm_up(device: torch.device) -> None:
    """Makes the process's context, and loads what matrix products need: both take memory that is not torch's."""
    for dtype in (torch.float32, torch.bfloat16):
        ones = torch.ones(16, 16, dtype=dtype, device=device)
        torch.mm(ones, ones)
    torch.accelerator.synchronize(device)
