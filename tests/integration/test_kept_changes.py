"""Weights that user code changes, in any way and anywhere in a step, are in the step that is
kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.frozen import slots_of
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, quiet_trainer
from support.resuming import EndsAt, after, fitted, offload
from support.strategies import ON_DEVICE, on_device
from torch import Tensor, nn

from lightning_hetero.runtime.residency.device import DeviceResidency

RECIPE = Recipe(steps=8, shape=Shape(layers=4, frozen=(0, 2), half_frozen=True, counting=False, unused=True))
STOP = 5


def by_operator(module: nn.Module, name: str, param: nn.Parameter) -> None:
    with torch.no_grad():
        param.mul_(0.9)


def by_copy(module: nn.Module, name: str, param: nn.Parameter) -> None:
    with torch.no_grad():
        param.copy_(param * 0.9)


def by_initializer(module: nn.Module, name: str, param: nn.Parameter) -> None:
    nn.init.constant_(param, 0.01)


def by_loading(module: nn.Module, name: str, param: nn.Parameter) -> None:
    module.load_state_dict({name: param.detach() * 0.9}, strict=False)


def by_writing_data(module: nn.Module, name: str, param: nn.Parameter) -> None:
    param.data.mul_(0.9)


def by_setting_data(module: nn.Module, name: str, param: nn.Parameter) -> None:
    param.data = param.data * 0.9


def by_vector(module: nn.Module, name: str, param: nn.Parameter) -> None:
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector([param])
    nn.utils.vector_to_parameters(vector * 0.9, [param])


def by_other_memory(module: nn.Module, name: str, param: nn.Parameter) -> None:
    with torch.no_grad():
        param.set_((param * 0.9).detach())  # type: ignore[call-overload]


WAYS: list[Callable[[nn.Module, str, nn.Parameter], None]] = [
    by_operator, by_copy, by_initializer, by_loading, by_writing_data, by_setting_data, by_vector, by_other_memory,
]  # fmt: skip


def change(module: nn.Module, step: int) -> None:
    """Each parameter in another way, and in another one in the next step."""
    for number, (name, param) in enumerate(list(module.named_parameters())):
        WAYS[(number + step) % len(WAYS)](module, name, param)


class Changing(LitModel):
    """``spare`` of each block, and of the model, has an optimizer and never a gradient."""

    where = ""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        for block in self.model.blocks:
            block.spare = nn.Parameter(torch.ones(7))
            block.forward = partial(self.around, block, block.forward)

    def around(self, block: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.where == "forward" and self.training:
            change(block, self.trainer.global_step)
        return forward(x)

    def on_after_backward(self) -> None:
        if self.where == "on_after_backward":
            change(self.model, self.trainer.global_step)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.where == "on_train_batch_end":
            change(self.model, self.trainer.global_step)


class Hook(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if module.where == "callback":
            change(module.model, trainer.global_step)


def train(where: str, strategy: Any, folder: Path, *, stop: int | None = None, store: Path | None = None) -> Outcome:
    torch.manual_seed(7)
    module = Changing(RECIPE)
    module.where = where
    trainer = quiet_trainer(
        strategy=strategy, max_steps=RECIPE.steps, limit_val_batches=0, default_root_dir=folder,
        callbacks=[Hook(), *([] if stop is None else [EndsAt(stop)])],
    )  # fmt: skip
    return fitted(trainer, module, data(3), store=store)


def placed(plan: str) -> Any:
    return plan if plan not in ON_DEVICE else partial(on_device, ON_DEVICE[plan])


@pytest.mark.parametrize("where", ["forward", "on_after_backward", "on_train_batch_end", "callback"])
def test_changes_are_in_the_kept_step(where: str, tmp_path: Path) -> None:
    plain = train(where, "auto", tmp_path)
    for plan in ("host", "disk", *ON_DEVICE):
        store = tmp_path / plan
        train(where, offload(placed(plan), store, verify_digests=True), tmp_path, stop=STOP)
        got = train(where, offload("host", store, verify_digests=True), tmp_path, store=store)
        assert_same(got, after(plain, RECIPE.steps - STOP))


@pytest.mark.parametrize("plan", ["host", "disk", *ON_DEVICE])
def test_what_does_not_change_is_written_once(plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither files nor copies from a device are made anew for frozen blocks, also if code has
    looked at their ``data``.
    """
    lent: list[str] = []
    lend = DeviceResidency.lend

    def noted(residency: DeviceResidency, block: Any) -> Any:
        lent.append(block.name)
        return lend(residency, block)

    monkeypatch.setattr(DeviceResidency, "lend", noted)
    monkeypatch.setattr(Changing, "around", rounded)
    store = tmp_path / "store"
    train("", offload(placed(plan), store, verify_digests=True), tmp_path)
    found = [slots for name, slots in slots_of(store).items() if "spare" not in name]
    assert {number for number, _ in found} == {1}
    assert max(step for _, step in found) <= 1, "a step of training has written them"
    assert lent.count("model.blocks.2") <= 1


def rounded(module: Changing, block: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Computes with rounded weights, and sets the old ones again."""
    old = [param.data for param in block.parameters()]
    for param in block.parameters():
        param.data = (param.data * 64).round() / 64
    y = forward(x)
    for param, before in zip(block.parameters(), old, strict=True):
        param.data = before
    return y
