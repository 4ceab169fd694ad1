"""One rank of an elastic run whose nodes keep the model on different tiers; the argument is the
incarnation.

In the first incarnation the node that has everything on disk is killed, rank 0, between two
committed steps. Two nodes go on until one of them is told to leave. Then all three are there, as
other ranks, and train to the end.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from lightning_hetero.parallel.elastic import Elastic
from lightning_hetero.parallel.pipeline.layout import NODE
from lightning_hetero.strategies import HeteroParallelStrategy
from support.training import GRACE_S, RANK, WORLD, ending, trainer, weights_of
from support.training.groups import DISK, Net
from support.training.uneven import data

NODES = {"killed": ("a", "b", "c"), "told": ("b", "c"), "ended": ("c", "a", "b")}  # of the ranks
SPEEDS = {"a": 3.0, "b": 5.0, "c": 4.0}
BATCH, EVERY, KILLED, TOLD, STEPS = 12, 2, 5, 6, 10  # an epoch has four steps


class Events(Callback):
    """Signals; the samples of each step here, and where an incarnation began."""

    def __init__(self, signals: dict[int, signal.Signals]) -> None:
        self.signals = signals
        self.sizes: dict[int, int] = {}
        self.began = -1

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.began = trainer.global_step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.sizes[trainer.global_step] = len(batch[0])
        if trainer.global_step in self.signals:
            os.kill(os.getpid(), self.signals[trainer.global_step])


def fit(out: Path, strategy: Any, signals: dict[int, signal.Signals], *, killed: bool = False) -> dict[str, Any]:
    """Trains to the end, or until a signal or the end of another rank stops it; with ``killed``,
    rank 0 is killed.
    """
    first = WORLD == 1 or (killed and RANK == 0)
    torch.manual_seed(0 if first else os.getpid())  # whatever the others begin with
    net, events = Net(torch.float64, uneven=False), Events(signals)
    made = trainer(out, strategy, callbacks=[events], max_steps=STEPS, gradient_clip_val=0.5)
    end = ending(lambda: made.fit(net, *data(BATCH, alone=WORLD == 1)), killed=killed)
    state = made.optimizers[0].state_dict()["state"] if end == 0 else {}
    return {
        "end": end,
        "began": events.began,
        "sizes": events.sizes,
        "weights": weights_of(net) if end == 0 else {},
        "state": {key: row["exp_avg_sq"].clone() for key, row in state.items()},
        "plan": getattr(getattr(strategy, "offload_plan", None), "name", None),
    }


def main(out: Path, incarnation: str) -> None:
    node = os.environ[NODE]
    disk = {**DISK, "host_memory": "608KiB", "disk_path": out / f"disk-{node}"}
    strategy = HeteroParallelStrategy(
        offload={"a": disk, "b": {"plan": "host"}, "c": disk if incarnation == "told" else {"plan": "resident"}},
        speeds=SPEEDS,
        rebalance_every=0,
        global_batch_size=BATCH,
        bucket_cap_mb=1 / 1024,
        elastic=Elastic(out / "steps", every_n_steps=EVERY, grace_s=GRACE_S),
    )
    signals = {("killed", "a"): {KILLED: signal.SIGKILL}, ("told", "c"): {TOLD: signal.SIGTERM}}.get((incarnation, node), {})
    torch.save(fit(out, strategy, signals, killed=incarnation == "killed"), out / f"{incarnation}-{node}.pt")
