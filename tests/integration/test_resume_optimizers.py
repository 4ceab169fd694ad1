"""A store goes on with the optimizers that it was begun with: another class, variant or order is
refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import LitModel, Recipe, Shape, assert_same, data, outcome, quiet_trainer
from support.properties import examples
from support.resuming import Ends, EndsAt, after, train
from torch.optim import SGD, Adam, AdamW, NAdam, RMSprop, lr_scheduler

from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.errors import ConfigError
from lightning_hetero.strategies.model_changes import ModelChanges

SHAPE = Shape(layers=2)
Make = Callable[[Any], torch.optim.Optimizer]


def begun(optimizer: Make, folder: Path, **options: Any) -> Path:
    train(
        folder,
        HeteroOffloadStrategy("disk", disk_path=folder / "store"),
        Recipe(optimizer=optimizer, shape=SHAPE, **options),
        stop=2,
    )
    return folder / "store"


def refused(match: str, optimizer: Make, store: Path, **options: Any) -> None:
    before = {path.name: path.read_bytes() for path in store.iterdir()}
    with pytest.raises(ConfigError, match=match):
        train(
            store.parent,
            HeteroOffloadStrategy("disk", disk_path=store),
            Recipe(optimizer=optimizer, shape=SHAPE, **options),
            store=store,
        )
    assert {path.name: path.read_bytes() for path in store.iterdir()} == before, "it can be gone on from"


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (AdamW, Adam, r"is torch\.optim\.Adam, the store's torch\.optim\.AdamW"),
        (Adam, AdamW, r"is torch\.optim\.AdamW, the store's torch\.optim\.Adam"),
        (AdamW, SGD, r"is torch\.optim\.SGD, the store's torch\.optim\.AdamW"),
        (NAdam, RMSprop, r"is torch\.optim\.RMSprop, the store's torch\.optim\.NAdam"),
        (AdamW, lambda p: AdamW(p, amsgrad=True), "AdamW has amsgrad=True in group 0, the store's optimizer amsgrad=False"),
        (lambda p: AdamW(p, amsgrad=True), AdamW, "AdamW has amsgrad=False in group 0, the store's optimizer amsgrad=True"),
        (AdamW, lambda p: AdamW(p, maximize=True), "AdamW has maximize=True"),
        (AdamW, lambda p: AdamW(p, lr=torch.tensor(1e-3)), "AdamW has lr=a tensor in group 0, the store's optimizer lr=a number"),
        (lambda p: SGD(p, 0.1, 0.9), lambda p: SGD(p, 0.1, 0.9, nesterov=True), "SGD has nesterov=True"),
        (RMSprop, lambda p: RMSprop(p, centered=True), "RMSprop has centered=True"),
        (AdamW, lambda p: AdamW(p[::-1]), r"parameter 0 of group 0 of torch\.optim\.AdamW is '[\w.]+', that of the store's"),
        (lambda p: SGD(p, 0.1, 0.9), lambda p: SGD(p[::-1], 0.1, 0.9), "other parameters, or in another order"),
        (lambda p: AdamW([*p[:2], p[3], p[2], *p[4:]]), AdamW, "parameter 2 of group 0"),
    ],
)  # fmt: skip
def test_another_optimizer_is_refused_and_the_difference_named(first: Make, second: Make, said: str, tmp_path: Path) -> None:
    refused(said, second, begun(first, tmp_path))


class Scheduled(LitModel):
    """Has the schedulers that ``make`` gives for its optimizer."""

    make: Callable[[torch.optim.Optimizer], Any]
    interval = "step"

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [{"scheduler": self.make(optimizer), "interval": self.interval}] if self.make(optimizer) else []


def scheduled(folder: Path, make: Any, *callbacks: Any, store: Path | None = None, interval: str = "step") -> Any:
    torch.manual_seed(7)
    module = Scheduled(Recipe(shape=SHAPE))
    module.make, module.interval = make, interval
    strategy = HeteroOffloadStrategy("disk", disk_path=folder / "store")
    trainer = quiet_trainer(strategy=strategy, max_steps=5, limit_val_batches=0, default_root_dir=folder, callbacks=list(callbacks))
    trainer.fit(module, data(), ckpt_path=store)
    return outcome(trainer, module)


SCHEDULES: dict[str, Any] = {
    "none": lambda optimizer: None,
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
    "SequentialLR(ConstantLR, StepLR)": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, 2)], [2]
    ),
    "SequentialLR(ConstantLR, ExponentialLR)": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)], [2]
    ),
}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("OneCycleLR", "none"), ("OneCycleLR", "StepLR"), ("none", "OneCycleLR"), ("none", "StepLR"), ("StepLR", "ExponentialLR"),
        ("SequentialLR(ConstantLR, StepLR)", "SequentialLR(ConstantLR, ExponentialLR)"),
    ],
)  # fmt: skip
def test_other_schedulers_are_refused_by_name(first: str, second: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with pytest.raises(Ends):
        scheduled(tmp_path, SCHEDULES[first], EndsAt(3))
    before = {path.name: path.read_bytes() for path in store.iterdir()}
    with pytest.raises(ConfigError, match=re.escape(f"learning rate schedulers: {second} (the store's: {first}).")):
        scheduled(tmp_path, SCHEDULES[second], store=store)
    assert {path.name: path.read_bytes() for path in store.iterdir()} == before, "it can be gone on from"
    assert len(scheduled(tmp_path, SCHEDULES[first], store=store).losses) == 2


def test_a_scheduler_that_steps_at_other_times_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Ends):
        scheduled(tmp_path, SCHEDULES["StepLR"], EndsAt(3))
    scheduled(tmp_path, SCHEDULES["StepLR"], store=tmp_path / "store", interval="epoch")
    assert "StepLR has interval=epoch, in the store interval=step" in caplog.text


def test_groups_that_have_changed_places_are_refused(tmp_path: Path) -> None:
    """They have as many parameters each, and would get each other's options."""

    def halves(params: list[Any]) -> list[dict[str, Any]]:
        half = len(params) // 2 * 2
        return [{"params": params[:half:2], "weight_decay": 0.1}, {"params": params[1:half:2], "weight_decay": 0.0}]

    store = begun(lambda params: AdamW(halves(params)), tmp_path)
    refused("parameter 0 of group 0", lambda params: AdamW(halves(params)[::-1]), store)


