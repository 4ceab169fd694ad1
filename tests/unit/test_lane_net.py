"""Lane ``net``: its thread where the device is the host, and the meetings of ranks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_hetero.errors import ConfigError, HeteroError
from lightning_hetero.ir.schedule import Lane, Op, OpKind
from lightning_hetero.lanes import EngineLanes
from lightning_hetero.lanes.collectives import Collectives
from lightning_hetero.lanes.network import ENVIRONMENT, EmulatedNetwork, network_of_environment


@pytest.fixture
def lanes() -> Iterator[EngineLanes]:
    made = EngineLanes()
    yield made
    made.close()


def op(kind: OpKind, lane: Lane = Lane.NET) -> Op:
    return Op(id=0, kind=kind, block=0, lane=lane, at=0)


def doing(work: Callable[[], object]) -> Callable[[], tuple[()]]:
    def run() -> tuple[()]:
        work()
        return ()

    return run


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lightning-hetero net"]


def test_collectives_run_beside_compute_in_the_order_of_submission(lanes: EngineLanes) -> None:
    may, seen = threading.Event(), list[str]()
    first = lanes.submit(op(OpKind.REDUCE), doing(lambda: (may.wait(10), seen.append("REDUCE"))), [])
    second = lanes.submit(op(OpKind.GATHER), doing(lambda: seen.append("GATHER")), [])
    seen.append("compute")
    assert not first.done()
    may.set()
    lanes.submit(op(OpKind.UPDATE, Lane.CPU), doing(lambda: seen.append("UPDATE")), [second])  # waits for what has no ticket
    assert seen == ["compute", "REDUCE", "GATHER", "UPDATE"]
    assert first.done()


def test_a_collective_waits_for_the_ops_before_it(lanes: EngineLanes) -> None:
    may = threading.Event()
    before = lanes.submit(op(OpKind.REDUCE), doing(lambda: may.wait(10)), [])
    after = lanes.submit(op(OpKind.GATHER), doing(may.is_set), [before])
    assert not after.done()
    may.set()
    lanes.drain()
    assert after.done()


def test_one_process_has_no_thread_for_collectives(lanes: EngineLanes) -> None:
    lanes.submit(op(OpKind.UPDATE, Lane.CPU), tuple, [])
    lanes.drain()
    assert not threads()
    lanes.submit(op(OpKind.AGREE), tuple, [])
    assert threads()
    lanes.close()
    assert not threads()


def test_the_error_of_a_collective_reaches_compute_and_what_depends_on_it(lanes: EngineLanes) -> None:
    def fail() -> None:
        raise HeteroError("GATHER has failed: another rank has died")

    failed, ran = lanes.submit(op(OpKind.GATHER), doing(fail), []), list[int]()
    late = lanes.submit(op(OpKind.REDUCE), doing(lambda: ran.append(1)), [failed])
    with pytest.raises(HeteroError, match="another rank has died"):
        lanes.compute_waits([late])
    with pytest.raises(HeteroError, match="another rank has died"):
        lanes.drain()
    lanes.drain()  # once
    assert not ran


def test_lanes_that_close_name_a_collective_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_hetero.lanes.queue._JOIN_S", 0.05)
    lanes, may = EngineLanes(), threading.Event()
    started = threading.Event()
    lanes.submit(op(OpKind.GATHER), doing(lambda: (started.set(), may.wait(10))), [])
    started.wait(10)
    with pytest.raises(HeteroError, match=r"ops did not return within .*net: 0 GATHER:0"):
        lanes.close()
    (thread,) = threads()
    may.set()
    thread.join(10)
    lanes.close()  # a second time it has nothing to wait for


# ---- meetings ------------------------------------------------------------------------------------


class Told(Collectives):
    """One rank of several in this process: numbers are told in memory."""

    def __init__(self, rank: int, table: list[Sequence[float]], barrier: threading.Barrier) -> None:
        self.rank, self.ranks, self.num_told = rank, len(table), 0
        self._table, self._barrier = table, barrier
        self._lane, self._last, self._failed = 0, None, ""
        self._lock, self._coming, self._met = threading.Lock(), deque(), deque()

    def agree(self, numbers: Sequence[float]) -> list[list[float]]:
        self.num_told += 1
        self._table[self.rank] = numbers
        self._barrier.wait(10)
        rows = [list(row) for row in self._table]
        self._barrier.wait(10)
        return rows


def ranks(number: int) -> list[Told]:
    table, barrier = [()] * number, threading.Barrier(number)
    return [Told(rank, table, barrier) for rank in range(number)]


def all_do(work: Callable[[Told], object], every: Sequence[Told]) -> list[object]:
    with ThreadPoolExecutor(len(every)) as pool:
        return list(pool.map(work, every))


@pytest.mark.parametrize("number", [2, 3])
def test_ranks_meet_once_for_all_that_they_have_announced(number: int) -> None:
    every = ranks(number)

    def work(rank: Told) -> list[list[bool]]:
        ahead = [rank.announce("REDUCE", block, rank.rank == block) for block in range(5 + rank.rank)]
        return [rank.met(one) for one in ahead[:5]]

    found = all_do(work, every)
    assert found == [[[block < number] for block in range(5)]] * number
    assert [rank.num_told for rank in every] == [1] * number


def test_a_barrier_is_met_for_when_its_turn_has_come() -> None:
    every = ranks(2)

    def work(rank: Told) -> None:
        ops = [rank.announce("REDUCE", 0), rank.announce("GATHER", 1, barrier=True), rank.announce("REDUCE", 2)]
        for one in ops:
            rank.met(one)

    all_do(work, every)
    assert [rank.num_told for rank in every] == [2, 2]


class WaitedFor:
    """The end of an op that its lane begins no sooner than somebody waits."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self._run()


def test_compute_meets_the_others_behind_the_ops_of_the_lane() -> None:
    every = ranks(2)

    def work(rank: Told) -> None:
        op = rank.announce("REDUCE", 0)
        rank.follow(WaitedFor(lambda: rank.met(op)))
        rank.meet("READ", 1)

    all_do(work, every)
    assert [rank.num_told for rank in every] == [2, 2]


def test_ranks_with_other_ops_end_where_these_begin() -> None:
    every = ranks(2)

    def work(rank: Told) -> str:
        same, other = rank.announce("REDUCE", 0), rank.announce("GATHER", 3 + rank.rank)
        rank.met(same)
        with pytest.raises(HeteroError) as caught:
            rank.met(other)
        return str(caught.value)

    for said in all_do(work, every):
        assert "different places of a step (rank 0: GATHER of block 3, rank 1: GATHER of block 4)" in str(said)


def test_the_environment_names_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    assert network_of_environment() is None
    monkeypatch.setenv(ENVIRONMENT, "2e8,5e-5")
    assert network_of_environment() == EmulatedNetwork(bytes_per_s=2e8, latency_s=5e-5)
    for wrong, said in {"fast": "LIGHTNING_HETERO_NETWORK='fast'", "0,0": "bytes_per_s=0.0", "1,-1": "latency_s=-1.0"}.items():
        monkeypatch.setenv(ENVIRONMENT, wrong)
        with pytest.raises(ConfigError, match=said):
            network_of_environment()
