"""The lanes' contract on a GPU, and what only a GPU can show."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from support.gpu import DEVICE, needs_a_device, only_on_a_gpu
from support.lanes import MEMORY_BYTES, Program, doing, op
from support.lanes_contract import LanesContract
from torch import Tensor

from lightning_hetero.ir.schedule import Lane, OpKind
from lightning_hetero.lanes.streams import StreamLanes

pytestmark = needs_a_device

MIB = 1 << 20
_SPIN_CYCLES = 1_000_000_000  # about half a second


@pytest.fixture(params=[False, True], ids=["plain", "poison"])
def poison(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class TestStreamLanes(LanesContract):
    on_host = False

    @pytest.fixture
    def lanes(self, poison: bool) -> Iterator[StreamLanes]:
        lanes = StreamLanes(DEVICE, memory_bytes=MEMORY_BYTES, poison=poison, staging_bytes=1024)
        yield lanes
        lanes.close()

    @only_on_a_gpu
    @pytest.mark.parametrize("seed", range(6))
    def test_programs_hold_while_compute_lags(self, lanes: StreamLanes, seed: int) -> None:
        torch.cuda._sleep(_SPIN_CYCLES)  # all that follows is issued before compute has begun
        program = Program(lanes, seed)
        torch.cuda._sleep(_SPIN_CYCLES)
        program.run(60)
        assert program.equal()


@pytest.fixture
def lanes() -> Iterator[StreamLanes]:
    lanes = StreamLanes("cuda", memory_bytes=64 * MIB)
    yield lanes
    lanes.close()


def warm(lanes: StreamLanes) -> tuple[Tensor, Tensor]:
    """Loads what the tests launch, and takes the memory that they need: both may wait for the
    device.
    """
    source, memory = lanes.host_buffer(MIB).fill_(3), lanes.memory().take(MIB, "weights")
    lanes.submit(op(0, Lane.H2D), doing(lambda: lanes.copy(memory, source)), []).wait()
    torch.cuda._sleep(1)
    assert int(memory.sum(dtype=torch.int64)) == 3 * MIB
    memory.zero_()
    torch.cuda.synchronize()
    return source, memory


@only_on_a_gpu
def test_copies_and_waits_do_not_wait_for_compute_on_the_host(lanes: StreamLanes) -> None:
    source, memory = warm(lanes)
    torch.cuda._sleep(_SPIN_CYCLES)
    compute = lanes.mark()
    event = lanes.submit(op(0, Lane.H2D), doing(lambda: lanes.copy(memory, source)), [compute])
    lanes.compute_waits([event])
    result = memory.sum(dtype=torch.int64)
    assert not compute.done()
    assert not event.done()
    assert int(result) == 3 * MIB


@only_on_a_gpu
def test_a_copy_overlaps_with_compute(lanes: StreamLanes) -> None:
    source, memory = warm(lanes)
    torch.cuda._sleep(_SPIN_CYCLES)
    compute = lanes.mark()
    lanes.submit(op(0, Lane.H2D), doing(lambda: lanes.copy(memory, source)), []).wait()
    assert not compute.done()


@only_on_a_gpu
def test_a_tensor_lives_until_its_copy_has_left(lanes: StreamLanes) -> None:
    """Memory that torch would hand out again while the copy waits must not be overwritten."""
    back = lanes.host_buffer(4 * MIB).view(torch.float32)
    gradient = torch.full((MIB,), 5.0, device="cuda")
    torch.cuda._sleep(_SPIN_CYCLES)
    behind = lanes.mark()
    event = lanes.submit(op(0, Lane.D2H, OpKind.GRAD), doing(lambda gradient=gradient: lanes.copy(back, gradient)), [behind])
    event.issued()
    del gradient
    others = [torch.full((MIB,), 7.0, device="cuda") for _ in range(4)]
    event.wait()
    assert back.eq(5.0).all()
    assert len(others) == 4


@only_on_a_gpu
def test_host_buffers_are_page_locked_and_exact(lanes: StreamLanes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        buffer = lanes.host_buffer(5 * MIB + 3)
    if caplog.records:
        pytest.skip(f"this machine refuses to page-lock: {caplog.records[0].message}")
    assert buffer.is_pinned()
    assert buffer.numel() == 5 * MIB + 3


@only_on_a_gpu
def test_a_refused_registration_does_not_fail_the_next_kernel(lanes: StreamLanes, caplog: pytest.LogCaptureFixture) -> None:
    memory = torch.empty(MIB, dtype=torch.uint8)
    assert not lanes._locker._register(memory.data_ptr(), 0)  # no bytes: the driver refuses
    assert torch.ones(8, device="cuda").sum().item() == 8
    assert "pageable" in caplog.text


@only_on_a_gpu
def test_no_memory_is_allocated_after_the_lanes_are_created(lanes: StreamLanes) -> None:
    source = lanes.host_buffer(8 * MIB).view(torch.float32).fill_(1.0)
    memory = lanes.memory().take(4 * MIB, "weights").view(torch.bfloat16)
    lanes.submit(op(0, Lane.H2D), doing(lambda: lanes.copy(memory, source)), []).wait()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    lanes.submit(op(1, Lane.H2D), doing(lambda: lanes.copy(memory, source)), []).wait()
    lanes.submit(op(2, Lane.D2H), doing(lambda: lanes.copy(source, memory)), []).wait()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
