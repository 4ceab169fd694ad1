"""Ranks that share a model, of which one has fewer batches or stops alone: a script.

The ranks are forked from one process that has imported everything.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero.strategies import HeteroOffloadStrategy
from support import shared_model
from support.shared_stores import PATIENCE_S, run

MACHINE = Path(__file__).with_name("hardware.json")
LONE = 1  # this rank parts from the others
FEWER = ("training", "validation", "test", "prediction")  # batches
LIGHTNING, LOADERS = "prediction sampled", "test loaders"  # Lightning's sampler; two dataloaders with the same sum
DUE, TIMED = "training due", "training timed"  # validations: after a fraction of unequal numbers, or by each rank's clock
OVER = ("on_train_batch_end epochs", "on_train_batch_end steps")  # it sets should_stop where all end: after these
RAISES, MESSAGE = "raises", "it has had enough."  # that rank, as the others compare
HANGS, WAITS_S = "hangs", 1  # that rank does nothing, and for how long the others wait
STOPS = ("on_train_batch_end", "on_validation_end")  # hooks in which it sets should_stop


class Stops(pl.Callback):
    """Stops training on one rank, or on all, at a hook."""

    def __init__(self, hook: str, *, alone: bool, after: int) -> None:
        def stop(trainer: pl.Trainer, *_: Any) -> None:
            is_time = trainer.global_step >= after and not trainer.sanity_checking
            if is_time and (shared_model.RANK == LONE or not alone):
                trainer.should_stop = True

        setattr(self, hook, stop)


class Model(shared_model.Model):
    """Its metrics are means over the ranks, and the batches that it has seen are counted."""

    count = 0
    out: Path

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.count += 1
        if HANGS in self.kind and shared_model.RANK == LONE:
            ends = time.monotonic() + PATIENCE_S
            while not (self.out / "end-0").exists() and time.monotonic() < ends:
                time.sleep(0.01)
        loss = super().training_step(batch, index)
        self.log("trained", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if RAISES in self.kind and shared_model.RANK == LONE:
            raise RuntimeError(MESSAGE)

    def test_step(self, batch: Tensor, index: int, dataloader_idx: int = 0) -> None:
        self.count += 1
        self.log("tested", self.loss(batch, index), sync_dist=True)

    def predict_step(self, batch: Tensor, index: int) -> None:
        self.count += 1
        self.loss(batch, index)


def batches(*, lacks: bool, most: int = shared_model.STEPS) -> DataLoader[Tensor]:
    """A rank's batches; one fewer on the one that ``lacks`` some."""
    number = most - (lacks and shared_model.RANK == LONE)
    return DataLoader(torch.randint(0, 13, (shared_model.BATCH * number, 7)), shared_model.BATCH)


def rank_of(case: str, out: Path, rank: int) -> None:
    """Writes down how the rank has ended."""
    torch.manual_seed(5)
    model, (first, *words) = Model(case), case.split()
    model.out = out
    steps = 2 if "steps" in words else shared_model.STEPS
    hooks = [Stops(first, alone="all" not in words, after=steps if case in OVER else 0)] if first in STOPS else []
    flags = {"max_epochs": 1 if "epochs" in words else 2, "max_steps": steps if "steps" in words else -1}
    every = {DUE: 0.5, TIMED: timedelta(minutes=15)}.get(case)
    options = {"hardware_profile": MACHINE} if "auto" in words else {}
    waits = timedelta(seconds=WAITS_S if case == HANGS else PATIENCE_S)
    plan = "auto" if "auto" in words else "host"
    strategy = HeteroOffloadStrategy(plan, block_cls="Layer", update_threads=1, timeout=waits, **options)
    trainer = shared_model.trainer(
        out, strategy, callbacks=hooks, use_distributed_sampler=case == LIGHTNING, val_check_interval=every, **flags
    )
    train, evaluate = batches(lacks=first == "training"), batches(lacks=first in FEWER)
    text = "has no error"
    try:
        if case == LOADERS:
            trainer.test(model, [batches(lacks=True, most=3), batches(lacks=False, most=1 + rank)], verbose=False)
        elif case == LIGHTNING:
            trainer.predict(model, DataLoader(torch.randint(0, 13, (9, 7)), 4))
        elif first == "test":
            trainer.test(model, evaluate, verbose=False)
        elif first == "prediction":
            trainer.predict(model, evaluate)
        else:
            trainer.fit(model, train, *[evaluate] * (first in ("validation", "on_validation_end") or case in (DUE, TIMED)))
    except Exception as error:
        text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    (out / f"end-{rank}").write_text(f"{model.count} {text}")


def main(root: Path, world: int) -> None:
    """Prints how the ranks have ended in each case."""
    report = {}
    of_two = [*FEWER, LIGHTNING, LOADERS, DUE, TIMED, *OVER, RAISES, HANGS, *STOPS, "training auto", "on_validation_end all"]
    cases = of_two if world == 2 else ["training", "on_train_batch_end"]
    for case in cases:
        out = root / case.replace(" ", "-")
        out.mkdir()
        assert run(world, partial(rank_of, case, out)) == [0] * world
        report[case] = [(out / f"end-{rank}").read_text() for rank in range(world)]
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
