"""References to weights, which autograd saves because the weights' memory may be reused.

[Note: Saved weights]
Autograd saves parameters and views of them, such as ``weight.t()``. Their memory may hold other
weights before backward needs them. So a hook on saved tensors calls :meth:`BoundWeights.reference`
and saves a :class:`WeightRef` instead.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_hetero.store.live.blocks import Part


class BoundWeights:
    """The memory to which parameters are bound, by address.

    ``memory`` returns the bytes from a parameter's first one on, in the memory that its part is
    bound to. It raises ``OffloadedAccessError`` if there is none.
    """

    def __init__(self, device: torch.device, memory: Callable[[Part, int], Tensor]) -> None:
        self.memory = memory
        self.whole: dict[Part, Sequence[Tensor]] = {}  # the parameters of bound parts, where tensors of them exist
        self._device = device
        self._begins: list[int] = []  # the first addresses of runs, sorted
        self._runs: list[tuple[int, Part]] = []  # their ends and parts, in the same order
        self._begin_of: dict[Part, int] = {}
        self._views: defaultdict[Part, dict[int, View]] = defaultdict(dict)  # the latest one that begins at this byte

    def add(self, part: Part, memory: Tensor, whole: Sequence[Tensor] | None = None) -> None:
        """The part's parameters are views of this run; ``whole``: these are."""
        if memory.numel():
            begin = self._begin_of[part] = memory.data_ptr()
            place = bisect_right(self._begins, begin)
            self._begins.insert(place, begin)
            self._runs.insert(place, (begin + memory.numel(), part))
        if whole is not None:
            self.whole[part] = whole

    def remove(self, part: Part) -> None:
        """The part's run may be reused."""
        self.whole.pop(part, None)
        if (begin := self._begin_of.pop(part, None)) is not None:
            place = bisect_left(self._begins, begin)
            del self._begins[place], self._runs[place]

    def reference(self, tensor: Tensor) -> WeightRef | None:
        """A reference to a tensor in bound memory, see [Note: Saved weights]; else ``None``."""
        try:
            address = tensor.data_ptr()  # 0 without elements
        except RuntimeError:  # tensors without memory: sparse ones, wrappers, fake tensors
            return None
        place = bisect_right(self._begins, address) - 1
        if place < 0:
            return None
        end, part = self._runs[place]
        if address >= end or tensor.device != self._device or not tensor.numel():
            return None
        start, views = address - self._begins[place], self._views[part]
        view = views.get(start)
        if view is None or not view.is_of(tensor):
            view = views[start] = _view(part, start, tensor)
        return WeightRef(self, view, part.params[view.index]._version)


@dataclass(eq=False, slots=True)  # frozen ones take three times as long to make
class View:
    """A view of a parameter, wherever that lies."""

    part: Part
    index: int  # the parameter's position in it
    dtype: torch.dtype
    offset: int  # its first element, in elements of ``dtype`` from the start of the parameter
    size: torch.Size
    stride: tuple[int, ...]  # in elements
    conjugate: bool  # lazily
    negative: bool  # lazily
    is_whole: bool = False  # it is the parameter

    def is_of(self, tensor: Tensor) -> bool:
        """Whether a tensor at the same address is this view."""
        same = self.size == tensor.size() and self.stride == tensor.stride() and self.dtype is tensor.dtype
        return same and tensor.is_conj() is self.conjugate and tensor.is_neg() is self.negative

    def over(self, memory: Tensor) -> Tensor:
        """The view in the bytes from the parameter's first one on."""
        run = memory.view(self.dtype)
        view = run.as_strided(self.size, self.stride, run.storage_offset() + self.offset)
        view = view.conj() if self.conjugate else view
        return torch._neg_view(view) if self.negative else view


class WeightRef:
    """A view of a parameter that autograd saved, without its memory."""

    __slots__ = ("_bound", "_view", "version")

    def __init__(self, bound: BoundWeights, view: View, version: int) -> None:
        self._bound, self._view = bound, view
        self.version = version  # the parameter's version counter when it was saved

    @property
    def part(self) -> Part:
        """The part of the parameter."""
        return self._view.part

    @property
    def index(self) -> int:
        """The parameter's position in its part."""
        return self._view.index

    @property
    def param(self) -> nn.Parameter:
        """The parameter."""
        return self._view.part.params[self._view.index]

    def view(self) -> Tensor:
        """The view, in the memory that is bound now.

        Raises:
            OffloadedAccessError: The block's weights are not on the device.
            RuntimeError: The parameter was changed in place since, as autograd itself would raise.
        """
        view, bound = self._view, self._bound
        version = view.part.params[view.index]._version
        if version != self.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{view.part.names[view.index]!r} is at version {version}; expected version {self.version} instead. "
                f"Change weights after backward, and compute a new graph after optimizer.step()."
            )
        if view.is_whole and (whole := bound.whole.get(view.part)) is not None:
            return whole[view.index]
        return view.over(bound.memory(view.part, view.index))


def _view(part: Part, start: int, tensor: Tensor) -> View:
    """A tensor that begins at a byte of a part's memory as a view of one of its parameters."""
    index = bisect_right(part.offsets, start // part.dtype.itemsize) - 1
    offset = (start - part.offsets[index] * part.dtype.itemsize) // tensor.dtype.itemsize
    layout, size, stride = part.layouts[index], tensor.size(), tensor.stride()
    view = View(part, index, tensor.dtype, offset, size, stride, tensor.is_conj(), tensor.is_neg())
    plain = not (offset or view.conjugate or view.negative) and view.dtype is part.dtype
    view.is_whole = plain and size == layout.shape and stride == layout.stride
    return view


def absent(part: Part, index: int, device: torch.device) -> str:
    """The message for weights that are needed and not on the device."""
    return (
        f"the weights of {part.names[index]!r} are not on {device}, and backward needs them while their block is closed. A graph "
        f"that is used outside its block's backward has to be used within `with strategy.materialize(...)`."
    )
