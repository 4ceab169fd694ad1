"""The chunked head computes what linear and cross entropy compute, in less memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero.errors import ConfigError
from lightning_hetero.nn import ChunkedHead, chunked_cross_entropy, chunked_head

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # of the largest gradient


def gradients(loss: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    return list(torch.autograd.grad(loss * 3, [t for t in tensors if t is not None]))


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(list(TOLERANCE)),
    rows=st.integers(1, 40),
    vocabulary=st.integers(2, 30),
    chunk=st.integers(1, 200),
    biased=st.booleans(),
    reduction=st.sampled_from(["mean", "sum"]),
    ignored=st.sampled_from([-100, 0, 1]),
    seed=st.integers(0, 1000),
)
def test_loss_and_gradients_are_those_of_cross_entropy(
    dtype: torch.dtype, rows: int, vocabulary: int, chunk: int, biased: bool, reduction: str, ignored: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, 8, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(vocabulary, generator=generator).to(dtype).requires_grad_() if biased else None
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < 0.3] = ignored
    targets[0] = vocabulary - 1 if vocabulary - 1 != ignored else 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_head, "CHUNK_LOGITS", chunk)
        loss = chunked_cross_entropy(hidden, weight, targets, bias, ignore_index=ignored, reduction=reduction)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    plain = F.cross_entropy(F.linear(hidden, weight, bias).to(wide), targets, ignore_index=ignored, reduction=reduction)
    torch.testing.assert_close(loss, plain, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for ours, theirs in zip(gradients(loss, hidden, weight, bias), gradients(plain, hidden, weight, bias), strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours.double() - theirs.double()).abs().max() <= TOLERANCE[dtype] * max(1.0, theirs.double().abs().max().item())


def test_only_gradients_that_are_needed_are_computed() -> None:
    hidden, weight, targets = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4), torch.tensor([0, 1, 2, 3, 6])
    chunked_cross_entropy(hidden, weight, targets).backward()
    assert hidden.grad is not None
    assert weight.grad is None
    with torch.no_grad():
        assert not chunked_cross_entropy(hidden, weight, targets).requires_grad


def test_no_more_than_a_chunk_of_logits_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.dtype.is_floating_point:
                largest = max(largest, result.numel())
            return result

    monkeypatch.setattr(chunked_head, "CHUNK_LOGITS", 4 * 100)
    hidden, weight = torch.randn(64, 2, requires_grad=True), torch.randn(100, 2, requires_grad=True)
    with Watch():
        chunked_cross_entropy(hidden, weight, torch.randint(0, 100, (64,))).backward()
    assert largest == 4 * 100


def test_large_logits_do_not_overflow() -> None:
    hidden, weight = torch.tensor([[1000.0], [-1000.0]]), torch.tensor([[1.0], [-1.0]])
    assert chunked_cross_entropy(hidden, weight, torch.tensor([0, 0]), reduction="sum").item() == 2000


def test_sums_over_tokens_beyond_fp16_keep_their_gradients() -> None:
    hidden, weight = torch.full((70000, 1), 2.0).half(), torch.zeros(2, 1).half().requires_grad_()
    chunked_cross_entropy(hidden, weight, torch.zeros(70000, dtype=torch.long)).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[-1.0], [1.0]]


def test_a_second_backward_is_refused() -> None:
    head = ChunkedHead(4, 7)
    loss = head(torch.randn(2, 3, 4), torch.randint(0, 7, (2, 3)))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ran twice"):
        loss.backward()


def test_the_head_has_the_parameters_of_linear_and_returns_logits_without_targets() -> None:
    linear, head = nn.Linear(4, 7), ChunkedHead(4, 7)
    head.load_state_dict(linear.state_dict())
    hidden = torch.randn(2, 4)
    assert torch.equal(head(hidden), linear(hidden))


def test_autocast_casts_as_for_linear() -> None:
    head = ChunkedHead(4, 7)
    hidden, targets = torch.randn(6, 4), torch.randint(0, 7, (6,))
    with torch.autocast("cpu", torch.bfloat16):
        loss, plain = head(hidden, targets), F.cross_entropy(F.linear(hidden, head.weight, head.bias).float(), targets)
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-5)
    loss.backward()
    assert head.weight.grad is not None
    assert head.weight.grad.dtype == torch.float32


def test_bad_arguments_are_named() -> None:
    head = ChunkedHead(4, 7)
    with pytest.raises(ConfigError, match="reduction='none'; allowed: 'mean', 'sum'"):
        head(torch.randn(2, 4), torch.zeros(2, dtype=torch.long), reduction="none")
    with pytest.raises(ValueError, match=r"rows of shape \(2,\).*shape \(3,\)"):
        head(torch.randn(2, 4), torch.zeros(3, dtype=torch.long))
