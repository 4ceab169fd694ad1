"""The first batches of a fit are profiled: real training steps, bit for bit, with time and memory
that add up.
"""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from support.models import LitModel, Manual, Recipe, Shape, assert_same, run
from support.strategies import least_memory
from torch import Tensor

from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan, Tier
from lightning_hetero.ir.schedule import Phase
from lightning_hetero.planning import autoplan
from lightning_hetero.profiling.memory import measures
from lightning_hetero.profiling.model import BatchProfiler
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.strategies import HeteroOffloadStrategy

RECIPES = {
    "plain": Recipe(),
    "dropout_tied_groups": Recipe(shape=Shape(dropout=0.3, tied=True), groups=True, schedule="onecycle"),
    "frozen_unused": Recipe(shape=Shape(frozen=(1,), half_frozen=True, unused=True)),
    "shared": Recipe(shape=Shape(shared=True, dropout=0.2)),
    "reentrant": Recipe(shape=Shape(recompute="reentrant", dropout=0.2)),
    "non_reentrant": Recipe(shape=Shape(recompute="non_reentrant", dropout=0.2)),
    "accumulated_clipped": Recipe(accumulate=2, clip=0.3),
    "clipped_by_value": Recipe(clip=0.01, clip_by="value"),
    "sgd": Recipe(optimizer=lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9)),
    "validated": Recipe(validate=True),
    "bf16-mixed": Recipe(precision="bf16-mixed"),
}


