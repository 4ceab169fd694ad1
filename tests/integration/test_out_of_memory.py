"""A device whose memory is too small for a batch: the plan gives something up, the step begins again, and no bit is another."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from support.cuda import MIXED, RESIDENT, StandIn
from support.models import LitModel, Manual, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer, run
from support.streams import FakeCuda
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_hetero import BlockPlan, EmulatedDevice, Plan, Tier
from lightning_hetero.errors import OutOfMemoryBudgetError
from lightning_hetero.ir.plan import Saved
from lightning_hetero.runtime.activations.swaps import Swap
from lightning_hetero.runtime.lanes.emulated import EmulatedLanes
from lightning_hetero.strategies import HeteroOffloadStrategy, recovery

SHAPE = Shape(layers=6, dropout=0.2, counting=False)
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


class Once(LitModel):
    """Notes the loss of a batch once, however often its step begins again; metrics and logs do by themselves."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.mean = MeanMetric()
        self.noted: dict[tuple[int, int], Tensor] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("batch", batch_idx, on_step=False, on_epoch=True, reduce_fx="sum")
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log_dict({"loss": loss}, on_epoch=True)
        key = self.trainer.global_step, batch_idx
        if key in self.noted:
            assert torch.equal(self.losses.pop(), self.noted[key])
        self.noted.setdefault(key, loss.detach().clone())
        return loss


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


class Failing(Once):
    """Runs out of memory in the batches, at the places and in the blocks that ``faults`` says, one after the other."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.faults: list[tuple[int, str, str]] = []
        self.batch = 0
        inner = {f"blocks.{i}": block.down for i, block in enumerate(self.model.blocks)}
        for name, module in {**inner, "head": self.model.head}.items():
            module.register_forward_pre_hook(partial(self._enters, name))
            module.register_forward_hook(partial(self._leaves, name))

    def _enters(self, name: str, *_: Any) -> None:
        self.pass_by("forward" if torch._C._current_graph_task_id() == -1 else "recomputation", name)

    def _leaves(self, name: str, module: Any, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda _: self.pass_by("backward", name))

    def pass_by(self, place: str, name: str) -> None:
        """What torch's allocator raises, if it is its turn."""
        if self.faults[:1] == [(self.batch, place, name)]:
            del self.faults[0]
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.batch = batch_idx
        return super().training_step(batch, batch_idx)


def failing(
    recipe: Recipe, plan: Any, faults: Sequence[tuple[int, str, str]], folder: Path, found: list[Failing], **options: Any
) -> tuple[Any, Outcome]:
    """Trains on a GPU that is none, with these faults."""

    def prepare(module: Any) -> None:
        module.faults = list(faults)
        found.append(module)

    strategy = HeteroOffloadStrategy(plan, **options)
    return strategy, run(recipe, strategy, folder, module_class=Failing, prepare=prepare, accelerator=StandIn(), devices=1)


