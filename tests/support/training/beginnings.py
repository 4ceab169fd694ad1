"""Elastic runs that begin at an ordinary checkpoint, are killed, and go on with the same
``ckpt_path``.

Plain Lightning trains on from the same checkpoint without a stop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from lightning_hetero import LocalFirst
from lightning_hetero.parallel.elastic import CommittedSteps, Elastic
from lightning_hetero.strategies import HeteroParallelFsdpStrategy, HeteroParallelStrategy
from support.training import Killed, loader, moments_of, samples, single_rank, trainer, weights_of
from support.training.recovery import Net, Sharded

SAMPLES, BATCH = 42, 6  # seven batches an epoch, which are four steps
BEGIN, KILLED, STEPS = 4, 7, 9
RUNS = ("files", "tiers", "shards")


class Events(Callback):
    """Dies in step ``dies``, and notes the samples of each step and where it began."""

    def __init__(self, dies: int | None = None) -> None:
        self.dies = dies
        self.began: int | None = None
        self.samples: list[tuple[int, list[float]]] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.began = trainer.global_step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.samples.append((trainer.global_step, batch[0][:, 0].tolist()))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_step == self.dies:
            raise Killed


def strategy(name: str, steps: Path) -> Any:
    """The strategy of a run."""
    made = HeteroParallelFsdpStrategy if name == "shards" else HeteroParallelStrategy
    return made(elastic=Elastic(steps, keep=99))


def fit(out: Path, name: str, *, to: int, dies: int | None = None, begin: Path | None = None, seed: int = 0) -> dict[str, Any]:
    """Trains to a step; ``name`` is ``"plain"`` or a run's."""
    torch.manual_seed(seed)
    plain, events, steps = name == "plain", Events(dies), out / name / "steps"
    plugins = [LocalFirst(disk=out / "local")] if name == "tiers" else []
    made = trainer(
        out, "auto" if plain else strategy(name, steps), *plugins, callbacks=[events], max_steps=to, accumulate_grad_batches=2
    )
    net = Sharded() if name == "shards" else Net()
    try:
        made.fit(net, loader(samples(SAMPLES, 8), BATCH, alone=plain), ckpt_path=None if begin is None else str(begin))
    except Killed:
        assert dies is not None
    else:
        assert dies is None
        if plain and begin is None:
            made.save_checkpoint(out / "begin.ckpt")
    return {
        "weights": weights_of(net),
        "moments": moments_of(made, "exp_avg_sq") if dies is None else None,
        "began": events.began,
        "samples": events.samples,
        "committed": CommittedSteps(steps).steps(),
    }


def main(out: Path) -> None:
    single_rank()
    fit(out, "plain", to=BEGIN)
    begin = out / "begin.ckpt"
    found: dict[str, Any] = {"plain": fit(out, "plain", to=STEPS, begin=begin)}
    for name in RUNS:
        first = fit(out, name, to=STEPS, dies=KILLED, begin=begin, seed=1)
        if name == "files":
            begin.rename(out / "moved.ckpt")  # a restart does not need it
        second = fit(out, name, to=STEPS, begin=begin, seed=2)
        if name == "files":
            (out / "moved.ckpt").rename(begin)
        found[name] = [first, second]
    torch.save(found, out / "beginnings.pt")
