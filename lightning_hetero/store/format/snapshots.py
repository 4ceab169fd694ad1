"""Snapshots: a store's last step under another path, by hard links.

[Note: Links]
A slot is only ever rewritten whole, and the engine gives a slot whose file has another name a fresh
file before it writes it. So a linked slot stays what it was; a state file is never written over. A
snapshot is a store of its own: it has the files that the last record names, the ring and the
manifest. It appears complete or not at all. On another file system it is a copy.

What is on several disks ([Note: Stripes] in ``stripes.py``) stays on them in a snapshot inside the
store: the links in stripes are whole before the directory with the manifest has its name. Any other
snapshot is in one directory, or in stripes of its own.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_hetero.errors import ConfigError, OutOfDiskError
from lightning_hetero.store.format.audit import StoreFiles
from lightning_hetero.store.format.manifest import MANIFEST, STRIPED, manifest_at
from lightning_hetero.store.format.stripes import Balance, holder, new_stripe, place_of, places_of
from lightning_hetero.store.volume import Volume, disk_error
from lightning_hetero.units import format_bytes

_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP}
_NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def snapshot(
    source: Path, target: Path, names: Iterable[str], *, may_replace: bool = False, origin: str | None = None,
    further: Sequence[Path] = (), balance: Balance | None = None,
) -> None:  # fmt: skip
    """Makes a snapshot; nothing of the store is being written.

    Args:
        source: The store.
        target: Where the snapshot goes; missing, or an empty directory. Missing directories above
            it are made.
        names: Names of the slot and state files that the last record names.
        may_replace: ``target`` may also be a file, a symbolic link or an earlier snapshot. The new
            one takes its place when it is whole. What a symbolic link names stays.
        origin: Names the record that it was made from; given where it is the beginning of another
            run's store, and no checkpoint.
        further: Directories on further disks, which get a part of the blocks.
        balance: Deals these; ``None``: the disks are equally fast.

    Raises:
        ConfigError: ``target`` is there, and not what may be replaced.
        StoreBusyError: A process uses the snapshot that would be replaced.
        StoreError: A system call failed; nothing is left of the snapshot, and ``target`` is what it
            was.
    """
    check_target(target, may_replace=may_replace)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    theirs = manifest_at(source)
    places, is_inside = places_of(source, theirs), target.parent == source
    stripes = [place / target.name for place in places[1:]] if is_inside else list(map(new_stripe, further))
    deal = _same_disk(places) if is_inside else _deal(places, balance or Balance([1.0] * (1 + len(stripes))))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir(mode=0o700)
        partial.chmod(0o700)
        for stripe in stripes:
            shutil.rmtree(stripe, ignore_errors=True)  # of a process that died here
            stripe.mkdir(mode=0o700, parents=True)
            stripe.chmod(0o700)
        for name in names:
            link(place_of(places, name), (partial, *stripes)[deal(name)] / name)
        for stripe in stripes:
            sync(stripe)
            sync(stripe.parent)
        copy(source / "COMMIT", partial / "COMMIT")  # it is written in place
        marks = {"snapshot": True} if origin is None else {"snapshot": False, "origin": origin}
        manifest = theirs | {"temporary": False, **marks}
        if not is_inside and (stripes or len(places) > 1):
            manifest |= {"stripes": list(map(os.fspath, stripes)), "home": os.fspath(target), "version": STRIPED}
        _write(partial / MANIFEST, json.dumps(manifest, indent=1).encode())
        sync(partial)
        put(partial, target)
    except OSError as error:
        for place in (partial, *stripes):
            shutil.rmtree(place, ignore_errors=True)
        remedy = "Make room there if the disk is full, or choose another path."
        raise disk_error(error, f"the snapshot {str(target)!r} cannot be made: {error}. {remedy}") from error


def _same_disk(places: Sequence[Path]) -> Callable[[str], int]:
    return lambda name: holder(places, name) or 0


def _deal(places: Sequence[Path], balance: Balance) -> Callable[[str], int]:
    """Which of a snapshot's own directories gets a file. State files go to the first."""
    return lambda name: balance.deal(place_of(places, name).stat().st_size) if name.startswith("block-") else 0


@dataclass(frozen=True, slots=True)
class Room:
    """What a snapshot takes of one disk as the store goes on.

    Attributes:
        place: A directory there.
        needed_bytes: Those of a ring, a manifest and copies at once, and of fresh files later.
    """

    place: Path
    needed_bytes: int


