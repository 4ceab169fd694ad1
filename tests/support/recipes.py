"""Random training runs: models, optimizers, options of the Trainer, and plans."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from lightning_hetero import BlockPlan, Plan, Tier, UpdateLane
from support.models import Recipe, Shape

SHAPES = st.builds(
    Shape,
    layers=st.integers(1, 4),
    width=st.sampled_from([8, 13, 24]),
    dropout=st.sampled_from([0.0, 0.3]),
    tied=st.booleans(),
    frozen=st.sampled_from([(), (0,), (1, 2)]),
    half_frozen=st.booleans(),
    few=st.booleans(),
    shared=st.booleans(),
    recompute=st.sampled_from(["", "reentrant", "non_reentrant"]),
    unused=st.booleans(),
    odd=st.booleans(),
    skips=st.booleans(),
)


def few_layers(**options: Any) -> st.SearchStrategy[Shape]:
    """Models that a resume or a new plan may go through in a property; further options of
    :class:`Shape`.
    """
    return st.builds(
        Shape,
        layers=st.integers(2, 3),
        width=st.sampled_from([13, 24]),
        dropout=st.sampled_from([0.0, 0.3]),
        tied=st.booleans(),
        frozen=st.sampled_from([(), (1,)]),
        half_frozen=st.booleans(),
        few=st.booleans(),
        odd=st.booleans(),
        **options,
    )


MIXED = Plan(name="mixed", blocks=(BlockPlan(name="model.blocks.0"), BlockPlan(name="*", weights=Tier.DISK, state=Tier.DISK)))


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=3e-3, fused=True)


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=2e-3, betas=(0.4, 0.98), weight_decay=0.01, fused=True)


def maximizing(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=3e-3, eps=1e-3, maximize=True, fused=True)


RECIPES = st.builds(
    Recipe,
    shape=SHAPES,
    steps=st.integers(2, 4),
    accumulate=st.sampled_from([1, 1, 3]),
    clip=st.sampled_from([None, None, 0.3]),
    clip_by=st.sampled_from(["norm", "value"]),
    groups=st.booleans(),
    schedule=st.sampled_from(["", "step", "onecycle"]),
    optimizer=st.sampled_from([adamw, adam, maximizing]),
    validate=st.booleans(),
    left_out=st.booleans(),
)


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


def fitting(plan: Any, recipe: Recipe) -> Any:
    """Drops rules that the model has no block for; those are an error."""
    if isinstance(plan, str):
        return plan
    keep = [r for r in plan.blocks if not (r.name == "model.blocks.2" and recipe.shape.layers < 3)]
    if recipe.shape.layers < 2:  # one block repeats nothing, so its modules are leftovers
        keep = [r for r in keep if not r.name.startswith("model.blocks")]
    return Plan(name=plan.name, blocks=tuple(keep), prefetch_depth=plan.prefetch_depth, gradient_depth=plan.gradient_depth)
