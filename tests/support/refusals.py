"""Fits that are refused, and what has to be as before afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hetero.errors import (
    HeteroError,
)
from lightning_hetero.strategies import HeteroOffloadStrategy
from support.models import LitModel, Outcome, Recipe, assert_same, data, outcome, quiet_trainer
from support.scripts import start_server

RECIPE = Recipe(steps=2)


def fit(module: LitModel, root: Path, strategy: Any, **options: Any) -> Any:
    trainer = quiet_trainer(strategy=strategy, max_steps=module.recipe.steps, default_root_dir=root, limit_val_batches=0, **options)
    trainer.fit(module, data())
    return trainer


def new_module(recipe: Recipe = RECIPE) -> LitModel:
    torch.manual_seed(7)
    return LitModel(recipe)


def tree(root: Path) -> dict[str, int]:
    """Every path below ``root`` with its size."""
    return {str(p.relative_to(root)): p.lstat().st_size for p in root.rglob("*")}


def refused(
    error: type[Exception], words: list[str], root: Path, module: LitModel | None = None, *, plan: Any = "disk", **options: Any
) -> None:
    """Trains and expects the refusal, with every one of ``words`` in its text; nothing may have
    been left below ``root``.
    """
    before = tree(root)
    with pytest.raises(error) as caught:
        fit(module or new_module(), root, HeteroOffloadStrategy(plan=plan, **options))
    text = str(caught.value)
    assert isinstance(caught.value, HeteroError)
    assert not [w for w in words if w not in text], text
    assert tree(root) == before


def assert_usable(module: LitModel, root: Path, plain: Outcome) -> None:
    """Plain Lightning trains the module as if nothing had happened."""
    module.losses.clear()
    torch.manual_seed(11)
    assert_same(outcome(fit(module, root, "auto"), module), plain)


@contextmanager
def holding(store: Path, root: Path) -> Iterator[Any]:
    """Another process that trains on a store, and goes on at the end; killed if the test fails."""
    context = start_server()
    ours, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(store, root, theirs))
    process.start()
    try:
        assert ours.recv() == "held"
        yield process
        ours.send("go on")
        process.join(600)
    finally:
        process.kill()
        process.join()


def _hold(store: Path, root: Path, parent: Connection) -> None:
    class Waits(LitModel):
        def on_train_start(self) -> None:
            parent.send("held")
            parent.recv()

    strategy = HeteroOffloadStrategy(plan="disk", disk_path=store, durability="none")
    trainer = quiet_trainer(strategy=strategy, max_steps=1, limit_val_batches=0, default_root_dir=root)
    trainer.fit(Waits(Recipe()), data())
