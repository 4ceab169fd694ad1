"""A GPT-2 whose linear layers take a set time: they compute, then sleep until it is over.

So compute time is independent of the machine's drift and contention, and only the order of ops is
measured. The layers are operators of their own (``torch.library``), so that recomputation repeats
or skips them like others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from gpt2 import GPT2, Linear, Size
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula


@contextmanager
def lasting(seconds: float) -> Iterator[None]:
    """What is inside lasts so long, at least."""
    end_s = time.monotonic() + seconds
    yield
    rest = end_s - time.monotonic()
    if rest > 0:
        time.sleep(rest)


def forward_s(x: Tensor, weight: Tensor, flop_per_s: float) -> float:
    """Seconds of one product at this rate."""
    return 2 * x.numel() * weight.shape[0] / flop_per_s


@torch.library.custom_op("hetero_benchmarks::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor, flop_per_s: float) -> Tensor:
    """``torch.nn.functional.linear``, at a rate."""
    with lasting(forward_s(x, weight, flop_per_s)):
        return F.linear(x, weight, bias)


@torch.library.custom_op("hetero_benchmarks::linear_backward", mutates_args=())
def linear_backward(grad: Tensor, x: Tensor, weight: Tensor, flop_per_s: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the input, the weight and the bias; takes twice as long as forward."""
    with lasting(2 * forward_s(x, weight, flop_per_s)):
        flat = grad.flatten(0, -2)  # [B * T, out]
        return grad @ weight, flat.T @ x.flatten(0, -2), flat.sum(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.flop_per_s = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (*linear_backward(grad, *ctx.saved_tensors, ctx.flop_per_s), None)


linear.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.hetero_benchmarks.linear)
def _flop(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    flop = 2 * weight[0]
    for size in x:
        flop *= size
    return int(flop)


@register_flop_formula(torch.ops.hetero_benchmarks.linear_backward)
def _backward_flop(grad: Any, x: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * _flop(x, weight)


class PacedGPT2(GPT2):
    """The model with all linear layers of its blocks at a rate.

    Args:
        size: The model's size.
        flop_per_s: The rate.

    Attributes:
        losses: Of all steps.
    """

    def __init__(self, size: Size, flop_per_s: float) -> None:
        super().__init__(size)
        self.flop_per_s = flop_per_s
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach().clone())
        return loss

    def configure_model(self) -> None:
        super().configure_model()
        for module in self.modules():
            if isinstance(module, Linear):
                module.forward = partial(_forward, module, self.flop_per_s)  # type: ignore[method-assign]


def _forward(module: Linear, flop_per_s: float, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias, flop_per_s)
