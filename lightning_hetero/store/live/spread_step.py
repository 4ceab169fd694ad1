"""A step that another number of ranks has kept, from which this run makes stores of its own.

The new stores form a set that counts once each of them has a record. Until then the old set is
whole, and a run that dies goes on from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from lightning_hetero._native import PartGeometry
from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.shards import Shards, SliceCopy, copies
from lightning_hetero.store.common_steps import CommonStep
from lightning_hetero.store.format.in_place import InPlace, joined
from lightning_hetero.store.format.manifest import layout_of
from lightning_hetero.store.format.sets import Stores, remove
from lightning_hetero.store.format.snapshots import copy
from lightning_hetero.store.format.stored_parts import WEIGHTS, StoredPart, record_of, stored_parts
from lightning_hetero.store.live.blocks import Part
from lightning_hetero.store.live.geometry import own_versions, weights_on_file
from lightning_hetero.store.live.native_parts import open_native
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.store.raw_memory import own_memory
from lightning_hetero.units import MIB

_IN_TRANSIT_BYTES = 64 * MIB


class SpreadStep:
    """The step, and the stores that have it, which are only read.

    Args:
        stores: The stores, opened.
        step: The step.
        rank: The place of this process among those that go on.
        node: Its node, whose own stores are read where they are there.
        stays: They are not the run's own, and stay.

    Attributes:
        record: What the step's record says in the store whose training state this rank goes on
            from: its own, or that of another rank if there are more ranks now.
        path: That store.
        layout: How the parts are laid out, as for a manifest.
    """

    def __init__(self, stores: Stores, step: CommonStep, rank: int, node: int = 0, *, stays: bool = False) -> None:
        self._stores, self._places = stores, [] if stays else stores.places(step)
        self._parts: Sequence[StoredPart] = stored_parts(stores.at(step, node))
        found = stores.of_set(step)
        own = found[rank % len(found)]
        self.record, self.path, self.layout = record_of(own), own.path, layout_of(own.path, own.manifest)
        if any(entry.blobs for entry in self.record.parts):
            raise ConfigError(
                f"store {str(own.path)!r} has optimizer state that only the optimizer's own code knows, so another number of "
                f"devices cannot go on from it. Resume with {step.ranks}, or go on from a checkpoint."
            )

    def places(self, parts: Sequence[Part]) -> list[InPlace | None]:
        """Where files of somebody else have this rank's slice of each part; ``None``: they do not.

        The stores of the step say so of all slices of the part, or it is copied from there.
        """
        return [self._place(part, source) for part, source in zip(parts, self._parts, strict=False)]  # see KeptSteps.begin

    def _place(self, part: Part, source: StoredPart) -> InPlace | None:
        found = [piece.entry.in_place for piece in source.slices]
        known = [place for place in found if place is not None]
        if len(known) < len(found):
            return None
        width = part.dtype.itemsize
        return joined(
            (move.target_offset * width, known[move.source].cut(move.source_offset * width, move.num_elements * width))
            for move in _moves(part, source)
        )

    def bring(self, store: TierStore, part: Part, number: int, geometry: PartGeometry | None) -> None:
        """Opens the part with this rank's slice of weights and state.

        Args:
            store: The run's own tiers.
            part: The part, with memory for its weights.
            number: Its place among all parts.
            geometry: Where the engine has it; ``None``: in memory, without state.
        """
        source = self._parts[number]
        moves = _moves(part, source)
        begin = part.own.rank * part.slice_elements
        for move in moves:
            first = begin + move.target_offset
            source.slices[move.source].read(WEIGHTS, move.source_offset, part.run[first : first + move.num_elements])
        part.is_whole = part.own.ranks == 1
        if part.in_place is not None:
            part.mirrored_versions = own_versions(part)
        if geometry is None:
            return
        open_native(store, part, replace(geometry, id=store.files.free_id(geometry.id)))
        if part.in_place is not None:
            part.dirty = False
            return
        if not source.slices[0].entry.stepped:
            store.flush(part)
            return
        part.dirty = False
        for array in range(geometry.num_state):
            for run in _runs(moves):
                values = own_memory(run.num_elements, torch.float32)
                source.slices[run.source].read(array, run.source_offset, values)
                store.rewrite(part, [(array, run.target_offset, values)], from_memory=weights_on_file(part), state=True).wait()
        if not moves:  # all ranks have the part's state, or none
            store.rewrite(part, [], from_memory=weights_on_file(part), state=True).wait()

    def copy_state_files(self, target: Path) -> None:
        """Copies what of the training state is in files."""
        for name in self.record.files:
            copy(self.path / name, target / name)

    def close(self, *, removes: bool) -> None:
        """Gives the stores free; ``removes``: those of this run have the step now."""
        self._stores.close()
        for place in self._places if removes else ():
            remove(place, self._stores.root)


def _moves(part: Part, source: StoredPart) -> list[SliceCopy]:
    """What comes to this rank's slice of a part."""
    lengths = tuple(layout.numel for layout in part.layouts)
    target = Shards(ranks=part.own.ranks, slice_elements=part.slice_elements, offsets=tuple(part.offsets), lengths=lengths)
    return list(_joined(copy for copy in copies(source.shards, target) if copy.target == part.own.rank))


def _joined(moves: Iterator[SliceCopy]) -> Iterator[SliceCopy]:
    """Copies with the padding between them as one, where both layouts have it alike."""
    last: SliceCopy | None = None
    for move in moves:
        if last is not None and last.source == move.source:
            gap = move.source_offset - last.source_offset
            if gap == move.target_offset - last.target_offset:
                last = replace(last, num_elements=gap + move.num_elements)
                continue
        if last is not None:
            yield last
        last = move
    if last is not None:
        yield last


def _runs(moves: Sequence[SliceCopy]) -> Iterator[SliceCopy]:
    """The same, none of them larger than what may be in memory on its way."""
    most = _IN_TRANSIT_BYTES // 4
    for move in moves:
        for start in range(0, move.num_elements, most):
            yield replace(
                move, source_offset=move.source_offset + start, target_offset=move.target_offset + start,
                num_elements=min(most, move.num_elements - start),
            )  # fmt: skip
