"""Updates before the verdict beside a device with memory of its own: plain Lightning's bits,
whatever the verdict says.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import LitModel, Recipe, Shape, assert_same, data, quiet_trainer, run
from support.verdicts import counted_verdicts, divided, fused, norms, run_scaled

from lightning_hetero import BlockPlan, EmulatedDevice, Plan, Tier
from lightning_hetero.errors import DeviceMemoryError, OutOfMemoryBudgetError
from lightning_hetero.lanes import EmulatedLanes
from lightning_hetero.runtime import speculation_choice
from lightning_hetero.runtime.speculation import Speculation
from lightning_hetero.strategies import HeteroOffloadStrategy

SHAPE = Shape(layers=4)


def on_disk(weights: Tier, **options: Any) -> Plan:
    """State of the repeated blocks on disk; the rest is updated on the device, which tries
    nothing.
    """
    rows = (BlockPlan(name="model.blocks.*", weights=weights, state=Tier.DISK), BlockPlan(name="*", weights=Tier.DEVICE))
    return Plan(name=f"{weights.value} weights", blocks=rows, **options)


PLANS = {tier.value: on_disk(tier) for tier in Tier} | {"ordered": on_disk(Tier.DEVICE, priority=False)}


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many blocks were tried, kept, and updated again; every step tries."""
    monkeypatch.setenv("LIGHTNING_HETERO_POISON", "1")
    return counted_verdicts(monkeypatch)


def strategy_of(plan: Any, **options: Any) -> Any:
    return HeteroOffloadStrategy(plan=plan, device=EmulatedDevice(memory="4MiB", **options))


@pytest.mark.parametrize(("plan", "clips"), [*((name, "sometimes") for name in PLANS), ("disk", "never"), ("disk", "always")])
def test_clipping_is_exact_after_any_speculation(plan: str, clips: str, verdicts: Counter[str], tmp_path: Path) -> None:
    seen = norms(Recipe(steps=5, shape=SHAPE), tmp_path)
    clip = {"never": 2 * max(seen), "sometimes": sorted(seen)[2], "always": min(seen) / 2}[clips]
    recipe = Recipe(steps=5, shape=SHAPE, clip=clip)
    assert_same(run(recipe, strategy_of(PLANS[plan], seed=3), tmp_path), run(recipe, "auto", tmp_path))
    assert verdicts["tried"] == verdicts["kept"] + verdicts["again"] > 0
    assert (verdicts["kept"] > 0) == (clips != "always")
    assert (verdicts["again"] > 0) == (clips != "never")  # where nothing was discarded, whatever was tried has run
    assert not verdicts["skipped"]


