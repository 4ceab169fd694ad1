"""Optimizer state that the engine does not know, on disk as bytes: the tensors of an optimizer.

[Note: Kept blobs]
In a run that keeps its steps every part with such state has a blob. If the plan has the state in
memory, the blob is written at the end of every step. Step counts and other small state are in the
record itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hetero._native import U8, Arena, NativePart, PartGeometry
from lightning_hetero.errors import StoreCorruptError
from lightning_hetero.handles.offloaded_parameter import materialize
from lightning_hetero.handles.offloaded_tensor import OffloadedTensor
from lightning_hetero.optim import blockwise
from lightning_hetero.optim.early_state import is_early
from lightning_hetero.optim.subclasses import check_plain, leaves, mapped
from lightning_hetero.runtime.tensor_sources import BlobSource
from lightning_hetero.store.format.record import BlobEntry, BlobRow
from lightning_hetero.store.live.blocks import Part
from lightning_hetero.store.live.geometry import WEIGHTS, opaque_chunk
from lightning_hetero.store.live.native_parts import close_native, open_native
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.store.raw_memory import PAGE
from lightning_hetero.units import round_up
from lightning_hetero.untyped import Options

_ALIGN = 64


@dataclass(frozen=True, slots=True)
class _Entry:
    param: nn.Parameter
    key: str
    shape: torch.Size
    stride: tuple[int, ...]  # kernels read state and parameter in memory order
    dtype: torch.dtype
    offset: int


class StateBlobs:
    """One blob for each part and optimizer. A change of the state's shape makes another one."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._blobs: dict[tuple[Part, Optimizer], tuple[Part, list[_Entry]]] = {}
        self.kept = False  # see [Note: Kept blobs]
        self.retired: list[NativePart] = []  # blobs that the last record still names and the next one will not

    def load(self, part: Part, optimizer: Optimizer) -> None:
        """Brings the part's state into memory, as ordinary tensors in ``optimizer.state``."""
        for param in part.params:
            state = optimizer.state.get(param, {}) if param.grad is not None else _state(optimizer, param)
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = mapped(value, key, lambda _, content: materialize(content))

    def save(self, part: Part, optimizer: Optimizer) -> None:
        """Writes the part's state to disk and leaves lazy tensors in ``optimizer.state``."""
        self._write(part, optimizer)
        self._attach(part, optimizer)

    def keep(self, part: Part, optimizer: Optimizer) -> None:
        """Writes the part's state to disk if it is in memory, where it stays."""
        values = [v for p in part.params for v in leaves(_state(optimizer, p)).values()]
        if any(not isinstance(value, OffloadedTensor) for value in values):
            self._write(part, optimizer)

    def drop(self, part: Part, optimizer: Optimizer) -> None:
        """Brings the part's state into memory, and removes its blob unless blobs are kept."""
        self.load(part, optimizer)
        if not self.kept and (part, optimizer) in self._blobs:
            close_native(self._store, self._blobs.pop((part, optimizer))[0])

    def entries(self, part: Part, optimizers: Sequence[Optimizer]) -> tuple[BlobEntry, ...]:
        """The part's blobs as a record names them."""
        found = []
        for number, optimizer in enumerate(optimizers):
            blob, entries = self._blobs.get((part, optimizer), (None, ()))
            if blob is not None and blob.native is not None:
                rows = tuple(BlobRow(_index(part, e.param), e.key, e.dtype, tuple(e.shape), e.offset) for e in entries)
                found.append(BlobEntry(blob.native.geometry, number, rows))
        return tuple(found)

    def adopt(self, part: Part, entry: BlobEntry, optimizer: Optimizer) -> None:
        """Opens a blob that a record names. The optimizer's state becomes lazy tensors of it.

        Raises:
            StoreCorruptError: The part has no such parameter.
        """
        if any(row.index >= len(part.params) for row in entry.rows):
            raise StoreCorruptError(f"block {entry.geometry.id}: the commit record names a parameter that {part.names} lack.")
        entries = [_of_row(part.params[row.index], row) for row in entry.rows]
        self._blobs[part, optimizer] = self._open(part, entries, entry.geometry), entries
        self._attach(part, optimizer)

    def _attach(self, part: Part, optimizer: Optimizer) -> None:
        if (part, optimizer) not in self._blobs:
            return
        blob, entries = self._blobs[part, optimizer]
        lazy: dict[nn.Parameter, dict[str, Tensor]] = {}
        for i, entry in enumerate(entries):
            name = f"{part.names[_index(part, entry.param)]}.{entry.key}"
            source = BlobSource(self._store, blob, i, name, entry.shape, entry.dtype)
            lazy.setdefault(entry.param, {})[entry.key] = OffloadedTensor(source, stride=entry.stride)
        for param, pieces in lazy.items():
            state = optimizer.state[param]
            for key, value in blockwise.tensors(state).items():  # written before
                state[key] = mapped(value, key, lambda name, _: pieces.pop(name))  # noqa: B023  # called at once
            state.update(pieces)  # from a record: there was no state yet

    def _write(self, part: Part, optimizer: Optimizer) -> None:
        entries, values, offset = [], [], 0
        for index, param in enumerate(part.params):
            for key, value in leaves(_state(optimizer, param)).items():
                value = materialize(value)
                check_plain(f"{part.names[index]}.{key}", value)
                stride = torch.empty_like(value, device="meta").stride()
                entries.append(_Entry(param, key, value.shape, stride, value.dtype, offset))
                values.append(value)
                offset += round_up(value.nbytes, _ALIGN)
        if entries:
            blob = self._blob(part, optimizer, entries, offset)
            self._store.write_state(blob, [(WEIGHTS, i, _bytes(value)) for i, value in enumerate(values)])

    def _blob(self, part: Part, optimizer: Optimizer, entries: list[_Entry], num_bytes: int) -> Part:
        known, before = self._blobs.get((part, optimizer), (None, []))
        if known is not None and before == entries:
            return known
        length = round_up(num_bytes, PAGE)
        geometry = PartGeometry(
            id=self._store.files.next_id(), weight_dtype=U8, num_elements=length, num_state=0, weights_on_disk_file=True,
            state_on_disk_file=False, num_slots=2, chunk_elements=opaque_chunk(length, self._store.chunk_bytes_max),
        )  # fmt: skip
        blob = self._open(part, entries, geometry)
        self._blobs[part, optimizer] = blob, entries
        if known is not None:
            self._retire(known)
        return blob

    def _open(self, part: Part, entries: list[_Entry], geometry: PartGeometry) -> Part:
        length = geometry.num_elements
        blob = Part(
            block=part.block, names=[e.key for e in entries], params=[], offsets=[e.offset for e in entries],
            dtype=torch.uint8, num_elements=length, arena=Arena(length),
        )  # fmt: skip
        open_native(self._store, blob, geometry)
        blob.dirty = False  # writes go straight to the file
        return blob

    def _retire(self, blob: Part) -> None:
        if not self.kept:
            close_native(self._store, blob)
            return
        self.retired.append(blob.require_native())
        self._store.blobs.remove(blob)
        self._store.forget(blob)


def _state(optimizer: Optimizer, param: nn.Parameter) -> Options:
    """A parameter's state, unless making the optimizer gives it again."""
    state: Options = optimizer.state.get(param, {})
    return {} if is_early(state) else state


def _of_row(param: nn.Parameter, row: BlobRow) -> _Entry:
    """A record has no strides. State in its parameter's shape has the parameter's strides."""
    shape = torch.Size(row.shape)
    like = param if shape == param.shape else torch.empty(shape, device="meta")
    return _Entry(param, row.key, shape, torch.empty_like(like, device="meta").stride(), row.dtype, row.offset)


def _bytes(value: Tensor) -> Tensor:
    return value.detach().contiguous().view(-1).view(torch.uint8)


def _index(part: Part, param: nn.Parameter) -> int:
    return next(i for i, p in enumerate(part.params) if p is param)
