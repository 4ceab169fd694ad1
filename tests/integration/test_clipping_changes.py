"""A callback changes how the Trainer clips gradients while a fit lasts: every step is the one of
plain Lightning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer
from support.strategies import least_memory
from support.verdicts import counted_verdicts, divided
from torch import Tensor

from lightning_hetero import EmulatedDevice, HeteroOffloadStrategy
from lightning_hetero.errors import OutOfMemoryBudgetError, UnsupportedError

NORM, VALUE = GradClipAlgorithmType.NORM, GradClipAlgorithmType.VALUE
RECIPE = Recipe(shape=Shape(layers=3, dropout=0.1))


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
    """Tells ``changes`` when it is inside its ``training_step``, and when most of a backward is
    over.
    """

    changes: Changes

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        def watch(module: Any, args: Any, output: Tensor) -> None:
            output.register_hook(lambda _: self.changes.reached(self.trainer, "tensor hook"))

        hook = self.model.blocks[0].register_forward_hook(watch)
        loss = super().training_step(batch, batch_idx)
        hook.remove()
        self.changes.reached(self.trainer, "forward")
        return loss


def fit(folder: Path, strategy: Any, changes: Changes, options: dict[str, Any], recipe: Recipe = RECIPE) -> Outcome:
    torch.manual_seed(7)
    module = Model(recipe)
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


@PLANS
@CHANGES
def test_clipping_that_changes_in_backward_holds_for_its_step_or_is_refused_by_name(
    options: dict[str, Any], value: float | None, algorithm: Any, plan: str, on_device: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Updates that have begun in backward cannot be taken back, unless they were only tried."""
    changes = Changes(value, algorithm, "tensor hook")
    expected = fit(tmp_path, "auto", changes, options)
    strategy = HeteroOffloadStrategy(plan, device=EmulatedDevice("4MiB") if on_device else None)
    verdicts = counted_verdicts(monkeypatch)
    waits = "gradient_clip_val" in options and "gradient_clip_algorithm" not in options
    if waits or "accumulate_grad_batches" in options:  # it changes in a batch that does not end in a step
        assert_same(fit(tmp_path, strategy, changes, options), expected)
        assert bool(verdicts["again"]) == (plan == "disk")
    else:
        with pytest.raises(UnsupportedError, match=r"has changed during backward.*of two steps\. Change it before backward"):
            fit(tmp_path, strategy, changes, options)


@pytest.mark.parametrize("plan", ["host", "disk"])
def test_scaled_gradients_are_clipped_as_a_hook_in_backward_says(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = counted_verdicts(monkeypatch)

    def train(strategy: Any) -> Outcome:
        plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
        recipe = Recipe(shape=RECIPE.shape, optimizer=divided)
        return fit(tmp_path, strategy, Changes(1e-3, VALUE, "tensor hook"), {"plugins": [plugin]}, recipe)

    assert_same(train(HeteroOffloadStrategy(plan)), train("auto"))
    assert bool(verdicts["again"]) == (plan == "disk")


def test_clipping_that_changes_after_a_batch_began_is_refused_where_not_all_gradients_fit(tmp_path: Path) -> None:
    def train(strategy: Any) -> Outcome:
        return fit(tmp_path, strategy, Changes(0.05, None, "forward"), {})

    with pytest.raises(OutOfMemoryBudgetError, match=r"after the batch began.*before the batch, as in on_train_batch_start"):
        train(HeteroOffloadStrategy("disk", host_memory=least_memory(train)))
