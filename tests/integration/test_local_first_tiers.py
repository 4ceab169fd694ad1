"""``LocalFirst`` where weights and optimizer state live on tiers: what is saved is one step, and
any strategy goes on from it.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer
from support.properties import examples
from support.scripts import run_script
from support.strategies import on_device
from support.unreadable import Unreadable
from torch.utils.data import DataLoader

from lightning_hetero import BlockPlan, EmulatedDevice, HeteroOffloadStrategy, LocalFirst, Plan, Tier
from lightning_hetero.errors import CheckpointWriteError, ConfigError, StoreError
from lightning_hetero.parallel.recovery import tiers
from lightning_hetero.parallel.recovery.writer import LayerWriter
from lightning_hetero.runtime.directories import Directories

BATCHES = 4  # of an epoch
NAMES = ("model.blocks.0", "model.blocks.*", "*")
MIXED = Plan(
    name="mixed",
    blocks=(
        BlockPlan(name=NAMES[0], weights=Tier.DISK, state=Tier.DISK),
        BlockPlan(name=NAMES[1], weights=Tier.HOST, state=Tier.DISK),
        BlockPlan(name=NAMES[2], weights=Tier.HOST, state=Tier.HOST),
    ),
)
SGD = functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
USUAL = Recipe(shape=Shape(dropout=0.1))


def fit(
    root: Path,
    strategy: Any,
    local: LocalFirst | None = None,
    *callbacks: pl.Callback,
    recipe: Recipe = USUAL,
    epochs: int = 1,
    resume: str | Path | None = None,
    saves: bool = True,
) -> Outcome:
    torch.manual_seed(7)
    module = LitModel(recipe)
    torch.manual_seed(11)
    saver = [pl.callbacks.ModelCheckpoint(root / "run", filename="{epoch}", save_top_k=-1)] if saves else []
    trainer = quiet_trainer(
        strategy=strategy, plugins=[] if local is None else [local], callbacks=[*callbacks, *saver], enable_checkpointing=saves,
        max_epochs=epochs, accumulate_grad_batches=recipe.accumulate, gradient_clip_val=recipe.clip, precision=recipe.precision,
        default_root_dir=root, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data(BATCHES).dataset, batch_size=2), ckpt_path=resume)
    return outcome(trainer, module)


def last(expected: Outcome, losses: int) -> Outcome:
    return Outcome(expected.losses[-losses:], expected.weights, expected.state)


def assert_equal(got: Any, expected: Any, where: str = "") -> None:
    """The same, whatever the order."""
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype, where
        assert torch.equal(got, expected), where
    elif isinstance(expected, dict):
        assert set(got) == set(expected), where
        for key, value in expected.items():
            assert_equal(got[key], value, f"{where}.{key}")
    else:
        assert got == expected, where


# ---- what is saved -------------------------------------------------------------------------------


class SavesOnce(pl.Callback):
    """Saves before or after a batch, and lets nothing be written before training has ended."""

    def __init__(self, path: Path, batch: int, *, before: bool) -> None:
        self.path, self.batch, self.before = path, batch, before
        self.may_write = threading.Event()

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self.before and batch_idx == self.batch:
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.before and batch_idx == self.batch:
            trainer.save_checkpoint(self.path)
        with torch.no_grad():
            module.model.position.clamp_(-0.25, 0.25)  # in memory, and changed after the save

    def on_train_end(self, *_: Any) -> None:
        self.may_write.set()


def saved_by(root: Path, strategy: Any, batch: int, *, before: bool, recipe: Recipe) -> tuple[Outcome, dict[str, Any]]:
    """A fit, and what it has saved."""
    saver, write = SavesOnce(root / "saved.ckpt", batch, before=before), LayerWriter.write_data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerWriter, "write_data", lambda *args: saver.may_write.wait(60) and write(*args))
        found = fit(root, strategy, LocalFirst(disk=root / "disk"), saver, recipe=recipe, saves=False)
    assert not list(root.rglob("*saving-*"))
    loaded = LocalFirst(disk=root / "disk").checkpoints.load(saver.path)
    assert loaded is not None
    return found, loaded.state


RECIPES = st.builds(
    Recipe,
    shape=st.builds(Shape, tied=st.booleans(), half_frozen=st.booleans(), frozen=st.sampled_from([(), (1,)])),
    accumulate=st.sampled_from([1, 1, 2]),
    clip=st.sampled_from([None, 0.3]),
    optimizer=st.sampled_from([USUAL.optimizer, SGD]),
    precision=st.sampled_from(["32-true", "32-true", "bf16-true"]),
)
ROWS = st.tuples(*[st.sampled_from([(w, s) for w in (Tier.HOST, Tier.DISK) for s in (Tier.HOST, Tier.DISK)]) for _ in NAMES])


@examples(4)
@given(recipe=RECIPES, rows=ROWS, batch=st.integers(0, 2), before=st.booleans(), kept=st.booleans(), device=st.booleans())
def test_a_save_is_the_step_that_it_was_asked_for_though_training_continues(
    recipe: Recipe, rows: Any, batch: int, before: bool, kept: bool, device: bool
) -> None:
    """Nothing is written before training has ended, so any later step would show; and saving
    changes no bit of training.
    """
    rules = tuple(BlockPlan(name=n, weights=w, state=s) for n, (w, s) in zip(NAMES, rows, strict=True))
    plan = Plan(name="random", blocks=rules)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        beside = EmulatedDevice(memory="16MiB", seed=1) if device and recipe.optimizer is not SGD else None
        strategy = HeteroOffloadStrategy(plan, disk_path=root / "store" if kept else None, device=beside)
        got, ours = saved_by(root / "tiers", strategy, batch, before=before, recipe=recipe)
        other = "auto" if recipe.precision == "32-true" else HeteroOffloadStrategy("host")  # 16-bit weights have masters here
        expected, theirs = saved_by(root / "other", other, batch, before=before, recipe=recipe)
        assert_same(got, expected)
        assert_equal(ours, theirs)


def test_training_waits_for_the_writer_where_the_disk_has_no_room_for_another_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Directories, "room_bytes", lambda *_: 0)
    fit(tmp_path, HeteroOffloadStrategy("disk"), LocalFirst(disk=tmp_path / "disk"))
    assert "no room" in caplog.text


def test_links_and_remote_copies_cannot_have_one_path(tmp_path: Path) -> None:
    strategy = HeteroOffloadStrategy(disk_path=tmp_path, link_checkpoints=True)
    with pytest.raises(ConfigError, match="link_checkpoints"):
        strategy.checkpoint_io = LocalFirst()


# ---- who goes on from it -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "recipe"),
    [
        (lambda: HeteroOffloadStrategy("disk"), lambda: "auto", USUAL),
        (lambda: "auto", lambda: HeteroOffloadStrategy(MIXED, host_memory="32MiB"), USUAL),
        (lambda: HeteroOffloadStrategy(MIXED), on_device, Recipe()),
        (on_device, lambda: HeteroOffloadStrategy("disk", host_memory="32MiB"), Recipe(precision="bf16-true")),
        (lambda: HeteroOffloadStrategy(MIXED), lambda: HeteroOffloadStrategy("disk"), Recipe(optimizer=SGD)),
    ],
    ids=["disk to plain", "plain to mixed", "mixed to device", "device to disk", "momentum"],
)
def test_another_plan_or_none_continues_bit_for_bit(
    first: Callable[[], Any], second: Callable[[], Any], recipe: Recipe, tmp_path: Path
) -> None:
    expected = fit(tmp_path / "whole", second(), recipe=recipe, epochs=2, saves=False)
    fit(tmp_path, first(), LocalFirst(disk=tmp_path / "disk"), recipe=recipe)
    local = LocalFirst(disk=tmp_path / "disk")
    assert_same(fit(tmp_path, second(), local, recipe=recipe, epochs=2, resume="newest"), last(expected, BATCHES))
    assert local.bytes_read["disk"] > 0 == local.bytes_read["remote"]


@pytest.mark.parametrize(("dies_at", "begins"), [("disk", 1), ("remote", 2)])
def test_a_run_that_is_killed_while_it_saves_continues_from_what_is_whole(dies_at: str, begins: int, tmp_path: Path) -> None:
    """What is on the local disk counts without a remote copy; half of either does not."""
    done = run_script(Path(__file__), str(tmp_path), dies_at, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(tmp_path.glob("lightning-hetero-*/saving-*")), "it died in the middle"
    expected = fit(tmp_path / "whole", "auto", epochs=3, saves=False)
    local = LocalFirst(disk=tmp_path / "disk")
    got = fit(tmp_path, HeteroOffloadStrategy("disk"), local, epochs=3, resume="newest")
    assert_same(got, last(expected, (3 - begins) * BATCHES))
    assert local.bytes_read["disk"] > 0 == local.bytes_read["remote"]
    assert not list(tmp_path.glob("lightning-hetero-*")), "what was left is removed"


def main(root: Path, dies_at: str) -> None:
    """Saves after each epoch, and is killed as the second save's second file goes to a tier."""
    publish, seen = tiers.CheckpointTier.publish, []

    def publish_or_die(self: Any, name: str, content: Any) -> None:
        if self.name == dies_at and name.startswith("000000000008") and name.endswith(".distcp"):
            seen.append(name)
            if len(seen) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        publish(self, name, content)

    tiers.CheckpointTier.publish = publish_or_die  # type: ignore[method-assign]
    fit(root, HeteroOffloadStrategy("disk"), LocalFirst(disk=root / "disk"), epochs=3)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])


