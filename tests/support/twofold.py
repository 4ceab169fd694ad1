"""A training whose batches write every block several times: two optimizers that share all blocks,
and hooks that change weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from support.models import LitModel, Outcome, Recipe
from support.resuming import fit

BATCHES = 3  # of an epoch


class Twofold(LitModel):
    """Each optimizer has every other parameter, so both have some of each block; they step one
    after the other.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        params = [p for p in self.parameters() if p.requires_grad]
        return [self.recipe.optimizer(params[::2]), torch.optim.Adam(params[1::2], lr=2e-3, fused=True)], []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for point, optimizer in zip(("once", "twice"), self.optimizers(), strict=True):
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(loss.detach().clone())
            self.reached(point)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.model.blocks[0].up.weight.clamp_(-0.2, 0.2)
            self.model.head.weight.mul_(0.999)
        self.reached("changed")

    def on_train_epoch_end(self) -> None:
        """After the epoch's last step was kept, while it may still be on its way to the disk."""
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.requires_grad:
                    parameter.mul_(0.98)
        self.reached("epoch")

    def reached(self, point: str) -> None:
        """What of the batch is over: the step of the first optimizer, of both, the hook after them,
        or that after the epoch.
        """


def batches_done(trainer: Any) -> int:
    """Batches whose steps are over; each has two."""
    return int(trainer.global_step) // 2


class AtBatch(pl.Callback):
    """Calls ``begins`` with the number of batches that are over, as each one begins; at
    ``unfreezes`` what is frozen joins.

    It joins the optimizer number ``joins``: the first one to step has not written anything by then.
    """

    def __init__(self, begins: Callable[[int], object], unfreezes: int | None, joins: int) -> None:
        self.begins, self.unfreezes, self.joins = begins, unfreezes, joins

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.begins(batches_done(trainer))
        if batches_done(trainer) == self.unfreezes:
            fresh = [parameter.requires_grad_() for parameter in module.parameters() if not parameter.requires_grad]
            trainer.optimizers[self.joins].add_param_group({"params": fresh})


def kept_before(batches: int, every: int) -> int:
    """After which batch the last step was kept when so many have ended: every so many steps, and as
    each epoch ends.
    """
    return max(batches // every * every, batches // BATCHES * BATCHES)


def train_twofold(
    root: Path,
    strategy: Any,
    recipe: Recipe,
    *,
    store: Path | None = None,
    begins: Callable[[int], object] = id,
    unfreezes: int | None = None,
    joins: int = 1,
    module_class: type[Twofold] = Twofold,
) -> Outcome:
    """One fit of ``recipe.steps`` batches, from the beginning or from ``store``."""
    at_batch = AtBatch(begins, unfreezes, joins)
    return fit(root, strategy, recipe, module_class, at_batch, store=store, batches=BATCHES, max_steps=2 * recipe.steps)
