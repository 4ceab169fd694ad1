"""Several optimizers that share parameters: each steps, as in PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from support.models import LitModel, Model, Recipe, Shape, data, quiet_trainer, run
from support.plain_loops import Run, assert_equal, outcome
from support.strategies import assert_same_as_plain
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import lightning_hetero
from lightning_hetero import EmulatedDevice, HeteroOffloadStrategy
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.loops.fabric import HeteroOffloadFabricStrategy


def device(**options: Any) -> EmulatedDevice:
    return EmulatedDevice("2MiB", seed=1, **options)


PLACES: dict[str, Callable[[], dict[str, Any]]] = {
    "host": lambda: {"plan": "host"},
    "disk": lambda: {"plan": "disk"},
    "device": lambda: {"plan": "disk", "device": device()},
    "unified": lambda: {"plan": "disk", "device": device(unified=True)},
    "auto": lambda: {"plan": "auto"},
    "unified-auto": lambda: {"plan": "auto", "device": device(unified=True)},
}


def both(run: Run) -> None:
    """Both step after each backward."""
    for batch in run.batches(6):
        for optimizer in run.optimizers:
            optimizer.zero_grad()
        run.backward(batch)
        for optimizer in run.optimizers:
            optimizer.step()


def by_turns(run: Run) -> None:
    for number, batch in enumerate(run.batches(6)):
        optimizer = run.optimizers[number % 2]
        optimizer.zero_grad()
        run.backward(batch)
        optimizer.step()


def all_and_all(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=lr, fused=True) for lr in (0.01, 0.001)]


def some_and_all(model: nn.Module) -> list[Optimizer]:
    """The one with all parameters, which comes last, is offloaded."""
    params = list(model.parameters())
    return [torch.optim.SGD(params[3:6], lr=0.1), torch.optim.AdamW(params, lr=0.01, fused=True)]


@pytest.mark.parametrize("make", [all_and_all, some_and_all])
@pytest.mark.parametrize("loop", [both, by_turns])
@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_in_a_plain_loop(
    loop: Callable[[Run], None], make: Callable[[nn.Module], list[Optimizer]], overlap: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = outcome(loop, make, None, Shape(dropout=0.1))
    for options in PLACES.values():
        given = options()
        with caplog.at_level(logging.WARNING, logger="lightning_hetero"):
            ours = outcome(
                loop, make, lambda m, o, given=given: lightning_hetero.offload(m, o, overlap=overlap, **given), Shape(dropout=0.1)
            )
        assert_equal(expected, ours)
        assert "shares parameters with another one" in caplog.text
        caplog.clear()


@pytest.mark.parametrize("where", ["disk", "device", "unified"])
def test_a_fused_optimizer_of_the_loop_s_own_is_seen(where: str) -> None:
    """Torch's fused optimizers write weights without counting it."""

    def loop(run: Run) -> None:
        run.optimizers.append(torch.optim.AdamW(run.model.parameters(), lr=0.001, fused=True))
        by_turns(run)
        run.optimizers.pop()

    def one(model: nn.Module) -> list[Optimizer]:
        return all_and_all(model)[:1]

    given = PLACES[where]()
    expected = outcome(loop, one, None, Shape(dropout=0.1))
    assert_equal(expected, outcome(loop, one, lambda m, o: lightning_hetero.offload(m, o, **given), Shape(dropout=0.1)))


class Sharing(LitModel):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for number, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
            if number == 0:
                optimizers[1].step()  # by the same gradients

    def configure_optimizers(self) -> Any:
        return all_and_all(self)


@pytest.mark.parametrize("kind", ["resident", "host", "disk", "device_resident"])
def test_in_manual_optimization(kind: str, tmp_path: Path) -> None:
    recipe = Recipe(shape=Shape(dropout=0.1), steps=4, clip=None)
    assert_same_as_plain(kind, partial(run, recipe, tmp_path=tmp_path, module_class=Sharing))