class Profiled:
    """What the profiler saw in one run, by stage."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[Any] = []
        self.profiles: list[ModelProfile] = []
        stop = BatchProfiler.stop

        def seen(profiler: BatchProfiler) -> Any:
            observed = stop(profiler)
            if observed is not None:
                self.batches.append(observed)
            return observed

        monkeypatch.setattr(BatchProfiler, "stop", seen)


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> Profiled:
    return Profiled(monkeypatch)


def steps(recipe: Recipe, num: int) -> Recipe:
    return Recipe(**{**{f: getattr(recipe, f) for f in Recipe.__dataclass_fields__}, "steps": num})


@pytest.mark.parametrize("tight", [False, True], ids=["in_memory", "on_disk"])
@pytest.mark.parametrize("name", RECIPES)
def test_profiled_steps_are_real_steps(name: str, tight: bool, profiled: Profiled, tmp_path: Path) -> None:
    """After one and four steps all is as plain Lightning leaves it: only profiled batches have run
    then.
    """
    torch.manual_seed(0)
    for num in (1, 4):
        recipe = steps(RECIPES[name], num)
        if tight and name == "bf16-mixed":
            recipe = steps(Recipe(precision="bf16-mixed", shape=Shape(layers=24)), num)
        budget = least_memory(lambda s, r=recipe: run(r, s, tmp_path)) if tight else None
        strategy = HeteroOffloadStrategy(host_memory=budget)
        assert_same(run(recipe, strategy, tmp_path), run(recipe, "auto", tmp_path))
    assert profiled.batches


def test_the_blocks_seconds_add_up_to_the_steps(profiled: Profiled, tmp_path: Path) -> None:
    strategy = HeteroOffloadStrategy("zero_infinity")
    run(Recipe(shape=Shape(tied=True, shared=True), steps=5), strategy, tmp_path)
    recorded, *timed = profiled.batches
    profile = strategy.model_profile
    blocks = range(len(profile.blocks))
    assert [bool(batch.ran) for batch in profiled.batches] == [True, False, False, False]
    for batch in timed:
        total = batch.stretches[-1].end.seconds - batch.stretches[0].begin.seconds
        between = sum(b.begin.seconds - a.end.seconds for a, b in pairwise(batch.stretches))  # forward to backward
        found = sum(batch.seconds(phase, block) for phase in Phase for block in blocks)
        assert found == pytest.approx(total - between, rel=1e-9)
    assert [b.forward_s for b in profile.blocks] == [median(t.seconds(Phase.FORWARD, b) for t in timed) for b in blocks]
    assert [b.backward_s for b in profile.blocks] == [median(t.seconds(Phase.BACKWARD, b) for t in timed) for b in blocks]
    assert all(b.forward_s > 0 for b in profile.blocks)
    assert strategy.operator_measures() == measures(recorded)
    assert {row.phase for row in strategy.operator_measures()} == {Phase.FORWARD, Phase.BACKWARD}


def test_work_after_backward_is_part_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = Executor.check_gradients

    def slowly(executor: Executor) -> None:
        time.sleep(0.2)
        check(executor)

    monkeypatch.setattr(Executor, "check_gradients", slowly)
    strategy = HeteroOffloadStrategy("zero_infinity")
    run(Recipe(steps=5), strategy, tmp_path)
    assert sum(b.backward_s for b in strategy.model_profile.blocks) >= 0.2


def test_the_profile_has_the_runtimes_blocks_and_sizes(tmp_path: Path) -> None:
    recipe = Recipe(shape=Shape(layers=4, frozen=(1,)), steps=5)
    strategy = HeteroOffloadStrategy("zero_infinity")
    shapes: list[Any] = []

    class Notes(LitModel):
        def on_train_end(self) -> None:
            shapes.append(strategy.session.executor.model)

    run(recipe, strategy, tmp_path, module_class=Notes)
    profile = strategy.model_profile
    (shape,) = shapes
    assert [b.name for b in profile.blocks] == [b.name for b in shape.blocks] == [b.name for b in strategy.plan.blocks]
    for ours, theirs in zip(profile.shape().blocks, shape.blocks, strict=True):
        assert ours.pinned == theirs.pinned
        assert ours.state_bytes == theirs.state_bytes
        assert 0 <= theirs.weight_bytes - ours.weight_bytes < 4096 * 2  # whole pages
    frozen = profile.blocks[[b.name for b in profile.blocks].index("model.blocks.1")]
    assert frozen.num_trainable_params == 0
    middle = [b for b in profile.blocks if b.name in ("model.blocks.2", "model.blocks.3")]
    assert middle[0].operators == middle[1].operators
    assert middle[0].forward_flop == middle[1].forward_flop == 2 * 2 * 10 * 24 * 51
    assert profile.tokens == 12
    assert profile.constant_host_bytes > 50e6  # the interpreter and torch


def test_static_memory_is_on_the_lowest_tier_if_it_does_not_fit(tmp_path: Path) -> None:
    recipe = Recipe(shape=Shape(layers=24), steps=2)
    first: list[Plan] = []

    class Notes(LitModel):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            first.append(self.trainer.strategy.plan)

    budget = least_memory(lambda s: run(recipe, s, tmp_path))
    for host_memory, tier in ((None, Tier.HOST), (budget, Tier.DISK)):
        strategy = HeteroOffloadStrategy(host_memory=host_memory)
        first.clear()
        run(recipe, strategy, tmp_path, module_class=Notes)
        block = next(b for b in first[0].blocks if b.name == "model.blocks.5")
        assert (block.weights, block.state) == (tier, tier)


def test_nothing_overlaps_while_blocks_are_timed(tmp_path: Path) -> None:
    """Every update of the timed steps is over before compute goes on."""
    budget = least_memory(lambda s: run(Recipe(), s, tmp_path))
    strategy = HeteroOffloadStrategy(host_memory=budget, trace=True)
    run(Recipe(steps=4), strategy, tmp_path)
    spans = [s for s in strategy.trace.spans if s.step > 0]  # the first one is recorded
    waits = [(s.start_s, s.end_s) for s in spans if s.is_wait]
    updates = [s for s in spans if s.name.startswith("UPDATE")]
    assert updates
    verdicts = [(s.start_s, s.end_s) for s in updates if not any(a <= s.start_s and s.end_s <= b + 1e-4 for a, b in waits)]
    last = max(end for _, end in waits)
    assert all(start >= waits[0][0] for start, _ in verdicts)
    for start, end in verdicts:  # those that optimizer.step() waits for: no anchor comes in between
        assert not any(start < a < end for a, _ in waits), (start, end, last)


def test_batches_without_backward_are_passed_over(profiled: Profiled, tmp_path: Path) -> None:
    class Skips(LitModel):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx < 2 else loss

    recipe = Recipe(steps=7)
    assert_same(
        run(recipe, HeteroOffloadStrategy("zero_infinity"), tmp_path, module_class=Skips),
        run(recipe, "auto", tmp_path, module_class=Skips),
    )
    assert [bool(b.ran) for b in profiled.batches] == [True, False, False, False]


def test_a_model_that_uses_torch_func_is_profiled(tmp_path: Path) -> None:
    """Saved-tensors hooks would not let it run."""

    class Penalized(LitModel):
        def loss(self, batch: list[Tensor]) -> Tensor:
            slope = torch.func.grad(lambda z: (z**2).sum())(torch.ones(3))
            return super().loss(batch) + slope.sum()

    recipe = Recipe(steps=5)
    assert_same(
        run(recipe, HeteroOffloadStrategy("zero_infinity"), tmp_path, module_class=Penalized),
        run(recipe, "auto", tmp_path, module_class=Penalized),
    )


def test_an_exception_in_a_profiled_batch_is_the_users_own(tmp_path: Path) -> None:
    class Fails(LitModel):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            super().training_step(batch, batch_idx)
            raise KeyError("the user's own")

    left: list[LitModel] = []
    with pytest.raises(KeyError, match="the user's own"):
        run(Recipe(), HeteroOffloadStrategy(), tmp_path, module_class=Fails, prepare=left.append)
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    assert _get_current_dispatch_mode() is None
    left[0].loss(next(iter(__import__("support.models").models.data()))).backward()


def test_manual_optimization_is_profiled_too(profiled: Profiled, tmp_path: Path) -> None:
    recipe = Recipe(steps=5)
    strategy = HeteroOffloadStrategy("zero_infinity")
    assert_same(run(recipe, strategy, tmp_path, module_class=Manual), run(recipe, "auto", tmp_path, module_class=Manual))
    assert [bool(b.ran) for b in profiled.batches] == [True, False, False, False]
    assert all(b.backward_s > 0 for b in strategy.model_profile.blocks)


def test_the_stages_follow_each_other(tmp_path: Path) -> None:
    stages: list[autoplan.Stage] = []

    class Notes(LitModel):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            stages.append(self.trainer.strategy.autoplan.stage)
            return super().training_step(batch, batch_idx)

    run(Recipe(steps=6), HeteroOffloadStrategy("zero_infinity"), tmp_path, module_class=Notes)
    assert stages == [autoplan.Stage.RECORD, *[autoplan.Stage.TIME] * 3, *[autoplan.Stage.RUN] * 2]
