"""Weights on a device: what is where after each op, which copy counts, and what autograd's saved
weights become.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from support.device import Fleeting, World, emulated, run, world
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from lightning_hetero.errors import DeviceMemoryError, HeteroError, OffloadedAccessError
from lightning_hetero.ir.plan import BlockPlan, Tier, UpdateLane
from lightning_hetero.ir.schedule import Lane
from lightning_hetero.lanes import EmulatedLanes
from lightning_hetero.runtime.device import DeviceSide, WeightRef
from lightning_hetero.runtime.tensor_sources import WeightSource
from lightning_hetero.store.live.blocks import Block
from lightning_hetero.store.live.geometry import own_versions
from lightning_hetero.store.live.moved_weights import assign

BELOW = BlockPlan(name="*", weights=Tier.HOST)
RESIDENT = BlockPlan(name="*", weights=Tier.DEVICE)
ON_DEVICE = BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE)


class Net(nn.Module):
    """Sizes that are no multiples of anything, and a memory order that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)
        self.conv = nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


@pytest.fixture
def lanes() -> Iterator[EmulatedLanes]:
    with emulated() as made:
        yield made


@pytest.fixture
def net() -> Iterator[World]:
    torch.manual_seed(3)
    root = Net()
    with world(root, torch.optim.AdamW(root.parameters(), fused=True)) as made:
        yield made


def contents(net: World) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in net.root.named_parameters()}


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(got[name], value) and got[name].stride() == value.stride() for name, value in expected.items())


def in_memory(net: World) -> dict[str, Tensor]:
    return {name: part.memory(i).clone() for part in net.parts for i, name in enumerate(part.names)}


def bring(lanes: EmulatedLanes, side: DeviceSide, block: Block) -> None:
    run(lanes, Lane.H2D, partial(side.weights.upload, block)).wait()
    side.weights.bind(block)


def take_away(lanes: EmulatedLanes, side: DeviceSide, block: Block) -> None:
    side.weights.unbind(block)
    run(lanes, Lane.H2D, partial(side.weights.free, block), [lanes.mark()]).wait()


# ---- places --------------------------------------------------------------------------------------


def test_weights_are_on_the_device_from_upload_to_release(net: World, lanes: EmulatedLanes) -> None:
    before = contents(net)
    side = net.on(lanes, BELOW)
    for block in net.blocks:
        assert not side.weights.holds(block)
        bring(lanes, side, block)
    assert same(contents(net), before)
    size = sum(p.num_elements * 4 for p in net.parts)
    assert size <= lanes.memory().used_bytes < size + 512 * len(net.parts)
    for block in net.blocks:
        take_away(lanes, side, block)
    assert lanes.memory().used_bytes == 0
    assert all(value.isnan().all() for value in contents(net).values()), "the parameters point to memory that is poisoned"
    assert same(in_memory(net), before)


@pytest.mark.parametrize("ask", ["is_written", "is_outdated", "unbind"])
def test_a_release_may_come_between_any_two_questions(net: World, lanes: EmulatedLanes, ask: str) -> None:
    side = net.on(lanes, BELOW)
    for block in net.blocks:
        bring(lanes, side, block)
    side.weights._copies = Fleeting(side.weights._copies)
    for block in net.blocks:
        assert not getattr(side.weights, ask)(block)


def test_parameters_before_their_first_upload_are_tensors_without_content(net: World, lanes: EmulatedLanes) -> None:
    shapes = {name: (p.shape, p.stride(), p.dtype) for name, p in net.root.named_parameters()}
    net.on(lanes, BELOW)
    assert {name: (p.shape, p.stride(), p.dtype) for name, p in net.root.named_parameters()} == shapes
    assert lanes.memory().used_bytes == 0
    assert all(value.isnan().all() for value in contents(net).values())


def test_weights_that_live_on_the_device_give_host_memory_back_if_nothing_writes_it(net: World, lanes: EmulatedLanes) -> None:
    before = contents(net)
    side = net.on(lanes, ON_DEVICE)
    assert same(contents(net), before)
    for part in net.parts:  # pages that were given back read as zeros
        assert not any(part.memory(i).any() for i in range(len(part.params)))
    for block in net.blocks:
        side.weights.withdraw(block)
    assert same(contents(net), before)
    assert same(in_memory(net), before)
    net.root.linear.weight.data.fill_(2.0)
    assert in_memory(net)["linear.weight"].eq(2).all(), "the parameters are views of host memory again"


def test_each_parameter_has_a_storage_of_its_own_size(net: World, lanes: EmulatedLanes) -> None:
    net.on(lanes, RESIDENT)
    file = io.BytesIO()
    torch.save(net.root.state_dict(), file)
    assert len(file.getvalue()) < 8 * 1024
    file.seek(0)
    assert same(torch.load(file), contents(net))


