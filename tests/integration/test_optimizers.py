"""Every optimizer of torch runs out of core by its own code; the bits and the state_dict stay those
of plain Lightning.
"""

from __future__ import annotations

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer, run
from support.strategies import SPREAD, assert_same_as_plain, make_strategy, on_device
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_hetero import Tier
from lightning_hetero.errors import ConfigError, OutOfMemoryBudgetError, UnsupportedError
from lightning_hetero.ir.plan import TRAINED
from lightning_hetero.optim import adam
from lightning_hetero.strategies import HeteroOffloadStrategy

KINDS = ["host", "disk", "tight"]
ADAMW = partial(torch.optim.AdamW, lr=3e-3, fused=True)
SHAPE = Shape(tied=True, half_frozen=True, unused=True)

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "Adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "Rprop": partial(torch.optim.Rprop, lr=1e-3),
    "ASGD": partial(torch.optim.ASGD, lr=1e-2, t0=1),
    "NAdam": partial(torch.optim.NAdam, lr=2e-3),
    "RAdam": partial(torch.optim.RAdam, lr=2e-3),
    "Adamax": partial(torch.optim.Adamax, lr=2e-3),
    "AMSGrad": partial(torch.optim.AdamW, lr=2e-3, amsgrad=True),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_of_torch(kind: str, name: str, tmp_path: Path) -> None:
    recipe = Recipe(shape=SHAPE, optimizer=OPTIMIZERS[name], groups=True, clip=0.5)
    assert_same_as_plain(kind, partial(run, recipe, tmp_path=tmp_path))


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kind", ["host", "disk", "device", "device_resident"])
def test_a_tensor_as_learning_rate_is_read_at_each_step(kind: str, clip: float | None, tmp_path: Path) -> None:
    """A scheduler changes it in place."""
    recipe = Recipe(
        shape=SHAPE, optimizer=lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(2e-3), fused=True), schedule="step",
        clip=clip,
    )  # fmt: skip
    assert_same_as_plain(kind, partial(run, recipe, tmp_path=tmp_path))


@pytest.mark.parametrize("kind", ["disk", "device"])
def test_a_learning_rate_that_the_engine_refuses_ends_the_fit(kind: str, tmp_path: Path) -> None:
    """State that came for a refused update goes back, so nothing waits for it as the fit ends."""
    recipe = Recipe(shape=SHAPE, optimizer=lambda groups: torch.optim.AdamW(groups, lr=math.inf, fused=True))
    strategy = on_device("disk") if kind == "device" else HeteroOffloadStrategy("disk")
    with pytest.raises(ConfigError, match="lr inf"):
        run(recipe, strategy, tmp_path=tmp_path)


@pytest.mark.parametrize("name", ["AMSGrad", "Adafactor"])
def test_optimizers_that_run_by_their_own_code_on_a_device(name: str, tmp_path: Path) -> None:
    recipe = Recipe(shape=SHAPE, optimizer=OPTIMIZERS[name], groups=True, clip=0.5, steps=6)
    train = partial(run, recipe, tmp_path=tmp_path)
    planned = on_device("auto")
    expected = train("auto")
    assert_same(train(on_device("resident")), expected)
    assert_same(train(planned), expected)
    assert planned.plan.name == "resident"
    for plan in ("host", "disk", SPREAD):
        with pytest.raises(UnsupportedError, match=rf'by its own code, on the device.*Use plan="resident", or {adam.SUPPORTED}'):
            train(on_device(plan))


@pytest.mark.parametrize("name", ["AMSGrad", "Adafactor"])
def test_16_bit_weights_have_masters_on_a_device(name: str, tmp_path: Path) -> None:
    train = partial(run, Recipe(shape=SHAPE, optimizer=OPTIMIZERS[name], precision="bf16-true"), tmp_path=tmp_path)
    assert_same(train(on_device("resident")), train(make_strategy("host", train)))


def test_a_store_cannot_be_resumed_where_its_optimizer_runs_on_a_device(tmp_path: Path) -> None:
    store, recipe = tmp_path / "store", Recipe(optimizer=OPTIMIZERS["AMSGrad"])
    run(recipe, HeteroOffloadStrategy("host", disk_path=store), tmp_path)
    trainer = quiet_trainer(strategy=on_device("resident", disk_path=store), max_steps=6, default_root_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"would not keep its steps: optimizer AdamW runs by its own code on the device"):
        trainer.fit(LitModel(recipe), data(), ckpt_path=store)


