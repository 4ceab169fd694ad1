"""Random training runs: models, optimizers and options of the Trainer."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from support.models import Recipe, Shape

SHAPES = st.builds(
    Shape,
    layers=st.integers(1, 4),
    width=st.sampled_from([8, 13, 24]),
    dropout=st.sampled_from([0.0, 0.3]),
    tied=st.booleans(),
    frozen=st.sampled_from([(), (0,), (1, 2)]),
    half_frozen=st.booleans(),
    shared=st.booleans(),
    recompute=st.sampled_from(["", "reentrant", "non_reentrant"]),
    unused=st.booleans(),
)


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=3e-3, fused=True)


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=2e-3, betas=(0.4, 0.98), weight_decay=0.01, fused=True)


RECIPES = st.builds(
    Recipe,
    shape=SHAPES,
    steps=st.integers(2, 4),
    accumulate=st.sampled_from([1, 1, 3]),
    clip=st.sampled_from([None, None, 0.3]),
    clip_by=st.sampled_from(["norm", "value"]),
    groups=st.booleans(),
    schedule=st.sampled_from(["", "step", "onecycle"]),
    optimizer=st.sampled_from([adamw, adam]),
    validate=st.booleans(),
)
