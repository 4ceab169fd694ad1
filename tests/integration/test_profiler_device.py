"""The first batches on a device with memory of its own: what is seen of them, whatever its type and
its size.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
from support.lane_kinds import answering_as_gpu
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, run
from torch import Tensor

from lightning_hetero import BlockPlan, EmulatedDevice, Plan, Tier, UpdateLane
from lightning_hetero.errors import ConfigError, OutOfMemoryBudgetError, PlanError
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import Prediction, Saved
from lightning_hetero.lanes.emulated import EmulatedLanes
from lightning_hetero.planners import PLANNERS
from lightning_hetero.planners.evaluation import evaluated
from lightning_hetero.planning.autoplan import BatchSize, Stage
from lightning_hetero.profiling import operators
from lightning_hetero.profiling.model import check_activations
from lightning_hetero.strategies import HeteroOffloadStrategy

SHAPE = Shape(layers=4, dropout=0.2, counting=False)
BYTES = ("activation_bytes", "boundary_bytes", "transient_bytes", "operators", "forward_flop")


def seen(profile: ModelProfile) -> list[tuple[Any, ...]]:
    """What a profile says beside seconds."""
    return [tuple(getattr(block, key) for key in BYTES) for block in profile.blocks]


def profile_of(recipe: Recipe, folder: Path, *, memory: str | int = "8MiB", module: type[LitModel] = LitModel) -> ModelProfile:
    strategy = HeteroOffloadStrategy("zero_offload", device=EmulatedDevice(memory=memory))
    got = run(recipe, strategy, folder, module_class=module)
    assert_same(got, run(recipe, "auto", folder, module_class=module))
    assert strategy.model_profile is not None
    return strategy.model_profile


@pytest.mark.parametrize("recipe", [Recipe(shape=SHAPE, steps=5), Recipe(shape=SHAPE, steps=5, precision="bf16-mixed")])
def test_a_gpu_s_tensors_are_seen(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the profiler sees does not depend on the type of the device."""
    expected = profile_of(recipe, tmp_path)
    with answering_as_gpu(monkeypatch):
        found = profile_of(recipe, tmp_path)
    assert seen(found) == seen(expected)
    assert all(any(getattr(block, key) for block in found.blocks) for key in BYTES)


