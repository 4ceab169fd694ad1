"""Training on a device whose memory the host cannot touch has the bits of plain Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda import stand_in
from support.models import Recipe, Shape, assert_same, run
from support.trainings import PLANS, Row, every_row, expected, plain, recipe_of
from support.verdicts import divided
from torch.utils._python_dispatch import TorchDispatchMode

from foreign import NAME
from foreign.lanes import ForeignBackend
from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.lanes.backends import BACKENDS
from lightning_hetero.runtime.activations import block as activations

FIRST = torch.device(NAME, 0)


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the table of backends, and memory for plans."""
    monkeypatch.setitem(BACKENDS, NAME, ForeignBackend(NAME))
    monkeypatch.setattr(activations, "SMALL_BYTES", 64)


def train(recipe: Recipe, plan: Any, folder: Path) -> Any:
    return run(recipe, HeteroOffloadStrategy(plan, device_memory="4MiB"), folder, accelerator=stand_in(NAME), devices=1)


@every_row
def test_training_has_the_bits_of_the_host(row: Row, allowed: None, tmp_path: Path) -> None:
    assert_same(train(recipe_of(row), PLANS[row[0]], tmp_path), expected(row, FIRST, tmp_path))


def test_dropout_draws_the_numbers_of_the_device(allowed: None, tmp_path: Path) -> None:
    recipe = Recipe(shape=Shape(layers=4, counting=False, dropout=0.2), steps=2)
    on_device, on_host = plain(recipe, FIRST, tmp_path), run(recipe, "auto", tmp_path)
    assert_same(train(recipe, PLANS["mixed"], tmp_path), on_device)
    assert not torch.equal(torch.stack(on_device.losses), torch.stack(on_host.losses))


def test_a_device_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="'foreign:0'"):
        train(Recipe(), "host", tmp_path)


class Waits(TorchDispatchMode):
    """Counts the numbers of the device that the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == NAME
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("plan", ["resident", "disk"])
def test_clipping_and_scaling_wait_for_the_device_as_often_as_plain_lightning(
    plan: str, precision: str, allowed: None, tmp_path: Path
) -> None:
    """Only the verdict on updates that can be taken back is one number more in a step."""
    counts = []
    for steps in (2, 5):
        recipe = Recipe(shape=Shape(layers=4, counting=False), steps=steps, precision=precision, clip=1e3, optimizer=divided)
        with Waits() as ours:
            train(recipe, PLANS[plan], tmp_path)
        with Waits() as theirs:
            plain(recipe, FIRST, tmp_path)
        counts.append(ours.count - theirs.count)
    assert counts[1] - counts[0] == (3 if plan == "disk" else 0)
