"""What a directory must be and have so that a store may use it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_hetero.errors import ConfigError, OutOfDiskError
from lightning_hetero.store.volume import MEMORY_FILESYSTEMS, Volume
from lightning_hetero.units import format_bytes

FEWER_BLOCKS = "place fewer blocks on 'disk'"


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
    remedy: str = FEWER_BLOCKS

    @property
    def each(self) -> str:
        """Whose share the numbers are, for errors."""
        return "" if self.sharers == 1 else f" for each of {self.sharers} ranks"


def make_private(path: Path) -> bool:
    """Makes the directory, and those above it, 0700; returns whether this call has made it.

    Raises:
        ConfigError: Something else is there.
    """
    if not os.path.lexists(path):
        for place in [*(p for p in reversed(path.parents) if not p.exists()), path]:
            with contextlib.suppress(FileExistsError):  # another rank has made it meanwhile
                _mkdir(place)
                if place == path:
                    return True
    mode = os.lstat(path).st_mode
    if not stat.S_ISDIR(mode):
        got = "a symbolic link" if stat.S_ISLNK(mode) else "not a directory"
        raise ConfigError(f"disk_path {str(path)!r} is {got}; allowed: a directory, or a path where one can be made.")
    return False


def _mkdir(path: Path) -> None:
    os.mkdir(path, 0o700)
    os.chmod(path, 0o700)  # a umask may have taken our own rights too


def check_owner(path: Path, directory_fd: int) -> None:
    """Refuses a directory of somebody else, or one where others may write.

    Raises:
        ConfigError: Says whose it is, and its mode.
    """
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


def check_capacity(path: Path, limits: DiskLimits) -> None:
    """Refuses more than ``disk_capacity``, which is for all disks together.

    Raises:
        OutOfDiskError: Says how much is needed.
    """
    if limits.capacity_bytes is not None and limits.needed_bytes > limits.capacity_bytes:
        raise OutOfDiskError(
            f"{limits.whose} {str(path)!r}: the plan needs {format_bytes(limits.needed_bytes)}, disk_capacity allows "
            f"{format_bytes(limits.capacity_bytes)}{limits.each}. Raise disk_capacity, or {limits.remedy}."
        )


def check_volumes(places: Sequence[Path], owned: Sequence[int], shares: Sequence[float], limits: DiskLimits) -> Volume:
    """Refuses disks of another kind than the limits allow, and those that are too small.

    Args:
        places: The directories of the store.
        owned: Bytes in each that the store has already.
        shares: The part of the store's bytes that each gets.
        limits: What they must offer together.

    Returns:
        The volume of the first.

    Raises:
        ConfigError: One of them is in memory or on a rotating disk.
        OutOfDiskError: One has too little room for its part.
    """
    volumes, devices = [_allowed_volume(place, limits) for place in places], list(map(_device, places))
    for place, volume, device in zip(places, volumes, devices, strict=True):
        same = [number for number, other in enumerate(devices) if other == device]
        needed = round(limits.needed_bytes * sum(shares[number] for number in same))
        free = volume.free_bytes // limits.sharers + sum(owned[number] for number in same)
        if needed > free:
            part = "" if len(same) == len(places) else f" there, of {format_bytes(limits.needed_bytes)} on all disks"
            raise OutOfDiskError(
                f"{limits.whose} {str(place)!r}: the plan needs {format_bytes(needed)}{part}, {format_bytes(free)} are "
                f"free{limits.each}. Free some, choose a disk_path on a larger disk, or {limits.remedy}."
            )
    return volumes[0]


def _device(path: Path) -> int:
    return path.stat().st_dev


def _allowed_volume(path: Path, limits: DiskLimits) -> Volume:
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
    return volume
