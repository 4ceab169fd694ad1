"""Pieces of tensors that ranks have, as distributed checkpoints describe them.

[Note: Boxes]
Ranks cut tensors anywhere: a piece is a run of elements in memory order. A distributed checkpoint
knows boxes alone: an offset and a length in each dimension. A run is a few of them: whole rows in
the middle, and before and after these the same for a part of a row, in one dimension less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor, with an offset and a length in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """What one rank has of a tensor.

    Attributes:
        shape: Of the whole.
        stride: Of the whole, which is dense.
        dtype: Of the whole.
        first: The first element in memory order.
        length: How many elements.
        read: Reads them, flat.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    first: int
    length: int
    read: Callable[[], Tensor]

    def boxes(self) -> list[Box]:
        """The piece as boxes, in memory order; see [Note: Boxes]."""
        return [self._in_shape(box) for box in self._in_memory]

    def content(self, offsets: tuple[int, ...]) -> Tensor:
        """The content of the box that begins at these offsets."""
        flat, at, order = self.read(), 0, self._order
        for box in self._in_memory:
            if self._in_shape(box).offsets == offsets:
                found = flat[at : at + math.prod(box.sizes)].view(box.sizes)
                return found.permute([order.index(dim) for dim in range(len(order))])
            at += math.prod(box.sizes)
        raise KeyError(offsets)

    @property
    def _order(self) -> list[int]:
        """The dimensions from the one that changes least in memory to the one that changes most."""
        return sorted(range(len(self.shape)), key=lambda dim: (-self.stride[dim], -self.shape[dim], dim))

    @property
    def _in_memory(self) -> list[Box]:
        return list(_boxes(self.first, self.first + self.length, tuple(self.shape[dim] for dim in self._order)))

    def _in_shape(self, box: Box) -> Box:
        offsets, sizes = [0] * len(self.shape), [0] * len(self.shape)
        for place, dim in enumerate(self._order):
            offsets[dim], sizes[dim] = box.offsets[place], box.sizes[place]
        return Box(tuple(offsets), tuple(sizes))


def _boxes(begin: int, end: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """Elements ``begin`` to ``end`` of a contiguous shape."""
    if begin == end:
        return
    if len(shape) < 2:
        yield Box((begin,), (end - begin,)) if shape else Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # the whole rows
    if first > last:
        yield from _in_row(last, begin, end, shape)
        return
    yield from _in_row(first - 1, begin, first * row, shape)
    if first < last:
        yield Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    yield from _in_row(last, last * row, end, shape)


def _in_row(number: int, begin: int, end: int, shape: tuple[int, ...]) -> Iterator[Box]:
    start = number * math.prod(shape[1:])
    for box in _boxes(begin - start, end - start, shape[1:]):
        yield Box((number, *box.offsets), (1, *box.sizes))
