"""What the disk tier must know of the file system and the device under a directory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_hetero.errors import OutOfDiskError, StoreError

MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})

_FULL = {errno.ENOSPC, errno.EDQUOT}

# A hypervisor's disk repeats the emulation's default, whatever is under it: its "rotational" says
# nothing.
_VIRTUAL_BUSES = ("/virtio", "/vbd-", "/VMBUS:")
_VIRTUAL_VENDORS = ("QEMU", "VMware", "Msft", "VBOX", "Google", "Amazon")


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """The file system under a path.

    Attributes:
        filesystem: Its type, such as ``"ext4"``; empty where the system does not say.
        source: Its device or origin, such as ``"/dev/nvme0n1p2"``.
        rotational: A disk with moving heads. False where the device does not say or cannot know: a
            virtual disk, a network file system.
        free_bytes: Bytes that this user may still write.
    """

    filesystem: str
    source: str
    rotational: bool
    free_bytes: int

    @classmethod
    def of(cls, path: Path) -> Volume:
        """Looks at an existing directory.

        Raises:
            OSError: The directory cannot be looked at.
        """
        filesystem, source, device = _mounted(path)
        space = os.statvfs(path)
        return cls(
            filesystem=filesystem,
            source=source,
            rotational=is_rotational(device),
            free_bytes=space.f_bavail * space.f_frsize,
        )


def disk_error(error: OSError, message: str) -> StoreError:
    """The error for a failed system call on the disk; its own class if the disk is full."""
    return (OutOfDiskError if error.errno in _FULL else StoreError)(message)


def find_mount(mountinfo: str, device: int, path: str) -> tuple[str, str]:
    """Type and source of the mount that holds ``path``, from the text of ``/proc/self/mountinfo``.

    A mount of the path's own device is the right one; btrfs and others report another device than
    their mount, so the longest mount point above the path decides then. ``("", "")`` if there is
    none.

    Source: proc(5), ``/proc/pid/mountinfo``.
    """
    number, best, longest = f"{os.major(device)}:{os.minor(device)}", ("", ""), -1
    for line in mountinfo.splitlines():
        mount, _, origin = line.partition(" - ")
        fields, kind = mount.split(), origin.split()
        if len(fields) < 5 or len(kind) < 2:
            continue
        if fields[2] == number:
            return kind[0], kind[1]
        point = fields[4].encode().decode("unicode_escape")  # blanks are written \040
        above = path == point or path.startswith(point.rstrip("/") + "/")
        if above and len(point) >= longest:
            best, longest = (kind[0], kind[1]), len(point)
    return best


def is_rotational(
    device: int, *, sysfs: Path = Path("/sys"), device_under: Callable[[Path], int] = lambda path: _mounted(path)[2]
) -> bool:
    """Whether a block device says that it rotates, and can know.

    Of several disks under it, any.

    Args:
        device: Its number, as in ``st_dev``.
        sysfs: Where sysfs is mounted.
        device_under: The number of the block device under a file.
    """
    return any(_says_so(place) for place in _disks(_place(device, sysfs), sysfs, device_under))


def disks_under(path: Path) -> tuple[Path, ...]:
    """The disks that hold a directory, as their own directories in sysfs.

    Raises:
        OSError: The directory cannot be looked at.
    """
    sysfs = Path("/sys")
    found = _disks(_place(_mounted(path)[2], sysfs), sysfs, lambda file: _mounted(file)[2])
    return tuple(dict.fromkeys(place for place in found if place.exists()))


def _place(device: int, sysfs: Path) -> Path:
    """A block device's directory in sysfs."""
    return Path(os.path.realpath(sysfs / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}"))


def _disks(place: Path, sysfs: Path, device_under: Callable[[Path], int]) -> Iterator[Path]:
    """The disks that a device in sysfs stands for.

    Those of a device-mapper or RAID device are its parts', that of a loop device is the one under
    its file.

    Source: Linux, Documentation/ABI/stable/sysfs-block and drivers/block/loop.c (``backing_file``).
    """
    if (place / "partition").exists():
        place = place.parent
    if (place / "slaves").is_dir() and (parts := sorted((place / "slaves").iterdir())):
        for part in parts:
            yield from _disks(Path(os.path.realpath(part)), sysfs, device_under)
    elif (place / "loop" / "backing_file").exists():
        try:
            under = device_under(Path(_read(place / "loop" / "backing_file").removesuffix("\n")))
        except OSError:  # it was removed, or is in another mount namespace: nobody can say
            return
        yield from _disks(_place(under, sysfs), sysfs, device_under)
    else:
        yield place


def _says_so(place: Path) -> bool:
    vendor = _read(place / "device" / "vendor").strip()
    virtual = any(bus in str(place) for bus in _VIRTUAL_BUSES) or vendor.startswith(_VIRTUAL_VENDORS)
    return not virtual and _read(place / "queue" / "rotational").strip() == "1"


def _mounted(path: Path) -> tuple[str, str, int]:
    """Type and source of the file system under a path, and the number of its block device."""
    device = path.stat().st_dev
    filesystem, source = find_mount(_read(Path("/proc/self/mountinfo")), device, os.path.realpath(path))
    return filesystem, source, _block_device(device, source)


def _block_device(device: int, source: str) -> int:
    """The device number behind a file system; btrfs has a made-up one, so its source's."""
    if os.major(device) or not source.startswith("/dev/"):
        return device
    try:
        return os.stat(source).st_rdev
    except OSError:
        return device


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
