"""Page-locked host memory of exact size, as far as the machine allows it.

[Note: Page-locked memory]
Copies between a GPU and pageable memory go through a buffer of the driver, which is slower and
blocks the thread. ``torch`` rounds its own page-locked memory up to powers of two, which is too
much for gradients of gigabytes. So memory is mapped by its size and registered with the driver.
Registration brings in all pages at once. If a control group has less memory left, the kernel would
end the process, so there the memory stays pageable. Some drivers do not count page-locked memory
against ``RLIMIT_MEMLOCK``, others may: the message of a refusal names the limit.

A child of fork, such as a worker of a data loader, gets none of this memory. The kernel would copy
page-locked pages for each child, or give the parent new pages at its next write, and the device
would not know of them.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import resource
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_hetero.lanes.backends import Backend
from lightning_hetero.store.raw_memory import advise_huge
from lightning_hetero.units import format_bytes, round_up

log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None)


class _Pages(mmap.mmap):
    """Anonymous memory that ends with its last view, and is unregistered before."""

    unregister: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unregister is not None:
            self.unregister()


class PageLocker:
    """Maps and registers host memory. Thread-safe.

    Memory that cannot be registered stays pageable, which is logged once per reason. Memory must
    not be freed before the last copy from it or to it is done.

    Args:
        backend: What page-locks memory.
        forget_error: Clears the driver's last error; else torch attributes it to the next kernel.
        room: Returns the bytes of host memory that are free for this process now.
    """

    def __init__(self, backend: Backend, forget_error: Callable[[], object], room: Callable[[], int]) -> None:
        self._backend, self._forget_error, self._room = backend, forget_error, room
        self._locked: dict[int, int] = {}  # others' memory: address -> bytes
        self._said: set[str] = set()

    def buffer(self, num_bytes: int) -> Tensor:
        """Memory of this size: uint8, flat, freed with its last view."""
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        room = self._room()  # before anything is mapped
        pages = _Pages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advise_huge(pages, num_bytes)  # before registration brings the pages in: huge ones take less time
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        if num_bytes > room:
            self._say(
                "room",
                f"{format_bytes(num_bytes)} of host memory stay pageable: this process has only {format_bytes(room)} left, and "
                f"page-locked memory is taken at once. Copies are slower. Lower host_memory, or raise the control group's limit "
                f"(docker run --memory).",
            )
        elif self._register(memory.data_ptr(), num_bytes):
            pages.madvise(mmap.MADV_DONTFORK)
            pages.unregister = self._unregister(memory.data_ptr())
        return memory

    def lock(self, memory: Tensor) -> None:
        """Registers memory that is mapped until :meth:`close`."""
        address = memory.data_ptr()
        if memory.numel() and address not in self._locked and self._register(address, memory.nbytes):
            self._locked[address] = memory.nbytes
            _advise(address, memory.nbytes, mmap.MADV_DONTFORK)

    def unlock(self, memory: Tensor) -> None:
        """Unregisters memory of :meth:`lock`."""
        address = memory.data_ptr()
        if address in self._locked:
            self._unlock(address, self._locked.pop(address))

    def close(self) -> None:
        """Unregisters all memory of :meth:`lock`."""
        while self._locked:
            self._unlock(*self._locked.popitem())

    def _unlock(self, address: int, num_bytes: int) -> None:
        self._unregister(address)()
        _advise(address, num_bytes, mmap.MADV_DOFORK)

    def _register(self, address: int, num_bytes: int) -> bool:
        code = self._backend.page_lock(address, num_bytes)
        if code is None:
            self._say(
                "no call",
                f"Host memory stays pageable: torch has no call that page-locks it for {self._backend.kind} devices. Copies are "
                f"slower.",
            )
        elif code:
            self._forget_error()
            soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            limit = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
            self._say(
                "refused",
                f"{format_bytes(num_bytes)} of host memory stay pageable: the driver refused to page-lock them (error {code}). "
                f"Copies are slower. The limit on locked memory is {limit}; where that is the cause raise it with "
                f"'ulimit -l unlimited' (docker run --ulimit memlock=-1).",
            )
        return code == 0

    def _unregister(self, address: int) -> Callable[[], object]:
        process, backend = os.getpid(), self._backend

        def unregister() -> None:
            if os.getpid() == process:  # a child of fork has no driver
                backend.page_unlock(address)

        return unregister

    def _say(self, reason: str, message: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            log.warning(message)


def _advise(address: int, num_bytes: int, advice: int) -> None:
    """``madvise`` for memory that begins with a page; other memory may share its pages."""
    if address % mmap.PAGESIZE == 0:
        _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(round_up(num_bytes, mmap.PAGESIZE)), advice)
