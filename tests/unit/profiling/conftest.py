"""Short measurements, with a cache of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.profiling import make_small


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_small(monkeypatch, tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def disk_path(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    return path
