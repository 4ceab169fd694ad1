"""Gradients that leave a device: their bits, their memory, and what clipping, loss scaling and
users see of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.device import World, emulated, give_gradients, run, world
from torch import Tensor, nn

from lightning_hetero._native import DONE, READY
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.ir.plan import BlockPlan, Tier
from lightning_hetero.ir.schedule import Lane
from lightning_hetero.lanes import EmulatedLanes
from lightning_hetero.runtime.device import DeviceSide, HostGradient

RESIDENT = BlockPlan(name="*", weights=Tier.DEVICE)


def make_net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(7, 5), nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last), nn.Linear(3, 9))
    return net.to(dtype)


@pytest.fixture
def lanes() -> Iterator[EmulatedLanes]:
    with emulated() as made:
        yield made


@pytest.fixture
def net() -> Iterator[World]:
    root = make_net()
    with world(root, torch.optim.AdamW(root.parameters(), fused=True)) as made:
        yield made


def leave(net: World, lanes: EmulatedLanes, side: DeviceSide) -> None:
    """Every block's GRAD."""
    for block in net.blocks:
        event = run(lanes, Lane.D2H, side.gradients.take(block), [lanes.mark()])
        side.gradients.sent(block, event)


def arrived(net: World, side: DeviceSide) -> dict[str, Tensor]:
    for block in net.blocks:
        side.gradients.wait(block)
    held = side.gradients._held
    return {name: held[id(param)].value() for name, param in net.root.named_parameters() if id(param) in held}


class FakeTicket:
    """An update that is as far as the test says."""

    def __init__(self) -> None:
        self.reached = 0

    def poll(self) -> int:
        return self.reached

    def wait(self, what: int = DONE, timeout: float | None = None) -> None:
        self.reached = max(self.reached, what)


# ---- what arrives --------------------------------------------------------------------------------


def test_gradients_arrive_whole_and_in_the_memory_order_of_their_parameters(net: World, lanes: EmulatedLanes) -> None:
    side = net.on(lanes, RESIDENT)
    give_gradients(net.root.parameters(), 1)
    weight = net.root[1].weight
    weight.grad = weight.grad.contiguous()  # another memory order than the parameter's
    expected = {name: p.grad.clone() for name, p in net.root.named_parameters()}
    leave(net, lanes, side)
    assert all(p.grad is None for p in net.root.parameters())
    assert all(id(p) in side.gradients.ids() for p in net.root.parameters())
    got = arrived(net, side)
    for name, param in net.root.named_parameters():
        assert torch.equal(got[name], expected[name])
        assert got[name].stride() == param.stride()


def test_parameters_without_gradients_have_none_on_the_host(net: World, lanes: EmulatedLanes) -> None:
    side = net.on(lanes, RESIDENT)
    give_gradients([net.root[0].weight], 1)
    leave(net, lanes, side)
    assert list(arrived(net, side)) == ["0.weight"]
    assert id(net.root[0].bias) not in side.gradients.ids()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_micro_batches_add_up_as_autograd_adds_them(dtype: torch.dtype) -> None:
    root, plain = make_net(dtype), make_net(dtype)
    with emulated(seed=4) as lanes, world(root, torch.optim.AdamW(root.parameters(), fused=True)) as net:
        side = net.on(lanes, RESIDENT)
        for seed in range(4):
            give_gradients(root.parameters(), seed)
            if seed == 0:
                root[2].bias.grad = None  # its first gradient comes later
            for param, other in zip(root.parameters(), plain.parameters(), strict=True):
                if param.grad is not None:
                    other.grad = param.grad.clone() if other.grad is None else other.grad.add_(param.grad)
            leave(net, lanes, side)
        got = arrived(net, side)
        assert all(torch.equal(got[name], p.grad) for name, p in plain.named_parameters())


