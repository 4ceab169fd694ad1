"""Trainings that end in the middle of nowhere, and go on from their store."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_hetero.strategies import HeteroOffloadStrategy
from support.models import LitModel, Outcome, Recipe, Shape, data, once, outcome, quiet_trainer

BATCHES = 4  # of an epoch
RECIPE = Recipe(steps=12, shape=Shape(layers=3, dropout=0.1), clip=1.0, schedule="onecycle", validate=True, groups=True)


class Ends(Exception):
    """Stands for the end of the process: nothing is saved on the way out."""


class EndsAt(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise Ends


class Model(LitModel):
    """Draws random numbers where a resume could lose them, and changes weights after the step."""

    def on_train_batch_end(self, *_: Any) -> None:
        torch.rand(())
        with torch.no_grad():
            self.model.position.clamp_(-0.25, 0.25)

    def on_train_epoch_end(self) -> None:
        torch.rand(3)


def train(
    root: Path, strategy: Any, recipe: Recipe, *, stop: int | None = None, store: Path | None = None, **options: Any
) -> Outcome:
    """One fit, to the end or to step ``stop``; from the beginning or from ``store``."""
    if strategy == "auto" and stop is None and store is None:
        key = (train, recipe, *options.items())
        return once(key, partial(_train, root, strategy, recipe, **options))
    return _train(root, strategy, recipe, stop=stop, store=store, **options)


def _train(
    root: Path, strategy: Any, recipe: Recipe, *, stop: int | None = None, store: Path | None = None, **options: Any
) -> Outcome:
    limits = {"max_steps": recipe.steps, **options}
    torch.manual_seed(7)
    module = Model(recipe)
    torch.manual_seed(11)
    trainer = quiet_trainer(
        **limits, strategy=strategy, accumulate_grad_batches=recipe.accumulate, gradient_clip_val=recipe.clip,
        precision=recipe.precision, default_root_dir=root, limit_val_batches=2 if recipe.validate else 0,
        callbacks=[] if stop is None else [EndsAt(stop)],
    )  # fmt: skip
    loaders = (data(BATCHES), data(2, seed=1) if recipe.validate else None)
    return fitted(trainer, module, *loaders, store=store)


def fitted(trainer: pl.Trainer, module: LitModel, *loaders: Any, store: Path | None = None) -> Outcome:
    """The outcome of a fit, from the beginning or from ``store``. If :class:`EndsAt` ends it, the
    losses until then.
    """
    ends = any(isinstance(callback, EndsAt) for callback in trainer.callbacks)
    with pytest.raises(Ends) if ends else nullcontext():
        trainer.fit(module, *loaders, ckpt_path=None if store is None else str(store))
    return Outcome(module.losses, {}, []) if ends else outcome(trainer, module)


def after(expected: Outcome, losses: int) -> Outcome:
    """What a run leaves that went on so late that it has the last ``losses`` losses only."""
    return Outcome(expected.losses[len(expected.losses) - losses :], expected.weights, expected.state)


def offload(plan: Any, store: Path, **options: Any) -> Any:
    """A strategy that keeps its steps in ``store``: for a plan, or made by a function."""
    make = plan if callable(plan) else partial(HeteroOffloadStrategy, plan)
    return make(disk_path=store, **options)
