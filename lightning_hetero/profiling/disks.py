"""How fast each of several disks is, so that blocks can be dealt to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lightning_hetero.clock import now_s
from lightning_hetero.profiling.loads import disk_bytes, disk_loads
from lightning_hetero.profiling.timing import Load
from lightning_hetero.store.format.directory import StoreDirectory
from lightning_hetero.store.live.engine_options import EngineOptions
from lightning_hetero.units import MIB, format_bytes

_FILE_BYTES = 32 * MIB  # for reads, and as many for writes
_LEAST_S = 0.1  # of each direction


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRate:
    """What one disk moves, alone.

    Attributes:
        path: A directory on it.
        read_bytes_per_s: Sequential reads.
        write_bytes_per_s: Sequential writes.
    """

    path: Path
    read_bytes_per_s: float
    write_bytes_per_s: float

    @property
    def both_bytes_per_s(self) -> float:
        """Bytes of state that are read and written in a second: an update does both."""
        return 1.0 / (1.0 / self.read_bytes_per_s + 1.0 / self.write_bytes_per_s)

    def __str__(self) -> str:
        read, written = format_bytes(round(self.read_bytes_per_s)), format_bytes(round(self.write_bytes_per_s))
        return f"{self.path}: reads {read}/s, writes {written}/s"


def measure_disks(
    places: Sequence[Path], options: EngineOptions, *, allow_tmpfs: bool = False, allow_rotational: bool = False
) -> list[DiskRate]:
    """Measures disks one after the other, a fraction of a second each.

    Args:
        places: An existing directory on each.
        options: Back end and queue, as in training.
        allow_tmpfs: Accept a file system in memory.
        allow_rotational: Accept a disk with moving heads.

    Raises:
        ConfigError: One of them cannot be a disk tier.
        OutOfDiskError: One of them is full.
        StoreError: A transfer failed.
    """
    found = []
    for place in places:
        with ExitStack() as undo:
            directory = StoreDirectory.create_or_adopt(
                None, default_root=place, manifest={"benchmark": "disk"}, needed_bytes=disk_bytes(_FILE_BYTES),
                allow_tmpfs=allow_tmpfs, allow_rotational=allow_rotational,
            )  # fmt: skip
            undo.callback(directory.close)
            reads, writes = disk_loads(directory, _FILE_BYTES, options, undo)
            found.append(DiskRate(path=place, read_bytes_per_s=_rate(reads), write_bytes_per_s=_rate(writes)))
    return found


def _rate(load: Load, clock: Callable[[], float] = now_s) -> float:
    load.step()  # the first transfers wait for a disk that sleeps
    moved, begin_s = 0.0, clock()
    while clock() - begin_s < _LEAST_S:
        moved += load.step()
    load.settle()
    return moved / (clock() - begin_s)
