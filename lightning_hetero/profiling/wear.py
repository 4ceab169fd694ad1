"""How long drives last under the writes of training.

An SSD may be written a limited number of times. Its datasheet rates the bytes that may be written
within the warranty (TBW), and SMART says how many have been. Nothing here writes to a drive.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_hetero.profiling.presets.disks import DISKS
from lightning_hetero.store.volume import disks_under

_SECTOR_BYTES = 512  # of the size in sysfs, whatever the drive's own are
_DATA_UNIT_BYTES = 512_000  # NVM Express Base Specification 2.0, figure 207: "Data Units Written"
_LEAST_PERCENT = 5  # of wear: below it, a whole number of percents says little of what the drive is rated for
_TIMEOUT_S = 10.0
_UNITS = ((365.25 * 86400, "years"), (86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """One drive, or several over which writes are spread.

    Attributes:
        name: Its model, or the name of its device.
        rated_bytes: Bytes that may be written to it within its warranty; 0: not known.
        written_bytes: Bytes that have been written to it so far; 0: not known.
        source: Where the rating is from.
    """

    name: str
    rated_bytes: float = 0.0
    written_bytes: float = 0.0
    source: str = ""


def drives_under(path: Path) -> tuple[Drive, ...]:
    """The drives that hold a directory, with what sysfs and SMART say of them.

    SMART is read by ``smartctl``, if it is installed and the user may. Where the model is known,
    the rating is its datasheet's; else it follows from the share of it that SMART calls used.

    Raises:
        OSError: The directory cannot be looked at.
    """
    return tuple(drive_of(place, _smart(place.name)) for place in disks_under(path))


def drive_of(place: Path, smart: Mapping[str, object]) -> Drive:
    """A drive from its directory in sysfs and the JSON of ``smartctl -j -A``."""
    model = _read(place / "device" / "model") or place.name
    size = int(_read(place / "size") or 0) * _SECTOR_BYTES
    log = smart.get("nvme_smart_health_information_log")
    health: Mapping[str, object] = log if isinstance(log, Mapping) else {}
    written = _number(health.get("data_units_written")) * _DATA_UNIT_BYTES
    rated, source = _datasheet(model, size)
    used_percent = _number(health.get("percentage_used"))
    if not rated and used_percent >= _LEAST_PERCENT:
        rated, source = written * 100 / used_percent, f"SMART: {used_percent:.0f} % of it is used"
    return Drive(name=model, rated_bytes=rated, written_bytes=written, source=source)


def together(drives: Iterable[Drive]) -> Drive | None:
    """Several drives as one; ``None`` without any. It is rated only if each of them is."""
    found = list(drives)
    if not found:
        return None
    return Drive(
        name=", ".join(dict.fromkeys(drive.name for drive in found)),
        rated_bytes=sum(d.rated_bytes for d in found) if all(d.rated_bytes for d in found) else 0.0,
        written_bytes=sum(drive.written_bytes for drive in found),
        source="; ".join(dict.fromkeys(drive.source for drive in found if drive.source)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wear:
    """What training writes, and how long a drive lasts under it.

    Attributes:
        step_bytes: Bytes that a step writes.
        step_s: Seconds of a step.
        drive: The drive; ``None``: not known.
    """

    step_bytes: float
    step_s: float
    drive: Drive | None = None

    @property
    def bytes_per_s(self) -> float:
        """Bytes written per second of training."""
        return self.step_bytes / self.step_s if self.step_s else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds of training until the drive's rating is used up.

        ``None`` without a rating, or without writes.
        """
        if self.drive is None or not self.drive.rated_bytes or not self.bytes_per_s:
            return None
        return max(0.0, self.drive.rated_bytes - self.drive.written_bytes) / self.bytes_per_s

    def __str__(self) -> str:
        """Such as ``"52 GB a step, 1.2 TB an hour; …"``."""
        text = f"{_decimal(self.step_bytes)} written a step, {_decimal(3600 * self.bytes_per_s)} an hour"
        if self.drive is None:
            return text
        if self.left_s is None:
            return f"{text}; what {self.drive.name} is rated for is not known"
        used = f", {_decimal(self.drive.written_bytes)} of it used" if self.drive.written_bytes else ""
        rating = f"{_decimal(self.drive.rated_bytes)}{used} ({self.drive.source})"
        return f"{text}; {self.drive.name} is rated for {rating}: {_duration(self.left_s)} of training"


def _datasheet(model: str, size: int) -> tuple[float, str]:
    """The rating of a known model, which grows with its size; 0 for another one."""
    plain = re.sub(r"[^a-z0-9]", "", model.lower())
    known = next((disk for name, disk in DISKS.items() if not name.startswith("nvme-") and name in plain), None)
    if known is None or not size:
        return 0.0, ""
    share = size / known.capacity_bytes.value
    where = known.rated_bytes.source
    return known.rated_bytes.value * share, where if 0.9 < share < 1.1 else f"{where}, by its size"


def _smart(name: str) -> Mapping[str, object]:
    """What smartctl says of a device; nothing if it cannot."""
    program = shutil.which("smartctl")
    if program is None:
        return {}
    try:
        run = subprocess.run([program, "-j", "-A", f"/dev/{name}"], capture_output=True, text=True, timeout=_TIMEOUT_S)
        said = json.loads(run.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _decimal(num_bytes: float) -> str:
    """Bytes in powers of ten, as datasheets of drives have them."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} PB"


def _duration(seconds: float) -> str:
    for length, unit in _UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"
