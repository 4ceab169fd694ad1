"""Under autocast, blocks whose weights leave memory keep no 16-bit casts of them, and compute the
bits of plain Lightning.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, once, quiet_trainer, run
from support.strategies import assert_same_as_plain, make_strategy, on_device
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.runtime.activations import autocast

KINDS = ["disk", "tight", "host", "device"]
MIXED = Recipe(precision="bf16-mixed")


@pytest.fixture(autouse=True)
def _small_casts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autocast, "SMALL_BYTES", 0)
    monkeypatch.setenv("LIGHTNING_HETERO_POISON", "1")


class Casts(TorchDispatchMode):
    """Notes the 16-bit casts of the blocks' matrices: activations have three dimensions, and no
    block has 37 rows or columns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.itemsize == 2 and out.ndim == 2 and 37 not in out.shape:
            self.storages.append(weakref.ref(out.untyped_storage()))
        return out

    def num_bytes(self) -> int:
        alive = [ref() for ref in self.storages]
        return sum(storage.nbytes() for storage in alive if storage is not None)


class Counting(LitModel):
    """Counts the casts that are in memory as the forward ends."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.left: list[int] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        with Casts() as casts:
            loss = super().loss(batch)
        assert casts.storages
        self.left.append(casts.num_bytes())
        return loss


class Inside(nn.Module):
    """Checkpoints the second half of a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.block.up(self.block.norm(x)))
        return x + checkpoint(self.block.down, y, use_reentrant=False)


def left(recipe: Recipe, strategy: Any, folder: Path, prepare: Callable[[LitModel], None] = lambda _: None) -> list[int]:
    seen: list[Counting] = []

    def prepared(module: LitModel) -> None:
        assert isinstance(module, Counting)
        prepare(module)
        seen.append(module)

    run(recipe, strategy, folder, module_class=Counting, prepare=prepared)
    return seen[0].left


SHAPES = {
    "plain": Shape(),
    "views": Shape(odd=True),
    "frozen": Shape(frozen=(0, 1)),
    "half frozen": Shape(half_frozen=True),
    "used twice": Shape(shared=True),
}


@pytest.mark.parametrize("strategy", ["disk", "device"])
@pytest.mark.parametrize("name", SHAPES)
def test_no_cast_is_left_when_a_forward_ends(name: str, strategy: str, tmp_path: Path) -> None:
    recipe = replace(MIXED, shape=SHAPES[name])
    assert min(left(recipe, "auto", tmp_path)) > 0
    ours = on_device("host") if strategy == "device" else HeteroOffloadStrategy(plan=strategy)
    assert left(recipe, ours, tmp_path) == [0] * recipe.steps


def checkpoint_inside(module: LitModel) -> None:
    module.model.blocks = nn.ModuleList(Inside(block) for block in module.model.blocks)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_inside_a_block(kind: str, tmp_path: Path) -> None:
    recipe = replace(MIXED, shape=Shape(counting=False))
    assert_same_as_plain(kind, partial(run, recipe, tmp_path=tmp_path, prepare=checkpoint_inside))


def test_blocks_that_stay_in_memory_keep_their_casts(tmp_path: Path) -> None:
    assert left(MIXED, HeteroOffloadStrategy(plan="host"), tmp_path) == left(MIXED, "auto", tmp_path)


# ---- the same bits -------------------------------------------------------------------------------


class Manual(LitModel):
    """Backward, update and another forward inside one autocast context."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for _ in range(2):
            self.optimizers().zero_grad()
            loss = self.loss(batch)
            self.losses.append(loss.detach().clone())
            self.manual_backward(loss)
            self.change()
            self.optimizers().step()

    def change(self) -> None:
        """Changes weights from outside their block."""


class Clamping(Manual):
    """Writes to weights between two forwards."""

    def change(self) -> None:
        with torch.no_grad():
            for param in self.model.parameters():
                param.clamp_(-0.05, 0.05)


class Between(LitModel):
    """Writes to weights between forward and backward. The casts are of the weights before."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.model.blocks[1].up.weight.mul_(0.5)
        return loss


