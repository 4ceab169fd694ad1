"""``torch.optim.Adam`` and ``AdamW`` as hyper-parameters for the native kernels.

The bits are those of ``fused=True``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hetero import _native
from lightning_hetero._native import Hyper, Segment
from lightning_hetero.store.live.blocks import Part

DTYPES = {torch.float32: _native.F32, torch.bfloat16: _native.BF16, torch.float16: _native.F16}

# Names in ``optimizer.state[param]``: torch's names, and our fp32 master of 16-bit weights.
MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master_param"

MASTERED = (torch.bfloat16, torch.float16)  # dtypes of weights with an fp32 master
_PLAIN = {"amsgrad": False, "capturable": False, "differentiable": False}
SUPPORTED = "torch.optim.Adam or AdamW without amsgrad, capturable and differentiable, on weights of at most 32 bits"
"""What :func:`supports` holds for, in words."""


def state_names(dtype: torch.dtype) -> tuple[str, ...]:
    """Names of the native state arrays of a part with weights of ``dtype``, in their order."""
    return MOMENTS if dtype == torch.float32 else (MASTER, *MOMENTS)


def supports(optimizer: Optimizer) -> bool:
    """Whether the native kernels run this optimizer: torch's Adam or AdamW, with plain options."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    for group in optimizer.param_groups:
        if any(group.get(k, v) != v for k, v in _PLAIN.items()):
            return False
        numbers = (*group["betas"], group["eps"], group["weight_decay"])
        if not (isinstance(group["lr"], int | float | Tensor) and all(isinstance(x, int | float) for x in numbers)):
            return False
        if any(p.dtype not in DTYPES for p in group["params"]):
            return False
    return True


def is_decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether weight decay acts on the weights (AdamW) rather than on the gradient."""
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


def with_numbers(group: dict[str, Any]) -> dict[str, Any]:
    """A group with the learning rate as a number, if it is a tensor."""
    lr = group["lr"]
    return {**group, "lr": float(lr)} if isinstance(lr, Tensor) else group


def hyper(optimizer: Optimizer, group: dict[str, Any], step: float) -> Hyper:
    """The numbers of a parameter's next update.

    Args:
        optimizer: The user's optimizer.
        group: The parameter's group.
        step: Its count of steps after this one.
    """
    beta1, beta2 = group["betas"]
    flags = (_native.ADAMW if is_decoupled(optimizer, group) else 0) | (_native.MAXIMIZE if group["maximize"] else 0)
    return Hyper(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        step=step,
        flags=flags,
    )


def request(part: Part, grads: Iterable[tuple[int, Hyper, Tensor]]) -> tuple[list[Segment], list[Hyper]]:
    """The engine's form of one update: the parameters to update, with their numbers.

    Args:
        part: The part.
        grads: Index in the part, its numbers, and the gradient of its piece, dense and in the
            parameter's memory order.
    """
    hypers: dict[Hyper, int] = {}
    segments = []
    for index, numbers, grad in grads:
        start, length = part.pieces[index]
        if length:
            hyper = hypers.setdefault(numbers, len(hypers))
            segments.append(Segment(start, length, grad.data_ptr(), DTYPES[grad.dtype], hyper))
    return segments, list(hypers)
