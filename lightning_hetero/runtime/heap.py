"""Keeps the process within the host budget although malloc keeps what was freed.

[Note: Fragmentation]
Gradients are allocated by torch, freed when their update has consumed them, and the hole is often split by a small tensor before
the next gradient of that size comes: the heap grows by several blocks' gradients that nobody holds. Giving free pages back costs
page faults when they are used again, so it happens only when the process is beyond what the budget allows.
"""

from __future__ import annotations

import ctypes

import psutil

from lightning_hetero.units import MIB

_WORTH_IT = 32 * MIB


class Heap:
    """Watches the process's resident memory between anchors.

    Args:
        host_memory: The user's budget; ``None`` watches nothing.
        present_bytes: What of the budget is in memory already.
    """

    def __init__(self, host_memory: int | None, *, present_bytes: int) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other libraries give large tensors back at once
        self._process = psutil.Process()
        self._limit = 0
        if host_memory is None:
            self._trim = None
        else:
            self._limit = self._resident() - present_bytes + host_memory
        self._before_forward = 0
        self._activations = 0

    def forward_begins(self) -> None:
        """A training step begins."""
        if self._trim is not None:
            self.check()
            self._before_forward = self._resident()

    def backward_begins(self) -> None:
        """What forward added is activations, which come on top of the budget."""
        if self._trim is not None:
            self._activations = max(self._activations, self._resident() - self._before_forward)

    def check(self) -> None:
        """Gives free heap pages back if the process is beyond budget and activations."""
        resident = self._resident() if self._trim is not None else 0
        if self._trim is None or resident <= self._limit + self._activations:
            return
        self._trim(0)
        left = self._resident()
        if resident - left < _WORTH_IT:  # something else has the memory: do not look for it at every anchor
            self._limit = left + _WORTH_IT - self._activations

    def _resident(self) -> int:
        return int(self._process.memory_info().rss)
