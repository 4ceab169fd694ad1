"""A training whose state beside weights and optimizer is large: a callback, a datamodule and
buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_hetero.strategies import HeteroOffloadStrategy
from support.models import LitModel, Outcome, Recipe, data, outcome, quiet_trainer

STEPS = 6
MIB = 1 << 20


class Heavy(LitModel):
    """Has 8 MiB of buffers, which change in every step."""

    def __init__(self) -> None:
        super().__init__(Recipe())
        self.register_buffer("trail", torch.zeros(2 * MIB))

    def on_train_batch_end(self, *_: Any) -> None:
        self.trail += self.losses[-1]


class Average(pl.Callback):
    """Has 1 MiB, which changes in every step; fills the datamodule's table in the first one."""

    def __init__(self, begins: Callable[[pl.Trainer], object]) -> None:
        self.average = torch.zeros(MIB // 4)
        self.begins = begins

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.begins(trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.average = 0.9 * self.average + float(module.losses[-1])
        if trainer.global_step == 1:
            trainer.datamodule.table += module.losses[-1]

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "shape": (1, 2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["shape"] == (1, 2)
        self.average = state["average"]


class Tables(pl.LightningDataModule):
    """Has 1 MiB, which stays as the first step has left it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(MIB // 8, dtype=torch.float64)

    def train_dataloader(self) -> Any:
        return data()

    def state_dict(self) -> dict[str, Any]:
        return {"table": self.table}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.table = state["table"]


def offload(store: Path, **options: Any) -> Any:
    return HeteroOffloadStrategy(**{"plan": "disk", "disk_path": store, **options})


def train(
    root: Path,
    strategy: Any,
    store: Path | None = None,
    *,
    begins: Callable[[pl.Trainer], object] = id,
    **options: Any,
) -> Outcome:
    """One fit, to the end or until ``begins`` raises, from the beginning or from ``store``."""
    torch.manual_seed(7)
    module, tables = Heavy(), Tables()
    torch.manual_seed(11)
    average = Average(begins)
    callbacks = [average, *options.pop("callbacks", [])]
    trainer = quiet_trainer(
        **{"max_steps": STEPS, **options}, strategy=strategy, limit_val_batches=0, default_root_dir=root, callbacks=callbacks
    )
    trainer.fit(module, datamodule=tables, ckpt_path=None if store is None else str(store))
    found = outcome(trainer, module)
    found.weights |= {"average": average.average, "table": tables.table}
    return found


def state_files(store: Path) -> set[str]:
    return {path.name for path in store.glob("state-*")}
