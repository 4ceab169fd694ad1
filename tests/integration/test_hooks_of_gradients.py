"""Code of the user works on gradients during a backward, on a device that they leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import LitModel, Recipe, Shape, assert_same, data, outcome, quiet_trainer
from support.plain_loops import Run, adamw, assert_equal, plans
from support.plain_loops import outcome as outcome_of
from support.verdicts import Overflowing, counted_verdicts, divided, fused, run_scaled
from torch import Tensor, nn
from torch.autograd import Variable

import lightning_hetero
from lightning_hetero import BlockPlan, EmulatedDevice, HeteroOffloadStrategy, Plan, Tier, UpdateLane
from lightning_hetero.errors import UnsupportedError

ACCUMULATING = Recipe(shape=Shape(layers=3), accumulate=2, steps=3)


def clamp(param: Tensor) -> None:
    if param.grad is not None:
        param.grad.clamp_(-0.01, 0.01)


def after_each_sum(model: nn.Module) -> list[Any]:
    return [p.register_post_accumulate_grad_hook(clamp) for p in model.parameters()]


def in_place_of_each_sum(model: nn.Module) -> list[Any]:
    def replace(param: Tensor) -> None:
        assert param.grad is not None
        param.grad = param.grad * 0.5

    return [p.register_post_accumulate_grad_hook(replace) for p in model.parameters()]


def away_from_sums(model: nn.Module) -> list[Any]:
    """The hook keeps what it takes away."""
    sums: dict[Tensor, Tensor] = {}

    def take(param: Tensor) -> None:
        if param.grad is not None:
            sums[param] = sums.get(param, torch.zeros(())) + param.grad
            param.grad = None if len(sums) % 2 else sums[param]

    return [p.register_post_accumulate_grad_hook(take) for p in model.parameters()]


def after_modules(model: nn.Module) -> list[Any]:
    def hook(module: nn.Module, *_: Any) -> None:
        for param in module.parameters():
            clamp(param)

    return [m.register_full_backward_hook(hook) for m in model.modules() if isinstance(m, nn.Linear)]


@pytest.mark.parametrize("hooks", [after_each_sum, in_place_of_each_sum, away_from_sums, after_modules])
@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_hooks_see_the_sums_of_micro_batches(hooks: Callable[[nn.Module], list[Any]], overlap: Any, tmp_path: Path) -> None:
    def loop(run: Run) -> None:
        handles = hooks(run.model)
        for number, batch in enumerate(run.batches(6)):
            run.backward(batch)
            if number % 2:
                run.optimizer.step()
                run.optimizer.zero_grad(set_to_none=number == 3)
        for handle in handles:
            handle.remove()

    options = plans(tmp_path)["device"]
    offloaded = outcome_of(loop, adamw, lambda m, o: lightning_hetero.offload(m, o, overlap=overlap, **options), Shape())
    assert_equal(outcome_of(loop, adamw, None, Shape()), offloaded)


class Clipping(LitModel):
    """Lightning's hook for a backward of one's own, which goes on after it."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class Late(LitModel):
    """In the backward of the first block, it changes gradients of the last one."""

    drops = True  # some of them

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        def change(_: Tensor) -> None:
            for param in self.model.blocks[2].parameters():
                if param.grad is not None:
                    param.grad = param.grad * 0.5 if param.ndim > 1 or not self.drops else None

        def watch(module: Any, args: Any, output: Tensor) -> None:
            output.register_hook(change)

        hook = self.model.blocks[0].register_forward_hook(watch)
        loss = super().training_step(batch, batch_idx)
        hook.remove()
        return loss


class Setting(Late):
    """It sets them without a look."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        def change(_: Tensor) -> None:
            for param in self.model.blocks[2].parameters():
                param.grad = torch.ones_like(param)

        embed = self.model.embed.register_forward_hook(lambda _, args, output: output.register_hook(change) and None)
        loss = LitModel.training_step(self, batch, batch_idx)
        embed.remove()
        return loss


class LateAndWhole(Late):
    """It drops none."""

    drops = False


class LateAndScaled(Late, Overflowing):
    """Its loss is scaled."""


class LateAndWaiting(Late):
    """Its updates wait for this hook."""

    def on_after_backward(self) -> None:
        """Sees gradients."""


class AtTheEnd(LitModel):
    """Autograd calls it back as a backward ends."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)

        def end() -> None:
            for param in self.model.blocks.parameters():
                clamp(param)

        loss.register_hook(lambda _: Variable._execution_engine.queue_callback(end))
        return loss


