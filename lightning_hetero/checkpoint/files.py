"""Files by path or URL: local ones, and any URL that fsspec opens.

A written file is complete or absent.

[Note: Files of killed processes]
A local file is written beside its final name, as ``.NAME.DIGITS.partial``, under a lock that ends
with the process. A killed process leaves it. Whoever next writes into that directory removes those
that nobody has locked. A writer whose new file was removed before it had the lock makes another.
Many shared file systems keep locks on each host alone. So the digits begin with those of the host
since it was started, and files of other hosts stay.

[Note: Remote files]
A URL such as ``s3://bucket/model`` is opened through fsspec; its driver must be installed. No file
is in memory as a whole: writes are divided into pieces, and reads request only the bytes that they
need. A checkpoint to load is first copied to a temporary local file, because only a local file can
be mapped into memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import re
import socket
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

PIECE_BYTES = 16 * 2**20  # bytes of a remote file in memory at once

_LOCAL = ("file", "local")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A file or directory, local or remote; see [Note: Remote files].

    Attributes:
        url: Its path, or its URL.
    """

    url: str

    @classmethod
    def of(cls, path: str | os.PathLike[str] | Place) -> Place:
        """The place for a path or URL; ``~`` is the home directory."""
        if isinstance(path, Place):
            return path
        text = os.fspath(path)
        scheme, separator, rest = text.partition("://")
        if separator and scheme not in _LOCAL:
            return cls(text.rstrip("/"))
        return cls(os.path.expanduser(rest if separator else text))

    def __truediv__(self, name: str) -> Place:
        return Place(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        return self.url

    @property
    def local(self) -> Path | None:
        """The local path; ``None`` if the place is remote."""
        return None if "://" in self.url else Path(self.url)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return os.path.basename(self.url)

    @property
    def suffix(self) -> str:
        """The ending of its name, with the dot."""
        return os.path.splitext(self.url)[1]

    def is_file(self) -> bool:
        """Whether there is a file."""
        system, path = self._opened()
        return bool(system.isfile(path))

    def is_dir(self) -> bool:
        """Whether there is a directory."""
        system, path = self._opened()
        return bool(system.isdir(path))

    def names(self, ending: str) -> list[str]:
        """Sorted names in the directory with this ending; none if there is no directory."""
        system, path = self._opened()
        if not system.isdir(path):
            return []
        return sorted(n for n in map(os.path.basename, system.ls(path, detail=False)) if n.endswith(ending))

    def num_bytes(self) -> int:
        """Bytes of the file."""
        system, path = self._opened()
        return int(system.size(path))

    def open(self) -> IO[bytes]:
        """The file, to read.

        Raises:
            OSError: It cannot be opened.
        """
        if self.local is not None:
            return open(self.local, "rb", buffering=0)
        system, path = self._opened()
        stream: IO[bytes] = system.open(path, "rb")
        return stream

    def make_directory(self) -> None:
        """Makes the directory and its missing parents."""
        system, path = self._opened()
        system.makedirs(path, exist_ok=True)

    def remove(self) -> None:
        """Removes the file or directory, if it is there."""
        system, path = self._opened()
        if system.exists(path):
            system.rm(path, recursive=True)

    def remove_leftovers(self) -> None:
        """Removes what killed processes have left in a local directory; see the note above."""
        if self.local is not None:
            _remove_leftovers(self.local)

    @contextmanager
    def appears_whole(self) -> Iterator[IO[bytes]]:
        """A file to write. Missing directories are made, and an old file is replaced.

        If the context fails, no partial file is left.

        Raises:
            OSError: It cannot be written.
        """
        if self.local is not None:
            with _local_file(self.local) as stream:
                yield stream
            return
        system, path = self._opened()
        system.makedirs(os.path.dirname(path), exist_ok=True)
        with system.transaction, system.open(path, "wb") as stream:  # a transaction, if the file system has them
            pieces: Any = _Pieces(stream)
            yield pieces

    @contextmanager
    def copied(self) -> Iterator[Path]:
        """A local file with the content during the context: the file itself or a temporary copy.

        Raises:
            FileNotFoundError: There is no such file.
        """
        if self.local is not None:
            yield self.local
            return
        system, path = self._opened()
        with tempfile.TemporaryDirectory(prefix="lightning-hetero-copy-") as folder:
            target = Path(folder, "copy")
            system.get_file(path, str(target))
            yield target

    def _opened(self) -> tuple[Any, str]:
        """The file system, and the path in it."""
        fsspec: Any = importlib.import_module("fsspec.core")
        system, path = fsspec.url_to_fs(self.url)
        return system, path


class _Pieces:
    """A writable file that gets one piece at a time, because remote files keep it in memory."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            self._stream.write(view[start : start + PIECE_BYTES])
        return len(view)

    def flush(self) -> None:
        """Does nothing: the file is complete when it is closed."""


@contextmanager
def _local_file(path: Path) -> Iterator[IO[bytes]]:
    """Written beside its final name, synced, and renamed when the context ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path.parent)
    stream, partial = _locked_file(path)
    try:
        with stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            os.replace(partial, path)  # under the lock
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _locked_file(path: Path) -> tuple[IO[bytes], Path]:
    """A new file beside the path, and where it is; see [Note: Files of killed processes]."""
    while True:
        partial = path.with_name(f".{path.name}.{_host()}{uuid.uuid4().hex[:8]}.partial")
        stream = open(partial, "xb")  # noqa: SIM115  # the caller closes it
        with suppress(OSError):  # the file system has no locks: there nothing is removed
            fcntl.flock(stream, fcntl.LOCK_EX)
        if os.fstat(stream.fileno()).st_nlink:
            return stream, partial
        stream.close()


def _remove_leftovers(directory: Path) -> None:
    names = list[str]()
    with suppress(OSError):  # it may be written, and not be read
        names = os.listdir(directory)
    leftover = re.compile(rf"\..+\.{_host()}[0-9a-f]{{8}}\.partial")
    for name in names:
        path = directory / name
        if leftover.fullmatch(name) and path.is_file() and not path.is_symlink():
            # It may be locked, gone, or another user's. NFS gives this lock only to who may write.
            with suppress(OSError), open(path, "r+b") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def _host() -> str:
    """Digits for this host since it was started, whose processes see each other's locks."""
    try:
        boot = _BOOT.read_text()
    except OSError:
        boot = uuid.uuid4().hex  # nobody else's files are removed then
    return hashlib.sha256(f"{socket.gethostname()} {boot}".encode()).hexdigest()[:12]


def _sync_directory(directory: Path) -> None:
    """Makes a rename in ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
