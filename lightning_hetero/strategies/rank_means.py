"""Means of the gradients of ranks, apart from those that training computes; for ``verify=N``.

They are what docs/several-devices.md says of them: the sum over the ranks in float64, in their
order, rounded once. Gradients that accumulate are added after each mean. Those of blocks used
outside repeated ones are added up on each rank, and have one mean in the batch that ends the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_hetero.lanes.collectives import Collectives
from lightning_hetero.runtime.method_patches import Patches

if TYPE_CHECKING:
    from lightning.pytorch.plugins import Precision
    from torch.optim import Optimizer


class RankMeans:
    """The means of one rank's reference; all ranks call all methods, in the same order.

    Args:
        collectives: Those of the ranks.
        is_outside: Whether a parameter is used outside repeated blocks.
    """

    def __init__(self, collectives: Collectives, is_outside: Callable[[nn.Parameter], bool]) -> None:
        self._collectives, self._is_outside = collectives, is_outside
        self._kept: dict[nn.Parameter, Tensor] = {}

    def share(self, buffers: Iterable[Tensor]) -> None:
        """Gives all ranks the first one's buffers."""
        for buffer in buffers:
            self._collectives.broadcast(buffer)

    def backward_ended(self, params: Sequence[nn.Parameter], *, ends_step: bool) -> None:
        """Takes the gradients of a batch; if it ``ends_step``, the parameters get the means."""
        ready = [p for p in params if p.requires_grad and (ends_step or not self._is_outside(p))]
        used = self._collectives.agree([p.grad is not None for p in ready])
        for param, *by_ranks in zip(ready, *used, strict=True):
            if any(by_ranks):
                mean = self._mean(torch.zeros_like(param) if param.grad is None else param.grad)
                self._kept[param] = self._kept[param] + mean if param in self._kept else mean
                param.grad = None
        if ends_step:
            for param in ready:
                param.grad = self._kept.pop(param, None)

    def _mean(self, own: Tensor) -> Tensor:
        total = own.to(torch.float64)
        for rank in range(self._collectives.ranks):
            theirs = own.contiguous().clone()
            self._collectives.broadcast(theirs, rank)
            total = theirs.to(torch.float64) if rank == 0 else total + theirs
        return total.div_(self._collectives.ranks).to(own.dtype)

    @contextmanager
    def clipping(self, precision: Precision) -> Iterator[None]:
        """In the context norms are those of whole gradients, from sums of squares in float64."""
        patches = Patches()
        patches.replace(precision, "clip_grad_by_norm", partial(_clip, precision))
        try:
            yield
        finally:
            patches.restore()


def _clip(precision: Precision, optimizer: Optimizer, clip_val: float) -> None:
    given = [(p, p.grad) for p in precision.main_params(optimizer) if p.grad is not None]
    norms = [torch.tensor(math.sqrt(float(grad.double().square().sum())), dtype=grad.dtype) for _, grad in given]
    torch.nn.utils.clip_grads_with_norm_([p for p, _ in given], clip_val, torch.stack(norms).norm())
