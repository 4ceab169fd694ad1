"""What is said while something takes long."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_hetero.runtime import announcement
from lightning_hetero.units import MIB


def blocks(count: int, size: int) -> list[Any]:
    return [SimpleNamespace(parts=[SimpleNamespace(weight_bytes=size)]) for _ in range(count)]


def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, seconds: float) -> list[str]:
    """Places eight blocks, each of which takes so many seconds."""
    clock = itertools.count()
    monkeypatch.setattr(announcement, "now_s", lambda: next(clock) * seconds / 2)  # read about twice for each block
    eight = blocks(8, 64 * MIB)
    with caplog.at_level(logging.INFO, logger="lightning_hetero"):
        assert list(announcement.placing(eight)) == eight
    return [record.getMessage() for record in caplog.records]


def test_a_long_placement_says_how_far_it_is_and_how_long_the_rest_takes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines = said(monkeypatch, caplog, seconds=4.0)
    assert lines
    assert all("of 512.0 MiB of weights; about " in line and line.endswith(" s to go.") for line in lines)
    placed = [float(line.split()[1]) for line in lines]
    left = [float(line.split()[-4]) for line in lines]
    assert placed == sorted(placed)
    assert left == sorted(left, reverse=True)


def test_the_summary_of_several_ranks_says_that_it_is_about_the_first() -> None:
    report = {"host_peak_bytes": 4 * MIB, "device_peak_bytes": MIB, "disk_bytes": MIB}
    alone, first = (
        announcement.summarize("host", steps=2, seconds=4.0, report=report, error=None, ranks=ranks) for ranks in (1, 3)
    )
    assert "; the process had 4.0 MiB at its peak; the device 1.0 MiB; 1.0 MiB of files" in alone
    assert "; the first of 3 processes had 4.0 MiB at its peak; its device 1.0 MiB; it has 1.0 MiB of files" in first


def test_a_short_one_says_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert said(monkeypatch, caplog, seconds=0.1) == []
