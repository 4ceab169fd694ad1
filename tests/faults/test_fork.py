"""A child of fork has none of the threads that serve the weights: what needs them raises there, and
the parent goes on.
"""

from __future__ import annotations

import atexit
import gc
import os
import select
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.models import Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer
from support.resuming import BATCHES, Model, train
from support.strategies import on_device

from lightning_hetero._native import Arena
from lightning_hetero.strategies import HeteroOffloadStrategy, LocalFirst

RECIPE = Recipe(steps=3, shape=Shape(layers=2))
HANGS_S = 60.0

KINDS: dict[str, Callable[[Path], Any]] = {
    "disk": lambda path: HeteroOffloadStrategy("disk", disk_path=path),
    "host": lambda path: HeteroOffloadStrategy("host", disk_path=path),
    "device": lambda path: on_device(disk_path=path),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train(tmp_path_factory.mktemp("plain"), "auto", RECIPE)


def fate(call: Callable[[], object]) -> str:
    """What a forked child makes of a call: the name of the error, ``"fine"``, or ``"hangs"``."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            call()
            os.write(write, b"fine")
        except BaseException as error:
            traceback.print_exc()
            os.write(write, type(error).__name__.encode())
        os._exit(0)
    os.close(write)
    if not select.select([read], [], [], HANGS_S)[0]:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = os.read(read, 100).decode()
    os.close(read)
    return found or "hangs"


class Forks(pl.Callback):
    """Forks as the second step's batch ends, when its updates may still be under way."""

    def __init__(self, call: Callable[[pl.Trainer], object]) -> None:
        self.call, self.fate = call, "never ran"

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            self.fate = fate(lambda: self.call(trainer))


def fit(root: Path, kind: str, call: Callable[[pl.Trainer], object], **options: Any) -> tuple[str, Outcome]:
    torch.manual_seed(7)
    module = Model(RECIPE)
    torch.manual_seed(11)
    forks = Forks(call)
    trainer = quiet_trainer(
        strategy=KINDS[kind](root / "store"), max_steps=RECIPE.steps, default_root_dir=root, limit_val_batches=0,
        callbacks=[forks], **options,
    )  # fmt: skip
    trainer.fit(module, data(BATCHES))
    return forks.fate, outcome(trainer, module)


def read(trainer: pl.Trainer) -> None:
    for parameter in trainer.lightning_module.parameters():
        parameter.detach().clone()


def save(trainer: pl.Trainer) -> None:
    trainer.save_checkpoint(Path(trainer.default_root_dir) / "child.ckpt")


def stop(trainer: pl.Trainer) -> None:
    trainer.strategy.session.stop()


def abandon(trainer: pl.Trainer) -> None:
    trainer.strategy.session.abandon()


def step(trainer: pl.Trainer) -> None:
    batch = next(iter(data(BATCHES)))
    trainer.strategy.training_step(batch, 0)


def teardown(trainer: pl.Trainer) -> None:
    trainer.strategy.teardown()


@pytest.mark.parametrize(
    ("kind", "call"),
    [("disk", stop), ("disk", abandon), ("disk", save), ("disk", step), ("host", teardown), ("device", stop), ("device", step)],
)
def test_a_forked_child_is_refused_and_the_parent_continues(tmp_path: Path, plain: Outcome, kind: str, call: Any) -> None:
    found, got = fit(tmp_path, kind, call)
    assert found == "ForkedProcessError"
    assert_same(got, plain)
    got = train(tmp_path, KINDS[kind](tmp_path / "store"), Recipe(steps=4, shape=RECIPE.shape), store=tmp_path / "store")
    assert len(got.losses) == 1


@pytest.mark.parametrize("kind", ["disk", "device"])
def test_a_forked_child_cannot_read_weights_that_are_not_in_memory(tmp_path: Path, plain: Outcome, kind: str) -> None:
    found, got = fit(tmp_path, kind, read)
    assert found == "ForkedProcessError"
    assert_same(got, plain)


def test_a_forked_child_reads_weights_that_are_in_memory_and_final(tmp_path: Path) -> None:
    def look(trainer: pl.Trainer) -> None:
        weight = trainer.lightning_module.model.position
        assert weight.sum() == total

    total = torch.zeros(())

    class Sums(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            nonlocal total
            total = trainer.lightning_module.model.position.detach().sum()
            found.append(fate(lambda: look(trainer)))

    found: list[str] = []
    trainer = quiet_trainer(
        strategy=HeteroOffloadStrategy("host"), max_steps=2, default_root_dir=tmp_path, limit_val_batches=0, callbacks=[Sums()]
    )
    trainer.fit(Model(RECIPE), data(BATCHES))
    assert found == ["fine", "fine"]


@pytest.mark.parametrize(("kind", "leave"), [("disk", SystemExit), ("host", ValueError), ("device", KeyboardInterrupt)])
def test_a_child_that_unwinds_through_the_trainer_ends(
    tmp_path: Path, plain: Outcome, kind: str, leave: type[BaseException]
) -> None:
    """A hook that forks and forgets ``os._exit``: the child's way out leads through the parent's
    fit.
    """
    state: dict[str, Any] = {}

    class Escapes(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                state["read"], state["write"] = os.pipe()
                state["child"] = os.fork()
                if state["child"] == 0:
                    raise leave

    torch.manual_seed(7)
    module = Model(RECIPE)
    torch.manual_seed(11)
    trainer = quiet_trainer(
        strategy=KINDS[kind](tmp_path / "store"), max_steps=RECIPE.steps, default_root_dir=tmp_path, limit_val_batches=0,
        callbacks=[Escapes()],
    )  # fmt: skip
    try:
        trainer.fit(module, data(BATCHES))
    except BaseException as error:
        if state["child"]:
            raise
        os.write(state["write"], type(error).__name__.encode())
        os._exit(0)
    if not state["child"]:
        os.write(state["write"], b"fine")
        os._exit(0)
    if not select.select([state["read"]], [], [], HANGS_S)[0]:
        os.kill(state["child"], signal.SIGKILL)
    os.waitpid(state["child"], 0)
    os.close(state["write"])
    assert os.read(state["read"], 100) == b"ForkedProcessError"
    assert_same(outcome(trainer, module), plain)


def test_a_child_that_ends_like_a_program_runs_no_destructor(tmp_path: Path) -> None:
    """``sys.exit`` after a fork runs what the interpreter runs at its exit, and drops what it
    collects.
    """

    def end(_: pl.Trainer) -> None:
        gc.collect()
        atexit._run_exitfuncs()

    found, _ = fit(tmp_path, "disk", end)
    assert found == "fine"


def test_the_writer_of_checkpoints_is_not_waited_for(tmp_path: Path) -> None:
    local_first = LocalFirst(disk=tmp_path / "saves")

    def wait(_: pl.Trainer) -> None:
        local_first.teardown()

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "remote" / "step.ckpt")
                self.fates = [fate(lambda: wait(trainer)), fate(lambda: save(trainer))]

    saves = Saves()
    trainer = quiet_trainer(
        plugins=[local_first], max_steps=3, default_root_dir=tmp_path, limit_val_batches=0, callbacks=[saves],
    )  # fmt: skip
    trainer.fit(Model(RECIPE), data(BATCHES))
    assert saves.fates == ["ForkedProcessError", "ForkedProcessError"]


def test_memory_of_the_parent_is_not_given_back_by_a_child() -> None:
    arena = Arena(4096)
    assert fate(lambda: arena.close()) == "ForkedProcessError"
    arena.close()
    assert not arena.is_open
