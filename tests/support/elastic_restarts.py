"""A restart after every step of a run in turn: ``elastic_restarts.py OUT``.

Each goes on from what an elastic run without a stop committed after that step. What plain Lightning sees of the same run is saved
beside them.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_hetero.parallel.elastic import CommittedSteps, Elastic
from lightning_hetero.strategies import HeteroParallelStrategy

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
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, seed=0) if steps is None else None
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy="auto" if steps is None else HeteroParallelStrategy(elastic=Elastic(steps, keep=99)),
        plugins=[] if steps is None else [LightningEnvironment()],
        check_val_every_n_epoch=2,  # no validation ends the first epoch
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
        **limits,
    )
    train = DataLoader(dataset, batch_size=BATCH, shuffle=sampler is None, sampler=sampler, num_workers=workers)
    trainer.fit(net, train, DataLoader(dataset, batch_size=BATCH))
    return {"events": net.events, "weights": net.state_dict(), "steps": trainer.global_step}


def restarts(out: Path, options: dict[str, Any]) -> dict[str, Any]:
    """What plain Lightning sees, and what a run sees after each step; the last step first, since each commits those that follow."""
    plain, whole = fit(out, None, **options), fit(out, out / "steps", **options)
    steps, found = CommittedSteps(out / "steps"), {0: whole}
    for step in range(plain["steps"], 0, -1):
        for later in steps.steps():
            if later > step:
                steps.forget(later)
        found[step] = fit(out, out / "steps", **options)
    return {"plain": plain, "after": found}


def main() -> None:
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    out = Path(sys.argv[1])
    torch.save({name: restarts(out / name, options) for name, options in RUNS.items()}, out / "restarts.pt")


if __name__ == "__main__":
    main()
