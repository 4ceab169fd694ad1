"""Geometry: which arrays of a part the engine knows, and which of them have a section in a file."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import torch
from torch import nn

from lightning_hetero import _native
from lightning_hetero._native import PartGeometry
from lightning_hetero.ir.plan import Tier
from lightning_hetero.store.live.blocks import Part
from lightning_hetero.units import KIB, round_up

NATIVE_DTYPES = {torch.float32: _native.F32, torch.bfloat16: _native.BF16, torch.float16: _native.F16}
WEIGHTS = -1  # the array number of a block's weights

_CHUNK_ELEMENTS = 256 * KIB  # 3 MiB: disks were fastest with 2 to 4 MB
_CHUNK_ALIGN = 4096
VERSION: Callable[[nn.Parameter], int] = attrgetter("_version")


def geometry_of(part: Part, identifier: int, *, num_state: int, weights: Tier, state: Tier) -> PartGeometry:
    """The native geometry of a part.

    Args:
        part: The part.
        identifier: Number of its files.
        num_state: fp32 state arrays of a native update rule; 0 for parts that the engine does not
            update, whose weights it then sees as bytes.
        weights: Tier of the weights.
        state: Tier of the state arrays.
    """
    opaque = num_state == 0
    length = part.slice_elements * (part.dtype.itemsize if opaque else 1)
    chunk = min(_CHUNK_ELEMENTS * (4 if opaque else 1), round_up(length, _CHUNK_ALIGN))
    return PartGeometry(
        id=identifier,
        weight_dtype=_native.U8 if opaque else NATIVE_DTYPES[part.dtype],
        num_elements=round_up(length, 16),
        num_state=num_state,
        weights_on_disk_file=weights is Tier.DISK,
        state_on_disk_file=bool(num_state) and state is Tier.DISK,
        num_slots=2 if num_state else part.slots,
        chunk_elements=chunk,
    )


def chunk_bytes(geometry: PartGeometry) -> int:
    """Bytes of one staged chunk: all of a block's arrays and the footers."""
    width = {_native.F32: 4, _native.BF16: 2, _native.F16: 2, _native.U8: 1}[geometry.weight_dtype]
    return int(geometry.chunk_elements * (width + 4 * geometry.num_state)) + 4 * _CHUNK_ALIGN


def opaque_chunk(num_bytes: int, chunk_bytes_max: int) -> int:
    """Elements of one chunk of a part of plain bytes, if ``chunk_bytes_max`` may be staged."""
    return min(_CHUNK_ELEMENTS, round_up(num_bytes, _CHUNK_ALIGN), chunk_bytes_max // _CHUNK_ALIGN * _CHUNK_ALIGN)


def versions(part: Part) -> int:
    """Changes when a parameter of the part is written to in place, or moved."""
    return own_versions(part) + len(part.moved)


def own_versions(part: Part) -> int:
    """:func:`versions` of what the part's own memory has now, which lacks what is moved.

    Whoever copies that memory notes this number, and takes it before the copy: code may write
    meanwhile, and the copy may lack that.
    """
    with torch._C.DisableTorchFunctionSubclass():  # handles would answer in Python
        return sum(map(VERSION, part.params)) + part.num_moves


def may_differ(part: Part) -> bool:
    """Whether the part's weights or state in memory may differ from the mirrors on disk."""
    return part.is_lent or part.mirrored_versions != versions(part)


def has_master(part: Part) -> bool:
    """Whether the weights are 16-bit ones with an fp32 master as the first state array."""
    return part.native is not None and part.native.geometry.num_state == 3


def has_file(geometry: PartGeometry) -> bool:
    """Whether any of the block's arrays has a section in a file."""
    return bool(geometry.weights_on_disk_file or geometry.state_on_disk_file)


def weights_on_file(part: Part) -> bool:
    """Whether the part's weights have a section in a file."""
    return part.native is not None and part.native.geometry.weights_on_disk_file