def test_a_device_that_is_too_small_names_the_block(net: World) -> None:
    with emulated(1024, seed=None) as lanes, pytest.raises(DeviceMemoryError, match="weights of conv"):
        net.on(lanes, RESIDENT)


def test_binding_weights_that_were_not_uploaded_is_refused(net: World, lanes: EmulatedLanes) -> None:
    side = net.on(lanes, BELOW)
    with pytest.raises(OffloadedAccessError, match="without an UPLOAD"):
        side.weights.bind(net.blocks[0])
    with pytest.raises(OffloadedAccessError, match="are not on cpu"):
        side.weights.flat(net.parts[0])


# ---- which copy counts ---------------------------------------------------------------------------


def source(net: World, side: DeviceSide, name: str) -> WeightSource:
    part = next(p for p in net.parts if name in p.names)
    return WeightSource(net.store, part, part.names.index(name), lambda _: None, side.weights)


def test_user_writes_on_the_device_are_read_and_copied_back(net: World, lanes: EmulatedLanes) -> None:
    side, linear = net.on(lanes, BELOW), net.root.linear
    block = next(b for b in net.blocks if b.name == "linear")
    bring(lanes, side, block)
    assert not side.weights.changed(block)
    with torch.no_grad():
        linear.weight.clamp_(-0.1, 0.1)
    expected = linear.weight.detach().clone()
    assert side.weights.changed(block)
    assert torch.equal(source(net, side, "linear.weight").read(), expected)
    assert not torch.equal(in_memory(net)["linear.weight"], expected)
    run(lanes, Lane.D2H, partial(side.weights.download, block), [lanes.mark()]).wait()
    assert torch.equal(in_memory(net)["linear.weight"], expected)
    assert not side.weights.changed(block)
    take_away(lanes, side, block)
    assert torch.equal(source(net, side, "linear.weight").read(), expected)


def test_weights_that_were_moved_with_data_come_back_to_the_device_memory(net: World, lanes: EmulatedLanes) -> None:
    side, linear = net.on(lanes, RESIDENT), net.root.linear
    block = next(b for b in net.blocks if b.name == "linear")
    address = linear.weight.data_ptr()
    part = next(p for p in block.parts if "linear.weight" in p.names)
    assign(part, part.names.index("linear.weight"), torch.full((5, 7), 0.5), stays=False, is_saved=True)
    assert linear.weight.data_ptr() != address
    assert side.weights.changed(block)
    assert linear.weight.data_ptr() == address
    assert linear.weight.eq(0.5).all()


@pytest.mark.parametrize("when", ["before", "during"])
def test_weights_that_are_moved_around_a_copy_to_the_host_are_copied_again(net: World, lanes: EmulatedLanes, when: str) -> None:
    """SWAP_OUT of an update may run while the next forward sets ``data`` and until its use ends."""
    side, linear = net.on(lanes, BELOW), net.root.linear
    block = next(b for b in net.blocks if b.name == "linear")
    part = next(p for p in block.parts if "linear.weight" in p.names)
    bring(lanes, side, block)
    side.weights.updated(part, own_versions(part))
    move = partial(assign, part, part.names.index("linear.weight"), torch.full((5, 7), 0.5), stays=False, is_saved=True)
    if when == "before":
        move()
        run(lanes, Lane.D2H, partial(side.weights.download, block), [lanes.mark()]).wait()
    else:
        copy = lanes.copy

        def copy_late(*args: Tensor) -> None:
            copy(*args)
            with torch.no_grad():
                linear.weight.fill_(0.5)

        lanes.copy = copy_late  # type: ignore[method-assign]
        side.weights.download(block)
        lanes.copy = copy  # type: ignore[method-assign]
    assert side.weights.changed(block)
    run(lanes, Lane.D2H, partial(side.weights.download, block), [lanes.mark()]).wait()
    assert in_memory(net)["linear.weight"].eq(0.5).all()
    assert not side.weights.changed(block)


def test_a_write_through_the_door_reaches_the_copy_on_the_device(net: World, lanes: EmulatedLanes) -> None:
    side, linear = net.on(lanes, BELOW), net.root.linear
    block = next(b for b in net.blocks if b.name == "linear")
    run(lanes, Lane.H2D, partial(side.weights.upload, block)).wait()
    source(net, side, "linear.bias").write(torch.arange(5.0))
    side.weights.bind(block)
    assert torch.equal(linear.bias, torch.arange(5.0))
    assert torch.equal(source(net, side, "linear.bias").read(), torch.arange(5.0))
    take_away(lanes, side, block)
    bring(lanes, side, block)
    assert torch.equal(linear.bias, torch.arange(5.0))


def test_a_write_to_weights_on_disk_has_to_be_fetched_before_they_are_bound(net: World, lanes: EmulatedLanes) -> None:
    side = net.on(lanes, BELOW)
    block = next(b for b in net.blocks if b.name == "linear")
    run(lanes, Lane.H2D, partial(side.weights.upload, block)).wait()
    side.weights.written(block.parts[0], 0)
    block.resident = False
    with pytest.raises(HeteroError, match="fetched before"):
        side.weights.bind(block)