class Works(LitModel):
    """One of its blocks runs kernels with workspaces of 3 MiB, in forward only."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.model.blocks[2].register_forward_pre_hook(self.work)

    def work(self, *_: Any) -> None:
        WORKSPACE[:] = [3 << 20]


WORKSPACE: list[int] = []


def test_workspaces_of_kernels_are_taken_from_the_allocator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(shape=SHAPE, steps=5)
    monkeypatch.setattr(EmulatedLanes, "take_peak_bytes", lambda lanes: WORKSPACE.pop() if WORKSPACE else 0)
    with answering_as_gpu(monkeypatch):
        before = profile_of(recipe, tmp_path)
        found = profile_of(recipe, tmp_path, module=Works)
    grown = {b.name: b.transient_bytes - a.transient_bytes for a, b in zip(before.blocks, found.blocks, strict=True)}
    largest = grown.pop("model.blocks.2")
    assert 3 << 19 < largest <= 3 << 20  # it takes the place of what storages need in that forward
    assert set(grown.values()) == {0}


class Blind(operators.OperatorRecorder):
    """Sees no storage."""

    def _has_storage(self, leaf: object) -> bool:
        return False


def test_a_blind_profile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_hetero.profiling.model.OperatorRecorder", Blind)
    with pytest.raises(ConfigError, match=r"does not show the blocks' inputs.*plan=\"host\""):
        profile_of(Recipe(shape=SHAPE, steps=6), tmp_path)


@pytest.mark.parametrize("kind", ["boundary_bytes", "transient_bytes", "operators"])
def test_each_kind_that_is_missing_is_named(kind: str, tmp_path: Path) -> None:
    profile = profile_of(Recipe(shape=SHAPE, steps=5), tmp_path)
    check_activations(profile)

    def without(block: BlockProfile) -> BlockProfile:
        return replace(block, **{kind: () if kind == "operators" else 0})

    with pytest.raises(ConfigError, match=kind):
        check_activations(replace(profile, blocks=tuple(map(without, profile.blocks))))


# ---- any plan, any memory ------------------------------------------------------------------------


SWAPS = {"up": Saved.SWAP_HOST, "gelu": Saved.SWAP_DISK, "norm": Saved.RECOMPUTE}
PLANS = {
    "recomputed": {"saved": Saved.RECOMPUTE},
    "swapped": {"saved": Saved.SWAP_HOST, "boundary": Saved.SWAP_HOST},
    "on disk": {"saved": Saved.SWAP_DISK, "boundary": Saved.SWAP_DISK},
    "least": {"saved": Saved.RECOMPUTE, "boundary": Saved.SWAP_HOST},
    "operators kept": {"operators": SWAPS},
    "operators dropped": {"saved": Saved.RECOMPUTE, "operators": {"up": Saved.KEEP, "gelu": Saved.SWAP_HOST}},
}


class Records(pl.Callback):
    """Has batches recorded and timed again under the plan in force."""

    def __init__(self) -> None:
        self.profiles: list[ModelProfile] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        autoplan = trainer.strategy.autoplan
        if autoplan.stage is Stage.RUN:
            self.profiles.append(autoplan.model)
            autoplan.stage = Stage.RECORD
            autoplan.before_batch(trainer.strategy.session, BatchSize(tokens=1, micro_batches=1))


@pytest.mark.parametrize("shape", [Shape(layers=4, dropout=0.2, odd=True), Shape(layers=4, shared=True)], ids=["odd", "shared"])
@pytest.mark.parametrize("name", PLANS)
def test_blocks_save_the_same_tensors_under_any_plan(
    name: str, shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = BlockPlan(name="model.blocks.*", weights=Tier.HOST, state=Tier.HOST, **PLANS[name])
    resident = BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE)

    def planner(model: ModelProfile, hardware: Any, **options: Any) -> Plan:
        return evaluated(Plan(name="test", blocks=(rules, resident)), model, hardware, **options)

    monkeypatch.setitem(PLANNERS, "test", planner)
    records, recipe = Records(), Recipe(shape=shape, steps=10)
    strategy = HeteroOffloadStrategy("test", device=EmulatedDevice(memory="8MiB", seed=1), replan_drift=None)
    got = run(recipe, strategy, tmp_path, callbacks=[records])
    assert_same(got, run(recipe, "auto", tmp_path))
    first, second = records.profiles
    for one, two in zip(first.blocks, second.blocks, strict=True):
        for key in BYTES:
            if key == "operators" and shape.shared:  # a recomputation does not say which of the block's uses it belongs to
                assert sum(o.bytes for o in two.operators) == sum(o.bytes for o in one.operators), one.name
            elif key != "transient_bytes":
                assert getattr(two, key) == getattr(one, key), (one.name, key)
    largest = max(block.transient_bytes for block in first.blocks)
    for one, two in zip(first.blocks, second.blocks, strict=True):
        assert one.transient_bytes <= two.transient_bytes + one.boundary_bytes, one.name
        assert two.transient_bytes <= one.transient_bytes + one.activation_bytes, one.name
    assert max(block.transient_bytes for block in second.blocks) <= 2 * largest


PLANNED = ["holistic", "lohan", "autohete", "protrain", "deep_optimizer_states", "zero_offload", "zero_infinity", "full_recompute"]
LONG = Recipe(shape=replace(SHAPE, layers=8, width=40), steps=11)


class Case(NamedTuple):
    """A fit on a device on which the provisional plan fits, but not the first batch."""

    memory: int
    plain: Outcome
    profile: ModelProfile


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("case")
    profile = profile_of(replace(LONG, steps=5), folder)
    with pytest.raises(OutOfMemoryBudgetError) as refusal:
        run(LONG, HeteroOffloadStrategy("host", device=EmulatedDevice(memory="1B")), folder)
    saved = sum(block.activation_bytes for block in profile.blocks)
    return Case(refusal.value.needed_bytes + saved // 2, run(LONG, "auto", folder), profile)


class Predictions(pl.Callback):
    """Notes what is predicted, from the first plan on."""

    def __init__(self) -> None:
        self.found: list[Prediction | None] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.strategy.autoplan.plan is not None:
            self.found.append(trainer.strategy.plan.predicted)


def assert_seen(found: ModelProfile, expected: ModelProfile) -> None:
    """Both say the same of what blocks save."""
    for one, two in zip(expected.blocks, found.blocks, strict=True):
        for key in BYTES:
            if key != "transient_bytes":
                assert getattr(two, key) == getattr(one, key), (one.name, key)


def on_link(memory: int) -> EmulatedDevice:
    return EmulatedDevice(memory=memory, h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9)


@pytest.mark.parametrize("name", PLANNED)
def test_planners_plan_after_a_first_batch_that_did_not_fit(
    name: str, case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From the same figures as where it fits; then every step has a prediction."""
    predictions = Predictions()
    strategy = HeteroOffloadStrategy(name, device=on_link(case.memory))
    with caplog.at_level(logging.WARNING, "lightning_hetero"):
        assert_same(run(LONG, strategy, tmp_path, callbacks=[predictions]), case.plain)
    assert "the step begins again" in caplog.text, "the first batch fitted"
    assert_seen(strategy.model_profile, case.profile)
    assert len(predictions.found) >= 4
    assert None not in predictions.found


