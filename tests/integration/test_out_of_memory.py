"""A device whose memory is too small for a batch: the plan gives something up, the step begins
again, and no bit is another.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from support.cuda import MIXED, StandIn
from support.models import LitModel, Manual, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer, run
from support.out_of_memory import (
    FAULTS,
    FOUR,
    HOST,
    ON_CPU,
    ON_DISK,
    Failing,
    FailingBefore,
    FailingInEvaluation,
    FailingInHooks,
    Once,
    failing,
)
from support.streams import FakeCuda
from support.verdicts import counted_verdicts
from torch import Tensor

from lightning_hetero import EmulatedDevice
from lightning_hetero.errors import BatchMemoryError, OutOfMemoryBudgetError, PlanError
from lightning_hetero.ir.plan import Plan, Saved
from lightning_hetero.lanes.emulated import EmulatedLanes
from lightning_hetero.lanes.streams import StreamLanes
from lightning_hetero.planning.fit_planning import FitPlanning
from lightning_hetero.runtime.session import Session
from lightning_hetero.strategies import HeteroOffloadStrategy, step_retry

ON_GPU = {"accelerator": StandIn(), "devices": 1}
SHAPE = Shape(layers=6, dropout=0.2, counting=False)


def needs(plan: Any, train: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Device memory that the plan needs before anybody knows of activations, and the most that
    those take.
    """
    with pytest.raises(OutOfMemoryBudgetError) as refusal:
        train(HeteroOffloadStrategy(plan, device=EmulatedDevice(memory="1B")))
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


def repeats(caplog: pytest.LogCaptureFixture, what: str = "step") -> list[str]:
    """The warnings that something begins again."""
    return [m for m in (record.getMessage() for record in caplog.records) if f"the {what} begins again" in m]


