"""Updates before the verdict never change a bit: random models, plans, thresholds and overflows
against plain Lightning.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.device_plans import device_plans
from support.lane_kinds import KINDS, lanes_of
from support.models import Recipe, Shape, assert_same, run
from support.properties import examples
from support.recipes import RECIPES, fitting, plans
from support.verdicts import counted_verdicts, divided, fused, norms, run_scaled

from lightning_hetero import BlockPlan, EmulatedDevice, Plan, Tier
from lightning_hetero.ir.plan import UpdateOrder
from lightning_hetero.strategies import HeteroOffloadStrategy

PLANS = st.one_of(st.just("disk"), plans())


@st.composite
def tried_plans(draw: st.DrawFn) -> Plan:
    """Beside a device, with state of most blocks on disk."""
    plan = draw(device_plans())
    most = BlockPlan(name="model.blocks.*", weights=draw(st.sampled_from([*Tier])), state=Tier.DISK)
    return replace(plan, update_order=UpdateOrder.OVERLAPPED, blocks=(plan.blocks[0], most, plan.blocks[2]))


def beside_a_device(plan: Plan, recipe: Recipe, seed: int | None) -> HeteroOffloadStrategy:
    rows = tuple(r for r in plan.blocks if recipe.shape.layers >= 2 or r.name == "*")  # one block repeats nothing
    return HeteroOffloadStrategy(plan=replace(plan, blocks=rows), device=EmulatedDevice(memory="2MiB", seed=seed))


SEEDS = st.none() | st.integers(0, 99)


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


def test_thresholds_that_some_norms_exceed_beside_a_device(verdicts: Counter[str]) -> None:
    @examples(5)
    @given(recipe=RECIPES, plan=tried_plans(), rank=st.floats(0, 1), lanes=st.sampled_from(KINDS), seed=SEEDS)
    def check(recipe: Recipe, plan: Plan, rank: float, lanes: str, seed: int | None) -> None:
        recipe = replace(recipe, clip=None, shape=replace(recipe.shape, counting=False))
        with tempfile.TemporaryDirectory() as folder, lanes_of(lanes):
            seen = sorted(norms(recipe, Path(folder)))
            recipe = replace(recipe, clip=0.999 * seen[round(rank * (len(seen) - 1))], clip_by="norm")
            expected = run(recipe, "auto", Path(folder))
            assert_same(run(recipe, beside_a_device(plan, recipe, seed), Path(folder)), expected)

    check()
    assert verdicts["tried"] == verdicts["kept"] + verdicts["again"]
    assert verdicts["kept"]
    assert verdicts["again"]


SCALED = st.builds(
    Recipe,
    shape=st.builds(
        Shape, layers=st.integers(2, 4), tied=st.booleans(), frozen=st.sampled_from([(), (0,)]), counting=st.just(False)
    ),
    steps=st.integers(2, 4),
    accumulate=st.sampled_from([1, 1, 2]),
    optimizer=st.sampled_from([fused, divided]),
)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_losses_that_overflow_at_any_step_beside_a_device(verdicts: Counter[str]) -> None:
    @examples(5)
    @given(
        recipe=SCALED,
        plan=tried_plans(),
        clip=st.sampled_from([None, (0.1, "norm"), (1.9, "norm"), (1e-3, "value")]),
        overflows=st.frozensets(st.integers(0, 3), max_size=2),
        lanes=st.sampled_from(KINDS),
        seed=SEEDS,
    )
    def check(
        recipe: Recipe, plan: Plan, clip: tuple[float, str] | None, overflows: frozenset[int], lanes: str, seed: int | None
    ) -> None:
        if clip is not None and recipe.optimizer is not fused:  # Lightning does not clip what divides itself
            recipe = replace(recipe, clip=clip[0], clip_by=clip[1])
        with tempfile.TemporaryDirectory() as folder, lanes_of(lanes):
            expected, scale = run_scaled(recipe, "auto", Path(folder), overflows)
            got, ours = run_scaled(recipe, beside_a_device(plan, recipe, seed), Path(folder), overflows)
            assert_same(got, expected)
            assert ours == scale

    check()
    assert verdicts["tried"] == verdicts["kept"] + verdicts["again"] + verdicts["skipped"]
    assert verdicts["kept"]
    assert verdicts["skipped"]


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
