"""The private directory of one store: who may use it, and how it goes away."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import tempfile
import uuid
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from lightning_hetero.errors import ConfigError, StoreError
from lightning_hetero.store.format.holders import wait_for_files
from lightning_hetero.store.format.manifest import (
    MANIFEST,
    Member,
    check_same_store,
    identity_of,
    layout_of,
    lock_manifest,
    manifest_at,
    member_of,
    read_manifest,
    write_manifest,
)
from lightning_hetero.store.format.places import FEWER_BLOCKS, DiskLimits, check_capacity, check_owner, check_volumes, make_private
from lightning_hetero.store.format.stripes import Balance, check_is_no_copy, found_stripes, holder, new_stripe, stripes_in
from lightning_hetero.store.volume import MEMORY_FILESYSTEMS, disk_error

PREFIX = "lightning-hetero-"
STATE_FILE = re.compile(r"state-[0-9a-f]{32}")
OF_RANK = re.compile(r"rank-([0-9]{1,6})-of-([0-9]{1,6})(-on-[0-9]{1,6}-nodes)?")  # the directory of one store of a set

# Without MANIFEST itself, which goes last.
_OURS = re.compile(rf"COMMIT|block-[0-9]{{5,}}\.[ab](\.new)?|{STATE_FILE.pattern}|MANIFEST\.[0-9a-f]{{32}}")
_SLOT = re.compile(r"block-[0-9]{5,}\.[ab]")
_BLOCK = re.compile(r"block-([0-9]{5,})\.[ab](?:\.new)?")
_LINKS = re.compile(r"\.?saving-[0-9a-f]{8}(\.[0-9a-f]{8}\.partial)?")  # sources of checkpoints
_INSIDE = re.compile(rf"\.?kept-[0-9]+(\.[0-9a-f]{{8}}\.partial)?|{_LINKS.pattern}")  # links
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Disks:
    """The further disks of a store, and who deals blocks to all of them."""

    further: tuple[Path, ...]
    balance: Balance


_DEFAULT_ROOT = "without disk_path files go to the Trainer's root directory;"


class StoreDirectory:
    """A locked, private directory with a manifest; made by :meth:`create_or_adopt`.

    Attributes:
        layout: ``num_blocks`` and ``user_bytes`` of the commit ring, and the names of each part's
            parameters.
        places: Its directories: that of the store itself, and its stripes on further disks.
        member: Its place in a set; ``None``: it is the only store of its run.

    Contract: one process uses it until :meth:`close`. It touches only names of its own, through a
    file descriptor of the directory, and follows no symbolic link. The native store opens and locks
    the block files in it by itself.
    """

    def __init__(
        self,
        places: Sequence[Path],
        directories: Sequence[int],
        manifest_fd: int,
        identity: uuid.UUID,
        *,
        balance: Balance,
        layout: dict[str, Any],
        member: Member | None,
        temporary: bool,
        made: bool,
        in_memory: bool,
    ) -> None:
        self.places, self._balance = tuple(places), balance
        self.layout, self.member = layout, member
        self._uuid = identity
        self._temporary = temporary
        self._in_memory = in_memory
        held = _Held(os.getpid(), self.places, tuple(directories), manifest_fd, made)
        self._held = held
        _all_held.add(held)
        # A temporary directory goes away with its process even if nobody calls close.
        self._finalizer = weakref.finalize(self, held.give_back, remove=temporary)

    @classmethod
    def create_or_adopt(
        cls,
        path: str | Path | None,
        *,
        default_root: Path,
        manifest: dict[str, Any],
        needed_bytes: int,
        capacity_bytes: int | None = None,
        allow_tmpfs: bool = False,
        allow_rotational: bool = False,
        sharers: int = 1,
        remedy: str = FEWER_BLOCKS,
        further: Sequence[Path] = (),
        balance: Balance | None = None,
        layout: dict[str, Any] | None = None,
        member: Member | None = None,
        resume: bool = False,
    ) -> StoreDirectory:
        """Makes the directory of a store, or takes over that of an earlier run.

        Args:
            path: The user's ``disk_path``. ``None``: a temporary directory under ``default_root``,
                removed by :meth:`close`; those that killed processes left there are removed now.
            default_root: Where temporary directories go.
            manifest: What the store holds, as JSON-able data: another run may use the directory
                only with an equal one.
            needed_bytes: Bytes that the store will write.
            capacity_bytes: The user's ``disk_capacity``.
            allow_tmpfs: Accept a file system in memory.
            allow_rotational: Accept a disk with moving heads.
            sharers: Processes that fill the disk equally.
            remedy: How less can be written, for errors.
            further: Directories on further disks; see [Note: Stripes] in ``stripes.py``.
            balance: Deals blocks to the disks; ``None``: they are equally fast.
            layout: What a resume has to know to open the files, as JSON-able data; see
                :attr:`layout`.
            member: The place of a new store in a set.
            resume: Keep the files that are there, and their uuid, layout and set, instead of
                starting anew.

        Raises:
            ConfigError: The path, its file system or what it holds is refused.
            OutOfDiskError: ``needed_bytes`` exceed ``capacity_bytes`` or the free space.
            StoreBusyError: A living process uses the directory.
            StoreCorruptError: What it has on a further disk is missing.
            StoreError: A system call failed.
        """
        limits = DiskLimits(
            needed_bytes=needed_bytes, capacity_bytes=capacity_bytes, allow_tmpfs=allow_tmpfs, allow_rotational=allow_rotational,
            sharers=sharers, whose="disk_path" if path is not None else _DEFAULT_ROOT, remedy=remedy,
        )  # fmt: skip
        geometry = json.loads(json.dumps(manifest))  # as it reads back: lists for tuples
        place = Path(default_root if path is None else path).expanduser().absolute()
        check_capacity(place, limits)
        disks = _Disks(tuple(p.expanduser().absolute() for p in further), balance or Balance([1.0] * (1 + len(further))))
        try:
            if path is not None:
                return cls._open_path(place, disks, geometry, limits, layout or {}, member, temporary=False, resume=resume)
            remove_leftovers(place)
            made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))  # 0700
            try:
                made.chmod(0o700)  # whatever the umask
                return cls._open_path(made, disks, geometry, limits, layout or {}, None, temporary=True, resume=False)
            except BaseException:
                _remove_directory(made)
                raise
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise disk_error(error, f"disk_path {str(place)!r}: {error}. Choose another disk_path.") from error

    @classmethod
    def _open_path(
        cls,
        path: Path,
        disks: _Disks,
        geometry: dict[str, Any],
        limits: DiskLimits,
        layout: dict[str, Any],
        member: Member | None,
        *,
        temporary: bool,
        resume: bool,
    ) -> StoreDirectory:
        made = make_private(path)
        with contextlib.ExitStack() as undo:
            if made:
                undo.callback(_remove_directory, path)
            directory_fd = _opened(path, undo)
            old_fd = lock_manifest(path, directory_fd)
            identity, origin, stripes = uuid.uuid4(), None if member is None else member.origin, list[Path]()
            if old_fd is None:
                if resume:
                    raise ConfigError(f"disk_path {str(path)!r} holds no store to resume from. Start without ckpt_path.")
                _check_empty(path, directory_fd)
            else:
                undo.callback(os.close, old_fd)
                old = read_manifest(path, old_fd)
                check_same_store(path, old, geometry)
                check_is_no_copy(path, old)
                stripes = list(stripes_in(path, old))
                if resume:
                    identity, layout, origin = identity_of(path, old), layout_of(path, old), old.get("origin")
                    member = None if "set" not in old else member_of(path, old)
                    stripes = found_stripes(path, stripes, disks.further)
            for place in disks.further:
                if make_private(place):
                    undo.callback(_remove_directory, place)
            owned = [_own_bytes(directory_fd), *(_bytes_in(stripes, place) for place in disks.further)]
            volume = check_volumes((path, *disks.further), owned, disks.balance.shares, limits)
            if old_fd is not None and not resume:
                _remove_stripes(stripes)
                _remove_files(directory_fd)
                log.warning(
                    "disk_path %r: an earlier run's store is taken over, and what it held is given up. To go on with it instead, "
                    "pass its path as ckpt_path.", str(path),
                )  # fmt: skip
            if not resume:
                stripes = [_made_stripe(place, undo) for place in disks.further]
            places, directories = (path, *stripes), [directory_fd, *(_opened(stripe, undo) for stripe in stripes)]
            for place, directory in zip(places, directories, strict=True) if resume else ():
                wait_for_files(place, _own_names(directory))
            manifest_fd = write_manifest(
                path, directory_fd, identity, geometry, layout=layout, temporary=temporary, replace=old_fd is not None,
                origin=origin, member=member, stripes=stripes,
            )  # fmt: skip
            undo.pop_all()
            if old_fd is not None:
                os.close(old_fd)
        in_memory = volume.filesystem in MEMORY_FILESYSTEMS
        return cls(
            places, directories, manifest_fd, identity, balance=disks.balance, layout=layout, member=member,
            temporary=temporary, made=made or temporary, in_memory=in_memory,
        )  # fmt: skip

    @property
    def path(self) -> Path:
        """The absolute path."""
        return self.places[0]

    @property
    def uuid(self) -> bytes:
        """16 bytes that name this use of the directory."""
        return self._uuid.bytes

    @property
    def temporary(self) -> bool:
        """Whether :meth:`close` removes it unless told otherwise."""
        return self._temporary

    @property
    def in_memory(self) -> bool:
        """Whether the file system is host memory. Older kernels refuse direct I/O there."""
        return self._in_memory

    def check_room(self, limits: DiskLimits) -> None:
        """Refuses what the directory has no room for, counting the store's files in it.

        Raises:
            OutOfDiskError: ``needed_bytes`` exceed ``capacity_bytes`` or the free space.
        """
        check_capacity(self.path, limits)
        owned = [_own_bytes(directory) for directory in self._held.directories]
        check_volumes(self.places, owned, self._balance.shares, limits)

    def disk_of(self, identifier: int, num_bytes: int) -> int:
        """Which of :attr:`places` has the files of a block, or shall get them."""
        found = holder(self.places, f"block-{identifier:05d}.a")
        if found is None:
            found = holder(self.places, f"block-{identifier:05d}.b")
        if found is None:
            return self._balance.deal(num_bytes)
        self._balance.count(found, num_bytes)
        return found

    def remove_all_but(self, identifiers: Collection[int], states: Collection[str]) -> None:
        """Removes what a dead process left: unnamed files and unfinished manifests."""
        for directory in self._held.directories:
            for name in _own_names(directory):
                found = _BLOCK.fullmatch(name)
                unnamed = STATE_FILE.fullmatch(name) and name not in states
                if unnamed or name.startswith(f"{MANIFEST}.") or (found and int(found[1]) not in identifiers):
                    _unlink(directory, name)
            _remove_links(directory)

    def remove_block(self, identifier: int, disk: int = 0, num_bytes: int = 0) -> None:
        """Removes the closed files of one block, ``num_bytes`` on its disk."""
        self._balance.count(disk, -num_bytes)
        for slot in "ab":
            _unlink(self._held.directories[disk], f"block-{identifier:05d}.{slot}")

    def new_file(self, name: str) -> FileIO:
        """A file for writing, without a buffer.

        Raises:
            OSError: It is there already, or cannot be made.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=self._held.directory_fd)
        os.fchmod(descriptor, 0o600)
        return open(descriptor, "wb", buffering=0)

    def remove_file(self, name: str) -> None:
        """Removes a file, if it is there."""
        _unlink(self._held.directory_fd, name)

    def sync(self) -> None:
        """The directory's names are on the disk."""
        os.fsync(self._held.directory_fd)

    def close(self, remove: bool | None = None) -> None:
        """Gives the directory back, after the native store was closed. A second call does nothing.

        Args:
            remove: Remove our files, and the directory if we made it and nothing else is in it.
                ``None``: if it is temporary.
        """
        if self._finalizer.detach():
            self._held.give_back(remove=self._temporary if remove is None else remove)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Held:
    """What a directory holds open."""

    pid: int
    places: tuple[Path, ...]
    directories: tuple[int, ...]
    manifest_fd: int
    made: bool

    @property
    def directory_fd(self) -> int:
        """The first directory, which has everything but blocks of other disks."""
        return self.directories[0]

    def give_back(self, *, remove: bool) -> None:
        if self.pid != os.getpid():  # a forked child has a copy of everything, and owns nothing
            return
        try:
            if remove:
                _remove_stripes(self.places[1:])
                _remove_files(self.directory_fd)
                _unlink(self.directory_fd, MANIFEST)
                if self.made:
                    _remove_directory(self.places[0])
        finally:
            _all_held.discard(self)
            os.close(self.manifest_fd)
            for directory in self.directories:
                os.close(directory)

    def let_go(self) -> None:
        """Closes the files of the store in a forked child.

        Their locks would outlive the process that was forked, by as long as a dataloader's worker
        takes to notice its death: a run that is gone on from at once would find its store busy.
        """
        roots = tuple(os.readlink(f"/proc/self/fd/{directory}") + os.sep for directory in self.directories)
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the listing's own
                if os.readlink(f"/proc/self/fd/{name}").startswith(roots):
                    os.close(int(name))
        for directory in self.directories:
            os.close(directory)


