"""Pins: if only every N-th step is kept, the last kept one has slots of its own.

[Note: Pins]
Blocks on disk are written in every step, to their two slots in turn, so what a step has written is
written over two steps later. A pin gives it a third slot: it is a snapshot (``snapshots.py``)
inside the store, a directory ``kept-`` and the number of its record, whose links make the engine
take fresh files for what comes after. It is made before the pin before it is removed, so at any
moment the newest pin is whole. A resume that finds a last record without a step rolls the store
back to it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from lightning_hetero.errors import ConfigError
from lightning_hetero.store.format.audit import StoreFiles
from lightning_hetero.store.format.manifest import MANIFEST, manifest_at
from lightning_hetero.store.format.snapshots import copy, link, snapshot, sync
from lightning_hetero.store.format.stripes import check_is_no_copy, holder, places_of
from lightning_hetero.store.volume import disk_error

_PIN = re.compile(r"kept-(\d{1,18})")


def pins(path: Path) -> list[Path]:
    """The pins of a store, the newest last."""
    if not path.is_dir():
        return []
    found = [(int(match[1]), entry) for entry in path.iterdir() if (match := _PIN.fullmatch(entry.name))]
    return [entry for _, entry in sorted(found) if entry.is_dir() and not entry.is_symlink() and (entry / MANIFEST).is_file()]


def pin(path: Path, number: int, names: Iterable[str]) -> None:
    """Pins the last step of a store, which is whole, and removes the pins before.

    Args:
        path: The store.
        number: The number of the step's record.
        names: Names of the slot and state files that it names; nothing of them is being written.

    Raises:
        StoreError: A system call failed; the pin before is still there.
    """
    target = path / f"kept-{number}"
    if target not in pins(path):  # else it is the same step, after a resume
        snapshot(path, target, names)
    unpin(path, but=target)


def unpin(path: Path, *, but: Path | None = None) -> None:
    """Removes pins, and what is left of unfinished ones.

    Raises:
        ConfigError: The store is a copy of another one, and shares its directories on other disks.
    """
    manifest = manifest_at(path)
    check_is_no_copy(path, manifest)
    for place in places_of(path, manifest):  # that of the manifest first: without it there is no pin
        for entry in place.iterdir():
            unfinished = entry.name.startswith(".kept-") and entry.name.endswith(".partial")
            stays = but is not None and entry.name == but.name
            if not stays and (unfinished or _PIN.fullmatch(entry.name)) and entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)


def roll_back(path: Path, source: Path) -> None:
    """Makes a pin the last step of its store, which no process uses.

    Args:
        path: The store.
        source: Its newest pin.

    Raises:
        ConfigError: The pin is that of another store.
        StoreBusyError: A process uses the pin.
        StoreError: A system call failed; it may be tried again.
    """
    with StoreFiles(source) as kept, StoreFiles(path) as store:
        if kept.uuid != store.uuid or kept.record is None:
            raise ConfigError(f"{str(source)!r} is no step of the store {str(path)!r}: it was put there. Take it away.")
        names, places, theirs = kept.record.files, store.places, kept.places
        check_is_no_copy(path, store.manifest)
    try:
        for name in names:
            number = holder(theirs, name) or 0
            _exchange(places[number] / name, partial(link, theirs[number] / name))
        for place in places:
            sync(place)
        _exchange(path / "COMMIT", partial(copy, source / "COMMIT"))
        sync(path)
    except OSError as error:
        remedy = "Nothing is lost: make room on that disk if it is full, and try again."
        raise disk_error(error, f"the store {str(path)!r} cannot go back to {source.name}: {error}. {remedy}") from error


def _exchange(target: Path, make: Callable[[Path], None]) -> None:
    fresh = target.with_name(f".{target.name}.kept")
    fresh.unlink(missing_ok=True)  # of a process that died here
    make(fresh)
    os.replace(fresh, target)
    fresh.unlink(missing_ok=True)  # it stays where both were the same file already
