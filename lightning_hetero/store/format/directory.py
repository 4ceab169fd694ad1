"""The private directory of one store: who may use it, and how it goes away."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import uuid
import weakref
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from lightning_hetero.errors import ConfigError, OutOfDiskError, StoreError
from lightning_hetero.store.format.holders import wait_for_files
from lightning_hetero.store.format.manifest import (
    MANIFEST,
    Member,
    check_same_store,
    identity_of,
    layout_of,
    lock_manifest,
    member_of,
    read_manifest,
    write_manifest,
)
from lightning_hetero.store.volume import MEMORY_FILESYSTEMS, Volume, disk_error
from lightning_hetero.units import format_bytes

PREFIX = "lightning-hetero-"
STATE_FILE = re.compile(r"state-[0-9a-f]{32}")
OF_RANK = re.compile(r"rank-([0-9]{1,6})-of-([0-9]{1,6})")  # the directory of one store of a set

# Without MANIFEST itself, which goes last.
_OURS = re.compile(rf"COMMIT|block-[0-9]{{5,}}\.[ab](\.new)?|{STATE_FILE.pattern}|MANIFEST\.[0-9a-f]{{32}}")
_SLOT = re.compile(r"block-[0-9]{5,}\.[ab]")
_BLOCK = re.compile(r"block-([0-9]{5,})\.[ab](?:\.new)?")
_LINKS = re.compile(r"\.?saving-[0-9a-f]{8}(\.[0-9a-f]{8}\.partial)?")  # sources of checkpoints
_INSIDE = re.compile(rf"\.?kept-[0-9]+(\.[0-9a-f]{{8}}\.partial)?|{_LINKS.pattern}")  # links
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

log = logging.getLogger(__name__)


_FEWER_BLOCKS = "place fewer blocks on 'disk'"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskLimits:
    """What a store's directory must offer.

    Attributes:
        needed_bytes: Bytes that the store will write.
        capacity_bytes: The user's ``disk_capacity``; ``None`` for none.
        allow_tmpfs: Accept a file system in memory.
        allow_rotational: Accept a disk with moving heads.
        sharers: Processes that fill the disk equally.
        whose: Who chose the directory, for errors.
        remedy: How less can be written.
    """

    needed_bytes: int
    capacity_bytes: int | None = None
    allow_tmpfs: bool = False
    allow_rotational: bool = False
    sharers: int = 1
    whose: str = "disk_path"
    remedy: str = _FEWER_BLOCKS

    @property
    def each(self) -> str:
        """Whose share the numbers are, for errors."""
        return "" if self.sharers == 1 else f" for each of {self.sharers} ranks"


_DEFAULT_ROOT = "without disk_path files go to the Trainer's root directory;"


class StoreDirectory:
    """A locked, private directory with a manifest; made by :meth:`create_or_adopt`.

    Attributes:
        layout: ``num_blocks`` and ``user_bytes`` of the commit ring, and the names of each part's
            parameters.
        member: Its place in a set; ``None``: it is the only store of its run.

    Contract: one process uses it until :meth:`close`. It touches only names of its own, through a
    file descriptor of the directory, and follows no symbolic link. The native store opens and locks
    the block files in it by itself.
    """

    def __init__(
        self,
        path: Path,
        directory_fd: int,
        manifest_fd: int,
        identity: uuid.UUID,
        *,
        layout: dict[str, Any],
        member: Member | None,
        temporary: bool,
        made: bool,
        in_memory: bool,
    ) -> None:
        self._path = path
        self.layout, self.member = layout, member
        self._uuid = identity
        self._temporary = temporary
        self._in_memory = in_memory
        held = _Held(os.getpid(), path, directory_fd, manifest_fd, made)
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
        remedy: str = _FEWER_BLOCKS,
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
            layout: What a resume has to know to open the files, as JSON-able data; see
                :attr:`layout`.
            member: The place of a new store in a set.
            resume: Keep the files that are there, and their uuid, layout and set, instead of
                starting anew.

        Raises:
            ConfigError: The path, its file system or what it holds is refused.
            OutOfDiskError: ``needed_bytes`` exceed ``capacity_bytes`` or the free space.
            StoreBusyError: A living process uses the directory.
            StoreError: A system call failed.
        """
        limits = DiskLimits(
            needed_bytes=needed_bytes, capacity_bytes=capacity_bytes, allow_tmpfs=allow_tmpfs, allow_rotational=allow_rotational,
            sharers=sharers, whose="disk_path" if path is not None else _DEFAULT_ROOT, remedy=remedy,
        )  # fmt: skip
        geometry = json.loads(json.dumps(manifest))  # as it reads back: lists for tuples
        place = Path(default_root if path is None else path).expanduser().absolute()
        _check_capacity(place, limits)
        try:
            if path is not None:
                return cls._open_path(place, geometry, limits, layout or {}, member, temporary=False, resume=resume)
            remove_leftovers(place)
            made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))  # 0700
            try:
                made.chmod(0o700)  # whatever the umask
                return cls._open_path(made, geometry, limits, layout or {}, None, temporary=True, resume=False)
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
        geometry: dict[str, Any],
        limits: DiskLimits,
        layout: dict[str, Any],
        member: Member | None,
        *,
        temporary: bool,
        resume: bool,
    ) -> StoreDirectory:
        made = _make_private(path)
        with contextlib.ExitStack() as undo:
            if made:
                undo.callback(_remove_directory, path)
            directory_fd = os.open(path, _DIRECTORY)
            undo.callback(os.close, directory_fd)
            _check_owner(path, directory_fd)
            old_fd = lock_manifest(path, directory_fd)
            identity, origin = uuid.uuid4(), None
            if old_fd is None:
                if resume:
                    raise ConfigError(f"disk_path {str(path)!r} holds no store to resume from. Start without ckpt_path.")
                _check_empty(path, directory_fd)
            else:
                undo.callback(os.close, old_fd)
                old = read_manifest(path, old_fd)
                check_same_store(path, old, geometry)
                if resume:
                    identity, layout, origin = identity_of(path, old), layout_of(path, old), old.get("origin")
                    member = None if "set" not in old else member_of(path, old)
                    wait_for_files(path, _own_names(directory_fd))
            volume = _check_volume(path, directory_fd, limits)
            if old_fd is not None and not resume:
                _remove_files(directory_fd)
                log.warning(
                    "disk_path %r: an earlier run's store is taken over, and what it held is given up. To go on with it instead, "
                    "pass its path as ckpt_path.", str(path),
                )  # fmt: skip
            manifest_fd = write_manifest(
                path, directory_fd, identity, geometry, layout=layout, temporary=temporary, replace=old_fd is not None,
                origin=origin, member=member,
            )  # fmt: skip
            undo.pop_all()
            if old_fd is not None:
                os.close(old_fd)
        in_memory = volume.filesystem in MEMORY_FILESYSTEMS
        return cls(
            path, directory_fd, manifest_fd, identity, layout=layout, member=member, temporary=temporary,
            made=made or temporary, in_memory=in_memory,
        )  # fmt: skip

    @property
    def path(self) -> Path:
        """The absolute path."""
        return self._path

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
        _check_capacity(self._path, limits)
        _check_volume(self._path, self._held.directory_fd, limits)

    def remove_all_but(self, identifiers: Collection[int], states: Collection[str]) -> None:
        """Removes what a dead process left: unnamed files and unfinished manifests."""
        for name in _own_names(self._held.directory_fd):
            found = _BLOCK.fullmatch(name)
            unnamed = STATE_FILE.fullmatch(name) and name not in states
            if unnamed or name.startswith(f"{MANIFEST}.") or (found and int(found[1]) not in identifiers):
                _unlink(self._held.directory_fd, name)
        _remove_links(self._held.directory_fd)

    def remove_block(self, identifier: int) -> None:
        """Removes the closed files of one block."""
        for slot in "ab":
            _unlink(self._held.directory_fd, f"block-{identifier:05d}.{slot}")

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
    path: Path
    directory_fd: int
    manifest_fd: int
    made: bool

    def give_back(self, *, remove: bool) -> None:
        if self.pid != os.getpid():  # a forked child has a copy of everything, and owns nothing
            return
        try:
            if remove:
                _remove_files(self.directory_fd)
                _unlink(self.directory_fd, MANIFEST)
                if self.made:
                    _remove_directory(self.path)
        finally:
            _all_held.discard(self)
            os.close(self.manifest_fd)
            os.close(self.directory_fd)

    def let_go(self) -> None:
        """Closes the files of the store in a forked child.

        Their locks would outlive the process that was forked, by as long as a dataloader's worker
        takes to notice its death: a run that is gone on from at once would find its store busy.
        """
        root = os.readlink(f"/proc/self/fd/{self.directory_fd}") + os.sep
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the listing's own
                if os.readlink(f"/proc/self/fd/{name}").startswith(root):
                    os.close(int(name))
        os.close(self.directory_fd)


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
        _check_owner(path, directory_fd)
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
        _check_owner(path, directory_fd)
        manifest_fd = lock_manifest(path, directory_fd, waits=False)
        if manifest_fd is None:
            raise ConfigError(f"{str(path)!r} has no {MANIFEST}.")
        try:
            if read_manifest(path, manifest_fd).get("temporary") is not True:
                raise ConfigError(f"{str(path)!r} is not temporary.")
            _remove_files(directory_fd)
            _unlink(directory_fd, MANIFEST)
            os.rmdir(path)
        finally:
            os.close(manifest_fd)
    finally:
        os.close(directory_fd)


