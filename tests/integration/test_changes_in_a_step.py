"""User code changes weights at any point of a step, on any tier: the step is the one of plain
Lightning.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer, run
from support.resuming import Ends, EndsAt
from support.strategies import ON_DEVICE, WHERE, make_strategy, on_device
from torch import Tensor, nn

from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.errors import OutOfMemoryBudgetError


def in_place(module: Any) -> None:
    with torch.no_grad():
        for param in module.model.parameters():
            param.clamp_(-0.1, 0.1)


def of_one(module: Any) -> None:
    with torch.no_grad():
        module.model.blocks[1].up.weight.mul_(0.5)
        module.model.head.weight[2:4].copy_(module.model.embed.weight[:2])


def as_data(module: Any) -> None:
    for param in module.model.parameters():
        param.data = param.data * 0.9


def through_data(module: Any) -> None:
    for param in module.model.parameters():
        param.data.mul_(0.9)


def scaled(module: Any) -> None:
    with torch.no_grad():
        for param in module.model.parameters():
            param.mul_(0.9)


CHANGES: list[Callable[[Any], None]] = [in_place, of_one, as_data, through_data, scaled]


class Changing(LitModel):
    """Changes its weights at ``point``, in another way from step to step."""

    point = ""
    ways: tuple[int, ...] = (0, 1, 2)

    def reached(self, point: str) -> None:
        if point in self.point.split():
            CHANGES[self.ways[self.trainer.global_step % len(self.ways)]](self)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.reached("begin")
        loss = super().training_step(batch, batch_idx)
        self.reached("forward")
        return loss


class ByHand(Changing):
    """Optimizes by hand."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.reached("gradients")
        optimizer.step()
        self.reached("step")
        optimizer.zero_grad()
        self.reached("zero_grad")


def at(point: str, base: type[Changing] = Changing, **attributes: Any) -> type[Changing]:
    """The module that changes its weights at a point: a hook's name, or one that its steps say."""

    def hook(self: Changing, *_: Any, **__: Any) -> None:
        self.reached(point)

    hooks = {} if not hasattr(pl.LightningModule, point) else {point: hook}
    return type("At", (base,), {"point": point, **hooks, **attributes})


class AfterStep(Changing):
    point = "optimizer_step"

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        super().optimizer_step(*args, **options)
        self.reached(self.point)


class InClosure(Changing):
    point = "closure"

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def closure() -> Any:
            loss = optimizer_closure()
            self.reached(self.point)
            return loss

        optimizer.step(closure=closure)


AUTOMATIC = ["begin", "on_after_backward", "on_before_optimizer_step", "on_train_batch_start", "on_train_batch_end"]
BY_HAND = ["begin", "on_after_backward", "gradients", "step", "zero_grad", "on_train_batch_end"]


def same(module_class: type[LitModel], where: str, folder: Path, **recipe: Any) -> None:
    recipe = {"shape": Shape(layers=4, dropout=0.1), **recipe}
    train: Callable[[Any], Outcome] = partial(run, Recipe(**recipe), tmp_path=folder, module_class=module_class)
    ours = on_device(ON_DEVICE[where]) if where in ON_DEVICE else make_strategy(where, train)
    assert_same(train(ours), train("auto"))


@WHERE
@pytest.mark.parametrize("point", BY_HAND)
def test_by_hand(point: str, where: str, tmp_path: Path) -> None:
    same(at(point, ByHand), where, tmp_path)


@WHERE
@pytest.mark.parametrize("module_class", [*map(at, AUTOMATIC), AfterStep, InClosure], ids=lambda made: made.point)
def test_automatic(module_class: type[Changing], where: str, tmp_path: Path) -> None:
    if (module_class, where) == (InClosure, "tight"):  # there is no room for all gradients at once
        with pytest.raises(OutOfMemoryBudgetError, match=r"calls optimizer\.step with a closure of its own"):
            same(module_class, where, tmp_path)
    else:
        same(module_class, where, tmp_path)


class ThroughData(ByHand):
    """Writes through ``param.data``, which version counters of torch's do not show."""

    point = "begin gradients step zero_grad"
    ways = (3,)

    def on_train_batch_end(self, *_: Any) -> None:
        through_data(self)


