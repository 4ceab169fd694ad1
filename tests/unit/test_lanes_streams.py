"""Lanes on streams, with streams that are threads; ``tests/gpu/test_lanes.py`` has the same on a
GPU.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.lanes import LANES, MEMORY_BYTES, PATIENCE_S, Program, doing, nothing, op
from support.lanes_contract import LanesContract
from support.streams import Event, FakeCuda

from lightning_hetero._native import DONE
from lightning_hetero.errors import DeviceMemoryError, OutOfMemoryBudgetError
from lightning_hetero.ir.schedule import Lane, OpKind
from lightning_hetero.lanes import pinned, streams
from lightning_hetero.lanes.pinned import PageLocker
from lightning_hetero.lanes.streams import StreamLanes
from lightning_hetero.units import MIB


def make(fake: FakeCuda, **options: Any) -> StreamLanes:
    options = {"memory_bytes": MEMORY_BYTES, "staging_bytes": 1024, "poison": True} | options
    return StreamLanes("cpu", backend=fake, **options)


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    fake = FakeCuda()
    yield fake
    fake.close()


@pytest.fixture
def lanes(fake: FakeCuda) -> Iterator[StreamLanes]:
    lanes = make(fake)
    yield lanes
    lanes.close()


class TestStreams(LanesContract):
    on_host = False

    @pytest.fixture(params=[None, 1, 2], ids=["prompt", "late 1", "late 2"])
    def lanes(self, request: pytest.FixtureRequest) -> Iterator[StreamLanes]:
        fake = FakeCuda(seed=request.param)
        lanes = make(fake)
        yield lanes
        lanes.close()
        fake.close()


def held(stream: Any) -> threading.Event:
    """Holds a stream up until the event is set."""
    gate = threading.Event()
    stream.do(lambda: gate.wait(PATIENCE_S))
    return gate


@pytest.mark.parametrize("seed", range(4))
def test_programs_without_their_edges_go_wrong(lanes: StreamLanes, seed: int) -> None:
    program = Program(lanes, seed, edges=False)
    program.run_uploads_last(40)
    assert not program.equal()


def test_the_host_does_not_wait_for_streams_between_lanes(lanes: StreamLanes, fake: FakeCuda) -> None:
    gate = held(fake.streams[0])
    source, weights, back = torch.ones(8), torch.zeros(8), torch.zeros(8)
    up = lanes.submit(op(0, Lane.H2D), doing(lambda: lanes.copy(weights, source)), [])
    down = lanes.submit(op(1, Lane.D2H), doing(lambda: lanes.copy(back, weights)), [up])
    down.issued()  # both are with their streams
    on_host = lanes.submit(op(2, Lane.CPU), doing(lambda: back.mul_(2)), [down])
    assert not any(event.done() for event in (up, down, on_host))
    gate.set()
    on_host.wait()
    assert back.eq(2).all()


def test_memory_of_a_copy_lives_until_the_stream_has_passed(lanes: StreamLanes, fake: FakeCuda) -> None:
    gate = held(fake.streams[0])
    source = torch.ones(8)
    alive = weakref.ref(source)
    event = lanes.submit(op(0, Lane.H2D), doing(lambda source=source: lanes.copy(torch.zeros(8), source)), [])
    event.issued()
    del source, event
    assert alive() is not None
    gate.set()
    lanes.drain()
    for _ in range(2):  # the lane's thread is through with the first before it takes the second
        lanes.submit(op(1, Lane.H2D), doing(lambda: None), []).wait()
    assert alive() is None


def test_a_failed_op_keeps_its_memory_on_the_stream_and_drain_waits_for_that(lanes: StreamLanes, fake: FakeCuda) -> None:
    gate = held(fake.streams[0])
    alive: list[weakref.ref[torch.Tensor]] = []
    target = torch.zeros(8)

    def run() -> tuple[()]:
        source = torch.ones(8)
        alive.append(weakref.ref(source))
        lanes.copy(target, source)
        raise ValueError("half way")

    event = lanes.submit(op(0, Lane.H2D), run, [])
    with pytest.raises(ValueError, match="half way"):
        event.wait()
    del event
    gc.collect()  # the error's traceback holds the op, and the op the error
    assert alive[0]() is not None
    threading.Timer(0.02, gate.set).start()
    with pytest.raises(ValueError, match="half way"):
        lanes.drain()
    assert target.eq(1).all()


def test_memory_follows_the_order_of_the_streams(lanes: StreamLanes, fake: FakeCuda) -> None:
    """One lane gives memory back behind a copy that is still to come; another takes it, and its
    copy comes later.
    """
    memory = lanes.memory()
    memory.take(MEMORY_BYTES - 512, "the rest")
    old = memory.take(512, "old").fill_(1)
    gate = held(fake.streams[1])
    back, source, taken = torch.zeros(512, dtype=torch.uint8), torch.full((512,), 2, dtype=torch.uint8), []

    def leave() -> None:
        lanes.copy(back, old)
        memory.give(old)

    def come() -> None:
        taken.append(memory.take(512, "new"))
        lanes.copy(taken[0], source)

    left = lanes.submit(op(0, Lane.D2H), doing(leave), [])
    left.issued()
    came = lanes.submit(op(1, Lane.H2D), doing(come), [])  # no edge: the memory itself is what orders them
    came.issued()
    assert taken[0].data_ptr() == old.data_ptr()
    assert not came.done()
    gate.set()
    came.wait()
    assert back.eq(1).all()
    assert taken[0].eq(2).all()


def test_dtypes_are_converted_in_staging_memory_piece_by_piece(lanes: StreamLanes, monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.randn(1000)
    target = torch.empty(1000, dtype=torch.bfloat16)
    made: list[Any] = []
    for name in ("empty", "empty_like", "empty_strided"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, real=real, **k: made.append(a) or real(*a, **k))
    lanes.submit(op(0, Lane.H2D), doing(lambda: lanes.copy(target, source)), []).wait()
    assert torch.equal(target, source.bfloat16())
    lanes.submit(op(1, Lane.D2H), doing(lambda: lanes.copy(source, target)), []).wait()
    assert torch.equal(source, target.float())
    assert not made


def test_ranges_have_names_where_a_profiler_looks(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    for profiled in (False, True):
        if profiled:
            monkeypatch.setenv("NVTX_INJECTION64_PATH", "libToolsInjection64.so")
        lanes = make(fake)
        lanes.submit(op(0, Lane.H2D), doing(lambda: None), []).wait()
        lanes.submit(op(1, Lane.CPU, OpKind.STORE), doing(lambda: None), []).wait()
        lanes.close()
    assert fake.ranges == ["UPLOAD - 0", "pop", "STORE - 0", "pop"]


def test_ranges_and_marks_have_names_while_times_are_taken(lanes: StreamLanes, fake: FakeCuda) -> None:
    lanes.timed = True
    lanes.submit(op(0, Lane.H2D), doing(lambda: None), []).wait()
    lanes.now()
    lanes.now("F a")
    assert fake.ranges == ["UPLOAD - 0", "pop", "mark F a"]


def test_a_moment_is_known_once_computes_stream_has_come_to_it(
    lanes: StreamLanes, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_s = time.monotonic()
    lanes.timed = True
    before_s = time.monotonic()
    slack_s = before_s - started_s + 1e-6  # between the streams' clock and the host's, which were read one after the other
    monkeypatch.setattr(fake, "_compute", fake.streams[0])
    gate = held(fake.streams[0])
    first = lanes.now("F a")
    assert first() is None
    gate.set()
    fake.streams[0].synchronize()
    at_s = first()
    assert at_s is not None
    assert before_s <= at_s + slack_s
    assert at_s <= time.monotonic() + slack_s
    assert first() == at_s


def test_a_mark_has_passed_once_computes_stream_has_come_to_it(lanes: StreamLanes, fake: FakeCuda) -> None:
    gate = held(late := fake.compute_is_late())
    mark = lanes.mark()
    assert not mark.done()
    gate.set()
    late.synchronize()
    assert mark.done()


def test_the_first_origin_of_times_has_passed(lanes: StreamLanes, fake: FakeCuda) -> None:
    """Its time on the host's clock is read then."""
    gate = held(fake.compute_is_late())
    threading.Timer(0.02, gate.set).start()
    lanes.timed = True
    assert gate.is_set()


