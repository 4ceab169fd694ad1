"""Weights that are read in place, from safetensors files that the store does not own.

[Note: In place]
Frozen weights that a file has with the same dtype and in the same order are not copied to the
store. A record says which bytes of which file they are, and which file that was: its size, the time
of its last change, and a digest of its header and of bytes in the middle of each tensor. Two models
of one kind have equal headers and sizes, and archives and images give all files one time. So only
the weights themselves tell such files apart. The file is never written. If another file has its
name, the weights are refused by name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from lightning_hetero.errors import StoreCorruptError, StoreError
from lightning_hetero.store.raw_memory import memory_of

_HEADER_BYTES_MAX = 100_000_000  # the safetensors package's limit
_SAMPLE_BYTES = 256


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor in a local file, row after row.

    Attributes:
        path: The file.
        dtype: Its dtype there.
        start: Its first byte.
    """

    path: str
    dtype: torch.dtype
    start: int


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file from which weights are read, as it was when training began.

    Attributes:
        path: Its path without links.
        num_bytes: Its size.
        mtime_ns: When it was last changed, in nanoseconds.
        digest: SHA-256 of its header and of a sample of each tensor, in hexadecimal digits.
    """

    path: str
    num_bytes: int
    mtime_ns: int
    digest: str

    @classmethod
    def of(cls, path: str) -> SourceFile:
        """The file as it is now.

        Raises:
            StoreCorruptError: It is gone, or cannot be read.
        """
        real = os.path.realpath(path)
        try:
            status = os.stat(real)
            return cls(real, status.st_size, status.st_mtime_ns, _digest(real))
        except OSError as error:
            raise StoreCorruptError(
                f"{real!r}, from which frozen weights are read in place, cannot be read: {error.strerror}. Bring the file back."
            ) from error

    def check(self) -> None:
        """Compares with the file that has the path now.

        Raises:
            StoreCorruptError: It is gone, or is another one. Names what differs.
        """
        found = SourceFile.of(self.path)
        for what, old, new in (
            ("size", self.num_bytes, found.num_bytes),
            ("header or a tensor's sample", self.digest[:12], found.digest[:12]),
            ("time of its last change", self.mtime_ns, found.mtime_ns),
        ):
            if old != new:
                raise StoreCorruptError(
                    f"{self.path!r}, from which frozen weights are read in place, has changed since training began: its {what} "
                    f"is {new}, it was {old}. Bring the file back as it was; `cp -p` and `rsync -t` keep the time."
                )


class SourceRun(NamedTuple):
    """Bytes of a file that are bytes of a part.

    Attributes:
        offset: First byte in the part's memory.
        file: Number of the file.
        start: First byte in the file.
        num_bytes: How many.
    """

    offset: int
    file: int
    start: int
    num_bytes: int


@dataclass(frozen=True)
class InPlace:
    """Where the weights of a part are read.

    Attributes:
        files: The files.
        runs: What of them it is, in the order of the part's memory. A slice that is padding alone
            has none.
    """

    files: tuple[SourceFile, ...]
    runs: tuple[SourceRun, ...]

    @cached_property
    def text(self) -> str:
        """As it stands in a record: JSON."""
        files = [[f.path, f.num_bytes, f.mtime_ns, f.digest] for f in self.files]
        return json.dumps([files, self.runs], separators=(",", ":"))

    def check(self) -> None:
        """Checks that all files are as they were.

        Raises:
            StoreCorruptError: Names the first one that is not.
        """
        for file in self.files:
            file.check()

    def cut(self, first: int, num_bytes: int) -> InPlace:
        """The same for a run of the part's bytes, such as the slice of a rank."""
        found = []
        for run in self.runs:
            begin, end = max(first, run.offset), min(first + num_bytes, run.offset + run.num_bytes)
            if begin < end:
                found.append(SourceRun(begin - first, run.file, run.start + begin - run.offset, end - begin))
        return joined([(0, InPlace(self.files, tuple(found)))])

    def read(self, first: int, out: torch.Tensor) -> None:
        """Reads bytes of the part from ``first`` on into a flat CPU tensor of bytes.

        Raises:
            StoreCorruptError: A file is gone, shorter, or another one.
        """
        self.check()
        out.zero_()
        memory = memory_of(out) if out.numel() else memoryview(b"")
        for run in self.runs:
            begin, end = max(first, run.offset), min(first + out.numel(), run.offset + run.num_bytes)
            if begin < end:
                _read(self.files[run.file].path, run.start + begin - run.offset, memory[begin - first : end - first])


