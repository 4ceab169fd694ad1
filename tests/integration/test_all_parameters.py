"""``AdamW(self.parameters())`` over frozen weights: only what trains costs anything, whenever that changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, quiet_trainer
from support.recipes import MIXED
from support.resuming import EndsAt, after, fitted, offload
from support.strategies import on_device
from torch import Tensor, nn

from lightning_hetero import Tier
from lightning_hetero.convert.safetensors import TensorToWrite, write_directory
from lightning_hetero.errors import OutOfDiskError, UnsupportedError
from lightning_hetero.ir.schedule import OpKind
from lightning_hetero.optim.reference import MasterWeightOptimizer
from lightning_hetero.store.format.audit import StoreFiles
from lightning_hetero.store.format.record import parse
from lightning_hetero.strategies import HeteroOffloadStrategy

BATCHES = 3  # of an epoch
RECIPE = Recipe(steps=8, shape=Shape(layers=3, dropout=0.1, few=True))  # each block is two
WHOLE = replace(RECIPE, shape=Shape(layers=3, frozen=(0, 2), odd=True))
PLANS = ["resident", "host", "disk", MIXED, on_device, partial(on_device, "resident")]
IDS = ["resident", "host", "disk", "mixed", "device", "device_resident"]


class All(LitModel):
    """The optimizer has all parameters, as most people write it."""

    def configure_optimizers(self) -> Any:
        return self.recipe.optimizer(list(self.parameters()))


class Trained(LitModel):
    """It has those that train."""

    def configure_optimizers(self) -> Any:
        return self.recipe.optimizer([p for p in self.parameters() if p.requires_grad])


@dataclass
class Costs(pl.Callback):
    """What the steps of a run cost."""

    ops: list[Any] = field(default_factory=list)
    sizes: Any = None
    num_bytes: tuple[int, ...] = ()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        session: Any = trainer.strategy.session  # type: ignore[attr-defined]
        self.ops = [(op.kind, op.block, op.payload) for op in session.executor.schedule.ops]
        self.sizes = session.executor.model

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        session: Any = trainer.strategy.session  # type: ignore[attr-defined]
        session.executor.rest()  # all is written
        stats = session.store.stats()
        self.num_bytes = stats.bytes_written, stats.bytes_read, session.memory_report()["disk_bytes"]


def fit(
    root: Path, strategy: Any, recipe: Recipe = RECIPE, *callbacks: pl.Callback, stop: int | None = None,
    store: Path | None = None, module_class: type[LitModel] = All, device: str = "cpu", content: dict[str, Tensor] | None = None,
) -> Outcome:  # fmt: skip
    """One fit, to the end or to step ``stop``; from the beginning or from ``store``."""
    torch.manual_seed(7)
    with torch.device(device):
        module = module_class(recipe)
    if content is not None:
        module.model.load_state_dict(content)
    torch.manual_seed(11)
    trainer = quiet_trainer(
        strategy=strategy, max_steps=recipe.steps, limit_val_batches=0, default_root_dir=root, precision=recipe.precision,
        accumulate_grad_batches=recipe.accumulate, gradient_clip_val=recipe.clip,
        callbacks=[*callbacks, *([] if stop is None else [EndsAt(stop)])],
    )  # fmt: skip
    return fitted(trainer, module, data(BATCHES), store=store)


@pytest.mark.parametrize(
    ("plan", "kept", "recipe"),
    [*((plan, True, RECIPE) for plan in PLANS), ("disk", False, WHOLE), (MIXED, True, WHOLE), (on_device, False, RECIPE)],
    ids=[*IDS, "disk-scratch", "mixed-whole", "device-scratch"],
)
def test_frozen_members_cost_nothing(plan: Any, kept: bool, recipe: Recipe, tmp_path: Path) -> None:
    recipe = replace(recipe, steps=3)
    found = {}
    for module_class in (All, Trained):
        costs = Costs()
        strategy = offload(plan, tmp_path / module_class.__name__, durability="process" if kept else "none")
        assert_same(
            fit(tmp_path, strategy, recipe, costs, module_class=module_class),
            fit(tmp_path, "auto", recipe, module_class=module_class),
        )
        found[module_class] = costs
    ours, theirs = found[All], found[Trained]
    assert ours.sizes.blocks == theirs.sizes.blocks
    assert ours.ops == theirs.ops
    assert any(kind is OpKind.UPDATE for kind, *_ in ours.ops)
    assert ours.num_bytes == theirs.num_bytes


def frozen_of(module: Any) -> list[nn.Parameter]:
    return [p for n, p in module.named_parameters() if n.endswith(("up.weight", "down.bias"))]


@dataclass
class Flips(pl.Callback):
    """Sets frozen weights free in a hook before step ``at[0]``, freezes all blocks before ``at[1]``, sets free what was again."""

    hook: str = "on_train_batch_start"
    at: tuple[int, ...] = (2, 4, 6)

    def __post_init__(self) -> None:
        setattr(self, self.hook, self._hook)

    def _hook(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        step = trainer.global_step
        if step in self.at:
            free = self.at.index(step) % 2 == 0
            for param in frozen_of(module):
                param.requires_grad_(free)
            module.model.blocks[1].norm.requires_grad_(free)


class FlipsInStep(All):
    """Sets a frozen block free where its own code likes."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.model.blocks[0].requires_grad_(self.global_step >= 3)
        return super().training_step(batch, batch_idx)


