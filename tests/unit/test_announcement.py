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


def test_a_short_one_says_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert said(monkeypatch, caplog, seconds=0.1) == []