FOUR = Shape(layers=4, dropout=0.2, counting=False)
ON_CPU = Plan(name="on the CPU", blocks=(BlockPlan(name="model.blocks.*", weights=Tier.DEVICE), RESIDENT))
FAULTS: dict[str, tuple[Recipe, Any, list[tuple[int, str, str]]]] = {
    "forward, after updates": (Recipe(shape=FOUR), ON_CPU, [(1, "forward", "blocks.2")]),
    "backward": (Recipe(shape=FOUR, steps=2), "resident", [(0, "backward", "blocks.0")]),
    "backward, before updates": (Recipe(shape=FOUR, steps=2), HOST, [(1, "backward", "head")]),
    "recomputation": (Recipe(shape=FOUR, steps=2), MIXED, [(0, "recomputation", "blocks.0")]),
    "swap-in": (Recipe(shape=FOUR, steps=2), MIXED, [(0, "swap-in", "")]),
    "micro-batches": (
        Recipe(shape=FOUR, steps=2, accumulate=3, groups=True),
        MIXED,
        [(1, "forward", "blocks.1"), (2, "backward", "blocks.2"), (5, "backward", "head")],
    ),
    "clipped": (
        Recipe(shape=FOUR, steps=3, clip=0.3, accumulate=2),
        HOST,
        [(3, "backward", "blocks.0"), (4, "forward", "blocks.3")],
    ),
    "again and again": (Recipe(shape=FOUR, steps=2), HOST, [*[(0, "forward", "blocks.2")] * 2, *[(0, "backward", "blocks.1")] * 2]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_wherever_it_happens_the_step_begins_again(
    name: str, fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What torch's allocator raises on the way through a step on streams; logs and metrics are the same too."""
    recipe, plan, faults = FAULTS[name]
    plain: list[Any] = []
    expected = run(recipe, "auto", tmp_path, module_class=Failing, prepare=plain.append)
    found: list[Failing] = []
    bring = Swap.bring

    def brings(swap: Swap, *args: Any) -> Any:
        found[0].pass_by("swap-in", "")
        return bring(swap, *args)

    monkeypatch.setattr(Swap, "bring", brings)
    with caplog.at_level(logging.WARNING, "lightning_hetero"):
        strategy, got = failing(recipe, plan, faults, tmp_path, found)
    assert_same(got, expected)
    assert not found[0].faults
    assert found[0].trainer.callback_metrics == plain[0].trainer.callback_metrics
    messages = [m for m in (record.getMessage() for record in caplog.records) if "the step begins again" in m]
    assert len(messages) == len(faults)
    for message, (_, place, block) in zip(messages, faults, strict=True):
        phase = "forward" if place == "forward" else "backward"
        at = (
            f", at block 'model.{block}'" if block.startswith("blocks") else ""
        )  # hooks do not see where the head's backward begins
        assert f"in {phase}{at}" in message or not block
        assert "2.00 MiB" in message
    assert len({row.saved for row in strategy.plan.blocks}) > 1


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_nothing_left_to_give_up_says_what_was_missing_and_where(place: str, fake: FakeCuda, tmp_path: Path) -> None:
    recipe = Recipe(shape=FOUR)
    where, what = rf"in {place}, at block 'model\.blocks\.2'", r"has nothing left to give up: .*allocate 2\.00 MiB"
    with pytest.raises(OutOfMemoryBudgetError, match=rf"{where}, and plan .* {what}.*raise device_memory") as refusal:
        failing(recipe, "resident", [(0, place, "blocks.2")] * 40, tmp_path, [])
    assert refusal.value.tier == "device"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lightning-hetero")]


def test_a_step_whose_updates_have_begun_is_the_store_s_to_take_back(fake: FakeCuda, tmp_path: Path) -> None:
    recipe, store = Recipe(shape=FOUR), tmp_path / "store"
    expected = run(recipe, "auto", tmp_path, module_class=Failing)
    with pytest.raises(OutOfMemoryBudgetError, match=r"updates of this step have begun.*of two steps.*ckpt_path"):
        failing(recipe, HOST, [(1, "backward", "blocks.0")], tmp_path, [], disk_path=store)
    module = Failing(recipe)
    strategy = HeteroOffloadStrategy(HOST, disk_path=store)
    trainer = quiet_trainer(strategy=strategy, max_steps=3, default_root_dir=tmp_path, accelerator=StandIn(), devices=1)
    trainer.fit(module, data(), ckpt_path=str(store))
    assert_same(outcome(trainer, module), Outcome(expected.losses[1:], expected.weights, expected.state))


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


class Growing(Manual):
    """Its third batch is larger than those before."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().training_step([batch[0].repeat(32, 1)] if batch_idx == 2 else batch, batch_idx)


def test_manual_optimization_is_refused_by_name_and_leaves_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = partial(run, tmp_path=tmp_path, module_class=Growing)
    expected = train(Recipe(shape=SHAPE, steps=2), "auto")
    least, saved = needs(HOST, partial(train, Recipe(shape=SHAPE, steps=2)), monkeypatch)
    left: list[LitModel] = []
    strategy = HeteroOffloadStrategy(HOST, device=EmulatedDevice(memory=least + 4 * saved, seed=1))
    with pytest.raises(OutOfMemoryBudgetError, match=r"optimization is manual.*Use a smaller batch"):
        train(Recipe(shape=SHAPE, steps=4), strategy, prepare=left.append)
    assert_same(Outcome([], dict(left[0].state_dict()), []), Outcome([], expected.weights, []))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lightning-hetero")]
