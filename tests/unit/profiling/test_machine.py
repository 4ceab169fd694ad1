"""A machine measured as a whole."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from support.profiling import make_small

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.profiling import cache, hardware, timing
from lightning_hetero.profiling.hardware import measure
from lightning_hetero.profiling.machine import MeasuredMachine, device_of
from lightning_hetero.units import MIB

QUICK_S = 0.2


SHM = Path("/dev/shm")


# ---- the whole -----------------------------------------------------------------------------------


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
        make_small(patch, home)
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
    others = ["name", "world_size", "ranks", "shared_memory", "unified_memory", "gathers_in_place", "gathers_on_devices"]
    others += ["contention", "source"]
    keys = {f.name for f in fields(HardwareProfile) if f.name not in others}
    assert keys <= set(measured.source)
    for key in ("device_flop_per_s", "disk_read_bytes_per_s", "host_dram_bytes_per_s", "cpu_update_params_per_s", "disk_duplex"):
        assert " UTC: " in measured.source[key]
        assert re.search(r"median of [1-9] repetitions, spread \d+ %", measured.source[key])
    assert re.search(r"readings lie \d+% from their median; other processes took \d+% of the CPUs", measured.source["noise"])
    assert {f"contention.{pair}" for pair in measured.contention} <= set(measured.source)


def test_contention_is_measured_for_every_pair_and_for_all_at_once(measured: HardwareProfile) -> None:
    pairs = {f"{a}|{b}" for a in ("compute", "update", "disk") for b in ("compute", "update", "disk") if a != b}
    assert set(measured.contention) == pairs | {"compute|disk+update", "update|compute+disk", "disk|compute+update"}
    assert all(factor >= 1 for factor in measured.contention.values())


def test_random_numbers_are_left_alone(once: _Once) -> None:
    assert torch.equal(once.random_before, once.random_after)


def test_a_cached_profile_is_used_again(measured: HardwareProfile, once: _Once, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_disk_is_not_measured_without_need(disk_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert f"{noise:.0%} from their median; other processes took {share:.0%} of the CPUs" in profile.source["noise"]
    assert ("The machine was busy while it was measured" in caplog.text) == busy
    (file,) = cache.cache_directory().glob("*.json")
    assert json.loads(file.read_text())["busy"] is busy


def test_capacities_equal_those_of_this_moment(measured: HardwareProfile, once: _Once, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "available_memory_bytes", lambda: 12345)
    again = measure(once.path, device="cpu")
    assert (again.host_memory_bytes, again.device_memory_bytes) == (12345, 12345)
    assert again.device_flop_per_s == measured.device_flop_per_s


class _Accelerated(MeasuredMachine):
    """The CPU in the part of an accelerator: what moves between the two is copied within the
    host.
    """

    __slots__ = ()

    shared_memory = False  # type: ignore[assignment]
    unified_memory = False  # type: ignore[assignment]

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
    assert ": memory that training page-locks to device; median of " in profile.source["link_h2d_bytes_per_s"]
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


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "/nowhere/at/all"}, r"path='/nowhere/at/all' is no directory"),
        ({"seconds": 0}, r"seconds=0; allowed: more than 0"),
        ({"update_threads": 0}, r"update_threads=0; allowed"),
        ({"device": "abacus"}, r"device='abacus'; allowed here: None, 'cpu'"),
    ],
)
def test_a_measurement_that_cannot_work_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measure(**arguments)


def test_an_accelerator_that_training_refuses_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps"))
    assert device_of(None) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"device='mps'; allowed here: None, 'cpu'\. Training computes on the CPU, on a CUDA"):
        device_of("mps")


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


BOUNDED = """
import re, sys
from contextlib import contextmanager
import torch
from lightning_hetero.profiling import hardware

def resident(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

@contextmanager
def alone():
    global before
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts anew
    before = resident("VmRSS")
    yield int(sys.argv[2])

torch.ones(512, 512) @ torch.ones(512, 512)  # the libraries have their memory
hardware.measure(sys.argv[1], device="cpu", seconds=0.2, update_threads=1, alone=alone)
print(resident("VmHWM") - before)
"""


def test_a_measurement_stays_in_the_memory_that_it_is_given(disk_path: Path, tmp_path: Path) -> None:
    """A process of its own, whose peak is that of the measurement."""
    room = 500 * MIB
    environment = {**os.environ, "PYTHONPATH": str(Path(hardware.__file__).parents[2]), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", BOUNDED, str(disk_path), str(room)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    assert 100 * MIB < int(done.stdout) < room + 32 * MIB
    assert "more than host_memory leaves" not in done.stderr
    (file,) = (tmp_path / "lightning-hetero").glob("*.json")
    assert json.loads(file.read_text())["busy"], "rates of loads in caches are not trusted for long"


def test_a_measurement_that_takes_more_than_the_budget_leaves_says_so(
    disk_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hardware, "_LEAST_BYTES", 64 * MIB)
    machine = MeasuredMachine.of(disk_path, device="cpu", update_threads=1)
    least = hardware._Benchmarks(machine).least_bytes
    assert hardware._Benchmarks(machine, 1).load_bytes == 4 * MIB
    assert hardware._Benchmarks(machine, least + 6 * MIB).load_bytes == 5 * MIB
    monkeypatch.setattr(hardware._Benchmarks, "run", lambda self, seconds: pytest.fail("it is said before"))
    with pytest.raises(pytest.fail.Exception, match="said before"):
        measure(disk_path, device="cpu", seconds=QUICK_S, refresh=True, alone=lambda: nullcontext(least - 3 * MIB))
    assert re.search(r"measuring this machine takes [\d.]+ MiB of memory, 3.0 MiB more than host_memory leaves", caplog.text)


def test_measuring_needs_no_lightning(tmp_path: Path) -> None:
    code = """
import sys, lightning_hetero.profiling.hardware
print([m for m in sys.modules if m.split(".")[0] in ("lightning", "pytorch_lightning")])
"""
    root = Path(hardware.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=600)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
