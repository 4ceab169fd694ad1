"""Code may change the optimizer's state while a fit lasts: in place, or by other tensors; and give
the optimizer another ``step``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer, run
from support.strategies import ON_DEVICE, WHERE, make_strategy, on_device, rules

from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.strategies import HeteroOffloadStrategy

RECIPE = Recipe(shape=Shape(dropout=0.1), steps=4)
Change = Callable[[dict[str, Any]], None]


class AfterBatches(pl.Callback):
    """Changes the state of each parameter after the second batch."""

    def __init__(self, change: Change) -> None:
        self.change = change

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            for state in trainer.optimizers[0].state.values():
                self.change(state)


def scale(state: dict[str, Any]) -> None:
    state["exp_avg"].mul_(0.5)
    if state["exp_avg"].dim() > 1:
        state["step"].add_(3)  # those of a part lie beside each other, and differ from now on


def begin_anew(state: dict[str, Any]) -> None:
    state["exp_avg"] = torch.zeros_like(state["exp_avg"])
    state["exp_avg_sq"] = state["exp_avg_sq"] * 0.25
    state["step"] = torch.tensor(0.0)


def replace_one(state: dict[str, Any]) -> None:
    if state["exp_avg"].dim() > 1:
        state["exp_avg"] = state["exp_avg"].detach().cpu().flip(0)


def move_count(state: dict[str, Any]) -> None:
    state["step"].data = torch.tensor(1.0)


def strategy_of(where: str, train: Callable[[Any], Outcome]) -> Any:
    return on_device(ON_DEVICE[where]) if where in ON_DEVICE else make_strategy(where, train)


@WHERE
@pytest.mark.parametrize("change", [scale, begin_anew, replace_one, move_count])
def test_state_that_a_callback_changes_counts(change: Change, where: str, tmp_path: Path) -> None:
    def train(strategy: Any) -> Outcome:
        return run(RECIPE, strategy, tmp_path, callbacks=[AfterBatches(change)])

    assert_same(train(strategy_of(where, train)), train("auto"))


def test_state_on_the_host_is_that_after_the_update_from_the_device(tmp_path: Path) -> None:
    found: list[torch.Tensor] = []

    class Reads(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            found.extend(state["exp_avg"].clone().cpu() for state in trainer.optimizers[0].state.values())

    run(RECIPE, "auto", tmp_path, callbacks=[Reads()])
    expected = found[:]
    found.clear()
    run(RECIPE, on_device(rules()), tmp_path, callbacks=[Reads()])
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("plan", ["host", "disk"])
def test_a_kept_step_has_the_state_that_its_last_hook_has_set(plan: str, tmp_path: Path) -> None:
    expected = run(RECIPE, "auto", tmp_path, callbacks=[AfterBatches(begin_anew)])
    store = tmp_path / "store"

    def fit(callbacks: list[pl.Callback], steps: int, ckpt_path: Path | None = None) -> Outcome:
        torch.manual_seed(7)
        module = LitModel(RECIPE)
        torch.manual_seed(11)
        strategy = HeteroOffloadStrategy(plan, disk_path=str(store))
        trainer = quiet_trainer(strategy=strategy, max_steps=steps, default_root_dir=tmp_path, callbacks=callbacks)
        trainer.fit(module, data(), ckpt_path=ckpt_path)
        return outcome(trainer, module)

    fit([AfterBatches(begin_anew)], 2)
    resumed = fit([], RECIPE.steps, store)
    assert_same(resumed, replace(expected, losses=expected.losses[2:]))


def test_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        state["exp_avg"] = torch.zeros(1, 2, 3)

    with pytest.raises(ConfigError, match=r"optimizer state 'exp_avg' of 'model..*': got \(1, 2, 3\), expected shape"):
        run(RECIPE, HeteroOffloadStrategy("host"), tmp_path, callbacks=[AfterBatches(change)])


class OwnStep(LitModel):
    """Every other step is left out by a function in the place of the optimizer's ``step``."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        step, calls = optimizer.step, iter(range(100))

        def every_other(closure: Any = None) -> Any:
            return closure() if next(calls) % 2 else step(closure)

        optimizer.step = every_other
        return optimizer


def test_a_step_of_its_own_is_called(tmp_path: Path) -> None:
    got = run(RECIPE, HeteroOffloadStrategy("host"), tmp_path, module_class=OwnStep)
    assert_same(got, run(RECIPE, "auto", tmp_path, module_class=OwnStep))


@pytest.mark.parametrize(("plan", "precision"), [("disk", "32-true"), ("host", "bf16-true")])
def test_a_step_of_its_own_that_could_not_be_called_is_refused(plan: str, precision: Any, tmp_path: Path) -> None:
    recipe = Recipe(precision=precision)
    with pytest.raises(UnsupportedError, match=r"AdamW has been given another step\(\).*hooks"):
        run(recipe, HeteroOffloadStrategy(plan), tmp_path, module_class=OwnStep)
