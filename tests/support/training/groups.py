"""One rank of a group in which some keep the model on tiers.

Runs every scenario through ``Trainer.fit`` and saves what came of it. The last of three also trains
alone, in one process, what all do together. Of two, sums do not depend on the order of ranks, so
they are compared with DDP's bits.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_hetero.errors import ConfigError, OutOfMemoryBudgetError
from lightning_hetero.lanes import EmulatedDevice
from lightning_hetero.parallel.elastic import Elastic
from lightning_hetero.strategies import HeteroParallelStrategy
from support.training import RANK, WORLD, trainer, weights_of
from support.training.uneven import SPEEDS, Notes, data

HARDWARE = Path(__file__).parents[1] / "hardware.json"
WIDTH, LAYERS = 16, 4
DISK = {"plan": "disk", "host_memory": "570KiB", "block_cls": "Block"}  # staging takes 512 KiB, weights but one block are out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(pl.LightningModule):
    """Blocks; a layer that only the batches of one rank use, and one that nobody uses."""

    def __init__(self, dtype: torch.dtype, *, uneven: bool) -> None:
        super().__init__()
        self.uneven = uneven
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.sometimes, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.to(self.embed.weight.dtype))
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.sometimes(x) if self.uneven and self.training and RANK == 1 else x)

    def _loss(self, batch: Any) -> Tensor:
        out = self(batch[0])
        return nn.functional.mse_loss(out, batch[1].to(out.dtype))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, sync_dist=True, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Watcher(Notes):
    """Also, how much of the weights is in memory as a batch begins, and what gradients hooks
    see.
    """

    def __init__(self, declared: bool) -> None:
        super().__init__(declared)
        self.in_memory: list[float] = []
        self.norms: list[Tensor] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if getattr(trainer.strategy, "session", None) is not None:
            blocks = [b for b in trainer.strategy.session.blocks if type(b.spec.module) is Block]
            self.in_memory.append(sum(b.resident for b in blocks) / len(blocks))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]))


def fit(
    out: Path,
    name: str,
    strategy: Any,
    *,
    dtype: torch.dtype = torch.float32,
    declared: bool = False,
    resume: Path | None = None,
    watches: bool = False,
    uneven: bool = True,
    scaled: bool = False,
    **options: Any,
) -> dict[str, Any]:
    torch.manual_seed(RANK if strategy != "auto" else 0)  # the first rank's weights count
    net, alone = Net(dtype, uneven=uneven), strategy == "auto"
    notes = Watcher(declared) if watches else Notes(declared)
    train, val = data(12, alone=alone)
    saver = ModelCheckpoint(dirpath=out / name, filename="{epoch}", save_top_k=-1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=3)  # overflows at first
    mixed = [MixedPrecision("16-mixed", "cpu", scaler=scaler)] if scaled else []
    callbacks = [notes, *([] if alone else [saver])]
    made = trainer(out, strategy, *mixed, callbacks=callbacks, num_sanity_val_steps=1, **options)
    made.fit(net, train, val, ckpt_path=resume)
    metrics = {key: float(value) for key, value in made.callback_metrics.items()}
    report = made.strategy.memory_report() if hasattr(made.strategy, "memory_report") else {}
    evaluated = made.validate(net, val, verbose=False)[0] if watches else {}
    state = made.optimizers[0].state_dict()["state"]
    return {
        "weights": weights_of(net),
        "state": {key: row["exp_avg_sq" if "exp_avg_sq" in row else "momentum_buffer"].clone() for key, row in state.items()},
        "sizes": notes.sizes,
        "shares": notes.shares,
        "in_memory": getattr(notes, "in_memory", []),
        "norms": getattr(notes, "norms", []),
        "report": report,
        "metrics": metrics,
        "evaluated": evaluated,
        "scale": scaler.get_scale(),
        "plan": getattr(getattr(made.strategy, "offload_plan", None), "name", None),
    }


def main(folder: Path) -> None:
    os.environ["LIGHTNING_HETERO_NODE"] = f"node{RANK}"
    speeds = [SPEEDS[rank] for rank in range(WORLD)]

    def strategy(**options: Any) -> Any:
        few = {"bucket_cap_mb": 1 / 1024}  # several buckets, and gradients that are larger than one
        return HeteroParallelStrategy(**{"speeds": speeds, "rebalance_every": 0, **few, **options})

    stepping: dict[str, Any] = {"max_epochs": 2, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    tiers = {"node0": DISK, 1: {"plan": "host"}}
    moved = {0: {"plan": "host"}, 1: {"plan": "host", "device": EmulatedDevice(memory="64MiB")}, 2: DISK}
    found = {
        "tiers": fit(folder, "tiers", strategy(offload=tiers), watches=True, **stepping),
    }
    if WORLD == 2:
        ddp: dict[str, Any] = {"find_unused_parameters": True}
        found["ddp"] = fit(folder, "ddp", strategy(**ddp), watches=True, **stepping)
        try:
            fit(folder, "refused", strategy(offload={1: {**DISK, "host_memory": "1KiB"}}), max_epochs=1)
        except (ConfigError, OutOfMemoryBudgetError) as error:
            found["refused"] = {"error": f"{type(error).__name__}: {error}"}
        for name, kind in (("scaled_tiers", {"offload": tiers}), ("scaled_ddp", ddp)):
            found[name] = fit(folder, name, strategy(**kind), scaled=True, max_epochs=2)
    else:
        elastic = Elastic(str(folder / "steps"), every_n_steps=1)
        planned = {1: {**DISK, "host_memory": "606KiB"}, 2: {"plan": "auto", "hardware_profile": HARDWARE}}
        drifting = strategy(offload=planned, speeds=None, rebalance_every=2, rebalance_drift=0.01)
        doubled: dict[str, Any] = {"dtype": torch.float64, "uneven": False, "max_epochs": 3}
        found |= {
            "begun": fit(folder, "begun", strategy(offload={"plan": "resident"}, elastic=elastic), **{**stepping, "max_epochs": 1}),
            "gone_on": fit(folder, "gone_on", strategy(offload={"plan": "resident"}, elastic=elastic), **stepping),
            "resumed": fit(folder, "resumed", strategy(offload=moved), resume=folder / "tiers" / "epoch=0.ckpt", **stepping),
            "double": fit(folder, "double", drifting, declared=True, **doubled),
        }
        if RANK == 2:
            found["alone"] = fit(folder, "alone", "auto", **doubled)
    torch.save(found, folder / f"rank{RANK}.pt")