def test_a_gradient_that_is_not_dense_is_refused_by_name(lanes: EmulatedLanes) -> None:
    root = nn.Sequential(nn.Embedding(4, 3, sparse=True))
    with world(root, torch.optim.AdamW(root.parameters(), fused=True)) as net:
        side = net.on(lanes, RESIDENT)
        root(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(UnsupportedError, match=r"0\.weight.*sparse=False"):
            side.gradients.take(net.blocks[0])


# ---- memory --------------------------------------------------------------------------------------


def buffer_bytes(lanes: EmulatedLanes, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """From now on counts the bytes of the host buffers that were made and exist."""
    make, made = lanes.host_buffer, list[weakref.ref[Tensor]]()

    def host_buffer(num_bytes: int) -> Tensor:
        buffer = make(num_bytes)
        made.append(weakref.ref(buffer))
        return buffer

    monkeypatch.setattr(lanes, "host_buffer", host_buffer)
    return lambda: sum(buffer.numel() for buffer in (ref() for ref in made) if buffer is not None)


def test_memory_is_used_again_once_its_update_is_ready(net: World, lanes: EmulatedLanes, monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = buffer_bytes(lanes, monkeypatch)
    side = net.on(lanes, RESIDENT)
    addresses = []
    sizes = []
    for step in range(4):
        give_gradients(net.root.parameters(), step)
        leave(net, lanes, side)
        addresses.append({v.data_ptr() for v in arrived(net, side).values()})
        sizes.append(num_bytes())
        ticket = FakeTicket()
        ticket.reached = 0 if step == 1 else READY  # the second step's update is under way until the end
        side.gradients.claim(net.root.parameters()).used(ticket)
        assert arrived(net, side) == {}
    assert addresses[0] == addresses[1]
    assert not addresses[1] & addresses[2]
    assert addresses[3] == addresses[2]
    assert sizes == [sizes[0], sizes[0], 2 * sizes[0], 2 * sizes[0]]
    side.gradients.pool.close()
    assert num_bytes() == sizes[0], "what an update still reads is not freed"


def test_a_buffer_that_two_optimizers_share_is_free_after_both(net: World, lanes: EmulatedLanes) -> None:
    side = net.on(lanes, RESIDENT)
    give_gradients(net.root.parameters(), 1)
    leave(net, lanes, side)
    first = arrived(net, side)["0.weight"].data_ptr()
    bias = arrived(net, side)["0.bias"].clone()
    side.gradients.claim([net.root[0].weight]).used(None)
    give_gradients([net.root[0].weight], 2)
    leave(net, lanes, side)
    again = arrived(net, side)
    assert again["0.weight"].data_ptr() == first
    assert torch.equal(again["0.bias"], bias)
    side.gradients.claim(net.root.parameters()).used(None)
    assert arrived(net, side) == {}


def test_a_step_that_is_given_up_leaves_nothing(net: World, lanes: EmulatedLanes, monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = buffer_bytes(lanes, monkeypatch)
    side = net.on(lanes, RESIDENT)
    give_gradients(net.root.parameters(), 1)
    leave(net, lanes, side)
    lanes.drain()
    side.gradients.drop()
    assert arrived(net, side) == {}
    give_gradients(net.root.parameters(), 2)
    size = num_bytes()
    leave(net, lanes, side)
    assert torch.equal(arrived(net, side)["0.bias"], _gradient_of(2, "0.bias"))
    assert num_bytes() == size


def _gradient_of(seed: int, name: str) -> Tensor:
    plain = make_net()
    give_gradients(plain.parameters(), seed)
    return dict(plain.named_parameters())[name].grad


# ---- whoever looks at gradients ------------------------------------------------------------------


def clip_2(params: list[nn.Parameter]) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(params, 0.5)


def clip_inf(params: list[nn.Parameter]) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(params, 0.5, norm_type=float("inf"))


def clip_foreach(params: list[nn.Parameter]) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(params, 0.5, foreach=True)


def clip_value(params: list[nn.Parameter]) -> Tensor:
    torch.nn.utils.clip_grad_value_(params, 0.3)
    return torch.zeros(())


def average(params: list[nn.Parameter]) -> Tensor:
    for param in params:
        param.grad.div_(3)
        param.grad.data.add_(param.detach(), alpha=0.5)
    return sum((p.grad.abs().sum() for p in params), torch.zeros(()))


def clip_value_foreach(params: list[nn.Parameter]) -> Tensor:
    torch.nn.utils.clip_grad_value_(params, 0.3, foreach=True)
    return torch.zeros(())


def zero(params: list[nn.Parameter]) -> Tensor:
    torch.optim.SGD(params, lr=0.1).zero_grad(set_to_none=False)
    return torch.zeros(())


def scale(params: list[nn.Parameter]) -> Tensor:
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([p.grad for p in params], found, torch.tensor(0.125))
    return found


def scale_infinite(params: list[nn.Parameter]) -> Tensor:
    with torch.no_grad():
        params[0].grad.view(-1)[3] = float("inf")
    return scale(params)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("norm_type", [None, 2.0])
@pytest.mark.parametrize(
    "act", [clip_2, clip_inf, clip_foreach, clip_value, clip_value_foreach, zero, average, scale, scale_infinite]
)
def test_operations_on_gradients_on_the_host_have_the_bits_of_plain_torch(
    net: World, lanes: EmulatedLanes, act: Callable[[list[nn.Parameter]], Tensor], norm_type: float | None, batches: int
) -> None:
    side = net.on(lanes, RESIDENT, norm_type=norm_type)
    plain = make_net()
    for seed in range(batches):
        side.gradients.conceal()
        give_gradients(net.root.parameters(), seed)
        for param, other in zip(net.root.parameters(), plain.parameters(), strict=True):
            other.grad = param.grad.clone() if other.grad is None else other.grad.add_(param.grad)
        leave(net, lanes, side)
        side.gradients.expose()
    assert all(type(p.grad) is HostGradient for p in net.root.parameters())
    assert torch.equal(act(list(net.root.parameters())), act(list(plain.parameters())))
    side.gradients.conceal()
    got = arrived(net, side)
    assert all(torch.equal(got[name], p.grad) for name, p in plain.named_parameters())


def test_norms_are_those_that_the_device_computed(net: World, lanes: EmulatedLanes, monkeypatch: pytest.MonkeyPatch) -> None:
    side = net.on(lanes, RESIDENT, norm_type=2.0)
    give_gradients(net.root.parameters(), 1)
    expected = torch.nn.utils.clip_grad_norm_(make_copy(net.root).parameters(), 1e9)
    leave(net, lanes, side)
    side.gradients.expose()
    seen: list[Any] = []
    plain_norm = torch.linalg.vector_norm
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda x, *a, **k: seen.append(type(x)) or plain_norm(x, *a, **k))
    total = torch.nn.utils.clip_grad_norm_(net.root.parameters(), 1e9)
    assert torch.equal(total, expected)
    assert seen == [HostGradient] * 6 + [Tensor], "no norm of what is in host memory is computed"
    net.root[0].bias.grad.mul_(2)
    assert torch.equal(net.root[0].bias.grad.norm(), 2 * _gradient_of(1, "0.bias").norm()), "a changed gradient has another norm"


def make_copy(root: nn.Module) -> nn.Module:
    copy = make_net()
    for param, other in zip(root.parameters(), copy.parameters(), strict=True):
        other.grad = param.grad.clone()
    return copy


def test_a_loss_scaler_finds_overflows(net: World, lanes: EmulatedLanes) -> None:
    side = net.on(lanes, RESIDENT)
    optimizer = torch.optim.SGD(net.root.parameters(), lr=0.1)
    give_gradients(net.root.parameters(), 1)
    leave(net, lanes, side)
    side.gradients.expose()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    assert torch.equal(arrived(net, side)["2.weight"], _gradient_of(1, "2.weight") / 4)
    net.root[2].weight.grad.fill_(float("nan"))
    assert scaler._check_inf_per_device(optimizer)[torch.device("cpu")] == 1


def test_dropped_gradients_are_dropped_and_new_ones_taken(net: World, lanes: EmulatedLanes) -> None:
    side = net.on(lanes, RESIDENT)
    give_gradients(net.root.parameters(), 1)
    leave(net, lanes, side)
    side.gradients.expose()
    net.root[0].weight.grad = None
    net.root[0].bias.grad = torch.full((5,), 3.0)
    net.root[2].bias.grad.zero_()
    side.gradients.conceal()
    got = arrived(net, side)
    assert "0.weight" not in got
    assert got["0.bias"].eq(3).all()
    assert got["2.bias"].eq(0).all()
    assert torch.equal(got["2.weight"], _gradient_of(1, "2.weight"))


def test_gradients_without_a_reader_are_kept(net: World, lanes: EmulatedLanes) -> None:
    side = net.on(lanes, RESIDENT)
    give_gradients(net.root.parameters(), 1)
    leave(net, lanes, side)
    side.gradients.conceal()
    assert len(arrived(net, side)) == 6


def test_readers_see_copies_and_metadata_waits_for_nothing(net: World, lanes: EmulatedLanes) -> None:
    side = net.on(lanes, RESIDENT)
    give_gradients(net.root.parameters(), 1)
    leave(net, lanes, side)
    side.gradients.expose()
    grad = net.root[1].weight.grad
    assert repr(grad) == "OffloadedTensor((2, 3, 3, 3), torch.float32, '1.weight.grad')"
    assert grad.stride() == net.root[1].weight.stride()
    copy = grad.clone()
    grad.mul_(2)
    assert torch.equal(copy, _gradient_of(1, "1.weight"))
    assert torch.equal(grad.cpu() if grad.is_cuda else grad.clone(), 2 * copy)