@pytest.mark.parametrize(
    ("plan", "factory", "clip", "overflows", "accumulate"),
    [
        ("host", fused, None, (0, 2), 1),
        ("device", divided, None, (1, 2), 1),
        ("disk", divided, 1.9, (2,), 1),
        ("device", divided, 0.1, (3,), 1),
        ("disk", divided, None, (3,), 2),
    ],
    ids=["fused", "divided", "clips_sometimes", "clips_always", "accumulates"],
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_an_overflow_discards_speculative_updates_and_lowers_the_scale(
    plan: str,
    factory: Any,
    clip: float | None,
    overflows: tuple[int, ...],
    accumulate: int,
    verdicts: Counter[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skip = Speculation.skip

    def skips(self: Speculation) -> None:
        parts = [one.part for tried in self._tried.values() for one in tried.due.parts]
        skip(self)
        assert all(p.last_write is None or p.last_write.poll() for p in parts), "an UPLOAD does not know what restores weights"

    monkeypatch.setattr(Speculation, "skip", skips)
    recipe = Recipe(steps=5, optimizer=factory, clip=clip, shape=SHAPE, accumulate=accumulate)
    expected, scale = run_scaled(recipe, "auto", tmp_path, frozenset(overflows))
    got, ours = run_scaled(recipe, strategy_of(PLANS[plan], seed=5), tmp_path, frozenset(overflows))
    assert_same(got, expected)
    assert ours == scale
    assert verdicts["tried"] == verdicts["kept"] + verdicts["again"] + verdicts["skipped"] > 0
    assert verdicts["skipped"] > 0
    assert (verdicts["kept"] > 0) == (clip != 0.1)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_gradients_leave_once_they_have_been_divided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a stream they would leave as they are if their GRAD waited for what compute was given
    before it divided them.
    """
    seen: list[str] = []

    def watched(owner: type, name: str, what: Any) -> None:
        original = getattr(owner, name)

        def call(self: Any, *args: Any) -> Any:
            result = original(self, *args)
            seen.append(what(*args))
            return result

        monkeypatch.setattr(owner, name, call)

    watched(Speculation, "_divide", lambda *_: "divided")
    watched(EmulatedLanes, "mark", lambda: "mark")
    watched(EmulatedLanes, "submit", lambda op, *_: op.kind.value)
    run_scaled(Recipe(steps=3, optimizer=divided, shape=SHAPE), strategy_of(PLANS["disk"]), tmp_path, frozenset())
    at = [index for index, what in enumerate(seen) if what == "divided"]
    assert at
    for index in at:
        assert "mark" in seen[index : seen.index("GRAD", index)]


def test_sixteen_bit_weights_come_back_with_their_masters(verdicts: Counter[str], tmp_path: Path) -> None:
    recipe = Recipe(steps=4, shape=SHAPE, precision="bf16-true", clip=1.9)
    expected = run(recipe, HeteroOffloadStrategy(plan="host"), tmp_path)
    assert not verdicts["tried"]
    for name in ("device", "disk"):
        assert_same(run(recipe, strategy_of(PLANS[name], seed=7), tmp_path), expected)
    assert verdicts["kept"]
    assert verdicts["again"]


class Interrupted(LitModel):
    """The third batch fails once its backward has updated some blocks, as often as it is told."""

    times = 1

    def on_fit_start(self) -> None:
        self.model.blocks[0].register_full_backward_hook(self.fail)

    def fail(self, *_: Any) -> None:
        if len(self.losses) == 3 and self.times:
            self.times -= 1
            raise self.error()

    def error(self) -> Exception:
        return RuntimeError("stopped in backward")


def test_what_awaits_its_verdict_when_a_batch_fails_is_discarded(verdicts: Counter[str], tmp_path: Path) -> None:
    weights = []
    for strategy in ("auto", strategy_of(PLANS["device"], seed=1)):
        torch.manual_seed(7)
        module = Interrupted(Recipe(shape=SHAPE))
        torch.manual_seed(11)
        trainer = quiet_trainer(strategy=strategy, max_steps=5, gradient_clip_val=100.0, default_root_dir=tmp_path)
        with pytest.raises(RuntimeError, match="stopped in backward"):
            trainer.fit(module, data())
        weights.append({name: value.detach().clone() for name, value in module.state_dict().items()})
    for name, value in weights[0].items():
        assert torch.equal(weights[1][name], value), name
    assert verdicts["skipped"] > 0


class Curious(LitModel):
    """Reads weights that have been updated, as it turns out too early, while backward goes on."""

    def on_fit_start(self) -> None:
        self.read: list[torch.Tensor] = []
        self.model.blocks[0].register_full_backward_hook(
            lambda *_: self.read.extend(p.detach().clone() for p in self.model.blocks[3].parameters())
        )


@pytest.mark.parametrize("name", ["host", "device", "disk"])
@pytest.mark.parametrize("beside", [False, True], ids=["on the host", "beside a device"])
def test_before_the_verdict_weights_read_as_before_the_update(
    name: str, beside: bool, verdicts: Counter[str], tmp_path: Path
) -> None:
    read, recipe = [], Recipe(shape=SHAPE, steps=4, clip=100.0)
    for strategy in ("auto", strategy_of(PLANS[name], seed=1) if beside else HeteroOffloadStrategy(PLANS[name])):
        torch.manual_seed(7)
        module = Curious(recipe)
        torch.manual_seed(11)
        trainer = quiet_trainer(strategy=strategy, max_steps=4, gradient_clip_val=100.0, default_root_dir=tmp_path)
        trainer.fit(module, data())
        read.append([*module.read, *(p.detach() for p in module.parameters())])
    assert all(map(torch.equal, *read))
    assert verdicts["again"] > 0
    assert verdicts["kept"] > 0


class TooLarge(Interrupted):
    """What fails is a lack of device memory; the attempt that follows does not."""

    def error(self) -> Exception:
        self.losses.pop()  # its ``training_step`` is called again
        return DeviceMemoryError("full", needed_bytes=1, free_bytes=0, largest_gap_bytes=0, capacity_bytes=1)


def test_a_step_of_which_nothing_but_tries_has_begun_can_be_repeated(verdicts: Counter[str], tmp_path: Path) -> None:
    recipe = Recipe(shape=Shape(layers=4, counting=False), steps=5, clip=100.0)
    strategy = strategy_of(PLANS["disk"], seed=2)
    got = run(recipe, strategy, tmp_path, module_class=TooLarge)
    assert_same(got, run(recipe, "auto", tmp_path))
    assert strategy.plan.blocks != PLANS["disk"].resolve(row.name for row in strategy.plan.blocks).blocks
    assert verdicts["skipped"] > 0
    assert verdicts["kept"] > 0


def test_a_rate_of_discards_decides_whether_to_try(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried: list[bool] = []
    begin = Speculation.begin

    def seen(self: Speculation, *, training: bool) -> None:
        begin(self, training=training)
        tried.append(self.trying)

    monkeypatch.setattr(Speculation, "begin", seen)
    monkeypatch.setattr(speculation_choice, "_MEMORY", 4)
    recipe = Recipe(steps=5, clip=0.01)
    run(recipe, strategy_of(PLANS["disk"]), tmp_path)
    assert tried == [False, True, False, False, False]  # the first batch has to fit; then 1/4, 7/16 and more of the verdicts so far


def test_a_budget_without_room_for_copies_waits_for_the_verdict(verdicts: Counter[str], tmp_path: Path) -> None:
    recipe, plan = Recipe(steps=2, clip=100.0), PLANS["device"]
    with pytest.raises(OutOfMemoryBudgetError) as refusal:
        run(recipe, HeteroOffloadStrategy(plan=plan, host_memory="1B", device=EmulatedDevice(memory="4MiB")), tmp_path)
    for budget in (refusal.value.needed_bytes, 2 * refusal.value.needed_bytes):
        assert not verdicts["tried"]
        run(recipe, HeteroOffloadStrategy(plan=plan, host_memory=budget, device=EmulatedDevice(memory="4MiB")), tmp_path)
    assert verdicts["tried"]
