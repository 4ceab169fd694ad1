"""The table of what each backend of torch has of its own."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from support.cuda import stand_in
from support.models import Recipe, run
from support.streams import FakeCuda

import lightning_hetero
from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.lanes import backends
from lightning_hetero.lanes.backends import BACKENDS, Backend
from lightning_hetero.lanes.memory import is_out_of_memory
from lightning_hetero.lanes.pinned import PageLocker
from lightning_hetero.parallel.stopwatch import Stopwatch

NAMES = re.compile(r"cuda|rocm|\bhip\b|nvtx|cublas|\bnsight|xpu|\bmps\b", re.IGNORECASE)
LIGHTNINGS = "isolate_rng(include_cuda=False)"  # an argument of Lightning's


def test_no_other_module_names_a_backend() -> None:
    root, table = Path(lightning_hetero.__file__).parent, Path(backends.__file__)
    found = [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        if path != table
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if NAMES.search(line.replace(LIGHTNINGS, ""))
    ]
    assert not found


class Made:
    """A class of torch's, of which only the arguments matter here."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.args, self.options = args, options


def test_streams_and_events_are_of_one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's neutral streams take no events of a backend's module, and the other way round."""
    neutral, own = type("Neutral", (Made,), {}), type("Own", (Made,), {})
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch, name, neutral)
        monkeypatch.setattr(torch.cuda, name, own)
    monkeypatch.setattr(torch.accelerator, "current_stream", neutral)
    monkeypatch.setattr(torch.cuda, "current_stream", own)
    for kind, row in {**BACKENDS, "other": Backend("other")}.items():
        device = torch.device("meta")
        made: list[Any] = [row.new_stream(device), row.current_stream(device), row.event(timed=True)]
        assert {type(one) for one in made} == {own if kind == "cuda" else neutral}
        assert made[-1].options["enable_timing"] is True
        assert made[-1].options.get("blocking", False) is (kind == "cuda")  # the host waits asleep
        assert made[-1].args == (() if kind == "cuda" else (kind,))


def test_the_share_of_a_process_is_asked_of_the_backends_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"cuda": SimpleNamespace(get_per_process_memory_fraction=lambda device: 0.25), "xpu": SimpleNamespace()}
    monkeypatch.setattr(torch, "get_device_module", lambda device: modules[device.type])
    shares = {kind: row.share(torch.device(kind)) for kind, row in BACKENDS.items()}
    assert shares == {"cuda": 0.25, "xpu": 1.0}


@pytest.mark.parametrize(
    ("message", "is_it"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)", True),
        ("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)", False),
    ],
)
def test_libraries_of_each_backend_say_that_memory_has_ended(message: str, is_it: bool) -> None:
    assert is_out_of_memory(RuntimeError(message)) is is_it


def test_where_torch_has_no_call_memory_stays_pageable_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeCuda("xpu", refuse=None)
    locker = PageLocker(fake, lambda: pytest.fail("the driver had no error"), lambda: 1 << 40)
    with caplog.at_level(logging.WARNING):
        buffers = [locker.buffer(4096) for _ in range(2)]
        locker.lock(buffers[0])
    locker.close()
    assert [buffer.fill_(1).sum().item() for buffer in buffers] == [4096, 4096]
    (record,) = caplog.records
    assert "no call that page-locks it for xpu devices" in record.message


def test_ranges_are_left_out_where_torch_has_no_profiler_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    row, itt = BACKENDS["xpu"], torch.profiler.itt
    monkeypatch.setattr(itt, "range_push", said.append)
    monkeypatch.setattr(itt, "range_pop", lambda: said.append("pop"))
    monkeypatch.setattr(itt, "mark", said.append)
    for there in (False, True):
        monkeypatch.setattr(itt, "is_available", lambda there=there: there)
        row.range_begins("range")
        row.range_ends()
        row.mark("mark")
    assert said == ["range", "pop", "mark"]


@pytest.mark.parametrize("kind", ["mps", "mtia"])
def test_other_backends_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match=rf"device '{kind}:0'; it computes on the CPU, on a CUDA or ROCm GPU, or on an Intel"
    ):
        run(Recipe(), HeteroOffloadStrategy("host"), tmp_path, accelerator=stand_in(kind), devices=1)


def test_ranks_on_any_streams_are_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, row in BACKENDS.items():
        fake = FakeCuda(kind)
        monkeypatch.setattr(row, "event", fake.event)
        monkeypatch.setattr(FakeCuda.Event, "record", lambda event: None)
        watch = Stopwatch(torch.device(kind), window=1)
        assert isinstance(watch._now(), FakeCuda.Event)
    assert isinstance(Stopwatch(torch.device("meta"), window=1)._now(), float)


@pytest.mark.parametrize(
    ("chosen", "then"),
    [
        ("", ["expandable_segments:True"]),
        ("max_split_size_mb:64", ["max_split_size_mb:64,expandable_segments:True"]),
        ("expandable_segments:False", []),
        ("backend:cudaMallocAsync", []),
    ],
)
def test_pieces_of_the_allocator_grow_unless_the_user_has_chosen(
    chosen: str, then: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: chosen)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append)
    BACKENDS["cuda"].begin()
    BACKENDS["xpu"].begin()
    assert said == then


def test_torch_knows_the_settings_that_were_chosen() -> None:
    """In a process of its own, because they stay."""
    code = (
        "import torch; before = torch._C._accelerator_getAllocatorSettings();"
        "from lightning_hetero.lanes.backends import BACKENDS; BACKENDS['cuda'].begin();"
        "print(before, torch._C._accelerator_getAllocatorSettings())"
    )
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["max_split_size_mb:64", "max_split_size_mb:64,expandable_segments:True"]


def test_drivers_say_whether_a_device_shares_the_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "takes_host_memory", lambda device: True)
    for kind, name in (("cuda", "is_integrated"), ("xpu", "is_integrated_gpu")):
        for is_integrated in (0, 1):
            properties = SimpleNamespace(**{name: is_integrated})
            monkeypatch.setattr(getattr(torch, kind), "get_device_properties", lambda device, found=properties: found)
            assert BACKENDS[kind].is_unified(torch.device(kind)) is bool(is_integrated)
    assert not Backend("other").is_unified(torch.device("meta"))


@pytest.mark.parametrize("shares", [True, False])
def test_memory_that_the_firmware_keeps_for_a_device_is_its_own(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others take or give back meanwhile does not matter once in three times."""
    others, taken = iter((0, 10**9, 0)), list[int]()

    def ones(num_bytes: int, **_: Any) -> None:
        taken.append(shares * num_bytes + next(others))

    monkeypatch.setattr(backends.torch, "ones", ones)
    monkeypatch.setattr(backends.torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(backends.torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**12 - sum(taken)))
    backends.takes_host_memory.cache_clear()
    assert backends.takes_host_memory(torch.device("cuda", 0)) is shares
    backends.takes_host_memory.cache_clear()
