"""Ranks of a notebook, which are forks of it: a script.

See ``tests/integration/test_shared_model.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero.strategies import HeteroOffloadStrategy

DATA = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


class Model(pl.LightningModule):
    """Four blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), nn.Linear(8, 1)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss = self.head(self.layers(batch)).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def trained(strategy: Any, folder: Path) -> tuple[Model, Tensor]:
    """The model and its last loss, as the notebook has them after the fit."""
    torch.manual_seed(0)
    model = Model()
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=2, default_root_dir=folder, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(DATA, 2))
    return model, trainer.callback_metrics["loss"]


if __name__ == "__main__":
    imports, connectors = "lightning.fabric.utilities.imports", "lightning.pytorch.trainer.connectors.accelerator_connector"
    with mock.patch(f"{imports}._IS_INTERACTIVE", new=True), mock.patch(f"{connectors}._IS_INTERACTIVE", new=True):
        ours, theirs = (trained(strategy, Path(sys.argv[1])) for strategy in (HeteroOffloadStrategy("host"), "auto"))
    assert torch.equal(ours[1], theirs[1])
    for one, other, begin in zip(ours[0].parameters(), theirs[0].parameters(), Model().parameters(), strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, begin)
    print("ok")
