"""A device whose memory is too small for a batch: the plan gives something up, the step begins again, and no bit is another."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer, run
from torch import Tensor

from lightning_hetero import BlockPlan, EmulatedDevice, Plan, Tier, UpdateLane
from lightning_hetero.errors import OutOfMemoryBudgetError
from lightning_hetero.ir.plan import Saved
from lightning_hetero.runtime.lanes.emulated import EmulatedLanes
from lightning_hetero.strategies import HeteroOffloadStrategy, recovery

SHAPE = Shape(layers=6, dropout=0.2, counting=False)
RESIDENT = BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE)
HOST = Plan(name="below", blocks=(BlockPlan(name="model.blocks.*"), RESIDENT))


def needs(plan: Any, train: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Device memory that the plan needs before anybody knows of activations, and the most that those take."""
    with pytest.raises(OutOfMemoryBudgetError) as refusal:
        train(HeteroOffloadStrategy(plan, device=EmulatedDevice(memory=1)))
    seen = [0]
    allocated = EmulatedLanes.allocated

    def look(lanes: Any, storage: Any) -> None:
        allocated(lanes, storage)
        lanes._arena._free_bytes()
        seen[0] = max(seen[0], lanes._arena._reserved_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(EmulatedLanes, "allocated", look)
        train(HeteroOffloadStrategy(plan, device=EmulatedDevice(memory="16MiB")))
    return refusal.value.needed_bytes, seen[0]


def without_buffers(module: LitModel) -> None:
    """Blocks that can be computed again for sure."""
    for layer in module.model.blocks:
        del layer.calls


RECIPES = {
    "plain": (Recipe(shape=SHAPE, steps=3, schedule="step"), without_buffers),
    "accumulated": (Recipe(shape=SHAPE, steps=2, accumulate=3, groups=True), without_buffers),
    "clipped": (Recipe(shape=SHAPE, steps=2, clip=0.3), without_buffers),
    "counting": (Recipe(shape=Shape(layers=6, dropout=0.2), steps=3, clip=0.1, clip_by="value"), lambda module: None),
}


@pytest.mark.parametrize(("name", "plan", "share"), [*((name, HOST, 0.6) for name in RECIPES), ("plain", "resident", 0.0)])
def test_a_step_begins_again_under_a_lesser_plan(
    name: str, plan: Any, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe, prepare = RECIPES[name]
    expected = run(recipe, "auto", tmp_path, prepare=prepare)
    least, saved = needs(plan, partial(run, recipe, tmp_path=tmp_path), monkeypatch)
    strategy = HeteroOffloadStrategy(plan, device=EmulatedDevice(memory=least + int(share * saved), seed=1))
    with caplog.at_level(logging.WARNING, "lightning_hetero"):
        assert_same(run(recipe, strategy, tmp_path, prepare=prepare, module_class=Once), expected)
    assert any("the step begins again" in record.getMessage() for record in caplog.records)
    policies = {row.saved for row in strategy.plan.blocks}
    assert policies >= {Saved.SWAP_HOST if name == "counting" else Saved.RECOMPUTE}


def test_nothing_left_to_give_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(shape=SHAPE)
    monkeypatch.setattr(recovery, "_MOST", 0)
    least, _ = needs(HOST, partial(run, recipe, tmp_path=tmp_path), monkeypatch)
    with pytest.raises(OutOfMemoryBudgetError, match=r"has nothing left to give up.*Use a smaller batch") as refusal:
        run(recipe, HeteroOffloadStrategy(HOST, device=EmulatedDevice(memory=least)), tmp_path)
    assert refusal.value.tier == "device"


class Once(LitModel):
    """Notes the loss of a batch once, however often its step begins again."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True)
        if self.noted == (self.trainer.global_step, batch_idx):
            assert torch.equal(self.losses[-1], self.losses[-2])
            self.losses.pop()
        self.noted = self.trainer.global_step, batch_idx
        return loss

    noted = (-1, -1)


class Overflowing(Once):
    """Its loss overflows in the second step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (torch.inf if batch_idx == 1 else 1.0)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_step_with_a_scaled_loss_begins_again_with_the_same_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scales = []

    def train(strategy: Any) -> Outcome:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        torch.manual_seed(7)
        module = Overflowing(Recipe(shape=SHAPE))
        without_buffers(module)
        trainer = quiet_trainer(strategy=strategy, plugins=[plugin], max_steps=4, default_root_dir=tmp_path)
        torch.manual_seed(11)
        trainer.fit(module, data())
        scales.append(scaler.get_scale())
        return outcome(trainer, module)

    expected = train("auto")
    least, saved = needs(HOST, train, monkeypatch)
    with caplog.at_level(logging.WARNING, "lightning_hetero"):
        got = train(HeteroOffloadStrategy(HOST, device=EmulatedDevice(memory=least + saved // 2, seed=1)))
    assert_same(got, expected)
    assert set(scales) == {2.0**12}  # halved once, doubled once
    assert any("the step begins again" in record.getMessage() for record in caplog.records)


class Manual(LitModel):
    """Its third batch is larger than those before."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss([batch[0].repeat(32, 1)] if batch_idx == 2 else batch)
        self.manual_backward(loss)
        optimizer.step()


def test_manual_optimization_is_refused_by_name_and_leaves_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = partial(run, tmp_path=tmp_path, module_class=Manual)
    expected = train(Recipe(shape=SHAPE, steps=2), "auto")
    least, saved = needs(HOST, partial(train, Recipe(shape=SHAPE, steps=2)), monkeypatch)
    left: list[LitModel] = []
    strategy = HeteroOffloadStrategy(HOST, device=EmulatedDevice(memory=least + 4 * saved, seed=1))
    with pytest.raises(OutOfMemoryBudgetError, match=r"optimization is manual.*Use a smaller batch"):
        train(Recipe(shape=SHAPE, steps=4), strategy, prepare=left.append)
    assert_same(Outcome([], dict(left[0].state_dict()), []), Outcome([], expected.weights, []))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lightning-hetero")]
