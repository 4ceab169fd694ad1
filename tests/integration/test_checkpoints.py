"""Checkpoints are ordinary Lightning checkpoints: whoever wrote one, everyone resumes from it to
the same bits.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer
from support.strategies import make_strategy
from torch.utils.data import DataLoader

KINDS = ["auto", "host", "disk", "tight"]
OURS = KINDS[1:]
BATCHES = 3  # per epoch
RECIPE = Recipe(shape=Shape(tied=True, frozen=(1,)), groups=True, schedule="step")


def batches() -> DataLoader[Any]:
    """The same batches in every epoch: resuming does not restore the order of shuffled data."""
    return DataLoader(data(BATCHES).dataset, batch_size=2)


def fit(strategy: Any, folder: Path, *, epochs: int, resume: Path | None = None, seed: int = 7, **options: Any) -> Any:
    torch.manual_seed(seed)
    module = LitModel(RECIPE)
    trainer = quiet_trainer(strategy=strategy, max_epochs=epochs, default_root_dir=folder, **options)
    trainer.fit(module, batches(), ckpt_path=resume, weights_only=None if resume is None else True)
    return trainer, module


def make(kind: str, folder: Path) -> Any:
    return make_strategy(kind, lambda strategy: fit(strategy, folder, epochs=1))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Writes one epoch's checkpoint with the strategy of a kind; each kind once."""

    @functools.cache
    def write(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        saver = ModelCheckpoint(dirpath=folder, filename="first", every_n_epochs=1, save_top_k=-1)
        fit(make(kind, folder), folder, epochs=1, enable_checkpointing=True, callbacks=[saver])
        return folder / "first.ckpt"

    return write


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    trainer, module = fit("auto", tmp_path_factory.mktemp("plain"), epochs=3)
    return outcome(trainer, module)


@pytest.mark.parametrize(
    ("writer", "reader"),
    [*product(KINDS, KINDS), *(("device", kind) for kind in ("auto", "tight", "device")), ("auto", "device"), ("disk", "device")],
)
def test_resuming_equals_not_stopping(writer: str, reader: str, written: Any, uninterrupted: Outcome, tmp_path: Path) -> None:
    trainer, module = fit(make(reader, tmp_path), tmp_path, epochs=3, resume=written(writer), seed=8)
    assert len(module.losses) == 2 * BATCHES
    module.losses[:0] = uninterrupted.losses[:BATCHES]
    assert_same(outcome(trainer, module), uninterrupted)


@pytest.mark.parametrize("kind", OURS)
def test_files_equal_those_of_plain_lightning(kind: str, written: Any) -> None:
    assert_same_files(written(kind), written("auto"))


def test_files_load_where_the_package_is_not_installed(written: Any) -> None:
    code = """
import sys
sys.modules["lightning_hetero"] = None  # importing it fails
import torch
for file in sys.argv[1:]:
    checkpoint = torch.load(file, weights_only=True)
    state = checkpoint["optimizer_states"][0]["state"]
    assert all(type(v) is torch.Tensor for v in checkpoint["state_dict"].values()), file
    assert all(type(v) is torch.Tensor for s in state.values() for v in s.values()), file
    print(len(state))
"""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", code, *(str(written(kind)) for kind in OURS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    trained = sum(p.requires_grad for p in LitModel(RECIPE).parameters())
    assert list(map(int, done.stdout.split())) == [trained] * len(OURS)


@pytest.mark.parametrize("kind", OURS)
def test_files_are_as_large_as_those_of_plain_lightning(kind: str, written: Any, tmp_path: Path) -> None:
    """Parameters of a block lie side by side in one memory; a file must not hold all of it for each
    of them.
    """
    trainer, _ = fit(make(kind, tmp_path), tmp_path, epochs=1)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    plain = written("auto").stat().st_size
    assert plain * 0.9 < written(kind).stat().st_size < plain * 1.1
    assert plain * 0.9 < (tmp_path / "after.ckpt").stat().st_size < plain * 1.1


@pytest.mark.parametrize("kind", OURS)
def test_saving_after_fit(kind: str, tmp_path: Path) -> None:
    trainers = {k: fit(make(k, tmp_path / k), tmp_path / k, epochs=2) for k in ("auto", kind)}
    for name, (trainer, _) in trainers.items():
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
    assert_same_files(tmp_path / f"{kind}.ckpt", tmp_path / "auto.ckpt")


@pytest.mark.parametrize("kind", OURS)
def test_load_from_checkpoint(kind: str, written: Any) -> None:
    module = LitModel.load_from_checkpoint(written(kind), recipe=RECIPE, weights_only=True)
    expected = torch.load(written("auto"), weights_only=True)["state_dict"]
    assert_same_tensors(dict(module.state_dict()), expected)
    assert module.model.head.weight is module.model.embed.weight


@pytest.mark.parametrize("kind", OURS)
def test_save_weights_only(kind: str, tmp_path: Path) -> None:
    files = {}
    for k in ("auto", kind):
        saver = ModelCheckpoint(dirpath=tmp_path / k, filename="weights", save_weights_only=True)
        fit(make(k, tmp_path / k), tmp_path / k, epochs=1, enable_checkpointing=True, callbacks=[saver])
        files[k] = tmp_path / k / "weights.ckpt"
    assert "optimizer_states" not in torch.load(files[kind], weights_only=True)
    assert_same_files(files[kind], files["auto"])


@pytest.mark.parametrize("kind", OURS)
def test_asynchronous_saving_takes_a_snapshot(kind: str, tmp_path: Path) -> None:
    """Training goes on while the file is written."""
    for k in ("auto", kind):
        saver = ModelCheckpoint(dirpath=tmp_path / k, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        plugins = [AsyncCheckpointIO()] if k == kind else []
        fit(make(k, tmp_path / k), tmp_path / k, epochs=2, enable_checkpointing=True, callbacks=[saver], plugins=plugins)
    for step in range(1, 2 * BATCHES + 1):
        assert_same_files(tmp_path / kind / f"step={step}.ckpt", tmp_path / "auto" / f"step={step}.ckpt")


@pytest.mark.parametrize("kind", OURS)
def test_the_best_checkpoint_is_tested_and_old_ones_are_removed(kind: str, tmp_path: Path) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path / "files", every_n_train_steps=1, save_top_k=1, save_last=True)
    trainer, module = fit(make(kind, tmp_path), tmp_path, epochs=2, enable_checkpointing=True, callbacks=[saver])
    assert len(list((tmp_path / "files").iterdir())) == 2
    module.losses.clear()
    module.test_step = module.validation_step
    trainer.test(module, batches(), ckpt_path="best", weights_only=True)
    again = LitModel.load_from_checkpoint(saver.best_model_path, recipe=RECIPE, weights_only=True).eval()
    with torch.no_grad():
        assert_same_tensors(dict(enumerate(module.losses)), dict(enumerate(again.loss(batch) for batch in batches())))


@pytest.mark.parametrize("kind", OURS)
def test_a_checkpoint_of_another_model_is_refused(kind: str, written: Any, tmp_path: Path) -> None:
    module = LitModel(Recipe(shape=Shape(layers=2)))
    trainer = quiet_trainer(strategy=make(kind, tmp_path), max_epochs=2, default_root_dir=tmp_path)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        trainer.fit(module, batches(), ckpt_path=written(kind), weights_only=True)


def assert_same_files(got: Path, expected: Path) -> None:
    ours, theirs = (torch.load(path, weights_only=True) for path in (got, expected))
    assert ours.keys() == theirs.keys()
    assert_same_tensors(ours["state_dict"], theirs["state_dict"])
    losses: list[torch.Tensor] = []
    states = [c.get("optimizer_states", []) for c in (ours, theirs)]
    assert len(states[0]) == len(states[1])
    assert_same(Outcome(losses, {}, states[0]), Outcome(losses, {}, states[1]))
    for key in ("epoch", "global_step", "loops", "lr_schedulers"):
        assert ours.get(key) == theirs.get(key), key


def assert_same_tensors(got: dict[Any, Any], expected: dict[Any, Any]) -> None:
    assert_same(Outcome([], got, []), Outcome([], expected, []))
