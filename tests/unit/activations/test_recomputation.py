"""Recomputation repeats what forward did, and refuses a forward that it cannot repeat."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.activations import (
    HOST,
    KEEP,
    RECOMPUTE,
    Block,
    Net,
    assert_same,
    driving,
    gradients,
    plain,
    rule,
)
from torch import Tensor, nn

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.runtime.activations.recompute import RecomputationError


def test_running_statistics_count_every_forward_once() -> None:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Linear(64, 64))

    x = torch.randn(32, 64)
    block, other = make(), make()
    with driving({"b": block}, rule(RECOMPUTE)) as driver:
        for _ in range(2):
            driver.step(lambda: block(x).square().sum())
            other(x).square().sum().backward()
    assert block[1].num_batches_tracked == 2
    for mine, theirs in zip(block.buffers(), other.buffers(), strict=True):
        assert torch.equal(mine, theirs)
    mine, theirs = gradients(block), gradients(other)
    assert all(torch.equal(mine[name], grad) for name, grad in theirs.items())


def counting(block: Block, x: Tensor) -> Tensor:
    """Changes one buffer in place and puts another one in the place of the second; both decide what
    comes out.
    """
    calls = block.calls
    calls.running.add_(1)
    calls.mean = calls.mean * 0.5 + x.detach().mean(0)
    return (block.linear(x) * calls.running.clone()).sub(calls.mean).exp().mul(0.1).tanh()


def with_state(forward: Callable[[Block, Tensor], Tensor]) -> Block:
    torch.manual_seed(3)
    calls = nn.Module()
    calls.register_buffer("running", torch.ones(1))
    calls.register_buffer("mean", torch.zeros(64))
    return Block(forward, linear=nn.Linear(64, 64), calls=calls)


def test_a_block_with_state_of_its_own_is_recomputed_from_the_state_that_forward_found() -> None:
    block, other = with_state(counting), with_state(counting)
    x = torch.randn(32, 64)
    with driving({"b": block}, rule(RECOMPUTE)) as driver:
        for _ in range(2):
            loss = driver.step(lambda: block(block(x)).square().sum())  # two uses, each with buffers of its own
            expected = other(other(x)).square().sum()
            expected.backward()
            assert torch.equal(loss, expected.detach())
            for mine, theirs in zip(block.buffers(), other.buffers(), strict=True):
                assert torch.equal(mine, theirs)
    for mine, theirs in zip(block.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_state_that_begins_to_change_later_is_refused() -> None:
    def late(block: Block, x: Tensor) -> Tensor:
        if len(x) == 32:
            block.calls.running.add_(1)
        return block.linear(x).exp() * block.calls.running

    block = with_state(late)
    with driving({"b": block}, rule(RECOMPUTE)) as driver:
        driver.step(lambda: block(torch.randn(64, 64)).sum())
        driver.begin()
        with pytest.raises(UnsupportedError, match=r"block 'b' changes its buffer 'calls.running' in forward, as its first"):
            block(torch.randn(32, 64))


def test_a_forward_that_does_something_else_is_refused() -> None:
    widths = iter([64, 32])
    block = Block(lambda block, x: block.linear(x[: next(widths)].sin()).exp(), linear=nn.Linear(64, 64))
    with driving({"b": block}, rule(RECOMPUTE)) as driver:
        driver.begin()
        loss = block(torch.randn(64, 64)).sum()
        with pytest.raises(
            RecomputationError, match=r"something else than in forward: saved tensor 0 was \(64, 64\).* and is \(32, 64\)"
        ):
            loss.backward()


def test_operators_that_ran_only_once_spare_nothing_that_follows_them(x: Tensor) -> None:
    """A cache that the first forward filled: what follows is found nowhere by its place, and is
    repeated.
    """
    cache: list[Tensor] = []

    def rotary(block: Block, x: Tensor) -> Tensor:
        y = block.first(x).sin()
        if not cache:
            cache.append(torch.arange(32.0).expand(16, 32).cos() * 2)
        return block.second(y * cache[0]).sin() * 2

    block = Block(rotary, first=nn.Linear(32, 32), second=nn.Linear(32, 32))
    expected = plain(block, lambda: block(x).square().sum())
    cache.clear()
    with driving({"b": block}, rule(RECOMPUTE, KEEP, first=KEEP, second=KEEP, mul=KEEP)) as driver:
        driver.step(lambda: block(x).square().sum())
    found = gradients(block)
    assert all(torch.equal(found[name], grad) for name, grad in expected[1].items())


def test_autocast_is_as_it_was_in_forward(x: Tensor) -> None:
    net = Net()

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return net(x)

    for rules in (rule(RECOMPUTE), rule(HOST, HOST), rule(RECOMPUTE, HOST, addmm=KEEP), rule(KEEP, KEEP, norm=RECOMPUTE)):
        with driving(net.blocks(), rules) as driver:
            assert_same(net, driver, forward)
