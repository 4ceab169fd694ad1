"""References to weights, which autograd saves because the weights' memory may be reused.

[Note: Saved weights]
Autograd saves parameters and views of them, such as ``weight.t()``. Their memory may hold other
weights before backward needs them. So a hook on saved tensors calls :meth:`BoundWeights.reference`
and saves a :class:`WeightRef` instead.
"""

from __future__ import annotations

from bisect import bisect_right, insort
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
        self._rows: list[tuple[int, int, Part]] = []  # first address, length, part; sorted

    def add(self, part: Part, memory: Tensor) -> None:
        """The part's parameters are views of this run."""
        insort(self._rows, (memory.data_ptr(), memory.numel(), part), key=lambda row: row[0])

    def remove(self, part: Part) -> None:
        """The part's memory may be reused."""
        self._rows = [row for row in self._rows if row[2] is not part]

    def reference(self, tensor: Tensor) -> WeightRef | None:
        """A reference to a tensor in bound memory, see [Note: Saved weights]; else ``None``."""
        if tensor.layout is not torch.strided or tensor.device != self._device or not self._rows or not tensor.numel():
            return None
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # tensors without memory: wrappers, fake tensors
            return None
        row = bisect_right(self._rows, address, key=lambda r: r[0]) - 1
        if row < 0 or address >= self._rows[row][0] + self._rows[row][1]:
            return None
        begin, _, part = self._rows[row]
        index = bisect_right(part.offsets, (address - begin) // part.dtype.itemsize) - 1
        start = begin + part.offsets[index] * part.dtype.itemsize
        return WeightRef(
            memory=self._memory, part=part, index=index, dtype=tensor.dtype, offset=(address - start) // tensor.dtype.itemsize,
            size=tensor.size(), stride=tensor.stride(), conjugate=tensor.is_conj(), negative=tensor.is_neg(),
            version=part.params[index]._version,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
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

    def view(self) -> Tensor:
        """The view, in the memory that is bound now.

        Raises:
            OffloadedAccessError: The block's weights are not on the device.
            RuntimeError: The parameter was changed in place since, as autograd itself would raise.
        """
        if self.param._version != self.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.part.names[self.index]!r} is at version {self.param._version}; expected version {self.version} instead. "
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