def parse(row: Any) -> InPlace:
    """Reads :attr:`InPlace.text` back, as JSON; nothing in it is trusted.

    Raises:
        ValueError: It is nothing like that.
        TypeError: The same.
    """
    some_files, some_runs = row
    files = tuple(SourceFile(*file) for file in some_files)
    runs = tuple(SourceRun(*run) for run in some_runs)
    for file in files:
        if not (isinstance(file.path, str) and os.path.isabs(file.path) and isinstance(file.digest, str)):
            raise ValueError("a file of another type")
        if not _counts(file.num_bytes, file.mtime_ns):
            raise ValueError("a file of another type")
    end = 0
    for run in runs:
        if not _counts(run.offset, run.file, run.start, run.num_bytes) or run.file >= len(files) or run.offset < end:
            raise ValueError("a run of another type")
        if run.start + run.num_bytes > files[run.file].num_bytes:
            raise ValueError("a run that leaves its file")
        end = run.offset + run.num_bytes
    return InPlace(files, runs)


def joined(pieces: Iterable[tuple[int, InPlace]]) -> InPlace:
    """Puts pieces of a part together, each behind its first byte there, without files unused."""
    numbers: dict[SourceFile, int] = {}
    runs = [
        SourceRun(first + run.offset, numbers.setdefault(piece.files[run.file], len(numbers)), run.start, run.num_bytes)
        for first, piece in pieces
        for run in piece.runs
    ]
    return InPlace(tuple(numbers), tuple(runs))


def in_place(places: Mapping[int, tuple[TensorPlace, int]], known: dict[str, SourceFile]) -> InPlace:
    """Puts tensors together.

    Args:
        places: By their first byte in the part: where they are, and how many bytes they have.
        known: Files by path; those that are new are added.

    Raises:
        StoreCorruptError: A file cannot be read.
    """
    paths = sorted({place.path for place, _ in places.values()})
    for path in paths:
        if path not in known:
            known[path] = SourceFile.of(path)
    runs = [SourceRun(offset, paths.index(p.path), p.start, size) for offset, (p, size) in sorted(places.items()) if size]
    return InPlace(tuple(known[path] for path in paths), tuple(runs))


def _counts(*values: Any) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _digest(path: str) -> str:
    """Of the header, and of the bytes in the middle of each tensor."""
    with open(path, "rb", buffering=0) as file:
        start = file.read(8)
        header = file.read(min(int.from_bytes(start, "little"), _HEADER_BYTES_MAX))
        digest = hashlib.sha256(start + header)
        data = len(start) + len(header)
        for begin, end in _extents(header, os.fstat(file.fileno()).st_size - data):
            middle = (begin + end) // 2
            digest.update(os.pread(file.fileno(), min(_SAMPLE_BYTES, end - middle), data + middle))
    return digest.hexdigest()


def _extents(header: bytes, num_bytes: int) -> list[tuple[int, int]]:
    """First byte and end of each tensor in the data; none if this is no header of such data."""
    try:
        rows = [row["data_offsets"] for name, row in json.loads(header).items() if name != "__metadata__"]
        extents = sorted((begin, end) for begin, end in rows)
    except (ValueError, TypeError, KeyError, AttributeError):
        return []
    return extents if all(_counts(*extent) and extent[0] <= extent[1] <= num_bytes for extent in extents) else []


def _read(path: str, offset: int, memory: memoryview) -> None:
    done = 0
    try:
        with open(path, "rb", buffering=0) as file:
            while done < len(memory) and (got := os.preadv(file.fileno(), [memory[done:]], offset + done)):
                done += got
    except OSError as error:
        raise StoreError(
            f"{path!r}, from which frozen weights are read in place, cannot be read at offset {offset + done}: {error.strerror}. "
            f"Bring the file back, or see to its disk."
        ) from error
    if done < len(memory):
        raise StoreCorruptError(f"{path!r} ends at byte {offset + done}, inside frozen weights. Bring the file back.")
