"""A place that holds saves: a folder of this machine, or any URL that fsspec knows.

[Note: Layout]
Every tier holds a save in the same form: ``ROOT/SAVE/`` with one file per layer and group of
holders, ``meta.pt`` (objects that are no tensors), ``.metadata`` (of torch.distributed.checkpoint)
and, last, ``map.json``. For the local tiers ROOT is the configured folder, with the layers of this
node's ranks. For the remote tier it is the checkpoint's own path, with everything, and with
``.metadata`` and ``meta.pt`` once more: so it is an ordinary distributed checkpoint, for torch and
for Lightning.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_hetero.checkpoint.files import PIECE_BYTES
from lightning_hetero.errors import ConfigError

_NODE = ".node"
_Buffer = bytes | bytearray | memoryview


class CheckpointTier:
    """Reads and publishes files below one root.

    Args:
        name: ``"memory"``, ``"disk"`` or ``"remote"``.
        url: The root: a path or an fsspec URL.
        durable: Whether to flush a file before it is published; otherwise it survives the process,
            but not the machine.
    """

    def __init__(self, name: str, url: str | os.PathLike[str], *, durable: bool = True) -> None:
        self.name, self.durable = name, durable
        self.fs: Any
        self.fs, self.root = url_to_fs(os.fspath(url))
        self.is_local = isinstance(self.fs, LocalFileSystem)

    def __str__(self) -> str:
        return f"{self.name} ({self.fs.unstrip_protocol(self.root)})"

    def path(self, *parts: str) -> str:
        """The path of a file or folder below the root."""
        return "/".join((self.root.rstrip("/"), *parts))

    def publish(self, name: str, content: Sequence[_Buffer]) -> None:
        """Publishes a complete file: it gets its name only after it is written.

        Object stores show an object when it is closed. In a folder it is flushed and renamed.
        """
        path = self.path(name)
        if not self.is_local:
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            with self.fs.open(path, "wb") as file:
                for part in content:
                    for start in range(0, len(part), PIECE_BYTES):  # drivers keep their input in memory
                        file.write(memoryview(part)[start : start + PIECE_BYTES])
            return
        folder = Path(path).parent
        folder.mkdir(parents=True, exist_ok=True)
        partial = f"{path}.{uuid.uuid4().hex}.part"
        try:
            with open(partial, "wb") as file:
                for part in content:
                    file.write(part)
                file.flush()
                if self.durable:
                    os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
        if self.durable:
            directory = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Bytes ``start`` to ``end`` of a file; all of it by default.

        Raises:
            OSError: It is missing or cannot be read.
        """
        content: bytes = self.fs.cat_file(self.path(name), start=start, end=end)
        return content

    def list(self, *folder: str) -> list[str]:
        """The names in a folder; none if there is no such folder."""
        self.fs.invalidate_cache()
        try:
            found: list[str] = self.fs.ls(self.path(*folder), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(f.rstrip("/").rpartition("/")[2] for f in found)

    def remove(self, *name: str) -> None:
        """Removes a file, or a folder with its content."""
        if self.fs.exists(self.path(*name)):
            self.fs.rm(self.path(*name), recursive=True)

    def node(self) -> str:
        """An identity of the folder: the same text for all processes that see it.

        Raises:
            ConfigError: It is not a folder of this machine.
        """
        if not self.is_local:
            raise ConfigError(f"{self} is not a local folder; allowed: a path. Remote copies lie where checkpoints are saved to.")
        path = Path(self.path(_NODE))
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f"{_NODE}.{uuid.uuid4().hex}")
        own.write_text(uuid.uuid4().hex)
        try:
            os.link(own, path)  # fails if there is one; a reader always finds a complete one
        except FileExistsError:
            pass
        finally:
            own.unlink()
        return path.read_text()
