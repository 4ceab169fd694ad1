"""Optimizer state that the engine does not know, kept on disk as bytes: whatever tensors the optimizer's own code made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hetero._native import U8, Arena, BlockGeometry
from lightning_hetero.optim import blockwise
from lightning_hetero.runtime.door import OffloadedTensor, materialize
from lightning_hetero.runtime.sources import BlobSource
from lightning_hetero.store.blocks import PAGE, Part
from lightning_hetero.store.geometry import WEIGHTS, opaque_chunk
from lightning_hetero.store.homes import close_home, open_home
from lightning_hetero.store.tiers import TierStore
from lightning_hetero.units import round_up

_ALIGN = 64


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor in a blob."""

    param: nn.Parameter
    key: str
    shape: torch.Size
    dtype: torch.dtype
    offset: int


class StateBlobs:
    """One blob per part; a part's blob is laid out anew when its optimizer's state changes shape (the first step does).

    Args:
        store: The tiers.
    """

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._blobs: dict[Part, tuple[Part, list[_Entry]]] = {}

    def load(self, part: Part, optimizer: Optimizer) -> None:
        """Brings the part's state into memory, as ordinary tensors in ``optimizer.state``."""
        for param in part.params:
            state = optimizer.state.get(param, {})
            for key, value in state.items():
                if isinstance(value, OffloadedTensor):
                    state[key] = materialize(value)

    def save(self, part: Part, optimizer: Optimizer) -> None:
        """Writes the part's state to disk and leaves lazy tensors in ``optimizer.state``."""
        entries, values, offset = [], [], 0
        for param in part.params:
            for key, value in blockwise.tensors(optimizer.state.get(param, {})).items():
                entries.append(_Entry(param, key, value.shape, value.dtype, offset))
                values.append(value)
                offset += round_up(value.nbytes, _ALIGN)
        if not entries:
            return
        blob = self._blob(part, entries, offset)
        runs = [(WEIGHTS, i, _bytes(value)) for i, value in enumerate(values)]
        self._store.write_state(blob, runs)
        for i, entry in enumerate(entries):
            name = f"{part.names[_index(part, entry.param)]}.{entry.key}"
            source = BlobSource(self._store, blob, i, name, entry.shape, entry.dtype)
            optimizer.state[entry.param][entry.key] = OffloadedTensor(source)

    def drop(self, part: Part, optimizer: Optimizer) -> None:
        """Brings the part's state into memory for good and removes its blob."""
        self.load(part, optimizer)
        blob, _ = self._blobs.pop(part, (None, ()))
        if blob is not None:
            close_home(self._store, blob)

    def _blob(self, part: Part, entries: list[_Entry], num_bytes: int) -> Part:
        known = self._blobs.get(part)
        if known is not None and known[1] == entries:
            return known[0]
        length = round_up(num_bytes, PAGE)
        blob = Part(
            block=part.block, names=[e.key for e in entries], params=[], offsets=[e.offset for e in entries],
            dtype=torch.uint8, num_elements=length, arena=Arena(length),
        )  # fmt: skip
        geometry = BlockGeometry(
            id=self._store.files.next_id(), weight_dtype=U8, num_elements=length, num_state=0, weights_on_disk_file=True,
            state_on_disk_file=False, num_slots=2, chunk_elements=opaque_chunk(length, self._store.chunk_bytes_max),
        )  # fmt: skip
        open_home(self._store, blob, geometry)
        blob.dirty = False  # nothing was ever in its memory: writes go straight to the file
        self._blobs[part] = (blob, entries)
        return blob


def _bytes(value: Tensor) -> Tensor:
    return value.detach().contiguous().view(-1).view(torch.uint8)


def _index(part: Part, param: nn.Parameter) -> int:
    return next(i for i, p in enumerate(part.params) if p is param)