def test_a_write_through_the_door_renews_weights_that_live_on_the_device(net: World, lanes: EmulatedLanes) -> None:
    side = net.on(lanes, RESIDENT)
    source(net, side, "linear.bias").write(torch.arange(5.0))
    assert torch.equal(net.root.linear.bias, torch.arange(5.0))


def test_an_update_on_the_cpu_outdates_the_copy_until_it_is_uploaded(net: World, lanes: EmulatedLanes) -> None:
    side = net.on(lanes, RESIDENT)
    block = next(b for b in net.blocks if b.name == "linear")
    (part,) = block.parts
    index = part.names.index("linear.bias")
    part.memory(index).fill_(4.0)  # what the native engine does
    torch.autograd.graph.increment_version(part.params)
    side.weights.outdate(part)
    assert not side.weights.changed(block)
    assert source(net, side, "linear.bias").read().eq(4).all()
    run(lanes, Lane.H2D, partial(side.weights.upload, block)).wait()
    assert net.root.linear.bias.eq(4).all()
    assert not side.weights.changed(block)


# ---- saved tensors -------------------------------------------------------------------------------


def test_views_of_open_weights_are_referenced_and_rebuilt_in_other_memory(net: World, lanes: EmulatedLanes) -> None:
    side, linear = net.on(lanes, BELOW), net.root.linear
    block = next(b for b in net.blocks if b.name == "linear")
    bring(lanes, side, block)
    with torch.no_grad():
        views = [
            linear.weight, linear.weight.t(), linear.weight[1:4, ::2], linear.bias[2], linear.weight.view(torch.int16),
            linear.weight.expand(3, 5, 7), torch.view_as_complex(linear.weight.view(-1)[:34].view(17, 2)).conj(),
            torch._neg_view(linear.bias),
        ]  # fmt: skip
        values = [v.detach().resolve_conj().resolve_neg().clone() for v in views]
        references = [side.weights.reference(v) for v in views]
    assert all(isinstance(r, WeightRef) for r in references)
    assert [r.param is linear.weight for r in references if r] == [True, True, True, False, True, True, True, False]
    take_away(lanes, side, block)
    with pytest.raises(OffloadedAccessError, match=r"linear\.weight"):
        references[0].view()
    spacer = lanes.memory().take(4096, "something else")
    bring(lanes, side, block)
    for reference, view, value in zip(references, views, values, strict=True):
        rebuilt = reference.view()
        assert (rebuilt.shape, rebuilt.stride(), rebuilt.dtype) == (view.shape, view.stride(), view.dtype)
        assert torch.equal(rebuilt.resolve_conj().resolve_neg(), value)
        assert rebuilt.data_ptr() != view.data_ptr() or view is linear.weight
    lanes.memory().give(spacer)


def test_other_tensors_are_not_references(net: World, lanes: EmulatedLanes) -> None:
    side = net.on(lanes, BELOW)
    others = [torch.ones(3), torch.ones(3).to_sparse(), torch.empty(0), torch.ones(2, device="meta"), lanes.memory().take(64, "x")]
    for block in net.blocks:
        bring(lanes, side, block)
    assert [side.weights.reference(t) for t in others] == [None] * len(others)


def test_a_weight_that_changed_since_it_was_saved_is_refused_as_autograd_does(net: World, lanes: EmulatedLanes) -> None:
    side = net.on(lanes, RESIDENT)
    reference = side.weights.reference(net.root.linear.weight.t())
    with torch.no_grad():
        net.root.linear.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        reference.view()


def test_backward_reads_weights_where_they_are_then(net: World, lanes: EmulatedLanes) -> None:
    x = torch.randn(4, 7, requires_grad=True)
    F.gelu(net.root(x)).sum().backward()
    expected = {name: p.grad.clone() for name, p in net.root.named_parameters() if p.grad is not None}
    expected_x, x.grad = x.grad, None
    net.root.zero_grad()
    side = net.on(lanes, BELOW)
    blocks = [b for b in net.blocks if b.name != "conv"]
    for block in blocks:
        bring(lanes, side, block)
    with saved_tensors_hooks(lambda t: side.weights.reference(t) or t, lambda s: s.view() if isinstance(s, WeightRef) else s):
        loss = F.gelu(net.root(x)).sum()
    for block in blocks:
        take_away(lanes, side, block)
    spacer = lanes.memory().take(4096, "something else")
    for block in reversed(blocks):
        bring(lanes, side, block)
    loss.backward()
    lanes.memory().give(spacer)
    assert torch.equal(x.grad, expected_x)
    assert all(torch.equal(dict(net.root.named_parameters())[name].grad, value) for name, value in expected.items())
