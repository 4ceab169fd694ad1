"""How many steps that have ended a kill may lose, with a disk that is slower than training: at most
the last one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from support.models import LitModel, Manual, Recipe, Shape, data, quiet_trainer
from support.recipes import MIXED

from lightning_hetero import EmulatedDevice
from lightning_hetero._native import DONE, Ticket
from lightning_hetero.store.live.block_files import BlockFiles
from lightning_hetero.strategies import HeteroOffloadStrategy

STEPS = 6
SLOW = 2e6  # bytes per second: each step takes several times longer to write than to compute


def on_slow_disk(plan: Any, store: Path) -> Any:
    strategy = HeteroOffloadStrategy(plan, disk_path=store)
    engine = replace(strategy.options.engine, emulated_bytes_per_s=SLOW)
    strategy.run.options = replace(strategy.options, engine=engine)
    return strategy


def beside_a_device(plan: Any, store: Path) -> Any:
    return HeteroOffloadStrategy(plan, disk_path=store, device=EmulatedDevice(memory="4MiB", seed=1, disk_bytes_per_s=SLOW))


class AtRisk(pl.Callback):
    """Counts, as a step ends, the steps that have ended without their record being on the disk."""

    def __init__(self, records: list[Ticket]) -> None:
        self._records, self.most = records, 0

    def on_train_start(self, *_: Any) -> None:
        self._records.clear()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        on_disk = sum(ticket.poll() == DONE for ticket in self._records)
        self.most = max(self.most, trainer.global_step - on_disk)


@pytest.mark.parametrize("module_class", [LitModel, Manual])
@pytest.mark.parametrize("make", [on_slow_disk, beside_a_device])
@pytest.mark.parametrize("plan", ["disk", "host", MIXED], ids=["disk", "host", "mixed"])
def test_only_the_last_step_may_be_without_its_record(
    plan: Any, make: Any, module_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[Ticket] = []
    commit = BlockFiles.commit

    def remembered(files: BlockFiles, *args: Any) -> Ticket:
        records.append(commit(files, *args))
        return records[-1]

    monkeypatch.setattr(BlockFiles, "commit", remembered)
    at_risk = AtRisk(records)
    strategy = make(plan, tmp_path / "store")
    trainer = quiet_trainer(strategy=strategy, max_steps=STEPS, limit_val_batches=0, default_root_dir=tmp_path, callbacks=[at_risk])
    trainer.fit(module_class(Recipe(shape=Shape(layers=2))), data())
    assert len(records) >= STEPS
    assert at_risk.most == 1
