"""Weights that user code has moved with ``param.data = ...``.

[Note: Moved weights]
In PyTorch ``param.data = tensor`` gives the parameter other memory, and the old memory keeps the
old values. A part's weights have one place. So the parameter keeps the user's tensor until
something else reads that place: an update, a write to the disk, or the end of the block's use where
its weights then leave the memory. Only then the values are copied there (:func:`bring_back`). Of
ranks that share the place, each copies its slice, as its update begins. Code may also set the old
memory again, for example if it quantizes weights for one forward. Then nothing has changed.

Where weights leave their memory between forward and backward, autograd cannot get the old values
that it has saved there. So if something still holds that memory, such an assignment also counts as
a write in place, and autograd raises if backward needs the old values.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.store.live.blocks import Block, Moved, Part
from lightning_hetero.store.live.mirrors import readers_of
from lightning_hetero.store.raw_memory import plain_data, set_data

log = logging.getLogger(__name__)

_shared: set[str] = set()  # the parameter that a warning has named


def assign(part: Part, index: int, value: Tensor, *, stays: bool, is_saved: bool) -> None:
    """``param.data = value`` by user code, for an ordinary parameter.

    Args:
        part: The parameter's part.
        index: Its position in it.
        value: Its new memory.
        stays: Its own memory keeps its content until backward has used it.
        is_saved: A graph may use that memory although it does not hold it.
    """
    param = part.params[index]
    with torch.inference_mode(False):  # training may use the memory again
        own = plain_data(param)
    set_data(param, value)
    moved = part.moved.get(index)
    if moved is None:
        if _is_same(param, own):
            return
        moved = part.moved[index] = Moved(own, param._version)
    elif _is_same(param, moved.own):
        del part.moved[index]
        return
    elif not part.block.uses:
        part.num_moves += 1
    changes = not moved.counts and not stays and not _are_equal(param, moved.own)
    if changes and (is_saved or _holders(moved.own) > 1):
        moved.counts = True
        torch.autograd.graph.increment_version([param])
        part.num_moves -= 1  # the move itself is counted already


def bring_back(part: Part) -> None:
    """Copies moved weights to their own memory.

    Raises:
        UnsupportedError: They have another shape or dtype.
    """
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for ticket in readers_of(part):
            ticket.wait()
        for index, moved in list(part.moved.items()):
            param, own, name = part.params[index], moved.own, part.names[index]
            if param.shape != own.shape or param.dtype != own.dtype:
                raise UnsupportedError(
                    f"{name}.data was set to {tuple(param.shape)} {param.dtype}, and {name!r} is {tuple(own.shape)} {own.dtype}. "
                    f"An offloaded parameter keeps shape and dtype. Convert the model before the trainer sets it up."
                )
            if not _are_equal(param, own):
                _warn_if_shared(param, name)
                _take(part, index, own, param)
                part.num_moves += 1
                part.rewritten = True
                is_seen = moved.counts or param._version != moved.version
                if not is_seen and _holders(own) > 1:
                    torch.autograd.graph.increment_version([param])
            stay_put(part, index)


def _take(part: Part, index: int, own: Tensor, value: Tensor) -> None:
    """Writes new weights to their memory; of several ranks that have it, each writes its slice."""
    if part.own.ranks > 1 and own.data_ptr() == part.fixed_address(index):
        part.own_weights(index).copy_(part.own_piece(index, part.flat(index, value, part.dtype))[1])
    else:
        own.copy_(value)


def bring_back_all(block: Block) -> None:
    """Does so for all parts of a block."""
    for part in block.parts:
        if part.moved:
            bring_back(part)


def find_moved(part: Part) -> None:
    """Notes parameters on the host that code has moved without ``data``: ``set_``, swaps."""
    start, width = part.arena.address, part.dtype.itemsize
    for index, param in enumerate(part.params):
        if param.data_ptr() != start + part.offsets[index] * width and index not in part.moved and param.numel():
            part.moved[index] = Moved(part.memory(index), param._version)


def stay_put(part: Part, index: int) -> None:
    """A parameter is in its own memory again, whose content counts."""
    moved = part.moved.pop(index, None)
    if moved is not None:
        set_data(part.params[index], moved.own)


def weights_now(part: Part, index: int) -> Tensor:
    """A parameter's weights if the host computes with them: in the part's memory, or moved."""
    if index not in part.moved:
        return part.memory(index)
    with torch._C.DisableTorchFunctionSubclass():
        return plain_data(part.params[index])


def _are_equal(param: Tensor, own: Tensor) -> bool:
    """Whether the values are the same, so that nobody can tell which memory they are read from."""
    same = param.dtype == own.dtype and param.shape == own.shape and param.device == own.device
    return same and torch.equal(param.detach(), own)


def _holders(tensor: Tensor) -> int:
    """How many tensors use the memory; those beside this one are views that code has taken."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1  # the storage object that asks


def _is_same(param: nn.Parameter, own: Tensor) -> bool:
    """Whether the parameter is a view of this very memory."""
    same = param.dtype == own.dtype and param.shape == own.shape and param.stride() == own.stride()
    return same and param.data_ptr() == own.data_ptr()


def _warn_if_shared(param: Tensor, name: str) -> None:
    """Says that a tensor given as ``param.data`` is not trained along, if something else holds it.

    In PyTorch the parameter and the tensor are then one memory, and updates change both. Here the
    values are copied.
    """
    if not _shared and _holders(param) > 1:
        _shared.add(name)
        log.warning(
            "%s.data was set to a tensor that something else still holds. Its values were copied, and updates do not change that "
            "tensor; in plain PyTorch both are the same memory. If your code relies on that (ModelPruning with "
            "use_lottery_ticket_hypothesis does, on the CPU), the results differ. To silence this, assign a clone.",
            name,
        )
