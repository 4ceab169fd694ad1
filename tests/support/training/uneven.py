"""One rank of several with uneven batches, or the one process that they are compared with.

Runs every scenario through ``Trainer.fit`` and saves the results. With the file of a checkpoint as
an argument, one process goes on from there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.strategies import HeteroParallelFsdpStrategy, HeteroParallelStrategy
from support.training import RANK, WORLD, Regression, Shards, loader, moments_of, samples, trainer, weights_of

SAMPLES = 43  # three batches of 12, and 7
SPEEDS = {0: 3.0, 1: 5.0, 2: 4.0}


class Net(Regression, pl.LightningModule):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 3))
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self.body(x), y)
        self.log("train_loss", loss, sync_dist=True, on_step=True, on_epoch=True, batch_size=len(x))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.body(batch[0]), batch[1]), sync_dist=True)


class Sharded(Shards, Net):
    """The same with FSDP2."""


class Declared:
    """A stopwatch that says what each rank's speed is, and changes its mind halfway."""

    def __init__(self) -> None:
        self.batches = 0

    def start(self) -> None:
        self.batches += 1

    def stop(self, samples: int) -> None: ...
    def reset(self) -> None: ...
    def stop_watching(self) -> None: ...

    def seconds_per_sample(self) -> float:
        early = self.batches < 5
        return (3.0 if RANK == 0 else 1.0) if early else (3.0 if RANK == 2 else 1.0)


class Notes(Callback):
    """What happened, batch by batch."""

    def __init__(self, declared: bool) -> None:
        self.declared, self.sizes, self.shares = declared, [], []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if self.declared and hasattr(trainer.strategy, "uneven"):
            trainer.strategy.uneven.stopwatch.stop_watching()
            trainer.strategy.uneven.stopwatch = Declared()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sizes.append(len(batch[0]))
        if hasattr(trainer.strategy, "shares"):
            self.shares.append(trainer.strategy.shares)


def data(world_batch: int, *, alone: bool, shuffle: bool | None = None) -> tuple[Any, Any]:
    """Training and validation data; ``shuffle`` is the DataLoader's own option."""
    dataset = samples(SAMPLES, 3)
    batch = world_batch if alone else world_batch // WORLD
    return loader(dataset, batch, alone=alone, shuffle=shuffle), DataLoader(dataset, batch_size=8)


def fit(
    out: Path,
    name: str,
    strategy: Any,
    *,
    declared: bool = False,
    resume: str | None = None,
    shuffled: bool = False,
    **options: Any,
) -> dict[str, Any]:
    torch.manual_seed(RANK if shuffled else 0)
    net, notes = Sharded() if isinstance(strategy, HeteroParallelFsdpStrategy) else Net(), Notes(declared)
    alone = WORLD == 1 and strategy == "auto"
    train, val = data(12, alone=alone, shuffle=shuffled or None)
    checkpoint = ModelCheckpoint(dirpath=out / f"{name}-{WORLD}", filename="{step}", save_top_k=-1)
    made = trainer(out, strategy, callbacks=[notes, checkpoint], num_sanity_val_steps=1, **options)
    made.fit(net, train, val, ckpt_path=resume)
    return {
        "weights": weights_of(net),
        "state": moments_of(made, "exp_avg"),
        "sizes": notes.sizes,
        "shares": notes.shares,
        "epoch_loss": made.callback_metrics.get("train_loss_epoch"),
    }


def main(folder: Path, checkpoint: str | None = None) -> None:
    speeds = [SPEEDS[rank] for rank in range(WORLD)] if WORLD > 1 else None
    several = WORLD > 1

    def strategy(**options: Any) -> Any:
        return HeteroParallelStrategy(**options) if several else "auto"

    if checkpoint is not None:
        out = {"resumed": fit(folder, "resumed", "auto", max_epochs=3, resume=checkpoint)}
        torch.save(out, folder / "resumed.pt")
        return
    out = {
        "clipped": fit(folder, "clipped", strategy(speeds=speeds, rebalance_every=0), max_steps=3, gradient_clip_val=0.05),
        "accumulated": fit(
            folder, "accumulated", strategy(speeds=speeds, rebalance_every=0), max_epochs=2, accumulate_grad_batches=2
        ),
        "rebalanced": fit(folder, "rebalanced", strategy(rebalance_every=2, rebalance_drift=0.01), max_epochs=3, declared=True),
    }
    out["sharded"] = fit(
        folder,
        "sharded",
        HeteroParallelFsdpStrategy(rebalance_every=2, rebalance_drift=0.01) if several else "auto",
        max_epochs=2,
        declared=True,
        gradient_clip_val=0.05,
    )
    try:
        fit(folder, "samplers", strategy(), shuffled=several, use_distributed_sampler=False, max_steps=1)
        out["refused"] = {"samplers": ""}
    except UnsupportedError as error:
        out["refused"] = {"samplers": str(error)}
    if not several:
        out["one_rank"] = fit(folder, "one_rank", HeteroParallelStrategy(), max_epochs=1)
        out["one_plain"] = fit(folder, "one_plain", "auto", max_epochs=1)
    torch.save(out, folder / f"world{WORLD}-rank{RANK}.pt")
