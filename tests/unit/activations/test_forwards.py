"""Forwards of every form: nested values, blocks in blocks, blocks used twice, checkpointing,
compiled blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.activations import (
    HOST,
    KEEP,
    RECOMPUTE,
    RULES,
    Block,
    Layer,
    assert_same,
    driving,
    emulated,
    profiled,
    rule,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.ir.plan import Saved
from lightning_hetero.runtime.activations.recompute import RecomputationError


@dataclass
class Output:
    hidden: Tensor
    extra: dict[str, Any]


def _nested(block: Block, x: Tensor, *, scale: float, others: dict[str, Tensor]) -> Output:
    y = block.linear(x) * others["factor"]
    return Output(hidden=y.tanh() * scale, extra={"all": (y, [y.sin(), "text", None])})


@pytest.mark.parametrize("rules", [rule(RECOMPUTE, HOST), rule(HOST, HOST), rule(RECOMPUTE, KEEP, linear=KEEP)])
def test_nested_arguments_and_results(rules: Any) -> None:
    block = Block(_nested, linear=nn.Linear(64, 64))
    x, factor = torch.randn(64, 64), torch.randn(64, 64)

    def forward() -> Tensor:
        out = block(x, scale=2.0, others={"factor": factor})
        y, (z, _, _) = out.extra["all"]
        return out.hidden.sum() + y.square().sum() + z.sum()

    with driving({"b": block}, rules) as driver:
        assert_same(block, driver, forward)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_a_block_that_is_used_twice(x: Tensor, rules: Any) -> None:
    layer = Layer()
    with driving({"b": layer}, rules, lanes=emulated()) as driver:
        assert_same(layer, driver, lambda: layer(layer(x)).square().mean())


def test_names_continue_where_a_block_is_used_twice(x: Tensor) -> None:
    block = Block(lambda block, x: x.exp().sin())
    x.requires_grad_()
    profile = profiled(block, {"b": block}, lambda: block(block(x)).sum())
    assert [o.name for o in profile[0].operators] == ["exp", "exp.1"]
    with driving({"b": block}, rule(KEEP, KEEP, **{"exp.1": HOST})) as driver:
        for _ in range(2):  # every batch counts anew
            driver.begin()
            y = block(x)
            assert driver.moved("b") == 0
            z = block(y)
            assert driver.moved("b") == x.nbytes
            z.sum().backward()


@pytest.mark.parametrize("inner", [KEEP, RECOMPUTE, HOST])
@pytest.mark.parametrize("outer", [KEEP, RECOMPUTE, HOST])
def test_blocks_inside_each_other(x: Tensor, outer: Saved, inner: Saved) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.inner, self.after = nn.Linear(32, 32), Layer(), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.after(self.inner(self.before(x).sin()).sin()).sin()

    net = Outer()
    rules = {"net": rule(outer, KEEP, sin=KEEP), "net.inner": rule(inner, inner if inner is HOST else KEEP, norm=KEEP)}
    with driving({"net": net, "net.inner": net.inner}, lambda name: rules[name](name)) as driver:
        assert_same(net, driver, lambda: net(x).square().mean())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("rules", [rule(RECOMPUTE), rule(HOST, HOST), rule(RECOMPUTE, HOST, norm=KEEP)])
def test_checkpointing_inside_a_block(x: Tensor, rules: Any, reentrant: bool) -> None:
    def forward(block: Block, x: Tensor) -> Tensor:
        return checkpoint(block.second, block.first(x), use_reentrant=reentrant)

    block = Block(forward, first=Layer(), second=Layer())
    with driving({"b": block}, rules) as driver:
        assert_same(block, driver, lambda: block(x).square().mean())


class Twice(torch.autograd.Function):
    """Saves two tensors of its own and asks for them twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.sin())
        return x.sin() * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, sine = ctx.saved_tensors
        _, again = ctx.saved_tensors
        return grad * (sine + again) / 2 + grad * x * x.cos()


@pytest.mark.parametrize("rules", [rule(), rule(RECOMPUTE, HOST), rule(HOST, HOST), rule(RECOMPUTE, KEEP, linear=KEEP, sin=HOST)])
def test_functions_with_saved_tensors_of_their_own(x: Tensor, rules: Any) -> None:
    block = Block(lambda block, x: Twice.apply(block.linear(x)), linear=nn.Linear(32, 32))
    with driving({"b": block}, rules) as driver:
        assert_same(block, driver, lambda: block(x).square().sum())


def test_compiled_blocks(x: Tensor) -> None:
    """What compiled code saves is followed; it is recomputed where the block itself was compiled,
    else refused by name.
    """
    block = Block(lambda block, x: block.linear(x).sin().exp() * 2, linear=nn.Linear(32, 32))
    compiled = torch.compile(block, backend="aot_eager")

    def forward() -> Tensor:
        return compiled(x).square().sum()

    for rules in (rule(RECOMPUTE), rule(HOST, HOST)):
        with driving({"b": compiled}, rules) as driver:
            assert_same(block, driver, forward)
    with driving({"b": block}, rule(HOST, HOST)) as driver:
        assert_same(block, driver, forward)
    with driving({"b": block}, rule(RECOMPUTE)) as driver, pytest.raises(RecomputationError, match=r"block 'b' .* one by one"):
        driver.step(forward)


def test_torch_func_is_refused_by_name(x: Tensor) -> None:
    block = Block(lambda block, x: block.linear(x).sin(), linear=nn.Linear(32, 32))
    with driving({"b": block}, rule(HOST)) as driver:
        driver.begin()
        with pytest.raises(UnsupportedError, match=r"block 'b': activations cannot be followed here.*torch.func"):
            torch.func.grad(lambda x: block(x).sum())(x)
        driver.begin()
        with torch.no_grad():
            assert block(x).shape == x.shape  # nothing is left behind
