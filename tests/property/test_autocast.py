"""Under autocast no plan changes a bit: random models, plans and options against plain
Lightning.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import LitModel, Manual, Recipe, assert_same, run
from support.properties import examples
from support.recipes import RECIPES, fitting, plans
from support.strategies import SPREAD, least_memory, on_device

from lightning_hetero.runtime.activations import autocast
from lightning_hetero.strategies import HeteroOffloadStrategy


@pytest.fixture(autouse=True)
def _small_casts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autocast, "SMALL_BYTES", 0)
    monkeypatch.setenv("LIGHTNING_HETERO_POISON", "1")


OPTIMIZERS = (  # they run by their own code; Lightning does not clip the gradients of fused ones
    partial(torch.optim.AdamW, lr=2e-3, amsgrad=True, maximize=True),
    partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
)
CLIPPED = st.builds(replace, RECIPES, precision=st.just("bf16-mixed"), optimizer=st.sampled_from(OPTIMIZERS))
FUSED = st.builds(replace, RECIPES, precision=st.just("bf16-mixed"), clip=st.none())


@examples(25)
@given(
    recipe=st.one_of(FUSED, CLIPPED),
    plan=st.one_of(st.just("disk"), plans()),
    tight=st.booleans(),
    module_class=st.sampled_from([LitModel, LitModel, Manual]),
)
def test_on_the_host(recipe: Recipe, plan: Any, tight: bool, module_class: type[LitModel]) -> None:
    recipe = _possible(recipe, module_class)
    plan = fitting(plan, recipe)
    with tempfile.TemporaryDirectory() as folder:
        train = partial(run, recipe, tmp_path=Path(folder), module_class=module_class)
        expected = train("auto")
        budget = least_memory(train, plan) if tight else None
        assert_same(train(HeteroOffloadStrategy(plan=plan, host_memory=budget)), expected)


@examples(25)
@given(
    recipe=FUSED,
    plan=st.sampled_from(["host", "disk", "resident", SPREAD]),
    module_class=st.sampled_from([LitModel, LitModel, Manual]),
)
def test_on_a_device(recipe: Recipe, plan: Any, module_class: type[LitModel]) -> None:
    recipe = _possible(replace(recipe, shape=replace(recipe.shape, counting=False)), module_class)
    with tempfile.TemporaryDirectory() as folder:
        train = partial(run, recipe, tmp_path=Path(folder), module_class=module_class)
        assert_same(train(on_device(plan)), train("auto"))


def _possible(recipe: Recipe, module_class: type[LitModel]) -> Recipe:
    """Lightning clips and accumulates only where it optimizes."""
    frozen = len(set(recipe.shape.frozen)) >= recipe.shape.layers or 0 in recipe.shape.frozen
    if module_class is Manual:
        recipe = replace(recipe, clip=None, accumulate=1, shape=replace(recipe.shape, half_frozen=False))
        recipe = replace(recipe, shape=replace(recipe.shape, frozen=())) if frozen else recipe
    return recipe