class MatrixModel(LitModel):
    """Muon for the matrices of the blocks; what it cannot train is frozen."""

    def configure_optimizers(self) -> Any:
        for p in self.parameters():
            p.requires_grad_(p.ndim == 2)
        return torch.optim.Muon([p for p in self.parameters() if p.requires_grad], lr=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_muon(kind: str, tmp_path: Path) -> None:
    assert_same_as_plain(kind, partial(run, Recipe(), tmp_path=tmp_path, module_class=MatrixModel))


@pytest.mark.parametrize("name", ["SGD", "Adafactor"])
@pytest.mark.parametrize("kind", KINDS)
def test_state_is_saved_and_loaded(kind: str, name: str, tmp_path: Path) -> None:
    """A second ``fit`` from the first one's file: by the same strategy, and by the other one."""

    def train(strategy: Any, path: Path | None) -> tuple[pl.Trainer, Outcome]:
        torch.manual_seed(7)
        module = LitModel(Recipe(optimizer=OPTIMIZERS[name]))
        trainer = quiet_trainer(strategy=strategy, max_steps=2 if path is None else 4, default_root_dir=tmp_path)
        trainer.fit(module, data(), ckpt_path=path, weights_only=None if path is None else True)
        return trainer, outcome(trainer, module)

    files = {}
    for k in ("auto", kind):
        trainer, _ = train(make_strategy(k, partial(train, path=None)), None)
        files[k] = tmp_path / f"{k}.ckpt"
        trainer.save_checkpoint(files[k])
    _, expected = train("auto", files["auto"])
    for reader, path in ((kind, files["auto"]), ("auto", files[kind]), (kind, files[kind])):
        assert_same(train(make_strategy(reader, partial(train, path=None)), path)[1], expected)


@pytest.mark.parametrize("kind", ["resident", "host", "disk"])
@pytest.mark.parametrize("kind_of_optimizer", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_some_optimizers_are_refused_by_name(kind_of_optimizer: Any, kind: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=kind_of_optimizer.__name__):
        run(Recipe(optimizer=kind_of_optimizer), HeteroOffloadStrategy(plan=kind), tmp_path)


class Aside(LitModel):
    """Trains a layer that is no part of it, or only once training has begun."""

    def __init__(self, recipe: Recipe, *, later: bool = False) -> None:
        super().__init__(recipe)
        self.later, self.aside = later, [nn.Linear(3, 3)]

    def configure_optimizers(self) -> Any:
        return self.recipe.optimizer([*self.parameters(), *([] if self.later else self.aside[0].parameters())])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.later and batch_idx == 1:
            self.added = self.aside[0]
            self.trainer.optimizers[0].add_param_group({"params": list(self.added.parameters())})


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_parameters_without_an_update_are_refused(name: str, later: bool, tmp_path: Path) -> None:
    recipe = Recipe(optimizer={**OPTIMIZERS, "AdamW": ADAMW}[name])
    with pytest.raises(ConfigError, match=rf"{name} has 2 parameters .* \(3, 3\).*configure_model"):
        run(recipe, HeteroOffloadStrategy("disk"), tmp_path, module_class=partial(Aside, later=later))


class SignDescent(torch.optim.Optimizer):
    """An optimizer from outside torch, with state, that treats parameters independently."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 0.1)
                    p.sub_(momentum.sign(), alpha=group["lr"])
        return loss


class NormalizedDescent(SignDescent):
    """One that couples all its parameters: it divides by the norm of the whole gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        for p in params:
            p.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"])
        return loss


class BlockwiseSignDescent(SignDescent):
    hetero_blockwise = True


@pytest.mark.parametrize("kind_of_optimizer", [SignDescent, NormalizedDescent])
def test_an_optimizer_from_elsewhere_runs_whole_in_memory(kind_of_optimizer: Any, tmp_path: Path) -> None:
    recipe = Recipe(shape=SHAPE, optimizer=partial(kind_of_optimizer, lr=1e-2), accumulate=2)
    assert_same_as_plain("host", partial(run, recipe, tmp_path=tmp_path))
    assert_same_as_plain("resident", partial(run, recipe, tmp_path=tmp_path))


def test_an_optimizer_that_couples_16_bit_weights_steps_once_on_a_device(tmp_path: Path) -> None:
    """It acts on fp32 masters, so Lightning does not call it itself."""
    train = partial(
        run, Recipe(shape=SHAPE, optimizer=partial(NormalizedDescent, lr=1e-2), precision="bf16-true"), tmp_path=tmp_path
    )
    assert_same(train(make_strategy("device_resident", train)), train(make_strategy("host", train)))


def test_an_optimizer_from_elsewhere_is_refused_on_disk(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"SignDescent.hetero_blockwise = True"):
        run(Recipe(optimizer=SignDescent), HeteroOffloadStrategy(plan="disk"), tmp_path)


@pytest.mark.parametrize("plan", ["disk", "auto", "protrain"])
def test_what_it_does_not_train_streams_from_disk(plan: str, tmp_path: Path) -> None:
    """As a frozen model below adapters, larger than memory."""
    shape = Shape(layers=48, width=96, few=True)
    recipe = Recipe(shape=shape, steps=5, optimizer=partial(NormalizedDescent, lr=1e-2))
    strategy = HeteroOffloadStrategy(plan, host_memory="6MiB")
    assert_same(run(recipe, strategy, tmp_path), run(recipe, "auto", tmp_path))
    frozen = [b for b in strategy.plan.blocks if b.name.startswith("model.blocks") and not b.name.endswith(TRAINED)]
    assert {b.weights for b in frozen} == {Tier.DISK}
    assert Tier.DISK not in {tier for b in strategy.plan.blocks if b not in frozen for tier in (b.weights, b.state)}


def test_less_memory_is_said_to_need_the_disk(tmp_path: Path) -> None:
    recipe = Recipe(shape=Shape(layers=48, width=96, few=True), optimizer=partial(NormalizedDescent, lr=1e-2))
    with pytest.raises(OutOfMemoryBudgetError, match=r'plan="disk"'):
        run(recipe, HeteroOffloadStrategy("host", host_memory="6MiB"), tmp_path)


@pytest.mark.parametrize("kind", ["disk", "tight"])
def test_an_optimizer_from_elsewhere_may_say_that_it_is_blockwise(kind: str, tmp_path: Path) -> None:
    assert_same_as_plain(kind, partial(run, Recipe(shape=SHAPE, optimizer=BlockwiseSignDescent), tmp_path=tmp_path))


class Counting(pl.Callback):
    """Counts the steps that hooks of the optimizer see."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        optimizer = trainer.optimizers[0]
        optimizer.register_step_pre_hook(lambda *_: self.calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: self.calls.append("after"))


@pytest.mark.parametrize("factory", [OPTIMIZERS["SGD"], SignDescent, ADAMW], ids=["sgd", "elsewhere", "adamw"])
def test_hooks_of_a_step_run_once(factory: Any, tmp_path: Path) -> None:
    counting = Counting()
    handle = register_optimizer_step_post_hook(lambda *_: counting.calls.append("everyone's"))
    try:
        run(Recipe(optimizer=factory, steps=2), HeteroOffloadStrategy(plan="host"), tmp_path, callbacks=[counting])
    finally:
        handle.remove()
    assert counting.calls == ["before", "after", "everyone's"] * 2


class Clamped(LitModel):
    """Its optimizer has a hook that looks at gradients and changes weights after every step."""

    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()

        @torch.no_grad()
        def clamp(*_: Any) -> None:
            for p in self.parameters():
                if p.grad is not None:
                    self.losses.append(p.grad.norm())
                    p.clamp_(-0.1, 0.1)

        optimizer.register_step_post_hook(clamp)
        return optimizer


@pytest.mark.parametrize("factory", [ADAMW, OPTIMIZERS["SGD"]], ids=["adamw", "sgd"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_may_change_weights_after_the_step(kind: str, factory: Any, tmp_path: Path) -> None:
    assert_same_as_plain(kind, partial(run, Recipe(optimizer=factory), tmp_path=tmp_path, module_class=Clamped))


SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 5)], milestones=[2]
    ),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
}


@pytest.mark.parametrize(("factory", "name"), [*((ADAMW, name) for name in SCHEDULERS), (OPTIMIZERS["SGD"], "StepLR")])
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_schedulers_do_not_warn(kind: str, factory: Any, name: str, tmp_path: Path) -> None:
    class Scheduled(LitModel):
        def configure_optimizers(self) -> Any:
            optimizer = factory(self.parameters())
            return [optimizer], [{"scheduler": SCHEDULERS[name](optimizer), "interval": "step"}]

    def train(strategy: Any) -> Outcome:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*(lr_scheduler|optimizer.step).*")
            return run(Recipe(steps=4), strategy, tmp_path, module_class=Scheduled)

    expected = run(Recipe(steps=4), "auto", tmp_path, module_class=Scheduled)
    assert_same(train(HeteroOffloadStrategy(plan=kind)), expected)


def test_a_scheduler_on_plateau_reads_the_loss(tmp_path: Path) -> None:
    class Plateau(LitModel):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.log("loss", 1.0)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
            scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss", "interval": "epoch"}}

    def train(strategy: Any) -> Outcome:
        torch.manual_seed(7)
        module = Plateau(Recipe())
        trainer = quiet_trainer(strategy=strategy, max_epochs=4, default_root_dir=tmp_path)
        trainer.fit(module, data(2), data(1))
        return outcome(trainer, module)

    assert train("auto").state[0]["param_groups"][0]["lr"] < 1e-3
    assert_same_as_plain("disk", train)