@WHERE
def test_writes_through_data(where: str, tmp_path: Path) -> None:
    same(ThroughData, where, tmp_path)


@pytest.mark.parametrize("where", ["host", "tight", "spread", "resident"])
def test_writes_through_data_to_16_bit_weights(where: str, tmp_path: Path) -> None:
    """They have masters here, and not in plain Lightning, so both runs are ours."""
    counted = type("Counted", (ThroughData,), {"ways": (4,), "on_train_batch_end": lambda module, *_: CHANGES[4](module)})
    recipe, found = Recipe(shape=Shape(layers=4), precision="bf16-true"), []
    for kind in (ThroughData, counted):
        train = partial(run, recipe, tmp_path=tmp_path, module_class=kind)
        found.append(train(on_device(ON_DEVICE[where]) if where in ON_DEVICE else make_strategy(where, train)))
    assert_same(*found)


def test_trained_weights_on_the_host_may_be_written_through_data_before_backward(tmp_path: Path) -> None:
    same(at("forward", ways=(3,)), "host", tmp_path)


class Averaged(LitModel):
    """Learns from an average of its weights, which it keeps as most code does."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        return super().loss(batch) + (self.model(tokens[:, :-1]) - self.teacher(tokens[:, :-1])).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        for average, param in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            average.data.mul_(0.9).add_(param.data, alpha=0.1)


@pytest.mark.parametrize("where", ["resident", "host", "disk", "spread", "updated on the host"])
def test_frozen_weights_that_are_written_through_data_are_in_the_kept_step(where: str, tmp_path: Path) -> None:
    def train(strategy: Any, *, stop: bool = False, store: Path | None = None) -> Outcome:
        torch.manual_seed(7)
        module = Averaged(Recipe(shape=Shape(layers=3, counting=False)))
        trainer = quiet_trainer(
            strategy=strategy, max_steps=6, default_root_dir=tmp_path, callbacks=[EndsAt(3)] if stop else [], limit_val_batches=0
        )
        with pytest.raises(Ends) if stop else nullcontext():
            trainer.fit(module, data(), ckpt_path=store)
        return outcome(trainer, module)

    def ours() -> Any:
        store = tmp_path / "store"
        if where in ON_DEVICE and where != "resident":
            return on_device(ON_DEVICE[where], disk_path=store)
        return HeteroOffloadStrategy(where, disk_path=store)

    expected = train("auto")
    train(ours(), stop=True)
    got = train(ours(), store=tmp_path / "store")
    assert_same(got, Outcome(expected.losses[-len(got.losses) :], expected.weights, expected.state))
    assert "data" not in vars(nn.Parameter)


@WHERE
@pytest.mark.parametrize("point", ["forward", "on_before_backward", "on_before_zero_grad"])
def test_between_forward_and_backward(point: str, where: str, tmp_path: Path) -> None:
    """Where autograd has saved casts; weights that it has saved may not change."""
    same(at(point, ways=(1,)), where, tmp_path, precision="bf16-mixed")


@WHERE
@pytest.mark.parametrize("point", ["gradients", "step"])
def test_by_hand_with_16_bit_casts(point: str, where: str, tmp_path: Path) -> None:
    same(at(point, ByHand), where, tmp_path, precision="bf16-mixed")


class Shrinking(LitModel):
    """Blocks scale their weights before each forward in training, frozen ones too."""

    def on_fit_start(self) -> None:
        def shrink(block: Any, _: Any) -> None:
            with torch.no_grad():
                for param in block.parameters() if block.training else ():
                    param.mul_(0.9)

        self.hooks = [block.register_forward_pre_hook(shrink) for block in self.model.blocks]

    def on_fit_end(self) -> None:
        for hook in self.hooks:
            hook.remove()


@pytest.mark.parametrize("where", ["host", "disk", "tight"])
@pytest.mark.parametrize("frozen", [{"frozen": (1,)}, {"half_frozen": True}], ids=["whole", "half"])
def test_blocks_with_frozen_weights_that_change_in_forward(frozen: Any, where: str, tmp_path: Path) -> None:
    """Frozen weights have one slot on disk until they change: what follows needs their new
    files.
    """
    same(Shrinking, where, tmp_path, shape=Shape(layers=4, **frozen))
