"""A snapshot of a run's state, for a thread that reads it while training goes on.

[Note: State snapshots]
Tensors on disk are linked: a snapshot of the last record (``format.snapshots``) links its slots,
which takes neither time nor space. Training writes a fresh file instead of a linked slot. The
snapshot is read without the engine, which only one thread may use. Tensors in the memory of the
host or of a device are copied one by one to a file without a name, because the next update or user
code may change them at once. So memory never holds a second copy, and a killed process leaves only
links, which the next user of the directory removes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from lightning_hetero.errors import HeteroError, OffloadedAccessError, OutOfDiskError, StoreError
from lightning_hetero.handles.offloaded_parameter import materialize
from lightning_hetero.handles.offloaded_tensor import OffloadedTensor
from lightning_hetero.handles.pieces import TensorPiece
from lightning_hetero.optim.early_state import is_filled
from lightning_hetero.optim.subclasses import mapped
from lightning_hetero.runtime.slice_reads import SliceReads, Spread, SpreadTensor
from lightning_hetero.runtime.tensor_sources import BlobSource, FileRun, StateSource, WeightSource
from lightning_hetero.store.format.audit import StoreFiles
from lightning_hetero.store.format.snapshots import snapshot
from lightning_hetero.store.format.stripes import place_of
from lightning_hetero.store.live.blocks import Part
from lightning_hetero.store.live.geometry import WEIGHTS
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.store.raw_memory import memory_of, own_memory
from lightning_hetero.units import KIB, format_bytes
from lightning_hetero.untyped import Value

_SMALL_BYTES = 4 * KIB  # stays in memory: step counts, biases


class StateSnapshot:
    """State as it is now, until :meth:`close`. No op is under way, and all writes are committed.

    Args:
        scratch: A folder for the copies of tensors in memory.
        links: A snapshot of the store, removed by :meth:`close`; ``None`` if nothing is on disk.
        reads: Says what this rank has of tensors of which each of several ranks has a piece.
    """

    def __init__(
        self, scratch: Path, links: Path | None, *, overlaps: bool = True, reads: SliceReads | None = None
    ) -> None:  # fmt: skip
        self._reads = reads
        self.overlaps = overlaps  # training may go on before :meth:`close`: the disk has room for fresh files
        self.linked_bytes = self.copied_bytes = 0
        self._folder, self._links = scratch, links
        self._copies: FileIO | None = None
        self._store = None if links is None else StoreFiles(links)
        record = None if self._store is None else self._store.record
        self._blocks = {} if record is None else {block.id: block for block in record.blocks}
        self._closed = threading.Event()

    def captured(self, value: Value) -> Value:
        """The same nested dictionaries and lists; large tensors become handles of the snapshot.

        Of tensors that ranks share, each has a :class:`TensorPiece`.
        """
        if isinstance(value, Mapping):
            return {key: self.captured(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self.captured, value)) if type(value) in (list, tuple) else value
        return mapped(value, "", lambda _, plain: self._tensor(plain)) if isinstance(value, Tensor) else value

    def read(self, place: FileRun | int, out: Tensor) -> None:
        """Reads a run of a block's committed slot, or a copy from its first byte on.

        The target is flat. One thread at a time reads.
        """
        if isinstance(place, int):
            self._read_copy(place, out)
            return
        if self._store is None:
            raise HeteroError("nothing of this snapshot is on disk.")
        with self._store.slot(self._blocks[place.number]) as slot:
            if place.array == WEIGHTS:
                slot.read_weights(place.first, out)
            else:
                slot.read_state(place.array, place.first, out)

    def _read_copy(self, offset: int, out: Tensor) -> None:
        if self._copies is None:
            raise HeteroError("nothing of this snapshot was copied.")
        view, done = memory_of(out), 0
        while done < len(view):
            try:
                got = os.preadv(self._copies.fileno(), [view[done:]], offset + done)
            except OSError as error:
                raise StoreError(
                    f"a copy in {str(self._folder)!r} of what was in memory cannot be read at offset {offset + done}: "
                    f"{error.strerror}. If the disk fails, choose another disk_path or default_root_dir."
                ) from error
            if not got:
                raise StoreError(f"a copy in {str(self._folder)!r} of what was in memory ends at byte {offset + done}.")
            done += got

    def close(self) -> None:
        """Removes links and copies; a second call does nothing."""
        if self._copies is not None:
            self._copies.close()
        if self._store is not None:
            self._store.close()
        if self._links is not None:
            shutil.rmtree(self._links, ignore_errors=True)
        self._closed.set()

    def wait(self) -> None:
        """Waits for :meth:`close`, which the reader calls."""
        self._closed.wait()

    def _tensor(self, value: Tensor) -> Tensor | TensorPiece:
        if not value.numel():
            return value.detach()
        source = value.source if isinstance(value, OffloadedTensor) else None
        if source is not None and is_filled(value):
            return OffloadedTensor(copy(source), stride=value.stride())
        if self._reads is not None and isinstance(source, SpreadTensor | WeightSource | StateSource):
            return self._piece(self._reads, source, tuple(value.stride()))
        run = source.on_file() if isinstance(source, WeightSource | StateSource | BlobSource) else None
        stride = tuple(value.stride())
        name = "a tensor in memory" if source is None else source.name
        if run is not None and run.number in self._blocks:
            self.linked_bytes += value.nbytes
            return OffloadedTensor(_Captured(name, value.shape, value.dtype, stride, self, run), stride=stride)
        self.copied_bytes += value.nbytes
        content = materialize(value).detach().to("cpu")
        if content.nbytes <= _SMALL_BYTES:
            return content.clone()
        content = content.contiguous()
        return OffloadedTensor(_Captured(name, value.shape, value.dtype, content.stride(), self, self._copy(content)))

    def _piece(self, reads: SliceReads, source: Spread, stride: tuple[int, ...]) -> TensorPiece:
        first, length = reads.span(source)
        place: FileRun | int | None = None if isinstance(source, SpreadTensor) else source.on_file()
        if isinstance(place, FileRun) and place.number in self._blocks:
            self.linked_bytes += length * source.dtype.itemsize
        else:
            content = reads.own(source)
            self.copied_bytes += content.nbytes
            place = self._copy(content) if length else 0
        held = _Captured(source.name, torch.Size([length]), source.dtype, (1,), self, place)
        return TensorPiece(shape=source.shape, stride=stride, dtype=source.dtype, first=first, length=length, read=held.read)

    def _copy(self, content: Tensor) -> int:
        if self._copies is None:
            self._copies = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115  # closed by close()
        begin, view = self._copies.seek(0, os.SEEK_END), memory_of(content)
        try:
            while view:
                view = view[self._copies.write(view) :]
        except OSError as error:
            raise OutOfDiskError(
                f"{str(self._folder)!r} has no room for a copy of what is in memory ({format_bytes(begin)} so far) while a "
                f"checkpoint is written: {error.strerror}. Free some, or choose another disk_path or default_root_dir."
            ) from error
        return int(begin)


def take_snapshot(
    store: TierStore | None, parts: Iterable[Part], scratch: Path, *, room_bytes: int, reads: SliceReads | None
) -> StateSnapshot:  # fmt: skip
    """A snapshot of a run, while no update is under way; without a store, all is in memory.

    At most ``room_bytes`` are written to the folder ``scratch``.

    Raises:
        StoreError: A transfer or a system call failed.
    """
    if store is None or store.files.directory is None:
        return StateSnapshot(scratch, None, reads=reads)
    for part in parts:
        if part.on_disk:  # its writes in memory go to its file
            if part.state_home is None:
                store.refresh_master(part)
            store.flush(part)
    store.commit()
    path, slots, places = store.files.directory.path, store.files.committed(), store.files.directory.places
    links = path / f"saving-{uuid.uuid4().hex[:8]}"
    snapshot(path, links, slots)
    linked_bytes = sum(place_of(places, name).stat().st_size for name in slots)
    try:
        return StateSnapshot(scratch, links, overlaps=linked_bytes <= room_bytes, reads=reads)
    except BaseException:
        for place in places:
            shutil.rmtree(place / links.name, ignore_errors=True)
        raise


@dataclass(frozen=True, slots=True)
class _Captured:
    """A tensor of a snapshot."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]  # of the content
    snapshot: StateSnapshot
    place: FileRun | int  # in the links to the store, or in the file of copies
    address = None

    def write(self, value: Tensor) -> NoReturn:
        raise OffloadedAccessError(f"{self.name!r} is being saved as it was; write to the model's own parameter instead.")

    def read(self) -> Tensor:
        out = own_memory(self.shape.numel(), self.dtype)
        self.snapshot.read(self.place, out)
        return out.as_strided(self.shape, self.stride)
