"""For all tests here: the models are small, and what they save shall leave a device all the same."""

from __future__ import annotations

import pytest

from lightning_hetero.runtime.activations import uses


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses, "SMALL_BYTES", 64)
