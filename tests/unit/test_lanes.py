from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lanes import MEMORY_BYTES, PATIENCE_S, FakeTicket, Program, doing, nothing, op
from support.lanes_contract import LanesContract
from support.machines import ROOMY

from lightning_hetero import _native
from lightning_hetero._native import READY
from lightning_hetero.errors import ConfigError, DeviceMemoryError
from lightning_hetero.ir.schedule import Lane, OpKind
from lightning_hetero.lanes import EmulatedDevice, EmulatedLanes, EngineLanes, emulated
from lightning_hetero.lanes.memory import DeviceArena
from lightning_hetero.planning.machine_profile import emulated as emulated_machine

HOST = torch.device("cpu")


class TestEngineLanes(LanesContract):
    overlaps = False

    @pytest.fixture
    def lanes(self) -> Iterator[EngineLanes]:
        lanes = EngineLanes(memory_bytes=MEMORY_BYTES, poison=True)
        yield lanes
        lanes.close()


@pytest.mark.parametrize("poison", [False, True], ids=["plain", "poison"])
class TestEmulatedLanes(LanesContract):
    @pytest.fixture
    def lanes(self, poison: bool) -> Iterator[EmulatedLanes]:
        device = EmulatedDevice(memory=MEMORY_BYTES, h2d_bytes_per_s=1e8, d2h_bytes_per_s=5e7, latency_s=1e-4)
        lanes = EmulatedLanes(device, poison=poison)
        yield lanes
        lanes.close()


class TestDelayedLanes(LanesContract):
    @pytest.fixture
    def lanes(self) -> Iterator[EmulatedLanes]:
        lanes = EmulatedLanes(EmulatedDevice(memory=MEMORY_BYTES, compute_slowdown=1.5, seed=1), poison=True)
        yield lanes
        lanes.close()


# ---- hazards on the emulated device --------------------------------------------------------------


@pytest.fixture
def slow() -> Iterator[EmulatedLanes]:
    """Copies take for ever, but for the ends that the tests ask for."""
    lanes = EmulatedLanes(EmulatedDevice(memory=MEMORY_BYTES, h2d_bytes_per_s=1.0, d2h_bytes_per_s=1e9), poison=True)
    yield lanes
    lanes.close()


def begun(lanes: EmulatedLanes, target: torch.Tensor, source: torch.Tensor, lane: Lane = Lane.H2D) -> Any:
    """A copy that has started; on the slow lane it ends when the lanes close."""
    ready = threading.Event()

    def run() -> tuple[()]:
        ready.set()
        lanes.copy(target, source)
        return ()

    event = lanes.submit(op(0, lane), run, [])
    ready.wait(PATIENCE_S)
    return event


def until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_data_in_transfer_is_nan(slow: EmulatedLanes) -> None:
    weights = slow.memory().take(400, "weights").view(torch.float32)
    assert weights.isnan().all()
    weights.zero_()  # what an earlier use has left
    copy = begun(slow, weights, torch.ones(100))
    until(lambda: weights.isnan().all())
    early = torch.empty(100)
    slow.submit(op(1, Lane.D2H), doing(lambda: slow.copy(early, weights)), []).wait()  # lacks its edge
    assert early.isnan().all()
    slow.close()
    copy.wait()
    assert weights.eq(1).all()


def test_a_source_that_changes_under_a_copy_arrives_as_nan(slow: EmulatedLanes) -> None:
    weights, source = torch.zeros(100), torch.ones(100)
    copy = begun(slow, weights, source)
    until(lambda: weights.isnan().all())
    source[:40] = 2.0
    slow.close()
    copy.wait()
    assert weights[:40].isnan().all()
    assert weights[40:].eq(1).all()


def test_memory_that_was_given_back_is_nan(slow: EmulatedLanes) -> None:
    memory = slow.memory().take(400, "weights")
    weights = memory.view(torch.float32).fill_(1.0)
    slow.memory().give(memory)
    assert weights.isnan().all()


@pytest.mark.parametrize("seed", range(4))
def test_programs_without_their_edges_go_wrong(seed: int) -> None:
    lanes = EmulatedLanes(EmulatedDevice(memory=MEMORY_BYTES), poison=True)
    program = Program(lanes, seed, edges=False)
    program.run_uploads_last(40)
    assert not program.equal()
    lanes.close()


# ---- time on the emulated device -----------------------------------------------------------------