def test_times_are_as_fine_after_days(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver gives the time between two events as milliseconds in fp32."""
    clock = [1000.0]

    class Driver(Event):
        def record(self, stream: Any) -> None:
            super().record(stream)
            self.at_s = clock[0]

        def elapsed_time(self, other: Any) -> float:
            return float(torch.tensor((other.at_s - self.at_s) * 1e3, dtype=torch.float32))

    monkeypatch.setattr(FakeCuda, "Event", Driver)
    monkeypatch.setattr(streams, "now_s", lambda: clock[0])
    fake = FakeCuda()
    lanes = make(fake)
    lanes.timed = True
    for _ in range(3000):
        clock[0] += 61.7
        lanes.now()
    begin = lanes.now()
    clock[0] += 1.1e-3
    end = lanes.now()
    moved = lanes.submit(op(0, Lane.H2D), doing(lambda: None), [])
    moved.wait()
    lanes.close()
    fake.close()
    assert end() - begin() == pytest.approx(1.1e-3, abs=2e-5)
    assert end() == pytest.approx(clock[0], abs=1e-3)
    assert moved.times() == pytest.approx((clock[0], clock[0]), abs=1e-3)


def test_threads_of_lanes_use_the_device_of_the_lanes(lanes: StreamLanes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread starts with the first device: what needs a context would make one there."""
    chosen: set[tuple[str, torch.device]] = set()
    second = torch.device("cuda", 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: chosen.add((threading.current_thread().name, device)))
    monkeypatch.setattr(lanes, "device", second)
    for lane in LANES:
        lanes.submit(op(0, lane), nothing, []).wait()
    assert chosen == {(f"lightning-hetero {lane.value}", second) for lane in LANES}


class Asleep:
    """A ticket of the engine, which passes once somebody has slept until then."""

    def __init__(self) -> None:
        self.polls, self.passed = 0, False

    def poll(self) -> int:
        self.polls += 1
        assert self.polls < 10, "the host asks again and again"
        return DONE if self.passed else 0

    def wait(self, what: int, timeout: float | None = None) -> None:
        self.passed = True


def test_the_host_sleeps_until_a_ticket_has_passed(lanes: StreamLanes) -> None:
    ticket: Any = Asleep()
    lanes.submit(op(0, Lane.DISK_WRITE, OpKind.STORE), lambda: [ticket], []).wait()
    assert ticket.passed


def test_other_memory_is_set_aside_once_nothing_is_taken(lanes: StreamLanes, fake: FakeCuda) -> None:
    taken = lanes.memory().take(512, "weights")
    with pytest.raises(AssertionError, match="has been given back"):
        lanes.resize(4096)
    lanes.memory().give(taken)
    lanes.resize(4096)
    assert lanes.memory().capacity_bytes == 4096
    assert lanes.peak_bytes() == 512
    source, target = torch.ones(4096, dtype=torch.uint8), lanes.memory().take(4096, "weights")
    lanes.submit(op(0, Lane.H2D), doing(lambda: lanes.copy(target, source)), []).wait()
    assert target.eq(1).all()
    with pytest.raises(DeviceMemoryError):
        lanes.memory().take(1, "more")


def test_a_device_without_a_large_free_piece_names_the_reservation(lanes: StreamLanes, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def full(size: int, **options: Any) -> Any:
        if size < 8 << 20:
            return empty(size, **options)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(OutOfMemoryBudgetError, match=r"8.0 MiB of device memory are to be set aside.*device_memory") as refusal:
        lanes.resize(8 << 20)
    assert (refusal.value.tier, refusal.value.needed_bytes) == ("device", 8 << 20)


class Allocator:
    """What torch's allocator for a device says of itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = 0
        monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda device: setattr(self, "peak", self.now))
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)

    def reach(self, peak: int) -> None:
        """Gives out so much, of which 100 B stay."""
        self.now, self.peak = 100, max(self.peak, peak)


def test_the_peak_counts_the_lanes_and_not_the_process(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    allocator.reach(9000)  # before the fit
    lanes = StreamLanes("meta", memory_bytes=512, staging_bytes=1024, backend=fake)
    assert lanes.peak_bytes() == 100
    allocator.reach(700)
    assert lanes.peak_bytes() == 700
    lanes.resize(0)
    allocator.reach(8000)  # the machine is measured meanwhile
    lanes.resize(1024)
    assert lanes.peak_bytes() == 700
    allocator.reach(800)
    lanes.close()
    allocator.reach(7000)  # whatever comes afterwards
    assert lanes.peak_bytes() == 800


def test_the_host_catches_up_with_its_lane(lanes: StreamLanes, fake: FakeCuda) -> None:
    gate = held(fake.streams[1])
    source, back, seen = torch.ones(8), torch.zeros(8), list[bool]()

    def run() -> None:
        lanes.copy(back, source)
        gate.set()
        lanes.catch_up()
        seen.append(bool(back.eq(1).all()))

    lanes.submit(op(0, Lane.D2H), doing(run), []).wait()
    assert seen == [True]


# ---- page-locked memory --------------------------------------------------------------------------


def test_host_buffers_are_registered_until_their_last_view_goes(lanes: StreamLanes, fake: FakeCuda) -> None:
    buffer = lanes.host_buffer(5000)
    address = buffer.data_ptr()
    assert fake.registered == {address: 5000}
    view = buffer[8:16].view(torch.float32)
    del buffer
    assert view.fill_(3.0).tolist() == [3.0, 3.0]
    assert fake.registered == {address: 5000}
    del view
    assert not fake.registered


def test_huge_pages_are_asked_for_before_memory_is_page_locked(
    lanes: StreamLanes, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registration brings the pages in, so later they could not become huge."""
    seen: list[str] = []
    advise, lock = pinned.advise_huge, fake.page_lock
    monkeypatch.setattr(pinned, "advise_huge", lambda *args: (seen.append("huge"), advise(*args)))
    monkeypatch.setattr(fake, "page_lock", lambda *args: (seen.append("locked"), lock(*args))[1])
    lanes.host_buffer(4 * MIB)
    assert seen == ["huge", "locked"]


def test_memory_of_others_is_registered_until_the_end(fake: FakeCuda) -> None:
    lanes, memory = make(fake), torch.empty(4096, dtype=torch.uint8)
    lanes.page_lock(memory)
    lanes.page_lock(memory)
    lanes.page_lock(memory[:0])
    assert fake.registered == {memory.data_ptr(): 4096}
    lanes.close()
    assert not fake.registered


def test_memory_whose_pages_shall_go_is_not_registered_any_more(lanes: StreamLanes, fake: FakeCuda) -> None:
    first, second = torch.empty(4096, dtype=torch.uint8), torch.empty(8192, dtype=torch.uint8)
    lanes.page_lock(first)
    lanes.page_lock(second)
    for _ in range(2):
        lanes.page_unlock(first)
        assert fake.registered == {second.data_ptr(): 8192}


def test_refused_memory_stays_pageable_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeCuda(refuse=2)
    lanes = make(fake)
    with caplog.at_level(logging.WARNING):
        first, second = lanes.host_buffer(4096), lanes.host_buffer(4096)
    lanes.close()
    fake.close()
    assert first.numel() == second.numel() == 4096
    assert first.fill_(1).eq(1).all()
    (record,) = caplog.records
    assert "error 2" in record.message
    assert "ulimit -l" in record.message


def test_the_drivers_last_error_is_cleared_after_a_refusal() -> None:
    cleared: list[int] = []
    PageLocker(FakeCuda(refuse=2), lambda: cleared.append(1), lambda: 1 << 40).buffer(4096)
    assert cleared == [1]


def child_can_read(memory: torch.Tensor) -> bool:
    """Whether a child of fork has these pages."""
    child = os.fork()
    if not child:
        faulthandler.disable()
        ctypes.string_at(memory.data_ptr(), 1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def test_a_child_of_fork_gets_no_page_locked_memory(lanes: StreamLanes) -> None:
    """The kernel would copy all of it for each worker of a data loader."""
    pages = mmap.mmap(-1, 5000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    assert child_can_read(memory)
    lanes.page_lock(memory)
    assert not child_can_read(memory)
    assert not child_can_read(lanes.host_buffer(64))
    lanes.page_unlock(memory)
    assert child_can_read(memory)


def test_memory_beyond_the_control_group_is_not_locked(fake: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    lanes = make(fake, host_room=lambda: 8192)
    with caplog.at_level(logging.WARNING):
        buffers = [lanes.host_buffer(n) for n in (8192, 8193, 10000)]
    assert list(fake.registered.values()) == [8192]
    (record,) = caplog.records
    assert "host_memory" in record.message
    lanes.close()
    assert len(buffers) == 3
