"""A fit where an earlier run has kept steps is refused, or goes on, or puts the store aside:
nothing is ever written over.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from support.models import Outcome, Recipe, Shape, assert_same, data, quiet_trainer
from support.resuming import Model, after, train

from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.errors import ConfigError, StoreBusyError, StoreCorruptError, StoreError
from lightning_hetero.store.format import directory, earlier_runs
from lightning_hetero.store.format.audit import StoreFiles
from lightning_hetero.store.format.pins import pins

RECIPE = Recipe(steps=5, shape=Shape(layers=2, dropout=0.1))
KEPT = 3


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train(tmp_path_factory.mktemp("plain"), "auto", RECIPE)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """What a run has left that was killed."""
    train(tmp_path, HeteroOffloadStrategy("disk", disk_path=tmp_path / "store"), RECIPE, stop=KEPT)
    return tmp_path / "store"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class Breaks(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise RuntimeError("the first batch")


Breaks.__name__ = Model.__name__  # a store knows the model's name


class Tuned(Model):
    learning_rate, batch_size = 3e-3, 2

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(data().dataset, batch_size=self.batch_size)


def fit(strategy: Any, root: Path, *, module: Any = Model, recipe: Recipe = RECIPE, ckpt_path: Any = None, **options: Any) -> Any:
    trainer = quiet_trainer(**{"max_steps": 2, "limit_val_batches": 0, "strategy": strategy, "default_root_dir": root, **options})
    trainer.fit(module(recipe), data(), ckpt_path=ckpt_path)
    return trainer


def with_an_ordinary_checkpoint(strategy: Any, root: Path) -> None:
    fit("auto", root, max_steps=1).save_checkpoint(root / "plain.ckpt")
    fit(strategy(), root, ckpt_path=root / "plain.ckpt")


def with_the_last_of_none(strategy: Any, root: Path) -> None:
    saver = ModelCheckpoint(root / "checkpoints", save_last=True)
    fit(strategy(), root, enable_checkpointing=True, callbacks=[saver], ckpt_path="last")


def tuner(strategy: Any, root: Path) -> Tuner:
    return Tuner(quiet_trainer(strategy=strategy, limit_val_batches=0, default_root_dir=root))


FORGOTTEN: dict[str, Callable[[Any, Path], Any]] = {
    "usual": lambda strategy, root: fit(strategy(), root),
    "no-steps": lambda strategy, root: fit(strategy(), root, max_steps=0),
    "breaks": lambda strategy, root: fit(strategy(), root, module=Breaks),
    "checkpoint": with_an_ordinary_checkpoint,
    "last": with_the_last_of_none,
    "fast-dev-run": lambda strategy, root: fit(strategy(), root, fast_dev_run=True),
    "keeps-nothing": lambda strategy, root: fit(strategy(durability="none"), root),
    "needs-no-disk": lambda strategy, root: fit(strategy(plan="resident", durability="none"), root),
    "other-model": lambda strategy, root: fit(strategy(), root, recipe=Recipe(shape=Shape(layers=3))),
    "other-optimizer": lambda strategy, root: fit(strategy(), root, recipe=Recipe(optimizer=lambda p: torch.optim.SGD(p, lr=0.1))),
    "lr-find": lambda strategy, root: tuner(strategy(), root).lr_find(Tuned(RECIPE), num_training=5),
}


@pytest.mark.parametrize("way", FORGOTTEN)
def test_a_run_without_ckpt_path_is_refused_and_kept_steps_stay(way: str, store: Path, plain: Outcome, tmp_path: Path) -> None:
    before = contents(store)

    def strategy(**options: Any) -> Any:
        return HeteroOffloadStrategy(**{"plan": "disk", "disk_path": store, **options})

    said = rf"holds step {KEPT} of an earlier run.*ckpt_path='{store}'.*new_run=True.*another disk_path"
    with pytest.raises(ConfigError, match=said):
        FORGOTTEN[way](strategy, tmp_path)
    assert contents(store) == before
    assert_same(train(tmp_path, strategy(), RECIPE, store=store), after(plain, RECIPE.steps - KEPT))


@pytest.mark.parametrize("way", FORGOTTEN)
def test_new_run_renames_the_store_even_if_the_run_fails(
    way: str, store: Path, plain: Outcome, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = contents(store)

    def strategy(**options: Any) -> Any:
        return HeteroOffloadStrategy(**{"plan": "disk", "disk_path": store, "new_run": True, **options})

    with pytest.raises(RuntimeError, match="the first batch") if way == "breaks" else nullcontext():
        FORGOTTEN[way](strategy, tmp_path)
    moved = tmp_path / "store.earlier-1"
    assert contents(moved) == before
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any(f"step {KEPT}" in text and str(moved) in text for text in warnings)
    got = train(tmp_path, HeteroOffloadStrategy("disk", disk_path=tmp_path / "other"), RECIPE, store=moved)
    assert_same(got, after(plain, RECIPE.steps - KEPT))


def test_each_new_run_gets_a_name_of_its_own_and_trains_from_the_beginning(
    store: Path, plain: Outcome, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2, 3):
        got = train(tmp_path, HeteroOffloadStrategy("disk", disk_path=store, new_run=True), RECIPE)
        assert_same(got, plain)
        assert (tmp_path / f"store.earlier-{number}" / "MANIFEST").is_file()
    before = contents(store)
    assert_same(train(tmp_path, HeteroOffloadStrategy("disk", disk_path=store, new_run=True), RECIPE, store=store), after(plain, 0))
    assert contents(store).keys() == before.keys(), "a ckpt_path that is the store at disk_path is gone on from in any case"
    assert not (tmp_path / "store.earlier-4").exists()
    assert f"new_run=True has no effect: ckpt_path is the store at disk_path, {str(store)!r}" in caplog.text


def test_a_step_that_is_only_pinned_counts(tmp_path: Path) -> None:
    """With ``keep_every`` the last record may stand for no step, and the kept one is in a directory
    of its own.
    """
    store = tmp_path / "store"
    train(tmp_path, HeteroOffloadStrategy("disk", disk_path=store, keep_every=2), RECIPE, stop=3)
    assert len(pins(store)) == 1
    with pytest.raises(ConfigError, match="holds step 2 of an earlier run"):
        fit(HeteroOffloadStrategy("disk", disk_path=store, keep_every=2), tmp_path)
    fit(HeteroOffloadStrategy("disk", disk_path=store, new_run=True), tmp_path)
    assert len(pins(tmp_path / "store.earlier-1")) == 1


class Coupled(torch.optim.SGD):
    """Not known to update its parameters independently."""


NOTHING_KEPT: dict[str, Callable[[Path, Path], Any]] = {
    "durability": lambda store, root: fit(HeteroOffloadStrategy("disk", disk_path=store, durability="none"), root),
    "optimizer": lambda store, root: fit(
        HeteroOffloadStrategy("host", disk_path=store), root, recipe=replace(RECIPE, optimizer=lambda p: Coupled(p, lr=0.1))
    ),
    "no-step": lambda store, root: train(root, HeteroOffloadStrategy("disk", disk_path=store), RECIPE, stop=0),
    "no-steps": lambda store, root: fit(HeteroOffloadStrategy("disk", disk_path=store), root, max_steps=0),
    "evaluated": lambda store, root: quiet_trainer(
        strategy=HeteroOffloadStrategy("disk", disk_path=store), default_root_dir=root
    ).validate(Model(RECIPE), data(2), verbose=False),
    "fast-dev-run": lambda store, root: fit(HeteroOffloadStrategy("disk", disk_path=store), root, fast_dev_run=2),
    "lr-find": lambda store, root: tuner(HeteroOffloadStrategy("disk", disk_path=store), root).lr_find(
        Tuned(RECIPE), num_training=5
    ),
    "scale-batch-size": lambda store, root: tuner(
        HeteroOffloadStrategy("disk", disk_path=store, link_checkpoints=True), root
    ).scale_batch_size(Tuned(RECIPE), steps_per_trial=2, max_trials=1),
}


@pytest.mark.parametrize("way", NOTHING_KEPT)
def test_a_store_without_a_kept_step_is_in_nobodys_way(way: str, plain: Outcome, tmp_path: Path) -> None:
    """Steps that are only tried, by ``fast_dev_run`` or a tuner, are not kept: the fit that follows
    begins.
    """
    NOTHING_KEPT[way](tmp_path / "store", tmp_path)
    assert_same(train(tmp_path, HeteroOffloadStrategy("disk", disk_path=tmp_path / "store"), RECIPE), plain)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("store")] == ["store"]


@pytest.mark.parametrize("new_run", [False, True])
def test_the_same_trainer_fits_again(new_run: bool, tmp_path: Path) -> None:
    """As in a notebook: the first fit has ended in order."""
    store = tmp_path / "store"
    trainer = quiet_trainer(
        strategy=HeteroOffloadStrategy("disk", disk_path=store, new_run=new_run), max_steps=2, limit_val_batches=0,
        default_root_dir=tmp_path,
    )  # fmt: skip
    module = Model(RECIPE)
    trainer.fit(module, data())
    trainer.fit_loop.epoch_loop.max_steps = 4
    if new_run:
        trainer.fit(module, data())
        assert (tmp_path / "store.earlier-1" / "MANIFEST").is_file()
    else:
        with pytest.raises(ConfigError, match="holds step 2 of an earlier run"):
            trainer.fit(module, data())
        trainer.fit(module, data(), ckpt_path=str(store))
    assert trainer.global_step == 4
    with StoreFiles(store) as files:
        assert earlier_runs.what_is_kept(files) == "step 4"


def test_records_that_cannot_be_read_may_be_kept_steps(store: Path, tmp_path: Path) -> None:
    ring = store / "COMMIT"
    size = ring.stat().st_size
    with open(ring, "r+b") as file:
        for place in range(16):
            file.seek(place * size // 16 + 60)
            file.write(b"\xff" * 8)
    with pytest.raises(ConfigError, match="holds commit records that cannot be read of an earlier run"):
        fit(HeteroOffloadStrategy("disk", disk_path=store), tmp_path)
    fit(HeteroOffloadStrategy("disk", disk_path=store, new_run=True), tmp_path)
    assert (tmp_path / "store.earlier-1" / "COMMIT").is_file()


def remove(ring: Path) -> None:
    ring.unlink()


def empty(ring: Path) -> None:
    ring.write_bytes(b"")


def blank(ring: Path) -> None:
    ring.write_bytes(bytes(ring.stat().st_size))


def halve(ring: Path) -> None:
    ring.write_bytes(ring.read_bytes()[: ring.stat().st_size // 2])


def shorten(ring: Path) -> None:
    ring.write_bytes(ring.read_bytes()[:-1])


def tear(ring: Path) -> None:
    content = bytearray(ring.read_bytes())
    for place in range(0, len(content), len(content) // 16):
        content[place + 52] ^= content[place] > 0  # a bit of the checksum where a record is
    ring.write_bytes(content)


LOST: list[Callable[[Path], None]] = [remove, empty, blank, halve, shorten, tear]


@pytest.mark.parametrize(("plan", "stop"), [("disk", 3), ("host", 1)])
@pytest.mark.parametrize("lose", LOST)
def test_a_store_whose_records_are_lost_is_not_written_over(
    lose: Callable[[Path], None], stop: int, plan: str, plain: Outcome, tmp_path: Path
) -> None:
    """Blocks that a step has written say that there were records: a ring that says nothing is not
    that of a first record.
    """
    store = tmp_path / "store"
    train(tmp_path, HeteroOffloadStrategy(plan, disk_path=store), RECIPE, stop=stop)
    lose(store / "COMMIT")
    before = contents(store)
    with pytest.raises(ConfigError, match=r"holds commit records that cannot be read of an earlier run.*new_run=True") as refused:
        fit(HeteroOffloadStrategy(plan, disk_path=store), tmp_path)
    assert "ckpt_path=" not in str(refused.value), "a remedy that does not help"
    with pytest.raises(StoreCorruptError, match=r"COMMIT.*The store cannot be resumed from.*a copy.*new_run=True") as refused_too:
        train(tmp_path, HeteroOffloadStrategy(plan, disk_path=store), RECIPE, store=store)
    assert "no step has been committed" not in str(refused_too.value)
    assert contents(store) == before
    assert_same(train(tmp_path, HeteroOffloadStrategy(plan, disk_path=store, new_run=True), RECIPE), plain)
    assert contents(tmp_path / "store.earlier-1") == before


@pytest.mark.parametrize("plan", ["disk", "host"])
@pytest.mark.parametrize("lose", [remove, blank, tear])
def test_a_store_that_died_before_its_first_step_is_in_nobodys_way(
    lose: Callable[[Path], None], plan: str, plain: Outcome, tmp_path: Path
) -> None:
    """Its blocks have been written once: that is what a process leaves that dies before, or while,
    it writes its first record.
    """
    store = tmp_path / "store"
    train(tmp_path, HeteroOffloadStrategy(plan, disk_path=store), RECIPE, stop=0)
    lose(store / "COMMIT")
    assert_same(train(tmp_path, HeteroOffloadStrategy(plan, disk_path=store), RECIPE), plain)
    assert not (tmp_path / "store.earlier-1").exists()


@pytest.mark.parametrize(("lose", "elsewhere"), [*((lose, False) for lose in LOST), (blank, True)])
def test_a_store_whose_records_are_lost_continues_from_its_pin(
    lose: Callable[[Path], None], elsewhere: bool, plain: Outcome, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = tmp_path / "store"
    own = tmp_path / "own" if elsewhere else store

    def strategy() -> Any:
        return HeteroOffloadStrategy("disk", disk_path=own, keep_every=2, verify_digests=True)

    train(tmp_path, HeteroOffloadStrategy("disk", disk_path=store, keep_every=2), RECIPE, stop=3)
    (pinned,) = pins(store)
    lose(store / "COMMIT")
    with pytest.raises(ConfigError, match=f"holds step 2 of an earlier run.*ckpt_path='{store}'"):
        fit(HeteroOffloadStrategy("disk", disk_path=store), tmp_path)
    got = train(tmp_path, strategy(), RECIPE, store=store)
    assert_same(got, after(plain, RECIPE.steps - 2))
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum(f"Training goes on from the last step that was pinned, {str(pinned)!r}" in text for text in said) == 1


def test_the_ring_of_a_store_that_is_taken_over_goes_last(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies between two files leaves a ring that says whether a step is kept."""
    removed: list[str] = []
    unlink = os.unlink

    def note(path: Any, **options: Any) -> None:
        unlink(path, **options)
        removed.append(os.fspath(path))

    monkeypatch.setattr(directory.os, "unlink", note)
    directory.remove_store(store)
    assert removed[-2:] == ["COMMIT", "MANIFEST"]


