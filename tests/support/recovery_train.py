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
from scratch import free_port
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroOffloadStrategy, LocalFirst
from lightning_hetero.strategies import HeteroParallelFsdpStrategy, HeteroParallelStrategy

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
KINDS = ("ddp", "fsdp", "hetero", "hetero_fsdp", "tiers")


class Body:
    """A small network, for a LightningModule of either namespace."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 8), nn.LayerNorm(8)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.body(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Net(Body, pl.LightningModule):
    """For ``lightning.pytorch``."""


class Sharded(Net):
    def configure_model(self) -> None:
        if not isinstance(self.body, FSDPModule):
            for layer in self.body:
                if list(layer.parameters()):
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.body, mesh=self.device_mesh["data_parallel"])


class Split(Net):
    """Columns and rows over the ranks of tensor parallelism."""

    def configure_model(self) -> None:
        if not isinstance(self.body[0].weight, DTensor):
            plan = {"0": ColwiseParallel(use_local_output=False), "3": RowwiseParallel()}
            parallelize_module(self.body, self.device_mesh["tensor_parallel"], plan)


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


SHARDED = ("fsdp", "hetero_fsdp")
CUT = {"speeds": [2.0, 1.0][:WORLD], "rebalance_every": 0}


def made(kind: str) -> Any:
    """The strategy of a run."""
    if kind == "hetero":
        return HeteroParallelStrategy(**CUT)
    if kind == "hetero_fsdp":
        return HeteroParallelFsdpStrategy(**CUT)
    if kind == "tiers":
        return HeteroParallelStrategy(offload={0: {"plan": "disk"}, 1: {"plan": "host"}}, **CUT)
    if kind == "offload":
        return HeteroOffloadStrategy("disk")
    if kind in ("fsdp", "tensor"):
        sizes = (WORLD, 1) if kind == "fsdp" else (1, WORLD)
        return ModelParallelStrategy(data_parallel_size=sizes[0], tensor_parallel_size=sizes[1])
    return "ddp" if WORLD > 1 else "auto"


def fit(
    out: Path, name: str, kind: str, *, epochs: int, resume: str | None = None, local: str | None = None, seed: int = 0
) -> dict[str, Any]:
    """Trains, and says what came of it; with ``local`` the folder whose nodes keep copies."""
    torch.manual_seed(seed)
    net = Split() if kind == "tensor" else Sharded() if kind in SHARDED else Net()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(48, 5, generator=generator, dtype=torch.float64), torch.randn(48, 8, generator=generator, dtype=torch.float64)
    )
    node = out / (local or "none") / f"node{RANK}"
    keeps = [] if local is None else [LocalFirst(node / "memory", node / "disk", piece_bytes=512)]
    weak = Weak()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=made(kind),
        max_epochs=epochs,
        plugins=[*keeps, *([LightningEnvironment()] if WORLD > 1 or kind not in ("ddp", "offload") else [])],
        callbacks=[weak, ModelCheckpoint(dirpath=out / name, filename="{epoch}", save_top_k=1 if name == "ddp" else -1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
    )
    trainer.fit(net, DataLoader(data, batch_size=12 if kind == "tensor" else 12 // WORLD), ckpt_path=resume)
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
        for kind in KINDS:
            results[f"{kind} first"] = fit(out, kind, kind, epochs=1, local=kind, resume="newest")
            results[f"{kind} second"] = fit(out, kind, kind, epochs=2, local=kind, resume="newest", seed=9)
            plain = out / (kind if kind in SHARDED else f"plain {kind}") / "epoch=0.ckpt"
            if kind not in SHARDED:
                fit(out, plain.parent.name, kind, epochs=1)
            results[f"{kind} plain"] = fit(out, f"plain {kind}", kind, epochs=2, resume=str(plain), seed=8)
        results["fsdp to tensor"] = fit(out, "tensor", "tensor", epochs=2, local="fsdp", resume=str(out / "fsdp" / "epoch=0.ckpt"))
    else:  # one rank is left; it lost what the first strategy kept there
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ddp, fsdp = (str(out / name / "epoch=1.ckpt") for name in ("ddp", "fsdp"))
        results["ddp to fsdp"] = fit(out, "other", "fsdp", epochs=2, resume=ddp, local="lost")
        results["fsdp to one"] = fit(out, "other", "ddp", epochs=2, resume=fsdp, local="fsdp")
        tensor = str(out / "tensor" / "epoch=1.ckpt")
        results["tensor to one"] = fit(out, "other", "ddp", epochs=2, resume=tensor, local="fsdp")
        tiers = str(out / "tiers" / "epoch=1.ckpt")
        results["tiers to offload"] = fit(out, "other", "offload", epochs=2, resume=tiers, local="tiers")
        results["tiers to ddp"] = fit(out, "other", "ddp", epochs=2, resume=tiers, local="lost")
        cut = str(out / "hetero_fsdp" / "epoch=1.ckpt")
        results["hetero_fsdp to hetero"] = fit(out, "other", "hetero", epochs=2, resume=cut, local="hetero_fsdp")
    torch.save(results, out / f"{phase}-{RANK}.pt")


if __name__ == "__main__":
    main()
