"""Training on a device whose memory the host cannot touch has the bits of plain Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from support.cuda import MIXED, stand_in
from support.models import Outcome, Recipe, Shape, assert_same, run
from support.verdicts import divided
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from foreign import NAME
from foreign.lanes import ForeignBackend
from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.runtime.activations import block as activations
from lightning_hetero.runtime.lanes.backends import BACKENDS

PLANS = {"resident": "resident", "host": "host", "disk": "disk", "mixed": MIXED}
BY_VALUE: dict[str, Any] = {"clip": 0.01, "clip_by": "value"}
COVER = [  # pairs of plan, precision, clipping and accumulation
    ("resident", "32-true", {}, 1),
    ("resident", "bf16-true", {"clip": 0.3}, 2),
    ("resident", "32-true", BY_VALUE, 2),
    ("host", "32-true", {"clip": 0.3}, 2),
    ("host", "bf16-true", {}, 1),
    ("host", "bf16-true", BY_VALUE, 1),
    ("disk", "32-true", {"clip": 0.3}, 1),
    ("disk", "bf16-true", BY_VALUE, 2),
    ("disk", "32-true", {}, 2),
    ("mixed", "32-true", {"clip": 0.3}, 2),
    ("mixed", "bf16-true", {}, 2),
    ("mixed", "32-true", BY_VALUE, 1),
    ("mixed", "bf16-true", {"clip": 0.3}, 1),
    ("resident", "bf16-mixed", {"clip": 0.3}, 1),
    ("resident", "16-mixed", BY_VALUE, 2),
    ("host", "bf16-mixed", BY_VALUE, 2),
    ("host", "16-mixed", {"clip": 0.3}, 1),
    ("disk", "bf16-mixed", {}, 1),
    ("disk", "16-mixed", {"clip": 0.3}, 2),
    ("mixed", "bf16-mixed", {"clip": 0.3}, 2),
    ("mixed", "16-mixed", {}, 1),
]


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the table of backends, and memory for plans."""
    monkeypatch.setitem(BACKENDS, NAME, ForeignBackend(NAME))
    monkeypatch.setattr(activations, "SMALL_BYTES", 64)


def train(recipe: Recipe, plan: Any, folder: Path) -> Any:
    return run(recipe, HeteroOffloadStrategy(plan, device_memory="4MiB"), folder, accelerator=stand_in(NAME), devices=1)


class OnForeign(SingleDeviceStrategy):
    """Plain Lightning, whose mixed precision would be that of another device."""

    def setup_environment(self) -> None:
        super().setup_environment()
        plugin = self.precision_plugin
        if isinstance(plugin, MixedPrecision):
            plugin.device = NAME
            plugin.scaler = None if plugin.scaler is None else torch.amp.GradScaler(NAME)


def plain(recipe: Recipe, folder: Path) -> Any:
    """Plain Lightning on the same device; its results are moved to the host."""
    strategy = OnForeign(device=torch.device(NAME, 0))
    found = run(recipe, strategy, folder, accelerator=stand_in(NAME), devices=1)
    return Outcome(*tree_map_only(Tensor, Tensor.cpu, (found.losses, found.weights, found.state)))


@pytest.mark.parametrize(("plan", "precision", "clipping", "accumulate"), COVER)
def test_training_has_the_bits_of_the_host(
    plan: str, precision: str, clipping: dict[str, Any], accumulate: int, allowed: None, tmp_path: Path
) -> None:
    shape = Shape(layers=4, counting=False)
    recipe = Recipe(shape=shape, steps=2, accumulate=accumulate, precision=precision, optimizer=divided, **clipping)
    got = train(recipe, PLANS[plan], tmp_path)
    # With weights in 16 bits plain Lightning has no fp32 ones, so the reference trains on the CPU.
    expected = run(recipe, HeteroOffloadStrategy("host"), tmp_path) if precision == "bf16-true" else plain(recipe, tmp_path)
    assert_same(got, expected)


def test_dropout_draws_the_numbers_of_the_device(allowed: None, tmp_path: Path) -> None:
    recipe = Recipe(shape=Shape(layers=4, counting=False, dropout=0.2), steps=2)
    on_device, on_host = plain(recipe, tmp_path), run(recipe, "auto", tmp_path)
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
            plain(recipe, tmp_path)
        counts.append(ours.count - theirs.count)
    assert counts[1] - counts[0] == (3 if plan == "disk" else 0)
