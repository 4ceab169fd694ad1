"""``link_checkpoints=True`` under Lightning's ``ModelCheckpoint``: paths are saved to again, linked
and removed.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer
from support.resuming import BATCHES, Ends, Model, after, train

from lightning_hetero.errors import ConfigError, StoreBusyError
from lightning_hetero.store.format import snapshots
from lightning_hetero.store.format.audit import StoreFiles
from lightning_hetero.strategies import HeteroOffloadStrategy

RECIPE = Recipe(steps=8, shape=Shape(layers=2))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train(tmp_path_factory.mktemp("plain"), "auto", RECIPE)


def linking(store: Path, **options: Any) -> Any:
    return HeteroOffloadStrategy("disk", disk_path=store, link_checkpoints=True, **options)


def fit(root: Path, callbacks: list[Any], *, store: str = "store", ckpt_path: str | None = None, steps: int = 6) -> Any:
    torch.manual_seed(7)
    module = Model(RECIPE)
    torch.manual_seed(11)
    trainer = quiet_trainer(
        strategy=linking(root / store), max_steps=steps, default_root_dir=root, limit_val_batches=0,
        callbacks=callbacks, enable_checkpointing=True,
    )  # fmt: skip
    trainer.fit(module, data(BATCHES), ckpt_path=ckpt_path)
    return outcome(trainer, module)


def step_of(checkpoint: Path) -> int:
    with StoreFiles(checkpoint) as store:
        assert store.record is not None
        return store.record.step


def checkpoints(folder: Path) -> list[Path]:
    assert not [path for path in folder.iterdir() if path.name.startswith(".")], "nothing unfinished is left"
    return sorted(folder.iterdir())


@pytest.mark.parametrize(
    ("last", "top", "often"), [
        (True, 1, "every_n_train_steps"), (True, 0, "every_n_epochs"), ("link", 1, "every_n_train_steps"),
        ("link", -1, "every_n_epochs"), ("link", 0, "every_n_train_steps"),
    ],
)  # fmt: skip
def test_the_last_checkpoint_has_the_last_save(tmp_path: Path, plain: Outcome, last: Any, top: int, often: str) -> None:
    folder = tmp_path / "saves" / "deep"
    saves = ModelCheckpoint(dirpath=folder, filename="{step}", save_last=last, save_top_k=top, **{often: 1})
    fit(tmp_path, [saves])
    found = {path.name: step_of(path) - 1 for path in checkpoints(folder)}  # a store's first record stands for no step
    every = range(1, 7) if often == "every_n_train_steps" else (4, 6)
    assert found == {f"step={step}.ckpt": step for step in {-1: every, 1: (6,), 0: ()}[top]} | {"last.ckpt": 6}
    kept = folder / "last.ckpt"
    assert kept.is_symlink() == (last == "link" and top != 0)
    got = train(tmp_path, HeteroOffloadStrategy("disk", disk_path=tmp_path / "other"), RECIPE, store=kept)
    assert_same(got, after(plain, 2))


def test_links_with_changing_names_are_removed_without_their_targets(tmp_path: Path) -> None:
    saves = ModelCheckpoint(dirpath=tmp_path / "saves", filename="{step}", save_last="link", save_top_k=-1, every_n_train_steps=1)
    saves.CHECKPOINT_NAME_LAST = "last-{step}"
    fit(tmp_path, [saves], steps=3)
    assert [path.name for path in checkpoints(tmp_path / "saves")] == [
        "last-step=3.ckpt", "step=1.ckpt", "step=2.ckpt", "step=3.ckpt",
    ]  # fmt: skip


def test_last_finds_a_snapshot_and_a_later_run_replaces_it(tmp_path: Path, plain: Outcome) -> None:
    def saves() -> ModelCheckpoint:
        return ModelCheckpoint(
            dirpath=tmp_path / "saves", save_last=True, save_top_k=0, every_n_train_steps=1, enable_version_counter=False
        )

    fit(tmp_path, [saves()], steps=2)
    before = step_of(tmp_path / "saves" / "last.ckpt")
    got = fit(tmp_path, [saves()], store="other", ckpt_path="last", steps=8)
    assert_same(got, after(plain, 6))
    assert [path.name for path in checkpoints(tmp_path / "saves")] == ["last.ckpt"]
    assert step_of(tmp_path / "saves" / "last.ckpt") == before + 6


class Saves(pl.Callback):
    """Saves to a path as the given step ends, and fails right after if told."""

    def __init__(self, path: Path, *, steps: tuple[int, ...] = (2,), fails: bool = False) -> None:
        self.path, self.steps, self.fails = path, steps, fails

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.path)
            if self.fails:
                raise Ends


def test_a_file_a_link_or_an_empty_directory_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("an ordinary checkpoint")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_text("not ours")
    (tmp_path / "link").symlink_to("elsewhere")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "empty").mkdir()
    names = ("file", "link", "dangling", "empty")
    fit(tmp_path, [Saves(tmp_path / name) for name in names], steps=2)
    assert {step_of(tmp_path / name) for name in names} == {step_of(tmp_path / "file")}
    assert not any((tmp_path / name).is_symlink() for name in names)
    assert (tmp_path / "elsewhere" / "kept").read_text() == "not ours"


def test_a_store_or_a_directory_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    train(tmp_path, HeteroOffloadStrategy("disk", disk_path=tmp_path / "precious"), RECIPE, stop=2)
    before = {path.name: path.read_bytes() for path in (tmp_path / "precious").iterdir()}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("mine")
    for name, what in (("precious", "a store"), ("store", "in use"), ("other", "notes")):
        with pytest.raises((ConfigError, StoreBusyError), match=what):
            fit(tmp_path, [Saves(tmp_path / name)], store="store" if name == "store" else f"store-{name}", steps=2)
    assert {path.name: path.read_bytes() for path in (tmp_path / "precious").iterdir()} == before
    assert (tmp_path / "other" / "notes").read_text() == "mine"


def test_a_file_system_that_cannot_exchange_names_does_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_exchange_names", lambda *_: False)
    fit(tmp_path, [Saves(tmp_path / "kept.ckpt", steps=(1, 2, 3))], steps=3)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "kept.ckpt", "store"}
    train(tmp_path, HeteroOffloadStrategy("disk", disk_path=tmp_path / "again"), RECIPE, store=tmp_path / "kept.ckpt")


def test_a_checkpoint_that_its_batch_could_not_make_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = tmp_path / "kept.ckpt"
    fit(tmp_path, [Saves(kept, steps=(1,))], steps=1, store="first")
    before = step_of(kept)
    with pytest.raises(Ends), caplog.at_level(logging.WARNING, "lightning_hetero"):
        fit(tmp_path, [Saves(kept, fails=True)])
    assert f"{os.fspath(kept)!r} was not made" in caplog.text
    assert step_of(kept) == before


def test_a_replaced_snapshot_is_removed_after_the_save(tmp_path: Path) -> None:
    folder = tmp_path / "saves"

    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            self.seen = sorted(path.name for path in folder.iterdir())
            if trainer.global_step == 2:
                raise Ends

    saves = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1)

    class Model2(Model):  # a module's hook runs after those of callbacks, so it sees what they have left
        def on_train_batch_end(self, *args: Any) -> None:
            Fails.on_train_batch_end(fails, self.trainer, *args)

    fails = Fails()
    torch.manual_seed(7)
    trainer = quiet_trainer(
        strategy=linking(tmp_path / "store"), max_steps=3, default_root_dir=tmp_path, limit_val_batches=0, callbacks=[saves],
        enable_checkpointing=True,
    )  # fmt: skip
    with pytest.raises(Ends):
        trainer.fit(Model2(RECIPE), data(BATCHES))
    assert fails.seen == ["step=1.ckpt"]
    assert [path.name for path in checkpoints(folder)] == ["step=1.ckpt"]


def evaluated(
    root: Path, strategy: Any, shape: Shape, path: Any = None, *, empty: bool = False
) -> tuple[list[Any], dict[str, Any]]:
    """Trains, then validates, tests and predicts with the best checkpoint, and once more in another
    Trainer.
    """
    recipe = Recipe(shape=shape, precision="bf16-mixed" if shape.tied else "32-true")
    torch.manual_seed(7)
    module = Evaluates(recipe)
    torch.manual_seed(11)
    saves = ModelCheckpoint(dirpath=root / "saves", filename="{step}", monitor="falls", save_top_k=1, every_n_train_steps=1)
    options: dict[str, Any] = {
        "default_root_dir": root,
        "precision": recipe.precision,
        "max_steps": 3,
        "enable_checkpointing": True,
    }
    trainer = quiet_trainer(strategy=strategy(root / "store"), limit_val_batches=0, callbacks=[saves], **options)
    trainer.fit(module, data(BATCHES))
    assert Path(saves.best_model_path).name == "step=2.ckpt"
    loader = data(2, seed=1)
    found: list[Any] = [trainer.validate(module, loader, ckpt_path="best", verbose=False)]
    again = quiet_trainer(strategy=strategy(root / "other"), **options)
    with again.init_module():
        other = Evaluates(recipe)
    found += [again.test(other, loader, ckpt_path=saves.best_model_path, verbose=False)]
    found += again.predict(other, loader, ckpt_path=saves.best_model_path)
    return found, {name: value.clone() for name, value in other.state_dict().items()}


class Evaluates(LitModel):
    """Its best step is the second one; weights are tested and predicted with."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("falls", float((self.global_step - 1) ** 2))
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch[0][:, :-1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", self.predict_step(batch, batch_idx).float().mean())

    test_step = validation_step


@pytest.mark.parametrize(
    ("plan", "shape"),
    [("disk", Shape(layers=2)), ("disk", Shape(layers=2, tied=True, half_frozen=True)), ("host", Shape(layers=2))],
)
def test_the_best_step_is_evaluated_as_plain_lightning_does(tmp_path: Path, plan: str, shape: Shape) -> None:
    expected, weights = evaluated(tmp_path / "plain", lambda _: "auto", shape)

    def strategy(store: Path) -> Any:
        return HeteroOffloadStrategy(plan, disk_path=store, link_checkpoints=True)

    got, ours = evaluated(tmp_path / "ours", strategy, shape)
    assert step_of(tmp_path / "ours" / "saves" / "step=2.ckpt") == 3  # the first record stands for no step
    assert ours.keys() == weights.keys()
    assert all(torch.equal(ours[name], value) for name, value in weights.items())
    assert str(got) == str(expected)


class Improves(Evaluates):
    """Each validation is better than the one before."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("worse", -float(self.global_step))


@pytest.mark.parametrize("links", [False, True])
def test_an_evaluation_does_not_bring_back_an_older_best_checkpoint(tmp_path: Path, links: bool) -> None:
    """Validation runs after the step's record was written, so the record knows of one validation
    less.
    """
    saves = ModelCheckpoint(dirpath=tmp_path / "saves", filename="{step}", monitor="worse", save_top_k=2, save_last=True)
    waits = EarlyStopping(monitor="worse", patience=3)
    strategy = HeteroOffloadStrategy("disk", disk_path=tmp_path / "store", link_checkpoints=links)
    trainer = quiet_trainer(
        strategy=strategy, max_steps=8, default_root_dir=tmp_path, callbacks=[saves, waits], enable_checkpointing=True
    )
    module = Improves(RECIPE)
    trainer.fit(module, data(BATCHES), data(1))
    best, last = saves.best_model_path, tmp_path / "saves" / "last.ckpt"
    assert Path(best).name == "step=8.ckpt"
    assert last.is_dir() == links
    trainer.validate(module, data(1), ckpt_path=str(last), verbose=False)
    assert saves.best_model_path == best
    assert float(waits.best_score) == -8
