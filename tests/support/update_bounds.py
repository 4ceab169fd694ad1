"""How far two right implementations of Adam may be apart after one step from equal weights and no
state.

Both round after each operation, but one may contract a product and a sum. The step ``lr * update``
then differs by a few units in its own last place, and the weight by one in its. In units of the
weight's last place there is no bound: a weight that nearly equals its step cancels it, and keeps
the step's error. In the same way moments may cancel a gradient, if they are not 0 before.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

STEP_ULPS = 4


def ulp(x: Tensor) -> Tensor:
    """The distance of each number to the next one further from 0, in fp64."""
    away = torch.full_like(x, torch.inf).copysign(x)
    return (torch.nextafter(x, away).double() - x.double()).abs()


def step_of(exp_avg: Tensor, exp_avg_sq: Tensor, *, step: int, lr: float, betas: tuple[float, float], eps: float) -> Tensor:
    """``lr * update`` in fp32, from the moments after the step."""
    m, v = exp_avg.double() / (1 - betas[0] ** step), exp_avg_sq.double() / (1 - betas[1] ** step)
    return (lr * m / (v.sqrt() + eps)).float()


def excess(got: Tensor, expected: Tensor, step: Tensor) -> float:
    """By how much two results differ, as a multiple of what they may: right up to 1.

    Weights of 16 bits are rounded from fp32, so that one more unit of theirs may be between them.
    """
    allowed = ulp(torch.where(got.abs() > expected.abs(), got, expected)) + STEP_ULPS * ulp(step)
    if expected.dtype != torch.float32:
        allowed = allowed + ulp(expected.float())
    ratio = (got.double() - expected.double()).abs() / allowed
    return float(ratio.nan_to_num(math.inf).max()) if ratio.numel() else 0.0
