"""Activations: what every policy leaves of a forward, that no bit of a gradient changes, and what is refused by name."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.activations import HOPS, Driver, Layer, driving, gradients, profiled, rule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hetero._native import Engine
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.ir.activations import saved_bytes
from lightning_hetero.ir.plan import BlockPlan, Saved
from lightning_hetero.ir.schedule import Lane, Op, Payload
from lightning_hetero.profiling.operators import Addresses, OperatorRecorder
from lightning_hetero.runtime.activations.files import NativeSwapFiles
from lightning_hetero.runtime.activations.recompute import RecomputationError
from lightning_hetero.runtime.activations.saved import ChangedInPlaceError
from lightning_hetero.runtime.lanes import EmulatedDevice, EmulatedLanes, InlineLanes, Lanes
from lightning_hetero.store.format.directory import StoreDirectory

KEEP, RECOMPUTE, HOST, DISK = Saved.KEEP, Saved.RECOMPUTE, Saved.SWAP_HOST, Saved.SWAP_DISK
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class Net(nn.Module):
    """Layers behind an operator of no block, as positions are added."""

    def __init__(self, layers: int = 2, make: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(layers))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        x = x + 1
        for layer in self.layers:
            x = layer(x, *args)
        return self.head(x).square().mean()

    def blocks(self) -> dict[str, nn.Module]:
        return {f"layers.{i}": layer for i, layer in enumerate(self.layers)} | {"head": self.head}


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 16, 32)


def emulated() -> Lanes:
    return EmulatedLanes(EmulatedDevice(memory="1MiB", seed=1), poison=True)


def plain(net: nn.Module, forward: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Loss, gradients and the generator's state as they are without us."""
    torch.manual_seed(7)
    loss = forward()
    loss.backward()
    return loss.detach(), gradients(net), torch.get_rng_state()


def assert_same(net: nn.Module, driver: Driver, forward: Callable[[], Tensor], **options: Any) -> None:
    """Two steps with the driver's hooks give the bits of one without; to be called before anything else has run."""
    driver.detach()
    expected = plain(net, forward)
    driver.attach()
    for _ in range(2):  # buffers are lent again
        torch.manual_seed(7)
        loss = driver.step(forward, **options)
        found = gradients(net)
        assert torch.equal(loss, expected[0])
        assert found.keys() == expected[1].keys()
        for name, grad in expected[1].items():
            assert torch.equal(found[name], grad), name
        assert torch.equal(torch.get_rng_state(), expected[2])


# ---- every policy -------------------------------------------------------------------------------------------------------------

RULES = {
    "keep": rule(),
    "recompute": rule(RECOMPUTE),
    "recompute from a swapped input": rule(RECOMPUTE, HOST),
    "swap": rule(HOST, HOST),
    "recompute but attention and qkv": rule(RECOMPUTE, HOST, qkv=HOST, **{ATTENTION: KEEP}),
    "keep but norms": rule(KEEP, KEEP, norm=RECOMPUTE, mlp__0=RECOMPUTE, qkv=HOST),
    "swap but a sum": rule(HOST, KEEP, add=RECOMPUTE, mlp__1=KEEP),
}


@pytest.mark.parametrize("lanes", [lambda: InlineLanes(poison=True), emulated], ids=["inline", "emulated"])
@pytest.mark.parametrize("issue", [True, False], ids=["issued", "on demand"])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_no_policy_changes_a_bit(x: Tensor, rules: Any, issue: bool, lanes: Callable[[], Lanes]) -> None:
    net = Net()
    with driving(net.blocks(), rules, lanes=lanes(), issue=issue) as driver:
        assert_same(net, driver, lambda: net(x))


def test_operators_of_a_profile_are_found_again(x: Tensor) -> None:
    """Each of them swapped alone moves the bytes that the profile gives it, in the first block and in a later one."""
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


def test_what_moves_is_what_the_plan_adds_up(x: Tensor) -> None:
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


def test_what_left_tensor_by_tensor_comes_back_in_one_copy_a_block(x: Tensor) -> None:
    """Batched swap-in (ProTrain, figure 1, G): the link is not asked for many small transfers in backward."""
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


def test_what_leaves_is_not_on_the_device_between_forward_and_backward(x: Tensor) -> None:
    """Bytes of storages alive at the end of forward: blocks' inputs, q, k and v, or what plain forward leaves."""
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


def test_a_recomputation_ends_where_nothing_is_missing_and_spares_what_is_there(x: Tensor) -> None:
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


