"""One rank of several that train with LocalFirst: ``recovery_train.py OUT PHASE``. Each has its own node, which is a folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import LocalFirst

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))


class Net(pl.LightningModule):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 8), nn.LayerNorm(8)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.body(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Sharded(Net):
    def configure_model(self) -> None:
        if not isinstance(self.body, FSDPModule):
            for layer in self.body:
                if list(layer.parameters()):
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.body, mesh=self.device_mesh["data_parallel"])


class Weak(pl.Callback):
    """A state of a callback's own."""

    batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def fit(
    out: Path, name: str, *, epochs: int, sharded: bool, resume: str | None = None, local: str | None = None, seed: int = 0
) -> dict[str, Any]:
    """Trains, and says what came of it; with ``local`` the folder whose nodes keep copies."""
    torch.manual_seed(seed)
    net = Sharded() if sharded else Net()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(48, 5, generator=generator, dtype=torch.float64), torch.randn(48, 8, generator=generator, dtype=torch.float64)
    )
    node = out / (local or "none") / f"node{RANK}"
    keeps = [] if local is None else [LocalFirst(node / "memory", node / "disk", piece_bytes=512)]
    weak = Weak()
    strategy: Any = "ddp" if WORLD > 1 else "auto"
    if sharded:
        strategy = ModelParallelStrategy(data_parallel_size=WORLD, tensor_parallel_size=1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=strategy,
        max_epochs=epochs,
        plugins=[*keeps, *([LightningEnvironment()] if WORLD > 1 else [])],
        callbacks=[weak, ModelCheckpoint(dirpath=out / name, filename="{epoch}", save_top_k=1 if name == "ddp" else -1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
    )
    trainer.fit(net, DataLoader(data, batch_size=12 // WORLD), ckpt_path=resume)
    state = trainer.optimizers[0].state_dict()["state"].values()
    return {
        "weights": {key: whole(value) for key, value in net.state_dict().items()},
        "moments": [whole(s["exp_avg_sq"]) for s in state],
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "step": trainer.global_step,
        "batches": weak.batches,
        "bytes": keeps[0].bytes_read if keeps else {},
    }


def main() -> None:
    torch.set_num_threads(1)
    out, phase = Path(sys.argv[1]), sys.argv[2]
    results: dict[str, Any] = {}
    if phase == "train":
        plain = str(out / "plain" / "epoch=0.ckpt")
        fit(out, "plain", epochs=1, sharded=False)
        results["ddp plain"] = fit(out, "plain", epochs=2, sharded=False, resume=plain)
        for name, sharded in (("ddp", False), ("fsdp", True)):
            results[f"{name} first"] = fit(out, name, epochs=1, sharded=sharded, local=name, resume="newest")
            results[f"{name} second"] = fit(out, name, epochs=2, sharded=sharded, local=name, resume="newest", seed=9)
        results["fsdp plain"] = fit(out, "plain", epochs=2, sharded=True, resume=str(out / "fsdp" / "epoch=0.ckpt"))
    else:  # one rank is left; it lost what the first strategy kept there
        ddp, fsdp = (str(out / name / "epoch=1.ckpt") for name in ("ddp", "fsdp"))
        results["ddp to fsdp"] = fit(out, "other", epochs=2, sharded=True, resume=ddp, local="lost")
        results["fsdp to one"] = fit(out, "other", epochs=2, sharded=False, resume=fsdp, local="fsdp")
    torch.save(results, out / f"{phase}-{RANK}.pt")


if __name__ == "__main__":
    main()
