"""``kill -9`` of a process whose dataloader has workers: they live on for seconds, and must not
hold its store.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.models import LitModel, Recipe, Shape, assert_same, data, outcome, quiet_trainer
from support.resuming import after
from torch.utils.data import DataLoader

from lightning_hetero.strategies import HeteroOffloadStrategy

RECIPE = Recipe(shape=Shape(layers=2, dropout=0.1), steps=6)


def fit(root: Path, strategy: Any, workers: Path | None = None, **options: Any) -> Any:
    torch.manual_seed(7)
    module = LitModel(RECIPE)
    torch.manual_seed(11)
    trainer = quiet_trainer(
        strategy=strategy, max_steps=RECIPE.steps, limit_val_batches=0, default_root_dir=root,
        callbacks=[] if workers is None else [Dies(workers)],
    )  # fmt: skip
    loader = DataLoader(data().dataset, batch_size=2, shuffle=True, num_workers=1, persistent_workers=True)
    trainer.fit(module, loader, **options)
    return outcome(trainer, module)


class Dies(pl.Callback):
    """Is killed once its first steps are kept; tells who its worker is."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            self.file.write_text(str(trainer.train_dataloader._iterator._workers[0].pid))
            os.kill(os.getpid(), signal.SIGKILL)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("plan", ["disk", "host"])
def test_a_store_is_resumed_while_workers_of_the_killed_run_live(tmp_path: Path, plan: str) -> None:
    torch.set_num_threads(1)  # no threads of torch before the fork
    store, workers = tmp_path / "store", tmp_path / "worker"
    child = os.fork()
    if not child:
        try:
            fit(tmp_path, HeteroOffloadStrategy(plan, disk_path=store), workers)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    worker = int(workers.read_text())
    os.kill(worker, signal.SIGSTOP)  # however slow it is to notice
    try:
        assert is_alive(worker)
        got = fit(tmp_path, HeteroOffloadStrategy(plan, disk_path=store), ckpt_path=str(store))
    finally:
        os.kill(worker, signal.SIGKILL)
    assert 2 <= len(got.losses) < RECIPE.steps
    assert_same(got, after(fit(tmp_path, "auto"), len(got.losses)))
