"""A plan never changes a bit: random models, plans and options against plain Lightning with ``AdamW(fused=True)``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import Recipe, assert_same, run
from support.properties import examples
from support.recipes import RECIPES

from lightning_hetero import BlockPlan, Plan, Tier, UpdateLane
from lightning_hetero.strategies import HeteroOffloadStrategy


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A plan by patterns, so that it fits any model."""
    names = ["model.blocks.0", "model.blocks.2", "model.embed", "model.*", "*"]
    rows = []
    for name in names:
        weights, state = draw(st.sampled_from([*Tier])), draw(st.sampled_from([*Tier]))
        cpu = Tier.DISK in (weights, state) or draw(st.booleans())
        lane = UpdateLane.CPU if cpu else UpdateLane.DEVICE
        rows.append(BlockPlan(name=name, weights=weights, state=state, update=lane))
    depths = {"prefetch_depth": draw(st.integers(1, 3)), "gradient_depth": draw(st.integers(1, 4))}
    return Plan(name="random", blocks=tuple(rows), **depths)


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LIGHTNING_HETERO_POISON", "1")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("backend", "threads"), [("pool", 1), ("auto", 2)])
@examples(20)
@given(recipe=RECIPES, plan=st.one_of(st.sampled_from(["resident", "host", "disk"]), plans()), tight=st.booleans())
def test_plans_do_not_change_a_bit(backend: str, threads: int, recipe: Recipe, plan: Any, tight: bool) -> None:
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        plan = fitting(plan, recipe)
        expected = run(recipe, "auto", Path(folder))
        budget = tight_budget(plan, recipe, Path(folder)) if tight else None
        strategy = HeteroOffloadStrategy(plan=plan, host_memory=budget, io_backend=backend)
        assert_same(run(recipe, strategy, Path(folder)), expected)


def fitting(plan: Any, recipe: Recipe) -> Any:
    """Drops rules that the model has no block for; those are an error."""
    if isinstance(plan, str):
        return plan
    keep = [r for r in plan.blocks if not (r.name == "model.blocks.2" and recipe.shape.layers < 3)]
    if recipe.shape.layers < 2:  # one block repeats nothing, so its modules are leftovers
        keep = [r for r in keep if not r.name.startswith("model.blocks")]
    return Plan(name=plan.name, blocks=tuple(keep), prefetch_depth=plan.prefetch_depth, gradient_depth=plan.gradient_depth)


def tight_budget(plan: Any, recipe: Recipe, folder: Path) -> int:
    """The least that the refusal says is needed: weights on disk then come and go at every block."""
    from lightning_hetero.errors import OutOfMemoryBudgetError

    with pytest.raises(OutOfMemoryBudgetError) as refusal:
        run(recipe, HeteroOffloadStrategy(plan=plan, host_memory=1), folder)
    return refusal.value.needed_bytes
