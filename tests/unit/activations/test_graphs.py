"""Graphs that are used twice, in part, or not at all."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from support.activations import (
    HOST,
    KEEP,
    RECOMPUTE,
    Block,
    Layer,
    Net,
    assert_same,
    driving,
    emulated,
    gradients,
    hooks,
    plain,
    rule,
)
from torch import Tensor, nn

from lightning_hetero.ir.plan import BlockPlan
from lightning_hetero.profiling.operators import Addresses, OperatorRecorder

GRAPHS = {"recompute": rule(RECOMPUTE, HOST), "swap": rule(HOST, HOST), "mixed": rule(RECOMPUTE, KEEP, qkv=HOST, norm=KEEP)}


@pytest.mark.parametrize("rules", GRAPHS.values(), ids=GRAPHS.keys())
def test_gradients_of_gradients(rules: Any) -> None:
    block = Block(lambda block, x: block.linear(x).sin() * x.exp(), linear=nn.Linear(64, 64))
    x = torch.randn(32, 64, requires_grad=True)

    def penalty() -> Tensor:
        (grad,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
        return grad.square().sum()

    with driving({"b": block}, rules, lanes=emulated()) as driver:
        assert_same(block, driver, penalty)


@pytest.mark.parametrize("rules", GRAPHS.values(), ids=GRAPHS.keys())
def test_two_backwards_through_one_graph_and_one_through_a_part_of_it(x: Tensor, rules: Any) -> None:
    net = Net()
    weight = net.layers[1].qkv.weight
    loss = net(x)
    expected = plain(net, lambda: net(x))
    del loss
    with driving(net.blocks(), rules, lanes=emulated()) as driver:
        torch.manual_seed(7)
        driver.begin()
        loss = net(x)
        driver.out()
        (part,) = torch.autograd.grad(loss, weight, retain_graph=True)  # before anything was sent for
        assert torch.equal(part, expected[1]["layers.1.qkv.weight"])
        for last in (False, True):
            loss.backward(retain_graph=not last)
            found = gradients(net)
            assert all(torch.equal(found[name], grad) for name, grad in expected[1].items())


@pytest.mark.parametrize("rules", [*GRAPHS.values(), rule(KEEP)])
def test_a_graph_that_is_thrown_away_takes_everything_with_it(x: Tensor, rules: Any) -> None:
    """At once, without the collector of cycles; its host memory is lent to the next."""
    net = Net()
    gc.collect()
    gc.disable()
    try:
        with driving(net.blocks(), rules, lanes=emulated()) as driver:
            recorder = OperatorRecorder(Addresses([]), lambda: 0.0)
            for _ in range(3):
                driver.begin()
                with recorder:
                    loss = net(x)
                driver.out()
                del loss
                driver.lanes.drain()
            driver.begin()
            assert [recorder.made[n].num_bytes for n in recorder.alive() if recorder.made[n].num_bytes >= 4096] == []
            assert driver.num_buffers() <= len(driver.blocks)
    finally:
        gc.enable()


def test_backward_leaves_nothing_behind(x: Tensor) -> None:
    net = Net()
    gc.collect()
    gc.disable()
    try:
        for rules in GRAPHS.values():
            with driving(net.blocks(), rules, lanes=emulated()) as driver:
                recorder = OperatorRecorder(Addresses([]), lambda: 0.0)
                with recorder:
                    driver.step(lambda: net(x))
                gradients(net)
                driver.lanes.drain()
                driver.begin()
                assert [recorder.made[n].num_bytes for n in recorder.alive() if recorder.made[n].num_bytes >= 4096] == []
    finally:
        gc.enable()


def test_an_exception_in_a_forward_leaves_nothing_open(x: Tensor) -> None:
    class Stop(Exception):
        pass

    def fails(block: Block, x: Tensor) -> Tensor:
        block.inner(x)
        raise Stop

    block = Block(fails, inner=Layer())
    with driving({"b": block, "b.inner": block.inner}, rule(RECOMPUTE, KEEP, norm=KEEP)) as driver:
        driver.begin()
        with pytest.raises(Stop):
            block(x)
        assert driver.activations.running == []
        assert_same(block.inner, driver, lambda: block.inner(x).square().mean())


def test_an_interrupted_forward_is_cleared_up_by_the_next_batch(x: Tensor) -> None:
    """Hooks that are always called are not called for what is no ``Exception``."""

    def interrupted(block: Block, x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    block, layer = Block(interrupted), Layer()
    with driving({"b": block, "c": layer}, rule(HOST, HOST, norm=KEEP)) as driver:
        driver.begin()
        with pytest.raises(KeyboardInterrupt):
            block(x)
        assert_same(layer, driver, lambda: layer(x).square().mean())


def test_without_grad_nothing_is_followed(x: Tensor) -> None:
    net = Net()
    with driving(net.blocks(), rule(HOST, HOST, norm=RECOMPUTE)) as driver:
        driver.begin()
        with torch.no_grad():
            net(x)
        assert driver.moved("layers.0") == 0
        assert driver.activations.running == []


def test_a_block_that_keeps_everything_where_it_is_has_no_hooks(x: Tensor) -> None:
    layer, asked = Layer(), []
    with driving({}, rule(), weights=asked.append) as driver:
        for moves in (False, True):
            handles = hooks(layer, driver.activations.block("b", layer, BlockPlan(name="b"), weights_move=moves))
            layer(x)
            for handle in handles:
                handle.remove()
            assert bool(asked) is moves
