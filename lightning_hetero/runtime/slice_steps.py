"""Steps of optimizers that run by their own code, on slices of parameters.

[Note: Steps on slices]
An optimizer that updates each element by itself does the same to a slice as to the same elements of
the whole. So for its step a flat stand-in takes the place of a parameter: this rank's piece of
weights, gradient and state. A rank without a piece has an empty one, so counts of steps are the
same on all ranks. Between two steps ``optimizer.state`` has handles of whole tensors ([Note: Held
pieces] in ``slice_reads``). State that is whole, as a checkpoint or code has given it, becomes a
piece with the next step.

Any other optimizer that treats parameters independently needs whole ones. So each of its parameters
lies whole in one rank's slice (``ir.shards.by_parameter``), and that rank alone runs its step and
has its state. Only it knows what state there is. So where code asks for a state dict, which all
ranks do together, the ranks tell each other, and get handles of what others have (:func:`publish`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hetero.handles.offloaded_parameter import materialize
from lightning_hetero.handles.offloaded_tensor import OffloadedTensor
from lightning_hetero.optim import blockwise
from lightning_hetero.runtime.optimizers import OptimizerBinding
from lightning_hetero.runtime.slice_reads import SliceReads, SpreadTensor
from lightning_hetero.store.live.blocks import Part
from lightning_hetero.untyped import Options


def step(optimizer: Optimizer, part: Part, indices: Sequence[int], grads: Sequence[Tensor], reads: SliceReads) -> None:
    """One step for some parameters of a part, on this rank's slice of it.

    Args:
        optimizer: The optimizer.
        part: The part.
        indices: The positions of the parameters.
        grads: What this rank has of their gradients, flat.
        reads: Makes the handles.
    """
    if not blockwise.is_by_element(optimizer):
        _step_whole(optimizer, part, indices, grads)
        return
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


def _step_whole(optimizer: Optimizer, part: Part, indices: Sequence[int], grads: Sequence[Tensor]) -> None:
    """One step for those of the parameters that this rank owns."""
    mine, pieces = list[nn.Parameter](), list[tuple[Tensor, Tensor]]()
    with torch._C.DisableTorchFunctionSubclass():  # handles would be hashed in Python
        for index, grad in zip(indices, grads, strict=True):
            param = part.params[index]
            state = optimizer.state.pop(param, {})
            if part.pieces[index][1]:
                if state:
                    optimizer.state[param] = {key: _shaped(value) for key, value in state.items()}
                mine.append(param)
                pieces.append((part.shaped(index, part.own_weights(index)), part.shaped(index, grad)))
        if mine:
            blockwise.step(optimizer, mine, pieces)
        others = [part.params[index] for index in indices if not part.pieces[index][1]]
        torch.autograd.graph.increment_version(others)


def _shaped(value: object) -> object:
    if isinstance(value, OffloadedTensor):
        source = value.source
        return source.piece.as_strided(source.shape, source.stride) if isinstance(source, SpreadTensor) else materialize(value)
    return value


def publish(binding: OptimizerBinding, reads: SliceReads) -> None:
    """Before a state dict is made: gives each rank handles of the state that others have.

    All ranks call it. Does nothing for optimizers by element, which have them.
    """
    optimizer = binding.optimizer
    if blockwise.is_by_element(optimizer):
        return
    homes = {number: home for number, param in enumerate(binding.params()) if (home := binding.home_of(param)) is not None}
    mine: dict[int, Options] = {}
    for number, (part, index) in homes.items():
        state = optimizer.state.get(part.params[index], {})
        if state and part.pieces[index][1]:
            optimizer.state[part.params[index]] = {key: _shaped(value) for key, value in state.items()}
            mine[number] = {key: _outline(value) for key, value in optimizer.state[part.params[index]].items()}
    for owner, rows in enumerate(reads.tell_all(mine)):
        for number, outlines in rows.items():
            part, index = homes[number]
            has, state = optimizer.state.get(part.params[index], {}), Options()
            for key, outline in outlines.items():
                state[key] = outline
                if isinstance(outline, _Outline):
                    like = torch.empty(outline.shape, dtype=outline.dtype, device="meta")
                    piece = has[key].detach().contiguous().view(-1) if owner == reads.rank else torch.empty(0, dtype=outline.dtype)
                    state[key] = reads.hold_of(owner, f"{part.names[index]}.{key}", like, piece)
            optimizer.state[part.params[index]] = state


@dataclass(frozen=True, slots=True)
class _Outline:
    """A tensor of state that another rank has."""

    shape: torch.Size
    dtype: torch.dtype


def _outline(value: object) -> object:
    """What other ranks are told of state: tensors of one element are sent."""
    return _Outline(value.shape, value.dtype) if isinstance(value, Tensor) and value.numel() > 1 else value


def _piece(part: Part, index: int, key: str, value: object) -> object:
    """A state for the stand-in."""
    if isinstance(value, OffloadedTensor):
        if isinstance(value.source, SpreadTensor):
            return value.source.piece
        value = materialize(value)  # one that was made with the optimizer
    if not isinstance(value, Tensor) or key in blockwise.COUNTS:
        return value
    return part.own_piece(index, part.flat(index, value, value.dtype))[1].clone()


def _whole(part: Part, index: int, key: str, value: object, before: object, reads: SliceReads) -> object:
    """A state as code finds it after the step, ``before`` being what it was."""
    if not isinstance(value, Tensor) or key in blockwise.COUNTS:
        return value
    if isinstance(before, OffloadedTensor) and isinstance(before.source, SpreadTensor):
        before.source.piece = value
        return before
    return reads.hold(part, index, key, value)
