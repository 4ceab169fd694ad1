"""A callback changes how the Trainer clips gradients while a fit lasts: every step is the one of plain Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import GradClipAlgorithmType
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer

from lightning_hetero import EmulatedDevice, HeteroOffloadStrategy

NORM, VALUE = GradClipAlgorithmType.NORM, GradClipAlgorithmType.VALUE
SHAPE = Shape(layers=3, dropout=0.1)


class Changes(pl.Callback):
    """Sets the Trainer's value and algorithm before the fourth batch."""

    def __init__(self, value: float | None, algorithm: GradClipAlgorithmType | None) -> None:
        self.value, self.algorithm = value, algorithm

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= 3:
            trainer.gradient_clip_val, trainer.gradient_clip_algorithm = self.value, self.algorithm


def fit(folder: Path, strategy: Any, changes: pl.Callback, options: dict[str, Any]) -> Outcome:
    torch.manual_seed(7)
    module = LitModel(Recipe(shape=SHAPE))
    torch.manual_seed(11)
    trainer = quiet_trainer(
        strategy=strategy, max_steps=7, limit_val_batches=0, default_root_dir=folder, callbacks=[changes], **options
    )  # fmt: skip
    trainer.fit(module, data())
    return outcome(trainer, module)


@pytest.mark.parametrize(("plan", "on_device"), [("host", False), ("disk", False), ("host", True)])
@pytest.mark.parametrize(
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
def test_each_step_clips_as_the_trainer_says_when_its_batch_begins(
    options: dict[str, Any], value: float | None, algorithm: Any, plan: str, on_device: bool, tmp_path: Path
) -> None:
    expected = fit(tmp_path, "auto", Changes(value, algorithm), options)
    device = EmulatedDevice("4MiB") if on_device else None
    assert_same(fit(tmp_path, HeteroOffloadStrategy(plan, device=device), Changes(value, algorithm), options), expected)
