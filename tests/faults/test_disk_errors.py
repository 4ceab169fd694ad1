"""A disk that fails while a model trains on it: the error is named, training stops at once, and
nothing hangs or hides it.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.models import LitModel, Recipe, Shape, data, quiet_trainer
from support.store import read_store

from lightning_hetero._native import Ticket
from lightning_hetero.errors import HeteroError, OffloadedAccessError, OutOfMemoryBudgetError, StoreCorruptError, StoreError
from lightning_hetero.strategies import HeteroOffloadStrategy

RECIPE = Recipe(steps=8, shape=Shape(layers=4, width=64))
PAGE = 4096


class Breaks(pl.Callback):
    """Breaks the disk after the second step, and counts the batches that begin after that."""

    def __init__(self, root: Path, break_it: Callable[[Path], None]) -> None:
        self.root, self.break_it, self.begun = root, break_it, 0
        self.errors: list[BaseException] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.begun += trainer.global_step >= 2

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            session = trainer.strategy.session
            session.drain()
            for part in [part for block in session.blocks for part in block.parts]:
                session.store.barrier(part)  # writes that are under way would mend what is broken now
            (manifest,) = self.root.rglob("MANIFEST")
            self.break_it(manifest.parent)

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, error: BaseException) -> None:
        self.errors.append(error)


@pytest.fixture(scope="module")
def budget(tmp_path_factory: pytest.TempPathFactory) -> int:
    """So small that weights come and go at every block."""
    with pytest.raises(OutOfMemoryBudgetError) as refusal:
        train(tmp_path_factory.mktemp("budget"), HeteroOffloadStrategy(plan="disk", host_memory="1B"))
    return refusal.value.needed_bytes


def train(root: Path, strategy: Any, *callbacks: pl.Callback) -> LitModel:
    torch.manual_seed(7)
    module = LitModel(RECIPE)
    trainer = quiet_trainer(
        strategy=strategy, max_steps=RECIPE.steps, limit_val_batches=0, default_root_dir=root, callbacks=list(callbacks)
    )
    trainer.fit(module, data())
    return module


def fails(error: type[StoreError], pattern: str, break_it: Callable[[Path], None], root: Path, budget: int, **options: Any) -> None:
    """Trains on a disk that breaks; the error's text matches ``pattern``."""
    breaks = Breaks(root, break_it)
    with pytest.raises(error) as caught:
        train(root, HeteroOffloadStrategy(plan="disk", host_memory=budget, **options), breaks)
    assert type(caught.value) is error
    assert re.search(pattern, str(caught.value)), str(caught.value)
    assert breaks.errors == [caught.value]  # once, and the one that came first
    assert breaks.begun <= 2  # the next forward meets what an update of the last backward met


BACKENDS = pytest.mark.parametrize("backend", ["pool", "auto"])


def truncate(store: Path) -> None:
    for file in store.glob("block-00002.*"):
        os.truncate(file, 2 * PAGE)