class Shrinking(nn.Module):
    """A block that changes its weight in forward, after it was used."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        with torch.no_grad():
            self.block.up.weight.mul_(0.75)
        return x


class Penalized(LitModel):
    """Adds the norm of a gradient to the loss, so that backward runs through the graph of a
    backward.
    """

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        (gradient,) = torch.autograd.grad(loss, [self.model.position], create_graph=True)
        loss = loss + gradient.float().pow(2).sum()
        self.losses.append(loss.detach().clone())
        return loss


class Functional(nn.Module):
    """A block that takes a gradient by torch.func in its forward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.func.grad(lambda y: y.pow(2).sum())(torch.ones(1))
        return self.block(x) * scale


@pytest.mark.parametrize(
    ("module_class", "kind"),
    [
        *((kind_of_step, kind) for kind_of_step in (Manual, Between) for kind in KINDS),
        *((Clamping, kind) for kind in KINDS),
        *((Penalized, kind) for kind in ("disk", "host", "device")),
    ],
)
def test_other_steps(module_class: type[LitModel], kind: str, tmp_path: Path) -> None:
    train = partial(run, replace(MIXED, shape=Shape(dropout=0.1)), tmp_path=tmp_path, module_class=module_class)
    assert_same_as_plain(kind, train)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_changes_its_weights_in_forward(kind: str, tmp_path: Path) -> None:
    def prepare(module: LitModel) -> None:
        module.model.blocks = nn.ModuleList(Shrinking(block) for block in module.model.blocks)

    assert_same_as_plain(kind, partial(run, replace(MIXED, shape=Shape(shared=True)), tmp_path=tmp_path, prepare=prepare))


@pytest.mark.parametrize("kind", ["disk", "tight", "host"])
def test_torch_func_inside_a_block(kind: str, tmp_path: Path) -> None:
    def prepare(module: LitModel) -> None:
        module.model.blocks = nn.ModuleList(Functional(block) for block in module.model.blocks)

    assert_same_as_plain(kind, partial(run, MIXED, tmp_path=tmp_path, prepare=prepare))


class Product(torch.autograd.Function):
    """A product with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return (gradient.float() @ weight).to(x.dtype), gradient.float().t() @ x.float()


class Custom(nn.Module):
    """A block that ends in an operator with a backward of its own."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.block.up(self.block.norm(x)))
        return Product.apply(x.flatten(0, 1), self.block.down.weight).unflatten(0, x.shape[:2])


@pytest.mark.parametrize("kind", KINDS)
def test_operators_with_a_backward_of_their_own(kind: str, tmp_path: Path) -> None:
    def prepare(module: LitModel) -> None:
        module.model.blocks = nn.ModuleList(Custom(block) for block in module.model.blocks)

    assert_same_as_plain(kind, partial(run, MIXED, tmp_path=tmp_path, prepare=prepare))


class InPlace(nn.Module):
    """A block that changes what autograd has saved."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.block(x))
        y.mul_(2)
        return y


@pytest.mark.parametrize("strategy", ["auto", HeteroOffloadStrategy(plan="disk")], ids=["plain", "disk"])
def test_a_saved_tensor_that_was_changed_in_place_is_refused(strategy: Any, tmp_path: Path) -> None:
    def prepare(module: LitModel) -> None:
        module.model.blocks = nn.ModuleList(InPlace(block) for block in module.model.blocks)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(MIXED, strategy, tmp_path, prepare=prepare)


@pytest.mark.parametrize("kind", ["disk", "tight", "device"])
def test_compiled_models(kind: str, tmp_path: Path) -> None:
    def train(strategy: Any) -> Outcome:
        def prepare(module: LitModel) -> None:
            module.model.compile(backend="aot_eager")

        recipe = replace(MIXED, shape=Shape(layers=2, counting=False))
        trains = partial(run, recipe, strategy, tmp_path, prepare=prepare)
        return once((test_compiled_models, recipe), trains) if strategy == "auto" else trains()

    assert_same_as_plain(kind, train)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_with_a_scaled_loss(kind: str, tmp_path: Path) -> None:
    def train(strategy: Any) -> Outcome:
        torch.manual_seed(7)
        module = LitModel(MIXED)
        plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**12))
        trainer = quiet_trainer(strategy=strategy, plugins=[plugin], max_steps=3, default_root_dir=tmp_path)
        trainer.fit(module, data())
        return Outcome(module.losses, {n: v.clone() for n, v in module.state_dict().items()}, [])

    assert_same(train(make_strategy(kind, train)), train("auto"))