class Unfreezes(BaseFinetuning):
    """Lightning's own way, with parameters that the optimizer has already: it adds no group."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.make_trainable(pl_module.model.blocks[1:])


SGD = replace(RECIPE, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.1))
WIDE = replace(RECIPE, shape=replace(RECIPE.shape, width=256))
CLIPPED = replace(RECIPE, clip=0.3)
SUMMED = replace(WHOLE, accumulate=2)
HALF = replace(RECIPE, precision="bf16-true")


class Masters(MasterWeightOptimizer):
    """The reference for 16-bit weights. It has a master of each member; the state of those that trained counts."""

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        return {**found, "state": {number: state for number, state in found["state"].items() if "step" in state}}


def plain_of(recipe: Recipe) -> Recipe:
    """The recipe for plain Lightning, whose optimizer has fp32 masters of 16-bit weights."""
    if recipe.precision != "bf16-true":
        return recipe
    return replace(recipe, optimizer=lambda groups: Masters(groups, recipe.optimizer))


DEVICE_RESIDENT = PLANS[-1]


@pytest.mark.parametrize(
    ("make", "recipe", "plan"),
    [
        *((Flips, RECIPE, plan) for plan in PLANS),
        *((Flips, WHOLE, plan) for plan in ("disk", on_device)),
        *((Flips, SGD, plan) for plan in ("host", "disk", DEVICE_RESIDENT)),  # its code runs on the device
        *((partial(Flips, "on_train_batch_end"), CLIPPED, plan) for plan in ("disk", on_device, DEVICE_RESIDENT)),
        *((partial(Flips, "on_before_backward"), SUMMED, plan) for plan in (MIXED, on_device)),
        *((partial(Flips, "on_after_backward"), RECIPE, plan) for plan in ("disk", on_device)),
        *((partial(Flips, "on_train_batch_end"), HALF, plan) for plan in ("host", "disk", on_device)),
        *((Unfreezes, RECIPE, plan) for plan in ("disk", on_device)),
    ],
)
def test_weights_that_are_set_free_train(make: Callable[[], pl.Callback], recipe: Recipe, plan: Any, tmp_path: Path) -> None:
    got = fit(tmp_path, plan() if callable(plan) else HeteroOffloadStrategy(plan), recipe, make())
    assert_same(got, fit(tmp_path, "auto", plain_of(recipe), make()))


@pytest.mark.parametrize("plan", ["disk", on_device], ids=["disk", "device"])
def test_weights_that_are_set_free_in_the_training_step_train(plan: Any, tmp_path: Path) -> None:
    got = fit(tmp_path, plan() if callable(plan) else HeteroOffloadStrategy(plan), WHOLE, module_class=FlipsInStep)
    assert_same(got, fit(tmp_path, "auto", WHOLE, module_class=FlipsInStep))


class ByHand(pl.Callback):
    """Gives a frozen weight gradients; one of them is zero, which decays the weight and its moments all the same."""

    def on_after_backward(self, trainer: pl.Trainer, module: Any) -> None:
        param = module.model.blocks[0].up.weight
        if trainer.global_step in (2, 3, 5):
            param.grad = torch.full_like(param, 0.01 if trainer.global_step != 3 else 0.0)


@pytest.mark.parametrize("plan", PLANS, ids=IDS)
def test_frozen_weights_whose_gradient_is_set_by_hand_are_updated(plan: Any, tmp_path: Path) -> None:
    got = fit(tmp_path, plan() if callable(plan) else HeteroOffloadStrategy(plan), RECIPE, ByHand())
    expected = fit(tmp_path, "auto", RECIPE, ByHand())
    assert_same(got, expected)
    assert len(expected.state[0]["state"]) == len(fit(tmp_path, "auto", RECIPE).state[0]["state"]) + 1


@pytest.mark.parametrize(
    ("first", "second", "stop"),
    [
        *(("disk", "host", stop) for stop in (2, 3, 5, 7)),
        *((on_device, "disk", stop) for stop in (2, 5)),
        *(("host", on_device, stop) for stop in (2, 5)),
        ("resident", MIXED, 5),
    ],
)
def test_a_run_goes_on_before_and_after_weights_are_set_free(first: Any, second: Any, stop: int, tmp_path: Path) -> None:
    """At step 5 weights with state are frozen."""
    store, make = tmp_path / "store", partial(Flips, "on_train_batch_end")
    expected = fit(tmp_path, "auto", RECIPE, make())
    fit(tmp_path, offload(first, store, verify_digests=True), RECIPE, make(), stop=stop)
    got = fit(tmp_path, offload(second, store, verify_digests=True), RECIPE, make(), store=store)
    assert_same(got, after(expected, RECIPE.steps - stop))


@pytest.mark.parametrize("plan", ["disk", "host", on_device], ids=["disk", "host", "device"])
@pytest.mark.parametrize("step", [1, 5], ids=["frozen", "frozen-again"])
def test_checkpoints_go_both_ways(plan: Any, step: int, tmp_path: Path) -> None:
    """State of weights that are frozen when it is loaded is kept for later."""

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == step:
                trainer.save_checkpoint(tmp_path / "one.ckpt")

    def strategy() -> Any:
        return plan() if callable(plan) else HeteroOffloadStrategy(plan)

    def resume(strategy: Any) -> Outcome:
        return fit(tmp_path, strategy, RECIPE, Flips(at=(6,)), store=tmp_path / "one.ckpt")

    fit(tmp_path, "auto", RECIPE, Flips(at=(2, 4)), Saves())
    theirs = torch.load(tmp_path / "one.ckpt", weights_only=False)
    expected = resume("auto")
    assert_same(resume(strategy()), expected)
    fit(tmp_path, strategy(), RECIPE, Flips(at=(2, 4)), Saves())
    ours = torch.load(tmp_path / "one.ckpt", weights_only=False)
    (mine,), (other,) = ours["optimizer_states"], theirs["optimizer_states"]
    assert mine["param_groups"] == other["param_groups"]
    assert mine["state"].keys() == other["state"].keys()
    assert_same(resume("auto"), expected)


def in_place(store: Path) -> set[str]:
    """The first names of the parts that are read in place."""
    with StoreFiles(store) as files:
        assert files.record is not None
        rows = zip(files.manifest["layout"]["parts"], parse(files.record.user).parts, strict=True)
        return {names[0] for names, entry in rows if entry.in_place is not None}


@pytest.mark.parametrize("plan", ["disk", "host", MIXED, on_device], ids=["disk", "host", "mixed", "device"])
def test_frozen_members_are_read_in_place_until_they_train(plan: Any, tmp_path: Path) -> None:
    torch.manual_seed(3)
    content = {name: value.clone() for name, value in All(RECIPE).model.state_dict().items()}
    rows = [TensorToWrite(name, value.dtype, value.shape, lambda value=value: value) for name, value in content.items()]
    write_directory(tmp_path / "weights", rows, max_shard_bytes=20_000)
    store, make = tmp_path / "store", partial(Flips, "on_train_batch_end", at=(4,))

    def strategy(plan: Any) -> Any:
        return offload(plan, store, verify_digests=True, weights={"model": tmp_path / "weights"})

    fit(tmp_path, strategy(plan), RECIPE, make(), stop=3, device="meta")
    assert len(in_place(store)) == RECIPE.shape.layers
    fit(tmp_path, strategy(plan), RECIPE, make(), stop=6, store=store, device="meta")
    assert not in_place(store)
    got = fit(tmp_path, strategy("disk"), RECIPE, make(), store=store, device="meta")
    assert_same(got, after(fit(tmp_path, "auto", RECIPE, make(), content=content), RECIPE.steps - 6))


@pytest.mark.parametrize("plan", ["disk", "host"])
def test_weights_that_are_set_free_need_room_on_the_disk(plan: str, tmp_path: Path) -> None:
    strategy = offload(plan, tmp_path / "all")
    fit(tmp_path, strategy, replace(WIDE, steps=1))
    needed = int(strategy.memory_report()["disk_bytes"])
    with pytest.raises(OutOfDiskError, match=r"'model.blocks.0.up.weight' was frozen and trains now.* Raise disk_capacity"):
        fit(tmp_path, offload(plan, tmp_path / "tight", disk_capacity=needed + 2**21), replace(WIDE, steps=4), Flips())
    fit(tmp_path, offload(plan, tmp_path / "roomy", disk_capacity=needed + 2**27), replace(WIDE, steps=4), Flips())


class Own(torch.optim.SGD):
    """Not torch's, so it may couple its parameters."""


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_weights_on_disk_whose_optimizer_needs_all_in_memory(precision: str, tmp_path: Path) -> None:
    """Without masters the optimizer's own ``step`` reads and writes each parameter where it is."""
    recipe = replace(RECIPE, optimizer=lambda groups: Own(groups, lr=0.1), precision=precision)
    here = ("*:trained", "model", "model.embed", "model.norm", "model.head")
    rules = [replace(MIXED.blocks[0], name=name) for name in here]
    plan = replace(MIXED, blocks=(*rules, replace(MIXED.blocks[1], state=Tier.HOST)))
    if precision == "32-true":
        assert_same(fit(tmp_path, HeteroOffloadStrategy(plan), recipe, Flips()), fit(tmp_path, "auto", recipe, Flips()))
        return
    fit(tmp_path, HeteroOffloadStrategy(plan), recipe)
    with pytest.raises(UnsupportedError, match=r"places block 'model.blocks.0' on disk, but optimizer Own"):
        fit(tmp_path, HeteroOffloadStrategy(plan), recipe, Flips())
