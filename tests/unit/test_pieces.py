"""Runs of elements as boxes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples

from lightning_hetero.handles.pieces import TensorPiece


@examples(60)
@given(
    shape=st.lists(st.integers(1, 4), max_size=4),
    order=st.randoms(use_true_random=False),
    cuts=st.lists(st.integers(0, 256), max_size=4),
)
def test_the_boxes_of_all_pieces_are_the_tensor(shape, order, cuts):
    dims = list(range(len(shape)))
    order.shuffle(dims)
    memory = torch.arange(1, torch.Size(shape).numel() + 1)
    tensor = memory.view([shape[dim] for dim in dims]).permute([dims.index(dim) for dim in range(len(shape))])
    ends = sorted({0, *(cut for cut in cuts if cut < memory.numel()), memory.numel()})
    found, number = torch.zeros_like(tensor), 0
    for begin, end in pairwise(ends):
        piece = TensorPiece(
            shape=tensor.shape, stride=tensor.stride(), dtype=tensor.dtype, first=begin, length=end - begin,
            read=lambda begin=begin, end=end: memory[begin:end],
        )  # fmt: skip
        boxes = piece.boxes()
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        for box in boxes:
            number += torch.Size(box.sizes).numel()
            where = tuple(slice(first, first + size) for first, size in zip(box.offsets, box.sizes, strict=True))
            found[where] = piece.content(box.offsets)
    assert torch.equal(found, tensor)
    assert number == memory.numel(), "no element is in two boxes"


def test_nothing_is_no_box():
    piece = TensorPiece(shape=torch.Size([3]), stride=(1,), dtype=torch.float32, first=2, length=0, read=lambda: torch.empty(0))
    assert piece.boxes() == []
    with pytest.raises(KeyError):
        piece.content((2,))
