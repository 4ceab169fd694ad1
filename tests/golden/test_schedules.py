"""Schedules as text, reviewed in diffs. Rewrite them with ``pytest tests/golden --update-golden``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_hetero.ir.model import BlockShape, ModelShape
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier, UpdateLane
from lightning_hetero.ir.schedule import StepSignature, Updates
from lightning_hetero.lowering import check, lower
from lightning_hetero.planners import disk, host, resident

HERE = Path(__file__).parent


def _block(name: str, num_params: int, *, trainable: bool = True, pinned: bool = False) -> BlockShape:
    """fp32 weights and gradients, two fp32 state arrays."""
    trained = num_params if trainable else 0
    return BlockShape(
        name=name,
        num_params=num_params,
        num_trainable_params=trained,
        weight_bytes=4 * num_params,
        gradient_bytes=4 * trained,
        state_bytes=8 * trained,
        pinned=pinned,
    )


# Embedding and head (pinned), four layers; two layers' weights fit in memory.
MODEL = ModelShape(name="gpt", blocks=(_block("rest", 1000, pinned=True), *(_block(f"layers.{i}", 100) for i in range(4))))
STEP = StepSignature(order=(0, 1, 2, 3, 4), training=True, updates=Updates.IN_BACKWARD)
CAPACITY_BYTES = 2 * 400


def _mixed(model: ModelShape) -> Plan:
    """One rule of every kind."""
    return Plan(
        name="mixed",
        blocks=(
            BlockPlan(name="rest", weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE),
            BlockPlan(name="layers.0"),
            BlockPlan(name="layers.1", state=Tier.DISK),
            BlockPlan(name="layers.*", weights=Tier.DISK, state=Tier.DISK),
        ),
        prefetch_depth=1,
        gradient_depth=1,
    ).resolve([b.name for b in model.blocks])


@pytest.mark.parametrize(
    ("name", "planner", "signature"),
    [
        ("resident", resident, STEP),
        ("host", host, STEP),
        ("disk", disk, STEP),
        ("disk_after_verdict", disk, replace(STEP, updates=Updates.AFTER_VERDICT)),
        ("disk_evaluation", disk, StepSignature(order=STEP.order, training=False)),
        ("mixed", _mixed, STEP),
    ],
)
def test_schedule_is_the_reviewed_one(
    name: str, planner: Callable[[ModelShape], Plan], signature: StepSignature, pytestconfig: pytest.Config
) -> None:
    plan = planner(MODEL)
    first = lower(plan, MODEL, signature, resident=frozenset(), capacity_bytes=CAPACITY_BYTES)
    steady = lower(plan, MODEL, signature, resident=first.resident_after, capacity_bytes=CAPACITY_BYTES)
    check(steady, plan, MODEL, capacity_bytes=CAPACITY_BYTES)
    golden = HERE / f"{name}.txt"
    if pytestconfig.getoption("--update-golden"):
        golden.write_text(steady.to_text(), encoding="utf-8")
    assert steady.to_text() == golden.read_text(encoding="utf-8"), f"{golden.name} differs; --update-golden rewrites it"