_all_held: weakref.WeakSet[_Held] = weakref.WeakSet()


def _let_go() -> None:
    for held in list(_all_held):
        with contextlib.suppress(OSError):
            held.let_go()
    _all_held.clear()


os.register_at_fork(after_in_child=_let_go)


def slot_files(names: Iterable[str]) -> list[str]:
    """Those of a store's file names that are slots of blocks."""
    return [name for name in names if _SLOT.fullmatch(name)]


def remove_store(path: Path) -> None:
    """Removes the files of a store whose lock the caller holds; other files stay."""
    directory_fd = os.open(path, _DIRECTORY)
    try:
        check_owner(path, directory_fd)
        manifest = manifest_at(path)
        check_is_no_copy(path, manifest)
        _remove_stripes(stripes_in(path, manifest))
        _remove_files(directory_fd)
        _unlink(directory_fd, MANIFEST)
    finally:
        os.close(directory_fd)


def remove_leftovers(root: Path) -> list[Path]:
    """Removes temporary stores under ``root`` whose process is gone; returns their paths.

    Only directories of this user with a manifest that says *temporary* and that nobody holds; links
    are not followed.
    """
    removed = []
    for entry in os.scandir(root):
        if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(OSError, ConfigError):  # another user's, in use, or no store
                _remove_leftover(Path(entry.path))
                removed.append(Path(entry.path))
    if removed:
        log.info("removed what killed processes left: %s", ", ".join(map(str, removed)))
    return removed