class AtTheEndAndWaiting(AtTheEnd):
    """Its updates wait for this hook."""

    def on_after_backward(self) -> None:
        """Sees gradients."""


@pytest.mark.parametrize("kind", [Late, Setting, AtTheEnd])
@pytest.mark.parametrize("where", ["host", "disk", "device"])
def test_code_in_backward_that_uses_gradients_of_updates_is_refused(kind: type[LitModel], where: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    strategy = HeteroOffloadStrategy(**plans(tmp_path)[where])
    trainer = quiet_trainer(strategy=strategy, limit_val_batches=0, max_steps=2, default_root_dir=tmp_path)
    with pytest.raises(UnsupportedError, match=r"gradient of 'model\.blocks.*update ha[sd] begun.*on_before_optimizer_step"):
        trainer.fit(kind(Recipe(shape=Shape(layers=3))), data())


STATE_ON_DISK = Plan(name="state", blocks=(BlockPlan(name="*", state=Tier.DISK, update=UpdateLane.CPU),))
TRIED: dict[str, dict[str, Any]] = {
    "disk": {"plan": "disk"},
    "state": {"plan": STATE_ON_DISK},
    "device": {"plan": STATE_ON_DISK, "device": EmulatedDevice("4MiB")},
}


@pytest.mark.parametrize("limit", [0.05, 1e6])
@pytest.mark.parametrize(("where", "kind"), [("disk", Late), ("state", Late), ("disk", LateAndWhole), ("device", LateAndWhole)])
def test_updates_that_may_be_taken_back_run_again_with_changed_gradients(
    where: str, kind: type[LitModel], limit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(strategy: Any) -> Any:
        torch.manual_seed(7)
        module = kind(Recipe(shape=Shape(layers=3)))
        options: dict[str, Any] = {"gradient_clip_val": limit, "max_steps": 3, "limit_val_batches": 0}
        trainer = quiet_trainer(strategy=strategy, default_root_dir=tmp_path, **options)
        trainer.fit(module, data())
        return outcome(trainer, module)

    verdicts = counted_verdicts(monkeypatch)
    assert_same(fit("auto"), fit(HeteroOffloadStrategy(**TRIED[where])))
    assert verdicts["again"] > 0


@pytest.mark.parametrize("factory", [fused, divided])
def test_gradients_that_change_after_they_were_divided_are_refused(
    factory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted_verdicts(monkeypatch)
    recipe = Recipe(shape=Shape(layers=3), optimizer=factory)
    with pytest.raises(UnsupportedError, match=r"changed during backward.*divided by the loss's scale.*on_after_backward"):
        run_scaled(recipe, HeteroOffloadStrategy(**TRIED["disk"]), tmp_path, frozenset(), LateAndScaled)


@pytest.mark.parametrize("kind", [Clipping, LateAndWaiting, AtTheEndAndWaiting])
@pytest.mark.parametrize("recipe", [Recipe(shape=Shape(layers=3)), ACCUMULATING], ids=["each", "accumulating"])
def test_code_in_backward_finds_gradients_that_have_left(kind: type[LitModel], recipe: Recipe, tmp_path: Path) -> None:
    def fit(strategy: Any) -> Any:
        torch.manual_seed(7)
        module = kind(recipe)
        options: dict[str, Any] = {"accumulate_grad_batches": recipe.accumulate, "max_steps": recipe.steps}
        trainer = quiet_trainer(strategy=strategy, limit_val_batches=0, default_root_dir=tmp_path, **options)
        trainer.fit(module, data())
        return outcome(trainer, module)

    assert_same(fit("auto"), fit(HeteroOffloadStrategy(plan="host", device=EmulatedDevice("4MiB"))))
