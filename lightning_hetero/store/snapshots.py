"""Snapshots: a store's last step under another path, by hard links: neither space nor time until it is written over.

[Note: Links]
A slot is only ever rewritten whole, and the engine gives a slot whose file has another name a fresh file before it writes it. So
a linked slot stays what it was; a state file is never written over. A snapshot is a store of its own: it has the files that the
last record names, the ring and the manifest. It appears complete or not at all. On another file system it is a copy.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from lightning_hetero.errors import ConfigError, StoreError
from lightning_hetero.store.audit import StoreFiles
from lightning_hetero.store.manifest import MANIFEST

_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP}


def snapshot(source: Path, target: Path, names: Iterable[str]) -> None:
    """Makes a snapshot; nothing of the store is being written.

    Args:
        source: The store.
        target: Where the snapshot goes; missing, or an empty directory. Missing directories above it are made.
        names: Names of the slot and state files that the last record names.

    Raises:
        ConfigError: ``target`` is there and not empty.
        StoreError: A system call failed; nothing is left of the snapshot.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{str(target)!r} is there already; allowed: a path where a directory can be made, or an empty one.")
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir(mode=0o700)
        partial.chmod(0o700)
        for name in names:
            link(source / name, partial / name)
        copy(source / "COMMIT", partial / "COMMIT")  # it is written in place
        manifest = json.loads((source / MANIFEST).read_bytes()) | {"temporary": False}
        _write(partial / MANIFEST, json.dumps(manifest, indent=1).encode())
        sync(partial)
        os.replace(partial, target)
        sync(target.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StoreError(f"the snapshot {str(target)!r} cannot be made: {error}. Choose another path.") from error


def bring(source: Path, target: Path) -> None:
    """Makes the last step of a store that nobody uses the content of ``target``.

    Raises:
        ConfigError: ``source`` has no step, or ``target`` is not empty.
        StoreBusyError: A process uses ``source``.
        StoreError: A system call failed.
    """
    with StoreFiles(source) as store:
        if store.record is None:
            raise ConfigError(f"store {str(source)!r} has no valid record: {'; '.join(map(str, store.notes))}.")
        snapshot(source, target, store.record.files)


def link(source: Path, target: Path) -> None:
    """A second name for a file; a copy where that is not possible."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        copy(source, target)


def copy(source: Path, target: Path) -> None:
    """A copy of a file, on the disk."""
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as reader, open(target, "xb") as writer:
        os.fchmod(writer.fileno(), 0o600)
        shutil.copyfileobj(reader, writer, 1 << 22)
        writer.flush()
        os.fsync(writer.fileno())


def _write(path: Path, content: bytes) -> None:
    with open(path, "xb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(directory: Path) -> None:
    """What a directory names is on the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
