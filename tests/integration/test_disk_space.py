"""What a store takes on the disk is counted before training; where the disk is full all the same,
nothing that was kept is lost.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.models import Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer
from support.resuming import BATCHES, Model, after, train

from lightning_hetero.errors import OutOfDiskError
from lightning_hetero.store.format import pins, snapshots
from lightning_hetero.store.volume import Volume
from lightning_hetero.strategies import HeteroOffloadStrategy

RECIPE = Recipe(steps=6, shape=Shape(layers=2))


def momentum(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train(tmp_path_factory.mktemp("plain"), "auto", RECIPE)


def usage(folder: Path) -> int:
    """Bytes on disk of all files below a folder, each once."""
    while True:
        found = {}
        try:
            for place, _, names in os.walk(folder):
                for name in names:
                    status = os.lstat(os.path.join(place, name))
                    found[status.st_ino] = 512 * status.st_blocks
        except FileNotFoundError:  # the engine has renamed a new file meanwhile
            continue
        return sum(found.values())


class Watches(pl.Callback):
    """Notes the most that a folder has taken, as batches end and whenever ``look`` is called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.most = folder, 0

    def look(self, *_: Any) -> None:
        self.most = max(self.most, usage(self.folder))

    on_train_start = on_train_batch_start = on_train_batch_end = on_train_end = look


@pytest.mark.parametrize(
    ("plan", "every", "recipe"), [
        ("disk", 1, RECIPE), ("disk", 2, RECIPE), ("host", 1, RECIPE), ("resident", 3, RECIPE),
        ("disk", 2, replace(RECIPE, precision="bf16-true")), ("host", 2, replace(RECIPE, precision="16-true")),
        ("disk", 2, replace(RECIPE, optimizer=momentum)), ("host", 1, replace(RECIPE, optimizer=momentum)),
        ("disk", 2, replace(RECIPE, shape=Shape(layers=2, width=256))),
    ],
    ids=["disk", "disk-2", "host", "resident-3", "disk-bf16-2", "host-f16-2", "disk-sgd-2", "host-sgd", "disk-wide-2"],
)  # fmt: skip
def test_a_store_never_takes_more_than_was_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str, every: int, recipe: Recipe
) -> None:
    store = tmp_path / "store"
    watches = Watches(store)
    monkeypatch.setattr(pins, "unpin", watching(pins.unpin, watches))  # two pins are there

    def fit(capacity: int | None) -> int:
        strategy = HeteroOffloadStrategy(plan, disk_path=store, keep_every=every, disk_capacity=capacity)
        torch.manual_seed(7)
        trainer = quiet_trainer(
            strategy=strategy, max_steps=4, default_root_dir=tmp_path, limit_val_batches=0, callbacks=[watches],
            precision=recipe.precision,
        )  # fmt: skip
        trainer.fit(Model(recipe), data(BATCHES))
        return strategy.memory_report()["disk_bytes"]

    counted = fit(None)
    assert 0.3 * counted < watches.most <= counted
    for path in store.iterdir():
        remove(path)
    with pytest.raises(OutOfDiskError, match="disk_capacity"):
        fit(2048)
    assert not store.exists() or not list(store.iterdir())


def watching(call: Callable[..., object], watches: Watches) -> Callable[..., object]:
    def watched(*arguments: Any, **options: Any) -> object:
        watches.look()
        return call(*arguments, **options)

    return watched


def remove(path: Path) -> None:
    if path.is_dir():
        for inner in path.iterdir():
            inner.unlink()
        path.rmdir()
    else:
        path.unlink()


def test_a_tiny_disk_capacity_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OutOfDiskError, match=r"needs .*MiB.*disk_capacity allows 380\.0 KiB"):
        train(tmp_path, HeteroOffloadStrategy("disk", disk_path=tmp_path / "store", disk_capacity="380KiB"), RECIPE)
    assert not (tmp_path / "store").exists()


def free(monkeypatch: pytest.MonkeyPatch, read: Callable[[], int]) -> None:
    """Has the disk say that so much is free."""
    original = Volume.of.__func__
    monkeypatch.setattr(Volume, "of", classmethod(lambda cls, path: replace(original(cls, path), free_bytes=read())))


