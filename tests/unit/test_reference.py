"""The oracle of 16-bit training against torch itself: bitwise in fp32, against hand-written steps
in 16 bits.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_hetero.optim.reference import MasterWeightOptimizer

FACTORIES: dict[str, Callable[..., Optimizer]] = {
    "adamw-fused": functools.partial(AdamW, lr=1e-2, weight_decay=0.1, fused=True),
    "adam": functools.partial(Adam, lr=1e-2, weight_decay=0.1),
    "sgd": functools.partial(SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "amsgrad-maximize": functools.partial(AdamW, lr=1e-2, amsgrad=True, maximize=True),
}
every_factory = pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
sixteen_bit = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)


def groups(module: nn.Module) -> list[dict[str, Any]]:
    parameters = list(module.parameters())
    return [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 3e-3}]


def backward(module: nn.Module, seed: int) -> Tensor:
    torch.manual_seed(seed)
    dtype = next(module.parameters()).dtype
    module.zero_grad()
    loss: Tensor = module(torch.randn(5, 7, dtype=dtype)).square().mean()
    loss.backward()
    return loss


def weights(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@every_factory
def test_in_fp32_it_is_the_optimizer_bit_for_bit(factory: Callable[..., Optimizer]) -> None:
    ours, plain = model(), model()
    pairs: list[tuple[nn.Module, Optimizer]] = [
        (ours, MasterWeightOptimizer(groups(ours), factory)),
        (plain, factory(groups(plain))),
    ]
    for step in range(6):
        for module, optimizer in pairs:
            backward(module, step)
            if step % 3 == 2:
                next(module.parameters()).grad = None
            optimizer.step()
    assert same(weights(ours), weights(plain))
    assert same(pairs[0][1].state_dict(), pairs[1][1].state_dict())


@every_factory
@sixteen_bit
def test_in_16_bits_it_is_the_optimizer_on_fp32_copies(factory: Callable[..., Optimizer], dtype: torch.dtype) -> None:
    ours, plain = model(dtype), model(dtype)
    optimizer = MasterWeightOptimizer(groups(ours), factory)
    masters = [p.detach().float().requires_grad_() for p in plain.parameters()]
    inner = factory([{"params": masters[:2]}, {"params": masters[2:], "lr": 3e-3}])
    for step in range(6):
        backward(ours, step)
        optimizer.step()
        backward(plain, step)
        for parameter, master in zip(plain.parameters(), masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        inner.step()
        for parameter, master in zip(plain.parameters(), masters, strict=True):
            parameter.data = master.detach().to(dtype)
    assert same(weights(ours), weights(plain))
    assert same([optimizer.master(p) for p in ours.parameters()], masters)


def test_one_adamw_step_written_out() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
    optimizer = MasterWeightOptimizer([parameter], functools.partial(AdamW, lr=0.125, betas=(0.5, 0.5), eps=0.0, weight_decay=0.5))
    parameter.grad = torch.tensor([0.5, -0.25], dtype=torch.bfloat16)
    optimizer.step()
    # p * (1 - lr * wd) - lr * m / sqrt(v), whose last quotient is sign(g) at the first step
    expected = torch.tensor([1.0 * 0.9375 - 0.125, -2.0 * 0.9375 + 0.125])
    assert torch.equal(optimizer.master(parameter), expected)
    assert torch.equal(parameter.detach(), expected.bfloat16())


def test_small_steps_accumulate_in_the_master() -> None:
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = MasterWeightOptimizer([parameter], functools.partial(SGD, lr=1.0))
    for _ in range(64):  # each step is below bf16's resolution at 1, which is 2⁻⁷
        parameter.grad = torch.full((1,), -(2.0**-10), dtype=torch.bfloat16)
        optimizer.step()
    assert parameter.item() == 1 + 64 * 2.0**-10


def test_the_copy_rounds_to_nearest_even() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 1.0 + 2.0**-7], dtype=torch.bfloat16))
    optimizer = MasterWeightOptimizer([parameter], functools.partial(SGD, lr=1.0))
    parameter.grad = torch.full((2,), -(2.0**-8), dtype=torch.bfloat16)  # half a unit up: a tie
    optimizer.step()
    assert parameter.tolist() == [1.0, 1.0 + 2.0**-6]


def test_gradient_scale_multiplies_in_fp32() -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    optimizer = MasterWeightOptimizer([parameter], functools.partial(SGD, lr=1.0))
    parameter.grad = torch.full((1,), 60000.0, dtype=torch.float16)
    optimizer.step(grad_scale=2.0**-30)
    assert optimizer.master(parameter).item() == -60000.0 * 2.0**-30


def test_schedulers_and_added_groups_reach_the_optimizer() -> None:
    ours, plain = model(), model()
    extra = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers: list[Optimizer] = [MasterWeightOptimizer(ours.parameters(), FACTORIES["adamw-fused"])]
    optimizers.append(FACTORIES["adamw-fused"](plain.parameters()))
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10) for optimizer in optimizers]
    for step in range(5):
        for module, optimizer, scheduler in zip((ours, plain), optimizers, schedulers, strict=True):
            backward(module, step)
            optimizer.step()
            scheduler.step()
    for optimizer, parameter in zip(optimizers, extra, strict=True):
        optimizer.add_param_group({"params": [parameter], "lr": 0.5})
        parameter.grad = torch.ones(2)
        optimizer.step()
        assert optimizer.param_groups[1]["weight_decay"] == 0.1
    assert same(weights(ours), weights(plain))
    assert torch.equal(extra[0], extra[1])


def test_closure_runs_with_gradients_enabled_and_its_value_returns() -> None:
    module = model(torch.bfloat16)
    optimizer = MasterWeightOptimizer(module.parameters(), FACTORIES["adam"])
    before = weights(module)
    loss = optimizer.step(lambda: backward(module, 0))
    assert isinstance(loss, Tensor)
    assert not same(weights(module), before)


@every_factory
@sixteen_bit
def test_state_dict_resumes_bit_for_bit(factory: Callable[..., Optimizer], dtype: torch.dtype) -> None:
    first, second = model(dtype), model(dtype)
    optimizer = MasterWeightOptimizer(groups(first), factory)
    for step in range(3):
        backward(first, step)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert all(entry["master_param"].dtype == torch.float32 for entry in saved["state"].values())
    second.load_state_dict(first.state_dict())
    resumed = MasterWeightOptimizer(groups(second), factory)
    resumed.load_state_dict(saved)
    for step in range(3, 6):
        for module, each in ((first, optimizer), (second, resumed)):
            backward(module, step)
            each.step()
    assert same(weights(first), weights(second))
    assert same(optimizer.state_dict(), resumed.state_dict())


def test_fp32_state_dicts_are_exchanged_with_the_optimizer_alone() -> None:
    ours, plain = model(), model()
    optimizer = MasterWeightOptimizer(groups(ours), FACTORIES["adam"])
    backward(ours, 0)
    optimizer.step()
    alone = FACTORIES["adam"](groups(plain))
    alone.load_state_dict(optimizer.state_dict())
    assert same(alone.state_dict(), optimizer.state_dict())
    optimizer.load_state_dict(alone.state_dict())
    assert set(optimizer.state[next(ours.parameters())]) == {"step", "exp_avg", "exp_avg_sq"}


def test_without_masters_they_are_taken_from_the_parameters() -> None:
    module = model(torch.bfloat16)
    optimizer = MasterWeightOptimizer(module.parameters(), FACTORIES["adam"])
    state = FACTORIES["adam"](module.parameters()).state_dict()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(2.0)
    optimizer.load_state_dict(state)
    assert all((optimizer.master(p) == 2.0).all() for p in module.parameters())


def test_a_parameter_without_gradient_keeps_its_bits() -> None:
    module = model(torch.bfloat16)
    optimizer = MasterWeightOptimizer(module.parameters(), FACTORIES["adam"])
    backward(module, 0)
    first = next(module.parameters())
    first.grad = None
    kept = first.detach().clone()
    optimizer.step()
    assert torch.equal(first, kept)
    assert first not in optimizer.state


def test_deepcopy_is_independent() -> None:
    module = model(torch.bfloat16)
    optimizer = MasterWeightOptimizer(module.parameters(), FACTORIES["adam"])
    backward(module, 0)
    twin_module, twin = copy.deepcopy((module, optimizer))
    for parameter, other in zip(module.parameters(), twin_module.parameters(), strict=True):
        other.grad = parameter.grad
    optimizer.step()
    before = weights(twin_module)
    assert not same(weights(module), before)
    twin.step()
    assert same(weights(module), weights(twin_module))
