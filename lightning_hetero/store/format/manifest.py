"""The manifest of a store: whose directory it is.

[Note: Manifest]
``MANIFEST`` is JSON with the format, a uuid that every block chunk and commit record repeats, the
blocks, and the process that uses the directory. It is written once per use, to a temporary name,
synced, and then given its name; its file description holds an exclusive ``flock`` as long as the
store lives, so the lock ends with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import stat
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_hetero.errors import ConfigError, StoreBusyError, StoreError
from lightning_hetero.store.format.holders import lock

FORMAT = "lightning-hetero-store"
VERSION = 2  # 1 aligned parameters to 16 elements of any size
OF_RANKS = 3  # of stores that belong to a set: one that lacks `set` would be taken for the whole model
STRIPED = 4  # of stores with blocks on several disks, of one process or of ranks
READABLE = (1, VERSION, OF_RANKS, STRIPED)
MANIFEST = "MANIFEST"

_SET_MAX = 1 << 20  # ranks, and sets of a run
_BYTES_MAX = 64 * 2**20
_ID = re.compile(r"[0-9a-f]{32}")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """The place of a store in a set; see [Note: Common steps] in ``store/common_steps.py``.

    Attributes:
        set_id: Names the set: 32 hexadecimal digits, the same in all of its stores.
        set_number: Counts the sets of a run.
        ranks: How many stores the set has.
        rank: The place of this one among them.
        nodes: How many times the set has the model: the stores of each node have all of it.
        origin: Names the step of stores elsewhere that the set has begun from.
    """

    set_id: str
    set_number: int
    ranks: int
    rank: int
    nodes: int = 1
    origin: str | None = None

    @property
    def shards(self) -> int:
        """Into how many slices the model is cut."""
        return self.ranks // self.nodes

    @property
    def shard(self) -> int:
        """The slice that this store has."""
        return self.rank % self.shards


def member_of(path: Path, manifest: Mapping[str, Any]) -> Member:
    """The place of a store in its set. A store that does not name one is a set by itself.

    Raises:
        ConfigError: What it says of the set is not possible.
    """
    row, origin = manifest.get("set"), manifest.get("origin")
    if row is None:
        return Member(set_id=identity_of(path, manifest).hex, set_number=0, ranks=1, rank=0)
    if isinstance(row, dict) and row.keys() - {"nodes"} == {"id", "number", "ranks", "rank"}:
        name, number, ranks, rank, nodes = row["id"], row["number"], row["ranks"], row["rank"], row.get("nodes", 1)
        counts = all(type(value) is int and 0 <= value < _SET_MAX for value in (number, ranks, rank, nodes))
        if isinstance(name, str) and _ID.fullmatch(name) and counts and rank < ranks and nodes and not ranks % nodes:
            origin = origin if isinstance(origin, str) else None
            return Member(set_id=name, set_number=number, ranks=ranks, rank=rank, nodes=nodes, origin=origin)
    raise ConfigError(
        f"{str(path / MANIFEST)!r} has set {row!r}; allowed: an id, a number, and a rank of ranks, which may be on several nodes."
    )


def _fingerprint(geometry: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(geometry, sort_keys=True).encode()).hexdigest()


def lock_manifest(path: Path, directory_fd: int, *, waits: bool = True) -> int | None:
    """The locked manifest of the directory; ``None`` if there is none.

    Waits for the lock of a process that has ended, unless ``waits`` is false.

    Raises:
        StoreBusyError: A living process holds it.
        ConfigError: It is not a manifest of ours.
    """
    while True:
        manifest_fd = open_manifest(path, directory_fd)
        if manifest_fd is None:
            return None
        try:
            user = read_manifest(path, manifest_fd).get("pid")
            if not lock(manifest_fd, path / MANIFEST, user=user if type(user) is int else None, waits=waits):
                raise StoreBusyError(
                    f"disk_path {str(path)!r} is in use by process {user}. Wait for it to end, or choose another disk_path."
                )
            if _is_current(manifest_fd, directory_fd):  # else it was replaced between open and lock
                return manifest_fd
            os.close(manifest_fd)
        except BaseException:
            os.close(manifest_fd)
            raise


def open_manifest(path: Path, directory_fd: int) -> int | None:
    """The manifest of the directory, without a lock; ``None`` if there is none.

    Raises:
        ConfigError: It cannot be opened.
    """
    try:
        return os.open(MANIFEST, _READ, dir_fd=directory_fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{str(path / MANIFEST)!r} cannot be opened: {error.strerror}. Choose another disk_path.") from error


def _is_current(manifest_fd: int, directory_fd: int) -> bool:
    try:
        return os.path.samestat(os.fstat(manifest_fd), os.stat(MANIFEST, dir_fd=directory_fd, follow_symlinks=False))
    except FileNotFoundError:
        return False


def read_manifest(path: Path, manifest_fd: int) -> dict[str, Any]:
    """The manifest of the directory ``path``.

    Raises:
        ConfigError: It is not a manifest of ours.
        StoreError: It cannot be read.
    """
    status = os.fstat(manifest_fd)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_size <= _BYTES_MAX:
        try:
            content = os.pread(manifest_fd, _BYTES_MAX, 0)
        except OSError as error:
            raise StoreError(f"{str(path / MANIFEST)!r} cannot be read: {error.strerror}.") from error
        with contextlib.suppress(ValueError, RecursionError):
            manifest = json.loads(content)
            if isinstance(manifest, dict) and manifest.get("format") == FORMAT:
                return manifest
    raise ConfigError(f"disk_path {str(path)!r} holds a file {MANIFEST} that is not a store's. Choose another disk_path.")


def identity_of(path: Path, manifest: Mapping[str, Any]) -> uuid.UUID:
    """The uuid in a manifest.

    Raises:
        ConfigError: There is none.
    """
    with contextlib.suppress(KeyError, ValueError, TypeError, AttributeError):
        return uuid.UUID(hex=manifest["uuid"])
    raise ConfigError(f"{str(path / MANIFEST)!r} has uuid {manifest.get('uuid')!r}; allowed: 32 hexadecimal digits.")


def layout_of(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """What a manifest says of the commit ring and the parts, checked.

    Raises:
        ConfigError: It says nothing, or nothing possible.
    """
    layout = manifest.get("layout")
    if isinstance(layout, dict) and isinstance(layout.get("parts"), list):
        numbers = (layout.get("num_blocks"), layout.get("user_bytes"), alignment := layout.get("alignment", 0))
        names = [name for part in layout["parts"] if isinstance(part, list) for name in part]
        lists = all(isinstance(part, list) for part in layout["parts"])
        whole = lists and all(isinstance(n, str) for n in names) and all(type(n) is int and 0 <= n < 2**26 for n in numbers)
        if whole and alignment & (alignment - 1) == 0:  # 0 or a power of two
            return layout
    raise ConfigError(f"{str(path / MANIFEST)!r} does not say how its files are laid out: it was not made for a run that resumes.")


def alignment_of(layout: Mapping[str, Any]) -> int:
    """The bytes at whose multiples parameters start in the files; 0 in stores of version 1."""
    return int(layout.get("alignment", 0))


def alignment_in(path: Path) -> int:
    """The same of the store at a path.

    Raises:
        ConfigError: It is not a store that can be resumed.
    """
    return alignment_of(layout_of(path, manifest_at(path)))


def manifest_at(path: Path) -> dict[str, Any]:
    """The manifest of the store at a path, without a lock.

    Raises:
        ConfigError: It is not a manifest of ours.
        StoreError: It cannot be read.
    """
    manifest_fd = os.open(path / MANIFEST, _READ)
    try:
        return read_manifest(path, manifest_fd)
    finally:
        os.close(manifest_fd)


def write_manifest(
    path: Path,
    directory_fd: int,
    identity: uuid.UUID,
    geometry: dict[str, Any],
    *,
    layout: dict[str, Any],
    temporary: bool,
    replace: bool,
    origin: str | None = None,
    member: Member | None = None,
    stripes: Sequence[Path] = (),
) -> int:
    """Writes, syncs and locks the manifest, then gives it its name.

    Args:
        path: The directory.
        directory_fd: It, opened.
        identity: The store's uuid.
        geometry: What the store holds.
        layout: What a resume has to know to open the files.
        temporary: The directory goes with its process.
        replace: The caller holds the old manifest.
        origin: Names the record of another store that this one was made from.
        member: Its place in a set.
        stripes: Its directories on further disks.

    Raises:
        StoreBusyError: Another process was faster.
    """
    manifest = {
        "format": FORMAT,
        "version": STRIPED if stripes else VERSION if member is None else OF_RANKS,
        "uuid": identity.hex,
        "pid": os.getpid(),
        "temporary": temporary,
        "fingerprint": _fingerprint(geometry),
        "geometry": geometry,
        "layout": layout,
    }
    if origin is not None:
        manifest["origin"] = origin
    if member is not None:
        place = {"id": member.set_id, "number": member.set_number, "ranks": member.ranks, "rank": member.rank}
        manifest["set"] = place if member.nodes == 1 else {**place, "nodes": member.nodes}
    if stripes:
        manifest |= {"stripes": list(map(os.fspath, stripes)), "home": os.fspath(path)}
    return put_manifest(path, directory_fd, manifest, replace=replace)


def put_manifest(path: Path, directory_fd: int, manifest: Mapping[str, Any], *, replace: bool) -> int:
    """Writes, syncs and locks a manifest, then gives it its name; see :func:`write_manifest`."""
    name = f"{MANIFEST}.{uuid.uuid4().hex}"  # a process that died here may have left one
    manifest_fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory_fd)
    try:
        os.fchmod(manifest_fd, 0o600)
        with open(manifest_fd, "wb", closefd=False) as file:
            file.write(json.dumps(manifest, indent=1).encode() + b"\n")
        os.fsync(manifest_fd)
        fcntl.flock(manifest_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if replace:
            os.rename(name, MANIFEST, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
        else:
            try:  # unlike rename, link never replaces the manifest of a process that was faster
                os.link(name, MANIFEST, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
            except (FileExistsError, FileNotFoundError) as error:
                raise StoreBusyError(
                    f"disk_path {str(path)!r}: another process took it just now. Choose another disk_path."
                ) from error
        os.fsync(directory_fd)
        return manifest_fd
    except BaseException:
        os.close(manifest_fd)
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory_fd)


def check_same_store(path: Path, manifest: dict[str, Any], geometry: dict[str, Any]) -> None:
    """Refuses a manifest of other contents. The name of the model's class may differ.

    Raises:
        ConfigError: Another version, or another geometry: names the first difference.
    """
    version = manifest.get("version")
    if version in READABLE:
        old = manifest.get("geometry")
        whole = isinstance(old, dict) and manifest.get("fingerprint") == _fingerprint(old)
        difference = _difference(_without_name(old), _without_name(geometry))
        if whole and not difference:
            return
        difference = difference or "its fingerprint does not match its contents"
    else:
        difference = f"version: {version!r} in the store, {' or '.join(map(str, READABLE))} now"
    raise ConfigError(
        f"disk_path {str(path)!r}: changed model under an old store. First difference: {difference}. Choose another "
        f"disk_path, or remove this one. For the weights of its last step alone: "
        f"lightning-hetero export {shlex.quote(str(path))} DIRECTORY."
    )


def _without_name(geometry: Any) -> Any:
    return {k: v for k, v in geometry.items() if k != "model"} if isinstance(geometry, dict) else geometry


def _difference(old: Any, new: Any, where: str = "") -> str:
    """The first place where two JSON values differ; empty if they are equal."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*new, *(k for k in old if k not in new)]:
            if found := _difference(old.get(key), new.get(key), f"{where}.{key}" if where else str(key)):
                return found
        return ""
    if isinstance(old, list) and isinstance(new, list):
        pairs = (_difference(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(old, new, strict=False)))
        fallback = "" if len(old) == len(new) else f"{where}: {len(old)} in the store, {len(new)} now"
        return next((found for found in pairs if found), fallback)
    return "" if old == new else f"{where}: {old!r} in the store, {new!r} now"
