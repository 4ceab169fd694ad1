"""Training on a device whose memory the host cannot touch has the bits of plain Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from support.cuda import MIXED, StandIn
from support.models import Outcome, Recipe, Shape, assert_same, run
from torch import Tensor
from torch.utils._pytree import tree_map_only

from foreign.lanes import standing_in
from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.runtime.activations import block as activations
from lightning_hetero.runtime.lanes.cuda_device import CudaDevice
from lightning_hetero.strategies import hetero_offload

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
]


class ForeignAccelerator(StandIn):
    """What the Trainer takes for an accelerator with foreign devices."""

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device("foreign", index) for index in range(devices)]


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALL_BYTES", 64)
    monkeypatch.setattr(CudaDevice, "of", standing_in(4 << 20))
    real = hetero_offload.chosen

    def chosen(trainer: Any, accelerator: Any, name: str) -> torch.device:
        return torch.device("foreign", 0) if isinstance(accelerator, ForeignAccelerator) else real(trainer, accelerator, name)

    monkeypatch.setattr(hetero_offload, "chosen", chosen)


def train(recipe: Recipe, plan: Any, folder: Path) -> Any:
    return run(recipe, HeteroOffloadStrategy(plan), folder, accelerator=ForeignAccelerator(), devices=1)


def plain(recipe: Recipe, folder: Path) -> Any:
    """Plain Lightning on the same device; its results are moved to the host."""
    strategy = SingleDeviceStrategy(device=torch.device("foreign", 0))
    found = run(recipe, strategy, folder, accelerator=ForeignAccelerator(), devices=1)
    return Outcome(*tree_map_only(Tensor, Tensor.cpu, (found.losses, found.weights, found.state)))


@pytest.mark.parametrize(("plan", "precision", "clipping", "accumulate"), COVER)
def test_training_has_the_bits_of_the_host(
    plan: str, precision: str, clipping: dict[str, Any], accumulate: int, allowed: None, tmp_path: Path
) -> None:
    shape = Shape(layers=4, counting=False)
    recipe = Recipe(shape=shape, steps=2, accumulate=accumulate, precision=precision, **clipping)
    got = train(recipe, PLANS[plan], tmp_path)
    # In 16 bits plain Lightning has no fp32 weights beside, so the reference is training on the
    # CPU.
    expected = plain(recipe, tmp_path) if precision == "32-true" else run(recipe, HeteroOffloadStrategy("host"), tmp_path)
    assert_same(got, expected)


def test_dropout_draws_the_numbers_of_the_device(allowed: None, tmp_path: Path) -> None:
    recipe = Recipe(shape=Shape(layers=4, counting=False, dropout=0.2), steps=2)
    on_device, on_host = plain(recipe, tmp_path), run(recipe, "auto", tmp_path)
    assert_same(train(recipe, PLANS["mixed"], tmp_path), on_device)
    assert not torch.equal(torch.stack(on_device.losses), torch.stack(on_host.losses))


def test_a_device_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="'foreign:0'"):
        train(Recipe(), "host", tmp_path)
