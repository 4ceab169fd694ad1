"""Host memory that several processes of one host share, so that each page of weights exists once.

[Note: Shared pages]
The ranks of a host map the same file. It has no name and lies in memory, so the system frees it
with the last process that maps it, however that ends. A rank opens the file that the first one has
made through procfs. Each has the pages at addresses of its own.

While a fit runs the mapping is shared: what one rank writes, all see. Which rank may write when,
collectives decide (``runtime.slices``). Before the fit, after it, and where code of the user may
write, a rank maps the same pages *apart*: it reads them, and a page that it writes becomes its own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import weakref
from typing import NamedTuple

from lightning_hetero._native import Arena
from lightning_hetero.store.raw_memory import PAGE
from lightning_hetero.units import MIB, round_up

_ROOM_BYTES = 1 << 42  # for the addresses of all weights; only pages that are written exist
_HUGE_PAGE = 2 * MIB
_PIECE_BYTES = MIB
_TOKEN_BYTES = 6  # a number that is exact as a float
_NOTE_BYTES = 2048


class FileAddress(NamedTuple):
    """Where the first process has the file, as numbers; the token tells it from other files."""

    process: int
    descriptor: int
    token: int


class SharedFile:
    """A file in memory that processes of one host map.

    Its first page has a token. Each process gives the same arenas the same place in the file, as
    each makes the same ones in the same order.

    Args:
        place: Where the first process has it; ``None``: this is the first one.

    Raises:
        OSError: The system has no such files, or this process cannot open that of the first one.
    """

    def __init__(self, place: FileAddress | None = None) -> None:
        self.is_first, self._end = place is None, _HUGE_PAGE
        if place is None:
            if not hasattr(os, "memfd_create"):
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
            self.descriptor = os.memfd_create("lightning_hetero", os.MFD_CLOEXEC)
        else:
            self.descriptor = os.open(f"/proc/{place.process}/fd/{place.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        if place is None:
            os.ftruncate(self.descriptor, _ROOM_BYTES)
            token = secrets.token_bytes(_TOKEN_BYTES)
            os.pwrite(self.descriptor, token, 0)
            place = FileAddress(os.getpid(), self.descriptor, int.from_bytes(token))
        self.place = place
        if os.pread(self.descriptor, _TOKEN_BYTES, 0) != place.token.to_bytes(_TOKEN_BYTES):
            raise OSError(errno.EREMOTE, os.strerror(errno.EREMOTE))

    def note(self, text: str) -> None:
        """Says why a process ends, for the others. The first word counts."""
        if not self.noted():
            os.pwrite(self.descriptor, text.encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0"), _TOKEN_BYTES)

    def noted(self) -> str:
        """What a process has said; empty if none has."""
        return os.pread(self.descriptor, _NOTE_BYTES, _TOKEN_BYTES).rstrip(b"\0").decode(errors="replace")

    def reserve(self, num_bytes: int) -> int:
        """The first byte of a new range."""
        first, self._end = self._end, self._end + round_up(num_bytes, _HUGE_PAGE if num_bytes >= _HUGE_PAGE else PAGE)
        return first


class SharedArena(Arena):
    """Reserved memory whose pages are those of a shared file, shared or apart."""

    __slots__ = ("_file", "_first", "is_shared")

    def __init__(self, num_bytes: int, file: SharedFile) -> None:
        super().__init__(num_bytes)
        self._file, self._first = file, file.reserve(num_bytes)
        self.is_shared = False
        if file.is_first:
            self.share()
        else:
            self.keep_apart()
        _arenas.add(self)

    @property
    def is_filled_here(self) -> bool:
        """Whether this process writes what all begin with."""
        return self._file.is_first

    def share(self, offset: int = 0, num_bytes: int | None = None) -> None:
        """From now on writes to the range are seen by all. What was written apart is lost."""
        self.is_shared = True
        self.map(self._file.descriptor, self._first + offset, shared=True, offset=offset, num_bytes=num_bytes)

    def keep_apart(self, offset: int = 0, num_bytes: int | None = None) -> None:
        """From now on pages of the range that this process writes are its own."""
        self.is_shared = bool(offset) or num_bytes is not None
        self.map(self._file.descriptor, self._first + offset, shared=False, offset=offset, num_bytes=num_bytes)

    def was_changed(self, offset: int, num_bytes: int) -> bool:
        """Whether the range, which is apart, has other bytes than the file."""
        file, first, address = self._file.descriptor, self._first, self.address
        pieces = _pieces(offset, num_bytes)
        return any(os.pread(file, size, first + at) != ctypes.string_at(address + at, size) for at, size in pieces)

    def write_back(self, offset: int, num_bytes: int) -> None:
        """Writes the range, which is apart, to the file."""
        for at, size in _pieces(offset, num_bytes):
            os.pwrite(self._file.descriptor, ctypes.string_at(self.address + at, size), self._first + at)

    def _leave_to_parent(self) -> None:
        """In a child of fork: what it writes stays its own."""
        if self.is_shared:
            self.map_in_child(self._file.descriptor, self._first)


_arenas: weakref.WeakSet[SharedArena] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for arena in _arenas:
        arena._leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def _pieces(offset: int, num_bytes: int) -> list[tuple[int, int]]:
    return [(at, min(_PIECE_BYTES, offset + num_bytes - at)) for at in range(offset, offset + num_bytes, _PIECE_BYTES)]