# ---- with a store --------------------------------------------------------------------------------


class Fails(pl.Callback):
    """Ends a fit in the middle of its second epoch."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == BATCHES + 2:
            raise RuntimeError("failed")


@pytest.mark.parametrize(
    ("first", "second", "recipe"),
    [
        ("disk", "disk", USUAL),
        (MIXED, "host", Recipe(shape=Shape(dropout=0.1), clip=1.0, groups=True)),
        ("host", MIXED, Recipe(optimizer=SGD)),
        ("disk", on_device, Recipe(precision="bf16-true")),
    ],
    ids=["disk", "groups", "sgd", "device-bf16"],
)
def test_a_run_with_local_first_continues_from_its_store(tmp_path: Path, first: Any, second: Any, recipe: Recipe) -> None:
    """What docs/recovery.md recommends after a kill; the saves of the run that went on can then be
    gone on from, too.
    """
    local = {"memory": tmp_path / "memory", "disk": tmp_path / "saves"}

    def offload(plan: Any, **options: Any) -> Any:
        return plan(**options) if callable(plan) else HeteroOffloadStrategy(plan, **options)

    reference = "auto" if recipe.precision == "32-true" else HeteroOffloadStrategy(first)
    expected = fit(tmp_path / "plain", reference, recipe=recipe, epochs=3, saves=False)
    with pytest.raises(RuntimeError, match="failed"):
        fit(tmp_path, offload(first, disk_path=tmp_path / "store"), LocalFirst(**local), Fails(), recipe=recipe, epochs=3)
    resumed = offload(second, disk_path=tmp_path / "store")
    got = fit(tmp_path, resumed, LocalFirst(**local), recipe=recipe, epochs=2, resume=tmp_path / "store")
    assert len(got.losses) == BATCHES - 2
    again = fit(tmp_path, offload(first), LocalFirst(**local), recipe=recipe, epochs=3, resume="newest")
    assert_same(again, last(expected, BATCHES))


@pytest.mark.parametrize(
    ("plan", "files", "number"),
    [
        ("disk", r"/saving-.*/MANIFEST", 0),
        ("disk", r"/saving-.*/COMMIT", 0),
        ("disk", r"/saving-.*/block-", 0),
        ("disk", r"/saving-.*/block-", 3),
        ("host", r"store/.*\(deleted\)", 0),
    ],
    ids=["manifest", "record", "head", "contents", "copy"],
)
def test_what_cannot_be_read_while_a_save_is_written_is_named(tmp_path: Path, plan: str, files: str, number: int) -> None:
    """Training ends with the file's name. A run goes on from what was kept, and saves again."""
    expected, store = fit(tmp_path / "plain", "auto", epochs=3, saves=False), tmp_path / "store"

    def run(resume: Path | None = None) -> Outcome:
        strategy = HeteroOffloadStrategy(plan, disk_path=store)
        return fit(tmp_path, strategy, LocalFirst(disk=tmp_path / "saves"), epochs=3, resume=resume)

    with pytest.MonkeyPatch.context() as patch:
        broken = Unreadable(patch, files, number)
        with pytest.raises((CheckpointWriteError, StoreError), match=r"cannot be read.*Input/output error") as raised:
            run()
    assert broken.failed.removesuffix(" (deleted)") in str(raised.value) or ("a copy in" in str(raised.value) and plan == "host")
    assert "Traceback" not in str(raised.value)
    assert not list(tmp_path.rglob("*saving-*"))
    got = run(resume=store)
    assert 0 < len(got.losses) < 3 * BATCHES
    assert_same(got, last(expected, len(got.losses)))
    assert LocalFirst(disk=tmp_path / "saves").checkpoints.load(tmp_path / "run" / "epoch=2.ckpt") is not None
