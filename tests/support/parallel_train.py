"""One rank of several that train together, or the one process that they are compared with: ``parallel_train.py OUT``.

Runs every scenario through ``Trainer.fit`` and saves what came of it. ``WORLD_SIZE`` says which it is. With the file of a
checkpoint as a further argument, one process goes on from there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.strategies import HeteroParallelFsdpStrategy, HeteroParallelStrategy

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
SAMPLES = 43  # three batches of 12, and 7
SPEEDS = {0: 3.0, 1: 5.0, 2: 4.0}


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 3)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self.body(x), y)
        self.log("train_loss", loss, sync_dist=True, on_step=True, on_epoch=True, batch_size=len(x))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.body(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Sharded(Net):
    """The same with FSDP2."""

    def configure_model(self) -> None:
        if isinstance(self.body, FSDPModule):
            return
        for layer in self.body:
            if list(layer.parameters()):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.body, mesh=self.device_mesh["data_parallel"])


def whole(tensor: Any) -> Any:
    """A sharded tensor put together; every rank has to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


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
        if self.declared and hasattr(trainer.strategy, "stopwatch"):
            trainer.strategy.stopwatch.stop_watching()
            trainer.strategy.stopwatch = Declared()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sizes.append(len(batch[0]))
        if hasattr(trainer.strategy, "shares"):
            self.shares.append(trainer.strategy.shares)


def data(world_batch: int, *, alone: bool, shuffle: bool | None = None) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(7)
    dataset = TensorDataset(
        torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64),
        torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64),
    )
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True, seed=0) if alone else None
    return (
        DataLoader(dataset, batch_size=world_batch if alone else world_batch // WORLD, sampler=sampler, shuffle=shuffle),
        DataLoader(dataset, batch_size=8),
    )


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
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=strategy,
        plugins=[] if alone else [LightningEnvironment()],
        callbacks=[notes, checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
        num_sanity_val_steps=1,
        **options,
    )
    trainer.fit(net, train, val, ckpt_path=resume)
    return {
        "weights": {name: whole(value) for name, value in net.state_dict().items()},
        "state": [whole(s["exp_avg"]) for s in trainer.optimizers[0].state_dict()["state"].values()],
        "sizes": notes.sizes,
        "shares": notes.shares,
        "epoch_loss": trainer.callback_metrics.get("train_loss_epoch"),
    }


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    speeds = [SPEEDS[rank] for rank in range(WORLD)] if WORLD > 1 else None
    several = WORLD > 1

    def strategy(**options: Any) -> Any:
        return HeteroParallelStrategy(**options) if several else "auto"

    if len(sys.argv) > 2:
        out = {"resumed": fit(folder, "resumed", "auto", max_epochs=3, resume=sys.argv[2])}
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


if __name__ == "__main__":
    main()
