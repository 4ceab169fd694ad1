"""On a device with memory of its own a plan never changes a bit either: random models, plans and
options on an emulated one.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.device_plans import device_plans
from support.models import Recipe, assert_same, run
from support.properties import examples
from support.recipes import RECIPES

from lightning_hetero import EmulatedDevice, Plan
from lightning_hetero.runtime.activations import block as activations
from lightning_hetero.strategies import HeteroOffloadStrategy


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_HETERO_POISON", "1")
    monkeypatch.setattr(activations, "SMALL_BYTES", 64)  # the models are small, and what they save shall leave


@examples(10)
@given(recipe=RECIPES, plan=device_plans(), seed=st.none() | st.integers(0, 99))
def test_plans_do_not_change_a_bit_on_a_device(recipe: Recipe, plan: Plan, seed: int | None) -> None:
    keep = [r for r in plan.blocks if recipe.shape.layers >= 2 or r.name == "*"]  # one block repeats nothing
    plan = replace(plan, blocks=tuple(keep))
    with tempfile.TemporaryDirectory() as folder:
        expected = run(recipe, "auto", Path(folder))
        strategy = HeteroOffloadStrategy(plan=plan, device=EmulatedDevice(memory="2MiB", seed=seed))
        assert_same(run(recipe, strategy, Path(folder)), expected)