def _remove_leftover(path: Path) -> None:
    directory_fd = os.open(path, _DIRECTORY)
    try:
        check_owner(path, directory_fd)
        manifest_fd = lock_manifest(path, directory_fd, waits=False)
        if manifest_fd is None:
            raise ConfigError(f"{str(path)!r} has no {MANIFEST}.")
        try:
            manifest = read_manifest(path, manifest_fd)
            if manifest.get("temporary") is not True:
                raise ConfigError(f"{str(path)!r} is not temporary.")
            _remove_stripes(stripes_in(path, manifest))
            _remove_files(directory_fd)
            _unlink(directory_fd, MANIFEST)
            os.rmdir(path)
        finally:
            os.close(manifest_fd)
    finally:
        os.close(directory_fd)


def _check_empty(path: Path, directory_fd: int) -> None:
    ours = (n for n in os.listdir(directory_fd) if (_OURS.fullmatch(n) and n.startswith(MANIFEST)) or OF_RANK.fullmatch(n))
    foreign = sorted(set(os.listdir(directory_fd)).difference(ours))
    if foreign:
        raise ConfigError(
            f"disk_path {str(path)!r} holds {', '.join(foreign[:3])}{' and more' if len(foreign) > 3 else ''} and no "
            f"{MANIFEST} of a store; allowed: a directory that is missing, empty, or a store's. Choose another disk_path."
        )


