"""Wherever a batch that writes blocks several times breaks off, a resume finds the last kept step,
bit for bit.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.models import Outcome, Recipe, Shape, assert_same
from support.properties import examples
from support.recipes import adam, adamw, few_layers, fitting, plans
from support.resuming import Ends
from support.twofold import BATCHES, Twofold, kept_before, train_twofold

from lightning_hetero.strategies import HeteroOffloadStrategy

RECIPES = st.builds(Recipe, shape=few_layers(), steps=st.integers(4, 5), optimizer=st.sampled_from([adamw, adam]))


@examples(6)
@given(
    recipe=RECIPES,
    first=st.one_of(st.sampled_from(["host", "disk"]), plans()),
    second=st.one_of(st.sampled_from(["host", "disk"]), plans()),
    every=st.sampled_from([1, 1, 2]),
    point=st.sampled_from(["once", "twice", "changed", "epoch"]),
    at=st.integers(2, 3),
    disks=st.sampled_from([1, 2, 3]),
)
@example(recipe=Recipe(shape=Shape(odd=True), steps=4), first="host", second="disk", every=1, point="twice", at=2, disks=2)
def test_a_batch_that_breaks_off_anywhere_is_done_again(
    recipe: Recipe, first: Any, second: Any, every: int, point: str, at: int, disks: int
) -> None:
    at = BATCHES - 1 if point == "epoch" else at

    breaks = [True]

    class Breaks(Twofold):
        def reached(self, reached: str) -> None:
            if breaks and reached == point and self.trainer.fit_loop.epoch_loop.total_batch_idx == at:
                raise Ends

    over = at + (point == "epoch")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def train(plan: Any, **options: Any) -> Outcome:
            strategy = HeteroOffloadStrategy(
                fitting(plan, recipe),
                disk_path=[folder / "store", *(folder / str(i) for i in range(1, disks))],
                verify_digests=True,
                keep_every=every,
            )
            return train_twofold(folder, strategy, recipe, module_class=Breaks, **options)

        expected = train_twofold(folder, "auto", recipe)
        with pytest.raises(Ends):
            train(first)
        breaks.clear()
        begun: list[int] = []
        got = train(second, store=folder / "store", begins=begun.append)
        assert begun[0] == kept_before(over, every)
        expected.losses = expected.losses[2 * begun[0] :]
        assert_same(got, expected)
