"""``AdamW(self.parameters())`` over frozen weights: only what trains costs anything, whenever that
changes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from support.all_parameters import BATCHES, RECIPE, All, Budget, Costs, Flips, Trained, fit, in_place
from support.models import Outcome, Recipe, Shape, assert_same, data, quiet_trainer
from support.recipes import MIXED
from support.resuming import after, offload
from support.strategies import least_memory, on_device
from torch import Tensor

from lightning_hetero import Tier
from lightning_hetero.convert.safetensors import TensorToWrite, write_directory
from lightning_hetero.errors import OutOfDiskError, OutOfMemoryBudgetError, UnsupportedError
from lightning_hetero.ir.schedule import OpKind
from lightning_hetero.optim.reference import MasterWeightOptimizer
from lightning_hetero.strategies import HeteroOffloadStrategy

WHOLE = replace(RECIPE, shape=Shape(layers=3, frozen=(0, 2), odd=True))
PLANS = ["resident", "host", "disk", MIXED, on_device, partial(on_device, "resident")]
IDS = ["resident", "host", "disk", "mixed", "device", "device_resident"]


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


@pytest.mark.parametrize("plan", ["resident", "host", "disk", on_device], ids=["resident", "host", "disk", "device"])
def test_a_run_that_begins_from_the_checkpoint_of_its_last_step_ends_as_it_began(plan: Any, tmp_path: Path) -> None:
    """State that frozen members have gives their files a second slot, and no step follows that
    writes it.
    """
    first = All(recipe := replace(RECIPE, steps=3))
    trainer = quiet_trainer(max_steps=3, limit_val_batches=0, default_root_dir=tmp_path, callbacks=[Flips(at=(1, 2))])
    trainer.fit(first, data(BATCHES))
    trainer.save_checkpoint(path := tmp_path / "x.ckpt")
    module = All(recipe)
    strategy = offload(plan, tmp_path / "store")
    trainer = quiet_trainer(
        strategy=strategy, max_steps=3, limit_val_batches=0, default_root_dir=tmp_path, callbacks=[Flips(at=(1, 2))]
    )
    trainer.fit(module, data(BATCHES), ckpt_path=str(path))
    assert not module.losses
    assert all(torch.equal(*pair) for pair in zip(module.parameters(), first.parameters(), strict=True))


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
    """The reference for 16-bit weights. It has a master of each member; the state of those that
    trained counts.
    """

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
    """Gives a frozen weight gradients; one of them is zero, which decays the weight and its moments
    all the same.
    """

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


def test_weights_that_are_set_free_leave_less_memory_to_cache_weights(tmp_path: Path) -> None:
    least = least_memory(lambda strategy: fit(tmp_path, strategy, WIDE), "disk")
    host_memory, budget = least + 2**21, Budget()
    got = fit(tmp_path, HeteroOffloadStrategy("disk", host_memory=host_memory), WIDE, Flips(at=(3,)), budget)
    assert_same(got, fit(tmp_path, "auto", WIDE, Flips(at=(3,))))
    assert budget.rows[2][0] > budget.rows[3][0] > 0
    for cache_bytes, held, needed in budget.rows:
        assert held <= cache_bytes
        assert needed <= host_memory


@pytest.mark.parametrize("plan", ["disk", "host"])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end", "on_before_backward"])
def test_weights_that_are_set_free_and_do_not_fit_are_refused_and_nothing_is_lost(plan: str, hook: str, tmp_path: Path) -> None:
    store, make = tmp_path / "store", partial(Flips, hook, at=(3,))
    least = least_memory(lambda strategy: fit(tmp_path, strategy, WIDE), plan)
    steps = 3 + (hook == "on_before_backward")  # set free within a step, which then ends
    with pytest.raises(OutOfMemoryBudgetError, match=r"weights that were frozen train now(.|\n)*Raise host_memory") as refusal:
        fit(tmp_path, offload(plan, store, host_memory=least + 2**16), WIDE, make())
    needed = int(refusal.value.needed_bytes)
    assert needed > least + 2**16
    shutil.copytree(store, tmp_path / "copy")  # a model that does not fit memory keeps the store while it lives
    got = fit(tmp_path, offload(plan, tmp_path / "copy", host_memory=needed), WIDE, make(), store=tmp_path / "copy")
    assert_same(got, after(fit(tmp_path, "auto", WIDE, make()), WIDE.steps - steps))


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
