"""``keep_every``: the last kept step is whole whatever has been written since, and what is refused. Kills are in tests/faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer

from lightning_hetero import BlockPlan, Plan, Tier
from lightning_hetero.cli.verify import run as verify
from lightning_hetero.convert.exporting import export_weights
from lightning_hetero.errors import ConfigError
from lightning_hetero.store.pins import pins
from lightning_hetero.strategies import HeteroOffloadStrategy

MIXED = Plan(name="mixed", blocks=(BlockPlan(name="model.blocks.0"), BlockPlan(name="*", weights=Tier.DISK, state=Tier.DISK)))


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
def test_a_run_goes_on_from_the_last_kept_step_again_and_again(plan: Any, tmp_path: Path) -> None:
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


def test_a_pin_can_be_gone_on_from_elsewhere(tmp_path: Path) -> None:
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


def test_what_is_written_to_the_disk_is_that_of_kept_steps(tmp_path: Path) -> None:
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
def test_what_cannot_be_kept_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        HeteroOffloadStrategy(**options)


@pytest.mark.parametrize("cache", [None, 0], ids=["roomy", "tight"])
def test_state_in_memory_is_kept_where_weights_leave_memory_before_that(cache: int | None, tmp_path: Path) -> None:
    rules = (BlockPlan(name="model.blocks.*", weights=Tier.DISK, state=Tier.HOST), BlockPlan(name="*"))
    plan = Plan(name="p", blocks=rules, host_cache_bytes=cache)
    assert_same(train(tmp_path, HeteroOffloadStrategy(plan, disk_path=tmp_path / "store")), train(tmp_path, "auto"))
