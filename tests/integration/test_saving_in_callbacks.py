"""Files that user code writes while training goes on: the weights as they are then, under every
plan, or a refusal by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from support.models import LitModel, Recipe, Shape, data, quiet_trainer
from support.strategies import least_memory, make_strategy
from torch import Tensor

from lightning_hetero.errors import OutOfMemoryBudgetError
from lightning_hetero.strategies import HeteroOffloadStrategy

State = dict[str, Tensor]
Save = Callable[[Any, Path], State]


def by_safetensors(module: Any, path: Path) -> State:
    save_file(module.state_dict(), path)
    return load_file(path)


def by_save_model(module: Any, path: Path) -> State:
    save_model(module, str(path))
    return load_file(path)


def state_by_torch(module: Any, path: Path) -> State:
    torch.save(module.state_dict(), path)
    found: State = torch.load(path, weights_only=True)
    return found


def model_by_torch(module: Any, path: Path) -> State:
    torch.save(module.model, path)
    loaded = torch.load(path, weights_only=False)
    loaded(torch.zeros(2, 5, dtype=torch.long))  # its hooks do nothing
    return {f"model.{name}": value for name, value in loaded.state_dict().items()}


def by_copying(module: Any, path: Path) -> State:
    return dict(copy.deepcopy(module.model).state_dict(prefix="model."))


class Saves(pl.Callback):
    """Saves as each of the hooks runs."""

    def __init__(self, save: Save, folder: Path) -> None:
        self.save, self.path = save, folder / "saved"
        self.found: list[State] = []

    def _now(self, _: Any, module: Any, *__: Any) -> None:
        self.found.append({name: value.clone() for name, value in self.save(module, self.path).items()})

    on_train_batch_end = on_train_epoch_end = on_validation_end = _now


def trained(strategy: Any, save: Save, folder: Path, layers: int = 3) -> list[State]:
    torch.manual_seed(7)
    saves = Saves(save, folder)
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, limit_train_batches=2, default_root_dir=folder, callbacks=[saves])
    trainer.fit(LitModel(Recipe(shape=Shape(layers=layers))), data(), data(1, seed=1))
    return saves.found


@pytest.mark.parametrize("save", [by_safetensors, by_save_model, state_by_torch, model_by_torch, by_copying])
@pytest.mark.parametrize("kind", ["resident", "host", "disk", "device", "device_resident"])
def test_callbacks_save_the_same_as_in_plain_lightning(kind: str, save: Save, tmp_path: Path) -> None:
    train = partial(trained, save=save, folder=tmp_path)
    expected, got = train("auto"), train(make_strategy(kind, train))
    assert len(got) == len(expected) == 4
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], value) for name, value in theirs.items())


class Looks(LitModel):
    def on_train_batch_end(self, *_: Any) -> None:
        for name, value in self.state_dict().items():
            assert value.untyped_storage().data_ptr() == value.data_ptr() != 0, name
            assert type(value) is Tensor, name


@pytest.mark.parametrize("plan", ["resident", "host"])
def test_weights_in_memory_are_not_copied(plan: str, tmp_path: Path) -> None:
    quiet_trainer(strategy=HeteroOffloadStrategy(plan), max_steps=2, default_root_dir=tmp_path).fit(Looks(Recipe()), data())


def test_copies_that_do_not_fit_are_refused_with_bytes_and_remedy(tmp_path: Path) -> None:
    train = partial(trained, save=by_safetensors, folder=tmp_path, layers=6)
    budget = least_memory(train)
    with pytest.raises(
        OutOfMemoryBudgetError, match=r"needs .*B; beside the plan there is room for .*export_weights.*save_checkpoint"
    ):
        train(HeteroOffloadStrategy("disk", host_memory=budget))


def test_room_comes_back_with_the_last_copy(tmp_path: Path) -> None:
    class Model(LitModel):
        def on_train_batch_end(self, *_: Any) -> None:
            loans = self.trainer.strategy.session.store.loans
            state = self.state_dict()
            assert loans.num_bytes == 0
            by_safetensors(self, tmp_path / "x")
            assert loans.num_bytes == 0
            away = [value for value in state.values() if type(value) is not Tensor]
            before = [value.data_ptr() for value in away]
            assert loans.num_bytes == sum(value.nbytes for value in away) > 0
            assert before == [value.data_ptr() for value in away]

    trainer = quiet_trainer(strategy=HeteroOffloadStrategy("disk"), max_steps=2, default_root_dir=tmp_path)
    trainer.fit(Model(Recipe()), data())
