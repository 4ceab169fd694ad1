"""Disks by name, one or several of a kind in parallel.

Datasheets give sequential transfers into an empty drive. Consumer drives write that fast only until
their cache is full, after a hundred gigabytes or so: measure a machine before you trust a plan that
writes for hours. They also give the bytes that may be written within the warranty (TBW).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lightning_hetero.errors import ConfigError
from lightning_hetero.profiling.presets.figures import Figure, find

_COUNTED = re.compile(r"(?P<name>.+?)\s*[x\u00d7*]\s*(?P<count>[0-9]{1,3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """One disk, or several over which every transfer is spread.

    Attributes:
        name: Its name in the table, with ``x12`` for twelve.
        capacity_bytes: Its capacity.
        read_bytes_per_s: Sequential reads, bytes/s.
        write_bytes_per_s: Sequential writes, bytes/s.
        rated_bytes: Bytes that may be written within the warranty.
        duplex: Whether simultaneous reads and writes do not slow each other.
    """

    name: str
    capacity_bytes: Figure
    read_bytes_per_s: Figure
    write_bytes_per_s: Figure
    rated_bytes: Figure
    duplex: bool = False

    def times(self, count: int) -> Disk:
        """``count`` of them in parallel, each as fast as alone."""
        how = f"{count} x"
        return Disk(
            name=f"{self.name}x{count}",
            capacity_bytes=Figure(count * self.capacity_bytes.value, f"{how} {self.capacity_bytes.source}"),
            read_bytes_per_s=Figure(count * self.read_bytes_per_s.value, f"{how} {self.read_bytes_per_s.source}"),
            write_bytes_per_s=Figure(count * self.write_bytes_per_s.value, f"{how} {self.write_bytes_per_s.source}"),
            rated_bytes=Figure(count * self.rated_bytes.value, f"{how} {self.rated_bytes.source}"),
            duplex=self.duplex,
        )


def _disk(name: str, terabytes: float, read: float, write: float, rated: float, sheet: str) -> Disk:
    """A disk from its datasheet: TB, GB/s of 10**9 bytes, and rated writes in TB."""
    return Disk(
        name=name,
        capacity_bytes=Figure(terabytes * 1e12, sheet),
        read_bytes_per_s=Figure(read * 1e9, sheet),
        write_bytes_per_s=Figure(write * 1e9, sheet),
        rated_bytes=Figure(rated * 1e12, sheet),
    )


# All are half-duplex, as LoHan assumes for SSDs (section IV-D): the times of reads and writes add.
DISKS: dict[str, Disk] = {
    d.name: d
    for d in (
        _disk("p5510", 3.84, 6.5, 3.4, 7008, "Intel SSD D7-P5510 3.84 TB datasheet (LoHan, table III)"),
        _disk("p5800x", 1.6, 7.2, 6.2, 292000, "Intel Optane SSD DC P5800X 1.6 TB datasheet"),
        _disk("pm9a3", 3.84, 6.8, 4.0, 7008, "Samsung PM9A3 3.84 TB datasheet"),
        _disk("970pro", 1.024, 3.5, 2.7, 1200, "Samsung 970 PRO 1 TB datasheet"),
        _disk("980pro", 2.0, 7.0, 5.1, 1200, "Samsung 980 PRO 2 TB datasheet"),
        _disk("990pro", 4.0, 7.45, 6.9, 2400, "Samsung 990 PRO 4 TB datasheet"),
        _disk("sn850x", 4.0, 7.3, 6.6, 2400, "WD_BLACK SN850X 4 TB datasheet"),
        _disk("t705", 4.0, 14.1, 12.6, 2400, "Crucial T705 4 TB datasheet"),
        _disk("nvme-gen3", 2.0, 3.3, 2.5, 1200, "assumed: a good PCIe 3 x4 drive of 2 TB"),
        _disk("nvme-gen4", 2.0, 6.5, 4.5, 1200, "assumed: a good PCIe 4 x4 drive of 2 TB"),
        _disk("nvme-gen5", 2.0, 13.0, 10.0, 1200, "assumed: a good PCIe 5 x4 drive of 2 TB"),
    )
}


def disk(spec: str) -> Disk:
    """The disk of that name, or several: ``"p5510"``, ``"p5510x12"``, ``"980pro x 2"``.

    Raises:
        ConfigError: There is no such disk, or the count is 0.
    """
    counted = _COUNTED.fullmatch(spec.strip())
    if counted is None:
        return find("disk", DISKS, spec)
    count = int(counted["count"])
    if count < 1:
        raise ConfigError(f"disk {spec!r} has count {count}; allowed: 1 to 999, such as 'p5510x12'.")
    one = find("disk", DISKS, counted["name"])
    return one if count == 1 else one.times(count)
