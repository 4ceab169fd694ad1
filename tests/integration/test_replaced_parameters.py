"""Code that puts another parameter in the place of one, alone or with its module: refused by name
before a batch trains with it, and before a step is kept without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from support.models import LitModel, Recipe, Shape, assert_same, data, quiet_trainer, run
from torch import nn

from lightning_hetero import BlockPlan, EmulatedDevice, Plan, Tier
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.strategies import HeteroOffloadStrategy

RECIPE = Recipe(shape=Shape(frozen=(1,), counting=False), steps=4)
NAME = "model.blocks.1.up.weight"
TIGHT = Plan(name="tight", blocks=(BlockPlan(name="*", weights=Tier.DISK, state=Tier.DISK),), host_cache_bytes=1)
PLANS = pytest.mark.parametrize("plan", ["host", "disk", "device"])
HOOKS = ["on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end"]


def strategy(plan: str, **options: Any) -> Any:
    if plan == "device":
        return HeteroOffloadStrategy("disk", device=EmulatedDevice(memory="8MiB"), **options)
    return HeteroOffloadStrategy({"tight": TIGHT}.get(plan, plan), **options)


def doubled(weight: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(weight.detach().clone() * 2, requires_grad=weight.requires_grad)


def replaces(hook: str, block: int = 1, change: Callable[[nn.Parameter], nn.Parameter] = doubled) -> pl.Callback:
    """In the second batch."""

    def replace(trainer: pl.Trainer, module: LitModel, *_: object) -> None:
        layer = module.model.blocks[block].up
        if trainer.global_step == (2 if hook == "on_train_batch_end" else 1):
            with torch.no_grad():
                layer.weight = change(layer.weight)

    return LambdaCallback(**{hook: replace})


@PLANS
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("block", [0, 1], ids=["trained", "frozen"])
def test_another_parameter_is_refused_by_name(plan: str, hook: str, block: int, tmp_path: Path) -> None:
    expected = run(RECIPE, "auto", tmp_path).losses
    found: list[LitModel] = []
    with pytest.raises(UnsupportedError, match=rf"'model\.blocks\.{block}\.up\.weight' has been replaced.*weight\.data = values"):
        run(RECIPE, strategy(plan), tmp_path, prepare=found.append, callbacks=[replaces(hook, block)])
    assert found[0].losses == expected[: 1 if hook == "on_train_batch_start" else 2]


def swaps(parent: str, key: str, make: Callable[[nn.Module], nn.Module], hook: str = HOOKS[0]) -> pl.Callback:
    """Another module in the second batch."""

    def swap(trainer: pl.Trainer, module: LitModel, *_: object) -> None:
        if trainer.global_step == (2 if hook == "on_train_batch_end" else 1):
            held = module.get_submodule(parent)
            setattr(held, key, make(held.get_submodule(key)))

    return LambdaCallback(**{hook: swap})


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x)


class Adapted(Wrapped):
    """As an adapter that is injected: the module that it was, and parameters of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Any) -> Any:
        return self.inner(x) * self.scale


MODULES: dict[str, tuple[str, str, Callable[[nn.Module], nn.Module], str]] = {
    "head": ("model", "head", lambda old: nn.Linear(24, 37, bias=False), r"'model\.head'.*another Linear, whose 'weight'"),
    "block": ("model.blocks", "1", deepcopy, r"'model\.blocks\.1'.*another MlpBlock, whose 'norm\.weight'"),
    "layer": ("model.blocks.0", "up", Adapted, r"'model\.blocks\.0\.up'.*another Adapted, whose 'scale'"),
}


@PLANS
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("which", MODULES)
def test_another_module_is_refused_by_name(plan: str, hook: str, which: str, tmp_path: Path) -> None:
    expected = run(RECIPE, "auto", tmp_path).losses
    parent, key, make, message = MODULES[which]
    found: list[LitModel] = []
    with pytest.raises(UnsupportedError, match=rf"{message} is on no tier and in no kept step.*load_state_dict"):
        run(RECIPE, strategy(plan), tmp_path, prepare=found.append, callbacks=[swaps(parent, key, make, hook)])
    assert found[0].losses == expected[: 1 if hook == HOOKS[0] else 2]


@PLANS
@pytest.mark.parametrize(("key", "make"), [("0", Wrapped), ("2", lambda _: nn.Identity())], ids=["wrapped", "left out"])
def test_a_module_without_parameters_of_its_own_trains_on(plan: str, key: str, make: Any, tmp_path: Path) -> None:
    runs = [run(RECIPE, s, tmp_path, callbacks=[swaps("model.blocks", key, make)]) for s in ("auto", strategy(plan))]
    assert_same(*runs)


def test_a_state_that_is_assigned_is_refused_by_name(tmp_path: Path) -> None:
    def assign(trainer: pl.Trainer, module: LitModel, *_: object) -> None:
        layer = module.model.blocks[1].up
        layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()}, assign=True)

    with pytest.raises(UnsupportedError, match=re.escape(NAME)):
        run(RECIPE, strategy("disk"), tmp_path, callbacks=[LambdaCallback(on_train_batch_end=assign)])


@PLANS
def test_values_that_are_written_as_the_refusal_says_train_on(plan: str, tmp_path: Path) -> None:
    def write(weight: nn.Parameter) -> nn.Parameter:
        weight.data = weight.data * 2
        return weight

    runs = [run(RECIPE, s, tmp_path, callbacks=[replaces(HOOKS[0], change=write)]) for s in ("auto", strategy(plan))]
    assert_same(*runs)


@PLANS
def test_no_step_is_kept_without_it(plan: str, tmp_path: Path) -> None:
    """The last batch ends with another weight, and the store goes on from the step before."""
    expected = run(RECIPE, "auto", tmp_path)

    def swap(trainer: pl.Trainer, module: LitModel, *_: object) -> None:
        if trainer.global_step == RECIPE.steps - 1:
            module.model.blocks[1].up.weight = nn.Parameter(torch.zeros(51, 24), requires_grad=False)

    with pytest.raises(UnsupportedError, match=re.escape(NAME)):
        run(
            RECIPE,
            strategy(plan, disk_path=tmp_path / "store"),
            tmp_path,
            callbacks=[LambdaCallback(on_before_optimizer_step=swap)],
        )
    torch.manual_seed(7)
    module = LitModel(RECIPE)
    trainer = quiet_trainer(
        strategy=strategy(plan, disk_path=tmp_path / "store"), max_steps=RECIPE.steps, default_root_dir=tmp_path
    )
    trainer.fit(module, data(), ckpt_path=str(tmp_path / "store"))
    assert module.losses == expected.losses[-1:]
    assert all(torch.equal(value, expected.weights[name]) for name, value in module.state_dict().items())


@PLANS
def test_an_evaluation_may_have_another_for_a_while(plan: str, tmp_path: Path) -> None:
    recipe = Recipe(shape=RECIPE.shape, steps=3, validate=True)

    class Swaps(pl.Callback):
        def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            self.layer = pl_module.model.blocks[1].up
            self.before = self.layer.weight
            with torch.no_grad():
                self.layer.weight = doubled(self.before)

        def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            self.layer.weight = self.before

    assert_same(*(run(recipe, s, tmp_path, callbacks=[Swaps()]) for s in ("auto", strategy(plan))))
