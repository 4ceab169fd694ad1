"""The file system and the device below a directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_hetero.store.volume import Volume, find_mount, is_rotational

MOUNTS = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
30 27 0:27 / /dev/shm rw - tmpfs tmpfs rw
31 27 0:40 / /data rw - btrfs /dev/sdb1 rw
32 31 0:41 / /data/my\040disk rw - zfs pool/data rw
garbage
"""


@pytest.mark.parametrize(
    ("device", "path", "expected"),
    [
        (os.makedev(0, 27), "/dev/shm/x", ("tmpfs", "tmpfs")),
        (os.makedev(259, 2), "/home/x", ("ext4", "/dev/nvme0n1p2")),
        (os.makedev(0, 99), "/data/sub", ("btrfs", "/dev/sdb1")),
        (os.makedev(0, 99), "/data/my disk/x", ("zfs", "pool/data")),
        (os.makedev(0, 99), "/database", ("ext4", "/dev/nvme0n1p2")),
    ],
)
def test_the_mount_is_found_by_device_then_by_path(device: int, path: str, expected: tuple[str, str]) -> None:
    assert find_mount(MOUNTS, device, path) == expected


def test_no_mount_is_no_answer() -> None:
    assert find_mount("", os.makedev(8, 1), "/") == ("", "")


@pytest.mark.parametrize(
    ("disk", "rotational", "vendor", "expected"),
    [
        ("pci0/ata1/block/sda", "1", "ATA", True),
        ("pci0/nvme/block/sda", "0", "", False),
        ("pci0/virtio3/block/sda", "1", "", False),
        ("pci0/host0/block/sda", "1", "QEMU", False),
    ],
)
def test_a_partition_rotates_as_its_disk_says_unless_that_is_virtual(
    tmp_path: Path, disk: str, rotational: str, vendor: str, expected: bool
) -> None:
    device = tmp_path / "devices" / disk
    (device / "queue").mkdir(parents=True)
    (device / "queue" / "rotational").write_text(f"{rotational}\n")
    (device / "device").mkdir()
    (device / "device" / "vendor").write_text(f"{vendor:8}\n")
    (device / "sda1").mkdir()
    (device / "sda1" / "partition").write_text("1\n")
    (tmp_path / "dev" / "block").mkdir(parents=True)
    (tmp_path / "dev" / "block" / "8:1").symlink_to(device / "sda1")
    (tmp_path / "dev" / "block" / "8:0").symlink_to(device)
    assert is_rotational(os.makedev(8, 1), sysfs=tmp_path) is expected
    assert is_rotational(os.makedev(8, 0), sysfs=tmp_path) is expected


class Sysfs:
    """Block devices as sysfs shows them."""

    def __init__(self, root: Path) -> None:
        self.root, self.numbers = root, dict[str, int]()
        (root / "dev" / "block").mkdir(parents=True)

    def add(self, name: str, *, rotational: bool, parts: tuple[str, ...] = (), file: str = "", partition: bool = False) -> None:
        place = self.root / "devices" / "virtual" / name
        (place / "queue").mkdir(parents=True)
        (place / "slaves").mkdir()
        (place / "queue" / "rotational").write_text(f"{int(rotational)}\n")
        for part in parts:
            (place / "slaves" / part).symlink_to(self.place(part))
        if file:
            (place / "loop").mkdir()
            (place / "loop" / "backing_file").write_text(f"{file}\n")
        self._number(name, place)
        if partition:
            (place / f"{name}1").mkdir()
            (place / f"{name}1" / "partition").write_text("1\n")
            self._number(f"{name}1", place / f"{name}1")

    def _number(self, name: str, place: Path) -> None:
        self.numbers[name] = os.makedev(200, len(self.numbers))
        (self.root / "dev" / "block" / f"200:{len(self.numbers) - 1}").symlink_to(place)

    def place(self, name: str) -> Path:
        number = self.numbers[name]
        return (self.root / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}").resolve()

    def rotates(self, name: str) -> bool:
        def device_under(path: Path) -> int:
            if path.name not in self.numbers:
                raise FileNotFoundError(path)
            return self.numbers[path.name]

        return is_rotational(self.numbers[name], sysfs=self.root, device_under=device_under)


def test_devices_that_stand_for_others_rotate_as_these_do(tmp_path: Path) -> None:
    sysfs = Sysfs(tmp_path)
    for name, rotational in (("ssd", False), ("hdd", True)):
        sysfs.add(name, rotational=rotational, partition=True)
    for name in ("ssd", "hdd", "ssd1", "hdd1"):  # whatever the stand-in itself says, as loop and dm devices say anything
        for says in (True, False):
            sysfs.add(f"dm-{name}-{says}", rotational=says, parts=(name,))
            sysfs.add(f"loop-{name}-{says}", rotational=says, file=f"/mnt/a b/{name}")
            sysfs.add(f"crypt-on-loop-{name}-{says}", rotational=says, parts=(f"loop-{name}-{says}",))
            sysfs.add(f"loop-on-dm-{name}-{says}", rotational=says, file=f"/mnt/dm-{name}-{says}")
    sysfs.add("raid", rotational=False, parts=("ssd1", "hdd1"))
    assert sysfs.rotates("raid")
    for name in sysfs.numbers:
        if name != "raid":
            assert sysfs.rotates(name) == ("hdd" in name), name


def test_a_loop_device_whose_file_cannot_be_found_does_not_count_as_rotating(tmp_path: Path) -> None:
    sysfs = Sysfs(tmp_path)
    sysfs.add("loop0", rotational=True, file="/somewhere/else (deleted)")
    assert not sysfs.rotates("loop0")


def test_a_device_that_says_nothing_does_not_rotate(tmp_path: Path) -> None:
    assert not is_rotational(os.makedev(0, 40), sysfs=tmp_path)


def test_the_volume_of_a_real_directory_is_known(tmp_path: Path) -> None:
    volume = Volume.of(tmp_path)
    assert volume.filesystem
    assert volume.free_bytes > 0
