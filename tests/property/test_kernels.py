"""The update kernels against torch's fused optimizers, bit by bit, on every instruction set of this
machine.

The contraction of exp_avg_sq in torch's kernel is its compiler's choice, not its source's. So there
are two checks: equality of all bits, which is what the library promises for the torch that it was
developed with, and a bound in units in the last place, which must hold for any torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples
from torch import Tensor

from lightning_hetero import _native
from lightning_hetero.errors import UnsupportedError

KNOWN_TORCH = "2.13"
DTYPES = {torch.float32: _native.F32, torch.bfloat16: _native.BF16, torch.float16: _native.F16}


def _isas() -> list[_native.Isa]:
    current, available = _native.isa(), []
    for isa in _native.Isa:
        try:
            _native.force_isa(isa)
        except UnsupportedError:
            continue
        available.append(isa)
    _native.force_isa(current)
    return available


@pytest.fixture(autouse=True)
def _restore_isa() -> Iterator[None]:
    before = _native.isa()
    yield
    _native.force_isa(before)


@dataclass(frozen=True)
class Case:
    numel: int
    decoupled: bool
    maximize: bool
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    steps: int
    seed: int
    threads: int
    log10_grad: float

    def flags(self) -> int:
        return (_native.ADAMW if self.decoupled else 0) | (_native.MAXIMIZE if self.maximize else 0)


BETAS = st.sampled_from([0.0, 0.3, 0.5, 0.6, 0.8, 0.9, 0.95, 0.99, 0.999]) | st.floats(0.0, 0.9999)
CASES = st.builds(
    Case,
    numel=st.integers(1, 70) | st.sampled_from([127, 1000, 4095, 20001]),
    decoupled=st.booleans(),
    maximize=st.booleans(),
    lr=st.floats(1e-7, 1.0),
    betas=st.tuples(BETAS, BETAS),
    eps=st.sampled_from([1e-8, 1e-6, 1e-3, 0.1]),
    weight_decay=st.just(0.0) | st.floats(1e-6, 1.0),
    steps=st.integers(1, 6),
    seed=st.integers(0, 2**31),
    threads=st.integers(1, 3),
    log10_grad=st.floats(-8, 3),
)


@dataclass
class State:
    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.param, self.exp_avg, self.exp_avg_sq


def _gradients(case: Case, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(case.seed)
    param = torch.randn(case.numel, generator=generator)
    scale = 10.0**case.log10_grad
    return param, [(torch.randn(case.numel, generator=generator) * scale).to(dtype) for _ in range(case.steps)]


def _by_torch(case: Case, param: Tensor, grads: list[Tensor]) -> State:
    param = param.clone().requires_grad_()
    cls = torch.optim.AdamW if case.decoupled else torch.optim.Adam
    optimizer = cls(
        [param],
        lr=case.lr,
        betas=case.betas,
        eps=case.eps,
        weight_decay=case.weight_decay,
        maximize=case.maximize,
        fused=True,
    )
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    state = optimizer.state[param]
    return State(param.detach(), state["exp_avg"], state["exp_avg_sq"])


def _by_us(case: Case, param: Tensor, grads: list[Tensor], *, copy: Tensor | None = None, grad_scale: float = 1.0) -> State:
    state = State(param.clone(), torch.zeros(case.numel), torch.zeros(case.numel))
    for step, grad in enumerate(grads, start=1):
        _native.adam(
            param=state.param.data_ptr(),
            exp_avg=state.exp_avg.data_ptr(),
            exp_avg_sq=state.exp_avg_sq.data_ptr(),
            grad=grad.data_ptr(),
            grad_dtype=DTYPES[grad.dtype],
            numel=case.numel,
            copy=None if copy is None else copy.data_ptr(),
            copy_dtype=_native.BF16 if copy is None else DTYPES[copy.dtype],
            hyper=_native.Hyper(case.lr, *case.betas, case.eps, case.weight_decay, float(step), case.flags()),
            grad_scale=grad_scale,
            threads=case.threads,
        )
    return state


def _differing(a: Tensor, b: Tensor) -> int:
    """Elements whose bits differ; NaNs are equal to each other."""
    integer = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return int(((a.view(integer) != b.view(integer)) & ~(a.isnan() & b.isnan())).sum())


def _ulps(a: Tensor, b: Tensor) -> int:
    """Largest distance in units in the last place."""

    def ordered(x: Tensor) -> Tensor:
        bits = x.view(torch.int32).long()
        return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return int((ordered(a) - ordered(b)).abs().max())


@pytest.mark.parametrize("isa", _isas())
@given(case=CASES)
def test_updates_have_the_bits_of_torch_fused(isa: _native.Isa, case: Case) -> None:
    if not torch.__version__.startswith(KNOWN_TORCH):
        pytest.skip(f"bits are promised for torch {KNOWN_TORCH}; the bound below holds for {torch.__version__}")
    _native.force_isa(isa)
    param, grads = _gradients(case)
    ours, theirs = _by_us(case, param, grads), _by_torch(case, param, grads)
    assert [_differing(a, b) for a, b in zip(ours.tensors(), theirs.tensors(), strict=True)] == [0, 0, 0]


@examples(30)
@given(case=CASES)
def test_the_first_update_is_within_an_ulp_of_any_torch(case: Case) -> None:
    param, grads = _gradients(case)
    ours, theirs = _by_us(case, param, grads[:1]), _by_torch(case, param, grads[:1])
    # From zero state: exp_avg has one rounding, exp_avg_sq two, whatever is contracted.
    assert _ulps(ours.exp_avg, theirs.exp_avg) <= 2
    assert _ulps(ours.exp_avg_sq, theirs.exp_avg_sq) <= 2


@pytest.mark.parametrize("isa", _isas())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@examples(25)
@given(case=CASES)
def test_16_bit_gradients_equal_upcast_ones(isa: _native.Isa, dtype: torch.dtype, case: Case) -> None:
    _native.force_isa(isa)
    param, grads = _gradients(case, dtype)
    ours, upcast = _by_us(case, param, grads), _by_us(case, param, [grad.float() for grad in grads])
    assert [_differing(a, b) for a, b in zip(ours.tensors(), upcast.tensors(), strict=True)] == [0, 0, 0]


@pytest.mark.parametrize("isa", _isas())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@examples(25)
@given(case=CASES, log10_param=st.floats(-42, 38))
def test_the_16_bit_copy_is_torchs_cast(isa: _native.Isa, dtype: torch.dtype, case: Case, log10_param: float) -> None:
    _native.force_isa(isa)
    param, grads = _gradients(case)
    copy = torch.empty(case.numel, dtype=dtype)
    state = _by_us(case, param.double().mul(10.0**log10_param).float(), grads, copy=copy)
    assert _differing(copy, state.param.to(dtype)) == 0


@examples(25)
@given(case=CASES, scale=st.floats(1e-6, 10.0))
def test_the_gradient_scale_is_a_multiplication_in_fp32(case: Case, scale: float) -> None:
    param, grads = _gradients(case)
    ours = _by_us(case, param, grads, grad_scale=scale)
    scaled = _by_us(case, param, [grad * torch.tensor(scale, dtype=torch.float32) for grad in grads])
    assert [_differing(a, b) for a, b in zip(ours.tensors(), scaled.tensors(), strict=True)] == [0, 0, 0]


@examples(15)
@given(case=CASES, threads=st.integers(2, 9))
def test_threads_and_instruction_sets_do_not_change_a_bit(case: Case, threads: int) -> None:
    param, grads = _gradients(case)
    first = _by_us(case, param, grads)
    for isa in _isas():
        _native.force_isa(isa)
        again = _by_us(Case(**{**vars(case), "threads": threads}), param, grads)
        assert [_differing(a, b) for a, b in zip(first.tensors(), again.tensors(), strict=True)] == [0, 0, 0]


@examples(40)
@given(
    numel=st.integers(0, 200) | st.sampled_from([65535, 65536, 65537, 200001]),
    dtype=st.sampled_from(list(DTYPES)),
    threads=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
def test_sum_of_squares_is_accurate_and_does_not_depend_on_threads(numel: int, dtype: torch.dtype, threads: int, seed: int) -> None:
    x = torch.randn(max(numel, 1), generator=torch.Generator().manual_seed(seed)).to(dtype)
    first = _native.sum_of_squares(x.data_ptr(), numel, dtype=DTYPES[dtype])
    assert first == pytest.approx(x[:numel].double().square().sum().item(), rel=1e-12)
    for isa in _isas():
        _native.force_isa(isa)
        assert _native.sum_of_squares(x.data_ptr(), numel, dtype=DTYPES[dtype], threads=threads) == first


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
def test_infinity_and_nan_spread_as_in_torch(special: float) -> None:
    case = Case(33, True, False, 1e-3, (0.9, 0.999), 1e-8, 0.01, 2, 0, 1, 0.0)
    param, grads = _gradients(case)
    grads[0][::5] = special
    ours, theirs = _by_us(case, param, grads), _by_torch(case, param, grads)
    assert [_differing(a, b) for a, b in zip(ours.tensors(), theirs.tensors(), strict=True)] == [0, 0, 0]
    assert _native.sum_of_squares(grads[0].data_ptr(), 33) != pytest.approx(0)
