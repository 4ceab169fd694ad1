"""``Trainer(strategy="hetero_offload", accelerator="cuda")`` against plain Lightning on the same GPU, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import Outcome, Recipe, Shape, run

from lightning_hetero import BlockPlan, HeteroOffloadStrategy, Plan, Tier, UpdateLane
from lightning_hetero.ir.plan import Saved

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")

ON_DEVICE = {"state": Tier.DEVICE, "update": UpdateLane.DEVICE}
PLANS = {
    "resident": Plan(name="p", blocks=(BlockPlan(name="*", weights=Tier.DEVICE, **ON_DEVICE),)),  # type: ignore[arg-type]
    "state on the host": Plan(
        name="p", blocks=(BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.HOST, update=UpdateLane.DEVICE),)
    ),
    "recomputed": Plan(
        name="p",
        blocks=(BlockPlan(name="*", weights=Tier.DEVICE, saved=Saved.RECOMPUTE, **ON_DEVICE),),  # type: ignore[arg-type]
    ),
    "weights from the host": Plan(
        name="p",
        blocks=(
            BlockPlan(name="model.blocks.*", weights=Tier.HOST, state=Tier.HOST, update=UpdateLane.DEVICE, saved=Saved.SWAP_HOST),
            BlockPlan(name="*", weights=Tier.DEVICE, **ON_DEVICE),  # type: ignore[arg-type]
        ),
    ),
}
ON_CPU = Plan(
    name="p",
    blocks=(
        BlockPlan(name="model.blocks.*", weights=Tier.DISK, state=Tier.DISK),
        BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.HOST),
    ),
)
RECIPE = Recipe(shape=Shape(layers=3, width=24, dropout=0.2), steps=4, clip=None)


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def trained(strategy: Any, folder: Path) -> Outcome:
    """What a short training ends with."""
    return run(RECIPE, strategy, folder, accelerator="cuda", devices=1)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_updates_on_the_device_do_not_change_a_bit(plan: Plan, tmp_path: Path) -> None:
    expected = trained("auto", tmp_path)
    got = trained(HeteroOffloadStrategy(plan), tmp_path)
    assert [torch.equal(a.cpu(), b.cpu()) for a, b in zip(got.losses, expected.losses, strict=True)] == [True] * RECIPE.steps
    for name, value in expected.weights.items():
        assert torch.equal(got.weights[name].cpu(), value.cpu()), name


def test_updates_on_the_host_follow_it_closely(tmp_path: Path) -> None:
    """The host's Adam contracts otherwise than the device's: the first loss is the same, weights differ by rounding."""
    expected = trained("auto", tmp_path)
    got = trained(HeteroOffloadStrategy(ON_CPU), tmp_path)
    assert torch.equal(got.losses[0].cpu(), expected.losses[0].cpu())
    for name, value in expected.weights.items():
        torch.testing.assert_close(got.weights[name].cpu(), value.cpu(), rtol=1e-4, atol=1e-6)