@pytest.mark.parametrize("gone", [False, True])
def test_a_ring_with_two_names_is_refused_with_a_remedy_that_helps(gone: bool, store: Path, plain: Outcome, tmp_path: Path) -> None:
    """``cp -al`` makes a second name of every file."""
    clone = tmp_path / "my clone"
    subprocess.run(["cp", "-al", store, clone], check=True)
    for path in (store, clone):
        with pytest.raises(ConfigError, match=r"has 2 names; allowed: one.*cp -al.*Or remove the other name") as refused:
            train(tmp_path, HeteroOffloadStrategy("disk", disk_path=path), RECIPE, store=path)
    command = str(refused.value).split("of its own: ")[1].split(". Or")[0]
    subprocess.run(command, shell=True, check=True)
    if gone:
        shutil.rmtree(store)
    for path in (clone,) if gone else (clone, store):
        got = train(tmp_path, HeteroOffloadStrategy("disk", disk_path=path, verify_digests=True), RECIPE, store=path)
        assert_same(got, after(plain, RECIPE.steps - KEPT))


def test_a_store_that_cannot_be_renamed_stays_and_is_named(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(store)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(16, "Device or resource busy")  # a disk is mounted there

    monkeypatch.setattr(earlier_runs.os, "rename", refuse)
    with pytest.raises(StoreError, match=r"store\.earlier-1': Device or resource busy. Move what it holds elsewhere yourself"):
        fit(HeteroOffloadStrategy("disk", disk_path=store, new_run=True), tmp_path)
    monkeypatch.undo()
    assert contents(store) == before


def test_a_store_in_use_is_not_renamed(store: Path, tmp_path: Path) -> None:
    with StoreFiles(store), pytest.raises(StoreBusyError, match=f"in use by process {os.getpid()}"):
        fit(HeteroOffloadStrategy("disk", disk_path=store, new_run=True), tmp_path)
    assert store.exists()


class Renamed(Model):
    """The same model under another name."""


def test_a_model_whose_class_has_another_name_continues(store: Path, tmp_path: Path) -> None:
    trainer = fit(HeteroOffloadStrategy("disk", disk_path=store), tmp_path, module=Renamed, ckpt_path=store, max_steps=RECIPE.steps)
    assert trainer.global_step == RECIPE.steps
    recipe = replace(RECIPE, shape=Shape(layers=3))
    with pytest.raises(ConfigError, match=r"changed model under an old store.*lightning-hetero export .*store DIRECTORY"):
        fit(HeteroOffloadStrategy("disk", disk_path=store), tmp_path, recipe=recipe, ckpt_path=store)


# ---- another store as ckpt_path ------------------------------------------------------------------


def test_a_store_with_a_kept_step_does_not_give_way_to_another_one(store: Path, plain: Outcome, tmp_path: Path) -> None:
    other = tmp_path / "other"
    train(tmp_path, HeteroOffloadStrategy("disk", disk_path=other), RECIPE, stop=1)
    before = contents(other)
    with pytest.raises(ConfigError, match=rf"holds step 1 of an earlier run.*To begin at ckpt_path '{store}', pass new_run=True"):
        train(tmp_path, HeteroOffloadStrategy("disk", disk_path=other), RECIPE, store=store)
    assert contents(other) == before
    got = train(tmp_path, HeteroOffloadStrategy("disk", disk_path=other, new_run=True), RECIPE, store=store)
    assert_same(got, after(plain, RECIPE.steps - KEPT))
    assert contents(tmp_path / "other.earlier-1") == before


def test_a_store_without_a_kept_step_gives_way_to_another_one(store: Path, plain: Outcome, tmp_path: Path) -> None:
    other = tmp_path / "other"
    fit(HeteroOffloadStrategy("disk", disk_path=other, durability="none"), tmp_path)
    got = train(tmp_path, HeteroOffloadStrategy("disk", disk_path=other), RECIPE, store=store)
    assert_same(got, after(plain, RECIPE.steps - KEPT))


def test_another_ckpt_path_than_the_one_that_a_store_was_made_from_is_refused(store: Path, tmp_path: Path) -> None:
    """It has the same uuid, and is a step of the same run: going on would be from a step that
    nobody asked for.
    """
    other = tmp_path / "other"
    train(tmp_path, HeteroOffloadStrategy("disk", disk_path=other), RECIPE, stop=4, store=store)
    train(tmp_path, HeteroOffloadStrategy("disk", disk_path=store), RECIPE, stop=4, store=store)  # it has another last step now
    with pytest.raises(ConfigError, match="holds step 4 of an earlier run"):
        train(tmp_path, HeteroOffloadStrategy("disk", disk_path=other), RECIPE, store=store)


def test_a_snapshot_continues_where_an_earlier_run_from_it_has_come_to(
    store: Path, plain: Outcome, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    for stop in (KEPT, 4):
        train(tmp_path, HeteroOffloadStrategy("disk", disk_path=other), RECIPE, stop=stop, store=store)
    assert f"disk_path {str(other)!r} holds what an earlier run with this ckpt_path has kept" in caplog.text
    assert_same(train(tmp_path, HeteroOffloadStrategy("host", disk_path=other), RECIPE, store=store), after(plain, 1))
    got = train(tmp_path, HeteroOffloadStrategy("disk", disk_path=other, new_run=True), RECIPE, store=store)
    assert_same(got, after(plain, RECIPE.steps - KEPT))
