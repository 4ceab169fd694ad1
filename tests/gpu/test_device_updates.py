"""Updates, weights and gradients on a real accelerator against the native engine on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from support.device import World, give_gradients, run, world
from support.gpu import DEVICE, needs_a_device
from support.update_bounds import excess, step_of
from torch import Tensor, nn

from lightning_hetero.handles.offloaded_parameter import materialize
from lightning_hetero.ir.plan import BlockPlan, Tier, UpdateLane
from lightning_hetero.ir.schedule import Lane
from lightning_hetero.lanes import Lanes
from lightning_hetero.runtime.device import HostGradient
from lightning_hetero.units import MIB

pytestmark = needs_a_device

PLANS = {
    "kept": BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE),
    "borrowed": BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.HOST, update=UpdateLane.DEVICE),
    "on_cpu": BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.HOST, update=UpdateLane.CPU),
}


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    from lightning_hetero.lanes.streams import StreamLanes

    made = StreamLanes(DEVICE, memory_bytes=16 * MIB, poison=True)
    try:
        yield made
        made.drain()
    finally:
        made.close()


def make_net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(300, 500), nn.Conv2d(3, 7, 3).to(memory_format=torch.channels_last), nn.Linear(31, 9))
    return net.to(dtype)


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.1, fused=True)


def step(net: World, lanes: Lanes, seed: int, *, scale: float = 1.0) -> None:
    """One step under the plan that the blocks follow."""
    side = net.updater.device
    assert side is not None
    cpu = torch.Generator().manual_seed(seed)
    for param in net.root.parameters():
        values = torch.randn(param.shape, generator=cpu).to(param.dtype)
        param.grad = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=param.device).copy_(values)
    net.updater.scale = scale
    plan = net.blocks[0].plan
    if plan.update is UpdateLane.CPU:
        for block in net.blocks:
            side.gradients.sent(block, run(lanes, Lane.D2H, side.gradients.take(block), [lanes.mark()]))
        for block in net.blocks:
            side.gradients.wait(block)
        net.step()
        lanes.compute_waits([run(lanes, Lane.H2D, partial(side.weights.upload, block)) for block in net.blocks])
        return
    if plan.state is Tier.HOST:
        lanes.compute_waits([run(lanes, Lane.H2D, partial(side.updates.swap_in, block)) for block in net.blocks])
    net.step()
    if plan.state is Tier.HOST:
        for block in net.blocks:
            returned = run(lanes, Lane.D2H, partial(side.updates.swap_out, block), [lanes.mark()])
            side.updates.returning(block, returned)
            returned.wait()  # the next SWAP_IN follows it


def outcome(net: World) -> dict[str, Tensor]:
    found = {name: param.detach().cpu() for name, param in net.root.named_parameters()}
    for number, state in net.binding.optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": materialize(value).cpu() for key, value in state.items()}
    return found


def ulps(a: Tensor, b: Tensor) -> int:
    """Largest distance in units in the last place."""
    kind = {4: torch.int32, 2: torch.int16}[a.element_size()]
    highest = {4: 0x7FFFFFFF, 2: 0x7FFF}[a.element_size()]

    def ordered(x: Tensor) -> Tensor:
        bits = x.contiguous().view(kind).long()
        return torch.where(bits < 0, -(bits & highest), bits)

    return int((ordered(a) - ordered(b)).abs().max())


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plan", PLANS)
def test_a_step_is_as_near_to_the_native_one_as_two_right_ones_are(
    lanes: Lanes, plan: str, dtype: torch.dtype, scale: float
) -> None:
    root, plain = make_net(dtype), make_net(dtype)
    with world(plain, make_optimizer(plain)) as native:
        give_gradients(plain.parameters(), 3)
        native.updater.scale = scale
        native.step()
        expected = outcome(native)
    with world(root, make_optimizer(root)) as net:
        net.on(lanes, PLANS[plan])
        assert all(p.device.type == DEVICE for p in root.parameters())
        step(net, lanes, 3, scale=scale)
        got = outcome(net)
    assert got.keys() == expected.keys()
    if plan == "on_cpu":
        for name, value in expected.items():
            assert torch.equal(got[name], value), name
        return
    group = net.binding.optimizer.param_groups[0]
    for number, name in enumerate(dict(plain.named_parameters())):
        moments = [expected[f"{number}.{key}"] for key in ("exp_avg", "exp_avg_sq")]
        taken = step_of(*moments, step=1, lr=group["lr"], betas=group["betas"], eps=group["eps"])
        assert excess(got[name], expected[name], taken) <= 1, name
    moments = {name: ulps(got[name], value) for name, value in expected.items() if "exp_avg" in name}
    assert max(moments.values()) <= 2, moments


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_the_state_lives_does_not_change_a_bit(lanes: Lanes, dtype: torch.dtype) -> None:
    outcomes = []
    for plan in ("kept", "borrowed"):
        root = make_net(dtype)
        with world(root, make_optimizer(root)) as net:
            side = net.on(lanes, PLANS[plan])
            for seed in range(5):
                step(net, lanes, seed)
            outcomes.append(outcome(net))
            for block in net.blocks:
                side.weights.withdraw(block)
                for part in block.parts:
                    side.updates.withdraw(part)
            assert lanes.memory().used_bytes == 0
    for name, value in outcomes[0].items():
        assert torch.equal(value, outcomes[1][name]), name


def test_clipping_gradients_on_the_host_has_the_bits_of_clipping_on_the_device(lanes: Lanes) -> None:
    root, plain = make_net(torch.float32), make_net(torch.float32).to(DEVICE)
    give_gradients(plain.parameters(), 1)
    with world(root, make_optimizer(root)) as net:
        side = net.on(lanes, PLANS["on_cpu"], norm_type=2.0)
        for param, other in zip(root.parameters(), plain.parameters(), strict=True):
            param.grad = other.grad.clone()
        for block in net.blocks:
            side.gradients.sent(block, run(lanes, Lane.D2H, side.gradients.take(block), [lanes.mark()]))
        side.gradients.expose()
        assert all(type(p.grad) is HostGradient and p.grad.device == p.device for p in root.parameters())
        total = torch.nn.utils.clip_grad_norm_(root.parameters(), 0.5)
        assert torch.equal(total, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        for param, other in zip(root.parameters(), plain.parameters(), strict=True):
            assert torch.equal(side.gradients._held[id(param)].value(), other.grad.cpu())


def test_a_loss_scaler_unscales_gradients_on_the_host(lanes: Lanes) -> None:
    root = make_net(torch.float32)
    with world(root, make_optimizer(root)) as net:
        side = net.on(lanes, PLANS["on_cpu"])
        given = [torch.randn_like(p) for p in root.parameters()]
        for param, grad in zip(root.parameters(), given, strict=True):
            param.grad = grad.clone()
        for block in net.blocks:
            side.gradients.sent(block, run(lanes, Lane.D2H, side.gradients.take(block), [lanes.mark()]))
        side.gradients.expose()
        scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0)
        scaler.scale(torch.zeros((), device=DEVICE))
        scaler.unscale_(torch.optim.SGD(root.parameters(), lr=0.1))
        for param, grad in zip(root.parameters(), given, strict=True):
            assert torch.equal(side.gradients._held[id(param)].value(), (grad / 8).cpu())


def test_micro_batches_add_up_as_on_the_device(lanes: Lanes) -> None:
    root, plain = make_net(torch.bfloat16), make_net(torch.bfloat16).to(DEVICE)
    with world(root, make_optimizer(root)) as net:
        side = net.on(lanes, PLANS["on_cpu"])
        for _ in range(3):
            for param, other in zip(root.parameters(), plain.parameters(), strict=True):
                param.grad = torch.randn_like(param)
                other.grad = param.grad.clone() if other.grad is None else other.grad.add_(param.grad)
            for block in net.blocks:
                side.gradients.sent(block, run(lanes, Lane.D2H, side.gradients.take(block), [lanes.mark()]))
        for block in net.blocks:
            side.gradients.wait(block)
        for param, other in zip(root.parameters(), plain.parameters(), strict=True):
            assert torch.equal(side.gradients._held[id(param)].value(), other.grad.cpu())


def test_handles_compute_on_the_device(lanes: Lanes) -> None:
    from lightning_hetero.handles.offloaded_tensor import OffloadedTensor
    from lightning_hetero.runtime.tensor_sources import WeightSource

    root = make_net(torch.float32)
    expected = root[0].weight.detach().clone()
    with world(root, make_optimizer(root)) as net:
        side = net.on(lanes, BlockPlan(name="*", weights=Tier.HOST))
        part = next(p for p in net.parts if "0.weight" in p.names)
        source = WeightSource(net.store, part, part.names.index("0.weight"), lambda _: None, side.weights)
        handle = OffloadedTensor(source, device=root[0].weight.device)
        assert handle.device.type == DEVICE
        assert torch.equal((handle * 2).cpu(), expected * 2)
        average = torch.zeros_like(expected, device=DEVICE)
        average.lerp_(handle, 0.5)
        assert torch.equal(average.cpu(), torch.zeros_like(expected).lerp(expected, 0.5))
        handle.mul_(3)
        assert torch.equal(handle.cpu(), expected * 3)
