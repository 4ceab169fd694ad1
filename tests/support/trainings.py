"""Plans, precisions, clipping and accumulation together, on a device that stands in for a GPU.

Every run tries each two options together. ``HYPOTHESIS_PROFILE=deep`` tries the whole product.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_hetero import HeteroOffloadStrategy
from support.covers import paired
from support.cuda import MIXED, stand_in
from support.models import Outcome, Recipe, Shape, run
from support.verdicts import divided

PLANS: dict[str, Any] = {"resident": "resident", "host": "host", "disk": "disk", "mixed": MIXED}
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")
CLIPPING: dict[str, dict[str, Any]] = {"": {}, "by norm": {"clip": 0.3}, "by value": {"clip": 0.01, "clip_by": "value"}}
Row = tuple[str, str, str, int]  # plan, precision, clipping, batches that a step accumulates
ROWS: list[Row] = paired(product(PLANS, PRECISIONS, CLIPPING, (1, 2)), lambda row: row)
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: ", ".join(map(str, row)))


def recipe_of(row: Row) -> Recipe:
    """What a row trains."""
    _, precision, clipping, accumulate = row
    shape = Shape(layers=4, counting=False)
    return Recipe(shape=shape, steps=2, accumulate=accumulate, precision=precision, optimizer=divided, **CLIPPING[clipping])


class Plain(SingleDeviceStrategy):
    """Plain Lightning, whose mixed precision would be that of another device."""

    def setup_environment(self) -> None:
        super().setup_environment()
        plugin, kind = self.precision_plugin, torch.device(self.root_device).type
        if isinstance(plugin, MixedPrecision):
            plugin.device = kind
            plugin.scaler = None if plugin.scaler is None else torch.amp.GradScaler(kind)


def plain(recipe: Recipe, device: torch.device, folder: Path) -> Outcome:
    """What plain Lightning does on a device; its results are moved to the host."""
    found = run(recipe, Plain(device=device), folder, accelerator=stand_in(device.type), devices=1)
    return Outcome(*tree_map_only(Tensor, Tensor.cpu, (found.losses, found.weights, found.state)))


def expected(row: Row, device: torch.device, folder: Path) -> Outcome:
    """What a training of the row has to end with."""
    recipe = recipe_of(row)
    if recipe.precision == "bf16-true":  # plain Lightning has no fp32 weights beside
        return run(recipe, HeteroOffloadStrategy("host"), folder)
    return plain(recipe, device, folder)
