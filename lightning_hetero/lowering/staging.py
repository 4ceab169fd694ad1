"""Memory through which what lives on disk streams: the least, and what reads ahead."""

from __future__ import annotations

from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.units import KIB, MIB, round_up

# As in store/live/geometry.py.
_STAGED_CHUNKS, _CHUNK_ELEMENTS, _CHUNK_ALIGN, _CHUNK_FOOTERS = 8, 256 * KIB, 4096, 4 * 4096
_LEAST_CHUNK = 64 * KIB
_READ_AHEAD_BYTES = 512 * MIB  # the largest block of most models


def read_ahead(spare: int, streamed: int) -> int:
    """Bytes of staging beyond the least, if ``spare`` are free and ``streamed`` are on disk."""
    return min(spare // 4, _READ_AHEAD_BYTES, streamed)


def least_staging(model: ModelProfile) -> int:
    """The engine's least staging memory: eight chunks, none larger than the largest block."""
    largest = max((block.num_params for block in model.blocks), default=0)
    elements = min(_CHUNK_ELEMENTS, round_up(largest, _CHUNK_ALIGN))
    chunk = elements * (model.compute_itemsize + model.state_itemsize) + _CHUNK_FOOTERS
    return _STAGED_CHUNKS * max(_LEAST_CHUNK, chunk)
