"""The ctypes wrapper: what it refuses, what keeps memory alive, a round through the engine."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hetero import _native
from lightning_hetero.errors import (
    ConfigError,
    HeteroError,
    OutOfMemoryBudgetError,
    StoreBusyError,
    StoreError,
)

UUID = bytes(range(16))
HYPER = _native.Hyper(1e-3, 0.9, 0.999, 1e-8, 0.01, 1.0, _native.ADAMW)
NUMEL = 3 * 4096


def _geometry(**changes: Any) -> _native.PartGeometry:
    fields: dict[str, Any] = {
        "id": 0,
        "weight_dtype": _native.F32,
        "num_elements": NUMEL,
        "num_state": 2,
        "weights_on_disk_file": True,
        "state_on_disk_file": True,
        "num_slots": 2,
        "chunk_elements": 4096,
    }
    return _native.PartGeometry(**(fields | changes))


IN_RAM = {"weights_on_disk_file": False, "state_on_disk_file": False}


def _engine(**changes: Any) -> _native.Engine:
    options: dict[str, Any] = {"staging_bytes": 1 << 20, "chunk_bytes_max": 1 << 17, "io_backend": "pool"}
    return _native.Engine(**(options | changes))


def _store(directory: Path, **changes: Any) -> _native.Store:
    options: dict[str, Any] = {
        "uuid": UUID,
        "create": True,
        "direct_io": False,
        "durability": 1,
        "verify_digests": True,
        "num_blocks": 1,
        "user_bytes": 64,
    }
    return _native.Store(directory, **(options | changes))


@pytest.fixture
def engine() -> Iterator[_native.Engine]:
    with _engine() as engine:
        yield engine


@pytest.fixture
def arena() -> Iterator[_native.Arena]:
    with _native.Arena(4 * NUMEL) as arena:
        yield arena


# ---- kernels and memory --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"param": 0},
        {"param": 1 << 64},
        {"exp_avg": 6},
        {"grad": 8 + 1, "grad_dtype": _native.BF16},
        {"grad_dtype": 9},
        {"grad_dtype": _native.U8},
        {"copy": 8, "copy_dtype": _native.F32},
        {"numel": -1},
        {"numel": 1.0},
        {"threads": 0},
        {"hyper": HYPER._replace(beta1=1.0)},
        {"hyper": HYPER._replace(step=0.0)},
    ],
)
def test_adam_refuses_bad_arguments_before_touching_memory(changes: dict[str, Any]) -> None:
    arrays = [torch.ones(8) for _ in range(4)]
    addresses = dict(zip(("param", "exp_avg", "exp_avg_sq", "grad"), (x.data_ptr() for x in arrays), strict=True))
    with pytest.raises(ConfigError, match="allowed"):
        _native.adam(**(dict(addresses, numel=8, hyper=HYPER) | changes))
    assert all((x == 1).all() for x in arrays)


def test_digest_depends_on_every_byte() -> None:
    x = torch.arange(100, dtype=torch.uint8)
    first = _native.digest(x.data_ptr(), 100)
    x[99] += 1
    assert len(first) == 16
    assert _native.digest(x.data_ptr(), 100) != first
    assert _native.digest(x.data_ptr(), 99) == _native.digest(torch.arange(99, dtype=torch.uint8).data_ptr(), 99)


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ConfigError):
        _native.force_isa(7)


def test_an_arena_is_closed_once_and_then_refuses(arena: _native.Arena) -> None:
    assert arena.address % (2 << 20) == 0
    arena.drop()
    arena.close()
    arena.close()
    with pytest.raises(HeteroError, match="Arena has been closed"):
        arena.drop()


def test_an_arena_drops_only_its_own_pages(arena: _native.Arena) -> None:
    for offset, num_bytes in ((-1, 1), (0, 4 * NUMEL + 1), (4 * NUMEL, 1)):
        with pytest.raises(ConfigError):
            arena.drop(offset, num_bytes)


def test_an_arena_larger_than_the_address_space_is_refused() -> None:
    with pytest.raises(OutOfMemoryBudgetError):
        _native.Arena(1 << 60)


# ---- blocks and stores ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{"num_elements": 17}, {"chunk_elements": 100}, {"weight_dtype": 4}, {"num_slots": 3}, {"num_state": -1}, {"id": -1}],
)
def test_a_geometry_out_of_range_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        _geometry(**changes)


def test_a_disk_block_needs_a_store(arena: _native.Arena) -> None:
    with pytest.raises(ConfigError, match="no store"):
        _native.NativePart(None, _geometry(), arena.address)


def test_a_store_in_use_is_busy(tmp_path: Path) -> None:
    with _store(tmp_path), pytest.raises(StoreBusyError, match=str(tmp_path)):
        _store(tmp_path, create=False)


def test_a_store_in_a_missing_directory_names_it(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere"):
        _store(tmp_path / "nowhere")


@pytest.mark.parametrize("changes", [{"uuid": b"short"}, {"durability": 3}, {"num_blocks": -1}, {"user_bytes": -1}])
def test_store_options_out_of_range_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        _store(tmp_path, **changes)


# ---- engine --------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"io_backend": "magic"}, {"io_threads": 0}, {"queue_depth": 0}, {"update_threads": 0}])
def test_engine_options_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        _engine(**changes)


def test_an_update_in_ram_has_the_bits_of_the_kernel(engine: _native.Engine, arena: _native.Arena) -> None:
    weights, grad = torch.randn(NUMEL), torch.randn(NUMEL)
    with _native.NativePart(None, _geometry(**IN_RAM), arena.address, keep=arena) as block:
        torch.frombuffer(_memory(arena), dtype=torch.float32)[:] = weights
        ticket = engine.open_update(block, weights_resident=True)
        segment = _native.Segment(0, NUMEL, grad.data_ptr(), _native.F32, 0)
        engine.arm_update(ticket, [segment], [HYPER], step=1, keep=grad)
        ticket.wait(_native.READY, timeout=60)
        ticket.wait(timeout=60)
        moments = [torch.zeros(NUMEL), torch.zeros(NUMEL)]
        _native.adam(
            param=weights.data_ptr(),
            exp_avg=moments[0].data_ptr(),
            exp_avg_sq=moments[1].data_ptr(),
            grad=grad.data_ptr(),
            numel=NUMEL,
            hyper=HYPER,
        )
        assert torch.equal(torch.frombuffer(_memory(arena), dtype=torch.float32), weights)
        assert block.state_address(0) is not None
        times = ticket.times()
        assert 0 < times.submitted_ns <= times.started_ns <= times.ready_ns <= times.done_ns


def test_an_update_that_awaits_its_verdict_is_discarded_or_kept(engine: _native.Engine, arena: _native.Arena) -> None:
    weights, grad = torch.randn(NUMEL), torch.randn(NUMEL)
    segment = _native.Segment(0, NUMEL, grad.data_ptr(), _native.F32, 0)
    with _native.NativePart(None, _geometry(**IN_RAM), arena.address, keep=arena) as block:
        memory = torch.frombuffer(_memory(arena), dtype=torch.float32)
        memory[:] = weights
        with pytest.raises(HeteroError, match="no update that awaits its verdict"):
            engine.discard(block)

        def tried() -> _native.Ticket:
            ticket = engine.open_update(block, weights_resident=True, speculative=True)
            engine.arm_update(ticket, [segment], [HYPER], step=1, keep=grad)
            ticket.wait(timeout=60)
            return ticket

        tried()
        assert not torch.equal(memory, weights)
        with pytest.raises(HeteroError, match="awaits its verdict"):
            engine.open_update(block, weights_resident=True)
        engine.discard(block).wait(timeout=60)
        assert torch.equal(memory, weights)
        tried()
        engine.keep(block)
        assert not torch.equal(memory, weights)
        with pytest.raises(HeteroError, match="no update that awaits its verdict"):
            engine.keep(block)


def test_only_state_in_memory_has_an_address(tmp_path: Path, arena: _native.Arena) -> None:
    with _native.NativePart(None, _geometry(**IN_RAM), arena.address) as part:
        assert part.state_memory(1) == part.state_address(1)
    with (
        _store(tmp_path) as store,
        _native.NativePart(store, _geometry(), arena.address) as part,
        pytest.raises(HeteroError, match="state array 1 of block 0 is on disk"),
    ):
        part.state_memory(1)


def test_a_commit_takes_no_gradients(tmp_path: Path) -> None:
    with _store(tmp_path) as store, _engine() as engine:
        ticket = engine.commit(store, 0)
        with pytest.raises(ConfigError, match=f"ticket {ticket.id} is of a commit; allowed: a ticket of open_update"):
            engine.arm_update(ticket, [], [HYPER], step=1)
        ticket.wait()


def _memory(arena: _native.Arena) -> Any:
    import ctypes

    return (ctypes.c_char * arena.num_bytes).from_address(arena.address)


def test_a_step_on_disk_is_committed_and_recovered(tmp_path: Path, arena: _native.Arena) -> None:
    weights, grad, out = torch.randn(NUMEL), torch.randn(NUMEL), torch.empty(NUMEL)
    read = [_native.Patch(0, NUMEL, out.data_ptr())]
    with _store(tmp_path) as store, _native.NativePart(store, _geometry(), arena.address) as block, _engine() as engine:
        patch = _native.Patch(0, NUMEL, weights.data_ptr())
        engine.store(block, [patch], weights_from_memory=False, step=0, keep=weights).wait()
        engine.fetch(block).wait()
        assert torch.equal(torch.frombuffer(_memory(arena), dtype=torch.float32), weights)
        engine.commit(store, 0, b"before").wait()
        ticket = engine.open_update(block, weights_resident=False)
        segment = _native.Segment(0, NUMEL, grad.data_ptr(), _native.F32, 0)
        engine.arm_update(ticket, [segment], [HYPER], step=1, keep=grad)
        done = engine.commit(store, 1, b"after", after=[ticket])
        done.wait()
        engine.read(block, read, keep=out).wait()
        assert block.slot()[1] == 1
        assert engine.stats().bytes_written > 0
        assert engine.io_backend == "pool"
    expected, moments = weights.clone(), [torch.zeros(NUMEL), torch.zeros(NUMEL)]
    addresses = [x.data_ptr() for x in (expected, *moments, grad)]
    names = ("param", "exp_avg", "exp_avg_sq", "grad")
    _native.adam(**dict(zip(names, addresses, strict=True)), numel=NUMEL, hyper=HYPER)
    assert torch.equal(out, expected)

    out.zero_()
    with _store(tmp_path, create=False) as store, _native.NativePart(store, _geometry(), arena.address) as block:
        assert store.recover() == (1, b"after")
        with _engine() as engine:
            engine.read(block, read, keep=out).wait()
            assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("segments", "text"),
    [
        ([(0, NUMEL + 1, 64, _native.F32, 0)], "numel of segment 0"),
        ([(-1, 1, 64, _native.F32, 0)], "offset of segment 0"),
        ([(0, 8, 64, _native.F32, 0), (7, 8, 64, _native.F32, 0)], "segment 1 starts at 7"),
        ([(0, 8, 66, _native.F32, 0)], "grad of segment 0"),
        ([(0, 8, 64, _native.U8, 0)], "grad_dtype of segment 0"),
        ([(0, 8, 64, _native.F32, 1)], "hyper of segment 0"),
        ([(0, 8, 0, _native.F32, 0)], "grad of segment 0"),
    ],
)
def test_segments_outside_their_block_are_refused(
    engine: _native.Engine, arena: _native.Arena, segments: list[tuple[int, ...]], text: str
) -> None:
    with _native.NativePart(None, _geometry(**IN_RAM), arena.address) as block:
        ticket = engine.open_update(block, weights_resident=True)
        with pytest.raises(ConfigError, match=text):
            engine.arm_update(ticket, [_native.Segment(*s) for s in segments], [HYPER], step=1)
        engine.cancel_update(ticket)
        ticket.wait(timeout=60)


@pytest.mark.parametrize("patch", [(0, NUMEL + 1, 64, -1), (0, 8, 66, -1), (0, 8, 64, 2), (0, 8, 64, -2), (0, 8, 0, 0)])
def test_patches_outside_their_block_are_refused(engine: _native.Engine, arena: _native.Arena, patch: tuple[int, ...]) -> None:
    with (
        _native.NativePart(None, _geometry(**IN_RAM), arena.address) as block,
        pytest.raises(ConfigError, match="patch 0 of block 0"),
    ):
        engine.read(block, [_native.Patch(*patch)])


def test_waiting_stops_at_the_timeout_and_the_task_continues(engine: _native.Engine, arena: _native.Arena) -> None:
    with _native.NativePart(None, _geometry(**IN_RAM), arena.address) as block:
        ticket = engine.open_update(block, weights_resident=True)
        with pytest.raises(TimeoutError, match="goes on"):
            ticket.wait(timeout=0.3)
        assert ticket.poll() == 0
        engine.cancel_update(ticket)
        ticket.wait(timeout=60)


class _Buffer:
    """Something that can be watched while it dies."""


def test_buffers_live_until_their_task_is_done_even_without_the_ticket(engine: _native.Engine, arena: _native.Arena) -> None:
    with _native.NativePart(None, _geometry(**IN_RAM), arena.address) as block:
        blocker = engine.open_update(block, weights_resident=True)
        out, watched = torch.empty(NUMEL), _Buffer()
        alive = weakref.ref(watched)
        patches = [_native.Patch(0, NUMEL, out.data_ptr())]
        engine.read(block, patches, keep=(watched, out))  # the ticket is dropped at once
        del watched
        gc.collect()
        assert alive() is not None, "the read still waits for the update"
        engine.cancel_update(blocker)
        deadline = time.monotonic() + 60
        while alive() is not None and time.monotonic() < deadline:
            engine.read(block, patches, keep=out).wait(timeout=60)  # a submit forgets what is done
            gc.collect()
        assert alive() is None


def test_a_waited_ticket_keeps_nothing(engine: _native.Engine, arena: _native.Arena) -> None:
    with _native.NativePart(None, _geometry(**IN_RAM), arena.address) as block:
        out, watched = torch.empty(NUMEL), _Buffer()
        alive = weakref.ref(watched)
        ticket = engine.read(block, [_native.Patch(0, NUMEL, out.data_ptr())], keep=watched)
        del watched
        ticket.wait(timeout=60)
        gc.collect()
        assert alive() is None
        ticket.release()
        ticket.release()
        with pytest.raises(HeteroError, match="was released"):
            ticket.wait()


def test_a_ticket_outlives_its_engine_harmlessly(arena: _native.Arena) -> None:
    engine = _engine()
    with _native.NativePart(None, _geometry(**IN_RAM), arena.address) as block:
        ticket = engine.fetch(block)
        ticket.wait(timeout=60)
        engine.close()
        engine.close()
        with pytest.raises(HeteroError, match="engine closed"):
            ticket.poll()
    del ticket, engine
    gc.collect()


def test_a_file_is_read_into_other_memory_than_it_was_written_from(tmp_path: Path, engine: _native.Engine) -> None:
    opaque = _geometry(weight_dtype=_native.U8, num_elements=8192, num_state=0, state_on_disk_file=False, num_slots=1)
    with (
        _store(tmp_path) as store,
        _native.Arena(8192) as first,
        _native.Arena(8192) as second,
        _native.NativePart(store, opaque, first.address) as block,
    ):
        torch.frombuffer(_memory(first), dtype=torch.uint8).copy_(torch.arange(8192))
        engine.store(block, [], weights_from_memory=True, step=0).wait()
        block.bind(second.address, keep=second)
        engine.fetch(block).wait()
        assert bytes(_memory(second)) == bytes(_memory(first)) == bytes(range(256)) * 32
        with pytest.raises(ConfigError, match="aligned to 4096"):
            block.bind(second.address + 64)


def test_a_user_blob_that_does_not_fit_is_refused(tmp_path: Path, engine: _native.Engine) -> None:
    with _store(tmp_path) as store, pytest.raises(ConfigError, match="user has 65 bytes"):
        engine.commit(store, 1, bytes(65))
