"""The directories of a store on further disks, and which of them gets the files of a block.

[Note: Stripes]
A store may have its blocks on several disks. The first directory of ``disk_path`` is the store: it
has manifest, commit ring, state files and blocks. In each of the others the store has a *stripe*, a
private directory with a random name that has blocks only. A block has its files, both slots, in one
of them. The manifest names the stripes. No file says which block is where: a file is where it is
found, and its stamp says what it is. So one lock, one ring and one manifest are enough: a record
names blocks, wherever they are, and it is written when their data is there. A stripe that is
missing is noticed by its name, one with another content by the stamps.

What is in a directory inside a store, such as a pin, is divided as the store is: it has a directory
of the same name in each stripe.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning_hetero.errors import ConfigError, StoreCorruptError, StoreError
from lightning_hetero.store.format.manifest import MANIFEST, lock_manifest, manifest_at, member_of, put_manifest

_STRIPE = re.compile(r"stripe-[0-9a-f]{32}")
_INSIDE = re.compile(r"\.?(kept-[0-9]+|saving-[0-9a-f]{8})(\.[0-9a-f]{8}\.partial)?")
_BLOCK = re.compile(r"block-[0-9]{5,}\.[ab](\.new)?")


def new_stripe(directory: Path) -> Path:
    """A path for a stripe in one of the directories of ``disk_path``."""
    return directory / f"stripe-{uuid.uuid4().hex}"


def stripes_in(path: Path, manifest: Mapping[str, Any]) -> tuple[Path, ...]:
    """The stripes that a store's manifest names.

    Raises:
        ConfigError: It does not name paths of stripes.
    """
    rows = _rows(manifest)
    if rows is None:
        raise ConfigError(
            f"{str(path / MANIFEST)!r} has stripes {manifest.get('stripes')!r}; allowed: a list of paths that end in stripe-…"
        )
    return tuple(map(Path, rows))


def check_is_no_copy(path: Path, manifest: Mapping[str, Any]) -> None:
    """Refuses to write to a store, or to remove it, if its stripes are those of another one.

    Raises:
        ConfigError: The directory is a copy, and the original is still there.
    """
    if (stripes := stripes_in(path, manifest)) and (original := _original(path, manifest)) is not None:
        kept = original if member_of(path, manifest).ranks == 1 else original.parent  # which a resume takes
        raise ConfigError(
            f"{str(path)!r} is a copy of {str(original)!r}, whose blocks are also on other disks ({str(stripes[0])!r}): both would "
            f"write there. To have a copy, pass ckpt_path={str(kept)!r} and new directories as disk_path: the last step is "
            f"copied. If the original is to go, remove its file {MANIFEST}."
        )


def _rows(manifest: Mapping[str, Any]) -> list[str] | None:
    rows = manifest.get("stripes", [])
    is_right = isinstance(rows, list) and all(isinstance(row, str) and _STRIPE.fullmatch(os.path.basename(row)) for row in rows)
    return rows if is_right else None


def _original(path: Path, manifest: Mapping[str, Any]) -> Path | None:
    """Another directory that has the stripes of a store: that where its manifest was written."""
    home = manifest.get("home")
    original = Path(home) if isinstance(home, str) else path
    try:
        if not (original / MANIFEST).is_file() or original.samefile(path):
            return None
        theirs = _rows(manifest_at(original)) or []
    except (ConfigError, StoreError, OSError):
        return None
    names = set(map(os.path.basename, _rows(manifest) or []))
    return None if names.isdisjoint(map(os.path.basename, theirs)) else original


def find_stripes(path: Path, further: Sequence[Path]) -> None:
    """Has a store's manifest name the directories of ``disk_path`` in which its stripes are now.

    One that is a copy is only read, where the original's stripes are.

    Raises:
        StoreBusyError: A living process uses it.
        StoreError: The store cannot be written.
    """
    manifest = manifest_at(path)
    recorded = stripes_in(path, manifest)
    found = [next((here for place in further if (here := place / stripe.name).is_dir()), stripe) for stripe in recorded]
    if found == list(recorded) or _original(path, manifest) is not None:
        return
    moved = manifest | {"stripes": list(map(os.fspath, found)), "home": os.fspath(path)}
    try:
        with ExitStack() as opened:
            opened.callback(os.close, directory_fd := os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            if (locked := lock_manifest(path, directory_fd)) is not None:
                opened.callback(os.close, locked)
            opened.callback(os.close, put_manifest(path, directory_fd, moved, replace=True))
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(
            f"store {str(path)!r} has blocks in {[*map(str, recorded)]}, which are in {[*map(str, found)]} now, and its manifest "
            f"cannot be changed to say so: {error}. Make the directory writable, or mount the disks where they were."
        ) from error


def found_stripes(path: Path, recorded: Sequence[Path], further: Sequence[Path]) -> list[Path]:
    """The stripes of a store that a run goes on with, in the directories that it has now.

    Raises:
        ConfigError: A stripe is in none of them, or there is another number of them.
    """
    listed = [str(path), *map(str, further)]
    if len(recorded) != len(further):
        raise ConfigError(
            f"disk_path is {listed if further else listed[0]!r}, and the store {str(path)!r} has its blocks in {1 + len(recorded)} "
            f"directories: {[str(path), *(str(stripe.parent) for stripe in recorded)]}. Pass as many, wherever they are now. For "
            f"another number of disks pass the store as ckpt_path, and new directories as disk_path: its last step is copied."
        )
    found = []
    for stripe in recorded:
        here = [place / stripe.name for place in further if (place / stripe.name).is_dir()]
        if not here:
            raise missing(path, stripe, f"; it is in none of {listed[1:]}, the others of disk_path")
        found.append(here[0])
    return found


def missing(path: Path, stripe: Path, where: str = "") -> StoreCorruptError:
    """A stripe is not where it should be."""
    return StoreCorruptError(
        f"store {str(path)!r} has blocks in {str(stripe)!r}, and that is not there{where}. Mount the disk that has it. If it has "
        f"another path now, go on with the directory that holds it in disk_path."
    )


def places_of(path: Path, manifest: Mapping[str, Any]) -> tuple[Path, ...]:
    """The directories with blocks of a store, or of a directory inside one; the first is its own.

    Raises:
        ConfigError: A manifest does not name paths of stripes.
        StoreCorruptError: A stripe is not there.
    """
    store, inside = path, ""
    if _INSIDE.fullmatch(path.name) and (path.parent / MANIFEST).is_file():
        store, inside = path.parent, path.name
        manifest = manifest_at(store)
    stripes = stripes_in(store, manifest)
    for stripe in stripes:
        if not stripe.is_dir():
            raise missing(store, stripe)
    return (path, *(stripe / inside for stripe in stripes))


def holder(places: Sequence[Path], name: str) -> int | None:
    """Which of a store's directories has a file; ``None``: none of them."""
    return next((number for number, place in enumerate(places) if os.path.lexists(place / name)), None)