def assert_as_plain(module: LitModel, got: Outcome, plain: list[Any], expected: Outcome) -> None:
    """Every fault has come, and weights, losses and metrics are those of plain Lightning."""
    assert_same(got, expected)
    assert not module.faults
    assert module.trainer.callback_metrics == plain[0].trainer.callback_metrics


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
def test_a_step_is_repeated_under_a_smaller_plan(
    name: str, plan: Any, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe, prepare = RECIPES[name]
    expected = run(recipe, "auto", tmp_path, prepare=prepare)
    least, saved = needs(plan, partial(run, recipe, tmp_path=tmp_path), monkeypatch)
    strategy = HeteroOffloadStrategy(plan, device=EmulatedDevice(memory=least + int(share * saved), seed=1))
    with caplog.at_level(logging.WARNING, "lightning_hetero"):
        assert_same(run(recipe, strategy, tmp_path, prepare=prepare, module_class=Once), expected)
    assert repeats(caplog)
    assert Saved.RECOMPUTE in {row.saved for row in strategy.plan.blocks}


def test_no_smaller_plan_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(shape=SHAPE)
    monkeypatch.setattr(step_retry, "_MOST", 0)
    least, _ = needs(HOST, partial(run, recipe, tmp_path=tmp_path), monkeypatch)
    with pytest.raises(OutOfMemoryBudgetError, match=r"has nothing left to give up.*Use a smaller batch") as refusal:
        run(recipe, HeteroOffloadStrategy(HOST, device=EmulatedDevice(memory=least)), tmp_path)
    assert refusal.value.tier == "device"
    message = str(refusal.value)
    assert "smaller blocks (block_cls)" in message
    assert "give the EmulatedDevice more memory" in message
    assert "zero_infinity" not in message, "the plan in force may keep less than that already"
    assert message.count("device_memory") == 1, "remedies stand at the end, once"


@pytest.mark.parametrize("name", FAULTS)
def test_wherever_it_happens_the_step_is_repeated(
    name: str, fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What torch's allocator raises on the way through a step on streams; logs and metrics are the
    same too.
    """
    recipe, plan, faults = FAULTS[name]
    plain: list[Any] = []
    expected = run(recipe, "auto", tmp_path, module_class=Failing, prepare=plain.append)
    verdicts = counted_verdicts(monkeypatch)
    with caplog.at_level(logging.WARNING, "lightning_hetero"):
        module, strategy, got = failing(recipe, plan, faults, tmp_path, monkeypatch, on=ON_GPU)
    assert_as_plain(module, got, plain, expected)
    assert bool(verdicts["skipped"]) == (name == "taken back"), "updates that were tried are no obstacle"
    messages = repeats(caplog)
    assert len(messages) == len(faults)
    for message, (_, place, block) in zip(messages, faults, strict=True):
        phase = "forward" if place == "forward" else "backward"
        at = (
            f", at block 'model.{block}'" if block.startswith("blocks") else ""
        )  # hooks do not see where the head's backward begins
        assert f"in {phase}{at}" in message or not block
        assert "2.00 MiB" in message
    assert len({row.saved for row in strategy.plan.blocks}) > 1


def test_a_plan_that_has_fitted_is_not_refused_by_an_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe, small = Recipe(shape=FOUR, steps=7), EmulatedDevice(memory="16MiB", seed=1)
    expected = run(recipe, "auto", tmp_path, module_class=Failing)

    def nothing_fits(*_: Any, **__: Any) -> Any:
        raise PlanError("no plan fits")

    def replan(session: Session, plan: Plan) -> Plan:
        if plan.blocks == session.running.plan.blocks:
            raise OutOfMemoryBudgetError("activations need more", 1, "device")
        return real(session, plan)

    real = Session.replan
    monkeypatch.setattr(FitPlanning, "search", nothing_fits)
    monkeypatch.setattr(Session, "replan", replan)
    with caplog.at_level(logging.WARNING, "lightning_hetero"):
        fault = (0, "forward", "blocks.2")
        _, _, got = failing(recipe, "zero_infinity", [fault], tmp_path, monkeypatch, on={}, device=small)
    assert_same(got, expected)
    assert "which has fitted: activations need more" in caplog.text


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_no_smaller_plan_left_says_what_was_missing_and_where(
    place: str, fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(shape=FOUR)
    where, what = rf"in {place}, at block 'model\.blocks\.2'", r"has nothing left to give up: .*allocate 2\.00 MiB"
    with pytest.raises(OutOfMemoryBudgetError, match=rf"{where}, and plan .* {what}.*raise device_memory") as refusal:
        failing(recipe, "resident", [(0, place, "blocks.2")] * 40, tmp_path, monkeypatch, on=ON_GPU)
    assert refusal.value.tier == "device"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lightning-hetero")]


HOOKS = {
    "before": (FailingBefore, Recipe(shape=FOUR, steps=2), HOST, [(0, "on_before_backward", "")]),
    "after": (FailingInHooks, Recipe(shape=FOUR, steps=2), HOST, [(1, "on_after_backward", "")]),
    "micro-batches": (
        FailingInHooks,
        Recipe(shape=FOUR, steps=2, accumulate=3, groups=True),
        MIXED,
        [(1, "on_before_backward", ""), (2, "on_after_backward", ""), (2, "backward", "blocks.2"), (3, "on_after_backward", "")],
    ),
    "taken back": (
        FailingBefore,
        Recipe(shape=FOUR, steps=4, clip=50.0),
        ON_DISK,
        [(1, "backward", "blocks.0"), (1, "on_before_backward", ""), (3, "on_before_backward", "")],
    ),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_step_is_repeated_from_the_hooks_around_backward(
    name: str, fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As ``training_step``, these hooks run again; logs and metrics count once."""
    kind, recipe, plan, faults = HOOKS[name]
    plain: list[Any] = []
    expected = run(recipe, "auto", tmp_path, module_class=kind, prepare=plain.append)
    with caplog.at_level(logging.WARNING, "lightning_hetero"):
        module, _, got = failing(recipe, plan, faults, tmp_path, monkeypatch, on=ON_GPU, module_class=kind)
    assert_as_plain(module, got, plain, expected)
    messages = repeats(caplog)
    where = {"on_before_backward": "between forward and backward", "on_after_backward": "after backward", "backward": "in backward"}
    assert len(messages) == len(faults)
    assert all(f"too small {where[place]}" in message for message, (_, place, _) in zip(messages, faults, strict=True))


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("owner", [LitModel, pl.Callback])
def test_out_of_memory_between_forward_and_backward_is_named_where_nothing_is_repeated(
    owner: type[Any], accumulate: int, fake: FakeCuda, tmp_path: Path
) -> None:
    zeroes = type("Zeroes", (owner,), {"on_before_zero_grad": out_of_memory})
    module_class, callbacks = (zeroes, []) if owner is LitModel else (LitModel, [zeroes()])
    with pytest.raises(
        BatchMemoryError, match=r"between forward and backward, in on_before_zero_grad.*2\.00 MiB.*Use a smaller batch"
    ):
        run(
            Recipe(shape=FOUR, accumulate=accumulate), HeteroOffloadStrategy("resident"), tmp_path, module_class=module_class,
            callbacks=callbacks, **ON_GPU,
        )  # fmt: skip


EVALUATION: dict[str, tuple[Recipe, Any, list[tuple[int, str, str]]]] = {
    "validation": (Recipe(shape=FOUR, validate=True), "resident", [(-1, "forward", "blocks.2"), (-2, "end", "")]),
    "among micro-batches": (Recipe(shape=FOUR, steps=2, accumulate=3, validate=True), ON_CPU, [(-2, "end", "")] * 3),
    "weights come and go": (Recipe(shape=FOUR, validate=True, clip=50.0), MIXED, [(-1, "forward", "blocks.0")]),
}


@pytest.mark.parametrize("name", EVALUATION)
def test_a_batch_of_a_validation_is_repeated(
    name: str, fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is dropped but this batch: gradients that add up over several batches stay."""
    recipe, plan, faults = EVALUATION[name]
    plain: list[Any] = []
    expected = run(recipe, "auto", tmp_path, module_class=FailingInEvaluation, prepare=plain.append)
    with caplog.at_level(logging.WARNING, "lightning_hetero"):
        module, _, got = failing(recipe, plan, faults, tmp_path, monkeypatch, on=ON_GPU, module_class=FailingInEvaluation)
    assert_as_plain(module, got, plain, expected)
    assert module.seen.compute() == plain[0].seen.compute() > 0
    messages = repeats(caplog, "batch")
    assert len(messages) == len(faults)
    assert all("in an evaluation" in m and "2.00 MiB" in m for m in messages)


def test_a_plan_is_made_anew_after_a_validation_that_did_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe, small = Recipe(shape=FOUR, steps=7, validate=True), EmulatedDevice(memory="16MiB", seed=1)
    expected = run(recipe, "auto", tmp_path, module_class=FailingInEvaluation)
    with caplog.at_level(logging.WARNING, "lightning_hetero"):
        _, strategy, got = failing(
            recipe, "zero_offload", [(-1, "end", "")], tmp_path, monkeypatch, on={}, module_class=FailingInEvaluation, device=small
        )  # fmt: skip
    assert_same(got, expected)
    assert "the batch begins again" in caplog.text
    assert strategy.plan.predicted is not None


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_a_batch_is_repeated_without_a_fit(method: str, fake: FakeCuda, tmp_path: Path) -> None:
    def evaluate(strategy: Any, *, faults: int, **options: Any) -> tuple[Any, FailingInEvaluation]:
        torch.manual_seed(7)
        module = FailingInEvaluation(Recipe(shape=FOUR))
        module.faults = [(-1, "forward", "blocks.2")] * faults
        torch.manual_seed(11)
        return getattr(quiet_trainer(strategy=strategy, default_root_dir=tmp_path, **options), method)(module, data(2)), module

    expected, before = evaluate("auto", faults=0)
    strategy = HeteroOffloadStrategy("resident")
    found, module = evaluate(strategy, faults=3, **ON_GPU)
    assert not module.faults
    assert str(found) == str(expected)
    assert_same(Outcome(module.losses, dict(module.state_dict()), []), Outcome(before.losses, dict(before.state_dict()), []))
    with pytest.raises(
        BatchMemoryError, match=r"in an evaluation, in forward, at block 'model\.blocks\.2'.*nothing left to give up"
    ):
        evaluate(HeteroOffloadStrategy("resident"), faults=40, **ON_GPU)


class Clips(LitModel):
    """Has no memory to clip in."""

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        if self.trainer.global_step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


def test_a_step_is_not_repeated_after_backward(fake: FakeCuda, tmp_path: Path) -> None:
    with pytest.raises(BatchMemoryError, match=r"in the optimizer's step.*of two steps.*2\.00 MiB.*Use a smaller batch"):
        run(Recipe(shape=FOUR), HeteroOffloadStrategy("resident"), tmp_path, module_class=Clips, **ON_GPU)


def test_a_step_whose_updates_have_begun_is_the_store_s_to_take_back(
    fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, store = Recipe(shape=FOUR), tmp_path / "store"
    expected = run(recipe, "auto", tmp_path, module_class=Failing)
    with pytest.raises(OutOfMemoryBudgetError, match=r"updates of this step have begun.*of two steps.*ckpt_path"):
        failing(recipe, HOST, [(1, "backward", "blocks.0")], tmp_path, monkeypatch, on=ON_GPU, disk_path=store)
    module = Failing(recipe)
    strategy = HeteroOffloadStrategy(HOST, disk_path=store)
    trainer = quiet_trainer(strategy=strategy, max_steps=3, default_root_dir=tmp_path, **ON_GPU)
    trainer.fit(module, data(), ckpt_path=str(store))
    assert_same(outcome(trainer, module), Outcome(expected.losses[1:], expected.weights, expected.state))


@pytest.mark.parametrize("lost", [48 << 20, 16 << 20])
def test_a_batch_that_finds_less_memory_than_those_that_have_fitted_can_be_repeated(
    lost: int, fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody takes so much of the device before each batch; what is lost by little and little
    counts too.
    """
    spare = itertools.count(1 << 30, -lost)
    monkeypatch.setattr(StreamLanes, "spare_bytes", lambda lanes: next(spare))
    recipe, waits = Recipe(shape=FOUR, steps=4), []
    expected = run(recipe, "auto", tmp_path, module_class=Failing)
    step = step_retry.StepRetry.training_step

    def notes(one: Any, *args: Any) -> Any:
        found = step(one, *args)
        waits.append(one._executor.batch.probing)
        return found

    monkeypatch.setattr(step_retry.StepRetry, "training_step", notes)
    _, strategy, got = failing(recipe, HOST, [(3, "backward", "blocks.0")], tmp_path, monkeypatch, on=ON_GPU)
    assert_same(got, expected)
    assert len({row.saved for row in strategy.plan.blocks}) > 1
    assert waits == ([True] * 4 if lost > 32 << 20 else [True, False, False, True])


class WithoutWorkspace(Failing):
    """A library of the driver runs out of memory, or fails in another way."""

    status = "ALLOC_FAILED"

    def pass_by(self, place: str, name: str) -> None:
        try:
            super().pass_by(place, name)
        except torch.OutOfMemoryError:
            raise RuntimeError(f"CUDA error: CUBLAS_STATUS_{self.status} when calling `cublasCreate(handle)`") from None


class Broken(WithoutWorkspace):
    status = "INTERNAL_ERROR"


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_library_that_gets_no_memory_is_out_of_memory(
    place: str, fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe, faults = Recipe(shape=FOUR, steps=2), [(0, place, "blocks.1")]
    expected = run(recipe, "auto", tmp_path, module_class=Failing)
    with caplog.at_level(logging.WARNING, "lightning_hetero"):
        _, _, got = failing(recipe, HOST, faults, tmp_path, monkeypatch, on=ON_GPU, module_class=WithoutWorkspace)
    assert_same(got, expected)
    assert len(repeats(caplog)) == 1
    with pytest.raises(RuntimeError, match="INTERNAL_ERROR"):
        failing(recipe, HOST, faults, tmp_path, monkeypatch, on=ON_GPU, module_class=Broken)
    late = [(1, "backward", "blocks.1")]
    with pytest.raises(BatchMemoryError, match="updates of this step have begun") as refusal:
        failing(recipe, HOST, late, tmp_path, monkeypatch, on=ON_GPU, module_class=WithoutWorkspace)
    assert str(refusal.value).count("is too small for this batch") == 1


def test_steps_in_which_the_allocator_empties_its_cache_are_said(
    fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counts = iter([7, 7, 10, 10, 11])  # as the fit begins, and after each step
    monkeypatch.setattr(StreamLanes, "allocator_retries", lambda lanes: next(counts))
    with caplog.at_level(logging.DEBUG, "lightning_hetero"):
        run(Recipe(shape=FOUR, steps=4), HeteroOffloadStrategy(HOST), tmp_path, **ON_GPU)
    said = [record for record in caplog.records if "until torch emptied its cache" in record.message]
    assert [(record.levelname, record.message[:7]) for record in said] == [("WARNING", "3 times"), ("DEBUG", "1 times")]


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
    assert repeats(caplog)


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
