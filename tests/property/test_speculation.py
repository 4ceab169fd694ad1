"""Updates before the verdict never change a bit: random models, plans, thresholds and overflows against plain Lightning."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models import Recipe, Shape, assert_same, run
from support.properties import examples
from support.recipes import RECIPES, fitting, plans
from support.verdicts import counted_verdicts, divided, fused, norms, run_scaled

from lightning_hetero import Plan
from lightning_hetero.strategies import HeteroOffloadStrategy

PLANS = st.one_of(st.just("disk"), plans())


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    monkeypatch.setenv("LIGHTNING_HETERO_POISON", "1")
    return counted_verdicts(monkeypatch)


def test_thresholds_that_some_norms_exceed(verdicts: Counter[str]) -> None:
    @examples(6)
    @given(recipe=RECIPES, plan=PLANS, rank=st.floats(0, 1), slack=st.sampled_from([0.5, 0.999, 1.0, 1.001]))
    def check(recipe: Recipe, plan: str | Plan, rank: float, slack: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            seen = sorted(norms(replace(recipe, clip=None), Path(folder)))
            clip = slack * seen[round(rank * (len(seen) - 1))]
            recipe = replace(recipe, clip=clip, clip_by="norm")
            expected = run(recipe, "auto", Path(folder))
            assert_same(run(recipe, HeteroOffloadStrategy(plan=fitting(plan, recipe)), Path(folder)), expected)

    check()
    assert verdicts["tried"] == verdicts["kept"] + verdicts["again"]
    assert verdicts["kept"]
    assert verdicts["again"]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_losses_that_overflow_at_any_step(verdicts: Counter[str]) -> None:
    shapes = st.builds(
        Shape, layers=st.integers(2, 4), tied=st.booleans(), frozen=st.sampled_from([(), (0,)]), unused=st.booleans()
    )
    scaled = st.one_of(
        st.builds(Recipe, shape=shapes, steps=st.integers(2, 4), optimizer=st.just(fused), accumulate=st.sampled_from([1, 2])),
        st.builds(Recipe, shape=shapes, steps=st.just(4), optimizer=st.just(divided), clip=st.sampled_from([None, 0.1, 1.9])),
    )

    @examples(5)
    @given(recipe=scaled, plan=PLANS, overflows=st.frozensets(st.integers(0, 5), max_size=3))
    def check(recipe: Recipe, plan: str | Plan, overflows: frozenset[int]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            expected, scale = run_scaled(recipe, "auto", Path(folder), overflows)
            got, ours = run_scaled(recipe, HeteroOffloadStrategy(plan=fitting(plan, recipe)), Path(folder), overflows)
            assert_same(got, expected)
            assert ours == scale

    check()
    assert verdicts["tried"] == verdicts["kept"] + verdicts["again"] + verdicts["skipped"]
    assert verdicts["kept"]
    assert verdicts["skipped"]
