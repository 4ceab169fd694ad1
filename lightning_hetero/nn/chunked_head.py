"""The head of a language model and its loss, a few rows of logits at a time.

[Note: Chunked head]
Logits are a row of the vocabulary's size per token, and cross entropy needs several copies of them.
For a large vocabulary they take more memory than a block of the model. Here rows are computed in
chunks. Each chunk gives its loss, the gradient of its inputs, and its share of the gradients of
weight and bias. Then its logits are overwritten. So the peak depends neither on the number of
tokens nor on the product of tokens and vocabulary.

Gradients are computed in forward, because backward would have to compute the logits again. Backward
multiplies them by the gradient of the loss. Higher derivatives do not exist.

The size of a chunk depends on the vocabulary only, so the bits do not depend on a plan or a budget.
They differ from those of the unchunked head by roundings: chunks' shares of the weight's gradient
are added in its dtype, and gradients are divided by the number of tokens after matrix products, not
before. With fp16, shares are added in fp32, because sums over tokens may exceed fp16.

``torch.nn.functional.linear_cross_entropy`` does the same since torch 2.13. It is not used: on a
CPU with bf16 it adds the losses of tokens in bf16 and takes ten times as long.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.model import CHUNK_LOGITS

_REDUCTIONS = ("mean", "sum")


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """``cross_entropy(linear(hidden, weight, bias).float(), targets)`` without all logits at once.

    Args:
        hidden: Inputs of the head, floating point, ``(..., features)``.
        weight: ``(vocabulary, features)``.
        targets: Class of each row, int64, ``(...)``.
        bias: ``(vocabulary,)``.
        ignore_index: Rows with this target count nothing.
        reduction: ``"mean"`` over the rows that count, or ``"sum"``.

    Returns:
        The loss, a scalar in fp32; in fp64 for fp64 inputs.

    Raises:
        ConfigError: Another reduction.
        ValueError: Shapes that do not fit.
    """
    if reduction not in _REDUCTIONS:
        raise ConfigError(f"reduction={reduction!r}; allowed: {', '.join(map(repr, _REDUCTIONS))}.")
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"hidden has rows of shape {tuple(hidden.shape[:-1])}, and targets have shape {tuple(targets.shape)}.")
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    with torch.autocast(device, enabled=False):
        total: Tensor = _ChunkedLoss.apply(rows, weight, bias, flat, ignore_index)  # type: ignore[no-untyped-call]
    return total if reduction == "sum" else total / (flat != ignore_index).sum()


class ChunkedHead(nn.Linear):
    """A linear head that returns the loss if it gets targets, and logits otherwise.

    It has the parameters of :class:`torch.nn.Linear`, with the same names, so it loads and saves
    the same state. See [Note: Chunked head].
    """

    def forward(self, input: Tensor, targets: Tensor | None = None, *, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
        """Logits ``(..., vocabulary)``; with ``targets``, as :func:`chunked_cross_entropy`."""
        if targets is None:
            return super().forward(input)
        return chunked_cross_entropy(input, self.weight, targets, self.bias, ignore_index=ignore_index, reduction=reduction)


class _Context(Protocol):
    needs_input_grad: tuple[bool, ...]
    gradients: tuple[Tensor | None, ...] | None
    dtype: torch.dtype


class _ChunkedLoss(torch.autograd.Function):
    """Sum of the losses of all rows."""

    @staticmethod
    def forward(ctx: _Context, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int) -> Tensor:
        chunks = _Chunks(hidden, weight, bias, needed=ctx.needs_input_grad)
        total = chunks.run(targets, ignore_index)
        ctx.gradients, ctx.dtype = (chunks.hidden_grad, chunks.weight_grad, chunks.bias_grad), hidden.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "backward ran twice through a chunked head. Its gradients were computed in forward and have been used up. Compute "
                "the loss again, or use the head without chunks."
            )
        gradients, ctx.gradients = ctx.gradients, None
        return (*(None if g is None else g.mul_(grad).to(ctx.dtype) for g in gradients), None, None)


class _Chunks:
    """The loop over chunks of rows, with the gradients that it computes."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, *, needed: tuple[bool, ...]) -> None:
        self._hidden, self._weight, self._bias = hidden, weight, bias
        self._sums = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        added = self._sums if weight.dtype == torch.float16 else weight.dtype
        self.hidden_grad = torch.empty_like(hidden) if needed[0] else None
        self.weight_grad = torch.zeros_like(weight, dtype=added) if needed[1] else None
        self.bias_grad = torch.zeros_like(bias, dtype=self._sums) if bias is not None and needed[2] else None
        self._differentiates = any(needed)

    def run(self, targets: Tensor, ignore_index: int) -> Tensor:
        num_rows, vocabulary = len(self._hidden), len(self._weight)
        size = max(min(CHUNK_LOGITS // vocabulary, num_rows), 1)
        logits = self._hidden.new_empty(size, vocabulary)
        wide = logits if logits.dtype == self._sums else torch.empty_like(logits, dtype=self._sums)
        total = torch.zeros((), dtype=self._sums, device=logits.device)
        for start in range(0, num_rows, size):
            rows = slice(start, start + size)
            count = len(self._hidden[rows])
            total += self._chunk(rows, logits[:count], wide[:count], targets[rows], ignore_index)
        return total

    def _chunk(self, rows: slice, logits: Tensor, wide: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        """Adds one chunk's gradients; returns its loss. ``logits`` and ``wide`` are overwritten."""
        hidden, weight = self._hidden[rows], self._weight
        ignored = targets == ignore_index
        classes = targets.masked_fill(ignored, 0)[:, None]
        if self._bias is None:
            torch.mm(hidden, weight.t(), out=logits)
        else:
            torch.addmm(self._bias, hidden, weight.t(), out=logits)
        if wide.dtype != logits.dtype:
            wide.copy_(logits)
        of_class, top = wide.gather(1, classes), wide.amax(1, keepdim=True)
        sums = wide.sub_(top).exp_().sum(1, keepdim=True)
        losses = (top + sums.log() - of_class).squeeze(1).masked_fill(ignored, 0)
        if self._differentiates:
            wide.div_(sums).scatter_add_(1, classes, torch.full_like(of_class, -1)).masked_fill_(ignored[:, None], 0)
            self._differentiate(rows, hidden, logits if wide.dtype == logits.dtype else logits.copy_(wide), wide)
        return losses.sum()

    def _differentiate(self, rows: slice, hidden: Tensor, grad: Tensor, wide: Tensor) -> None:
        """Adds the gradients of a chunk, whose logits have the gradient ``grad``, or ``wide``."""
        if self.hidden_grad is not None:
            torch.mm(grad, self._weight, out=self.hidden_grad[rows])
        if self.weight_grad is not None:
            source = grad if grad.dtype == self.weight_grad.dtype else wide
            self.weight_grad.addmm_(source.t(), hidden.to(source.dtype))
        if self.bias_grad is not None:
            self.bias_grad += wide.sum(0)
