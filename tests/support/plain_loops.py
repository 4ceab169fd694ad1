"""Loops in plain PyTorch, and what they end with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_hetero import EmulatedDevice
from support.models import Model, Shape

HOST = torch.device("cpu")
OVERLAPS = ("none", "forward", "backward")


Batch = tuple[Tensor, Tensor]


def batches(count: int, device: torch.device = HOST) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        tokens, targets = (torch.randint(0, 37, (4, 5), generator=generator) for _ in range(2))
        yield tokens.to(device), targets.to(device)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@dataclass
class Run:
    model: Model
    optimizers: list[Optimizer]
    losses: list[float] = field(default_factory=list)
    device: torch.device = HOST

    @property
    def optimizer(self) -> Optimizer:
        return self.optimizers[0]

    def batches(self, count: int) -> Iterator[Batch]:
        return batches(count, self.device)

    def backward(self, batch: Batch) -> Tensor:
        loss = loss_of(self.model, batch)
        loss.backward()
        self.losses.append(loss.item())
        return loss


def simple(run: Run) -> None:
    for batch in run.batches(5):
        run.optimizer.zero_grad()
        run.backward(batch)
        run.optimizer.step()


def zero_at_end(run: Run) -> None:
    for batch in run.batches(5):
        run.backward(batch)
        run.optimizer.step()
        run.model.zero_grad()


def closure(run: Run) -> None:
    for batch in run.batches(4):

        def compute(batch: Batch = batch) -> Tensor:
            run.optimizer.zero_grad()
            return run.backward(batch)

        run.optimizer.step(compute)


def scheduled(run: Run) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
    for batch in run.batches(4):
        run.optimizer.zero_grad()
        run.backward(batch)
        run.optimizer.step()
        scheduler.step()


def evaluating(run: Run) -> None:
    for number, batch in enumerate(run.batches(5)):
        run.optimizer.zero_grad()
        run.backward(batch)
        run.optimizer.step()
        if number % 2:
            run.model.eval()
            with torch.no_grad():
                for other in run.batches(2):
                    run.losses.append(loss_of(run.model, other).item())
            run.losses.append(loss_of(run.model, batch).item())  # with a graph that nobody uses
            run.model.train()
            run.losses.append(sum(value.double().sum().item() for value in run.model.state_dict().values()))


def accumulating(run: Run) -> None:
    for number, batch in enumerate(run.batches(6)):
        run.backward(batch)
        if number % 2:
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=False)


def never_zeroed(run: Run) -> None:
    for batch in run.batches(4):
        run.backward(batch)
        run.optimizer.step()


def clipped(run: Run) -> None:
    for batch in run.batches(4):
        run.optimizer.zero_grad()
        run.backward(batch)
        run.losses.append(float(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)))
        run.optimizer.step()


def scaled(run: Run) -> None:
    scaler = torch.amp.GradScaler(run.device.type, init_scale=8.0)
    for batch in run.batches(4):
        run.optimizer.zero_grad()
        loss = loss_of(run.model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(run.optimizer)
        run.losses.append(float(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)))
        scaler.step(run.optimizer)
        scaler.update()
        run.losses.append(loss.item())


def autocast(run: Run) -> None:
    for batch in run.batches(4):
        run.optimizer.zero_grad()
        with torch.autocast(run.device.type, torch.bfloat16):
            loss = loss_of(run.model, batch)
        loss.backward()
        run.losses.append(loss.item())
        run.optimizer.step()


def two_forwards(run: Run) -> None:
    given = list(run.batches(6))
    for one, other in zip(given[::2], given[1::2], strict=True):
        run.optimizer.zero_grad()
        with torch.no_grad():
            target = run.model(one[0])
        loss = loss_of(run.model, one) + loss_of(run.model, other) + F.mse_loss(run.model(one[0]), target + 1)
        loss.backward()
        run.losses.append(loss.item())
        run.optimizer.step()


def two_backwards(run: Run) -> None:
    for batch in run.batches(3):
        run.optimizer.zero_grad()
        loss = loss_of(run.model, batch)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        run.losses.append(loss.item())
        run.optimizer.step()


def by_hand(run: Run) -> None:
    """Gradients come as results, and the loop sets them."""
    params = list(run.model.parameters())
    for batch in run.batches(3):
        loss = loss_of(run.model, batch)
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.grad = grad * 0.5
        run.losses.append(loss.item())
        run.optimizer.step()


def in_parts(run: Run) -> None:
    """The loop calls the parts of the model, not the model."""
    model = run.model
    for batch in run.batches(3):
        run.optimizer.zero_grad()
        x = model.embed(batch[0])
        for block in model.blocks:
            x = block(x)
        loss = F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), batch[1].flatten())
        loss.backward()
        run.losses.append(loss.item())
        run.optimizer.step()


def interrupted(run: Run) -> None:
    for number, batch in enumerate(run.batches(5)):
        run.optimizer.zero_grad()
        if number == 2:
            with suppress(IndexError):
                run.model(batch[0] + 1000)
            continue
        run.backward(batch)
        run.optimizer.step()


def failed_backward(run: Run) -> None:
    """Gradients until the failure stay; the loop drops them before the next forward."""

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    for number, batch in enumerate(run.batches(5)):
        run.optimizer.zero_grad()
        loss = loss_of(run.model, batch)
        if number % 2:
            hook = run.model.blocks[number // 2].up.weight.register_hook(fail)
            with suppress(ZeroDivisionError):
                loss.backward()
            hook.remove()
            continue
        loss.backward()
        run.losses.append(loss.item())
        run.optimizer.step()


def failed_closure(run: Run) -> None:
    def fail() -> Tensor:
        raise ZeroDivisionError

    for number, batch in enumerate(run.batches(4)):
        run.optimizer.zero_grad()
        run.backward(batch)
        with suppress(ZeroDivisionError):
            run.optimizer.step(fail if number == 1 else None)


def two_step(run: Run) -> None:
    """A step of the sharpness-aware kind: its closure computes the batch again."""
    for batch in run.batches(3):

        def compute(batch: Batch = batch) -> Tensor:
            run.optimizer.zero_grad()
            return run.backward(batch)

        compute()
        with torch.no_grad():
            for param in run.model.parameters():
                param.add_(0.01 * torch.zeros_like(param) if param.grad is None else 0.01 * param.grad)
        run.optimizer.step(compute)


LOOPS = [
    accumulating, never_zeroed, clipped, scaled, two_forwards, two_backwards, by_hand, interrupted, evaluating, failed_backward,
    failed_closure, two_step,
]  # fmt: skip
STEP_BY_STEP = [simple, zero_at_end, closure, scheduled, autocast, in_parts]  # step() follows each backward


def plans(tmp_path: Path) -> dict[str, dict[str, Any]]:
    small = {"disk_path": tmp_path / "store"}
    device = EmulatedDevice("2MiB")
    return {
        "host": {"plan": "host"},
        "disk": {"plan": "disk", **small},
        "device": {"plan": "host", "device": device},
    }


def adamw(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)]


def sgd(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)]


def outcome(
    loop: Callable[[Run], None],
    make: Callable[[nn.Module], list[Optimizer]],
    context: Callable[[Model, Any], Any] | None,
    shape: Shape,
    device: torch.device = HOST,
) -> dict[str, Any]:
    """What a loop ends with, moved to the host. Without a context the model is on the device."""
    torch.manual_seed(3)
    model = Model(shape)
    if context is None:
        model.to(device)
    optimizers = make(model)
    run = Run(model, optimizers, device=device)
    around: AbstractContextManager[Any] = nullcontext() if context is None else context(model, optimizers)
    torch.manual_seed(4)
    with around:
        loop(run)
    found = {
        "losses": run.losses,
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "state": [copy.deepcopy(one.state_dict()["state"]) for one in optimizers],
        "random": torch.get_rng_state(),
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
    }
    on_host: dict[str, Any] = tree_map_only(Tensor, Tensor.cpu, found)
    return on_host


def assert_equal(one: dict[str, Any], other: dict[str, Any], *, grads: bool = True) -> None:
    assert one["losses"] == other["losses"]
    for name, value in one["weights"].items():
        assert torch.equal(value, other["weights"][name]), name
    torch.testing.assert_close(one["state"], other["state"], rtol=0, atol=0)
    assert torch.equal(one["random"], other["random"])
    if grads:
        for a, b in zip(one["grads"], other["grads"], strict=True):
            assert (a is None) == (b is None)
            assert a is None or b is None or torch.equal(a, b)