# ---- storages -----------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block whose forward is a function."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def _views(block: Block, x: Tensor) -> Tensor:
    y = x * 2
    return y[:48].sin() * y.t()[:48].square() * y[:, :32].exp().sum()


def test_a_storage_moves_once_however_often_and_in_whatever_views_it_is_saved() -> None:
    block = Block(_views)
    x = torch.randn(64, 64, requires_grad=True)
    expected = torch.autograd.grad(block(x).sum(), x)[0]
    with driving({"b": block}, rule(HOST), lanes=emulated()) as driver:
        driver.begin()
        loss = block(x).sum()
        driver.out()
        # y but for the end of its last row; the sine, the square and their product, as factors; the exponential
        assert driver.moved("b") == 4 * (64 * 64 - 16 + 3 * 48 * 64 + 64 * 32)
        assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


@pytest.mark.parametrize("lanes", [lambda: InlineLanes(poison=True), emulated], ids=["inline", "emulated"])
def test_an_input_that_all_blocks_share_stays(x: Tensor, lanes: Callable[[], Lanes]) -> None:
    """Whether the first block's copy has left already (inline lanes) or is on its way."""
    net = Net(layers=3)
    mask = torch.randn(4, 2, 16, 16)
    with driving(net.blocks(), rule(RECOMPUTE, HOST), lanes=lanes()) as driver:
        driver.begin()
        loss = net(x, mask)
        moved = [driver.moved(name) for name in driver.blocks]
        assert moved[1:] == [x.nbytes] * 3
        assert moved[0] <= x.nbytes + mask.nbytes
        driver.out()
        loss.backward()
        gradients(net)
        assert_same(net, driver, lambda: net(x, mask))


def test_what_a_block_returns_is_swapped_by_the_block_that_takes_it() -> None:
    blocks = {name: nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for name in "ab"}
    net = nn.Sequential(OrderedDict(blocks))
    x = torch.randn(32, 64)
    with driving(blocks, rule(HOST, HOST), lanes=emulated()) as driver:
        driver.step(lambda: net(x).square().sum())
        gradients(net)
        assert (driver.moved("a"), driver.moved("b")) == (x.nbytes, x.nbytes)  # each its input; tanh saves what it returns
        assert_same(net, driver, lambda: net(x).square().sum())


