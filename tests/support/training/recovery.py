"""One rank of several that train with LocalFirst; the argument is the phase. Each has its own node,
which is a folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_hetero import HeteroOffloadStrategy, LocalFirst
from lightning_hetero.strategies import HeteroParallelFsdpStrategy, HeteroParallelStrategy
from support.training import RANK, WORLD, Regression, Shards, lr_of, moments_of, samples, single_rank, trainer, weights_of

KINDS = ("ddp", "fsdp", "hetero", "hetero_fsdp", "tiers")


class Body(Regression):
    """A small network, for a LightningModule of either namespace."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(nn.Linear(5, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 8), nn.LayerNorm(8))
        self.body.double()


class Net(Body, pl.LightningModule):
    """For ``lightning.pytorch``."""


class Sharded(Shards, Net):
    """The same with FSDP2."""


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


SHARDED = ("fsdp", "hetero_fsdp")
CUT = {"speeds": [2.0, 1.0][:WORLD], "rebalance_every": 0}


def strategy_of(kind: str) -> Any:
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
    data = samples(48, 8)
    node = out / (local or "none") / f"node{RANK}"
    keeps = [] if local is None else [LocalFirst(node / "memory", node / "disk", piece_bytes=512)]
    weak = Weak()
    saver = ModelCheckpoint(dirpath=out / name, filename="{epoch}", save_top_k=1 if name == "ddp" else -1)
    made = trainer(out, strategy_of(kind), *keeps, callbacks=[weak, saver], max_epochs=epochs)
    made.fit(net, DataLoader(data, batch_size=12 if kind == "tensor" else 12 // WORLD), ckpt_path=resume)
    return {
        "weights": weights_of(net),
        "moments": moments_of(made, "exp_avg_sq"),
        "lr": lr_of(made),
        "step": made.global_step,
        "batches": weak.batches,
        "bytes": keeps[0].bytes_read if keeps else {},
    }


def main(out: Path, phase: str) -> None:
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
        single_rank()
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
