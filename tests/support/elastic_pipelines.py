"""One rank of an elastic run of pipelines, or the one process that it is compared with: ``elastic_pipelines.py OUT``.

Three ranks train until rank 1 is told to leave, two go on by another plan. ``WORLD_SIZE`` says which it is.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_hetero.parallel.elastic import Elastic
from lightning_hetero.strategies import HeteroParallelStrategy
from support.pipeline_train import PLANS, RANK, WORLD, Net, cluster_plan, data

STEPS, TOLD = 7, 4  # an epoch has three steps


class Tell(Callback):
    """Rank 1 of three gets its notice in the middle of an epoch; losses are noted."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if (WORLD, RANK, trainer.global_step) == (3, 1, TOLD):
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses[trainer.global_step] = float(trainer.callback_metrics["train_loss"])


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(RANK if WORLD > 1 else 0)
    folder, alone, notes = Path(sys.argv[1]), WORLD == 1, Tell()
    module = Net().double()
    plan = PLANS[3] if WORLD == 3 else cluster_plan((12, (2, 4)))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy="auto" if alone else HeteroParallelStrategy(plan=plan, elastic=Elastic(folder / "steps", every_n_steps=3)),
        plugins=[] if alone else [LightningEnvironment()],
        callbacks=[notes],
        max_steps=STEPS,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    code: Any = 0
    try:
        trainer.fit(module, data(80, step=24, alone=alone)[0])
    except SystemExit as stop:
        code = stop.code
    weights = {} if code else {name: value.clone() for name, value in module.state_dict().items() if any(value.stride())}
    torch.save({"code": code, "losses": notes.losses, "weights": weights}, folder / f"world{WORLD}-rank{RANK}.pt")


if __name__ == "__main__":
    main()