def room_for(source: Path, target: Path, names: Collection[str], *, leaving: Iterable[Path] = ()) -> dict[int, Room]:
    """What a snapshot takes of each disk, by the number of the disk.

    It takes a ring and a manifest at once, and copies of what is on other disks than the snapshot.
    A slot that has another name gets a fresh file before it is written again, and the store has to
    find room for these.

    Args:
        source: The store.
        target: Where the snapshot goes.
        names: What it would link.
        leaving: Snapshots that are removed before the store goes on.
    """
    there = next(path for path in target.absolute().parents if path.is_dir())
    places, disk = places_of(source, manifest_at(source)), there.stat().st_dev
    rooms = {disk: Room(there, (source / "COMMIT").stat().st_size + 2 * (source / MANIFEST).stat().st_size)}

    def needs(place: Path, number: int, num_bytes: int) -> None:
        before = rooms.get(number, Room(place, 0))
        rooms[number] = replace(before, needed_bytes=before.needed_bytes + num_bytes)

    gone = [path.lstat() for folder in leaving if folder.is_dir() for path in folder.iterdir()]
    less = Counter((status.st_dev, status.st_ino) for status in gone)
    for name in names:
        status = place_of(places, name).stat()
        if status.st_dev != disk:
            needs(there, disk, status.st_size)
    for place in places:
        for path in place.glob("block-*"):
            status = path.stat()
            is_linked = path.name in names and status.st_dev == disk
            if is_linked or status.st_nlink - less[status.st_dev, status.st_ino] > 1:
                needs(place, status.st_dev, status.st_size)
    return rooms


def check_room(target: Path, rooms: Iterable[Mapping[int, Room]]) -> None:
    """Refuses a snapshot that a disk would have no room for as soon as training goes on.

    Args:
        target: Where it goes.
        rooms: What each store takes: :func:`room_for`.

    Raises:
        OutOfDiskError: A disk has too little room.
    """
    needed: dict[int, Room] = {}
    for number, room in (item for one in rooms for item in one.items()):
        before = needed.get(number, Room(room.place, 0))
        needed[number] = replace(before, needed_bytes=before.needed_bytes + room.needed_bytes)
    for room in needed.values():
        free = Volume.of(room.place).free_bytes
        if room.needed_bytes > free:
            raise OutOfDiskError(
                f"the checkpoint {str(target)!r} would take {format_bytes(room.needed_bytes)} in {str(room.place)!r} as training "
                f"goes on: records, and fresh files for slots that checkpoints have links to; {format_bytes(free)} are free. The "
                f"store has the step. Make room, keep fewer checkpoints, or leave link_checkpoints out."
            )


def check_target(target: Path, *, may_replace: bool) -> None:
    """Refuses a path where no snapshot may be made; see :func:`snapshot`.

    Raises:
        ConfigError: Something else is there.
        StoreBusyError: A process uses the snapshot there.
    """
    there = os.path.lexists(target)
    if not there or (target.is_dir() and not target.is_symlink() and not any(target.iterdir())):
        return
    if may_replace and (target.is_symlink() or target.is_file()):
        return
    stores = [path for path in (target, *sorted(target.glob("rank-*-of-*"))) if (path / MANIFEST).is_file()]
    if not may_replace or not stores:
        what = "" if not target.is_dir() else f", a directory that holds {', '.join(sorted(os.listdir(target))[:3])}"
        allowed = "a path where a directory can be made, or an empty one" + (", a file, or an earlier snapshot" * may_replace)
        raise ConfigError(f"{str(target)!r} is there already{what}; allowed: {allowed}. Choose another path.")
    for path in stores:
        with StoreFiles(path) as found:  # nobody uses it
            if found.manifest.get("snapshot") is not True:
                raise ConfigError(f"{str(path)!r} is a store, which no snapshot replaces. Choose another path for the checkpoint.")


def put(fresh: Path, target: Path) -> None:
    """Gives a whole directory its name, and removes what had that name before."""
    if not os.path.lexists(target) or (target.is_dir() and not target.is_symlink() and not any(target.iterdir())):
        os.replace(fresh, target)
        sync(target.parent)
        return
    old = fresh
    if not _exchange_names(fresh, target):
        old = fresh.with_suffix(".old")
        os.rename(target, old)
        os.rename(fresh, target)
    sync(target.parent)
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.unlink()


def _exchange_names(first: Path, second: Path) -> bool:
    """Exchanges two names atomically; false if the system cannot.

    Source: rename(2), ``RENAME_EXCHANGE``.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), os.fspath(second))


def remove_unfinished(target: Path) -> None:
    """Removes what processes that died have left of snapshots that were to be at ``target``."""
    for entry in target.parent.glob(f".{glob.escape(target.name)}.????????.partial"):
        if not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)


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
