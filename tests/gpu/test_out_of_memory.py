"""A GPU that is too small for a batch: what autograd's own threads raise, and what torch's
allocator does.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import LitModel, Recipe, Shape, assert_same, on_host, run
from support.out_of_memory import FAULTS, Once, failing
from torch import Tensor

from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.errors import OutOfMemoryBudgetError
from lightning_hetero.ir.plan import Saved
from lightning_hetero.lanes.backends import BACKENDS
from lightning_hetero.lanes.stream_device import spare_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")

GPU: dict[str, Any] = {"accelerator": "cuda", "devices": 1}


@pytest.mark.parametrize("name", FAULTS)
def test_wherever_it_happens_the_step_is_repeated(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, plan, faults = FAULTS[name]
    plain, _, expected = failing(recipe, plan, [], tmp_path, monkeypatch, on=GPU)
    module, strategy, got = failing(recipe, plan, faults, tmp_path, monkeypatch, on=GPU)
    assert_same(on_host(got), on_host(expected))
    assert not module.faults
    assert module.trainer.callback_metrics == plain.trainer.callback_metrics
    assert len({row.saved for row in strategy.plan.blocks}) > 1


class Wide(Once):
    """Batches whose activations take more than everything else."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss([batch[0].repeat(8192, 1)])


@pytest.fixture
def limited() -> Iterator[Any]:
    """Lets this process have so many bytes of the GPU."""

    def limit(num_bytes: int) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(num_bytes / torch.cuda.get_device_properties(0).total_memory)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_memory_that_torch_can_still_allocate(limited: Any) -> None:
    limited(4 << 30)
    device, piece = torch.device("cuda", 0), 2 << 20  # as the allocator cuts
    held = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    spare = spare_bytes(device, BACKENDS["cuda"])
    del held
    assert spare_bytes(device, BACKENDS["cuda"]) == spare + (1 << 30)  # the allocator keeps it
    whole = torch.empty((spare + (1 << 30)) // piece * piece - piece, dtype=torch.uint8, device=device)
    assert 0 <= spare_bytes(device, BACKENDS["cuda"]) < 2 * piece
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(8 * piece, dtype=torch.uint8, device=device)
    del whole


def test_a_real_lack_of_memory(limited: Any, tmp_path: Path) -> None:
    recipe = Recipe(shape=Shape(layers=6, dropout=0.2, counting=False), steps=2)
    whole = HeteroOffloadStrategy("resident")
    expected = run(recipe, whole, tmp_path, module_class=Wide, **GPU)
    peak = whole.memory_report()["device_peak_bytes"]
    limited(peak * 3 // 4)
    strategy = HeteroOffloadStrategy("resident")
    got = run(recipe, strategy, tmp_path, module_class=Wide, **GPU)
    assert_same(on_host(got), on_host(expected))
    assert strategy.plan is not None
    assert any(row.saved is not Saved.KEEP for row in strategy.plan.blocks)


def test_no_smaller_plan_is_left(limited: Any, tmp_path: Path) -> None:
    """A batch whose inputs alone are too large."""

    class Hopeless(LitModel):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + torch.empty(1 << 30, device=self.device)[0] * 0

    limited(1 << 30)
    with pytest.raises(OutOfMemoryBudgetError, match=r"nothing left to give up: .*4\.00 GiB.*Use a smaller batch") as refusal:
        run(Recipe(), HeteroOffloadStrategy("resident"), tmp_path, module_class=Hopeless, **GPU)
    assert refusal.value.tier == "device"


def test_a_plan_that_cannot_fit_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    before = torch.cuda.memory_allocated()
    with pytest.raises(OutOfMemoryBudgetError, match=r"of device memory; .* may be used"):
        run(Recipe(), HeteroOffloadStrategy("resident", device_memory="200KiB"), tmp_path, **GPU)
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + (64 << 20)  # workspaces of libraries
