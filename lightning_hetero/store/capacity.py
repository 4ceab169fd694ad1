"""Memory and processors that this process may use, within control groups and batch systems."""

from __future__ import annotations

import ctypes
import math
import os
import re
import resource
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

_NO_LIMIT = 1 << 62  # what a group of the first version without a limit says is near 2 ** 63


def available_memory_bytes(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of host memory that are free for this process now.

    The least of what the system has available and what each control group above the process leaves;
    pages of files that a group could drop count as free.

    Args:
        proc: Where procfs is mounted.
        cgroups: Where control groups are mounted.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst; proc(5),
    ``meminfo``.
    """
    return max(0, min([_meminfo(proc, "MemAvailable"), *_rooms(proc, cgroups)]))


def total_memory_bytes(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of host memory that this process may ever have: the machine's, or a group's limit."""
    limits = (limit for limit, _ in _groups(proc, cgroups))
    return min([_meminfo(proc, "MemTotal"), *limits])


def _meminfo(proc: Path, key: str) -> int:
    rows = (line.split() for line in (proc / "meminfo").read_text(encoding="utf-8").splitlines())
    return 1024 * next(int(row[1]) for row in rows if row[0] == f"{key}:")


def resident_bytes(*, shared: bool = True) -> int:
    """Bytes of host memory that this process holds now. Source: proc(5), ``statm``.

    Args:
        shared: With the pages of files and those that other processes may have, too.
    """
    statm = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        _, resident, in_files, *_ = map(int, os.read(statm, 256).split())
        return (resident if shared else resident - in_files) * resource.getpagesize()
    finally:
        os.close(statm)


def peak_resident_bytes() -> int:
    """The most bytes of host memory that this process has held so far.

    ``getrusage`` would count what its parent held when it started this process. Source:
    ``exec_mmap`` in Linux, fs/exec.c.
    """
    status = Path("/proc/self/status")
    text = status.read_text() if status.exists() else ""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def heap_meter() -> Callable[[], int]:
    """A function that says how many bytes malloc has given out; 0 where the C library has none.

    Source: mallinfo(3), ``uordblks`` and ``hblkhd`` of all arenas.
    """
    return _malloc_meter("uordblks")


def heap_size() -> int:
    """Bytes that malloc has from the system, given out or not; 0 where the C library does not say.

    Source: mallinfo(3), ``arena`` and ``hblkhd``.
    """
    return _malloc_meter("arena")()


@cache
def malloc_answers() -> bool:
    """Whether the C library says so, which one that takes the place of glibc's malloc does not."""
    return heap_size() > 0


def _malloc_meter(field: str) -> Callable[[], int]:
    query = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if query is None:
        return lambda: 0
    query.restype = _MallocInfo

    def read() -> int:
        info = query()
        return int(getattr(info, field) + info.hblkhd)

    return read


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def available_cores(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Processors that this process may use, by its affinity and its control group's quota.

    Args:
        proc: Where procfs is mounted.
        cgroups: Where control groups are mounted.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst (cpu.max) and scheduler/sched-bwc.rst.
    """
    quotas = [max(1, math.ceil(quota)) for quota in _quotas(proc, cgroups)]
    return min([len(os.sched_getaffinity(0)), *quotas])


def _quotas(proc: Path, cgroups: Path) -> Iterator[float]:
    """Processors that each control group with a quota pays for, from the process's own upwards."""
    for number, controllers, path in _memberships(proc):
        if number == "0":
            for place in _above(path):
                quota, _, period = next(iter(_lines(cgroups / place / "cpu.max")), "max").partition(" ")
                if quota.isdecimal() and period.isdecimal() and int(period):
                    yield int(quota) / int(period)
        elif "cpu" in controllers.split(","):
            for place in _above(path):
                root = cgroups / "cpu" / place
                used, of = _number(root / "cpu.cfs_quota_us"), _number(root / "cpu.cfs_period_us")  # -1: no quota
                if used is not None and of:
                    yield used / of


def _rooms(proc: Path, cgroups: Path) -> Iterator[int]:
    return (limit - used for limit, used in _groups(proc, cgroups))


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of every control group with a limit, from the process's own upwards."""
    for number, controllers, path in _memberships(proc):
        if number == "0":
            yield from _upwards(cgroups, path, limit="memory.max", use="memory.current", dropped="inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            yield from _upwards(
                root, path, limit="memory.limit_in_bytes", use="memory.usage_in_bytes", dropped="total_inactive_file"
            )


def _upwards(root: Path, path: str, *, limit: str, use: str, dropped: str) -> Iterator[tuple[int, int]]:
    for place in _above(path):
        most = _number(root / place / limit)
        if most is None or most >= _NO_LIMIT or (used := _number(root / place / use)) is None:
            continue
        kept = next((int(v) for k, _, v in (r.partition(" ") for r in _lines(root / place / "memory.stat")) if k == dropped), 0)
        yield most, used - min(kept, used)


def _memberships(proc: Path) -> Iterator[tuple[str, str, str]]:
    """Number, controllers and path of the control groups that the process is in."""
    for line in _lines(proc / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        yield number, controllers, path


def _above(path: str) -> Iterator[Path]:
    """A control group and those above it, up to the root."""
    # In a container the path may be that of the host, of which only the container's own group is
    # mounted: the root then.
    inner = Path(path.lstrip("/"))
    yield from (inner, *inner.parents)


def _number(path: Path) -> int | None:
    rows = _lines(path)
    return int(rows[0]) if rows and rows[0].isdecimal() else None  # "max" where there is no limit


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
