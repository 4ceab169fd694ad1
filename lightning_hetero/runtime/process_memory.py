"""Lets malloc keep freed gradients for the next step, within the host budget.

[Note: Page faults]
By default glibc gives large tensors back to the kernel as soon as they are freed. Gradients and activations are freed and allocated
again every step, so each step faults all their pages in and zeroes them: a fifth of the step of GPT-2 124M on two cores.
While a model trains, freed memory therefore stays with the process.

[Note: Fragmentation]
Gradients are allocated by torch, freed when their update has consumed them, and the hole is often split by a small tensor before
the next gradient of that size comes: the heap grows by several blocks' gradients that nobody holds. Giving free pages back costs
page faults when they are used again, so it happens only when the process is beyond what the budget, or the machine, allows, or
would be if the gradients that come next found no hole.
"""

from __future__ import annotations

import ctypes
import os

import psutil

from lightning_hetero.store.capacity import available_memory_bytes, heap_meter, heap_size
from lightning_hetero.units import GIB, MIB

WORTH_IT = 32 * MIB
"""Memory that is worth the time that giving it back takes."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_LARGEST = 2 * GIB - 1  # mallopt takes an int
_USUAL = 32 * MIB  # where glibc's own adjustment of its thresholds ends
_USER_DECIDES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def give_free_pages_back() -> None:
    """What malloc keeps of freed memory goes back to the system, where the C library is glibc."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


class Heap:
    """Watches the process's resident memory between anchors, until it is closed.

    Args:
        host_memory: The user's budget; ``None``: nine tenths of what the machine has free.
        present_bytes: What of the budget is in memory already.

    Attributes:
        peak_bytes: The most resident memory that was seen, at the anchors where it is looked at; may be set back.
        counted_bytes: Activations for which the budget has room; those beyond come on top.
    """

    def __init__(self, host_memory: int | None, *, present_bytes: int) -> None:
        libc = ctypes.CDLL(None)
        self._trim = getattr(libc, "malloc_trim", None)  # glibc's; other libraries give large tensors back at once
        self._mallopt = None if any(name in os.environ for name in _USER_DECIDES) else getattr(libc, "mallopt", None)
        self._process = psutil.Process()
        # What malloc has given out: not the engine's memory, into which weights and state come while forward runs.
        self._allocated = heap_meter() if heap_size() else self._resident
        self.peak_bytes = 0
        self.counted_bytes = 0
        self._apart = self._resident() - present_bytes  # what the process holds beside the model
        self.allow(host_memory)
        self._before_forward = 0
        self._activations = 0
        self._in_vain = 0  # what was resident after giving back had brought nothing
        self._set_thresholds(_LARGEST)

    def allow(self, host_memory: int | None) -> None:
        """Sets the budget, as the argument of this name."""
        if host_memory is None:
            self._limit = self._resident() + available_memory_bytes() * 9 // 10
        else:
            self._limit = self._apart + host_memory

    def close(self) -> None:
        """Training is over: freed memory goes back to the system, now and from now on."""
        if self._mallopt is not None:
            self._set_thresholds(_USUAL)
            self._mallopt = None
            if self._trim is not None:
                self._trim(0)

    def _set_thresholds(self, num_bytes: int) -> None:
        """Memory above ``num_bytes`` goes back when it is freed; a C library that knows no such thing ignores it."""
        if self._mallopt is not None:
            self._mallopt(_M_MMAP_THRESHOLD, num_bytes)
            self._mallopt(_M_TRIM_THRESHOLD, num_bytes)

    def forward_begins(self, coming_bytes: int = 0) -> None:
        """A training step begins, in whose forward so much of the budget is filled that malloc does not give out."""
        if self._trim is not None:
            self.check(coming_bytes)
            self._before_forward = self._allocated()

    def backward_begins(self) -> None:
        """What forward added is activations; a budget that was set before they were known has no room for them."""
        if self._trim is not None:
            self._activations = max(self._activations, self._allocated() - self._before_forward - self.counted_bytes)

    def check(self, coming_bytes: int = 0) -> None:
        """Gives free heap pages back if the process is beyond budget and activations.

        Args:
            coming_bytes: What is about to be allocated, at most; there may be no hole for it.
        """
        resident = self._resident()
        if self._trim is None or resident + coming_bytes <= self._limit + self._activations:
            return
        if abs(resident - self._in_vain) < WORTH_IT:  # something else has the memory: do not look for it at every anchor
            return
        self._trim(0)
        left = self._resident()
        self._in_vain = left if resident - left < WORTH_IT else 0

    def lacking(self, coming_bytes: int) -> int:
        """Bytes by which the process is beyond budget and activations once so much has been allocated; 0 if it is not."""
        return max(0, self._resident() + coming_bytes - self._limit - self._activations)

    def _resident(self) -> int:
        resident = int(self._process.memory_info().rss)
        self.peak_bytes = max(self.peak_bytes, resident)
        return resident
