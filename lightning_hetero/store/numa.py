"""Which processors a rank's engine runs on, where a machine has several memory nodes.

[Note: Memory nodes]
On a machine with several sockets each has memory of its own, and reads that of another one more
slowly. So the threads that update and transfer a rank's slices stay on one node, or on a few where
there are more nodes than ranks. Optimizer state in memory is touched first by these threads, so
Linux puts it there. Nothing is bound on one node, nor for one process: it needs all of them.

Source: Linux, Documentation/ABI/stable/sysfs-devices-node.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_NODE = re.compile(r"node([0-9]+)")
_MEMORY = re.compile(r"MemTotal:\s*([0-9]+)")


def node_cpus(nodes: Path = _NODES) -> list[frozenset[int]]:
    """The processors of each memory node, in their order; none where the system does not say.

    Processors of a node without memory belong to the nearest one that has some.

    Args:
        nodes: Where sysfs describes them.
    """
    try:
        found = {int(match[1]): place for place in nodes.iterdir() if (match := _NODE.fullmatch(place.name))}
        cpus = {number: cpu_list((place / "cpulist").read_text()) for number, place in found.items()}
        has_memory = {number for number, place in found.items() if _memory_bytes(place)}
        order = sorted(found)
        for number in sorted(found.keys() - has_memory):
            distances = dict(zip(order, map(int, (found[number] / "distance").read_text().split()), strict=True))
            nearest = min(sorted(has_memory), key=distances.__getitem__)
            cpus[nearest] |= cpus[number]
    except (OSError, ValueError):
        return []
    return [cpus[number] for number in order if number in has_memory]


def cpus_of_rank(nodes: Collection[frozenset[int]], allowed: frozenset[int], rank: int, ranks: int) -> frozenset[int] | None:
    """The processors for the engine of one of a machine's ranks; ``None``: any that is allowed.

    Neighbouring ranks are on the same node. All threads of a core are in the same set.

    Args:
        nodes: The processors of each memory node.
        allowed: Those that this process may use, by its affinity and its control group.
        rank: Its number on this machine.
        ranks: How many there are on it.
    """
    usable = [own for cpus in nodes if (own := cpus & allowed)]
    if len(usable) < 2 or ranks < 2:
        return None
    first = rank * len(usable) // ranks
    last = max(first + 1, (rank + 1) * len(usable) // ranks)
    return frozenset().union(*usable[first:last])


@contextlib.contextmanager
def started_on(cpus: frozenset[int] | None) -> Iterator[None]:
    """Threads that start in the context run on these processors; the caller only meanwhile."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)  # of the calling thread
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cpu_list(text: str) -> frozenset[int]:
    """Processors as the kernel lists them, such as ``0-3,8``.

    Raises:
        ValueError: It is no such list.
    """
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _memory_bytes(place: Path) -> int:
    match = _MEMORY.search((place / "meminfo").read_text())
    return 0 if match is None else 1024 * int(match[1])
