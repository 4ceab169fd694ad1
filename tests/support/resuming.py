"""Trainings that end in the middle of nowhere, and go on from their store."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

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


def fit(
    root: Path, strategy: Any, recipe: Recipe, module_class: type[LitModel], *callbacks: pl.Callback, stop: int | None = None,
    store: Path | None = None, device: str = "cpu", content: dict[str, Tensor] | None = None, batches: int = BATCHES, **limits: Any,
) -> Outcome:  # fmt: skip
    """One fit, to the end or to step ``stop``; from the beginning or from ``store``.

    The model is made on ``device``; plain Lightning gets ``content``, and trains :func:`once` what
    nothing but the recipe and its class decides.
    """

    def train() -> Outcome:
        torch.manual_seed(7)
        with torch.device(device):
            module = module_class(recipe)
        if content is not None:
            module.model.load_state_dict(content)
        torch.manual_seed(11)
        trainer = quiet_trainer(
            **{"max_steps": recipe.steps, **limits}, strategy=strategy, accumulate_grad_batches=recipe.accumulate,
            gradient_clip_val=recipe.clip, precision=recipe.precision, default_root_dir=root,
            limit_val_batches=2 if recipe.validate else 0, callbacks=[*callbacks, *([] if stop is None else [EndsAt(stop)])],
        )  # fmt: skip
        loaders = (data(batches), data(2, seed=1) if recipe.validate else None)
        return fitted(trainer, module, *loaders, store=store)

    if strategy == "auto" and (callbacks, stop, store, device, content) == ((), None, None, "cpu", None):
        return once((fit, recipe, module_class, batches, *limits.items()), train)
    return train()


def train(root: Path, strategy: Any, recipe: Recipe, **options: Any) -> Outcome:
    """:func:`fit` of the model above."""
    return fit(root, strategy, recipe, Model, **options)


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
