"""Updates that run before the verdict: the bits are plain Lightning's whatever the verdict says,
and the right thing was tried.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import LitModel, Recipe, Shape, assert_same, data, quiet_trainer, run
from support.recipes import MIXED
from support.verdicts import Overflowing, counted_verdicts, divided, fused, norms, run_scaled

from lightning_hetero import BlockPlan, Plan, Tier
from lightning_hetero.runtime import speculation
from lightning_hetero.runtime.speculation import Speculation
from lightning_hetero.runtime.speculation_choice import Worth
from lightning_hetero.strategies import HeteroOffloadStrategy

STATE_ON_DISK = Plan(name="state", blocks=(BlockPlan(name="*", state=Tier.DISK),))


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_HETERO_POISON", "1")


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many blocks were tried, kept, and updated again; every step tries."""
    return counted_verdicts(monkeypatch)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize(
    ("plan", "clips"),
    [("disk", "never"), ("disk", "sometimes"), ("disk", "always"), (STATE_ON_DISK, "sometimes"), (MIXED, "sometimes")],
    ids=["never", "sometimes", "always", "state", "mixed"],
)
def test_clipping_is_exact_after_any_speculation(
    plan: Any, clips: str, precision: str, verdicts: Counter[str], tmp_path: Path
) -> None:
    recipe = Recipe(steps=5, shape=Shape(layers=4), precision=precision)
    seen = norms(recipe, tmp_path)
    clip = {"never": 2 * max(seen), "sometimes": sorted(seen)[2], "always": min(seen) / 2}[clips]
    recipe = Recipe(steps=5, shape=Shape(layers=4), precision=precision, clip=clip)
    strategy = HeteroOffloadStrategy(plan=plan)
    if precision == "bf16-true":
        expected = run(recipe, HeteroOffloadStrategy(plan="host"), tmp_path)
        assert not verdicts["tried"]
    else:
        expected = run(recipe, "auto", tmp_path)
    assert_same(run(recipe, strategy, tmp_path), expected)
    assert verdicts["tried"] == verdicts["kept"] + verdicts["again"] > 0
    assert (verdicts["kept"] > 0) == (clips != "always")
    assert (verdicts["again"] > 0) == (clips != "never")
    assert not verdicts["skipped"]


