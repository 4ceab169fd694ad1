"""One rank that is stopped again and again, and goes on each time, all in this process.

The result of plain Lightning without a stop is saved beside it, and what the runs of
:mod:`support.training.restarts` see.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero.parallel.elastic import CommittedSteps, Elastic
from lightning_hetero.strategies import HeteroParallelStrategy, LocalFirst
from support.training import GRACE_S, Killed, Regression, loader, lr_of, moments_of, restarts, samples, single_rank, trainer

SAMPLES, BATCH, EPOCHS = 37, 4, 3  # ten batches an epoch, the last of one sample
KILLED, TOLD = {2, 7, 14}, {4, 5, 11}  # steps in which an incarnation dies, or is told to leave; 4 is the last of an epoch


class Net(Regression, pl.LightningModule):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.body(batch[0]), batch[1]))


class Events(Callback):
    """Ends incarnations, and notes what the run went through; a step that is done again replaces
    its notes.
    """

    def __init__(self, notes: dict[Any, Any], stops: bool) -> None:
        self.notes, self.stops = notes, stops

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        step = trainer.global_step
        if self.stops and step in KILLED and ("killed", step) not in self.notes:
            self.notes["killed", step] = True
            raise Killed
        if self.stops and step in TOLD and ("told", step) not in self.notes:
            self.notes["told", step] = True
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.notes["batch", trainer.current_epoch, batch_idx] = (batch[0].clone(), outputs["loss"].detach(), trainer.global_step)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.notes["val", trainer.current_epoch, trainer.global_step] = trainer.callback_metrics["val_loss"].clone()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.notes["epoch", trainer.current_epoch] = trainer.global_step


def fit(out: Path, notes: dict[Any, Any], strategy: Any, *further: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    plain = strategy == "auto"
    dataset = samples(SAMPLES, 3, dtype=torch.float32)
    net = Net()
    events = Events(notes, stops=not plain)
    limits = {"max_epochs": EPOCHS, "accumulate_grad_batches": 2, "val_check_interval": 0.5}
    made = trainer(out, strategy, *further, callbacks=[events], **limits)
    made.fit(net, loader(dataset, BATCH, alone=plain), DataLoader(dataset, batch_size=8))
    return {"weights": net.state_dict(), "state": moments_of(made, "exp_avg"), "lr": lr_of(made), "notes": notes}


def main(out: Path) -> None:
    single_rank()
    found = {name: stopped(out / name, name) for name in ("files", "tiers")}
    restarted = {name: restarts.restarts(out / name, options) for name, options in restarts.RUNS.items()}
    torch.save({**found, "plain": fit(out, {}, "auto"), "restarts": restarted}, out / "elastic.pt")


def stopped(out: Path, name: str) -> dict[str, Any]:
    """A run that goes on until it is through."""
    before = signal.getsignal(signal.SIGTERM)
    notes: dict[Any, Any] = {}
    codes, result, signal_restored = [], None, True
    for _ in range(20):
        plugins = [LocalFirst(disk=out / "local")] if name == "tiers" else []
        try:
            result = fit(out, notes, HeteroParallelStrategy(elastic=Elastic(out / "steps", keep=3, grace_s=GRACE_S)), *plugins)
        except Killed:
            codes.append(-9)
        except SystemExit as stop:
            codes.append(int(str(stop.code)))
        signal_restored &= signal.getsignal(signal.SIGTERM) == before
        if result is not None:
            break
    return {
        "result": result,
        "codes": codes,
        "signal_restored": signal_restored,
        "kept": CommittedSteps(out / "steps").steps(),
        "files": sorted(p.name for p in (out / "steps").iterdir()),
    }
