"""A callback changes how the Trainer clips gradients while a fit lasts: every step is the one of plain Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import GradClipAlgorithmType
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer
from support.strategies import least_memory
from torch import Tensor

from lightning_hetero import EmulatedDevice, HeteroOffloadStrategy
from lightning_hetero.errors import OutOfMemoryBudgetError

NORM, VALUE = GradClipAlgorithmType.NORM, GradClipAlgorithmType.VALUE
SHAPE = Shape(layers=3, dropout=0.1)


class Changes(pl.Callback):
    """Sets the Trainer's value and algorithm in the fourth step, at one of its points."""

    def __init__(self, value: float | None, algorithm: GradClipAlgorithmType | None, at: str = "begin") -> None:
        self.value, self.algorithm, self.at = value, algorithm, at

    def reached(self, trainer: pl.Trainer, point: str) -> None:
        if trainer.global_step >= 3 and point == self.at:
            trainer.gradient_clip_val, trainer.gradient_clip_algorithm = self.value, self.algorithm

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.reached(trainer, "begin")

    def on_before_backward(self, trainer: pl.Trainer, pl_module: Any, loss: Any) -> None:
        self.reached(trainer, "backward")


class Model(LitModel):
    """Tells ``changes`` when it is inside its ``training_step``."""

    changes: Changes

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.changes.reached(self.trainer, "forward")
        return loss


def fit(folder: Path, strategy: Any, changes: Changes, options: dict[str, Any]) -> Outcome:
    torch.manual_seed(7)
    module = Model(Recipe(shape=SHAPE))
    module.changes = changes
    torch.manual_seed(11)
    trainer = quiet_trainer(
        strategy=strategy, max_steps=7, limit_val_batches=0, default_root_dir=folder, callbacks=[changes], **options
    )  # fmt: skip
    trainer.fit(module, data())
    return outcome(trainer, module)


PLANS = pytest.mark.parametrize(("plan", "on_device"), [("host", False), ("disk", False), ("host", True)])
CHANGES = pytest.mark.parametrize(
    ("options", "value", "algorithm"),
    [
        ({}, 0.05, None),
        ({}, 1e-3, VALUE),
        ({"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}, 1e-4, VALUE),
        ({"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}, 0.05, NORM),
        ({"gradient_clip_val": 0.5}, 1e-3, VALUE),
        ({"gradient_clip_val": 0.05}, None, None),
        ({"accumulate_grad_batches": 2}, 0.05, None),
    ],
    ids=["none-norm", "none-value", "value-less", "value-norm", "norm-value", "norm-none", "accumulated"],
)


@PLANS
@CHANGES
def test_each_step_clips_as_the_trainer_says_when_its_batch_begins(
    options: dict[str, Any], value: float | None, algorithm: Any, plan: str, on_device: bool, tmp_path: Path
) -> None:
    expected = fit(tmp_path, "auto", Changes(value, algorithm), options)
    device = EmulatedDevice("4MiB") if on_device else None
    assert_same(fit(tmp_path, HeteroOffloadStrategy(plan, device=device), Changes(value, algorithm), options), expected)


@PLANS
@CHANGES
@pytest.mark.parametrize("at", ["forward", "backward"])
def test_clipping_that_changes_after_a_batch_began_holds_for_its_step(
    at: str, options: dict[str, Any], value: float | None, algorithm: Any, plan: str, on_device: bool, tmp_path: Path
) -> None:
    expected = fit(tmp_path, "auto", Changes(value, algorithm, at), options)
    device = EmulatedDevice("4MiB") if on_device else None
    got = fit(tmp_path, HeteroOffloadStrategy(plan, device=device), Changes(value, algorithm, at), options)
    assert_same(got, expected)


def test_clipping_that_changes_after_a_batch_began_is_refused_where_not_all_gradients_fit(tmp_path: Path) -> None:
    def train(strategy: Any) -> Outcome:
        return fit(tmp_path, strategy, Changes(0.05, None, "forward"), {})

    with pytest.raises(OutOfMemoryBudgetError, match=r"after the batch began.*before the batch, as in on_train_batch_start"):
        train(HeteroOffloadStrategy("disk", host_memory=least_memory(train)))
