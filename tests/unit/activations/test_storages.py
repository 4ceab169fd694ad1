"""Which storages move, and what happens to those that change in place."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

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
    emulated,
    gradients,
    plain,
    rule,
)
from support.lanes import InlineLanes
from torch import Tensor, nn

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.ir.plan import Saved
from lightning_hetero.lanes import Lanes
from lightning_hetero.runtime.activations.saved import ChangedInPlaceError

# ---- storages ------------------------------------------------------------------------------------


def _views(block: Block, x: Tensor) -> Tensor:
    y = x * 2
    return y[:48].sin() * y.t()[:48].square() * y[:, :32].exp().sum()


def test_a_storage_moves_once_for_all_its_saved_views() -> None:
    block = Block(_views)
    x = torch.randn(64, 64, requires_grad=True)
    expected = torch.autograd.grad(block(x).sum(), x)[0]
    with driving({"b": block}, rule(HOST), lanes=emulated()) as driver:
        driver.begin()
        loss = block(x).sum()
        driver.out()
        # y; the sine, the square and their product, as factors; the exponential. All are of whole
        # 512 bytes, which y without the end of its last row is not.
        assert driver.moved("b") == 4 * (64 * 64 + 3 * 48 * 64 + 64 * 32)
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


def test_a_blocks_output_is_swapped_by_the_next_block() -> None:
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


# ---- in-place operators --------------------------------------------------------------------------


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
