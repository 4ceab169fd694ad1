"""Several optimizers share the parameters of a model out at random; no plan changes a bit of what
they do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.models import Recipe, assert_same, run
from support.properties import examples
from support.recipes import few_layers, fitting, plans
from support.several import Automatic, ByTurns, Several, by_hand
from torch import nn

from lightning_hetero.strategies import HeteroOffloadStrategy


@examples(12)
@given(
    recipe=st.builds(
        Recipe,
        shape=few_layers(),
        steps=st.integers(2, 4),
        clip=st.sampled_from([None, 0.3]),
        accumulate=st.sampled_from([1, 2]),
    ),
    base=st.sampled_from([Several, ByTurns, Automatic]),
    names=st.lists(st.sampled_from(["AdamW", "Adam", "SGD"]), min_size=2, max_size=3),
    shares=st.lists(st.integers(0, 2), min_size=5, max_size=9),
    plan=st.one_of(st.sampled_from(["resident", "host", "disk"]), plans()),
)
def test_plans_do_not_change_the_result_of_several_optimizers(
    recipe: Recipe, base: type[Several], names: list[str], shares: list[int], plan: Any
) -> None:
    class Shared(base):  # type: ignore[misc,valid-type]
        def split(self) -> Iterator[list[nn.Parameter]]:
            trained = [p for p in self.parameters() if p.requires_grad]
            for number in range(len(names)):  # at least one each
                yield [p for i, p in enumerate(trained) if (shares[i % len(shares)] if i >= 3 else i) % len(names) == number]

    Shared.names = tuple(names)
    train = run if base is Automatic else by_hand
    with tempfile.TemporaryDirectory() as folder:
        expected = train(recipe, "auto", Path(folder), module_class=Shared)
        strategy = HeteroOffloadStrategy(plan=fitting(plan, recipe))
        assert_same(train(recipe, strategy, Path(folder), module_class=Shared), expected)
