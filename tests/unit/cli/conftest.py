"""What commands read in tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cli import HARDWARE, MODEL, invoke


@pytest.fixture(autouse=True)
def _own_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test leaves a measurement that later runs on this machine would trust."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist gives its workers the width of a terminal


@pytest.fixture
def profiles(tmp_path: Path) -> list[str]:
    """Options that name the files of a small model and a small machine."""
    model, hardware = tmp_path / "model.json", tmp_path / "hardware.json"
    model.write_text(MODEL.to_json(), encoding="utf-8")
    hardware.write_text(HARDWARE.to_json(), encoding="utf-8")
    return ["--model-profile", str(model), "--hardware-profile", str(hardware)]


@pytest.fixture
def plan_file(tmp_path: Path, profiles: list[str]) -> Path:
    path = tmp_path / "plan.json"
    invoke("plan", *profiles, "--out", path)
    return path
