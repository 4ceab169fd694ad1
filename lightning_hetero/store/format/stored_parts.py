"""The parts of a model as the stores of a set have them: each array in slices, one per store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hetero._native.geometry import PartGeometry
from lightning_hetero._native.library import U8
from lightning_hetero.errors import ConfigError, StoreCorruptError
from lightning_hetero.ir.shards import Shards
from lightning_hetero.store.format.audit import CommittedBlock, StoreFiles
from lightning_hetero.store.format.manifest import alignment_of, layout_of, member_of
from lightning_hetero.store.format.record import PartEntry, StepRecord, parse
from lightning_hetero.store.partition import laid_out
from lightning_hetero.store.raw_memory import PAGE
from lightning_hetero.units import round_up

WEIGHTS = -1
_STAGGER = 17 * 64  # between the state arrays of a part in memory: `ReserveState` of native/src/store.cc


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSlice:
    """One store's slice of a part, as its record has it."""

    store: StoreFiles
    entry: PartEntry

    def read(self, array: int, start: int, out: Tensor) -> None:
        """Reads elements of an array from ``start`` on into a flat CPU tensor of their dtype.

        Raises:
            StoreCorruptError: A file is not what the record says: names block, file, offset.
            ConfigError: The store does not have the array.
        """
        entry = self.entry
        if array == WEIGHTS and entry.in_place is not None:
            entry.in_place.read(start * out.dtype.itemsize, out.view(torch.uint8))
        elif array == WEIGHTS:
            self._read_weights(self._holder(entry.home if entry.weights is None else entry.weights), start, out)
        elif not entry.stepped:
            out.zero_()
        elif entry.home is not None and entry.home.state_on_disk_file:
            with self.store.slot(self._committed(entry.home)) as slot:
                slot.read_state(array, start, out)
        else:  # the mirror has the memory of all arrays
            home = self._holder(entry.home)
            first = 4 * start + _memory_offset(array, home.num_elements)
            self._read_weights(self._holder(entry.state), first // 4, out)

    def _read_weights(self, geometry: PartGeometry, start: int, out: Tensor) -> None:
        with self.store.slot(self._committed(geometry)) as slot:
            opaque = slot.geometry.weight_dtype == U8  # the run as bytes
            slot.read_weights(start * (out.dtype.itemsize if opaque else 1), out.view(torch.uint8) if opaque else out)

    def check_weights(self, name: str) -> None:
        """Refuses a record without the weights.

        Raises:
            ConfigError: They are in no file.
        """
        if self.entry.in_place is None:
            geometry = self.entry.home if self.entry.weights is None else self.entry.weights
            if geometry is None or self.store.record is None or geometry.id not in {b.id for b in self.store.record.blocks}:
                raise ConfigError(
                    f"store {str(self.store.path)!r} has no weights of {[name]}: they were kept in memory alone. Export a "
                    f"checkpoint."
                )

    def _holder(self, geometry: PartGeometry | None) -> PartGeometry:
        if geometry is None:
            raise StoreCorruptError(f"store {str(self.store.path)!r}: its record does not say where all arrays of a part are.")
        return geometry

    def _committed(self, geometry: PartGeometry) -> CommittedBlock:
        found = () if self.store.record is None else self.store.record.blocks
        block = next((block for block in found if block.id == geometry.id), None)
        if block is None:
            raise StoreCorruptError(f"store {str(self.store.path)!r}: its record names no file of block {geometry.id}.")
        return block


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """One part.

    Attributes:
        names: Its parameters, in the order of their offsets.
        shards: Where they are, and which store has which elements.
        slices: What each store has of it.
        trained: Its parameters were to be trained when the run began, or an optimizer has given it
            state since.
    """

    names: tuple[str, ...]
    shards: Shards
    slices: tuple[StoredSlice, ...]
    trained: bool

    def read(self, array: int, index: int, out: Tensor) -> None:
        """Reads an array of parameter ``index``, flat, in its memory order."""
        for piece in self.shards.pieces_of(index):
            run = out[piece.start : piece.start + piece.num_elements]
            self.slices[piece.rank].read(array, piece.offset, run)


def stored_parts(stores: Sequence[StoreFiles]) -> list[StoredPart]:
    """The parts of the model in a set of stores, in the order of their records.

    Args:
        stores: All stores of the set or of one of its nodes by rank, each at the record that
            counts.

    Raises:
        ConfigError: A record cannot be read, or the stores are of other models.
    """
    first = stores[0]
    layout = layout_of(first.path, first.manifest)
    rows = {name: row for block in first.manifest["geometry"]["blocks"] for name, row in block["params"].items()}
    entries = [record_of(store).parts for store in stores]
    names, frozen = layout["parts"], layout.get("frozen")  # earlier versions did not say which
    for rank, store in enumerate(stores):
        member = member_of(store.path, store.manifest)
        if (member.shard, member.shards) != (rank, len(stores)):
            raise ConfigError(
                f"store {str(store.path)!r} is that of rank {member.rank} of {member.ranks}, and has slices of the model. Give the "
                f"directory above, where all of them are."
            )
    for store, of_store in zip(stores, entries, strict=True):
        if len(of_store) != len(names) or layout_of(store.path, store.manifest)["parts"] != names:
            raise ConfigError(f"store {str(store.path)!r} has other parts than {str(first.path)!r}, with which it forms a set.")
    found = []
    for number, of_part in enumerate(names):
        dtype: torch.dtype = getattr(torch, rows[of_part[0]][0].removeprefix("torch.")) if of_part else torch.uint8
        lengths = [torch.Size(rows[name][1]).numel() for name in of_part]
        offsets, total = laid_out(lengths, dtype.itemsize, alignment_of(layout), len(stores))
        shards = Shards(
            ranks=len(stores), slice_elements=total // len(stores), offsets=tuple(offsets), lengths=tuple(lengths)
        )  # fmt: skip
        slices = [StoredSlice(store=store, entry=of_store[number]) for store, of_store in zip(stores, entries, strict=True)]
        begins_trained = isinstance(frozen, list) and number not in frozen
        trained = begins_trained or any(one.entry.stepped or one.entry.blobs for one in slices)
        found.append(StoredPart(names=tuple(of_part), shards=shards, slices=tuple(slices), trained=trained))
    return found


def record_of(store: StoreFiles) -> StepRecord:
    """The record of a store that counts.

    Raises:
        ConfigError: There is none, or it cannot be read.
    """
    if store.record is None:
        raise ConfigError(f"store {str(store.path)!r} has no commit record: no step was written. Start without it.")
    return parse(store.record.user)


def _memory_offset(array: int, num_elements: int) -> int:
    """Where a state array begins in the memory of all of them."""
    offset = 0
    for number in range(array):
        offset = round_up(offset + (number + 1) * _STAGGER + 4 * num_elements, PAGE)
    return offset + (array + 1) * _STAGGER
