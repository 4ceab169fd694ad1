"""A model with frozen blocks that something changes while it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_hetero.store.format.audit import StoreFiles
from lightning_hetero.store.format.record import parse
from support import resuming
from support.models import LitModel, Outcome, Recipe, Shape

FROZEN = (0, 2)
RECIPE = Recipe(steps=6, shape=Shape(layers=4, dropout=0.1, frozen=FROZEN))
SGD = replace(RECIPE, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9))
Change = Callable[["Changed"], None]


class Changed(LitModel):
    """Changes its frozen weights after some steps."""

    change: Change = staticmethod(lambda _: None)
    at: tuple[int, ...] = ()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step in self.at:
            self.change()


def by_hand(module: Changed) -> None:
    """All of a block, and a single parameter of another one."""
    with torch.no_grad():
        for param in module.model.blocks[FROZEN[0]].parameters():
            param.mul_(1.01)
        module.model.blocks[FROZEN[1]].down.bias.add_(0.01)


def loads(module: Changed) -> None:
    """Other weights for one block alone."""
    block = module.model.blocks[FROZEN[1]]
    content = {name: value.clone() for name, value in block.state_dict().items()}
    content["up.bias"] += 0.01
    block.load_state_dict(content)


def loads_the_same(module: Changed) -> None:
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()})


def unfreezes(module: Changed) -> None:
    params = [param.requires_grad_(True) for param in module.model.blocks[FROZEN[0]].parameters()]
    module.trainer.optimizers[0].add_param_group({"params": params})


@cache
def changing(change: Change, at: tuple[int, ...]) -> type[Changed]:
    """The model that ``change`` changes after these steps."""
    return type("Changing", (Changed,), {"change": change, "at": at})


def fit(
    root: Path, strategy: Any, recipe: Recipe = RECIPE, *callbacks: pl.Callback, change: Change | None = None,
    at: tuple[int, ...] = (2, 4), **options: Any,
) -> Outcome:  # fmt: skip
    """One fit of epochs of three batches; options as for :func:`support.resuming.fit`."""
    made = Changed if change is None else changing(change, at)
    return resuming.fit(root, strategy, recipe, made, *callbacks, batches=3, **options)


def slots_of(store: Path) -> dict[str, tuple[int, int]]:
    """Of each frozen block: how many files its weights have, and the step that wrote them."""
    found = {}
    with StoreFiles(store) as files:
        assert files.record is not None
        committed = {block.id: block for block in files.record.blocks}
        for names, entry in zip(files.manifest["layout"]["parts"], parse(files.record.user).parts, strict=True):
            geometry = entry.weights or entry.home
            if geometry is not None and any(f"blocks.{i}." in names[0] for i in FROZEN):
                number = sum((store / f"block-{geometry.id:05d}.{slot}").exists() for slot in "ab")
                found[names[0]] = number, committed[geometry.id].step
    return found
