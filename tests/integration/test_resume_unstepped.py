"""A store is resumed that holds a block whose optimizer state was never written."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from support.models import LitModel, Outcome, Recipe, Shape, assert_same, data, outcome, quiet_trainer
from support.resuming import Ends, EndsAt, after
from support.strategies import on_device

from lightning_hetero import BlockPlan, HeteroOffloadStrategy, Plan, Tier
from lightning_hetero.cli.inspect import run as inspect
from lightning_hetero.cli.verify import run as verify
from lightning_hetero.store.format.pins import pins

STATE_ON_DISK = Plan(name="state", blocks=(BlockPlan(name="model.blocks.*", state=Tier.DISK), BlockPlan(name="*")))
STEPS = 8


class Frozen(LitModel):
    """The optimizer has the parameters of a frozen block, too."""

    def __init__(self) -> None:
        super().__init__(Recipe(shape=Shape(layers=3, frozen=(0,), dropout=0.1)))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, fused=True)


class Unused(LitModel):
    """The last block is not called, so its parameters have no gradient."""

    def __init__(self) -> None:
        super().__init__(Recipe(shape=Shape(layers=3, dropout=0.1)))

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        called, self.model.blocks = self.model.blocks, self.model.blocks[:-1]
        try:
            return super().loss(batch)
        finally:
            self.model.blocks = called


class Overflows(LitModel):
    """The loss scale is so large that the first run overflows in every step, and the last one does
    not.
    """

    def __init__(self) -> None:
        super().__init__(Recipe(shape=Shape(layers=3)))


def fit(
    folder: Path, strategy: Any, module_class: type[LitModel], *, stop: int | None = None, store: Path | None = None,
    more: tuple[pl.Callback, ...] = (),
) -> Outcome:  # fmt: skip
    torch.manual_seed(7)
    module = module_class()
    torch.manual_seed(11)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler=scaler)] if module_class is Overflows else []
    trainer = quiet_trainer(
        strategy=strategy, max_steps=STEPS, plugins=plugins, limit_val_batches=0, default_root_dir=folder,
        callbacks=[*more, *([] if stop is None else [EndsAt(stop)])],
    )  # fmt: skip
    ckpt_path = None if store is None else str(store)
    if stop is None:
        trainer.fit(module, data(), ckpt_path=ckpt_path)
        return outcome(trainer, module)
    with pytest.raises(Ends):
        trainer.fit(module, data(), ckpt_path=ckpt_path)
    return Outcome(module.losses, {}, [])


@pytest.mark.parametrize(
    ("module_class", "plans", "stops"),
    [
        (Frozen, ("host", "host", "disk", "host"), (2, 4, 6)),
        (Frozen, (STATE_ON_DISK, STATE_ON_DISK, "host", STATE_ON_DISK), (2, 4, 6)),
        (Frozen, (on_device, "disk", on_device), (3, 5)),
        (Unused, ("host", STATE_ON_DISK, "host"), (3, 5)),
        (Overflows, (STATE_ON_DISK, "host", STATE_ON_DISK), (2, 3)),
    ],
    ids=["frozen", "frozen-state-on-disk", "frozen-device", "unused", "overflows"],
)
def test_a_store_with_a_block_that_was_never_updated_is_resumed_again_and_again(
    module_class: type[LitModel], plans: tuple[Any, ...], stops: tuple[int, ...], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    plain = fit(tmp_path, "auto", module_class)
    go_on: dict[str, Path] = {}
    for plan, stop in zip(plans, (*stops, None), strict=True):
        make = plan if callable(plan) else partial(HeteroOffloadStrategy, plan)
        got = fit(tmp_path, make(disk_path=store, verify_digests=True), module_class, stop=stop, **go_on)
        go_on = {"store": store}
    assert_same(got, after(plain, STEPS - stops[-1]))


def test_a_run_that_ended_before_any_step_was_kept_again_is_resumed_from_what_it_had_found(tmp_path: Path) -> None:
    """A resume removes files of uncommitted blocks and makes new ones; the next resume finds these
    uncommitted again.
    """
    store = tmp_path / "store"
    plain = fit(tmp_path, "auto", Frozen)
    fit(tmp_path, HeteroOffloadStrategy("host", disk_path=store), Frozen, stop=3)
    for _ in range(3):
        fit(tmp_path, HeteroOffloadStrategy("host", disk_path=store), Frozen, stop=3, store=store)
    got = fit(tmp_path, HeteroOffloadStrategy("host", disk_path=store), Frozen, store=store)
    assert_same(got, after(plain, STEPS - 3))


def test_a_checkpoint_of_links_of_such_a_store_is_whole_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, kept, elsewhere = tmp_path / "store", tmp_path / "kept.ckpt", tmp_path / "elsewhere"

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(kept)

    make = partial(HeteroOffloadStrategy, "host", verify_digests=True)
    plain = fit(tmp_path, "auto", Frozen)
    fit(tmp_path, make(disk_path=store, link_checkpoints=True), Frozen, stop=5, more=(Saves(),))
    assert_same(fit(tmp_path, make(disk_path=store), Frozen, store=store), after(plain, STEPS - 5))
    assert_same(fit(tmp_path, make(disk_path=elsewhere), Frozen, store=kept), after(plain, STEPS - 3))
    for path in (store, kept, elsewhere):
        assert not verify(path, as_json=True)
        inspect(path, as_json=True)
    capsys.readouterr()


def test_a_pin_of_such_a_store_is_resumed_elsewhere_and_in_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    make = partial(HeteroOffloadStrategy, "host", verify_digests=True)
    plain = fit(tmp_path, "auto", Frozen)
    fit(tmp_path, make(disk_path=store, keep_every=3), Frozen, stop=5)
    (kept,) = pins(store)
    assert_same(fit(tmp_path, make(disk_path=elsewhere), Frozen, store=kept), after(plain, STEPS - 3))
    assert_same(fit(tmp_path, make(disk_path=store, keep_every=3), Frozen, store=store), after(plain, STEPS - 3))
    for path in (store, elsewhere):
        assert not verify(path, as_json=True)
    capsys.readouterr()
