"""What a training loop may do with gradients, losses and batches, bit for bit as under plain
Lightning.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, Timer
from support.models import LitModel, Outcome, Recipe, Shape, data, outcome, quiet_trainer, run
from support.strategies import assert_same_as_plain
from torch import Tensor, nn

from lightning_hetero.errors import OffloadedAccessError, OutOfMemoryBudgetError
from lightning_hetero.strategies import HeteroOffloadStrategy

KINDS = ["host", "disk", "tight"]


def loss_through(module: LitModel, order: list[int], batch: list[Tensor]) -> Tensor:
    """The loss with only some blocks, or in another order."""
    blocks = module.model.blocks
    module.model.blocks = nn.ModuleList(blocks[i] for i in order)
    try:
        return LitModel.loss(module, batch)
    finally:
        module.model.blocks = blocks


class Skipping(LitModel):
    """``training_step`` gives None for every other batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


class ReturningDict(LitModel):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "batch": batch}


class SometimesUnused(LitModel):
    """A block takes part in every other batch, so its gradients are None in between."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return loss_through(self, [0, 1, 2] if self.calls % 2 else [0, 2], batch)


class Penalized(LitModel):
    """The loss reads weights of blocks directly, and asks autograd for a gradient of a gradient."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        loss = super().loss(batch)
        weight = self.model.head.weight
        (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
        return loss + 0.1 * slope.square().sum() + 0.01 * weight.square().sum()


class GradientPenalty(LitModel):
    """Differentiates a gradient that went through the blocks: their weights are read once more, in
    another order.
    """

    def loss(self, batch: list[Tensor]) -> Tensor:
        loss = super().loss(batch)
        (slope,) = torch.autograd.grad(loss, self.model.position, create_graph=True)
        return loss + slope.square().sum()


class OwnBackward(LitModel):
    """Overrides ``backward``: twice through one graph."""

    def backward(self, loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()


class OwnClipping(LitModel):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.losses.append(torch.nn.utils.clip_grad_norm_(self.model.blocks[0].parameters(), 0.1))


class OwnOptimizerStep(LitModel):
    """Steps every other batch, with a warm-up written by hand, as Lightning's documentation
    shows.
    """

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (batch_idx + 1)
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class OwnZeroGrad(LitModel):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


def clamp_gradient(param: Tensor) -> None:
    param.grad.clamp_(-1e-3, 1e-3)


class HookedParameter(LitModel):
    """Hooks on parameters change gradients as they are accumulated."""

    def on_fit_start(self) -> None:
        for p in self.model.blocks.parameters():
            p.register_hook(lambda grad: 0.5 * grad)
        self.model.blocks[0].up.weight.register_post_accumulate_grad_hook(clamp_gradient)


MODULES = [
    Skipping, ReturningDict, SometimesUnused, Penalized, OwnBackward, OwnClipping, OwnOptimizerStep, OwnZeroGrad, HookedParameter,
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "module_class"),
    [*product(KINDS, MODULES), *(("device", m) for m in (Skipping, Penalized, OwnBackward, OwnOptimizerStep, OwnZeroGrad))],
)
def test_modules_that_change_the_loop(kind: str, module_class: Any, tmp_path: Path) -> None:
    train = partial(run, Recipe(steps=4), tmp_path=tmp_path, module_class=module_class, max_epochs=1)
    assert_same_as_plain(kind, train)


@pytest.mark.parametrize("kind", ["host", "disk", "device"])
def test_gradients_of_gradients(kind: str, tmp_path: Path) -> None:
    assert_same_as_plain(kind, partial(run, Recipe(), tmp_path=tmp_path, module_class=GradientPenalty))


def test_gradients_of_gradients_need_all_their_blocks_at_once(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemoryBudgetError, match=r"blocks in use at the same time .* Raise host_memory"):
        assert_same_as_plain("tight", partial(run, Recipe(), tmp_path=tmp_path, module_class=GradientPenalty))


class Aside(nn.Module):
    """A block that hands a second tensor over by leaving it on the module, or by returning it in a
    dataclass.
    """

    def __init__(self, returned: bool) -> None:
        super().__init__()
        self.linear, self.router, self.returned = nn.Linear(9, 9), nn.Linear(9, 2), returned

    def forward(self, x: Tensor) -> Any:
        y = x + self.linear(x).relu()
        self.aside = self.router(y).square().mean()
        return Pair(y, self.aside) if self.returned else y


@dataclass
class Pair:
    y: Tensor
    loss: Tensor


class Routed(LitModel):
    returned = True

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.model = nn.ModuleList(Aside(self.returned) for _ in range(3))

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, aside = torch.nn.functional.one_hot(batch[0] % 9, 9).float(), torch.zeros(())
        for block in self.model:
            out = block(x)
            x = out.y if self.returned else out
            aside = aside + (out.loss if self.returned else block.aside)
        return x.square().mean() + aside


class Unreturned(Routed):
    returned = False


@pytest.mark.parametrize("kind", ["disk", "tight"])
def test_outputs_may_be_dataclasses(kind: str, tmp_path: Path) -> None:
    assert_same_as_plain(kind, partial(run, Recipe(), tmp_path=tmp_path, module_class=Routed))


@pytest.mark.parametrize("kind", ["disk", "tight"])
def test_a_backward_that_is_not_announced_is_an_error_not_a_wrong_gradient(kind: str, tmp_path: Path) -> None:
    with pytest.raises(OffloadedAccessError, match=r"block 'model.\d' .* Return such tensors"):
        assert_same_as_plain(kind, partial(run, Recipe(), tmp_path=tmp_path, module_class=Unreturned))


class Probing(LitModel):
    """Runs a backward of its own inside of its step; Lightning drops its gradients before its own
    one.
    """

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        loss.backward(retain_graph=True)
        return loss


@pytest.mark.parametrize("kind", ["host", "tight", "device"])
def test_the_users_own_backward_updates_nothing(kind: str, tmp_path: Path) -> None:
    assert_same_as_plain(kind, partial(run, Recipe(), tmp_path=tmp_path, module_class=Probing))


class Reading(pl.Callback):
    """Records gradients, wherever Lightning lets a callback see them."""

    @torch.no_grad()
    def read(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        grads = {n: p.grad for n, p in pl_module.named_parameters()}
        pl_module.losses += [torch.tensor(len([g for g in grads.values() if g is None]))]
        pl_module.losses += [g.clone() for g in grads.values() if g is not None]


class ReadingAfterBackward(Reading):
    def on_after_backward(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.read(trainer, pl_module)


class ReadingBeforeStep(Reading):
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.read(trainer, pl_module)


class ReadingBeforeZeroGrad(Reading):
    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.read(trainer, pl_module)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"clip": 0.3}], ids=str)
