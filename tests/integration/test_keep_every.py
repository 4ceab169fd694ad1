"""``keep_every``: the last kept step is whole whatever has been written since, and what is refused.
Kills are in tests/faults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer
from support.recipes import MIXED
from support.resuming import after

from lightning_hetero import BlockPlan, Plan, Tier
from lightning_hetero.cli.verify import run as verify
from lightning_hetero.convert.exporting import export_weights
from lightning_hetero.errors import ConfigError
from lightning_hetero.store.format.pins import pins
from lightning_hetero.strategies import HeteroOffloadStrategy


class Stops(LitModel):
    """Breaks off in a batch, as a crash would."""

    at = -1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == self.at:
            raise RuntimeError("stopped")
        return super().training_step(batch, batch_idx)


def train(folder: Path, strategy: Any, *, steps: int = 7, at: int = -1, store: Path | None = None) -> Outcome:
    torch.manual_seed(7)
    module = Stops(Recipe(shape=Shape(layers=3, frozen=(1,))))
    module.at = at
    torch.manual_seed(11)
    trainer = quiet_trainer(strategy=strategy, max_steps=steps, limit_val_batches=0, default_root_dir=folder)
    ckpt_path = None if store is None else str(store)
    if at < 0:
        trainer.fit(module, data(), ckpt_path=ckpt_path)
    else:
        with pytest.raises(RuntimeError, match="stopped"):
            trainer.fit(module, data(), ckpt_path=ckpt_path)
    return outcome(trainer, module)


@pytest.mark.parametrize("plan", ["host", MIXED], ids=["host", "mixed"])
def test_a_run_continues_from_the_last_kept_step_again_and_again(plan: Any, tmp_path: Path) -> None:
    """Frozen weights in memory are mirrored once, and have to be in every pin."""
    store = tmp_path / "store"
    expected = train(tmp_path, "auto")

    def strategy(every: int = 3) -> HeteroOffloadStrategy:
        return HeteroOffloadStrategy(plan=plan, disk_path=store, keep_every=every, verify_digests=True)

    train(tmp_path, strategy(), at=5)
    train(tmp_path, strategy(), at=4, store=store)  # no other step has been kept since
    assert len(pins(store)) == 1
    got = train(tmp_path, strategy(), store=store)
    expected.losses = expected.losses[3:]
    assert_same(got, expected)
    got = train(tmp_path, strategy(1), steps=8, store=store)  # it ended in order, so its last step was kept
    assert len(got.losses) == 1
    assert not pins(store)


def test_another_run_at_the_same_path_does_not_find_the_pins_of_the_first(tmp_path: Path) -> None:
    store = tmp_path / "store"
    train(tmp_path, HeteroOffloadStrategy(plan="host", disk_path=store, keep_every=2), at=3)
    assert pins(store)
    train(tmp_path, HeteroOffloadStrategy(plan="host", disk_path=store, keep_every=4, new_run=True), at=3)
    assert not pins(store)
    assert pins(tmp_path / "store.earlier-1")
    with pytest.raises(ConfigError, match="no step has been committed yet"):
        train(tmp_path, HeteroOffloadStrategy(plan="host", disk_path=store), store=store)


def test_a_pin_can_be_resumed_elsewhere(tmp_path: Path) -> None:
    store = tmp_path / "store"
    train(tmp_path, HeteroOffloadStrategy(plan=MIXED, disk_path=store, keep_every=2), at=3)
    (pinned,) = pins(store)
    export_weights(store, tmp_path / "weights.ckpt")
    export_weights(pinned, tmp_path / "pinned.ckpt")
    kept, same = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"] for name in ("weights", "pinned"))
    assert all(torch.equal(value, same[name]) for name, value in kept.items())
    got = train(tmp_path, HeteroOffloadStrategy(plan="disk", disk_path=tmp_path / "other"), store=store)
    expected = train(tmp_path, "auto")
    expected.losses = expected.losses[2:]
    assert_same(got, expected)
    assert pins(store), "the store stays as it is"
    for slot in pinned.glob("block-00000.*"):
        slot.unlink()
    assert verify(store, as_json=True), "what a resume needs is checked"


def test_only_kept_steps_write_mirrors(tmp_path: Path) -> None:
    written = []
    for every in (1, 4):
        strategy = HeteroOffloadStrategy(plan="host", disk_path=tmp_path / f"store-{every}", keep_every=every)
        train(tmp_path, strategy, steps=8)
        written.append(strategy.memory_report()["bytes_written"])
    assert written[1] < written[0] / 2


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"keep_every": 0}, "keep_every=0"),
        ({"keep_every": 2}, "Pass a disk_path"),
        ({"keep_every": 2, "disk_path": "x", "durability": "none"}, "durability='none'"),
        ({"keep_every": 2, "disk_path": "x", "link_checkpoints": True}, "link_checkpoints"),
        ({"link_checkpoints": True}, "link_checkpoints=True is for"),
        ({"durability": "power"}, "durability='power' is for"),
    ],
)
def test_keep_every_without_kept_steps_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        HeteroOffloadStrategy(**options)


@pytest.mark.parametrize("cache", [None, 0], ids=["roomy", "tight"])
def test_state_in_memory_is_kept_where_weights_leave_memory_before_that(cache: int | None, tmp_path: Path) -> None:
    rules = (BlockPlan(name="model.blocks.*", weights=Tier.DISK, state=Tier.HOST), BlockPlan(name="*"))
    plan = Plan(name="p", blocks=rules, host_cache_bytes=cache)
    assert_same(train(tmp_path, HeteroOffloadStrategy(plan, disk_path=tmp_path / "store")), train(tmp_path, "auto"))


class StopsIn(pl.Callback):
    """Stops training in a hook, once step ``at`` has ended."""

    def __init__(self, hook: str, at: int) -> None:
        self.at = at
        setattr(self, hook, self.stop)

    def stop(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step >= self.at:
            trainer.should_stop = True


class LogsWorse(pl.Callback):
    """A metric that gets worse with every validation."""

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        module.log("metric", float(trainer.global_step))


class Begins(pl.Callback):
    """Sees after which step training goes on."""

    step = -1

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.step = trainer.global_step


def stopped(folder: Path, strategy: Any, callbacks: list[Any], store: Path | None = None, **options: Any) -> Outcome:
    """Trains three epochs of eight batches each, unless a callback stops it."""
    torch.manual_seed(7)
    module = LitModel(Recipe(shape=Shape(layers=2, dropout=0.1), schedule="step"))
    torch.manual_seed(11)
    defaults = {"max_epochs": 3, "limit_val_batches": 2, "default_root_dir": folder}
    trainer = quiet_trainer(strategy=strategy, callbacks=callbacks, **{**defaults, **options})
    trainer.fit(module, data(), data(2, seed=1), ckpt_path=None if store is None else str(store))
    return outcome(trainer, module)


@pytest.mark.parametrize(
    ("stops", "step", "options"),
    [
        (lambda: [LogsWorse(), EarlyStopping("metric", patience=1)], 16, {}),
        (lambda: [StopsIn("on_validation_end", 3)], 3, {"val_check_interval": 3}),
        (lambda: [StopsIn("on_validation_epoch_end", 6)], 6, {"val_check_interval": 3}),
        (lambda: [StopsIn("on_validation_batch_end", 10)], 10, {"val_check_interval": 5, "check_val_every_n_epoch": None}),
        (lambda: [StopsIn("on_train_epoch_end", 8)], 8, {"limit_val_batches": 0}),
        (lambda: [StopsIn("on_validation_end", 1)], 1, {"val_check_interval": 5, "accumulate_grad_batches": 3}),
    ],
    ids=["early stopping", "validation end", "validation epoch end", "across epochs", "epoch end", "while gradients accumulate"],
)
def test_the_last_step_is_kept_wherever_training_is_stopped_after_its_batch(
    stops: Any, step: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """A resume does what the run would have done that nobody stops, as it does where every step is
    kept.
    """
    expected = stopped(tmp_path, "auto", [], **options)
    resumed = []
    for every in (1, 50):
        store = tmp_path / f"store-{every}"
        strategy = HeteroOffloadStrategy(plan=MIXED, disk_path=store, keep_every=every, verify_digests=True)
        stopped(tmp_path, strategy, stops(), **options)
        begins = Begins()
        strategy = HeteroOffloadStrategy(plan=MIXED, disk_path=store, keep_every=every, verify_digests=True)
        got = stopped(tmp_path, strategy, [begins], store, **options)
        assert begins.step == step
        assert_same(got, after(expected, len(got.losses)))
        resumed.append(len(got.losses))
    assert resumed[0] == resumed[1] > 0


class SkipsEpoch(pl.Callback):
    """Has the model skip the rest of the epoch after a step."""

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        vars(module)["on_train_batch_start"] = lambda *_: -1 if trainer.global_step == 1 else None


@pytest.mark.parametrize(
    ("ends", "options"),
    [(SkipsEpoch(), {}), (StopsIn("on_before_backward", 1), {"accumulate_grad_batches": 3})],
    ids=["skipped", "while gradients accumulate"],
)
def test_a_last_step_that_is_not_kept_is_named(
    ends: Any, options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What comes after the step has begun already, and a record could not say so."""
    strategy = HeteroOffloadStrategy(plan="host", disk_path=tmp_path / "store", keep_every=2)
    stopped(tmp_path, strategy, [ends], **options, max_epochs=1, limit_val_batches=0)
    assert "Training has ended with step 1, which is not kept" in caplog.text
