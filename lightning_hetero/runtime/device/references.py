"""References to weights, which autograd saves because the weights' memory may be reused.

[Note: Saved weights]
Autograd saves parameters and views of them, such as ``weight.t()``. Their memory may hold other
weights before backward needs them. So a hook on saved tensors calls :meth:`BoundWeights.reference`
and saves a :class:`WeightRef` instead.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_hetero.store.live.blocks import Part


class BoundWeights:
    """The memory to which parameters are bound, by address.

    ``memory`` returns the bytes from a parameter's first one on, in the memory that its part is
    bound to; it raises ``OffloadedAccessError`` if there is none.
    """

    def __init__(self, device: torch.device, memory: Callable[[Part, int], Tensor]) -> None:
        self._device, self._memory = device, memory
        self._begins: list[int] = []  # the first addresses of runs, sorted
        self._runs: list[tuple[int, Part]] = []  # their lengths and parts, in the same order
        self._references: dict[int, WeightRef] = {}  # the latest one by the address of its tensor

    def add(self, part: Part, memory: Tensor) -> None:
        """The part's parameters are views of this run."""
        if memory.numel():
            begin = memory.data_ptr()
            place = bisect_right(self._begins, begin)
            self._begins.insert(place, begin)
            self._runs.insert(place, (memory.numel(), part))

    def remove(self, memory: Tensor) -> None:
        """The run may be reused."""
        if memory.numel():
            place = bisect_left(self._begins, memory.data_ptr())
            del self._begins[place], self._runs[place]
            self._references.clear()

    def reference(self, tensor: Tensor) -> WeightRef | None:
        """A reference to a tensor in bound memory, see [Note: Saved weights]; else ``None``."""
        if tensor.layout is not torch.strided or tensor.device != self._device or not self._begins or not tensor.numel():
            return None
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # tensors without memory: wrappers, fake tensors
            return None
        known = self._references.get(address)
        if known is not None and known.is_of(tensor):
            return known
        place = bisect_right(self._begins, address) - 1
        if place < 0 or address >= self._begins[place] + self._runs[place][0]:
            return None
        begin, part = self._begins[place], self._runs[place][1]
        index = bisect_right(part.offsets, (address - begin) // part.dtype.itemsize) - 1
        start = begin + part.offsets[index] * part.dtype.itemsize
        found = self._references[address] = WeightRef(
            self._memory, part, index, tensor.dtype, (address - start) // tensor.dtype.itemsize, tensor.size(), tensor.stride(),
            tensor.is_conj(), tensor.is_neg(), part.params[index]._version,
        )  # fmt: skip
        return found


@dataclass(eq=False, slots=True)  # frozen ones take three times as long to make
class WeightRef:
    """A view of a parameter that autograd saved, without its memory."""

    memory: Callable[[Part, int], Tensor]  # as for :class:`BoundWeights`
    part: Part
    index: int  # the parameter's position in it
    dtype: torch.dtype
    offset: int  # the view's first element, in elements of ``dtype`` from the start of the parameter
    size: torch.Size
    stride: tuple[int, ...]  # in elements
    conjugate: bool  # lazily
    negative: bool  # lazily
    version: int  # the parameter's version counter when it was saved

    @property
    def param(self) -> nn.Parameter:
        """The parameter."""
        return self.part.params[self.index]

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it refers to a tensor at the same address, which is no other view."""
        same = self.size == tensor.size() and self.stride == tensor.stride() and self.dtype is tensor.dtype
        lazy = tensor.is_conj() is self.conjugate and tensor.is_neg() is self.negative
        return same and lazy and self.part.params[self.index]._version == self.version

    def view(self) -> Tensor:
        """The view, in the memory that is bound now.

        Raises:
            OffloadedAccessError: The block's weights are not on the device.
            RuntimeError: The parameter was changed in place since, as autograd itself would raise.
        """
        version = self.part.params[self.index]._version
        if version != self.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.part.names[self.index]!r} is at version {version}; expected version {self.version} instead. "
                f"Change weights after backward, and compute a new graph after optimizer.step()."
            )
        run = self.memory(self.part, self.index).view(self.dtype)
        view = run.as_strided(self.size, self.stride, run.storage_offset() + self.offset)
        view = view.conj() if self.conjugate else view
        return torch._neg_view(view) if self.negative else view


def absent(part: Part, index: int, device: torch.device) -> str:
    """The message for weights that are needed and not on the device."""
    return (
        f"the weights of {part.names[index]!r} are not on {device}, and backward needs them while their block is closed. A graph "
        f"that is used outside its block's backward has to be used within `with strategy.materialize(...)`."
    )
