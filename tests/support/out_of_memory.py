"""Trainings that run out of memory where they are told to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import MeanMetric, SumMetric

from lightning_hetero import BlockPlan, Plan, Tier
from lightning_hetero.ir.plan import UpdateOrder
from lightning_hetero.runtime.activations.swaps import Swap
from lightning_hetero.strategies import HeteroOffloadStrategy
from support.cuda import MIXED, RESIDENT
from support.models import LitModel, Outcome, Recipe, Shape, run

HOST = Plan(name="below", blocks=(BlockPlan(name="model.blocks.*"), RESIDENT))
WAITING = replace(HOST, update_order=UpdateOrder.AFTER_BACKWARD)
FOUR = Shape(layers=4, dropout=0.2, counting=False)
ON_CPU = Plan(name="on the CPU", blocks=(BlockPlan(name="model.blocks.*", weights=Tier.DEVICE), RESIDENT))
ON_DISK = Plan(name="on disk", blocks=(BlockPlan(name="model.blocks.*", weights=Tier.DEVICE, state=Tier.DISK), RESIDENT))
FAULTS: dict[str, tuple[Recipe, Any, list[tuple[int, str, str]]]] = {
    "forward, after updates": (Recipe(shape=FOUR), ON_CPU, [(1, "forward", "blocks.2")]),
    "backward": (Recipe(shape=FOUR, steps=2), "resident", [(0, "backward", "blocks.0")]),
    "backward, before updates": (Recipe(shape=FOUR, steps=2), HOST, [(1, "backward", "head")]),
    "backward, and updates wait for its end": (Recipe(shape=FOUR, steps=3), WAITING, [(2, "backward", "blocks.0")]),
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
    "taken back": (Recipe(shape=FOUR, steps=4, clip=50.0), ON_DISK, [(1, "backward", "blocks.0"), (3, "backward", "blocks.1")]),
    "again and again": (Recipe(shape=FOUR, steps=2), HOST, [*[(0, "forward", "blocks.2")] * 2, *[(0, "backward", "blocks.1")] * 2]),
}


class Once(LitModel):
    """Notes the loss of a batch once, however often its step begins again; metrics and logs do by
    themselves.
    """

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


class Failing(Once):
    """Runs out of memory in the batches, at the places and in the blocks that ``faults`` says, one
    after the other.
    """

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
        if output.requires_grad:
            output.register_hook(lambda _: self.pass_by("backward", name))

    def pass_by(self, place: str, name: str) -> None:
        """What torch's allocator raises, if it is its turn."""
        if self.faults[:1] == [(self.batch, place, name)]:
            del self.faults[0]
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.batch = batch_idx
        return super().training_step(batch, batch_idx)


class FailingInHooks(Failing):
    """Runs out of memory in the hooks around backward, too; they log and count in a metric."""

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("before", loss.detach())
        self.mean(2 * loss.detach())
        self.pass_by("on_before_backward", "")

    def on_after_backward(self) -> None:
        norms = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None])
        self.log("after", norms.sum())
        self.pass_by("on_after_backward", "")


class FailingBefore(FailingInHooks):
    """Has no hook that sees gradients."""

    on_after_backward = LitModel.on_after_backward


class FailingInEvaluation(Failing):
    """Runs out of memory in batches that only read weights: -1 is the first of them."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.seen = SumMetric()

    def evaluation(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.batch = -1 - batch_idx
        self.seen(1.0)
        self.log("noise", torch.rand(()), on_epoch=True)
        loss = self.loss(batch)
        self.pass_by("end", "")
        self.log("evaluated", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.losses.append(self.evaluation(batch, batch_idx))

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.batch = -1 - batch_idx
        return self.model(batch[0][:, :-1])


def failing(
    recipe: Recipe,
    plan: Any,
    faults: Sequence[tuple[int, str, str]],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    on: dict[str, Any],
    module_class: type[Failing] = Failing,
    **options: Any,
) -> tuple[Failing, Any, Outcome]:
    """Trains with these faults, ``on`` the device that these options of the Trainer choose."""
    found: list[Any] = []
    strategy = HeteroOffloadStrategy(plan, **options)
    bring = Swap.bring

    def prepare(module: LitModel) -> None:
        module.faults = list(faults)  # type: ignore[assignment]
        found.append(module)

    def brings(swap: Swap, *args: Any) -> Any:
        found[0].pass_by("swap-in", "")
        return bring(swap, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Swap, "bring", brings)
        got = run(recipe, strategy, folder, module_class=module_class, prepare=prepare, **on)
    return found[0], strategy, got
