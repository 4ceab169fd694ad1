"""Ranks that share a model, one of which fails alone and lives on: a script.

The ranks are forked from one process that has imported everything. The one that has failed lives
until the other has ended its fit.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_hetero.strategies import HeteroOffloadStrategy
from support import shared_model
from support.shared_stores import run

LONE, AT, PATIENCE_S = 1, 1, 10.0  # which rank fails, and in which batch
NODES = "on 2 nodes"  # the first rank fails, in whose process the ranks have found each other
HOOKS = ("on_train_batch_start", "on_before_zero_grad")
ENDS = "on_validation_batch_end"  # the process ends, too: the others wait in one of Lightning's collectives


class OnlyOne(Exception):
    """What a rank fails with."""


class Model(shared_model.Model):
    """Fails on one rank, in one of its methods."""

    fails = ""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == AT:
            self._fail("training_step")
        return super().training_step(batch, index)

    def optimizer_step(self, epoch: int, index: int, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(epoch, index, *args, **kwargs)
        if index == AT:
            self._fail("optimizer_step")  # when the collectives of the step are over

    def _fail(self, method: str) -> None:
        if (self.fails == method and shared_model.RANK == LONE) or (self.fails == NODES and shared_model.RANK == 0):
            raise OnlyOne("a reason of its own")


class Fails(pl.Callback):
    """Fails on one rank, at a hook."""

    def __init__(self, hook: str) -> None:
        def fail(trainer: pl.Trainer, module: Any, *of: Any) -> None:
            last = (trainer.global_step, of[-1] + 1) == (shared_model.STEPS, shared_model.STEPS) if hook == ENDS else False
            if (last or (trainer.global_step == AT and hook != ENDS)) and shared_model.RANK == LONE:
                raise OnlyOne("a reason of its own")

        setattr(self, hook, fail)


def rank_of(case: str, out: Path, rank: int) -> None:
    """Writes down how the rank's fit has ended, and lives until the other's has ended."""
    torch.manual_seed(5)
    model = Model()
    model.fails = case
    hooks = [Fails(case)] if case in (*HOOKS, ENDS) else []
    plan = "auto" if case == "optimizer_step" else "host"  # a batch that is measured ends with a decision of all ranks
    strategy = HeteroOffloadStrategy(plan, block_cls="Layer", update_threads=1)
    text = "has no error"
    try:
        shared_model.trainer(out, strategy, callbacks=hooks, num_sanity_val_steps=0).fit(model, *[shared_model.batches()] * 2)
    except Exception as error:
        text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    file = out / f"end-{rank}"
    file.with_suffix(".part").write_text(text)
    file.with_suffix(".part").rename(file)
    if case == ENDS:
        return
    ends = time.monotonic() + PATIENCE_S
    while not all((out / f"end-{other}").exists() for other in range(shared_model.WORLD)):
        assert time.monotonic() < ends, f"{case}: the other rank waits"
        time.sleep(0.01)


def main(root: Path) -> None:
    """Prints how the ranks have ended in each case."""
    report = {}
    for case in ("training_step", "optimizer_step", *HOOKS, ENDS, NODES):
        nodes, out = 1 + (case == NODES), root / case
        out.mkdir()
        assert not any(run(2 * nodes, partial(rank_of, case, out), nodes=nodes))
        report[case] = [(out / f"end-{rank}").read_text() for rank in range(2 * nodes)]
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