@BACKENDS
def test_a_file_that_has_lost_its_end_is_named_with_the_offset(tmp_path: Path, budget: int, backend: str) -> None:
    pattern = r"read of \S*/block-00002\.[ab] at offset \d+, \d+ bytes: the file ends"
    fails(StoreError, pattern, truncate, tmp_path, budget, io_backend=backend)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def forbidding() -> Iterator[Callable[[Path], None]]:
    """Makes the disk refuse writes to block files, and not to the commit ring, which is smaller."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda store: resource.setrlimit(resource.RLIMIT_FSIZE, (96 * 1024, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@BACKENDS
def test_a_disk_that_refuses_writes_is_named_with_the_offset(
    tmp_path: Path, budget: int, backend: str, forbidding: Callable[[Path], None]
) -> None:
    pattern = r"write of \S*/block-0000\d\.[ab] at offset \d+, \d+ bytes: .*File too large \(errno 27\)"
    fails(StoreError, pattern, forbidding, tmp_path, budget, io_backend=backend)
    assert not list(tmp_path.iterdir())


def overwrite(offset: Callable[[int], int], pages: int = 1) -> Callable[[Path], None]:
    """Overwrites ``pages`` at ``offset(size)`` of both slots of a block with something else."""

    def corrupt(store: Path) -> None:
        for path in store.glob("block-00002.*"):
            with open(path, "r+b") as file:
                file.seek(offset(path.stat().st_size))
                file.write(b"\x5a" * PAGE * pages)

    return corrupt


def test_a_torn_chunk_is_named(tmp_path: Path, budget: int) -> None:
    pattern = r"block 2\b.*chunk 0\b.*block-00002\.[ab].*offset \d+|block-00002\.[ab].*offset \d+.*block 2\b.*chunk 0\b"
    fails(StoreCorruptError, pattern, overwrite(lambda size: size - PAGE), tmp_path, budget)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["state", "weights"])
def test_with_verify_changed_contents_are_named(tmp_path: Path, budget: int, where: str) -> None:
    def middle(size: int) -> int:
        return (size // 2 if where == "state" else PAGE * 2) // PAGE * PAGE

    pattern = r"block 2\b.*chunk 0\b.*block-00002\.[ab].*offset \d+|block-00002\.[ab].*offset \d+.*block 2\b.*chunk 0\b"
    fails(StoreCorruptError, pattern, overwrite(middle), tmp_path, budget, verify_digests=True)


def test_the_last_good_step_stays_and_nothing_is_written_after_the_error(
    tmp_path: Path, budget: int, forbidding: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, seen, tickets, init = tmp_path / "store", [], list[Ticket](), Ticket.__init__

    def remember(ticket: Ticket, *arguments: Any, **options: Any) -> None:
        init(ticket, *arguments, **options)
        tickets.append(ticket)

    monkeypatch.setattr(Ticket, "__init__", remember)

    def files() -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in store.iterdir()}

    class Looks(Breaks):
        def on_exception(self, *arguments: Any) -> None:
            super().on_exception(*arguments)
            for ticket in tickets:  # writes that the kernel already had
                with suppress(HeteroError):
                    ticket.wait()
            seen.append(files())

    looks = Looks(tmp_path, forbidding)
    with pytest.raises(StoreError, match="write of"):
        train(tmp_path, HeteroOffloadStrategy(plan="disk", host_memory=budget, disk_path=store), looks)
    assert seen == [files()]
    step, content = read_store(store, ("model.blocks.",))
    assert step == 1 + 1  # the layout is a commit of its own; the second step was not committed when the disk broke
    torch.manual_seed(7)
    plain = LitModel(RECIPE)
    trainer = quiet_trainer(strategy="auto", max_steps=1, limit_val_batches=0, default_root_dir=tmp_path)
    trainer.fit(plain, data())
    for name, param in plain.named_parameters():
        state = trainer.optimizers[0].state[param]
        for key, value in {name: param, f"{name}.exp_avg": state["exp_avg"], f"{name}.exp_avg_sq": state["exp_avg_sq"]}.items():
            assert key == name or key in content
            assert key not in content or torch.equal(content[key], value), key


@pytest.mark.parametrize("moment", ["checkpoint", "validation", "state", "teardown"])
def test_an_error_outside_training_is_raised_where_it_is_met(tmp_path: Path, budget: int, moment: str) -> None:
    class Reads(Breaks):
        def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
            super().on_train_batch_end(trainer, *arguments)
            if trainer.global_step != 2:
                return
            if moment == "checkpoint":
                trainer.save_checkpoint(tmp_path / "a.ckpt")
            if moment == "state":
                for entry in trainer.optimizers[0].state_dict()["state"].values():
                    entry["exp_avg"].clone()
            if moment == "validation":
                with torch.no_grad():
                    trainer.lightning_module.model(torch.zeros(1, 5, dtype=torch.long))
            trainer.should_stop = True

    reads = Reads(tmp_path, truncate)
    with pytest.raises(StoreError, match=r"block-00002.*the file ends"):
        train(tmp_path, HeteroOffloadStrategy(plan="disk", host_memory=budget), reads)
    assert not list(tmp_path.iterdir())  # no half checkpoint either


def test_after_an_error_weights_that_are_lost_are_refused_by_name(tmp_path: Path, budget: int) -> None:
    torch.manual_seed(7)
    module = LitModel(RECIPE)
    trainer = quiet_trainer(
        strategy=HeteroOffloadStrategy(plan="disk", host_memory=budget), max_steps=RECIPE.steps, limit_val_batches=0,
        default_root_dir=tmp_path, callbacks=[Breaks(tmp_path, truncate)],
    )  # fmt: skip
    with pytest.raises(StoreError):
        trainer.fit(module, data())
    with pytest.raises(OffloadedAccessError, match=r"model\.blocks\.2.*store has been closed.*checkpoint"):
        module.state_dict()["model.blocks.2.up.weight"].clone()
    with pytest.raises(OffloadedAccessError, match="store has been closed"):
        quiet_trainer(strategy="auto", max_steps=1, limit_val_batches=0, default_root_dir=tmp_path).fit(module, data())