@pytest.mark.parametrize("every", [1, 2])
def test_a_nearly_full_disk_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    def keeping() -> Any:
        return HeteroOffloadStrategy("disk", disk_path=tmp_path / "store", keep_every=every)

    first = keeping()
    train(tmp_path / "other", HeteroOffloadStrategy("disk", disk_path=tmp_path / "first", keep_every=every), RECIPE, stop=1)
    needed = 0

    class Reads(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
            nonlocal needed
            needed = trainer.strategy.memory_report()["disk_bytes"]

    trainer = quiet_trainer(strategy=first, max_steps=1, default_root_dir=tmp_path, limit_val_batches=0, callbacks=[Reads()])
    trainer.fit(Model(RECIPE), data(BATCHES))
    for path in (tmp_path / "store").iterdir():
        remove(path)
    free(monkeypatch, lambda: needed - 1)
    with pytest.raises(OutOfDiskError, match=r"needs .* are free"):
        train(tmp_path, keeping(), RECIPE)
    assert not list((tmp_path / "store").iterdir())
    free(monkeypatch, lambda: needed)
    train(tmp_path, keeping(), RECIPE, stop=2)


def fails(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, on: int) -> None:
    """The call with this number finds the disk full."""
    original, calls = getattr(owner, name), iter(range(1, 10**6))

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls) >= on:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the disk")
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize(("name", "on"), [("copy", 2), ("link", 30), ("_write", 2), ("sync", 3)])
@pytest.mark.parametrize("plan", ["disk", "host"])
def test_a_disk_that_is_full_as_a_step_is_pinned_loses_nothing(
    tmp_path: Path, plain: Outcome, plan: str, name: str, on: int
) -> None:
    def keeping() -> Any:
        return HeteroOffloadStrategy(plan, disk_path=tmp_path / "store", keep_every=2)

    with pytest.MonkeyPatch.context() as patch:
        fails(patch, snapshots, name, on)
        with pytest.raises(OutOfDiskError, match=r"No space left.*Make room"):
            train(tmp_path, keeping(), RECIPE)
    with pytest.MonkeyPatch.context() as patch:  # the disk is still full: nothing gets worse
        fails(patch, snapshots, "copy", 1)
        with pytest.raises(OutOfDiskError, match="No space left"):
            train(tmp_path, keeping(), RECIPE, store=tmp_path / "store")
    got = train(tmp_path, keeping(), RECIPE, store=tmp_path / "store")
    assert len(got.losses) in (0, 2, 4)
    assert_same(got, after(plain, len(got.losses)))


@pytest.mark.parametrize("name", ["copy", "link"])
def test_a_disk_that_is_full_as_a_resume_goes_back_to_a_pin_loses_nothing(tmp_path: Path, plain: Outcome, name: str) -> None:
    def keeping() -> Any:
        return HeteroOffloadStrategy("disk", disk_path=tmp_path / "store", keep_every=2)

    train(tmp_path, keeping(), RECIPE, stop=5)
    with pytest.MonkeyPatch.context() as patch:
        fails(patch, pins, name, 1)
        with pytest.raises(OutOfDiskError, match=r"No space left.*Nothing is lost: make room"):
            train(tmp_path, keeping(), RECIPE, store=tmp_path / "store")
    assert_same(train(tmp_path, keeping(), RECIPE, store=tmp_path / "store"), after(plain, 2))


def linking(tmp_path: Path, saves: list[Any], steps: int = 6, ckpt: Path | None = None) -> Outcome:
    torch.manual_seed(7)
    module = Model(RECIPE)
    torch.manual_seed(11)
    trainer = quiet_trainer(
        strategy=HeteroOffloadStrategy("disk", disk_path=tmp_path / "store", link_checkpoints=True), max_steps=steps,
        default_root_dir=tmp_path, limit_val_batches=0, callbacks=saves,
    )  # fmt: skip
    trainer.fit(module, data(BATCHES), ckpt_path=ckpt)
    return outcome(trainer, module)


class Saves(pl.Callback):
    def __init__(self, folder: Path, *, same: bool) -> None:
        self.folder, self.same = folder, same

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / ("last.ckpt" if self.same else f"{trainer.global_step}.ckpt"))


def test_a_checkpoint_of_links_that_leaves_no_space_for_training_is_refused(
    tmp_path: Path, plain: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    linking(tmp_path, [], steps=1)
    store = usage(tmp_path / "store")
    for path in (tmp_path / "store").iterdir():
        remove(path)
    with pytest.MonkeyPatch.context() as patch:
        free(patch, lambda: max(0, 3 * store - usage(tmp_path)))
        linking(tmp_path, [Saves(tmp_path / "saves", same=True)])  # one checkpoint: three slots at most
        for path in (tmp_path / "store").iterdir():
            remove(path)
        with pytest.raises(OutOfDiskError, match=r"checkpoint .*ckpt' would take .* are free.*keep fewer checkpoints"):
            linking(tmp_path, [Saves(tmp_path / "saves", same=False)])
    got = linking(tmp_path, [], ckpt=tmp_path / "store")
    assert got.losses
    assert_same(got, after(plain, len(got.losses)))
