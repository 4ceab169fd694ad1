"""A block is recomputed from what its forward found beside its input: random numbers of Python and
NumPy, generators and numbers in attributes, the mode of its modules. A forward that depends on
anything else is refused by its results.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models import LitModel, Recipe, Shape, assert_same, run
from support.strategies import on_device, rules
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero import Tier, UpdateLane
from lightning_hetero.ir.plan import Saved
from lightning_hetero.runtime.activations.recompute import RecomputationError

RECIPE = Recipe(shape=Shape(width=128, dropout=0.2))
ON_DEVICE = rules(weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE, saved=Saved.RECOMPUTE)
ON_HOST = rules(saved=Saved.RECOMPUTE, boundary=Saved.SWAP_HOST)


def count(block: nn.Module) -> float:
    block.forwards += 1
    return float(1 + block.forwards / 10)


def first_call(block: nn.Module) -> float:
    if not hasattr(block, "seen"):
        block.seen = 2.0
        return 0.5
    return float(block.seen)


CHANGING: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "python": (lambda block: random.random() + 0.5, {}),
    "numpy": (lambda block: np.random.rand() + 0.5, {}),
    "own torch": (lambda block: torch.rand((), generator=block.own).item(), {"own": lambda: torch.Generator().manual_seed(1)}),
    "own python": (lambda block: block.own.random(), {"own": lambda: random.Random(1)}),
    "own numpy": (lambda block: block.own.random(), {"own": lambda: np.random.default_rng(1)}),
    "own old numpy": (lambda block: block.own.rand(), {"own": lambda: np.random.RandomState(1)}),
    "count": (count, {"forwards": lambda: 0}),
    "first call": (first_call, {}),
}


@pytest.mark.parametrize("plan", [ON_DEVICE, ON_HOST], ids=["device", "host"])
@pytest.mark.parametrize("name", CHANGING)
def test_a_recomputation_finds_what_forward_found(name: str, plan: Any, tmp_path: Path) -> None:
    factor, made = CHANGING[name]

    def prepare(module: LitModel) -> None:
        random.seed(3)
        np.random.seed(3)
        for block in module.model.blocks:
            for attribute, value in made.items():
                setattr(block, attribute, value())
            block.forward = partial(scaled, block, block.forward)

    def scaled(block: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return forward((x * factor(block)).sin())

    got = run(RECIPE, on_device(plan), tmp_path, prepare=prepare)
    assert_same(got, run(RECIPE, "auto", tmp_path, prepare=prepare))


class EvaluatesAfterwards(LitModel):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.train()
        loss = super().training_step(batch, batch_idx)
        self.eval()
        return loss


def test_modules_that_evaluate_after_forward_are_recomputed_as_they_trained(tmp_path: Path) -> None:
    got = run(RECIPE, on_device(ON_DEVICE), tmp_path, module_class=EvaluatesAfterwards)
    assert_same(got, run(RECIPE, "auto", tmp_path, module_class=EvaluatesAfterwards))


class Growing(LitModel):
    """Each forward extends a list, and its length decides what comes out."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.calls: list[int] = []
        self.model.blocks[1].register_forward_pre_hook(self.scale)

    def scale(self, _: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        self.calls.append(1)
        return (args[0] * len(self.calls),)


class Replaced(LitModel):
    """Trains on weights that are computed from the model's."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        weights = {name: param * 1.01 for name, param in self.model.named_parameters()}
        logits = torch.func.functional_call(self.model, weights, tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize(("module_class", "what"), [(Growing, "has other values"), (Replaced, "of MulBackward0 and is")])
def test_a_forward_that_depends_on_anything_else_is_refused(module_class: type[LitModel], what: str, tmp_path: Path) -> None:
    with pytest.raises(RecomputationError, match=rf"block 'model.blocks.\d' was recomputed and did something else .* {what}"):
        run(RECIPE, on_device(ON_DEVICE), tmp_path, module_class=module_class)
