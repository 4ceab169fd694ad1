"""How much memory this process may use: the machine's, or less where a control group or the batch system says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil


def available_memory_bytes(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of host memory that are free for this process now.

    The least of what the system has available and what each control group above the process leaves; pages of files that a group
    could drop count as free.

    Args:
        proc: Where procfs is mounted.
        cgroups: Where control groups are mounted.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    return max(0, min([int(psutil.virtual_memory().available), *_rooms(proc, cgroups)]))


def total_memory_bytes(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of host memory that this process could ever have: the machine's, or a control group's limit."""
    limits = (limit for limit, _ in _groups(proc, cgroups))
    return min([int(psutil.virtual_memory().total), *limits])


def _rooms(proc: Path, cgroups: Path) -> Iterator[int]:
    return (limit - used for limit, used in _groups(proc, cgroups))


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of every control group with a limit, from the process's own upwards."""
    for line in _lines(proc / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield from _upwards(cgroups, path, limit="memory.max", use="memory.current", dropped="inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            yield from _upwards(
                root, path, limit="memory.limit_in_bytes", use="memory.usage_in_bytes", dropped="total_inactive_file"
            )


def _upwards(root: Path, path: str, *, limit: str, use: str, dropped: str) -> Iterator[tuple[int, int]]:
    # In a container the path may be that of the host, of which only the container's own group is mounted: the root then.
    inner = Path(path.lstrip("/"))
    for place in (inner, *inner.parents):
        most, used = _number(root / place / limit), _number(root / place / use)
        if most is None or used is None:
            continue
        kept = next((int(v) for k, _, v in (r.partition(" ") for r in _lines(root / place / "memory.stat")) if k == dropped), 0)
        yield most, used - min(kept, used)


def _number(path: Path) -> int | None:
    rows = _lines(path)
    return int(rows[0]) if rows and rows[0].isdecimal() else None  # "max" where there is no limit


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