@pytest.mark.parametrize(
    ("plan", "factory", "clip", "overflows"),
    [
        (STATE_ON_DISK, fused, None, (2,)),
        ("disk", fused, None, ()),
        ("disk", divided, None, (1, 2)),
        ("disk", divided, 1.9, (2,)),
        (STATE_ON_DISK, divided, 0.1, (3,)),
    ],
    ids=["fused", "fused_finite", "divided", "clips_sometimes", "clips_always"],
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_an_overflow_discards_speculative_updates_and_lowers_the_scale(
    plan: Any, factory: Any, clip: float | None, overflows: tuple[int, ...], verdicts: Counter[str], tmp_path: Path
) -> None:
    recipe = Recipe(steps=5, optimizer=factory, clip=clip, shape=Shape(layers=3))
    expected, scale = run_scaled(recipe, "auto", tmp_path, frozenset(overflows))
    got, ours = run_scaled(recipe, HeteroOffloadStrategy(plan=plan), tmp_path, frozenset(overflows))
    assert_same(got, expected)
    assert ours == scale
    assert verdicts["tried"] == verdicts["kept"] + verdicts["again"] + verdicts["skipped"] > 0
    assert (verdicts["skipped"] > 0) == bool(overflows)


@pytest.mark.parametrize("plan", ["disk", STATE_ON_DISK, MIXED], ids=["disk", "state", "mixed"])
@pytest.mark.parametrize("clip", [1e-3, 1e3], ids=["clips", "clips_nothing"])
def test_scaled_gradients_that_are_clipped_by_value_update_after_that(
    plan: Any, clip: float, verdicts: Counter[str], tmp_path: Path
) -> None:
    recipe = Recipe(steps=5, optimizer=divided, clip=clip, clip_by="value", shape=Shape(layers=3))
    expected, scale = run_scaled(recipe, "auto", tmp_path, frozenset((2,)))
    got, ours = run_scaled(recipe, HeteroOffloadStrategy(plan=plan), tmp_path, frozenset((2,)))
    assert_same(got, expected)
    assert ours == scale
    assert not verdicts["tried"]


class Rescaling(Overflowing):
    """Doubles the loss's scale between backward and the optimizer's step, which then divides by the
    new one.
    """

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def closure() -> Any:
            loss = optimizer_closure()
            if batch_idx % 2:
                self.trainer.precision_plugin.scaler._scale.mul_(2)
            return loss

        super().optimizer_step(epoch, batch_idx, optimizer, closure)


@pytest.mark.parametrize("plan", ["disk", STATE_ON_DISK], ids=["disk", "state"])
def test_what_was_tried_with_another_scale_is_discarded(plan: Any, verdicts: Counter[str], tmp_path: Path) -> None:
    recipe = Recipe(steps=4, optimizer=fused, shape=Shape(layers=3))
    expected, scale = run_scaled(recipe, "auto", tmp_path, frozenset(), Rescaling)
    got, ours = run_scaled(recipe, HeteroOffloadStrategy(plan=plan), tmp_path, frozenset(), Rescaling)
    assert_same(got, expected)
    assert ours == scale
    assert verdicts["again"] > 0
    assert verdicts["kept"] > 0


def test_a_first_step_that_overflows_leaves_no_state(verdicts: Counter[str], tmp_path: Path) -> None:
    recipe = Recipe(steps=5, optimizer=divided, shape=Shape(layers=3))
    got, expected = (run_scaled(recipe, s, tmp_path, frozenset((0, 1)))[0] for s in (HeteroOffloadStrategy(plan="disk"), "auto"))
    assert_same(got, expected)
    assert verdicts["skipped"] > 0


class Interrupting(LitModel):
    """The third batch fails once its backward has updated some blocks."""

    def on_fit_start(self) -> None:
        self.model.blocks[0].register_full_backward_hook(self.fail)

    def fail(self, *_: Any) -> None:
        if len(self.losses) == 3:
            raise RuntimeError("stopped in backward")


def test_what_awaits_its_verdict_when_a_batch_fails_is_discarded(verdicts: Counter[str], tmp_path: Path) -> None:
    outcomes = []
    for strategy in ("auto", HeteroOffloadStrategy(plan="disk")):
        torch.manual_seed(7)
        module = Interrupting(Recipe(clip=100.0, shape=Shape(layers=4)))
        torch.manual_seed(11)
        trainer = quiet_trainer(strategy=strategy, max_steps=5, gradient_clip_val=100.0, default_root_dir=tmp_path)
        with pytest.raises(RuntimeError, match="stopped in backward"):
            trainer.fit(module, data())
        outcomes.append({name: value.detach().clone() for name, value in module.state_dict().items()})
    for name, value in outcomes[0].items():
        assert torch.equal(outcomes[1][name], value), name
    assert verdicts["skipped"] > 0


def test_step_times_decide_about_speculation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Half of the steps clip. By a clock on which discards are cheap they go on trying once that is
    known, else they wait.
    """
    tried: list[bool] = []
    begin, verdict = Speculation.begin, Worth.verdict

    def seen(self: Speculation, *, training: bool) -> None:
        begin(self, training=training)
        tried.append(self.trying)

    class Clock:
        now, redone_s = 0.0, 0.0

        def __call__(self) -> float:
            return self.now

    def ended(self: Worth, *, tried: bool, discarded: bool) -> None:
        verdict(self, tried=tried, discarded=discarded)
        clock.now += 1.5 if not tried else clock.redone_s if discarded else 1.0  # what follows this verdict

    class Alternates(LitModel):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.trainer.gradient_clip_val = 0.01 if batch_idx % 2 else 1e6

    clock = Clock()
    monkeypatch.setattr(Speculation, "begin", seen)
    monkeypatch.setattr(Worth, "verdict", ended)
    monkeypatch.setattr(speculation, "Worth", lambda: Worth(clock))
    recipe = Recipe(steps=32, clip=1e6)
    expected = run(recipe, "auto", tmp_path, module_class=Alternates)
    for redone_s, last in ((1.6, True), (3.0, False)):
        tried.clear()
        clock.redone_s = redone_s
        assert_same(run(recipe, HeteroOffloadStrategy(plan="disk"), tmp_path, module_class=Alternates), expected)
        assert tried[:4] == [True] * 4
        assert tried[-8:] == [last] * 8, tried


def test_a_budget_without_room_for_copies_waits_for_the_verdict(verdicts: Counter[str], tmp_path: Path) -> None:
    from lightning_hetero.errors import OutOfMemoryBudgetError

    recipe = Recipe(steps=3, clip=1.9)
    with pytest.raises(OutOfMemoryBudgetError) as refusal:
        run(recipe, HeteroOffloadStrategy(plan=STATE_ON_DISK, host_memory="1B"), tmp_path)
    least = refusal.value.needed_bytes
    expected = run(recipe, "auto", tmp_path)
    assert_same(run(recipe, HeteroOffloadStrategy(plan=STATE_ON_DISK, host_memory=least), tmp_path), expected)
    assert not verdicts["tried"]
    assert_same(run(recipe, HeteroOffloadStrategy(plan=STATE_ON_DISK, host_memory=2 * least), tmp_path), expected)
    assert verdicts["tried"]