def test_small_and_unusual_tensors_stay() -> None:
    def unusual(block: Block, x: Tensor) -> Tensor:
        z = torch.complex(x, x * 2).conj()
        kept = (z * z).abs().sum()  # z is conjugated lazily
        s = torch.sparse_coo_tensor(torch.arange(64).repeat(2, 1), x[0], (64, 64))
        return kept + (torch.sparse.mm(s, x).sum() * x[:1].exp().sum()).square()

    block = Block(unusual)
    x = torch.randn(64, 64, requires_grad=True)
    expected = torch.autograd.grad(block(x), x)[0]
    for rules in (rule(HOST, HOST), rule(RECOMPUTE), rule(RECOMPUTE, HOST)):
        with driving({"b": block}, rules) as driver:
            driver.begin()
            loss = block(x)
            driver.out()
            assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_parameters_and_buffers_do_not_move() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))
            self.register_buffer("mask", torch.rand(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight.t()) * self.mask

    block = Masked()
    x = torch.randn(64, 64, requires_grad=True)
    with driving({"b": block}, rule(HOST, KEEP)) as driver:
        driver.step(lambda: block(x).sum())
        assert driver.moved("b") == 0
    block.zero_grad()


def test_saved_weights_are_references_to_where_weights_are_in_backward(x: Tensor) -> None:
    """Their memory is another one then, and what was there is no weight any more."""
    net = Net()
    layer = net.layers[0]
    homes = {id(p): p.data for p in layer.parameters()}

    @dataclass
    class Ref:
        param: Tensor
        size: torch.Size
        stride: tuple[int, ...]
        offset: int

        def view(self) -> Tensor:
            return self.param.detach().as_strided(self.size, self.stride, self.offset)

    def weights(tensor: Tensor) -> Ref | None:
        for param in layer.parameters():
            begin = param.data_ptr()
            if tensor.layout is torch.strided and begin <= tensor.data_ptr() < begin + param.nbytes:
                return Ref(param, tensor.size(), tensor.stride(), (tensor.data_ptr() - begin) // tensor.itemsize)
        return None

    expected = plain(net, lambda: net(x))
    for rules in (rule(), rule(RECOMPUTE), rule(HOST, HOST)):
        with driving(net.blocks(), rules, weights=weights) as driver:
            torch.manual_seed(7)
            driver.begin()
            loss = net(x)
            driver.out()
            for param in layer.parameters():
                moved = homes[id(param)].clone()
                param.data.fill_(torch.nan)
                param.data = homes[id(param)] = moved
            loss.backward()
            found = gradients(net)
            assert all(torch.equal(found[name], grad) for name, grad in expected[1].items())


# ---- in-place operators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", [KEEP, RECOMPUTE, HOST])
def test_a_change_in_place_after_saving_is_found_as_autograd_finds_it(saved: Saved) -> None:
    def bad(block: Block, x: Tensor) -> Tensor:
        y = x.exp()
        z = y * 2
        y.add_(1)  # exp needs what it has returned
        return z + z.sin()

    block = Block(bad)
    x = torch.randn(64, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        block(x).sum().backward()
    with driving({"b": block}, rule(saved)) as driver:
        driver.begin()
        loss = block(x).sum()
        driver.out()
        with pytest.raises(ChangedInPlaceError, match=r"block 'b' saved a tensor \(64, 64\) .* clone"):
            loss.backward()


def test_a_block_that_changes_its_input_is_not_recomputed() -> None:
    block = Block(lambda block, x: block.linear(x.relu_()).exp(), linear=nn.Linear(64, 64))
    x = torch.randn(64, 64)
    with driving({"b": block}, rule(RECOMPUTE)) as driver:
        driver.begin()
        with pytest.raises(UnsupportedError, match=r"block 'b' changes its input in place.*saved='keep'"):
            block((x * 1).sin())
    with driving({"b": block}, rule(HOST, HOST)) as driver:
        assert_same(block, driver, lambda: block((x * 1).sin()).square().sum())


def test_an_input_that_changes_after_forward_is_found() -> None:
    block = Block(lambda block, x: block.linear(x.sin()), linear=nn.Linear(64, 64))
    x = torch.randn(64, 64)
    with driving({"b": block}, rule(RECOMPUTE)) as driver:
        driver.begin()
        loss = block(x).sum()
        x.add_(1)
        with pytest.raises(ChangedInPlaceError, match="block 'b' cannot be recomputed, because its input has changed"):
            loss.backward()


# ---- recomputation ------------------------------------------------------------------------------------------------------------


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
    """Changes one buffer in place and puts another one in the place of the second; both decide what comes out."""
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
    """A cache that the first forward filled: what follows is found nowhere by its place, and is repeated."""
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


# ---- forms of forwards --------------------------------------------------------------------------------------------------------


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


def test_names_go_on_where_a_block_is_used_twice(x: Tensor) -> None:
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
    """What compiled code saves is followed; it is recomputed where the block itself was compiled, else refused by name."""
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


# ---- graphs -------------------------------------------------------------------------------------------------------------------

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
        assert driver.activations.stack == []
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
        assert driver.activations.stack == []


def test_a_block_that_keeps_everything_where_it_is_has_no_hooks(x: Tensor) -> None:
    layer, asked = Layer(), []
    with driving({}, rule(), weights=asked.append) as driver:
        for moves in (False, True):
            handles = driver.activations.block("b", layer, BlockPlan(name="b"), weights_move=moves).attach()
            layer(x)
            for handle in handles:
                handle.remove()
            assert bool(asked) is moves


# ---- hops ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> Iterator[NativeSwapFiles]:
    manifest = {"what": "activations"}
    directory = StoreDirectory.create_or_adopt(
        None, default_root=tmp_path, manifest=manifest, needed_bytes=1 << 20, allow_tmpfs=True
    )
    with Engine(staging_bytes=3 << 16, chunk_bytes_max=1 << 16) as engine:
        found = NativeSwapFiles(engine, directory)
        yield found
        found.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lanes", [lambda: InlineLanes(poison=True), emulated], ids=["inline", "emulated"])
@pytest.mark.parametrize("issue", [True, False], ids=["issued", "on demand"])
@pytest.mark.parametrize("rules", [rule(DISK, DISK), rule(HOST, DISK, qkv=DISK), rule(RECOMPUTE, DISK, qkv=HOST)])
def test_activations_come_back_from_the_disk(
    x: Tensor, rules: Any, issue: bool, lanes: Callable[[], Lanes], files: NativeSwapFiles
) -> None:
    net = Net()
    with driving(net.blocks(), rules, lanes=lanes(), files=files) as driver:
        assert_same(net, driver, lambda: net(x), come=issue)
        assert files.engine.stats().bytes_written > 0
        assert files.engine.stats().bytes_read > 0


def test_files_of_other_batches_are_lent_again_and_those_that_no_batch_needs_go(x: Tensor, files: NativeSwapFiles) -> None:
    net = Net()

    def names() -> set[str]:
        return {path.name for path in files.directory.path.glob("block-*")}

    with driving(net.blocks(), rule(DISK, DISK), files=files) as driver:
        driver.step(lambda: net(x))
        first = names()
        assert len(first) == 3  # two layers and the head
        driver.step(lambda: net(x))
        assert names() == first
        for _ in range(2):
            driver.step(lambda: net(x[:2]))
        assert len(names()) == 3
        assert names().isdisjoint(first)
    net.zero_grad()
    assert names() == set()


def test_the_disk_is_refused_where_there_is_none(x: Tensor) -> None:
    net = Net()
    with driving(net.blocks(), rule(DISK)) as driver:
        driver.begin()
        loss = net(x)
        driver.come()
        with pytest.raises(UnsupportedError, match=r"to the disk, but there is no directory for them.*disk_path"):
            loss.backward()
        with pytest.raises(UnsupportedError):
            driver.lanes.drain()


def test_hops_of_a_block_that_is_used_twice_nest(x: Tensor) -> None:
    """The latest use comes back first; ops that find nothing do nothing."""
    layer = Layer()
    lanes = emulated()
    with driving({"b": layer}, rule(HOST, HOST), lanes=lanes, issue=False) as driver:
        block = driver.blocks["b"]
        driver.begin()
        driver.hop(block, "out").wait()  # before any forward
        first = layer(x)
        one = driver.hop(block, "out")
        second = layer(first[:2])
        small = driver.hop(block, "out")
        lanes.compute_waits([one, small])
        driver.activations.sweep()
        del second
        driver.hop(block, "in").wait()  # the second use's graph is gone
        driver.hop(block, "in").wait()
        driver.hop(block, "in").wait()
        first.sum().backward()
    assert all(grad.isfinite().all() for grad in gradients(layer).values())


def test_an_error_of_a_lane_reaches_backward(x: Tensor) -> None:
    net = Net()

    class Broken(InlineLanes):
        def copy(self, target: Tensor, source: Tensor) -> None:
            raise OSError("the link is down")

    with driving(net.blocks(), rule(HOST, HOST), lanes=Broken()) as driver:
        driver.begin()
        loss = net(x)
        with pytest.raises(OSError, match="link is down"):
            driver.out()
        with pytest.raises(OSError, match="link is down"):
            loss.backward()
        with pytest.raises(OSError, match="link is down"):
            driver.lanes.drain()


def test_a_copy_that_nobody_waits_for_shows(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Poison: memory that is given up before its bytes have left, as a schedule without the edge would."""
    net = Net()
    expected = plain(net, lambda: net(x))
    slow, gate = EmulatedLanes(EmulatedDevice(memory="1MiB", d2h_bytes_per_s=1.0), poison=True), threading.Event()
    monkeypatch.setattr(slow._links[Lane.D2H], "_sleep", lambda _: gate.wait(60))
    with driving(net.blocks(), rule(HOST, HOST), lanes=slow) as driver:
        torch.manual_seed(7)
        driver.begin()
        loss = net(x)
        driver.activations.sweep(driver.outs)  # a lie: compute has waited for none of them
        gate.set()
        loss.backward()
        found = gradients(net)
        assert not all(torch.equal(found[name], grad) for name, grad in expected[1].items())


def test_rules_without_effect_are_named(x: Tensor) -> None:
    net = Net(layers=1)
    with driving(net.blocks(), rule(KEEP, KEEP, norm=HOST, gelu=HOST)) as driver:
        driver.step(lambda: net(x))
        with pytest.warns(UserWarning, match="block 'layers.0': .* saves nothing: gelu"):
            driver.begin()
    net.zero_grad()


def test_ops_name_hops() -> None:
    with driving({"b": Layer()}, rule(HOST)) as driver:
        kind, lane = HOPS["in"]
        op = Op(id=3, kind=kind, block=0, lane=lane, at=0, payload=Payload.ACTIVATIONS)
        assert driver.blocks["b"].swap(op).done()  # reality has overtaken it


def test_what_is_held_is_what_is_needed(x: Tensor) -> None:
    """A recomputed use keeps its arguments no longer than until it has been recomputed."""
    block = Block(lambda block, x: block.linear(x.sin()).sin(), linear=nn.Linear(32, 32))
    with driving({"b": block}, rule(RECOMPUTE)) as driver:
        driver.begin()
        given = x.clone()
        seen = weakref.ref(given.untyped_storage())
        out = block(given)
        del given
        assert seen() is not None
        out.sum().backward(retain_graph=True)
        assert seen() is None
    block.zero_grad()
