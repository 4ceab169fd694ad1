"""Code changes what an update has read or reads: before the step's verdict, or behind it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import LitModel, Recipe, Shape, assert_same, data, outcome, quiet_trainer
from support.plain_loops import Run, adamw, batches, plans
from support.plain_loops import outcome as outcome_of
from torch import Tensor, nn

import lightning_hetero
from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.errors import UnsupportedError

RECIPE = Recipe(shape=Shape(layers=3))


def rate(optimizer: torch.optim.Optimizer, model: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def rate_in_place(optimizer: torch.optim.Optimizer, model: Any) -> None:
    optimizer.param_groups[0]["lr"].mul_(0.5)


def betas_in_place(optimizer: torch.optim.Optimizer, model: Any) -> None:
    optimizer.param_groups[0]["betas"][0] = 0.5


def state_in_place(optimizer: torch.optim.Optimizer, model: Any) -> None:
    optimizer.state[model.head.weight]["exp_avg"].mul_(0.5)


def other_state(optimizer: torch.optim.Optimizer, model: Any) -> None:
    optimizer.state[model.head.weight]["exp_avg"] = torch.zeros_like(model.head.weight)


def no_state(optimizer: torch.optim.Optimizer, model: Any) -> None:
    optimizer.state.clear()


def counts(optimizer: torch.optim.Optimizer, model: Any) -> None:
    optimizer.state[model.head.weight]["step"].fill_(0)


def loaded(optimizer: torch.optim.Optimizer, model: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def weights(optimizer: torch.optim.Optimizer, model: Any) -> None:
    with torch.no_grad():
        model.head.weight.mul_(0.9)


def step(run: Run, change: Callable[[torch.optim.Optimizer, Any], None]) -> None:
    change(run.optimizer, run.model)
    run.optimizer.step()


@pytest.mark.parametrize("change", [rate, state_in_place, other_state, no_state, counts, loaded, weights])
@pytest.mark.parametrize("where", ["host", "disk", "device"])
def test_overlapping_backward_notices_what_changes_before_the_step(
    change: Callable[[torch.optim.Optimizer, Any], None], where: str, tmp_path: Path
) -> None:
    def loop(run: Run) -> None:
        for number, batch in enumerate(batches(3)):
            run.optimizer.zero_grad()
            run.backward(batch)
            if number == 2:
                with pytest.raises(UnsupportedError, match=r"begin of backward and optimizer\.step.*overlap=\"forward\""):
                    step(run, change)
                raise ZeroDivisionError  # the step is lost
            run.optimizer.step()

    options = plans(tmp_path)[where]
    with pytest.raises(ZeroDivisionError):
        outcome_of(loop, adamw, lambda m, o: lightning_hetero.offload(m, o, overlap="backward", **options), Shape())


@pytest.mark.parametrize("change", [rate_in_place, betas_in_place])
def test_options_that_change_in_place_are_noticed(change: Callable[[torch.optim.Optimizer, Any], None], tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=True)
    optimizer.param_groups[0]["betas"] = [0.9, 0.99]
    with lightning_hetero.offload(model, optimizer, overlap="backward", **plans(tmp_path)["disk"]):
        for _ in range(2):
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
        change(optimizer, model)
        with pytest.raises(UnsupportedError, match=r"begin of backward and optimizer\.step.*overlap=\"forward\""):
            optimizer.step()


class Late(LitModel):
    """Most of its backward is over when it changes something."""

    change: Callable[[torch.optim.Optimizer, Any], None]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        def watch(module: Any, args: Any, output: Tensor) -> None:
            output.register_hook(lambda _: self.change(self.trainer.optimizers[0], self.model))

        hook = self.model.blocks[0].register_forward_hook(watch)
        loss = super().training_step(batch, batch_idx)
        hook.remove()
        return loss


def fit(
    folder: Path, strategy: Any, change: Callable[[torch.optim.Optimizer, Any], None], recipe: Recipe = RECIPE, **options: Any
) -> Any:
    torch.manual_seed(7)
    module = Late(recipe)
    module.change = change
    trainer = quiet_trainer(strategy=strategy, max_steps=3, limit_val_batches=0, default_root_dir=folder, **options)
    trainer.fit(module, data())
    return outcome(trainer, module)


@pytest.mark.parametrize("change", [rate, weights])
@pytest.mark.parametrize("where", ["host", "disk", "device"])
def test_a_tensor_hook_that_comes_too_late_is_noticed(
    change: Callable[[torch.optim.Optimizer, Any], None], where: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=r"between the begin of backward.*on_before_optimizer_step"):
        fit(tmp_path, HeteroOffloadStrategy(**plans(tmp_path)[where]), change)


@pytest.mark.parametrize(("change", "lr"), [(rate, 3e-3), (rate_in_place, torch.tensor(3e-3))], ids=["number", "tensor"])
def test_updates_that_may_be_taken_back_run_again_with_the_new_rate(change: Any, lr: Any, tmp_path: Path) -> None:
    """So do those that wait for the step anyway."""
    recipe = replace(RECIPE, optimizer=lambda groups: torch.optim.AdamW(groups, lr=deepcopy(lr), fused=True))
    expected = fit(tmp_path, "auto", change, recipe, gradient_clip_val=1e6)
    found = fit(tmp_path, HeteroOffloadStrategy(plan="disk", disk_path=tmp_path / "store"), change, recipe, gradient_clip_val=1e6)
    assert_same(expected, found)


class Zeroing(LitModel):
    """It writes gradients that updates of the step read."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.zero_grad(set_to_none=False)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("plan", ["host", "disk"])
def test_gradients_that_are_written_after_the_step_are_noticed(plan: str, steps: int, tmp_path: Path) -> None:
    module = Zeroing(RECIPE)
    options: dict[str, Any] = {"max_steps": steps, "gradient_clip_val": 1e6, "limit_val_batches": 0}
    trainer = quiet_trainer(strategy=HeteroOffloadStrategy(plan), default_root_dir=tmp_path, **options)
    with pytest.raises(UnsupportedError, match=r"written in place after optimizer\.step.*on_before_optimizer_step"):
        trainer.fit(module, data())
    assert all(param.isfinite().all() for param in module.parameters())  # the model was given back
