"""A restart after every step of a run in turn.

Each goes on from what an elastic run without a stop committed after that step, beside what plain
Lightning sees of the same run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.parallel.elastic import CommittedSteps, Elastic
from lightning_hetero.strategies import HeteroParallelStrategy
from support.training import loader, trainer

SAMPLES, BATCH = 11, 4  # three batches an epoch, the last of three samples
RUNS: dict[str, dict[str, Any]] = {
    "steps": {"max_steps": 7},
    "epochs": {"max_epochs": 3},
    "steps, accumulating": {"max_steps": 5, "accumulate_grad_batches": 2},
    "steps, fewer batches": {"max_steps": 3, "limit_train_batches": 2},
    "steps, workers": {"max_steps": 5, "workers": 1},
}


class Net(pl.LightningModule):
    """Notes what it goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.events: list[tuple[Any, ...]] = []

    def _note(self, what: str, *more: Any) -> None:
        self.events.append((what, self.current_epoch, self.global_step, *more))

    def on_train_epoch_start(self) -> None:
        self._note("epoch begins")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._note("batch", batch_idx, batch[0].flatten().tolist())
        return self.layer(batch[0]).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self._note("batch ends")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._note("validation")

    def on_train_epoch_end(self) -> None:
        self._note("epoch ends")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def fit(out: Path, steps: Path | None, *, workers: int = 0, **limits: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    net = Net()
    dataset = TensorDataset(torch.arange(float(SAMPLES)).reshape(-1, 1))
    strategy = "auto" if steps is None else HeteroParallelStrategy(elastic=Elastic(steps, keep=99))
    made = trainer(out, strategy, check_val_every_n_epoch=2, num_sanity_val_steps=0, **limits)  # no validation ends the first epoch
    made.fit(net, loader(dataset, BATCH, alone=steps is None, num_workers=workers), DataLoader(dataset, batch_size=BATCH))
    return {"events": net.events, "weights": net.state_dict(), "steps": made.global_step}


def restarts(out: Path, options: dict[str, Any]) -> dict[str, Any]:
    """What plain Lightning sees, and what a run sees after each step; the last step first, since
    each commits those that follow.
    """
    plain, whole = fit(out, None, **options), fit(out, out / "steps", **options)
    steps, found = CommittedSteps(out / "steps"), {0: whole}
    for step in range(plain["steps"], 0, -1):
        for later in steps.steps():
            if later > step:
                steps.forget(later)
        found[step] = fit(out, out / "steps", **options)
    return {"plain": plain, "after": found}