class Growing(LitModel):
    """From the eighth batch on every batch is four times as large."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step([batch[0].repeat(4, 1)] if self.trainer.global_step >= 7 else batch, batch_idx)


def test_a_planned_step_that_does_not_fit_is_recorded_and_planned_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe, predictions = replace(LONG, steps=16), Predictions()
    small = profile_of(replace(LONG, steps=5), tmp_path)
    saved = sum(block.activation_bytes for block in small.blocks)
    with pytest.raises(OutOfMemoryBudgetError) as refusal:
        run(LONG, HeteroOffloadStrategy("host", device=EmulatedDevice(memory="1B")), tmp_path)
    strategy = HeteroOffloadStrategy("protrain", device=on_link(refusal.value.needed_bytes + 2 * saved), replan_drift=None)
    with caplog.at_level(logging.INFO, "lightning_hetero"):
        got = run(recipe, strategy, tmp_path, module_class=Growing, callbacks=[predictions])
    assert_same(got, run(recipe, "auto", tmp_path, module_class=Growing))
    assert "planning anew: the device's memory was too small" in caplog.text
    assert len(predictions.found) >= 8
    assert None not in predictions.found
    grown = strategy.model_profile
    assert sum(block.activation_bytes for block in grown.blocks) > 3 * saved, "the larger batch was recorded"


def test_training_continues_with_what_has_fitted_if_there_is_no_plan(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def planner(*_: Any, **__: Any) -> Plan:
        raise PlanError("nothing fits", tier="device", shortfall_bytes=1 << 40)

    monkeypatch.setitem(PLANNERS, "test", planner)
    strategy = HeteroOffloadStrategy("test", device=on_link(case.memory))
    with caplog.at_level(logging.WARNING, "lightning_hetero"):
        assert_same(run(LONG, strategy, tmp_path), case.plain)
    assert "Training goes on with the plan that fits the device by what it has given up" in caplog.text
    assert strategy.plan.predicted is not None
    with pytest.raises(PlanError, match="nothing fits"):
        run(LONG, HeteroOffloadStrategy("test", device=on_link(8 << 20)), tmp_path)
