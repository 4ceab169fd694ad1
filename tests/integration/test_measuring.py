"""A machine that is measured while a model trains under a budget."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from support.models import Recipe, Shape, assert_same, run

from lightning_hetero import EmulatedDevice
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.planning.machine_profile import ENVIRONMENT, Machine
from lightning_hetero.profiling import hardware
from lightning_hetero.strategies import HeteroOffloadStrategy


class Measures(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if index == 2:
            session: Any = trainer.strategy.session  # type: ignore[attr-defined]
            self.weights, self.heap = session.executor.residency.weights, session.executor.heap
            Machine(None).profile(session)


@pytest.mark.parametrize("host_memory", ["3GiB", None])
@pytest.mark.parametrize("device", [None, EmulatedDevice(memory="8MiB")], ids=["host", "device"])
def test_it_gets_what_the_budget_leaves_without_cached_weights(
    host_memory: str | None, device: EmulatedDevice | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int | None, int, int]] = []
    measures = Measures()

    def measured(machine: Any, seconds: float, room: int | None) -> Any:
        found.append((room, len(measures.weights.held()), measures.heap.room()))
        return given

    given = HardwareProfile.load(os.environ[ENVIRONMENT])
    monkeypatch.delenv(ENVIRONMENT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hardware, "_measured", measured)
    recipe = Recipe(shape=Shape(layers=4), steps=5)
    strategy = HeteroOffloadStrategy("disk", host_memory=host_memory, device=device)
    assert_same(run(recipe, strategy, tmp_path, callbacks=[measures]), run(recipe, "auto", tmp_path))
    ((room, held, left),) = found
    if host_memory is None:
        assert room is None
    else:
        assert room == pytest.approx(left, abs=16 << 20)
        assert left > 2 << 30
        assert not held, "cached weights have left"
