"""Compares what a recomputation makes with what forward had made, by samples.

[Note: Samples]
A forward that depends on something that a recomputation does not find again would give backward
other values, without an error: a global variable, a list that each forward extends, weights that
``torch.func.functional_call`` has put in the place of the block's. So 64 values, spread evenly, of
each tensor that forward drops are compared with the recomputed ones. They are other values if more
than half of the samples differ. Fewer do for a good reason: some operators leave parts of what they
save unfilled, such as the padding of attention's sums.

On the CPU samples differ if their bits do. Kernels of GPUs may add in another order each time, so
there they differ if it is by more than such an order explains. There the answer is read when the
next batch but one begins, since reading it at once would make the host wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

COUNT = 64
_ROUNDINGS = 16  # of the largest sample


def sample(tensor: Tensor) -> Tensor:
    """Copies of some values of a tensor, at the same places for the same layout."""
    with torch._C._DisableTorchDispatch():  # nobody else counts these operators
        tensor = tensor.detach()
        step = -(-tensor.numel() // COUNT)
        if torch.ops.aten.is_non_overlapping_and_dense(tensor):  # its storage has its values and no others
            step |= 1  # visits all columns of a matrix whose width is a power of two
            return tensor.as_strided((-(-tensor.numel() // step),), (step,)).clone()
        for dim in sorted(range(tensor.dim()), key=tensor.size, reverse=True):
            tensor = tensor[(slice(None),) * dim + (slice(None, None, step),)]
            step = -(-tensor.numel() // COUNT)
        return tensor.flatten().clone()


def differ(now: Tensor, then: Tensor) -> bool | Tensor:
    """Whether most samples differ; on other devices than the CPU a tensor that is there."""
    with torch._C._DisableTorchDispatch():
        same = (now == then) | ((now != now) & (then != then))
        if now.device.type != "cpu" and now.dtype.is_floating_point:
            largest = then.abs().nan_to_num().max()
            same |= (now - then).abs() <= largest * (_ROUNDINGS * torch.finfo(now.dtype).eps)
        most = same.sum() * 2 < same.numel()
        return bool(most) if most.device.type == "cpu" else most
