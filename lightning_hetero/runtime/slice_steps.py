"""Steps of optimizers that run by their own code, on slices of parameters.

[Note: Steps on slices]
An optimizer that updates each element by itself does the same to a slice as to the same elements of
the whole. So for its step a flat stand-in takes the place of a parameter: this rank's piece of
weights, gradient and state. A rank without a piece has an empty one, so counts of steps are the
same on all ranks. Between two steps ``optimizer.state`` has handles of whole tensors ([Note: Held
pieces] in ``slice_reads``). State that is whole, as a checkpoint or code has given it, becomes a
piece with the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hetero.handles.offloaded_parameter import materialize
from lightning_hetero.handles.offloaded_tensor import OffloadedTensor
from lightning_hetero.optim import blockwise
from lightning_hetero.runtime.slice_reads import Held, SliceReads
from lightning_hetero.store.live.blocks import Part
from lightning_hetero.untyped import Options


def step(optimizer: Optimizer, part: Part, indices: Sequence[int], grads: Sequence[Tensor], reads: SliceReads) -> None:
    """One step for some parameters of a part, on this rank's slice of it.

    Args:
        optimizer: One that :func:`blockwise.is_by_element`.
        part: The part.
        indices: The positions of the parameters.
        grads: What this rank has of their gradients, flat.
        reads: Makes the handles.
    """
    params = [part.params[index] for index in indices]
    before: list[Options] = []
    with torch._C.DisableTorchFunctionSubclass():  # handles would be hashed in Python
        for index, param in zip(indices, params, strict=True):
            before.append(optimizer.state.get(param, {}))
            if before[-1]:
                optimizer.state[param] = {key: _piece(part, index, key, value) for key, value in before[-1].items()}
        pieces = [part.own_weights(index) for index in indices]
        blockwise.step(optimizer, params, list(zip(pieces, grads, strict=True)))
        for index, param, old in zip(indices, params, before, strict=True):
            if param in optimizer.state:
                optimizer.state[param] = {
                    key: _whole(part, index, key, value, old.get(key), reads) for key, value in optimizer.state[param].items()
                }


def _piece(part: Part, index: int, key: str, value: object) -> object:
    """A state for the stand-in."""
    if isinstance(value, OffloadedTensor):
        if isinstance(value.source, Held):
            return value.source.piece
        value = materialize(value)  # one that was made with the optimizer
    if not isinstance(value, Tensor) or key in blockwise.COUNTS:
        return value
    return part.own_piece(index, part.flat(index, value, value.dtype))[1].clone()


def _whole(part: Part, index: int, key: str, value: object, before: object, reads: SliceReads) -> object:
    """A state as code finds it after the step, ``before`` being what it was."""
    if not isinstance(value, Tensor) or key in blockwise.COUNTS:
        return value
    if isinstance(before, OffloadedTensor) and isinstance(before.source, Held):
        before.source.piece = value
        return before
    return reads.hold(part, index, key, value)
