"""Elastic runs, and the plain one that they are compared with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.environments import LightningEnvironment
from scratch import free_port
from torch.utils.data import DataLoader, Dataset, DistributedSampler

GRACE_S = 300.0  # for the step that is under way at a signal, on any machine


class Killed(Exception):
    """Stands for ``kill -9``: nothing of this incarnation is saved any more."""


def single_rank() -> None:
    """Gives this process an address for groups of one."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def trainer(out: Path, strategy: Any, *plugins: Any, **options: Any) -> pl.Trainer:
    """Trains quietly, without checkpoints of Lightning's own; ``strategy="auto"`` is plain Lightning."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # Lightning sees that by itself
    environment = [] if strategy == "auto" or torchrun else [LightningEnvironment()]
    return pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        plugins=[*environment, *plugins],
        default_root_dir=out,
        **{"devices": 1, **quiet, **options},
    )


def ending(run: Callable[[], None], *, killed: bool) -> Any:
    """0 where training comes to its end, else the code of the signal that stops it.

    With ``killed``, a rank is: then the name of the error by which the others notice, whoever of gloo and torch does so first.
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


def loader(dataset: Dataset[Any], batch: int, *, alone: bool, **options: Any) -> DataLoader[Any]:
    """Batches in the order that elastic runs have; ``alone``: for plain Lightning."""
    sampler: Any = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True, seed=0) if alone else None  # type: ignore[arg-type]
    return DataLoader(dataset, batch_size=batch, shuffle=not alone, sampler=sampler, **options)
