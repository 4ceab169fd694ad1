"""A plan never changes a bit: random models, plans and options against plain Lightning with
``AdamW(fused=True)``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import Recipe, assert_same, run
from support.properties import examples
from support.recipes import RECIPES, fitting, plans

from lightning_hetero.strategies import HeteroOffloadStrategy


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LIGHTNING_HETERO_POISON", "1")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# Those beside Adam run by their own code.
OTHERS = (
    partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    partial(torch.optim.SGD, lr=1e-2, maximize=True, foreach=True),
    partial(torch.optim.AdamW, lr=2e-3, amsgrad=True, maximize=True),
    partial(torch.optim.NAdam, lr=2e-3),
)
ADAGRAD = partial(torch.optim.Adagrad, lr=1e-2)  # OneCycleLR wants momentum
ANY = st.one_of(
    RECIPES,
    st.builds(replace, RECIPES, optimizer=st.sampled_from(OTHERS)),
    st.builds(replace, RECIPES, optimizer=st.just(ADAGRAD), schedule=st.sampled_from(["", "step"])),
    st.builds(replace, RECIPES, precision=st.just("bf16-mixed"), clip=st.none()),  # Lightning does not clip what is fused
)


@pytest.mark.parametrize(("backend", "threads"), [("pool", 1), ("auto", 2)])
@examples(20)
@given(recipe=ANY, plan=st.one_of(st.sampled_from(["resident", "host", "disk"]), plans()), tight=st.booleans())
def test_plans_do_not_change_a_bit(backend: str, threads: int, recipe: Recipe, plan: Any, tight: bool) -> None:
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        plan = fitting(plan, recipe)
        expected = run(recipe, "auto", Path(folder))
        budget = tight_budget(plan, recipe, Path(folder)) if tight else None
        strategy = HeteroOffloadStrategy(plan=plan, host_memory=budget, io_backend=backend)
        assert_same(run(recipe, strategy, Path(folder)), expected)


def tight_budget(plan: Any, recipe: Recipe, folder: Path) -> int:
    """The least that the refusal says is needed: weights on disk then come and go at every
    block.
    """
    from lightning_hetero.errors import OutOfMemoryBudgetError

    with pytest.raises(OutOfMemoryBudgetError) as refusal:
        run(recipe, HeteroOffloadStrategy(plan=plan, host_memory="1B"), folder)
    return refusal.value.needed_bytes
