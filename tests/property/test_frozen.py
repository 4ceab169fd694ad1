"""Random models with frozen weights on random tiers, copied or read in place, changed or not: the
bits of plain Lightning.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.frozen import RECIPE, Change, Changed, by_hand, fit, loads, loads_the_same, unfreezes
from support.models import Shape, assert_same
from support.properties import examples
from support.recipes import adam, adamw, fitting, plans
from support.resuming import after
from support.strategies import on_device

from lightning_hetero.convert.safetensors import TensorToWrite, write_directory
from lightning_hetero.strategies import HeteroOffloadStrategy

SHAPES = st.builds(
    Shape, layers=st.integers(3, 4), width=st.sampled_from([8, 13, 24]), dropout=st.sampled_from([0.0, 0.3]),
    frozen=st.sampled_from([(0, 2), (0, 1, 2)]), half_frozen=st.booleans(), shared=st.booleans(), odd=st.booleans(),
)  # fmt: skip
PLANS = st.one_of(st.sampled_from(["host", "disk", on_device]), plans())


@examples(10)
@given(
    shape=SHAPES,
    optimizer=st.sampled_from([adamw, adam]),
    first=PLANS,
    second=PLANS,
    change=st.sampled_from([None, by_hand, loads, loads_the_same, unfreezes]),
    at=st.integers(1, 4),
    stop=st.integers(2, 4),
    every=st.sampled_from([1, 1, 2]),
    files=st.booleans(),
)
@example(
    shape=Shape(layers=3, frozen=(0, 2), odd=True), optimizer=adamw, first="disk", second=on_device, change=by_hand, at=3, stop=4,
    every=1, files=True,
)  # fmt: skip
def test_frozen_weights_have_the_bits_of_plain_lightning(
    shape: Shape, optimizer: Any, first: Any, second: Any, change: Change | None, at: int, stop: int, every: int, files: bool,
) -> None:  # fmt: skip
    recipe = replace(RECIPE, shape=shape, optimizer=optimizer)
    options: dict[str, Any] = {"change": change, "at": (at,)}
    torch.manual_seed(3)
    content = {name: value.clone() for name, value in Changed(recipe).model.state_dict().items()} if files else None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if content is not None:
            rows = [TensorToWrite(n, v.dtype, v.shape, lambda v=v: v) for n, v in content.items()]
            write_directory(folder / "weights", rows, max_shard_bytes=9000)

        def train(plan: Any, **more: Any) -> Any:
            made: dict[str, Any] = {"disk_path": folder / "store", "verify_digests": True, "keep_every": every}
            if content is not None:
                made["weights"] = {"model": folder / "weights"}
            strategy = plan(**made) if callable(plan) else HeteroOffloadStrategy(fitting(plan, recipe), **made)
            return fit(folder, strategy, recipe, device="cpu" if content is None else "meta", **options, **more)

        expected = fit(folder, "auto", recipe, content=content, **options)
        train(first, stop=stop)
        begun = max(stop // every * every, stop // 3 * 3)
        assert_same(train(second, store=folder / "store"), after(expected, recipe.steps - begun))