def _opened(path: Path, undo: contextlib.ExitStack) -> int:
    """A directory of ours, opened until ``undo``."""
    directory_fd = os.open(path, _DIRECTORY)
    undo.callback(os.close, directory_fd)
    check_owner(path, directory_fd)
    return directory_fd


def _made_stripe(place: Path, undo: contextlib.ExitStack) -> Path:
    """A new stripe in a directory of ``disk_path``."""
    with contextlib.ExitStack() as looked:
        _opened(place, looked)
    stripe = new_stripe(place)
    make_private(stripe)
    undo.callback(_remove_directory, stripe)
    return stripe


# ---- what goes away ------------------------------------------------------------------------------


def _own_names(directory_fd: int) -> list[str]:
    return [name for name in os.listdir(directory_fd) if _OURS.fullmatch(name)]


def _own_bytes(directory_fd: int) -> int:
    """Bytes on disk of the store's files, pins included, that have no name elsewhere."""
    files: dict[int, os.stat_result] = {}
    names: Counter[int] = Counter()
    for place in (".", *(name for name in os.listdir(directory_fd) if _INSIDE.fullmatch(name))):
        for name in _names_in(place, directory_fd):
            status = os.stat(os.path.join(place, name), dir_fd=directory_fd, follow_symlinks=False)
            files[status.st_ino] = status
            names[status.st_ino] += 1
    return 512 * sum(s.st_blocks for number, s in files.items() if s.st_nlink <= names[number])


