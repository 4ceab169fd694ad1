"""One rank of elastic runs of pipelines, or the one process that they are compared with.

Three ranks train, each on a node of its own. In the first run rank 1 is told to leave, in the
second one it is killed, which is the end of it. ``WORLD_SIZE=2``: the others go on, by other plans.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from lightning_hetero import LocalFirst
from lightning_hetero.parallel.elastic import Elastic
from lightning_hetero.parallel.pipeline import automatic
from lightning_hetero.parallel.pipeline.layout import NODE
from lightning_hetero.strategies import HeteroParallelStrategy
from support.training import GRACE_S, RANK, WORLD, ending, trainer
from support.training.pipelines import PLANS, Net, cluster_plan, data

STEPS, EVENT = 7, 4  # an epoch has three steps
NODES = {3: ("a", "b", "c"), 2: ("a", "c")}  # of the ranks
MEMORY_BYTES = 140_000  # of each rank: not enough for all layers


class Events(Callback):
    """Rank 1 of three gets a signal in the middle of an epoch; losses are noted."""

    def __init__(self, event: signal.Signals) -> None:
        self.event = event
        self.losses: dict[int, float] = {}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if (WORLD, RANK, trainer.global_step) == (3, 1, EVENT):
            os.kill(os.getpid(), self.event)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses[trainer.global_step] = float(trainer.callback_metrics["train_loss"])


def fit(folder: Path, event: signal.Signals, strategy: Any, *plugins: Any) -> dict[str, Any]:
    """Trains until the end, or until a signal ends it."""
    torch.manual_seed(RANK if WORLD > 1 else 0)
    module, events = Net().double(), Events(event)
    made = trainer(folder, strategy, *plugins, callbacks=[events], max_steps=STEPS, limit_val_batches=0)
    killed = event == signal.SIGKILL and WORLD == 3
    end = ending(lambda: made.fit(module, data(80, step=24, alone=WORLD == 1)[0]), killed=killed)
    return {
        "end": end,
        "losses": events.losses,
        "weights": {name: value.clone() for name, value in module.state_dict().items() if any(value.stride())} if end == 0 else {},
        "plan": getattr(strategy, "plan", None),
        "bytes": plugins[0].bytes_read if plugins else {},
    }


def main(folder: Path) -> None:
    if WORLD == 1:
        torch.save(fit(folder, signal.SIGTERM, "auto"), folder / "alone.pt")
        return
    plan = PLANS[3] if WORLD == 3 else cluster_plan((12, (2, 4)))
    elastic = Elastic(folder / "told", every_n_steps=3, grace_s=GRACE_S)
    told = fit(folder, signal.SIGTERM, HeteroParallelStrategy(plan=plan, elastic=elastic))
    torch.save(told, folder / f"told-world{WORLD}-rank{RANK}.pt")
    os.environ[NODE] = NODES[WORLD][RANK]
    automatic.memory_bytes = lambda device: MEMORY_BYTES
    strategy = HeteroParallelStrategy(plan="auto", micro_batches=12, elastic=Elastic(folder / "killed", keep=STEPS))
    local_first = LocalFirst(memory=folder / "nodes" / NODES[WORLD][RANK], keep=STEPS, piece_bytes=256)
    killed = fit(folder, signal.SIGKILL, strategy, local_first)
    torch.save(killed, folder / f"killed-world{WORLD}-rank{RANK}.pt")
