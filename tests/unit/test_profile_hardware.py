from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_hetero import _native
from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.profiling import cache, hardware, loads, timing
from lightning_hetero.profiling import machine as machine_module
from lightning_hetero.profiling.hardware import measure
from lightning_hetero.profiling.machine import MeasuredMachine
from lightning_hetero.profiling.timing import Load, Measured, alone, progress, rates, rounds, slowdown
from lightning_hetero.store.capacity import available_cores, available_memory_bytes, total_memory_bytes
from lightning_hetero.store.format.directory import StoreDirectory
from lightning_hetero.store.live.engine_options import EngineOptions
from lightning_hetero.units import MIB

QUICK_S = 0.2
SHM = Path("/dev/shm")


def _small(patch: pytest.MonkeyPatch, cache_home: Path) -> None:
    """Nothing of the user's cache is read or written; loads are small."""
    patch.setenv("XDG_CACHE_HOME", str(cache_home))
    patch.setattr(hardware, "_LEAST_BYTES", 4 * MIB)
    patch.setattr(machine_module, "_HIDDEN_CPU", 64)
    patch.setattr(machine_module, "_COPY_BYTES", MIB)
    patch.setattr(machine_module, "_DEVICE_PARAMS", MIB)
    patch.setattr(loads, "_BLOCK_BYTES", 4 * MIB)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    _small(monkeypatch, tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def disk_path(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    return path


# ---- rates of loads that run at once -------------------------------------------------------------------------------------------


class _Clock(threading.local):
    """Every thread has a time of its own, which only its steps advance: what else the machine does cannot be seen."""

    now_s = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    return clock


class _Sleeper(Load):
    def __init__(self, clock: _Clock, name: str, step_s: float, *, foreground: bool = False, fails_at: int = 0) -> None:
        self.clock, self.name, self.foreground = clock, name, foreground
        self.step_s, self.fails_at = step_s, fails_at
        self.threads: set[threading.Thread] = set()
        self.steps = 0
        self.settled = 0

    def step(self) -> float:
        self.threads.add(threading.current_thread())
        self.steps += 1
        if self.steps == self.fails_at:
            raise OSError("broken")
        self.clock.now_s += self.step_s
        return 5.0

    def settle(self) -> None:
        self.settled += 1


def test_a_rate_is_units_over_the_time_that_they_took(clock: _Clock) -> None:
    got = rates([_Sleeper(clock, "a", 0.01), _Sleeper(clock, "b", 0.02, foreground=True)], 0.3)
    assert got["a"] == pytest.approx(5 / 0.01)
    assert got["b"] == pytest.approx(5 / 0.02)


def test_a_step_longer_than_the_window_counts_all_the_same(clock: _Clock) -> None:
    went_on = threading.Event()

    class Slow(_Sleeper):
        def step(self) -> float:
            assert went_on.wait(60), "the quick load has to go on beside the slow one"
            return super().step()

    class Quick(_Sleeper):
        def step(self) -> float:
            if clock.now_s > 0.15:
                went_on.set()
            return super().step()

    got = rates([Slow(clock, "slow", 0.2), Quick(clock, "quick", 0.01)], 0.05)
    assert got["slow"] == pytest.approx(5 / 0.2)


def test_loads_with_torchs_threads_run_where_they_are_measured(clock: _Clock) -> None:
    front, back = _Sleeper(clock, "front", 0.01, foreground=True), _Sleeper(clock, "back", 0.01)
    rates([back, front], 0.05)
    assert front.threads == {threading.current_thread()}
    assert threading.current_thread() not in back.threads
    assert (front.settled, back.settled) == (1, 1)


def test_what_a_load_raises_ends_the_others_and_is_raised(clock: _Clock) -> None:
    healthy, broken = _Sleeper(clock, "healthy", 0.01, foreground=True), _Sleeper(clock, "broken", 0.01, fails_at=3)
    with pytest.raises(OSError, match="broken"):
        rates([healthy, broken], 1e9)  # more steps than anybody waits for


def test_what_runs_alone_runs_once_before_it_counts(clock: _Clock) -> None:
    load = _Sleeper(clock, "a", 0.005, foreground=True)
    results = rounds([[load]], seconds=1.0, repetitions=3)
    assert load.settled == 1 + len(results) >= 3
    assert alone(results, "a").repetitions == len(results)


def test_rounds_end_in_time_but_for_the_first(clock: _Clock) -> None:
    slow = _Sleeper(clock, "a", 0.5, foreground=True)
    assert len(rounds([[slow]], seconds=0.2, repetitions=5)) == 1
    assert len(rounds([[slow]], seconds=2.2, repetitions=4)) == 3
    assert len(rounds([[slow]], seconds=99.0, repetitions=5)) == 5


def test_other_processes_cpu_time_is_seen() -> None:
    code = "import time\nwhile time.process_time() < 0.5: pass"
    neighbours = timing.Neighbours()
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    passed = time.perf_counter() - begin
    assert neighbours.share() * passed * len(os.sched_getaffinity(0)) >= 0.4


def test_loads_together_get_twice_the_time_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    windows: list[tuple[int, float]] = []

    def noted(together: Sequence[Load], seconds: float) -> dict[str, float]:
        windows.append((len(together), seconds))
        return {}

    monkeypatch.setattr(timing, "rates", noted)
    a, b, c = (_Sleeper(_Clock(), name, 0.0) for name in "abc")
    rounds([[a], [a, b], [a, b, c]], seconds=10.0, repetitions=2)
    assert sum(seconds for _, seconds in windows) == pytest.approx(10)
    each = 10 / 10.5
    assert windows == [(1, each / 2), *[(1, each), (2, 2 * each), (3, 2 * each)] * 2]


def test_a_median_says_of_how_many_and_how_far_apart() -> None:
    found = Measured.of([1.0, 4.0, 2.0])
    assert (found.value, found.repetitions, found.spread) == (2.0, 3, 1.5)
    assert str(found) == "median of 3 repetitions, spread 150 %"
    assert Measured.of([0.0, 0.0]).spread == 0


DISK, COMPUTE = frozenset({"read", "write"}), frozenset({"compute"})


def _round(together: dict[str, float], beside: dict[str, float]) -> timing.Round:
    return {
        frozenset({"read"}): {"read": 2.0},
        frozenset({"write"}): {"write": 4.0},
        COMPUTE: {"compute": 10.0},
        DISK: together,
        DISK | COMPUTE: beside,
    }


def test_reads_and_writes_that_share_a_disk_reach_one_together() -> None:
    done = _round({"read": 1.0, "write": 2.0}, {})
    assert progress(done, DISK, DISK) == 1.0
    assert progress(_round({"read": 2.0, "write": 4.0}, {}), DISK, DISK) == 2.0


def test_a_slowdown_compares_within_each_round_and_is_at_least_one() -> None:
    beside = {"read": 0.5, "write": 1.0, "compute": 8.0}
    results = [_round({"read": 1.0, "write": 2.0}, beside), _round({"read": 1.0, "write": 2.0}, beside)]
    assert slowdown(results, DISK, COMPUTE).value == 2.0
    assert slowdown(results, COMPUTE, DISK).value == 1.25
    faster = [_round({"read": 1.0, "write": 2.0}, {"read": 2.0, "write": 4.0, "compute": 11.0})]
    assert slowdown(faster, DISK, COMPUTE).value == slowdown(faster, COMPUTE, DISK).value == 1.0


def test_experiments_are_each_load_each_kind_each_pair_and_all() -> None:
    update, copy = frozenset({"update"}), frozenset({"h2d", "d2h"})
    names = ["compute", "update", "read", "write", "h2d", "d2h", "memory"]
    made = hardware._experiments(names, [COMPUTE, update, DISK, copy])
    assert [len(m) for m in made[: len(names)]] == [1] * len(names)
    assert {DISK, copy, COMPUTE | update, COMPUTE | DISK, update | copy, DISK | copy} <= set(made)
    assert made[-2:] == [update | DISK | copy, COMPUTE | update | DISK | copy]
    assert len(set(made)) == len(made)


# ---- loads ---------------------------------------------------------------------------------------------------------------------


def test_compute_counts_the_flop_of_its_block() -> None:
    load = loads.Compute(torch.device("cpu"), dtype=torch.float32, hidden=64, tokens=32, cache_bytes=0)
    counter = FlopCounterMode(display=False)
    with counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert load.step() == load.flop
    assert load.flop == counter.get_total_flops()


def test_compute_runs_whatever_modes_the_caller_is_in() -> None:
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


# ---- capacities ----------------------------------------------------------------------------------------------------------------


def _files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def _proc(tmp_path: Path, line: str) -> Path:
    return _files(tmp_path / "proc", {"self/cgroup": line + "\n"})


def test_without_control_groups_memory_is_the_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3 * MIB, total=5 * MIB))
    assert available_memory_bytes(proc=tmp_path, cgroups=tmp_path) == 3 * MIB
    assert total_memory_bytes(proc=tmp_path, cgroups=tmp_path) == 5 * MIB