def place_of(places: Sequence[Path], name: str) -> Path:
    """Where a file of a store is, or should be if it is nowhere. Only blocks are in stripes."""
    number = holder(places, name) if _BLOCK.fullmatch(name) else 0
    return places[number or 0] / name


class Balance:
    """Deals blocks to disks, so that each disk is busy as long as the others.

    Args:
        rates: What each disk moves, relative to the others.
        ahead: So many blocks count as dealt before. Ranks give their numbers: then the slices of
            one block, which all ranks read at the same time, are on different disks.
    """

    def __init__(self, rates: Sequence[float], ahead: int = 0) -> None:
        self._rates, self._ahead = tuple(rates), ahead % len(rates)
        self._bytes = [0] * len(rates)

    @property
    def shares(self) -> list[float]:
        """The part of all bytes that each disk gets."""
        return [rate / sum(self._rates) for rate in self._rates]

    def count(self, disk: int, num_bytes: int) -> None:
        """A disk has so many bytes more, or fewer."""
        self._bytes[disk] += num_bytes

    def deal(self, num_bytes: int) -> int:
        """The disk for another block. It counts as there."""
        while True:
            disk = min(range(len(self._rates)), key=lambda i: (self._bytes[i] + num_bytes) / self._rates[i])
            self.count(disk, num_bytes)
            if not self._ahead:
                return disk
            self._ahead -= 1
