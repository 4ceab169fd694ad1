"""Manual optimization: one step per backward, with one optimizer and with several, equals plain
Lightning bit for bit.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import LitModel, Manual, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer, run
from support.strategies import assert_same_as_plain, least_memory
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero._native import F32, Arena, Engine, NativePart, PartGeometry
from lightning_hetero.strategies import HeteroOffloadStrategy

KINDS = ["host", "disk", "tight"]


class ManualWithClosure(Manual):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss(batch)
            self.losses.append(loss.detach().clone())
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


class ManualClipping(Manual):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()
        self.losses.append(loss.detach().clone())


class ManualAccumulation(Manual):
    """Two backwards a step, ``zero_grad(set_to_none=False)``, a scheduler stepped by hand."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch) / 2
        self.manual_backward(loss)
        self.losses.append(loss.detach().clone())
        if batch_idx % 2 == 1:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            self.lr_schedulers().step()


class ManualTwice(Manual):
    """Two steps in one batch, the second on gradients that were scaled in place in between."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(loss.detach().clone())
        for p in self.parameters():
            p.grad.mul_(-0.5)
        optimizer.step()


@pytest.mark.parametrize("module_class", [Manual, ManualWithClosure, ManualClipping, ManualAccumulation, ManualTwice])
@pytest.mark.parametrize("kind", [*KINDS, "device"])
def test_one_optimizer(kind: str, module_class: Any, tmp_path: Path) -> None:
    recipe = Recipe(shape=Shape(tied=True), steps=4)
    assert_same_as_plain(kind, partial(run, recipe, tmp_path=tmp_path, module_class=module_class))


@pytest.mark.parametrize("kind", KINDS)
def test_sgd(kind: str, tmp_path: Path) -> None:
    recipe = Recipe(optimizer=partial(torch.optim.SGD, lr=1e-2, momentum=0.9), steps=4)
    assert_same_as_plain(kind, partial(run, recipe, tmp_path=tmp_path, module_class=ManualTwice))


class Adversaries(LitModel):
    """A generator and a discriminator, each a stack of blocks with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__(Recipe())
        self.automatic_optimization = False
        del self.model
        self.generator = nn.Sequential(nn.Linear(7, 20), *(nn.Sequential(nn.Linear(20, 20), nn.GELU()) for _ in range(3)))
        self.critic = nn.Sequential(*(nn.Sequential(nn.Linear(20, 20), nn.GELU()) for _ in range(3)), nn.Linear(20, 1))

    def configure_optimizers(self) -> Any:
        generator = torch.optim.AdamW(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.9), fused=True)
        critic = torch.optim.Adam(self.critic.parameters(), lr=3e-3, fused=True)
        return [generator, critic], []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (tokens,) = batch
        real = torch.outer(tokens.sum(1), torch.linspace(0, 1, 20)) / 100
        made = self.generator(tokens[:, :1].float().expand(-1, 7))
        generator, critic = self.optimizers()

        self.toggle_optimizer(generator)
        loss = F.softplus(-self.critic(made)).mean()
        self.manual_backward(loss)
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)

        self.toggle_optimizer(critic)
        verdict = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(made.detach())).mean()
        self.manual_backward(verdict)
        critic.step()
        critic.zero_grad()
        self.untoggle_optimizer(critic)
        self.losses += [loss.detach().clone(), verdict.detach().clone()]


class AdversariesWithoutToggle(Adversaries):
    """One backward through both; gradients of the other optimizer wait for its own step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (tokens,) = batch
        loss = F.softplus(-self.critic(self.generator(tokens.float()[:, :1].expand(-1, 7)))).mean()
        generator, critic = self.optimizers()
        self.manual_backward(loss)
        if batch_idx % 2 == 0:
            generator.step()
            generator.zero_grad()
        critic.step()
        critic.zero_grad()
        self.losses.append(loss.detach().clone())


class AdversariesZeroedBefore(Adversaries):
    """As most are written: the generator's backward adds to gradients that the critic's step has
    kept, until the next batch.
    """

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (tokens,) = batch
        made = self.generator(tokens[:, :1].float().expand(-1, 7))
        generator, critic = self.optimizers()
        verdict = F.softplus(self.critic(made.detach())).mean()
        critic.zero_grad()
        self.manual_backward(verdict)
        critic.step()
        loss = F.softplus(-self.critic(made)).mean()
        generator.zero_grad()
        self.manual_backward(loss)
        generator.step()
        self.losses += [loss.detach().clone(), *(p.grad.clone() for p in self.critic.parameters())]


@pytest.mark.parametrize("module_class", [Adversaries, AdversariesWithoutToggle, AdversariesZeroedBefore])
@pytest.mark.parametrize("kind", [*KINDS, "device"])
def test_two_optimizers(kind: str, module_class: Any, tmp_path: Path) -> None:
    def train(strategy: Any) -> Outcome:
        torch.manual_seed(7)
        module = module_class()
        trainer = quiet_trainer(strategy=strategy, max_epochs=1, default_root_dir=tmp_path)
        trainer.fit(module, data(4))
        return outcome(trainer, module)

    assert_same_as_plain(kind, train)


class Idle(Manual):
    """Every other step has no gradients."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.losses.append(loss.detach().clone())
        if batch_idx % 2:
            self.manual_backward(loss)
        optimizer.step()


class Skipping(LitModel):
    """Every other batch has no backward."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx % 2 else None


@pytest.mark.parametrize("module_class", [Idle, Skipping])
def test_a_forward_waits_for_weights_that_an_update_without_gradients_was_to_follow(
    module_class: type[LitModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As such a step ends, weights are fetched for the next one. Here each fetch is late."""
    train = partial(run, Recipe(steps=4, shape=Shape(layers=4)), tmp_path=tmp_path, module_class=module_class)
    memory = least_memory(train)
    geometry = PartGeometry(
        id=0, weight_dtype=F32, num_elements=16, num_state=2, weights_on_disk_file=False, state_on_disk_file=False,
        chunk_elements=4096,
    )  # fmt: skip
    fetch, kept = Engine.fetch, []

    def late(engine: Engine, part: NativePart, *, after: Any = (), **options: Any) -> Any:
        arena = Arena(4096)
        gate = NativePart(None, geometry, arena.address)
        shut = engine.open_update(gate, weights_resident=True, speculative=False, priority=0, after=[])  # nobody arms it
        kept.append((arena, gate))
        threading.Timer(0.05, engine.cancel_update, [shut]).start()
        return fetch(engine, part, after=[*after, shut], **options)

    expected = train("auto")
    monkeypatch.setattr(Engine, "fetch", late)
    assert_same(train(HeteroOffloadStrategy("disk", host_memory=memory)), expected)
    assert kept
