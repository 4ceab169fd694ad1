"""Which processors the engine of a rank runs on."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from lightning_hetero.store.live.engine_options import EngineOptions
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.store.numa import cpu_list, cpus_of_rank, node_cpus, started_on

GIB = 2**20  # kB


def machine(root: Path, nodes: dict[int, tuple[str, int, str]]) -> Path:
    """A sysfs folder: processors, kB of memory and distances of each node."""
    for number, (cpus, memory, distance) in nodes.items():
        place = root / f"node{number}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(f"{cpus}\n")
        (place / "meminfo").write_text(f"Node {number} MemTotal: {memory:8} kB\nNode {number} MemFree: 7 kB\n")
        (place / "distance").write_text(f"{distance}\n")
    (root / "online").write_text("0\n")
    return root


@pytest.fixture
def one(tmp_path: Path) -> list[frozenset[int]]:
    return node_cpus(machine(tmp_path / "one", {0: ("0-7", GIB, "10")}))


@pytest.fixture
def two(tmp_path: Path) -> list[frozenset[int]]:
    """Two sockets of four cores with two threads each: cpu 8 is the second thread of cpu 0."""
    return node_cpus(machine(tmp_path / "two", {0: ("0-3,8-11", GIB, "10 21"), 1: ("4-7,12-15", GIB, "21 10")}))


@pytest.fixture
def four(tmp_path: Path) -> list[frozenset[int]]:
    """Node 2 has no memory, and node 3 is the nearest one."""
    distances = ("10 12 32 32", "12 10 32 32", "32 32 10 12", "32 32 12 10")
    sizes = (GIB, GIB, 0, GIB)
    return node_cpus(
        machine(tmp_path / "four", {i: (f"{4 * i}-{4 * i + 3}", sizes[i], distances[i]) for i in (3, 0, 2, 1)})
    )  # fmt: skip


def sets(nodes: list[frozenset[int]], ranks: int, allowed: frozenset[int] = frozenset(range(64))) -> list[frozenset[int] | None]:
    return [cpus_of_rank(nodes, allowed, rank, ranks) for rank in range(ranks)]


def test_nothing_is_bound_on_one_node_or_for_one_process(one: list[frozenset[int]], two: list[frozenset[int]]) -> None:
    assert sets(one, 4) == [None] * 4
    assert sets(two, 1) == [None]
    assert sets([], 4) == [None] * 4


def test_a_rank_has_all_threads_of_the_cores_of_its_node(two: list[frozenset[int]]) -> None:
    first, second = cpu_list("0-3,8-11"), cpu_list("4-7,12-15")
    assert two == [first, second]
    assert sets(two, 2) == [first, second]
    assert sets(two, 3) == [first, first, second]
    assert sets(two, 4) == [first, first, second, second]


def test_processors_of_a_node_without_memory_belong_to_the_nearest_one(four: list[frozenset[int]]) -> None:
    assert four == [cpu_list("0-3"), cpu_list("4-7"), cpu_list("8-15")]
    assert sets(four, 3) == four
    assert sets(four, 2) == [cpu_list("0-3"), cpu_list("4-15")], "two ranks have all nodes between them"


def test_processors_that_the_process_may_not_use_are_left_out(two: list[frozenset[int]], four: list[frozenset[int]]) -> None:
    assert sets(two, 2, cpu_list("2-5")) == [cpu_list("2-3"), cpu_list("4-5")]
    assert sets(two, 2, cpu_list("0-3")) == [None, None], "all of them are on one node"
    assert sets(four, 2, cpu_list("1,9")) == [cpu_list("1"), cpu_list("9")]


def test_a_folder_that_says_nothing_is_no_machine(tmp_path: Path) -> None:
    assert node_cpus(tmp_path / "none") == []
    (machine(tmp_path, {0: ("0-3", GIB, "10")}) / "node0" / "cpulist").write_text("x-y")
    assert node_cpus(tmp_path) == []


def test_the_threads_of_an_engine_are_bound_and_no_others() -> None:
    one = frozenset([max(os.sched_getaffinity(0))])

    def threads() -> dict[str, set[int]]:
        return {task.name: os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()}

    before = threads()
    store = TierStore(EngineOptions(cpus=one, update_threads=2), directory=None, num_blocks=0, chunk_bytes_max=4096)
    try:
        started = {name: cpus for name, cpus in threads().items() if name not in before}
        assert len(started) > 2, "update threads and those of transfers"
        assert all(cpus == one for cpus in started.values())
        assert {name: cpus for name, cpus in threads().items() if name in before} == before
    finally:
        store.close([])


def test_only_threads_that_start_within_are_bound() -> None:
    before, found = os.sched_getaffinity(0), list[set[int]]()
    one = frozenset([max(before)])
    with started_on(one):
        thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
    assert found == [set(one)]
    assert os.sched_getaffinity(0) == before
    with started_on(None):
        assert os.sched_getaffinity(0) == before