@pytest.mark.parametrize("visible", [True, False], ids=["on the host", "in a container"])
def test_a_groups_limit_counts_and_pages_that_it_could_drop_are_free(tmp_path: Path, visible: bool) -> None:
    # In a container the path is the host's and only the container's own group is mounted, at the root.
    place = "user/job/" if visible else ""
    root = _files(
        tmp_path / "groups",
        {
            f"{place}memory.max": f"{64 * MIB}\n",
            f"{place}memory.current": f"{50 * MIB}\n",
            f"{place}memory.stat": f"anon 1\ninactive_file {20 * MIB}\n",
        },
    )
    proc = _proc(tmp_path, "0::/user/job")
    assert available_memory_bytes(proc=proc, cgroups=root) == (64 - 30) * MIB
    assert total_memory_bytes(proc=proc, cgroups=root) == 64 * MIB


def test_the_tightest_group_above_the_process_counts(tmp_path: Path) -> None:
    root = _files(
        tmp_path / "groups",
        {
            "a/b/memory.max": "max\n",
            "a/b/memory.current": "5\n",
            "a/memory.max": f"{32 * MIB}\n",
            "a/memory.current": f"{40 * MIB}\n",
        },
    )
    proc = _proc(tmp_path, "0::/a/b")
    assert available_memory_bytes(proc=proc, cgroups=root) == 0, "a group over its limit leaves nothing"
    assert total_memory_bytes(proc=proc, cgroups=root) == 32 * MIB


