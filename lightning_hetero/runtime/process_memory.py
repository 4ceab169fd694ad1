"""Lets malloc keep freed gradients for the next step, within the host budget.

[Note: Page faults]
By default glibc gives freed large tensors back to the kernel at once, so each step would fault in
and zero all pages of gradients and activations: a fifth of the step of GPT-2 124M on two cores.
Therefore freed memory stays with the process while a model trains.

[Note: Fragmentation]
Torch allocates gradients and frees them after their update. Often a small tensor then splits the
hole before the next gradient of that size comes, and the heap grows by several blocks' gradients
that nothing uses. Free pages that go back cost page faults when they are used again. So they go
back only if the process exceeds the budget or the machine's memory, or would exceed it if the next
gradients found no hole.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from lightning_hetero.store.capacity import available_memory_bytes, heap_meter, malloc_answers, resident_bytes
from lightning_hetero.units import GIB, MIB

WORTH_IT = 32 * MIB
"""Memory that is worth the time that giving it back takes."""

_NEAR = 64 * MIB  # from its limit the process looks at what is really free
_SPARE = 24 * MIB  # what the kernel and other threads may take between two anchors

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_LARGEST = 2 * GIB - 1  # mallopt takes an int
_USUAL = 32 * MIB  # the largest threshold that glibc itself sets
_USER_DECIDES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def give_free_pages_back() -> None:
    """Gives the freed memory that malloc keeps back to the system, if the C library is glibc."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


class Heap:
    """Watches the process's resident memory between anchors, until it is closed.

    Malloc walks its free memory to say how much it has given out: for milliseconds in a large
    process. So it is asked only where memory may end.

    Args:
        host_memory: The user's budget; ``None``: nine tenths of the free memory.
        present_bytes: The part of the budget that is in memory already.
        resident_meter: Says how much memory the process holds, ``present_bytes`` included.
    """

    def __init__(self, host_memory: int | None, *, present_bytes: int, resident_meter: Callable[[], int] = resident_bytes) -> None:
        self._read_resident = resident_meter
        libc = ctypes.CDLL(None)
        self._trim = getattr(libc, "malloc_trim", None)  # glibc's; other libraries give large tensors back at once
        self._mallopt = None if any(name in os.environ for name in _USER_DECIDES) else getattr(libc, "mallopt", None)
        # Without the engine's memory, which fills during forward.
        self._allocated = heap_meter() if malloc_answers() else self._resident
        self.peak_bytes = 0  # the most resident memory at the anchors that measure it; may be set back
        self.counted_bytes = 0  # activations that the budget includes. More of them come on top
        self._apart = self._resident() - present_bytes  # memory of the process beside the model
        self.allow(host_memory)
        self._before_forward: int | None = None  # bytes given out as the last forward began, if it was asked then
        self._activations = 0
        self._in_vain = 0  # resident memory after a trim that freed nothing
        self._last_forward: int | None = None  # bytes given out at the last anchor, if it was asked there
        self._growth = 0  # the most that they grew by from one such anchor to the next
        self._set_thresholds(_LARGEST)

    def allow(self, host_memory: int | None) -> None:
        """Sets the budget; see the constructor."""
        self._takes_what_is_free = host_memory is None
        if host_memory is None:
            self._limit = self._resident() + available_memory_bytes() * 9 // 10
        else:
            self._limit = self._apart + host_memory

    def close(self) -> None:
        """Ends training: freed memory goes back to the system, now and from now on."""
        if self._mallopt is not None:
            self._set_thresholds(_USUAL)
            self._mallopt = None
            if self._trim is not None:
                self._trim(0)

    def _set_thresholds(self, num_bytes: int) -> None:
        """Blocks above this size go back when they are freed; other C libraries ignore it."""
        if self._mallopt is not None:
            self._mallopt(_M_MMAP_THRESHOLD, num_bytes)
            self._mallopt(_M_TRIM_THRESHOLD, num_bytes)

    def forward_begins(self, coming_bytes: int = 0) -> None:
        """A step begins. Its forward fills ``coming_bytes`` that malloc does not give out."""
        if self._trim is not None:
            self.check(coming_bytes)
        self._before_forward = self._last_forward = None if self._is_far(self._resident(), coming_bytes) else self._allocated()

    def backward_begins(self) -> None:
        """Forward has added activations, for which an early budget has no room."""
        if self._trim is not None and self._before_forward is not None:
            self._activations = max(self._activations, self._allocated() - self._before_forward - self.counted_bytes)

    def check(self, coming_bytes: int = 0) -> None:
        """Gives free heap pages back if the process exceeds budget and activations.

        ``coming_bytes`` are about to be allocated, and there may be no hole for them.
        """
        resident = self._resident()
        if self._trim is None or resident + coming_bytes <= self._limit + self._activations:
            return
        if abs(resident - self._in_vain) < WORTH_IT:  # something else uses the memory: do not trim at every anchor
            return
        self._trim(0)
        left = self._resident()
        self._in_vain = left if resident - left < WORTH_IT else 0

    def room(self) -> int:
        """Bytes that the process may still take within the budget, once free pages are back."""
        if self._trim is not None:
            self._trim(0)
        return max(0, self._limit - self._resident())

    def lacking(self, coming_bytes: int) -> int:
        """Bytes beyond budget and activations once ``coming_bytes`` are allocated, at least 0."""
        return max(0, self._resident() + coming_bytes - self._limit - self._activations)

    def missing(self, coming_bytes: int = 0, *, in_forward: bool = False) -> int:
        """Bytes of free memory that the next block lacks; 0 if the user has set a budget.

        Without ``host_memory`` the budget comes from the free memory, before a batch has shown what
        it needs. Where free memory ends, the kernel would kill the process. Once a batch has been
        profiled, the budget includes activations, and nothing is looked at here. ``coming_bytes``
        are allocated until the next anchor, beside what a block's forward adds. ``in_forward``
        notes how much the block before has added.
        """
        if not self._takes_what_is_free or self.counted_bytes:
            return 0
        before, self._last_forward = self._last_forward, None
        resident, coming_bytes = self._resident(), coming_bytes + _SPARE
        if self._is_far(resident, coming_bytes):  # a block adds no more than the process holds
            return 0
        if in_forward:
            self._last_forward = self._allocated()
            if before is not None:
                self._growth = max(self._growth, self._last_forward - before)
        coming_bytes += self._growth
        if resident + coming_bytes + _NEAR <= self._limit or available_memory_bytes() >= coming_bytes:
            return 0
        if self._trim is not None:
            self._trim(0)
        return max(0, coming_bytes - available_memory_bytes())

    def _is_far(self, resident: int, coming_bytes: int) -> bool:
        """Whether the budget is free memory, and would hold all that the process has once more."""
        return self._takes_what_is_free and 2 * resident + coming_bytes + _NEAR <= self._limit

    def _resident(self) -> int:
        resident = self._read_resident()
        self.peak_bytes = max(self.peak_bytes, resident)
        return resident
