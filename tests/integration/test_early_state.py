"""Optimizers that make their state as they are made: that of frozen members takes nothing, and the
bits stay those of torch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.all_parameters import All, Costs, Flips, Trained, fit, in_place
from support.models import Recipe, Shape, assert_same
from support.recipes import MIXED
from support.resuming import after, offload
from support.strategies import on_device
from torch import Tensor

from lightning_hetero.convert.safetensors import TensorToWrite, write_directory
from lightning_hetero.handles.offloaded_tensor import OffloadedTensor
from lightning_hetero.strategies import HeteroOffloadStrategy

ADAGRAD = partial(torch.optim.Adagrad, lr=0.01, lr_decay=0.1, initial_accumulator_value=0.1)
RECIPE = Recipe(steps=8, shape=Shape(layers=3, dropout=0.1, few=True), optimizer=ADAGRAD)
ODD = replace(RECIPE, shape=Shape(layers=3, frozen=(0, 2), odd=True))
RESIDENT = partial(on_device, "resident")


class ZerosAndOnes(torch.optim.SGD):
    """Fills state that its step uses, in other ways than Adagrad."""

    hetero_blockwise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05, momentum=0.9)
        for param in self.param_groups[0]["params"]:
            self.state[param]["momentum_buffer"] = torch.zeros_like(param)
            self.state[param]["ones"] = torch.ones_like(param, dtype=torch.float64)


def strategy_of(plan: Any) -> Any:
    return plan() if callable(plan) else HeteroOffloadStrategy(plan)


@pytest.mark.parametrize("plan", ["disk", MIXED], ids=["disk", "mixed"])
def test_frozen_members_cost_nothing(plan: Any, tmp_path: Path) -> None:
    found, recipe = {}, replace(RECIPE, steps=3)
    for module_class in (All, Trained):
        costs = Costs()
        got = fit(tmp_path, offload(plan, tmp_path / module_class.__name__), recipe, costs, module_class=module_class)
        assert_same(got, fit(tmp_path, "auto", recipe, module_class=module_class))
        found[module_class] = costs
    ours, theirs = found[All], found[Trained]
    assert ours.sizes.blocks == theirs.sizes.blocks
    assert ours.ops == theirs.ops
    assert ours.num_bytes == theirs.num_bytes


@pytest.mark.parametrize("plan", ["host", "disk", RESIDENT], ids=["host", "disk", "device"])
def test_no_memory_holds_the_state_of_frozen_members(plan: Any, tmp_path: Path) -> None:
    in_memory: list[set[bool]] = []

    class Looks(pl.Callback):
        def _look(self, trainer: pl.Trainer, module: Any) -> None:
            state = trainer.optimizers[0].state
            sums = {param: state[param]["sum"] for param in module.parameters()}
            frozen = {type(value) is not OffloadedTensor for param, value in sums.items() if not param.requires_grad}
            in_memory.append(frozen)

        def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            self._look(trainer, pl_module)

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            self._look(trainer, pl_module)

        def teardown(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
            self._look(trainer, pl_module)

    fit(tmp_path, strategy_of(plan), replace(RECIPE, steps=2), Looks())
    assert in_memory == [{False}] * 4


@pytest.mark.parametrize("plan", ["resident", "host", "disk", MIXED, RESIDENT], ids=["resident", "host", "disk", "mixed", "device"])
@pytest.mark.parametrize("recipe", [RECIPE, ODD, replace(RECIPE, optimizer=ZerosAndOnes)], ids=["adagrad", "odd", "fills"])
def test_weights_that_are_set_free_train(plan: Any, recipe: Recipe, tmp_path: Path) -> None:
    make = partial(Flips, "on_train_batch_end") if recipe is not ODD else partial(Flips, at=(2, 4))
    assert_same(fit(tmp_path, strategy_of(plan), recipe, make()), fit(tmp_path, "auto", recipe, make()))


@pytest.mark.parametrize(("first", "second", "stop"), [("disk", "host", 2), ("host", MIXED, 3), (MIXED, "disk", 5)])
def test_a_run_goes_on_before_and_after_weights_are_set_free(first: Any, second: Any, stop: int, tmp_path: Path) -> None:
    """At step 2 they have state that no step has changed; at step 5 weights with state are
    frozen.
    """
    store, make = tmp_path / "store", partial(Flips, "on_train_batch_end")
    fit(tmp_path, offload(first, store, verify_digests=True), RECIPE, make(), stop=stop)
    got = fit(tmp_path, offload(second, store, verify_digests=True), RECIPE, make(), store=store)
    assert_same(got, after(fit(tmp_path, "auto", RECIPE, make()), RECIPE.steps - stop))


@pytest.mark.parametrize("plan", ["disk", "host", RESIDENT], ids=["disk", "host", "device"])
def test_checkpoints_go_both_ways(plan: Any, tmp_path: Path) -> None:
    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "one.ckpt")

    def resume(strategy: Any) -> Any:
        return fit(tmp_path, strategy, RECIPE, Flips(at=(5,)), store=tmp_path / "one.ckpt")

    fit(tmp_path, "auto", RECIPE, Saves())
    expected = resume("auto")
    assert_same(resume(strategy_of(plan)), expected)
    fit(tmp_path, strategy_of(plan), RECIPE, Saves())
    assert_same(resume("auto"), expected)


def test_frozen_members_are_read_in_place_also_after_a_resume(tmp_path: Path) -> None:
    torch.manual_seed(3)
    content = {name: value.clone() for name, value in All(RECIPE).model.state_dict().items()}
    rows = [TensorToWrite(name, value.dtype, value.shape, lambda value=value: value) for name, value in content.items()]
    write_directory(tmp_path / "weights", rows, max_shard_bytes=20_000)
    store = tmp_path / "store"

    def run(stop: int | None, store_: Path | None = None) -> Any:
        strategy = offload("disk", store, weights={"model": tmp_path / "weights"})
        return fit(tmp_path, strategy, RECIPE, stop=stop, store=store_, device="meta")

    run(2)
    run(5, store)
    assert len(in_place(store)) == RECIPE.shape.layers
    expected: Any = fit(tmp_path, "auto", RECIPE, content=content)
    assert_same(run(None, store), after(expected, RECIPE.steps - 5))


def test_state_that_code_writes_stays(tmp_path: Path) -> None:
    """Such as that of a callback, which sets it before the weights are set free."""

    class Writes(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            for param in pl_module.parameters():
                value: Tensor = trainer.optimizers[0].state[param]["sum"]
                value.add_(0.5)

    got = fit(tmp_path, HeteroOffloadStrategy("disk"), RECIPE, Writes(), Flips())
    assert_same(got, fit(tmp_path, "auto", RECIPE, Writes(), Flips()))
