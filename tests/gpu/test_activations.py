"""What becomes of what forward saves, on a GPU: every policy gives the bits of plain autograd
there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.activations import Layer, driving, gradients, rule
from support.gpu import DEVICE, needs_a_device, only_on_a_gpu
from torch import Tensor, nn

from lightning_hetero.ir.plan import Saved
from lightning_hetero.lanes import Lanes
from lightning_hetero.units import MIB

pytestmark = needs_a_device

KEEP, RECOMPUTE, HOST = Saved.KEEP, Saved.RECOMPUTE, Saved.SWAP_HOST
RULES = {
    "keep": rule(),
    "recompute": rule(RECOMPUTE),
    "recompute from a swapped input": rule(RECOMPUTE, HOST),
    "swap": rule(HOST, HOST),
    "recompute but qkv": rule(RECOMPUTE, HOST, qkv=HOST),
    "swap but a sum": rule(HOST, KEEP, add=RECOMPUTE, mlp__1=KEEP),
}


class Net(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dropout=0.2) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def device_lanes() -> Lanes:
    from lightning_hetero.lanes.streams import StreamLanes

    return StreamLanes(DEVICE, memory_bytes=MIB, poison=True)


@pytest.mark.parametrize("issue", [True, False], ids=["issued", "on demand"])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_no_policy_changes_a_bit(rules: Any, issue: bool) -> None:
    torch.manual_seed(0)
    net, x = Net().to(DEVICE), torch.randn(4, 16, 32, device=DEVICE)
    blocks = {f"layers.{i}": layer for i, layer in enumerate(net.layers)}
    with driving(blocks, rules, lanes=device_lanes(), issue=issue) as driver:
        driver.detach()
        torch.manual_seed(7)
        loss = net(x)
        loss.backward()
        expected, generator = gradients(net), getattr(torch, DEVICE).get_rng_state()
        driver.attach()
        for _ in range(3):  # buffers are lent again
            torch.manual_seed(7)
            assert torch.equal(driver.step(lambda: net(x)), loss.detach())
            found = gradients(net)
            assert found.keys() == expected.keys()
            assert [name for name, grad in expected.items() if not torch.equal(found[name], grad)] == []
            assert torch.equal(getattr(torch, DEVICE).get_rng_state(), generator)


@only_on_a_gpu
def test_swapped_activations_leave_the_device_until_backward() -> None:
    torch.manual_seed(0)
    net, x = Net().to(DEVICE), torch.randn(64, 64, 32, device=DEVICE)
    blocks = {f"layers.{i}": layer for i, layer in enumerate(net.layers)}
    held = {}
    for name, rules in (("keep", RULES["keep"]), ("swap", RULES["swap"])):
        with driving(blocks, rules, lanes=device_lanes()) as driver:
            driver.begin()
            before = torch.cuda.memory_allocated()
            loss = net(x)
            driver.out()
            torch.cuda.synchronize()
            held[name] = torch.cuda.memory_allocated() - before
            driver.come()
            loss.backward()
            net.zero_grad()
            del loss
    assert held["swap"] < held["keep"] / 2
