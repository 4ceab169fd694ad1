"""Random blocks under random policies on lanes that dawdle at random: losses and gradients have the
bits of plain autograd.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.activations import driving, gradients, profiled
from support.lanes import InlineLanes
from torch import Tensor, nn

from lightning_hetero.ir.plan import BlockPlan, Saved
from lightning_hetero.lanes import EmulatedDevice, EmulatedLanes, Lanes

WIDTH = 32
KINDS = ("linear", "norm", "gelu", "relu_", "dropout", "attention", "gate", "sum_", "twice")


class Random(nn.Module):
    """A block of operators in any order, each on top of a residual if it says so."""

    def __init__(self, kinds: list[tuple[str, bool]]) -> None:
        super().__init__()
        self.kinds = kinds
        made = {
            "linear": lambda: nn.Linear(WIDTH, WIDTH),
            "norm": lambda: nn.LayerNorm(WIDTH),
            "attention": lambda: nn.Linear(WIDTH, 3 * WIDTH),
            "gate": lambda: nn.Linear(WIDTH, 2 * WIDTH),
            "twice": lambda: nn.Linear(WIDTH, WIDTH),
        }
        self.parts = nn.ModuleList(made.get(kind, nn.Identity)() for kind, _ in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for (kind, residual), part in zip(self.kinds, self.parts, strict=True):
            y = self.step(kind, part, x)
            x = x + y if residual else y
        return x

    def step(self, kind: str, part: nn.Module, x: Tensor) -> Tensor:
        match kind:
            case "gelu":
                return F.gelu(x)
            case "relu_":
                return (x * 1.5).relu_()
            case "dropout":
                return F.dropout(x, 0.2)
            case "attention":
                q, k, v = part(x).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
                return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
            case "gate":
                a, b = part(x).chunk(2, dim=-1)
                return a * b.sigmoid()
            case "sum_":
                y = x * 2
                y += x
                return y
            case "twice":
                return part(part(x).tanh())
            case _:
                return part(x)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    kinds=st.lists(st.lists(st.tuples(st.sampled_from(KINDS), st.booleans()), min_size=1, max_size=5), min_size=1, max_size=3),
    data=st.data(),
)
def test_no_policy_of_any_operator_changes_a_bit(kinds: list[list[tuple[str, bool]]], data: st.DataObject) -> None:
    torch.manual_seed(0)
    blocks: dict[str, nn.Module] = {f"blocks.{i}": Random(rows) for i, rows in enumerate(kinds)}
    net = nn.Sequential(*blocks.values(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(4, 16, WIDTH, requires_grad=data.draw(st.booleans(), label="input needs a gradient"))
    bf16 = data.draw(st.booleans(), label="autocast")

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            return net(x).float().square().mean()

    def step(run: Any) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        torch.manual_seed(1)
        x.grad = None
        loss = run()
        return loss, gradients(net), x.grad

    def plain() -> Tensor:
        loss = forward()
        loss.backward()
        return loss.detach()

    expected = step(plain)
    policies, kept = st.sampled_from(list(Saved)[:3]), st.sampled_from([Saved.KEEP, Saved.SWAP_HOST])
    names = {block.name: [o.name for o in block.operators] for block in profiled(net, blocks, forward)}
    plans = {
        name: BlockPlan(
            name=name,
            saved=data.draw(policies, label=f"{name}: saved"),
            boundary=data.draw(kept, label=f"{name}: boundary"),
            operators={o: data.draw(policies, label=f"{name}: {o}") for o in operators if data.draw(st.booleans())},
        )
        for name, operators in names.items()
    }
    lanes: Lanes = InlineLanes(poison=True)
    if data.draw(st.booleans(), label="emulated"):
        lanes = EmulatedLanes(EmulatedDevice(memory="1MiB", seed=data.draw(st.integers(0, 99), label="seed")), poison=True)
    with driving(blocks, plans.__getitem__, lanes=lanes) as driver:
        for _ in range(2):
            come = data.draw(st.booleans(), label="sent for")
            found = step(lambda come=come: driver.step(forward, come=come))
            assert torch.equal(found[0], expected[0])
            assert found[1].keys() == expected[1].keys()
            assert all(torch.equal(found[1][name], grad) for name, grad in expected[1].items())
            assert (found[2] is None) == (expected[2] is None)
            assert found[2] is None or expected[2] is None or torch.equal(found[2], expected[2])
