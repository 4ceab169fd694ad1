"""Trainings that tests run in processes of their own, one module for each; ``support/train.py`` is
their program.

Here is what they share: which rank this process is, a small network with its data, and quiet
Trainers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from scratch import free_port
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
GRACE_S = 300.0  # for the step that is under way at a signal, on any machine


class Killed(Exception):
    """Stands for ``kill -9``: nothing of this process is saved after it."""


class Regression:
    """A network of a few layers on five features, for a LightningModule of either namespace."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.body(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.body.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Shards:
    """A mixin: FSDP2 shards the body of a :class:`Regression` over all ranks, layer by layer."""

    def configure_model(self: Any) -> None:
        if isinstance(self.body, FSDPModule):
            return
        for layer in self.body:
            if list(layer.parameters()):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.body, mesh=self.device_mesh["data_parallel"])


def samples(count: int, targets: int, *, seed: int = 7, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """``count`` random samples ``[5]`` with targets ``[targets]``."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(*(torch.randn(count, width, generator=generator, dtype=dtype) for width in (5, targets)))


def loader(dataset: Dataset[Any], batch: int, *, alone: bool, **options: Any) -> DataLoader[Any]:
    """Shuffled batches in the order of distributed samplers; ``alone`` gives plain Lightning the
    same order in one process.
    """
    sampler: Any = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True, seed=0) if alone else None  # type: ignore[arg-type]
    return DataLoader(dataset, batch_size=batch, sampler=sampler, **{"shuffle": not alone, **options})


def trainer(out: Path, strategy: Any, *plugins: Any, callbacks: Sequence[Callback] = (), **options: Any) -> pl.Trainer:
    """A quiet Trainer of all ranks, or of this process alone for ``strategy="auto"``. Checkpoints
    come from callbacks only.
    """
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # Lightning finds its environment by itself
    environment = [] if strategy == "auto" or torchrun else [LightningEnvironment()]
    defaults: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1 if strategy == "auto" else WORLD, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
    }  # fmt: skip
    plugins = (*environment, *plugins)
    return pl.Trainer(
        strategy=strategy, plugins=list(plugins), callbacks=list(callbacks), default_root_dir=out, **{**defaults, **options}
    )


def whole(tensor: Any) -> Tensor:
    """A copy of a tensor, put together if it is sharded; then every rank has to ask."""
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()  # a replicated tensor is whole already, and may change later


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all weights and buffers by name."""
    return {name: whole(value) for name, value in module.state_dict().items()}


def moments_of(trainer: pl.Trainer, key: str) -> list[Tensor]:
    """Copies of one kind of optimizer state, parameter by parameter."""
    return [whole(state[key]) for _, state in sorted(trainer.optimizers[0].state_dict()["state"].items())]


def lr_of(trainer: pl.Trainer) -> float:
    """The first group's learning rate."""
    return float(trainer.optimizers[0].param_groups[0]["lr"])


def single_rank() -> None:
    """Gives this process an address for groups of one."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def ending(run: Callable[[], None], *, killed: bool) -> Any:
    """0 where training comes to its end, else the code of the signal that stops it.

    With ``killed``, a rank is killed: then the name of the error by which the others notice, which
    is gloo's or torch's.
    """
    try:
        run()
    except SystemExit as stop:
        return stop.code
    except Exception as error:
        if not killed:
            raise
        return type(error).__name__
    return 0
