"""The loads: each does what its rate counts."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from support.profiling import DISK
from torch.utils.flop_counter import FlopCounterMode

from lightning_hetero import _native
from lightning_hetero.profiling import hardware, loads
from lightning_hetero.profiling.timing import Measured, alone, progress, rounds
from lightning_hetero.store.format.directory import StoreDirectory
from lightning_hetero.store.live.engine_options import EngineOptions
from lightning_hetero.units import MIB


def test_compute_counts_the_flop_of_its_block() -> None:
    load = loads.Compute(torch.device("cpu"), dtype=torch.float32, hidden=64, tokens=32, cache_bytes=0)
    counter = FlopCounterMode(display=False)
    with counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert load.step() == load.flop
    assert load.flop == counter.get_total_flops()


def test_compute_runs_in_any_mode_of_the_caller() -> None:
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        load = loads.Compute(torch.device("cpu"), dtype=torch.float32, hidden=64, tokens=32, cache_bytes=0)
        load.step()
    gradient = next(load._layers[-1].parameters()).grad
    assert gradient is not None
    assert gradient.dtype is torch.float32


def test_computes_weights_do_not_stay_in_the_caches() -> None:
    block_bytes = 12 * 64**2 * 4
    for cache_bytes, blocks in ((0, 1), (block_bytes, 2), (10 * block_bytes, 8)):
        load = loads.Compute(torch.device("cpu"), dtype=torch.float32, hidden=64, tokens=32, cache_bytes=cache_bytes)
        for _ in range(blocks):
            load.step()
        assert sum(next(layer.parameters()).grad is not None for layer in load._layers) == blocks == len(load._layers)


def test_updates_change_the_weights_and_the_engine_is_closed() -> None:
    with loads.Update(10_000, 1) as load:
        assert load.step() == 10_000
        assert load.step() == 10_000
        assert load._block.state_address(0) is not None
        engine = load._engine
    assert not engine.is_open


def test_memory_moves_28_bytes_a_parameter() -> None:
    with loads.MemoryTraffic(4096, 1) as load:
        assert load.step() == 28 * 4096


def test_the_downcast_casts() -> None:
    load = loads.Downcast(100)
    load._wide.fill_(1.5)
    assert load.step() == 100
    assert load._narrow.float().tolist() == [1.5] * 100


@pytest.mark.parametrize("to_device", [True, False])
def test_copies_copy(to_device: bool) -> None:
    load = loads.Copy(torch.device("cpu"), to_device=to_device, num_bytes=1000)
    load._source.fill_(7)
    assert load.step() == 1000
    assert torch.equal(load._target, load._source)
    assert load.name == ("h2d" if to_device else "d2h")


def test_a_device_update_updates() -> None:
    load = loads.DeviceUpdate(torch.device("cpu"), 100)
    assert load.step() == 100
    assert load._param.detach().abs().min() > 0


def _disk(path: Path, undo: ExitStack) -> tuple[loads.DiskTransfer, loads.DiskTransfer]:
    directory = StoreDirectory.create_or_adopt(None, default_root=path, manifest={}, needed_bytes=loads.disk_bytes(16 * MIB))
    undo.callback(directory.close)
    return loads.disk_loads(directory, 16 * MIB, EngineOptions(), undo)


def test_disk_loads_read_and_write_their_files_and_leave_nothing(disk_path: Path) -> None:
    with ExitStack() as undo:
        reads, writes = _disk(disk_path, undo)
        files = list(disk_path.rglob("block-*"))
        assert 0 < sum(f.stat().st_size for f in files) <= loads.disk_bytes(16 * MIB)
        before = [load._engine.stats() for load in (reads, writes)]
        for _ in range(5):
            assert reads.step() == writes.step() == 4 * MIB
        reads.settle()
        writes.settle()
        after = [load._engine.stats() for load in (reads, writes)]
        assert after[0].bytes_read - before[0].bytes_read >= 5 * 4 * MIB
        assert after[0].bytes_written == before[0].bytes_written
        assert after[1].bytes_written - before[1].bytes_written >= 5 * 4 * MIB
        assert after[1].bytes_read == before[1].bytes_read
        assert reads.backend in ("io_uring", "pool")
    assert list(disk_path.iterdir()) == []


def test_a_slow_disk_gets_fewer_files(disk_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "_PREPARE_S", 0.0)
    with ExitStack() as undo:
        reads, writes = _disk(disk_path, undo)
        assert len(reads._blocks) == len(writes._blocks) == loads._IN_FLIGHT
        for _ in range(5):
            assert reads.step() == writes.step() == 4 * MIB
        reads.settle()
        writes.settle()


def test_a_duplex_disk_is_recognised(disk_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's synthetic device is duplex: it sleeps for each direction by itself, for long."""
    plain = loads._engine

    def synthetic(**options: Any) -> _native.Engine:
        return plain(
            **options | {"io_backend": "synthetic", "io_threads": 2},
            synthetic_read_bytes_per_s=8e7,
            synthetic_write_bytes_per_s=4e7,
        )

    monkeypatch.setattr(loads, "_engine", synthetic)
    expected = pytest.approx(8e7, rel=0.3), pytest.approx(4e7, rel=0.3), pytest.approx(2.0, abs=2.0 - hardware._DUPLEX)
    found = []
    with ExitStack() as undo:
        reads, writes = _disk(disk_path, undo)
        for _ in range(10):  # a machine that is busy with something else hides it now and then
            results = rounds([[reads], [writes], [reads, writes]], seconds=1.0, repetitions=1)
            duplex = Measured.of(progress(done, DISK, DISK) for done in results).value
            found.append((alone(results, "read").value, alone(results, "write").value, duplex))
            if found[-1] == expected:
                return
    raise AssertionError(f"reads, writes and what both reach together: {found}")
