"""Files of a store for what of a training state is too large for a commit record.

[Note: State files]
A record names such a file by the digest of its content and its size: ``state-`` and 32 hexadecimal
digits. It is whole, and with ``durability="power"`` on the disk, before the record that names it is
begun; it is never changed, so content that stays the same is written once, and a snapshot links it.
The files of the last kept step stay until the record of the next one is there; the others go before
that step's are written. What a process leaves that dies in between no record names, and the next
one removes it.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_hetero._native.kernels import digest
from lightning_hetero.errors import OutOfDiskError, StoreCorruptError
from lightning_hetero.store.format.directory import StoreDirectory
from lightning_hetero.store.format.encoding import Encoded, unpack
from lightning_hetero.store.volume import disk_error
from lightning_hetero.units import KIB, MIB, format_bytes

_ITEM_BYTES, _STATE_BYTES = 64 * KIB, 128 * KIB  # in the record: per item, in all
_NAME_BYTES = 128  # naming a file takes hardly less
_CHUNK_BYTES = 4 * MIB


class StateFiles:
    """The state files of a run, and what goes into them.

    Args:
        directory: The store's directory.
        durable: What is written has to survive a crash of the system.

    Attributes:
        room_bytes: How many bytes all of them may take.
    """

    def __init__(self, directory: StoreDirectory, *, durable: bool) -> None:
        self.room_bytes: Callable[[], float] = lambda: math.inf
        self._directory, self._durable = directory, durable
        self._there: dict[str, int] = {}  # bytes of each file
        self._kept: frozenset[str] = frozenset()  # what the last kept step's record names
        self._named: set[str] = set()  # what the next one's is going to
        self._inline_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the files that are there."""
        return sum(self._there.values())

    @property
    def kept(self) -> list[str]:
        """Names of the files of the last kept step."""
        return sorted(self._kept)

    @property
    def has_old(self) -> bool:
        """Whether there are files beside those of the last kept step."""
        return len(self._there) > len(self._kept)

    def adopt(self, files: Mapping[str, int]) -> None:
        """The record that a resume goes on from names these, with their bytes."""
        self._there, self._kept = dict(files), frozenset(files)

    def begin(self) -> None:
        """A step's state comes next; the record of the last kept one is there."""
        for name in self._there.keys() - self._kept:
            self._directory.remove_file(name)
            del self._there[name]
        self._named, self._inline_bytes = set(), 0

    def put(self, value: Any, where: str) -> str:
        """The text of a value for the record: all of it, or the name of its file, which is written.

        Args:
            value: The value.
            where: What it is, for the message.

        Raises:
            ConfigError: Something in it has no safe form; names the place and the type.
            OutOfDiskError: There is no room for the file.
            StoreError: It cannot be written.
        """
        encoded = Encoded(value, where)
        text = encoded.short_text(max(_NAME_BYTES, min(_ITEM_BYTES, _STATE_BYTES - self._inline_bytes)))
        if text is None:
            name, size = self._write(encoded.pieces(), where)
            text = f'{{"$":["file","{name}",{size}]}}'
        self._inline_bytes += len(text)
        return text

    def end(self) -> None:
        """The state is whole; what the record is going to name has to be on the disk now."""
        if self._durable and self._named - self._kept:
            self._directory.sync()

    def committed(self) -> None:
        """The step's record is being written; :meth:`begin` comes after it."""
        self._kept = frozenset(self._named)

    def _write(self, pieces: list[bytes | memoryview], where: str) -> tuple[str, int]:
        size, found = sum(map(len, pieces)), Digest()
        for chunk in _chunks(pieces, size):
            found.add(chunk)
        name = found.name
        self._named.add(name)
        if name in self._there:
            return name, size
        left = self.room_bytes() - self.num_bytes
        if size > left:
            raise OutOfDiskError(
                f"{where}: {format_bytes(size)} have to be kept with each step, and disk_capacity leaves "
                f"{format_bytes(max(0, int(left)))} beside what is there of the last one. Raise disk_capacity, or keep less there."
            )
        try:
            with self._directory.new_file(name) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                for chunk in _chunks(pieces, size):
                    file.write(chunk)
                if self._durable:
                    os.fdatasync(file.fileno())
        except OSError as error:
            self._directory.remove_file(name)
            raise disk_error(
                error,
                f"{where}: {format_bytes(size)} have to be kept with each step, and {str(self._directory.path / name)!r} cannot be "
                f"written: {error.strerror}. Make room on that disk, choose a larger one, or keep less there.",
            ) from error
        self._there[name] = size
        return name, size


def read_value(directory: Path, name: str, size: int) -> Any:
    """The value of a state file.

    Args:
        directory: The store.
        name: The file's name, from a record.
        size: Its bytes, from there.

    Raises:
        StoreCorruptError: It is missing, or not what the record names.
        ConfigError: It was written by another program or version.
    """
    content = bytearray()
    if what := _read(directory, name, size, content.extend):
        raise StoreCorruptError(
            f"{directory / name}: {what}. It holds a part of the training state of the last step, which cannot be resumed from "
            f"without it. Bring it back from a copy of the store, or go on from a checkpoint."
        )
    return unpack(memoryview(content))


def fault_of(directory: Path, name: str, size: int) -> str:
    """What is wrong with a state file; empty if nothing is."""
    return _read(directory, name, size, len)


def _read(directory: Path, name: str, size: int, then: Callable[[memoryview], object]) -> str:
    """Gives a file's content to ``then``, chunk by chunk, and says what is wrong with it."""
    try:
        descriptor = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return "it is not a regular file"
            if status.st_size != size:
                return f"it has {status.st_size} bytes, the record says {size}"
            chunk, found = memoryview(bytearray(min(size, _CHUNK_BYTES))), Digest()
            while count := file.readinto(chunk):
                found.add(chunk[:count])
                then(chunk[:count])
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return "" if name == found.name else "its digest differs from the one in its name"


def _chunks(pieces: Iterable[bytes | memoryview], size: int) -> Iterator[memoryview]:
    """The same bytes in chunks of the size of digests and writes."""
    chunk, filled = memoryview(bytearray(min(size, _CHUNK_BYTES))), 0
    for piece in pieces:
        done = 0
        while done < len(piece):
            count = min(len(piece) - done, len(chunk) - filled)
            chunk[filled : filled + count] = piece[done : done + count]
            done, filled = done + count, filled + count
            if filled == len(chunk):
                yield chunk
                filled = 0
    if filled:
        yield chunk[:filled]


class Digest:
    """What a file is called, by its chunks.

    The store's own digest of a chunk would miss one in 2**32 changes of a single word, which is
    enough for finding damage, and too little for taking one content for another. With a second
    polynomial beside it no such change is missed.
    """

    def __init__(self) -> None:
        self._whole = hashlib.blake2b(digest_size=16)

    def add(self, chunk: memoryview) -> None:
        """The next chunk, writable."""
        self._whole.update(digest(ctypes.addressof(ctypes.c_char.from_buffer(chunk)), len(chunk)))
        self._whole.update(zlib.crc32(chunk).to_bytes(4, "little"))

    @property
    def name(self) -> str:
        """The name."""
        return f"state-{self._whole.hexdigest()}"