@pytest.mark.parametrize(
    "second",
    [
        lambda p: AdamW(p, lr=0.5, weight_decay=0.3, betas=(0.1, 0.2)),
        lambda p: AdamW(p, lr=3e-3, fused=True),
        lambda p: AdamW(p, lr=3e-3, foreach=False),
    ],
    ids=["numbers", "fused", "foreach"],
)
def test_other_numbers_and_ways_of_computing_continue_with_those_of_the_store(second: Make, tmp_path: Path) -> None:
    recipe = Recipe(steps=4, optimizer=lambda p: AdamW(p, lr=3e-3, fused=True), shape=SHAPE)
    expected = train(tmp_path, "auto", recipe)
    store = begun(lambda p: AdamW(p, lr=3e-3), tmp_path)
    got = train(
        tmp_path, HeteroOffloadStrategy("host", disk_path=store), Recipe(steps=4, optimizer=second, shape=SHAPE), store=store
    )
    for outcome_ in (got, expected):
        for group in outcome_.state[0]["param_groups"]:
            group.pop("fused"), group.pop("foreach")
    assert_same(got, after(expected, 2))


class Two(LitModel):
    """Each of two optimizers has every other block."""

    swapped = False

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        rest = [p for n, p in self.named_parameters() if "blocks" not in n]
        both = [
            AdamW([*self.model.blocks[0].parameters(), *rest], fused=True),
            AdamW(self.model.blocks[1].parameters(), fused=True),
        ]
        return both[::-1] if self.swapped else both

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        self.losses.append(loss.detach().clone())


def test_optimizers_that_have_changed_places_are_refused(tmp_path: Path) -> None:
    def fit(swapped: bool, *callbacks: pl.Callback, ckpt_path: Any = None) -> Any:
        torch.manual_seed(7)
        module = Two(Recipe(shape=SHAPE))
        module.swapped = swapped
        strategy = HeteroOffloadStrategy("disk", disk_path=tmp_path / "store")
        trainer = quiet_trainer(
            strategy=strategy, max_steps=6, limit_val_batches=0, default_root_dir=tmp_path, callbacks=list(callbacks)
        )
        trainer.fit(module, data(), ckpt_path=ckpt_path)
        return outcome(trainer, module)

    with pytest.raises(Ends):
        fit(False, EndsAt(4))
    with pytest.raises(ConfigError, match=r"has groups of \[\d+\] parameters, the store's optimizer \[\d+\]"):
        fit(True, ckpt_path=tmp_path / "store")
    assert len(fit(False, ckpt_path=tmp_path / "store").losses) == 1


@examples(60)
@given(order=st.permutations(range(8)), cut=st.integers(1, 7))
def test_any_order_but_the_one_that_was_made_is_refused(order: list[int], cut: int) -> None:
    module = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    params = list(module.parameters())

    def made(order: list[int]) -> torch.optim.Optimizer:
        rows = [params[number] for number in order]
        return AdamW([{"params": rows[:cut]}, {"params": rows[cut:]}])

    state = {"changes": ModelChanges(module, [made(list(range(8)))], None).take(), "optimizers": []}
    again = ModelChanges(module, [made(order)], state)
    if order == list(range(8)):
        again.check()
    else:
        with pytest.raises(ConfigError, match="other parameters, or in another order"):
            again.check()