def test_the_first_version_of_control_groups_counts_too(tmp_path: Path) -> None:
    root = _files(
        tmp_path / "groups",
        {
            "memory/job/memory.limit_in_bytes": str(48 * MIB),
            "memory/job/memory.usage_in_bytes": str(16 * MIB),
            "memory/job/memory.stat": f"total_inactive_file {6 * MIB}\n",
        },
    )
    assert available_memory_bytes(proc=_proc(tmp_path, "9:cpu,memory:/job"), cgroups=root) == 38 * MIB


@pytest.mark.parametrize(
    ("line", "files", "cores"),
    [
        ("0::/user/job", {"user/job/cpu.max": "max 100000\n", "user/cpu.max": "250000 100000\n"}, 3),
        ("0::/user/job", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/user/job", {"cpu.max": "max 100000\n"}, 16),
        ("0::/user/job", {"cpu.max": "6400000 100000\n"}, 16),
        ("4:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "400000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 4),
        ("4:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "-1\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 16),
        ("4:memory:/job", {"cpu/job/cpu.cfs_quota_us": "400000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 16),
    ],
)
def test_threads_keep_to_the_affinity_and_to_a_groups_quota(
    line: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    assert available_cores(proc=_proc(tmp_path, line), cgroups=_files(tmp_path / "groups", files)) == cores


def test_update_threads_are_half_of_what_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("lightning_hetero.store.live.engine_options.available_cores", lambda: 6)
    assert EngineOptions().threads() == 3
    assert EngineOptions(update_threads=5).threads() == 5


def test_the_last_level_of_caches_is_added_up_once_each(tmp_path: Path) -> None:
    rows = {"cpu0": ("0-1", "32768K"), "cpu1": ("0-1", "32768K"), "cpu2": ("2-3", "32768K"), "cpu3": ("2-3", "odd")}
    root = _files(
        tmp_path / "cpu",
        {f"{c}/cache/index3/{k}": v for c, row in rows.items() for k, v in zip(("shared_cpu_list", "size"), row, strict=True)},
    )
    assert machine_module._cache_bytes(root) == 64 * MIB
    assert machine_module._cache_bytes(tmp_path / "none") == 0


# ---- the cache -----------------------------------------------------------------------------------------------------------------

PROFILE = HardwareProfile(
    name="m",
    device_memory_bytes=1,
    host_memory_bytes=1,
    disk_capacity_bytes=1,
    device_flop_per_s=1.0,
    link_h2d_bytes_per_s=0.0,
    link_d2h_bytes_per_s=0.0,
    disk_read_bytes_per_s=1.0,
    disk_write_bytes_per_s=1.0,
    disk_duplex=False,
    host_dram_bytes_per_s=1.0,
    cpu_update_params_per_s=1.0,
    device_update_params_per_s=1.0,
    cpu_downcast_params_per_s=1.0,
    shared_memory=True,
)
MACHINE = {"processor": "x", "cores": 2}


def test_a_profile_is_kept_for_its_machine(own_cache: Path) -> None:
    assert cache.load(MACHINE) is None
    cache.save(MACHINE, PROFILE)
    assert cache.load(dict(reversed(MACHINE.items()))) == PROFILE
    assert cache.load(MACHINE | {"cores": 4}) is None
    assert [p.parent for p in own_cache.rglob("*.json")] == [own_cache / "lightning-hetero"]


def _rewrite(change: Callable[[dict[str, Any]], object]) -> None:
    path = cache.cache_file(MACHINE)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(measured_s=time.time() - cache.STALE_S - 60),
        lambda data: data.update(measured_s=time.time() - cache.BUSY_STALE_S - 60, busy=True),
        lambda data: data.update(measured_s=time.time() + 3600),
        lambda data: data.update(busy=1),
        lambda data: data.pop("busy"),
        lambda data: data.update(measured_s="yesterday"),
        lambda data: data["fingerprint"].update(processor="y"),
        lambda data: data.update(version=1),
        lambda data: data.pop("profile"),
        lambda data: data["profile"].update(device_flop_per_s=-1),
        lambda data: data.clear(),
    ],
    ids=[
        "stale",
        "of a busy machine",
        "from the future",
        "busy with one",
        "busy or not",
        "no time",
        "foreign",
        "another version",
        "no profile",
        "bad figure",
        "empty",
    ],
)
def test_what_cannot_be_trusted_is_not_used(change: Callable[[dict[str, Any]], object]) -> None:
    cache.save(MACHINE, PROFILE)
    _rewrite(change)
    assert cache.load(MACHINE) is None


def test_what_was_measured_on_a_busy_machine_counts_for_a_while() -> None:
    cache.save(MACHINE, PROFILE, busy=True)
    assert cache.load(MACHINE) == PROFILE
    _rewrite(lambda data: data.update(measured_s=time.time() - cache.BUSY_STALE_S - 60))
    assert cache.load(MACHINE) is None
    cache.save(MACHINE, PROFILE)
    _rewrite(lambda data: data.update(measured_s=time.time() - cache.BUSY_STALE_S - 60))
    assert cache.load(MACHINE) == PROFILE


def test_a_damaged_file_is_not_used() -> None:
    cache.save(MACHINE, PROFILE)
    for content in (b"{", b"\xff\xfe", b""):
        cache.cache_file(MACHINE).write_bytes(content)
        assert cache.load(MACHINE) is None


def test_a_cache_that_cannot_be_written_costs_only_the_next_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cache.save(MACHINE, PROFILE)
    with cache.one_at_a_time():
        assert cache.load(MACHINE) is None


def test_the_cache_is_where_the_standard_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.cache_directory() == Path.home() / ".cache" / "lightning-hetero"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_directory() == Path.home() / ".cache" / "lightning-hetero"


def test_one_process_measures_at_a_time() -> None:
    order: list[str] = []
    begun = threading.Event()

    def other() -> None:
        begun.set()
        with cache.one_at_a_time():
            order.append("other")

    thread = threading.Thread(target=other)
    with cache.one_at_a_time():
        thread.start()
        begun.wait()
        time.sleep(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]


# ---- the whole -----------------------------------------------------------------------------------------------------------------


class _Once(NamedTuple):
    profile: HardwareProfile
    path: Path
    cache_home: Path
    random_before: torch.Tensor
    random_after: torch.Tensor


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Once]:
    """One measurement for several tests."""
    path, home = tmp_path_factory.mktemp("disk"), tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        _small(patch, home)
        # As on a machine whose caches are known: a share of memory, not their size, decides how much is moved.
        patch.setattr(machine_module, "_cache_bytes", lambda: 0)
        before = torch.random.get_rng_state()
        profile = measure(path, device="cpu", seconds=QUICK_S)
        yield _Once(profile, path, home, before, torch.random.get_rng_state())


@pytest.fixture
def measured(once: _Once, monkeypatch: pytest.MonkeyPatch) -> HardwareProfile:
    monkeypatch.setenv("XDG_CACHE_HOME", str(once.cache_home))
    return once.profile


def test_this_machine_is_measured(measured: HardwareProfile, once: _Once) -> None:
    assert measured.shared_memory
    assert measured.device_memory_bytes == measured.host_memory_bytes
    assert 0 < measured.host_memory_bytes <= psutil.virtual_memory().total
    assert measured.disk_capacity_bytes > 0
    for key in ("device_flop_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s", "host_dram_bytes_per_s"):
        assert getattr(measured, key) > 1e6, key
    for key in ("cpu_update_params_per_s", "device_update_params_per_s", "cpu_downcast_params_per_s"):
        assert getattr(measured, key) > 1e6, key
    assert measured.link_h2d_bytes_per_s == measured.link_d2h_bytes_per_s == measured.collective_bytes_per_s == 0
    assert measured.device_update_params_per_s == measured.cpu_update_params_per_s
    assert list(once.path.iterdir()) == [], "files are left"
    assert HardwareProfile.from_json(measured.to_json()) == measured


def test_every_figure_says_when_and_how_it_was_measured(measured: HardwareProfile) -> None:
    others = ("name", "world_size", "shared_memory", "contention", "source")
    keys = {f.name for f in fields(HardwareProfile) if f.name not in others}
    assert keys <= set(measured.source)
    for key in ("device_flop_per_s", "disk_read_bytes_per_s", "host_dram_bytes_per_s", "cpu_update_params_per_s", "disk_duplex"):
        assert " UTC: " in measured.source[key]
        assert re.search(r"median of [1-9] repetitions, spread \d+ %", measured.source[key])
    assert re.search(r"readings lie \d+% from their median, other processes took \d+% of the CPUs", measured.source["noise"])
    assert {f"contention.{pair}" for pair in measured.contention} <= set(measured.source)


def test_contention_is_measured_for_every_pair_and_for_all_at_once(measured: HardwareProfile) -> None:
    pairs = {f"{a}|{b}" for a in ("compute", "update", "disk") for b in ("compute", "update", "disk") if a != b}
    assert set(measured.contention) == pairs | {"compute|disk+update", "update|compute+disk", "disk|compute+update"}
    assert all(factor >= 1 for factor in measured.contention.values())


def test_random_numbers_are_left_alone(once: _Once) -> None:
    assert torch.equal(once.random_before, once.random_after)


def test_what_was_measured_is_used_again(measured: HardwareProfile, once: _Once, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> HardwareProfile:
        raise AssertionError("measured again")

    monkeypatch.setattr(hardware._Benchmarks, "run", run)
    again = measure(once.path, device="cpu", seconds=QUICK_S)
    capacities = ("host_memory_bytes", "device_memory_bytes", "disk_capacity_bytes", "source")
    assert replace(again, **{k: getattr(measured, k) for k in capacities}) == measured
    with pytest.raises(AssertionError, match="measured again"):
        measure(once.path, device="cpu", seconds=QUICK_S, refresh=True)
    with pytest.raises(AssertionError, match="measured again"):
        measure(once.path, device="cpu", seconds=QUICK_S, update_threads=7)


def test_the_disk_is_left_alone_where_nobody_needs_it(disk_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*_: object) -> None:
        raise AssertionError("the disk is used")

    with monkeypatch.context() as patch:
        patch.setattr(hardware._Benchmarks, "_disk_loads", touched)
        found = measure(disk_path, device="cpu", seconds=QUICK_S, disk=False)
        assert found.disk_read_bytes_per_s == found.disk_write_bytes_per_s == found.disk_capacity_bytes == 0
        assert "not measured" in found.source["disk_read_bytes_per_s"]
        assert measure(disk_path, device="cpu", disk=False).cpu_update_params_per_s == found.cpu_update_params_per_s
        with pytest.raises(AssertionError, match="the disk is used"):
            measure(disk_path, device="cpu", seconds=QUICK_S)
    whole = measure(disk_path, device="cpu", seconds=QUICK_S)
    assert whole.disk_read_bytes_per_s > 0
    known = measure(disk_path, device="cpu", disk=False)
    assert known.disk_read_bytes_per_s == whole.disk_read_bytes_per_s, "what is known of the disk counts"


@pytest.mark.parametrize(("share", "noise", "rounds", "busy"), [
    (0.0, 0.05, 3, False), (0.5, 0.05, 3, True), (0.0, 0.4, 3, True), (0.0, 0.05, 1, True),
])  # fmt: skip
def test_a_busy_machine_is_said_and_measured_again_after_an_hour(
    share: float, noise: float, rounds: int, busy: bool, disk_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(hardware.Neighbours, "share", lambda self: share)
    monkeypatch.setattr(MeasuredMachine, "whole_cpus", True)
    measured = hardware.alone
    monkeypatch.setattr(hardware, "alone", lambda *a: replace(measured(*a), noise=noise))
    monkeypatch.setattr(hardware, "rounds", lambda *a, **k: timing.rounds(*a, seconds=0.1, repetitions=1)[:1] * rounds)
    profile = measure(disk_path, device="cpu", seconds=QUICK_S, disk=False)
    assert f"{noise:.0%} from their median, other processes took {share:.0%} of the CPUs" in profile.source["noise"]
    assert ("The machine was busy while it was measured" in caplog.text) == busy
    (file,) = cache.cache_directory().glob("*.json")
    assert json.loads(file.read_text())["busy"] is busy


def test_capacities_are_those_of_this_moment(measured: HardwareProfile, once: _Once, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "available_memory_bytes", lambda: 12345)
    again = measure(once.path, device="cpu")
    assert (again.host_memory_bytes, again.device_memory_bytes) == (12345, 12345)
    assert again.device_flop_per_s == measured.device_flop_per_s


class _Accelerated(MeasuredMachine):
    """The CPU in the part of an accelerator: what moves between the two is copied within the host."""

    __slots__ = ()

    shared_memory = False  # type: ignore[assignment]

    def device_memory_bytes(self) -> int:
        return 1000

    def _device_name(self) -> str:
        return "cuda pretended"

    def _compute(self) -> tuple[torch.dtype, int, int]:
        return torch.float32, 64, 64


def test_a_machine_with_a_device_has_links_and_contention_with_copies(disk_path: Path) -> None:
    plain = MeasuredMachine.of(disk_path, device="cpu", update_threads=1)
    device = _Accelerated(**{f.name: getattr(plain, f.name) for f in fields(MeasuredMachine)})
    profile = hardware.with_capacities(hardware._Benchmarks(device).run(QUICK_S).profile, device)
    assert not profile.shared_memory
    assert profile.device_memory_bytes == 1000
    assert min(profile.link_h2d_bytes_per_s, profile.link_d2h_bytes_per_s, profile.device_update_params_per_s) > 1e6
    assert "pinned memory to device" in profile.source["link_h2d_bytes_per_s"]
    assert profile.link_h2d_pageable_bytes_per_s > 1e6
    assert ": pageable memory to device; median of " in profile.source["link_h2d_pageable_bytes_per_s"]
    assert {"copy|update", "update|copy", "copy|disk", "compute|copy", "copy|disk+update"} <= set(profile.contention)
    assert profile.contention["copy|copy"] >= 1, "what ProTrain reads: copies beside those in the other direction"
    assert " UTC: copy beside copy; median of " in profile.source["contention.copy|copy"]
    assert "copy|compute+disk+update" in profile.contention
    assert "cuda pretended" in profile.name
    assert device.fingerprint() != plain.fingerprint()


def test_copies_that_halve_each_other_have_a_contention_of_two() -> None:
    kinds = {"update": frozenset({"update"}), "copy": frozenset({"h2d", "d2h"})}
    both, everything = kinds["copy"], kinds["copy"] | kinds["update"]
    rates_of = {frozenset({name}): {name: 8.0} for name in everything}
    done = rates_of | {both: {"h2d": 4.0, "d2h": 4.0}, everything: {"h2d": 2.0, "d2h": 2.0, "update": 8.0}}
    found = {(mine, others): value.value for mine, others, value in hardware._contention([done], kinds)}
    assert found == {("copy", "copy"): 2.0, ("copy", "update"): 2.0, ("update", "copy"): 1.0}


# ---- refusals ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "/nowhere/at/all"}, r"path='/nowhere/at/all' is no directory"),
        ({"seconds": 0}, r"seconds=0; allowed: more than 0"),
        ({"update_threads": 0}, r"update_threads=0; allowed"),
        ({"device": "abacus"}, r"device='abacus'; allowed here: None, 'cpu'"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measure(**arguments)


@pytest.mark.skipif(not os.access(SHM, os.W_OK), reason="needs a file system in memory")
def test_a_named_path_that_is_no_disk_is_refused_and_an_unnamed_one_gives_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="which is host memory, not a disk"):
        measure(SHM, device="cpu", seconds=QUICK_S)
    monkeypatch.chdir(SHM)
    profile = measure(device="cpu", seconds=QUICK_S)
    assert profile.disk_read_bytes_per_s == profile.disk_write_bytes_per_s == profile.disk_capacity_bytes == 0
    assert all("not a disk" in profile.source[key] for key in ("disk_read_bytes_per_s", "disk_write_bytes_per_s", "disk_duplex"))
    assert set(profile.contention) == {"compute|update", "update|compute"}
    # The profile without a disk is known now; who names the disk still hears what is wrong with it.
    assert measure(device="cpu").contention == profile.contention
    with pytest.raises(ConfigError, match="which is host memory, not a disk"):
        measure(SHM, device="cpu", seconds=QUICK_S)


def test_measuring_needs_no_lightning(tmp_path: Path) -> None:
    code = """
import sys, lightning_hetero.profiling.hardware
print([m for m in sys.modules if m.split(".")[0] in ("lightning", "pytorch_lightning")])
"""
    root = Path(hardware.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=600)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
