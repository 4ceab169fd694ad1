"""The bound between updates on an accelerator and on the CPU: right implementations keep it, wrong
ones do not.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from support.update_bounds import excess, step_of, ulp
from torch import Tensor

LR, BETAS, EPS, DECAY = 3e-3, (0.9, 0.999), 1e-8, 0.1
Case = tuple[Tensor, Tensor, tuple[Tensor, Tensor]]  # weights, gradients, moments
CONTRACTIONS = list(itertools.product((False, True), repeat=4))


def f32(x: Tensor) -> Tensor:
    return x.float().double()


def fused(a: Tensor | float, b: Tensor, c: Tensor, *, contracted: bool) -> Tensor:
    """``a * b + c`` in fp32, with one rounding or with two."""
    product = torch.as_tensor(a, dtype=torch.float64) * b
    return f32((product if contracted else f32(product)) + c)


def adamw(
    weight: Tensor, grad: Tensor, moments: tuple[Tensor, Tensor], contracted: tuple[bool, ...], *, step: int, eps: float = EPS
) -> tuple[Tensor, Tensor, Tensor]:
    """One step as torch's fused kernel writes it down, each operation rounded to fp32."""
    decays, first, second, moves = contracted
    w, g, m, v = (x.double() for x in (weight, grad, *moments))
    b1, b2, decay = (float(torch.tensor(x)) for x in (1 - BETAS[0], BETAS[1], LR * DECAY))
    w = fused(-decay, w, w, contracted=decays)
    m = fused(b1, f32(g - m), m, contracted=first)
    v = fused(b2, v, f32(f32(float(torch.tensor(1 - BETAS[1])) * g) * g), contracted=second)
    size = float(torch.tensor(LR / (1 - BETAS[0] ** step)))
    denominator = f32(f32(f32(v.sqrt()) / float(torch.tensor(math.sqrt(1 - BETAS[1] ** step)))) + eps)
    # contracted here: the step is divided first, so that a product and a sum are left
    w = fused(-size, f32(m / denominator), w, contracted=True) if moves else f32(w - f32(f32(size * m) / denominator))
    return w.float(), m.float(), v.float()


@pytest.fixture
def case() -> Case:
    """Weights of all sizes; half of them nearly equal to the step that they take."""
    rng = torch.Generator().manual_seed(1)
    n = 1 << 16
    grad = torch.randn(n, generator=rng)
    moments = torch.zeros(n), torch.zeros(n)
    weight = torch.randn(n, generator=rng) * torch.tensor(10.0).pow(torch.randint(-6, 2, (n,), generator=rng))
    _, m, v = adamw(weight, grad, moments, CONTRACTIONS[0], step=1)
    step = step_of(m, v, step=1, lr=LR, betas=BETAS, eps=EPS) / (1 - LR * DECAY)
    near = step * (1 + torch.randn(n, generator=rng) * 1e-6)
    return torch.where(torch.arange(n) % 2 == 0, weight, near), grad, moments


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_right_implementations_are_within_the_bound(case: Case, dtype: torch.dtype) -> None:
    results = [adamw(*case, contracted, step=1) for contracted in CONTRACTIONS]
    step = step_of(*results[0][1:], step=1, lr=LR, betas=BETAS, eps=EPS)
    worst = max(excess(a[0].to(dtype), b[0].to(dtype), step) for a, b in itertools.permutations(results, 2))
    assert (dtype == torch.float16) or worst
    assert worst <= 1


def test_units_of_the_weight_alone_are_no_bound(case: Case) -> None:
    """Where weight and step cancel, right implementations are thousands of these apart."""
    results = [adamw(*case, contracted, step=1)[0] for contracted in CONTRACTIONS]
    assert max(float(((a - b).double().abs() / ulp(b)).max()) for a, b in itertools.combinations(results, 2)) > 1000


@pytest.mark.parametrize("wrong", [{"step": 2}, {"eps": 1e-6}], ids=["bias", "eps"])
def test_wrong_implementations_are_outside(case: Case, wrong: dict[str, float]) -> None:
    right = adamw(*case, CONTRACTIONS[0], step=1)
    step = step_of(*right[1:], step=1, lr=LR, betas=BETAS, eps=EPS)
    other, *_ = adamw(*case, CONTRACTIONS[0], **{"step": 1, **wrong})
    assert excess(other, right[0], step) > 10
