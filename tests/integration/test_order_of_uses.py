"""Training on a device with streams orders every use of memory, whatever the timing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.broken_waits import LISTED, Break
from support.checked_streams import checked_devices
from support.checker import UnorderedError
from support.device_plans import RESIDENT
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, run
from support.ordered_runs import RUNS, everything, training

from lightning_hetero import BlockPlan, EmulatedDevice, Plan, Tier
from lightning_hetero.strategies import HeteroOffloadStrategy


@pytest.mark.parametrize("prompt", [False, True], ids=["polls find nothing", "polls find all"])
@pytest.mark.parametrize("name", RUNS)
def test_training_orders_all_uses(name: str, prompt: bool, tmp_path: Path) -> None:
    got, checker = training(name, tmp_path, prompt=prompt)
    assert checker.uses > 1000
    assert_same(got, run(RUNS[name].recipe, "auto", tmp_path))


def test_a_validation_uses_weights_that_training_has_sent_for_and_left_out(tmp_path: Path) -> None:
    """The first forward leaves out the last block, whose weights are on their way; the second one,
    of the validation, uses it.
    """
    recipe = Recipe(shape=Shape(frozen=(0, 1, 2), counting=False, skips=True), steps=2, validate=True)
    plan = Plan(name="below", blocks=(BlockPlan(name="model.blocks.*", weights=Tier.HOST), RESIDENT), prefetch_depth=3)

    def leaves_out(module: LitModel) -> None:
        module.model.forwards = 1

    def train(strategy: Any) -> Outcome:
        return run(recipe, strategy, tmp_path, prepare=leaves_out)

    with checked_devices():
        got = train(HeteroOffloadStrategy(plan, device=EmulatedDevice("4MiB")))
    assert_same(got, train("auto"))


@pytest.mark.parametrize("broken", LISTED, ids=lambda one: one.name)
def test_a_broken_wait_is_found(broken: Break, tmp_path: Path) -> None:
    with broken.made(), pytest.raises(UnorderedError):
        everything(tmp_path)
