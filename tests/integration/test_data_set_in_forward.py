"""Blocks set ``param.data`` in their own forward, as constraints and quantizers do: the step is the
one of plain Lightning.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, run
from support.strategies import ON_DEVICE, WHERE, make_strategy, on_device
from torch import Tensor, nn

from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.runtime.activations.saved import ChangedInPlaceError

MIXED = Shape(layers=4, dropout=0.1, frozen=(1,), half_frozen=True, counting=False)
SHAPES = {
    "trained": Shape(layers=4, counting=False),
    "mixed": MIXED,
    "split": Shape(layers=4, few=True, counting=False),  # each block is two: ``:trained`` and the rest
    "tied": Shape(layers=4, tied=True, counting=False),
    "odd": Shape(layers=3, odd=True, counting=False),
    "recomputed": Shape(layers=4, frozen=(1,), recompute="non-reentrant", counting=False),
}


class Hooked(LitModel):
    """Its blocks do something before and after their forwards, in training and in validation."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        for block in [*self.model.blocks, self.model.norm]:
            block.forward = partial(self.around, block, block.forward)

    def around(self, block: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        self.before(block)
        y = forward(x)
        self.after(block)
        return y

    def before(self, block: nn.Module) -> None:
        pass

    def after(self, block: nn.Module) -> None:
        pass


class Scaled(Hooked):
    """Everything shrinks."""

    def before(self, block: nn.Module) -> None:
        for param in block.parameters():
            param.data = param.data * 0.9


class Constrained(Hooked):
    """A limit on the norm of each row, as it is usually written."""

    def before(self, block: nn.Module) -> None:
        for param in block.parameters():
            if param.ndim > 1 and param.numel():
                param.data = param.data.renorm(p=2, dim=0, maxnorm=0.3)
            else:
                param.data = param.data.clamp(-0.9, 0.9)


class Twice(Hooked):
    """Sets the values, and then others."""

    def before(self, block: nn.Module) -> None:
        for param in block.parameters():
            param.data = param.data * 0.5
            param.data = param.data + 0.01
            param.data.mul_(1.5)


class CopiedFirst(Hooked):
    """Gives the block other memory, and changes that."""

    def before(self, block: nn.Module) -> None:
        for param in block.parameters():
            param.data = param.data.clone()
            param.data.mul_(0.9)


class WrittenInPlace(Hooked):
    """Changes its own memory through ``data``, which torch's version counter does not show."""

    def before(self, block: nn.Module) -> None:
        for param in block.parameters():
            param.data.mul_(0.9)


class Quantized(Hooked):
    """Computes with rounded weights, and sets the old ones again afterwards."""

    clones = False

    def before(self, block: nn.Module) -> None:
        self.old = [param.data.clone() if self.clones else param.data for param in block.parameters()]
        for param in block.parameters():
            if param.ndim > 1:
                param.data = (param.data * 64).round() / 64

    def after(self, block: nn.Module) -> None:
        for param, old in zip(block.parameters(), self.old, strict=True):
            param.data = old
        del self.old


class QuantizedClones(Quantized):
    clones = True


class StraightThrough(Hooked):
    """Computes with signs and updates the weights behind them, as binary networks do."""

    def before(self, block: nn.Module) -> None:
        for param in block.parameters():
            if param.ndim > 1 and param.requires_grad:
                param.org = param.data.clone()
                param.data = param.data.sign() * 0.1

    def on_before_optimizer_step(self, *_: Any) -> None:
        for param in self.parameters():
            if hasattr(param, "org"):
                param.data.copy_(param.org)
                del param.org


def same(kind: type[LitModel], where: str, folder: Path, **recipe: Any) -> None:
    train: Callable[[Any], Outcome] = partial(run, Recipe(**recipe), tmp_path=folder, module_class=kind)
    ours = on_device(ON_DEVICE[where]) if where in ON_DEVICE else make_strategy(where, train)
    assert_same(train(ours), train("auto"))


@WHERE
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_that_shrink(shape: str, where: str, tmp_path: Path) -> None:
    same(Scaled, where, tmp_path, shape=SHAPES[shape], validate=shape == "mixed")


@WHERE
@pytest.mark.parametrize("kind", [Constrained, Twice, CopiedFirst, WrittenInPlace, Quantized, QuantizedClones, StraightThrough])
def test_ways_to_set_data(kind: type[LitModel], where: str, tmp_path: Path) -> None:
    same(kind, where, tmp_path, shape=MIXED, accumulate=2 if kind is Constrained else 1)


@WHERE
def test_a_block_that_is_used_twice(where: str, tmp_path: Path) -> None:
    """On a device autograd's references to weights do not tell what code has set in between."""
    with (
        nullcontext()
        if where in ("host", "disk", "tight")
        else pytest.raises((RuntimeError, ChangedInPlaceError), match=r"in-?place operation")
    ):
        same(Scaled, where, tmp_path, shape=Shape(layers=4, shared=True, counting=False))


class After(Hooked):
    """Sets the values when the forward has used the old ones."""

    def after(self, block: nn.Module) -> None:
        for param in block.parameters():
            param.data = param.data * 0.9


@WHERE
def test_weights_that_backward_still_needs(where: str, tmp_path: Path) -> None:
    """Plain Lightning goes on with the old values. So do plans that keep weights in memory; others
    raise autograd's error.
    """
    with nullcontext() if where == "host" else pytest.raises((RuntimeError, ChangedInPlaceError), match=r"in-?place operation"):
        same(After, where, tmp_path, shape=MIXED)


class Longer(Hooked):
    def before(self, block: nn.Module) -> None:
        if isinstance(block, nn.LayerNorm):
            return
        block.up.weight.data = torch.cat([block.up.weight.data, block.up.weight.data])
        block.up.bias.data = torch.cat([block.up.bias.data, block.up.bias.data])
        block.down.weight.data = torch.cat([block.down.weight.data, block.down.weight.data], 1)


@pytest.mark.parametrize("where", ["host", "disk", "spread"])
def test_another_shape_is_refused(where: str, tmp_path: Path) -> None:
    train: Callable[[Any], Outcome] = partial(run, Recipe(shape=MIXED), tmp_path=tmp_path, module_class=Longer)
    strategy = on_device(ON_DEVICE[where]) if where in ON_DEVICE else HeteroOffloadStrategy(where)
    with pytest.raises(UnsupportedError, match=r"model\.blocks\.\d\.(up|down)\.weight.*keeps shape and dtype"):
        train(strategy)


class Transposed(Hooked):
    """The same values in another order in memory."""

    def before(self, block: nn.Module) -> None:
        for param in block.parameters():
            if param.ndim == 2:
                param.data = (param.data * 0.9).t().contiguous().t()


@WHERE
@pytest.mark.parametrize("shape", ["mixed", "recomputed"])
def test_another_memory_order(shape: str, where: str, tmp_path: Path) -> None:
    same(Transposed, where, tmp_path, shape=SHAPES[shape])


class Reset(LitModel):
    """Gives parameters other memory, but not through ``data``."""

    def on_before_optimizer_step(self, *_: Any) -> None:
        with torch.no_grad():
            for param in self.model.blocks[0].parameters():
                param.set_((param * 0.9).detach())  # type: ignore[call-overload]


class WeightNormed(LitModel):
    """Assigns to a weight behind a parametrization, which calls ``set_``."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        for block in self.model.blocks:
            nn.utils.parametrizations.weight_norm(block.up)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for block in self.model.blocks:
                block.up.weight = block.up.weight * 0.99


@WHERE
@pytest.mark.parametrize("kind", [Reset, WeightNormed])
def test_memory_that_is_set_in_another_way(kind: type[LitModel], where: str, tmp_path: Path) -> None:
    same(kind, where, tmp_path, shape=Shape(layers=4, counting=False), steps=4)


class Between(LitModel):
    """Sets frozen values between forward and backward."""

    def on_before_zero_grad(self, *_: Any) -> None:
        for param in self.model.blocks[1].parameters():
            param.data = param.data * 0.9


@WHERE
def test_data_set_between_forward_and_backward(where: str, tmp_path: Path) -> None:
    """As above: plans that keep the weights in memory go on, others raise."""
    with nullcontext() if where == "host" else pytest.raises((RuntimeError, ChangedInPlaceError), match=r"in-?place operation"):
        same(Between, where, tmp_path, shape=MIXED)


@pytest.mark.parametrize("kind", [Scaled, Constrained, Quantized, QuantizedClones, StraightThrough])
def test_16_bit_weights_are_the_same_under_every_plan(kind: type[LitModel], tmp_path: Path) -> None:
    """They have masters here, and not in plain Lightning, so plans are compared with each other."""
    train: Callable[[Any], Outcome] = partial(run, Recipe(shape=MIXED, precision="bf16-true"), tmp_path=tmp_path, module_class=kind)
    expected = train(HeteroOffloadStrategy("host"))
    for where in ("disk", "spread", "updated on the host", "updated on the device", "resident"):
        assert_same(train(on_device(ON_DEVICE[where]) if where in ON_DEVICE else HeteroOffloadStrategy(where)), expected)


class Dropped(Hooked):
    """Blocks that are left out at random return what they got."""

    def around(self, block: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.training and not isinstance(block, nn.LayerNorm) and torch.rand(()) < 0.4:
            return x
        for param in block.parameters():
            param.data = param.data * 0.97
        return forward(x)


@WHERE
@pytest.mark.parametrize("accumulate", [1, 2])
def test_blocks_that_return_what_they_got(accumulate: int, where: str, tmp_path: Path) -> None:
    same(Dropped, where, tmp_path, shape=Shape(layers=5, frozen=(1,), counting=False), steps=5, accumulate=accumulate)