def _bytes_in(stripes: Iterable[Path], place: Path) -> int:
    """Bytes of a store's stripes in a directory."""
    found = 0
    for stripe in stripes:
        if stripe.parent == place and stripe.is_dir():
            with contextlib.ExitStack() as looked:
                found += _own_bytes(_opened(stripe, looked))
    return found


def _names_in(place: str, directory_fd: int) -> list[str]:
    inner = os.open(place, _DIRECTORY, dir_fd=directory_fd)
    try:
        return [name for name in os.listdir(inner) if name == MANIFEST or _OURS.fullmatch(name)]
    finally:
        os.close(inner)


def _remove_files(directory_fd: int) -> None:
    # The ring goes last: until then it says that no step is kept.
    for name in sorted(_own_names(directory_fd), key=lambda name: name == "COMMIT"):
        _unlink(directory_fd, name)
    _remove_links(directory_fd)


def _remove_stripes(stripes: Iterable[Path]) -> None:
    """Removes stripes of a store that is going; one whose disk is not there stays on it."""
    for stripe in stripes:
        shutil.rmtree(stripe, ignore_errors=True)


def _remove_links(directory_fd: int) -> None:
    for name in filter(_LINKS.fullmatch, os.listdir(directory_fd)):
        shutil.rmtree(name, ignore_errors=True, dir_fd=directory_fd)


def _unlink(directory_fd: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=directory_fd)
    except FileNotFoundError:
        return
    except OSError as error:
        path = Path(f"/proc/self/fd/{directory_fd}").resolve() / name
        raise StoreError(
            f"{str(path)!r} cannot be removed: {error.strerror}. What was kept is not touched: see to the disk, and go on from "
            f"the store, or from a checkpoint on another one."
        ) from error


def _remove_directory(path: Path) -> None:
    with contextlib.suppress(OSError):  # something else is in it
        os.rmdir(path)
