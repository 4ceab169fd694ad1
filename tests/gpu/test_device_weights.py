"""Weights on a real accelerator: they come, go, and come back elsewhere while autograd waits for
its backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from support.device import World, run, world
from support.gpu import DEVICE, needs_a_device
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from lightning_hetero.errors import DeviceMemoryError
from lightning_hetero.ir.plan import BlockPlan, Tier
from lightning_hetero.ir.schedule import Lane
from lightning_hetero.lanes import Lanes
from lightning_hetero.runtime.device import DeviceSide, WeightRef
from lightning_hetero.store.live.blocks import Block
from lightning_hetero.units import MIB

pytestmark = needs_a_device

BELOW = BlockPlan(name="*", weights=Tier.HOST)
RESIDENT = BlockPlan(name="*", weights=Tier.DEVICE)


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    from lightning_hetero.lanes.streams import StreamLanes

    made = StreamLanes(DEVICE, memory_bytes=MIB, poison=True)
    try:
        yield made
        made.drain()
    finally:
        made.close()


@pytest.fixture
def net() -> Iterator[World]:
    torch.manual_seed(3)
    root = nn.Sequential(nn.Linear(37, 53), nn.Linear(53, 29))
    with world(root, torch.optim.AdamW(root.parameters(), fused=True)) as made:
        yield made


def bring(lanes: Lanes, side: DeviceSide, block: Block) -> None:
    lanes.compute_waits([run(lanes, Lane.H2D, partial(side.weights.upload, block))])
    side.weights.bind(block)


def take_away(lanes: Lanes, side: DeviceSide, block: Block) -> None:
    side.weights.unbind(block)
    run(lanes, Lane.H2D, partial(side.weights.free, block), [lanes.mark()]).wait()


def test_weights_are_on_the_device_from_upload_to_release(net: World, lanes: Lanes) -> None:
    before = {name: p.detach().clone() for name, p in net.root.named_parameters()}
    side = net.on(lanes, BELOW)
    for _ in range(3):  # the same memory is used again
        for block in net.blocks:
            bring(lanes, side, block)
        for name, param in net.root.named_parameters():
            assert param.device.type == DEVICE
            assert torch.equal(param.detach().cpu(), before[name])
        for block in net.blocks:
            take_away(lanes, side, block)
        assert lanes.memory().used_bytes == 0


def test_backward_reads_weights_where_they_are_then(net: World, lanes: Lanes) -> None:
    torch.manual_seed(5)
    reference = nn.Sequential(nn.Linear(37, 53), nn.Linear(53, 29)).to(DEVICE)
    reference.load_state_dict(net.root.state_dict())
    x = torch.randn(8, 37, device=DEVICE, requires_grad=True)
    F.gelu(reference(x)).sum().backward()
    expected_x, x.grad = x.grad, None
    side = net.on(lanes, BELOW)
    for block in net.blocks:
        bring(lanes, side, block)
    with saved_tensors_hooks(lambda t: side.weights.reference(t) or t, lambda s: s.view() if isinstance(s, WeightRef) else s):
        loss = F.gelu(net.root(x)).sum()
    for block in net.blocks:
        take_away(lanes, side, block)
    spacer = lanes.memory().take(4096, "something else")
    for block in reversed(net.blocks):
        bring(lanes, side, block)
    loss.backward()
    lanes.memory().give(spacer)
    assert expected_x is not None
    assert x.grad is not None
    assert torch.equal(x.grad, expected_x)
    for param, other in zip(net.root.parameters(), reference.parameters(), strict=True):
        assert _same(param.grad, other.grad)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    assert a is not None
    assert b is not None
    return torch.equal(a, b)


def test_a_device_that_is_too_small_names_the_block(net: World) -> None:
    from lightning_hetero.lanes.streams import StreamLanes

    lanes = StreamLanes(DEVICE, memory_bytes=512)
    try:
        with pytest.raises(DeviceMemoryError, match="weights of 0"):
            net.on(lanes, RESIDENT)
    finally:
        lanes.close()
