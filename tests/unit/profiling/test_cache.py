"""The cache of measurements."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.machines import ROOMY as PROFILE

from lightning_hetero.profiling import cache

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
def test_an_untrusted_profile_is_not_used(change: Callable[[dict[str, Any]], object]) -> None:
    cache.save(MACHINE, PROFILE)
    _rewrite(change)
    assert cache.load(MACHINE) is None


def test_a_profile_of_a_busy_machine_is_valid_for_an_hour() -> None:
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
