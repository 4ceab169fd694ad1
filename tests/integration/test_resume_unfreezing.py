"""``ckpt_path`` is a store whose step was kept after callbacks had unfrozen layers: training goes
on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from support import resuming
from support.models import LitModel, Outcome, Recipe, Shape, assert_same
from support.recipes import MIXED
from support.resuming import after, offload
from support.strategies import on_device
from support.unfreezing import Unfreezing
from torch import nn

from lightning_hetero.errors import ConfigError
from lightning_hetero.strategies import HeteroOffloadStrategy

BATCHES = 3  # of an epoch
ADAMW = Recipe(steps=11, shape=Shape(dropout=0.1), clip=1.0)
SCHEDULED = replace(ADAMW, schedule="step", groups=True)
SGD = replace(SCHEDULED, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9))
BF16 = replace(ADAMW, precision="bf16-true")


class Backbone(LitModel):
    """Its blocks are the backbone, with batch norms that freeze with them."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        for block in self.model.blocks:
            block.norm = nn.Sequential(block.norm, Normed(recipe.shape.width))

    @property
    def backbone(self) -> nn.Module:
        return self.model.blocks


class Normed(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def backbone() -> pl.Callback:
    return BackboneFinetuning(unfreeze_backbone_at_epoch=1, train_bn=False)


class ByHand(pl.Callback):
    """Knows nothing of a resume: a group of frozen parameters joins as a fit starts; they are
    unfrozen, and drop out, later.
    """

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        pl_module.model.blocks[0].requires_grad_(False).eval()
        pl_module.model.blocks[1].requires_grad_(False).eval()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        trainer.optimizers[0].add_param_group({"params": list(pl_module.model.blocks[0].parameters()), "lr": 1e-3})

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.model.blocks[0].requires_grad_(True).train()
            pl_module.model.blocks[1].requires_grad_(True).train()
            params = trainer.optimizers[0].param_groups[0]["params"]  # no group of their own
            params += pl_module.model.blocks[1].parameters()


class AsBatchEnds(pl.Callback):
    """A group of frozen parameters joins in the last hook of a batch, so that its step is kept with
    that group.
    """

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        pl_module.model.blocks.requires_grad_(False).eval()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step in (4, 6):
            block = pl_module.model.blocks[trainer.global_step // 2 - 2].requires_grad_(True).train()
            trainer.optimizers[0].add_param_group({"params": list(block.parameters()), "lr": 1e-3})


def fit(
    root: Path,
    strategy: Any,
    make: Callable[[], pl.Callback],
    recipe: Recipe = ADAMW,
    *more: pl.Callback,
    module_class: type[Backbone] = Backbone,
    **options: Any,
) -> Outcome:
    return resuming.fit(root, strategy, recipe, module_class, make(), *more, batches=BATCHES, **options)


def keeping(plan: Any, store: Path, **options: Any) -> Any:
    return offload(plan, store, verify_digests=True, **options)


DEVICE_RESIDENT = partial(on_device, "resident")


@pytest.mark.parametrize(
    ("make", "recipe", "plans", "stops"),
    [
        (backbone, ADAMW, ("resident", "disk"), (8,)),
        (backbone, SCHEDULED, ("disk", "resident", MIXED), (BATCHES, 5)),  # unfrozen, before a step and after
        (Unfreezing, ADAMW, (MIXED, "disk", "host"), (5, 10)),
        (Unfreezing, SGD, ("disk", "resident"), (7,)),
        (Unfreezing, BF16, ("host", "disk"), (7,)),
        (Unfreezing, ADAMW, (on_device, DEVICE_RESIDENT, "disk"), (4, 8)),
        (ByHand, ADAMW, ("disk", "host"), (5,)),
        (AsBatchEnds, ADAMW, ("disk", "host", MIXED), (4, 6)),
        (AsBatchEnds, SGD, ("host", "disk"), (4,)),
        (AsBatchEnds, ADAMW, (DEVICE_RESIDENT, on_device, "disk"), (4, 6)),
    ],
    ids=["backbone", "scheduled", "twice", "sgd", "bf16", "devices", "by-hand", "ends", "ends-sgd", "ends-devices"],
)  # fmt: skip
def test_it_continues_where_layers_had_been_unfrozen(
    make: Callable[[], pl.Callback], recipe: Recipe, plans: tuple[Any, ...], stops: tuple[int, ...], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    plain = fit(tmp_path, "auto" if recipe is not BF16 else HeteroOffloadStrategy("host"), make, recipe)
    go_on: dict[str, Path] = {}
    for plan, stop in zip(plans, (*stops, None), strict=True):
        got = fit(tmp_path, keeping(plan, store), make, recipe, stop=stop, **go_on)
        go_on = {"store": store}
    assert_same(got, after(plain, recipe.steps - stops[-1]))


def test_a_checkpoint_of_links_of_such_a_step_is_resumed(tmp_path: Path) -> None:
    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 8:
                trainer.save_checkpoint(tmp_path / "kept.ckpt")

    plain = fit(tmp_path, keeping("disk", tmp_path / "store", link_checkpoints=True), Unfreezing, ADAMW, Saves())
    assert_same(plain, fit(tmp_path, "auto", Unfreezing))
    got = fit(tmp_path, keeping("resident", tmp_path / "other"), Unfreezing, store=tmp_path / "kept.ckpt")
    assert_same(got, after(plain, ADAMW.steps - 8))


@pytest.mark.parametrize("frozen", [(), (0, 1)], ids=["fewer", "more"])
def test_other_frozen_blocks_than_those_that_training_began_with_are_refused(frozen: tuple[int, ...], tmp_path: Path) -> None:
    """Also where the optimizer has all parameters, frozen ones too."""

    class Freezes(pl.Callback):
        def __init__(self, *blocks: int) -> None:
            self.blocks = blocks

        def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
            for block in self.blocks:
                pl_module.model.blocks[block].requires_grad_(False)

    class All(Backbone):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    store = tmp_path / "store"
    fit(tmp_path, keeping("disk", store), partial(Freezes, 1), stop=2, module_class=All)
    with pytest.raises(ConfigError, match="grouped in another way, because others are frozen"):
        fit(tmp_path, keeping("disk", store), partial(Freezes, *frozen), store=store, module_class=All)


def test_other_groups_than_those_that_training_began_with_are_refused(tmp_path: Path) -> None:
    class Adds(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            trainer.optimizers[0].add_param_group({"params": list(pl_module.model.blocks[1].up.parameters())})

    store = tmp_path / "store"
    fit(tmp_path, keeping("disk", store), Unfreezing, stop=4)
    with pytest.raises(ConfigError, match=r"has groups of \[2, 8\] parameters, the store's optimizer \[10\]"):
        fit(tmp_path, keeping("disk", store), Unfreezing, replace(ADAMW, groups=True), store=store)
    with pytest.raises(ConfigError, match="a hook has given AdamW 2 parameters that it had not"):
        fit(tmp_path, keeping("disk", store), Unfreezing, ADAMW, Adds(), store=store)
