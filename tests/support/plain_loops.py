"""Loops in plain PyTorch, and what becomes of them under ``lightning_hetero.offload``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from lightning_hetero import EmulatedDevice
from support.models import Model, Shape


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        yield torch.randint(0, 37, (4, 5), generator=generator), torch.randint(0, 37, (4, 5), generator=generator)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@dataclass
class Run:
    model: Model
    optimizers: list[Optimizer]
    losses: list[float] = field(default_factory=list)

    @property
    def optimizer(self) -> Optimizer:
        return self.optimizers[0]

    def backward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = loss_of(self.model, batch)
        loss.backward()
        self.losses.append(loss.item())
        return loss


def simple(run: Run) -> None:
    for batch in batches(5):
        run.optimizer.zero_grad()
        run.backward(batch)
        run.optimizer.step()


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


def outcome(
    loop: Callable[[Run], None],
    make: Callable[[nn.Module], list[Optimizer]],
    context: Callable[[Model, Any], Any] | None,
    shape: Shape,
) -> dict[str, Any]:
    torch.manual_seed(3)
    model = Model(shape)
    optimizers = make(model)
    run = Run(model, optimizers)
    around: AbstractContextManager[Any] = nullcontext() if context is None else context(model, optimizers)
    torch.manual_seed(4)
    with around:
        loop(run)
    return {
        "losses": run.losses,
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "state": [copy.deepcopy(one.state_dict()["state"]) for one in optimizers],
        "random": torch.get_rng_state(),
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
    }


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