@pytest.mark.parametrize("callback", [ReadingAfterBackward, ReadingBeforeStep, ReadingBeforeZeroGrad])
@pytest.mark.parametrize("kind", ["host", "tight", "device"])
def test_callbacks_see_the_gradients(kind: str, callback: Any, options: dict[str, Any], tmp_path: Path) -> None:
    recipe = Recipe(shape=Shape(unused=True, tied=True), steps=2, **options)
    assert_same_as_plain(kind, lambda strategy: run(recipe, strategy, tmp_path, callbacks=[callback()]))


@pytest.mark.parametrize("kind", [*KINDS, "device"])
def test_scheduled_accumulation(kind: str, tmp_path: Path) -> None:
    def train(strategy: Any) -> Outcome:
        torch.manual_seed(7)
        module = LitModel(Recipe())
        callback = GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})
        trainer = quiet_trainer(strategy=strategy, max_epochs=3, callbacks=[callback], default_root_dir=tmp_path)
        trainer.fit(module, data(4))
        return outcome(trainer, module)

    assert_same_as_plain(kind, train)


class Stopped(LitModel):
    def on_validation_epoch_end(self) -> None:
        self.log("stop", torch.stack(self.losses[-2:]).mean())


@pytest.mark.parametrize("kind", KINDS)
def test_early_stopping(kind: str, tmp_path: Path) -> None:
    def train(strategy: Any) -> Outcome:
        stopping = EarlyStopping("stop", patience=1, min_delta=0.05)
        recipe = Recipe(steps=-1, validate=True)
        result = run(recipe, strategy, tmp_path, module_class=Stopped, callbacks=[stopping], max_epochs=20)
        assert stopping.stopped_epoch or stopping.wait_count
        return result

    assert_same_as_plain(kind, train)


@pytest.mark.parametrize("kind", KINDS)
def test_anomaly_detection_and_deterministic_algorithms(kind: str, tmp_path: Path) -> None:
    recipe = Recipe(shape=Shape(dropout=0.2))
    try:
        assert_same_as_plain(kind, partial(run, recipe, tmp_path=tmp_path, detect_anomaly=True, deterministic=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", [*KINDS, "device"])
def test_the_order_of_blocks_may_change(kind: str, tmp_path: Path) -> None:
    """The schedule expects the last batch's order; any other order is served on demand."""

    class Shuffled(LitModel):
        def loss(self, batch: list[Tensor]) -> Tensor:
            return loss_through(self, torch.randperm(3).tolist(), batch)

    assert_same_as_plain(kind, partial(run, Recipe(steps=5), tmp_path=tmp_path, module_class=Shuffled))


def test_the_runtime_leaves_the_clock_that_lightning_reads_to_those_who_replace_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests of Lightning's timers put ``time.monotonic`` forward."""
    real, readers = time.monotonic, set[str]()

    def monotonic() -> float:
        readers.add(sys._getframe(1).f_code.co_filename)
        return real()

    monkeypatch.setattr(time, "monotonic", monotonic)
    timer = Timer(duration={"hours": 1})
    run(Recipe(steps=2), HeteroOffloadStrategy("disk", trace=True), tmp_path, callbacks=[timer])
    assert readers
    assert not [file for file in readers if "lightning_hetero/runtime" in file or "lightning_hetero/_native" in file]
