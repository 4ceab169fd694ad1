"""Frozen models whose optimizer has all parameters, and what their steps cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_hetero.lowering.needs import total_bytes
from lightning_hetero.store.format.audit import StoreFiles
from lightning_hetero.store.format.record import parse
from support import resuming
from support.models import LitModel, Outcome, Recipe, Shape

BATCHES = 3  # of an epoch
RECIPE = Recipe(steps=8, shape=Shape(layers=3, dropout=0.1, few=True))  # each block is two


class All(LitModel):
    """The optimizer has all parameters, as most people write it."""

    def configure_optimizers(self) -> Any:
        return self.recipe.optimizer(list(self.parameters()))


class Trained(LitModel):
    """It has those that train."""

    def configure_optimizers(self) -> Any:
        return self.recipe.optimizer([p for p in self.parameters() if p.requires_grad])


@dataclass
class Costs(pl.Callback):
    """What the steps of a run cost."""

    ops: list[Any] = field(default_factory=list)
    sizes: Any = None
    num_bytes: tuple[int, ...] = ()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        session: Any = trainer.strategy.session  # type: ignore[attr-defined]
        self.ops = [(op.kind, op.block, op.payload) for op in session.executor.schedule.ops]
        self.sizes = session.executor.model

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        session: Any = trainer.strategy.session  # type: ignore[attr-defined]
        session.executor.rest()  # all is written
        stats = session.store.stats()
        self.num_bytes = stats.bytes_written, stats.bytes_read, session.memory_report()["disk_bytes"]


def fit(
    root: Path, strategy: Any, recipe: Recipe = RECIPE, *callbacks: pl.Callback, module_class: type[LitModel] = All, **options: Any
) -> Outcome:
    """One fit of epochs of three batches; options as for :func:`support.resuming.fit`."""
    return resuming.fit(root, strategy, recipe, module_class, *callbacks, batches=BATCHES, **options)


@dataclass
class Budget(pl.Callback):
    """What weights on disk may take in host memory after each step, what they take, and what
    everything may take.
    """

    rows: list[tuple[int, int, int]] = field(default_factory=list)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        session: Any = trainer.strategy.session  # type: ignore[attr-defined]
        executor = session.executor
        placement, sizes = executor.context.placement, executor.model.blocks
        held = sum(sizes[block.index].weight_bytes for block in executor.residency.weights.held())
        needs = session._placer().needs(executor.plan, placement.rules)
        self.rows.append((placement.cache_bytes, held, total_bytes(needs.host) + placement.cache_bytes))


def frozen_of(module: Any) -> list[nn.Parameter]:
    return [p for n, p in module.named_parameters() if n.endswith(("up.weight", "down.bias"))]


@dataclass
class Flips(pl.Callback):
    """Sets frozen weights free in a hook before step ``at[0]``, freezes all blocks before
    ``at[1]``, sets free what was again.
    """

    hook: str = "on_train_batch_start"
    at: tuple[int, ...] = (2, 4, 6)

    def __post_init__(self) -> None:
        setattr(self, self.hook, self._hook)

    def _hook(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        step = trainer.global_step
        if step in self.at:
            free = self.at.index(step) % 2 == 0
            for param in frozen_of(module):
                param.requires_grad_(free)
            module.model.blocks[1].norm.requires_grad_(free)


def in_place(store: Path) -> set[str]:
    """The first names of the parts that are read in place."""
    with StoreFiles(store) as files:
        assert files.record is not None
        rows = zip(files.manifest["layout"]["parts"], parse(files.record.user).parts, strict=True)
        return {names[0] for names, entry in rows if entry.in_place is not None}
