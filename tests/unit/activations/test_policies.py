"""Every policy leaves the bits of a step as they are, and moves what the plan says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.activations import (
    ATTENTION,
    HOST,
    KEEP,
    RECOMPUTE,
    RULES,
    Layer,
    Net,
    assert_same,
    driving,
    emulated,
    profiled,
    rule,
)
from support.lanes import InlineLanes
from torch import Tensor

from lightning_hetero.ir.activations import saved_bytes
from lightning_hetero.ir.plan import BlockPlan
from lightning_hetero.lanes import Lanes
from lightning_hetero.profiling.operators import Addresses, OperatorRecorder


@pytest.mark.parametrize("lanes", [lambda: InlineLanes(poison=True), emulated], ids=["inline", "emulated"])
@pytest.mark.parametrize("issue", [True, False], ids=["issued", "on demand"])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_no_policy_changes_a_bit(x: Tensor, rules: Any, issue: bool, lanes: Callable[[], Lanes]) -> None:
    net = Net()
    with driving(net.blocks(), rules, lanes=lanes(), issue=issue) as driver:
        assert_same(net, driver, lambda: net(x))


def test_operators_of_a_profile_are_found_again(x: Tensor) -> None:
    """Each of them swapped alone moves the bytes that the profile gives it, in the first block and
    in a later one.
    """
    net = Net()
    profile = profiled(net, net.blocks(), lambda: net(x))
    assert {"norm", "qkv", ATTENTION, "mlp.0", "mlp.1", "add"} <= {o.name for o in profile[0].operators}
    assert profile[0].operators == profile[1].operators  # the sum before the first block is none of its own
    for operator in profile[0].operators:
        if operator.bytes < 4096:
            continue
        with driving(net.blocks(), rule(KEEP, KEEP, **{operator.name: HOST})) as driver:
            driver.step(lambda: net(x))
            net.zero_grad()
            *moved, head = (driver.moved(name) for name in driver.blocks)
        small = 512 if operator.name in ("norm", "mlp.0", ATTENTION) else 0  # deviations, sums of exponentials: they stay
        assert moved == [operator.bytes - small] * 2, operator.name
        assert head == 0


def test_moved_bytes_equal_the_plans_sums(x: Tensor) -> None:
    net = Net()
    profile = profiled(net, net.blocks(), lambda: net(x))
    for rules in (
        rule(HOST, HOST),
        rule(HOST, KEEP),
        rule(KEEP, HOST),
        rule(RECOMPUTE, HOST, qkv=HOST),
        rule(HOST, KEEP, qkv=KEEP),
    ):
        with driving(net.blocks(), rules) as driver:
            driver.step(lambda: net(x))
            for block in profile:
                expected = saved_bytes(block, rules(block.name)).to_host
                small = sum(o.bytes for o in block.operators if o.bytes < 4096) + 4096  # storages that are not worth it
                assert expected - small <= driver.moved(block.name) <= expected


def test_tensors_leave_one_by_one_and_return_in_one_copy_per_block(x: Tensor) -> None:
    """Batched swap-in (ProTrain, figure 1, G): the link is not asked for many small transfers in
    backward.
    """
    net = Net()

    class Counting(InlineLanes):
        def __init__(self) -> None:
            super().__init__(poison=True)
            self.copies: list[int] = []

        def copy(self, target: Tensor, source: Tensor) -> None:
            self.copies.append(target.numel())
            super().copy(target, source)

    lanes = Counting()
    with driving(net.blocks(), rule(HOST, HOST), lanes=lanes) as driver:
        driver.begin()
        loss = net(x)
        driver.out()
        out, lanes.copies = lanes.copies, []
        moved = [driver.moved(name) for name in driver.blocks]
        loss.backward()
        assert len(out) > 10  # tensors of two layers
        assert sum(out) == sum(moved)
        assert sorted(lanes.copies) == sorted(n for n in moved if n)
        net.zero_grad()


def test_swapped_tensors_are_not_on_the_device_between_forward_and_backward(x: Tensor) -> None:
    """Bytes of storages alive at the end of forward: blocks' inputs, q, k and v, or what plain
    forward leaves.
    """
    net = Net(layers=3)
    hidden = x.numel() * 4

    def left(rules: Callable[[str], BlockPlan] | None) -> int:
        recorder = OperatorRecorder(Addresses([]), lambda: 0.0)
        if rules is None:
            with recorder:
                loss = net(x)
            return alive(recorder, loss)
        with driving(net.blocks(), rules, lanes=emulated()) as driver:
            driver.begin()
            with recorder:
                loss = net(x)
            driver.out()
            return alive(recorder, loss)

    def alive(recorder: OperatorRecorder, loss: Tensor) -> int:
        return sum(recorder.made[n].num_bytes for n in recorder.alive() if recorder.made[n].num_bytes >= 4096)

    everything, inputs = left(None), 4 * hidden  # three layers and the head
    assert left(rule(KEEP)) == everything
    assert left(rule(RECOMPUTE)) == left(rule(HOST)) == inputs
    assert left(rule(RECOMPUTE, HOST)) == left(rule(HOST, HOST)) == 0
    assert left(rule(RECOMPUTE, KEEP, qkv=KEEP)) == inputs + 3 * 3 * hidden
    assert left(rule(KEEP, KEEP, qkv=HOST)) == everything - 3 * 3 * hidden


def test_a_recomputation_ends_if_nothing_is_missing_and_spares_what_is_there(x: Tensor) -> None:
    net = Net(layers=1, make=lambda: Layer(dropout=0.0))

    def repeated(rules: Callable[[str], BlockPlan]) -> list[str]:
        recorder = OperatorRecorder(Addresses([]), lambda: 0.0)
        with driving({"layers.0": net.layers[0]}, rules) as driver:
            driver.begin()
            loss = net(x)
            with recorder:
                loss.backward()
        return [op.name for op in recorder.ran]

    forward = repeated(rule(RECOMPUTE))
    assert forward.count("addmm") == 3  # qkv, proj, mlp.1: the last linear's input is the last that is saved
    assert forward.count(ATTENTION) == 1
    spared = repeated(rule(RECOMPUTE, KEEP, qkv=KEEP, **{ATTENTION: HOST}))
    assert spared.count("addmm") == 2
    assert ATTENTION not in spared
    assert not {"addmm", "native_layer_norm"} & set(repeated(rule(HOST, HOST)))