# ---- what may be used ----------------------------------------------------------------------------


def _make_private(path: Path) -> bool:
    """Makes the directory, and those above it, 0700; returns whether it was missing."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        for parent in [p for p in reversed(path.parents) if not p.exists()]:
            with contextlib.suppress(FileExistsError):  # another rank has made it meanwhile
                _mkdir(parent)
        _mkdir(path)
        return True
    if not stat.S_ISDIR(mode):
        got = "a symbolic link" if stat.S_ISLNK(mode) else "not a directory"
        raise ConfigError(f"disk_path {str(path)!r} is {got}; allowed: a directory, or a path where one can be made.")
    return False


def _mkdir(path: Path) -> None:
    os.mkdir(path, 0o700)
    os.chmod(path, 0o700)  # a umask may have taken our own rights too


def _check_owner(path: Path, directory_fd: int) -> None:
    status = os.fstat(directory_fd)
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"disk_path {str(path)!r} belongs to user {status.st_uid}; allowed: a directory of user {os.geteuid()}, who runs "
            f"this process. Choose another disk_path."
        )
    if status.st_mode & 0o022:
        raise ConfigError(
            f"disk_path {str(path)!r} has mode {stat.S_IMODE(status.st_mode):04o}: others may write there and change weights. "
            f"Allowed: 0700 or 0755. Run chmod 700 on it, or choose another disk_path."
        )
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        raise ConfigError(f"disk_path {str(path)!r} cannot be written. Choose another disk_path.")


def _check_empty(path: Path, directory_fd: int) -> None:
    ours = (n for n in os.listdir(directory_fd) if (_OURS.fullmatch(n) and n.startswith(MANIFEST)) or OF_RANK.fullmatch(n))
    foreign = sorted(set(os.listdir(directory_fd)).difference(ours))
    if foreign:
        raise ConfigError(
            f"disk_path {str(path)!r} holds {', '.join(foreign[:3])}{' and more' if len(foreign) > 3 else ''} and no "
            f"{MANIFEST} of a store; allowed: a directory that is missing, empty, or a store's. Choose another disk_path."
        )


def _check_capacity(path: Path, limits: DiskLimits) -> None:
    if limits.capacity_bytes is not None and limits.needed_bytes > limits.capacity_bytes:
        raise OutOfDiskError(
            f"{limits.whose} {str(path)!r}: the plan needs {format_bytes(limits.needed_bytes)}, disk_capacity allows "
            f"{format_bytes(limits.capacity_bytes)}{limits.each}. Raise disk_capacity, or {limits.remedy}."
        )


def _check_volume(path: Path, directory_fd: int, limits: DiskLimits) -> Volume:
    volume = Volume.of(path)
    if volume.filesystem in MEMORY_FILESYSTEMS and not limits.allow_tmpfs:
        raise ConfigError(
            f"disk_path {str(path)!r} is on {volume.filesystem}, which is host memory, not a disk. Choose a disk_path on "
            f"an SSD, or set allow_tmpfs=True."
        )
    if volume.rotational and not limits.allow_rotational:
        raise ConfigError(
            f"disk_path {str(path)!r} is on {volume.source or 'a disk'}, a rotating disk: every step would wait for its "
            f"heads. Choose a disk_path on an SSD, or set allow_rotational=True."
        )
    free = volume.free_bytes // limits.sharers + _own_bytes(directory_fd)
    if limits.needed_bytes > free:
        raise OutOfDiskError(
            f"{limits.whose} {str(path)!r}: the plan needs {format_bytes(limits.needed_bytes)}, {format_bytes(free)} are "
            f"free{limits.each}. Free some, choose a disk_path on a larger disk, or {limits.remedy}."
        )
    return volume


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