def test_sixteen_bit_parameters_with_masters_are_refused(tmp_path: Path) -> None:
    trainer = quiet_trainer(strategy=HeteroOffloadStrategy("host"), precision="bf16-true", max_steps=1, default_root_dir=tmp_path)
    with pytest.raises(UnsupportedError, match="AdamW shares 16-bit parameters with another one"):
        trainer.fit(Sharing(Recipe()), data())


# ---- Fabric: set up in several calls -----------------------------------------------------------


class Loop:
    """A Fabric's loop, with what it computes."""

    def __init__(self, strategy: Any) -> None:
        torch.manual_seed(3)
        self.fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
        self.model = Model(Shape(dropout=0.1))
        self.losses: list[float] = []

    def adamw(self, lr: float = 0.01) -> Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=lr, fused=True)

    def train(self, module: nn.Module, *optimizers: Any, batches: int = 5) -> None:
        generator = torch.Generator().manual_seed(5)
        for _ in range(batches):
            tokens = torch.randint(0, 37, (4, 6), generator=generator)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = F.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            self.fabric.backward(loss)
            self.losses.append(loss.item())
            for optimizer in optimizers:
                optimizer.step()


def optimizer_first(loop: Loop) -> None:
    optimizer = loop.fabric.setup_optimizers(loop.adamw())
    loop.train(loop.fabric.setup_module(loop.model), optimizer)


def one_optimizer_after_the_other(loop: Loop) -> None:
    module = loop.fabric.setup_module(loop.model)
    matrices, rest = ([p for p in loop.model.parameters() if (p.ndim == 2) is wanted] for wanted in (True, False))
    optimizers = loop.fabric.setup_optimizers(torch.optim.AdamW(matrices, fused=True), torch.optim.AdamW(rest, fused=True))
    loop.train(module, *optimizers)


def evaluated_first(loop: Loop) -> None:
    module = loop.fabric.setup(loop.model)
    with torch.no_grad():
        loop.losses.append(module(torch.zeros(2, 5, dtype=torch.long)).sum().item())
    loop.train(*loop.fabric.setup(loop.model, loop.adamw()))


def set_up_again(loop: Loop) -> None:
    module, first = loop.fabric.setup(loop.model, loop.adamw())
    loop.train(module, first)
    module = loop.fabric.setup_module(loop.model)
    loop.train(module, first)
    module, second = loop.fabric.setup(loop.model, loop.adamw(0.001))
    loop.train(module, first, second)
    loop.train(module, first)


def beside_a_small_module(loop: Loop) -> None:
    small = loop.fabric.to_device(nn.Linear(37, 1))
    before = loop.fabric.setup_optimizers(torch.optim.AdamW(small.parameters(), fused=True))
    module, optimizer = loop.fabric.setup(loop.model, loop.adamw())
    after = loop.fabric.setup_optimizers(torch.optim.SGD(small.parameters(), lr=0.1))
    for number in range(4):
        for one in (before, optimizer, after):
            one.zero_grad()
        loss = small(module(torch.full((2, 5), number))).pow(2).mean()
        loop.fabric.backward(loss)
        loop.losses.append(loss.item())
        for one in (before, optimizer, after):
            one.step()
    loop.fabric.setup(nn.Sequential())  # without parameters there is nothing to place


@pytest.mark.parametrize(
    "way", [optimizer_first, one_optimizer_after_the_other, evaluated_first, set_up_again, beside_a_small_module]
)
def test_fabric_sets_up_in_several_calls(way: Callable[[Loop], None]) -> None:
    expected = Loop("auto")
    way(expected)
    for name, options in PLACES.items():
        ours = Loop(HeteroOffloadFabricStrategy(**options()))
        way(ours)
        assert ours.losses == expected.losses, name
        theirs = expected.model.state_dict()
        assert all(torch.equal(value, theirs[key]) for key, value in ours.model.state_dict().items()), name
        ours.fabric.strategy.loop.close()
