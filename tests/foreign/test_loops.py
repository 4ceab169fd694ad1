"""Plain loops on a device whose memory the host cannot touch have the bits that they have alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import SingleDeviceStrategy
from support.cuda import stand_in
from support.models import Model, Shape
from support.plain_loops import LOOPS, OVERLAPS, STEP_BY_STEP, Run, adamw, assert_equal, batches, outcome, sgd, simple
from torch.nn import functional as F

import lightning_hetero
from foreign import NAME
from foreign.lanes import ForeignBackend
from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.lanes import EmulatedDevice
from lightning_hetero.lanes.backends import BACKENDS
from lightning_hetero.loops.fabric import HeteroOffloadFabricStrategy
from lightning_hetero.loops.plain import choices_of, computing_on
from lightning_hetero.runtime.activations import block as activations

FIRST = torch.device(NAME, 0)
SHAPE = Shape(counting=False)


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, NAME, ForeignBackend(NAME))
    monkeypatch.setattr(activations, "SMALL_BYTES", 64)


def alone_and_offloaded(
    loop: Callable[[Run], None], plan: str, overlap: str, device: str | torch.device, make: Any = adamw
) -> tuple[dict[str, Any], dict[str, Any]]:
    def context(model: Any, optimizers: Any) -> Any:
        return lightning_hetero.offload(model, optimizers, plan, overlap=overlap, device=device, device_memory="4MiB")

    return outcome(loop, make, None, SHAPE, FIRST), outcome(loop, make, context, SHAPE, FIRST)


PLANS = ("resident", "host", "disk")
ROWS = [
    (loop, overlaps[number % len(overlaps)], PLANS[(number + number // len(overlaps)) % 3])
    for overlaps, loops in ((OVERLAPS[:2], LOOPS), (OVERLAPS, STEP_BY_STEP))
    for number, loop in enumerate(loops)
]


@pytest.mark.parametrize(("loop", "overlap", "plan"), ROWS)
def test_a_loop_has_the_bits_that_it_has_alone(loop: Callable[[Run], None], overlap: str, plan: str, allowed: None) -> None:
    alone, offloaded = alone_and_offloaded(loop, plan, overlap, FIRST)
    assert_equal(alone, offloaded, grads=overlap != "backward")


def test_an_optimizer_s_own_code_runs_there(allowed: None) -> None:
    assert_equal(*alone_and_offloaded(simple, "resident", "none", NAME, sgd))


def test_a_device_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="'foreign:0'"):
        alone_and_offloaded(simple, "host", "none", FIRST)


def test_a_device_cannot_be_emulated_too(allowed: None) -> None:
    with pytest.raises(ConfigError, match="emulated"):
        computing_on(choices_of("host", device=EmulatedDevice("2MiB")), FIRST)


def test_fabric_computes_there(allowed: None) -> None:
    def train(strategy: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        fabric = Fabric(accelerator=stand_in(NAME), devices=1, strategy=strategy)
        torch.manual_seed(3)
        model = Model(SHAPE)
        module, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
        losses = []
        for tokens, targets in batches(4, fabric.device):
            loss = F.cross_entropy(module(tokens).flatten(0, 1), targets.flatten())
            fabric.backward(loss)
            fabric.clip_gradients(module, optimizer, max_norm=0.05)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, {name: value.cpu().clone() for name, value in module.state_dict().items()}

    losses, weights = train(SingleDeviceStrategy(device=FIRST))
    strategy = HeteroOffloadFabricStrategy("host", device_memory="4MiB")
    ours, got = train(strategy)
    strategy.loop.close()
    assert ours == losses
    assert all(torch.equal(value, got[name]) for name, value in weights.items())
