"""One rank of elastic runs with FSDP2.

Three ranks train until one of them is told to leave. Two go on, are killed between two committed
steps, and go on again. With ``WORLD_SIZE=2`` plain Lightning's weights of the same run, in one
process and without a stop, are saved beside theirs.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from lightning_hetero import LocalFirst
from lightning_hetero.parallel.elastic import CommittedSteps, Elastic
from lightning_hetero.strategies import HeteroParallelFsdpStrategy
from support.training import GRACE_S, RANK, WORLD, Killed, loader, lr_of, moments_of, samples, trainer, weights_of
from support.training.recovery import Net, Sharded

SAMPLES, BATCH = 42, 12  # four batches an epoch, the last of six samples
TOLD, EVERY, KILLED, STEPS = 5, 4, 9, 11


class Events(Callback):
    """Ends incarnations; notes the samples of this rank by step, and where incarnations began."""

    def __init__(self, *, stops: bool) -> None:
        self.stops = stops
        self.samples: dict[int, list[float]] = {}
        self.began: list[int] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.began.append(trainer.global_step)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.samples[trainer.global_step] = batch[0][:, 0].tolist()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if (WORLD, RANK, trainer.global_step) == (3, 1, TOLD):
            os.kill(os.getpid(), signal.SIGTERM)
        if self.stops and WORLD == 2 and trainer.global_step == KILLED and len(self.began) == 1:
            raise Killed


def fit(out: Path, events: Events, *plugins: Any, alone: bool = False) -> dict[str, Any]:
    """Trains until the end, or until a signal ends it."""
    torch.manual_seed(0 if alone or WORLD == 3 else 9)  # those who go on have other weights before they load
    strategy: Any = "auto"
    if not alone:
        strategy = HeteroParallelFsdpStrategy(
            speeds=[1.0, 2.0, 3.0][:WORLD],
            global_batch_size=BATCH,
            rebalance_every=0,
            elastic=Elastic(out, every_n_steps=EVERY, grace_s=GRACE_S),
        )
    made = trainer(out, strategy, *plugins, callbacks=[events], max_steps=STEPS)
    net = Net() if alone else Sharded()
    made.fit(net, loader(samples(SAMPLES, 8), BATCH, alone=alone))
    return {
        "weights": weights_of(net),
        "moments": moments_of(made, "exp_avg_sq"),
        "lr": lr_of(made),
        "samples": events.samples,
        "began": events.began,
        "bytes": plugins[0].bytes_read if plugins else {},
        "kept": [] if alone else CommittedSteps(out).steps(),
        "there": sorted(path.name for path in out.glob("*.ckpt")),
    }


def incarnations(out: Path, name: str) -> dict[str, Any]:
    """What this process makes of a run."""
    events = Events(stops=True)
    for _ in range(3):
        node = out / "nodes" / f"{name}-{RANK}"
        plugins = [LocalFirst(memory=node, keep=STEPS, piece_bytes=256)] if name == "tiers" else []
        try:
            return fit(out / name, events, *plugins)
        except Killed:
            pass
        except SystemExit as stop:
            return {"code": stop.code, "samples": events.samples}
    raise AssertionError("it is killed once")


def main(out: Path) -> None:
    found = {name: incarnations(out, name) for name in ("files", "tiers")}
    if WORLD == 2:
        found["plain"] = fit(out, Events(stops=False), alone=True)
    torch.save(found, out / f"world{WORLD}-rank{RANK}.pt")