def test_the_directions_are_independent(slow: EmulatedLanes) -> None:
    up, down = torch.zeros(100), torch.zeros(100)
    never = begun(slow, up, torch.ones(100))
    slow.submit(op(1, Lane.D2H), doing(lambda: slow.copy(down, torch.ones(100))), []).wait()
    assert down.eq(1).all()
    assert not never.done()


class Clock:
    """A clock that only sleep and :meth:`compute` move, and a lane that wakes late."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now, self.busy, self.late_s = 100.0, 50.0, late_s

    def now_s(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.busy

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.busy += seconds

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self.late_s


def test_a_link_takes_latency_once_and_time_for_each_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(emulated, "now_s", clock.now_s)
    link = emulated._Link(1000.0, 0.5, clock.sleep)
    assert link.begin(None) == 100.0
    link.carry(2000)
    link.carry(1000)
    assert clock.now == pytest.approx(103.5)
    link.end()
    clock.now = 110.0
    link.begin(110.0)
    link.end()
    assert clock.now == 110.0  # no bytes, no time
    clock.now = 120.0
    link.begin(105.0)  # waited for something else
    clock.now += 0.75  # the host took part of the time for the copy itself
    link.carry(1000)
    assert clock.now == pytest.approx(121.5)


def test_a_lane_that_wakes_late_does_not_fall_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(late_s=2e-4)
    monkeypatch.setattr(emulated, "now_s", clock.now_s)
    link = emulated._Link(1000.0, 0.0, clock.sleep)
    for _ in range(50):
        link.begin(100.0)
        link.carry(10)
        link.end()
    assert clock.now == pytest.approx(100.5 + 2e-4)
    clock.now += 0.01  # but it does not make up for what the machine cannot do
    link.begin(100.0)
    link.carry(10)
    assert clock.now == pytest.approx(100.5 + 2e-4 + 0.01 + 0.01 + 2e-4)


def test_bytes_cross_the_link_in_the_hosts_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    carried: list[int] = []
    monkeypatch.setattr(emulated._Link, "carry", lambda self, num_bytes, *_: carried.append(num_bytes))
    lanes = EmulatedLanes(EmulatedDevice(memory=MEMORY_BYTES))
    host, device = torch.ones(10), torch.ones(10, dtype=torch.bfloat16)
    lanes.submit(op(0, Lane.H2D), doing(lambda: lanes.copy(device, host)), []).wait()
    lanes.submit(op(1, Lane.D2H), doing(lambda: lanes.copy(host, device)), []).wait()
    lanes.close()
    assert carried == [40, 40]


def test_updates_take_the_time_of_their_state_once_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ready:
        def poll(self) -> int:
            return READY if waited else 0

        def wait(self, what: int, timeout: float | None = None) -> None:
            waited.append(what)

    waited: list[int] = []
    carried: list[tuple[Lane, int]] = []
    device = EmulatedDevice(memory=MEMORY_BYTES, cpu_update_bytes_per_s=1e9, device_update_bytes_per_s=1e9)
    lanes = EmulatedLanes(device)
    for lane, link in lanes._updates.items():
        monkeypatch.setattr(link, "carry", lambda num_bytes, lane=lane: carried.append((lane, num_bytes * len(waited))))
    update = replace(op(0, Lane.CPU), kind=OpKind.UPDATE, num_bytes=80)
    lanes.submit(update, lambda: [Ready()], []).wait()
    lanes.submit(replace(update, id=1, lane=Lane.COMPUTE, num_bytes=40), lambda: (), []).wait()
    lanes.submit(replace(update, id=2, kind=OpKind.COMMIT), lambda: (), []).wait()  # no update
    lanes.close()
    assert carried == [(Lane.CPU, 80), (Lane.COMPUTE, 40)]
    assert not EmulatedLanes(EmulatedDevice(memory=MEMORY_BYTES))._updates


@pytest.mark.parametrize("rate", ["cpu_update_bytes_per_s", "device_update_bytes_per_s", "disk_bytes_per_s", "h2d_bytes_per_s"])
def test_rates_are_positive(rate: str) -> None:
    with pytest.raises(ConfigError, match=rate):
        EmulatedDevice(memory=MEMORY_BYTES, **{rate: 0.0})


def test_the_peak_has_reserved_and_allocated_memory() -> None:
    arena = DeviceArena(4096, torch.device("cpu"), poison=False)
    memory = arena.take(1000, "weights")
    arena.reserve(700, "activations")
    arena.give(memory)
    arena.unreserve(700)
    arena.take(512, "weights")
    assert arena.peak_bytes == 1024 + 700


def test_planners_know_the_rates_that_are_set() -> None:
    host = replace(ROOMY, shared_memory=True, disk_duplex=False)
    plain = emulated_machine(host, EmulatedDevice(memory="1MiB", compute_slowdown=2.0))
    assert (plain.cpu_update_params_per_s, plain.disk_read_bytes_per_s, plain.disk_duplex) == (1e9, 2e9, False)
    assert plain.device_update_params_per_s == 1e9 / 2
    device = EmulatedDevice(memory="1MiB", cpu_update_bytes_per_s=8e6, device_update_bytes_per_s=8e7, disk_bytes_per_s=5e6)
    found = emulated_machine(host, device)
    assert (found.cpu_update_params_per_s, found.device_update_params_per_s) == (1e6, 1e7)
    assert (found.disk_read_bytes_per_s, found.disk_write_bytes_per_s, found.disk_duplex) == (5e6, 5e6, True)


def test_compute_takes_as_many_times_as_long_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(emulated, "time", clock)
    monkeypatch.setattr(emulated, "now_s", clock.now_s)
    lanes = EmulatedLanes(EmulatedDevice(memory=MEMORY_BYTES, compute_slowdown=4.0))
    lanes.compute_waits([])  # compute begins
    clock.compute(2.0)
    lanes.mark()
    assert clock.now == 100.0 + 4 * 2.0
    clock.now += 5.0  # nobody computes
    clock.compute(1.0)
    lanes.drain()  # compute is at rest
    assert clock.now == 108.0 + 5.0 + 4 * 1.0
    clock.compute(1.0)  # of somebody else
    lanes.mark()
    assert clock.now == 118.0
    lanes.close()


def test_a_seed_delays_the_same_ops_by_the_same_times() -> None:
    class Closing(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            delays.append(timeout)
            return False

    runs = []
    for seed in (3, 3, 4):
        delays: list[float | None] = []
        lanes = EmulatedLanes(EmulatedDevice(memory=MEMORY_BYTES, seed=seed))
        lanes._failures.closing = Closing()
        for number, lane in enumerate((Lane.H2D, Lane.CPU, Lane.COMPUTE, Lane.D2H)):
            lanes.submit(op(number, lane), nothing, []).wait()
        lanes.close()
        runs.append(delays)
    assert runs[0] == runs[1] != runs[2]
    assert len(set(runs[0])) == 4


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"memory": "much"}, "much"),
        ({"memory": None}, "memory"),
        ({"h2d_bytes_per_s": 0.0}, "h2d_bytes_per_s"),
        ({"d2h_bytes_per_s": -1.0}, "d2h_bytes_per_s"),
        ({"latency_s": -1e-6}, "latency_s"),
        ({"latency_s": float("nan")}, "latency_s"),
        ({"compute_slowdown": 0.5}, "compute_slowdown"),
    ],
)
def test_devices_that_cannot_be_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EmulatedDevice(**{"memory": "64MiB"} | wrong)
    assert EmulatedDevice(memory="64MiB").memory_bytes == 64 << 20


# ---- the arena -----------------------------------------------------------------------------------


def test_first_fit_takes_the_lowest_gap_and_neighbours_join() -> None:
    arena = DeviceArena(8 * 512, HOST, poison=False)
    a, b, c, d = (arena.take(1024, name) for name in "abcd")
    addresses = [t.data_ptr() for t in (a, b, c, d)]
    arena.give(a)
    arena.give(c)
    assert arena.take(512, "e").data_ptr() == addresses[0]
    with pytest.raises(DeviceMemoryError) as caught:
        arena.take(1536, "f")
    assert (caught.value.free_bytes, caught.value.largest_gap_bytes) == (1536, 1024)
    arena.reserve(1000, "what forward saves")  # of the 1536 bytes, wherever they are
    with pytest.raises(DeviceMemoryError, match=r"536 B of .* are free, the largest gap is 536 B") as caught:
        arena.take(1024, "g")
    assert caught.value.largest_gap_bytes == 536
    with pytest.raises(DeviceMemoryError, match=r"536 B of .* are free\.$"):
        arena.reserve(1024, "what forward saves")
    arena.unreserve(1000)
    arena.give(b)  # joins with both sides
    assert arena.take(2560, "f").data_ptr() == addresses[0] + 512


def test_memory_of_no_bytes_is_always_there() -> None:
    for capacity in (0, 512):
        arena = DeviceArena(capacity, HOST, poison=True)
        arena.take(capacity, "everything")
        empty = arena.take(0, "nothing")
        assert empty.shape == (0,)
        arena.give(empty)
        assert arena.used_bytes == capacity
        with pytest.raises(DeviceMemoryError):
            arena.take(1, "more")


def test_memory_is_given_back_once_and_where_it_was_taken() -> None:
    arena = DeviceArena(4096, HOST, poison=False)
    memory = arena.take(512, "a")
    arena.give(memory)
    for other in (memory, torch.empty(512, dtype=torch.uint8)):
        with pytest.raises(AssertionError, match="not taken here"):
            arena.give(other)


def test_versions_of_memory_are_its_own() -> None:
    arena = DeviceArena(4096, HOST, poison=True)
    a = arena.take(512, "a")
    version = a._version
    arena.give(arena.take(512, "b"))
    assert a._version == version


def test_threads_share_an_arena() -> None:
    arena = DeviceArena(1 << 17, HOST, poison=False)  # a gap is left for every piece, however the others lie

    def work(number: int) -> None:
        chance, held = random.Random(number), []
        for _ in range(300):
            if held and chance.random() < 0.5:
                memory = held.pop(chance.randrange(len(held)))
                assert memory.eq(number).all(), "somebody else has this memory, too"
                arena.give(memory)
            elif len(held) < 4:
                held.append(arena.take(chance.randrange(1, 3000), "test").fill_(number))
        for memory in held:
            arena.give(memory)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert arena.used_bytes == 0
    assert arena.take(1 << 17, "everything").numel() == 1 << 17


def test_native_tickets_are_tickets(tmp_path: Path) -> None:
    """Weights from a file, through host memory that FETCH fills, to the device and back."""
    numel, weights = 4096, torch.randn(4096)
    geometry = _native.PartGeometry(
        id=0, weight_dtype=_native.F32, num_elements=numel, num_state=2, weights_on_disk_file=True, state_on_disk_file=True,
        num_slots=2, chunk_elements=numel,
    )  # fmt: skip
    with (
        _native.Arena(4 * numel) as arena,
        _native.Store(
            tmp_path, uuid=bytes(16), create=True, direct_io=False, durability=1, verify_digests=True, num_blocks=1, user_bytes=0
        ) as store,
        _native.NativePart(store, geometry, arena.address) as block,
        _native.Engine(io_backend="pool", staging_bytes=1 << 20, chunk_bytes_max=1 << 17) as engine,
    ):
        host = torch.frombuffer((ctypes.c_char * arena.num_bytes).from_address(arena.address), dtype=torch.float32)
        patch = _native.Patch(0, numel, weights.data_ptr())
        lanes = EmulatedLanes(EmulatedDevice(memory=MEMORY_BYTES, seed=0), poison=True)
        device = lanes.memory().take(4 * numel, "weights").view(torch.float32)

        def store_() -> list[_native.Ticket]:
            return [engine.store(block, [patch], weights_from_memory=False, step=0, keep=weights)]

        stored = lanes.submit(op(0, Lane.DISK_WRITE, OpKind.STORE), store_, [])
        fetched = lanes.submit(op(1, Lane.DISK_READ, OpKind.FETCH), lambda: [engine.fetch(block)], [stored])
        uploaded = lanes.submit(op(2, Lane.H2D), doing(lambda: lanes.copy(device, host)), [fetched])
        released = lanes.submit(op(3, Lane.DISK_READ, OpKind.RELEASE), lambda: [engine.release(block)], [uploaded])
        lanes.compute_waits([uploaded])
        assert torch.equal(device, weights)
        released.wait()
        assert not host.any()
        lanes.drain()
        lanes.close()


def test_a_wait_for_a_ticket_outlasts_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_hetero.lanes.op._TICKET_SLICE_S", 0.001)
    lanes, ticket = EmulatedLanes(EmulatedDevice(MEMORY_BYTES)), FakeTicket()
    event = lanes.submit(op(0, Lane.DISK_READ, OpKind.FETCH), lambda: [ticket], [])
    threading.Timer(0.03, ticket.move, [2]).start()
    event.wait()
    assert event.done()
    lanes.close()
