"""What several ranks that share a model do together: whole weights and gradients of a block.

[Note: Slices at run time]
A part has reserved memory for all of its weights on every rank, at addresses that stay. An update
writes the own slice, so from then on the others are old (``Part.is_whole``).

Ranks of one host have the same pages there ([Note: Shared pages] in ``store.live.shared_memory``).
So GATHER moves nothing: it is the meeting of all ranks after their own updates of the block. No
rank writes while another computes: REDUCE, which an update follows, is a meeting after backward.
Where code of the user may write, a rank has the pages apart, and its slice counts (:meth:`apart`).

Ranks of several hosts have pages for their own slice alone. GATHER fills the others, and RELEASE
gives their pages back.

Gradients of a block are whole until its backward has ended. REDUCE sums them over the ranks, and
from then on a rank has those of its slice, in memory of their own.

[Note: Devices that exchange]
If the plan says so (``Plan.gather``), UPLOAD brings the rank's slice of weights to its device, and
GATHER fills the rest there. By then all ranks have updated the block, so the memory that they share
is whole, too. That of weights on disk is not: each rank reads its slice, and gives it back when its
own device has it. Outside a step whole weights come from the host in any case.
"""

from __future__ import annotations

import errno
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.plan import Gather, Plan
from lightning_hetero.ir.schedule import NO_BLOCK, Lane
from lightning_hetero.lanes.collectives import Collectives
from lightning_hetero.runtime.device import DeviceSide
from lightning_hetero.runtime.device.weights import DeviceWeights
from lightning_hetero.runtime.options import SessionOptions
from lightning_hetero.runtime.placement import Placement
from lightning_hetero.runtime.same_plan import check_same_plan
from lightning_hetero.runtime.slice_gradients import SliceGradients
from lightning_hetero.runtime.slice_reads import SliceReads
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.store.live.geometry import versions
from lightning_hetero.store.live.moved_weights import bring_back, find_moved
from lightning_hetero.store.live.shared_memory import FileAddress, SharedArena, SharedFile
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.store.raw_memory import tensor_at

log = logging.getLogger(__name__)


class Slices:
    """One rank's side of the collectives.

    The thread that computes calls it, in the order of the schedule. What a method returns does the
    op: in the thread of lane ``net``, or at once where that lane is empty. Whether weights are
    whole (``Part.is_whole``) is what the ops that were submitted make true, as the schedule has it.

    Args:
        collectives: Those of the ranks that share the model.
        is_shared: They have the same memory for weights.
        side: What is on the rank's device, if that has memory of its own.
        poison: Fill memory whose content does not count with NaN (tests).

    Attributes:
        on_devices: Devices exchange weights and gradients themselves; see [Note: Devices that
            exchange].
    """

    def __init__(self, collectives: Collectives, side: DeviceSide | None = None, *, is_shared: bool, poison: bool = False) -> None:
        self.collectives, self.is_shared, self._poison = collectives, is_shared, poison
        self._has_device, self.on_devices = side is not None, False
        self.gradients = SliceGradients(collectives, side)
        self.reads = SliceReads(collectives)

    def install(self, plan: Plan) -> None:
        """Changes to another plan: whether devices exchange weights and gradients themselves."""
        self.on_devices = self.gradients.on_devices = self._has_device and plan.gather is Gather.DEVICE

    @property
    def lane(self) -> Lane:
        """The lane of all collectives of a step."""
        return Lane.PEER if self.on_devices else Lane.NET

    def gather_on_device(self, block: Block, weights: DeviceWeights) -> Callable[[], None]:
        """GATHER between devices, to which ranks have uploaded their slices."""
        parts = [part for part in block.parts if not (part.is_whole or block.weights_on_disk)]
        op = self.collectives.announce("GATHER", block.index)
        for part in parts:
            part.is_whole = True

        def run() -> None:
            self.collectives.met(op)
            weights.gather(block, self.collectives.gather_on_devices)
            for part in parts if self._poison else ():
                if isinstance(part.arena, SharedArena):  # which RELEASE has spoiled for this rank
                    part.arena.share()

        return run

    def gather(self, block: Block) -> Callable[[], None]:
        """GATHER: the block's memory has the newest slices of all ranks."""
        parts = [part for part in block.parts if not part.is_whole]
        op = self.collectives.announce("GATHER", block.index, barrier=self.is_shared)
        for part in parts:
            part.is_whole = True

        def run() -> None:
            self.collectives.met(op)
            for part in parts:
                if self._poison:
                    self._spoil(part)
                if isinstance(part.arena, SharedArena):
                    if self._poison:
                        part.arena.share()
                else:
                    whole = _bytes(part)
                    self.collectives.gather(whole, whole.view(part.own.ranks, -1)[part.own.rank])

        return run

    def leave(self, block: Block) -> None:
        """The rank's slice of weights goes back to the disk; no other device reads it."""
        for part in block.parts:
            part.is_whole = False

    def release(self, block: Block) -> Callable[[], None]:
        """RELEASE: the memory of the other ranks' slices does not count, and is given back.

        If ranks share it and slices go back to the disk next, all ranks have ended their use. Of
        a device that is its UPLOAD, which may run after this call.
        """
        meets = self.is_shared and block.weights_on_disk and any(part.is_whole for part in block.parts)
        op = self.collectives.announce("RELEASE", block.index, barrier=self._has_device) if meets else None
        for part in block.parts:
            part.is_whole = False

        def run() -> None:
            if op is not None:
                self.collectives.met(op)
            for part in block.parts:
                if self._poison:
                    self._spoil(part)
                elif not isinstance(part.arena, SharedArena):
                    for first, length in _other_ranges(part):
                        part.arena.drop(first, length)

        return run

    def _spoil(self, part: Part) -> None:
        """Fills the slices of other ranks with NaN, for this rank alone."""
        for first, length in _other_ranges(part):
            if isinstance(part.arena, SharedArena):
                part.arena.keep_apart(first, length)
            _bytes(part)[first : first + length].view(part.dtype).fill_(torch.nan)

    def settle(self, block: Block, *, whole: bool) -> None:
        """Brings a block to where a new plan has it, whole or a slice; lane ``net`` is empty."""
        run = self.gather(block) if whole else self.release(block)
        run()

    def share(self, block: Block) -> None:
        """Gives all ranks the first rank's weights of a block."""
        if self.is_shared:
            for part in block.parts:
                if part.is_filled_here:  # by the first rank of a node, for the others there
                    self.collectives.like_first_node(_bytes(part))
            self.collectives.meet("SHARE", block.index)
        for part in block.parts:
            part.versions = versions(part)
            if isinstance(part.arena, SharedArena):
                part.arena.share()
            else:
                self.collectives.broadcast(_bytes(part))

    @contextmanager
    def alike(self, store: TierStore, blocks: Sequence[Block]) -> Iterator[None]:
        """In the context all ranks write the same values to weights."""
        with store.all_writing():
            yield
        for part in [part for block in blocks for part in block.parts]:
            part.versions = versions(part)

    @contextmanager
    def apart(self, blocks: Sequence[Block]) -> Iterator[None]:
        """What code writes to whole weights in the context, this rank alone sees.

        All ranks enter and leave it. Then each rank's own slice counts, of nodes that of the first.
        """
        parts = [part for block in blocks for part in block.parts]
        arenas = [(part, part.arena) for part in parts if isinstance(part.arena, SharedArena) and part.arena.is_shared]
        before = [versions(part) for part, _ in arenas]
        for _, arena in arenas:
            arena.keep_apart()
        try:
            yield
        finally:
            if arenas:
                self._end_apart(arenas, before)

    def _end_apart(self, arenas: Sequence[tuple[Part, SharedArena]], before: Sequence[int]) -> None:
        """All ranks see what any of them has changed in its slice.

        Whether a part that is written once has changed, all of them say alike, also if one rank
        alone has written to it.
        """
        for part, _ in arenas:
            find_moved(part)
            bring_back(part)
        own = [arena.was_changed(*part.slice_range) for part, arena in arenas]
        (any_changed,) = self.collectives.meet("MATERIALIZE", NO_BLOCK, any(own))
        rows = self.collectives.agree(own) if any_changed else [own]
        for (part, arena), version, *some in zip(arenas, before, *rows, strict=True):
            changed = any(some)
            if changed:
                begin, size = part.slice_range
                self.collectives.like_first_node(_bytes(part)[begin : begin + size])
                arena.write_back(begin, size)
                part.is_whole, part.dirty = False, part.dirty or part.block.weights_on_disk
            if part.slots == 1:
                part.num_moves += version + changed - versions(part)
            arena.share()
            part.versions = versions(part)


def shared_file(collectives: Collectives) -> SharedFile | None:
    """The memory that ranks of a node share; ``None``, and a line in the log, if some cannot."""
    file, why = None, 0
    if collectives.shard == 0:
        file, why = _opened(None)
    places = collectives.agree([0] * len(FileAddress._fields) if file is None else file.place)
    place = places[collectives.node * collectives.shards]  # where the first rank of this node has it
    if collectives.shard and any(place):
        file, why = _opened(FileAddress(*map(int, place)))
    refusals = [(rank, int(code)) for rank, (code,) in enumerate(collectives.agree([why])) if code]
    if not refusals:
        return file
    if collectives.rank == 0:
        rank, code = refusals[0]
        log.warning(
            "Ranks do not share memory for weights: rank %d cannot open that of the first one (%s). Each copies whole weights.",
            rank,
            os.strerror(code),
        )  # fmt: skip
    return None


def _opened(place: FileAddress | None) -> tuple[SharedFile | None, int]:
    try:
        return SharedFile(place), 0
    except OSError as error:
        return None, error.errno or errno.EIO


def slices_of(
    options: SessionOptions, blocks: Sequence[Block], plan: Plan, file: SharedFile | None, side: DeviceSide | None
) -> Slices | None:
    """What one of several ranks keeps; ``None`` if this process has all of the model.

    ``file`` is the memory that the ranks share.

    Raises:
        ConfigError: Another rank has other parameters, or another plan.
    """
    if options.collectives is None:
        return None
    options.collectives.names = [block.name for block in blocks]
    layout = [(part.names, [tuple(p.shape) for p in part.params], part.num_elements) for b in blocks for part in b.parts]
    trained = [p.requires_grad for b in blocks for p in b.params()]
    rows = options.collectives.agree([zlib.crc32(repr(one).encode()) for one in (layout, trained)])
    for name, *numbers in zip(("parameters", "trained parameters"), *rows, strict=True):
        if len(set(numbers)) > 1:
            raise ConfigError(
                f"rank {options.collectives.rank} of {options.collectives.ranks}: the ranks have other {name}. Build the same "
                f"model on all."
            )
    check_same_plan(options.collectives, plan)
    return Slices(options.collectives, side, is_shared=file is not None, poison=options.poison)


def _other_ranges(part: Part) -> list[tuple[int, int]]:
    """What is before and behind it."""
    begin, size = part.slice_range
    return [(0, begin), (begin + size, (part.own.ranks - part.own.rank - 1) * size)]


def with_same_rooms(placement: Placement, collectives: Collectives | None) -> Placement:
    """The placement with rooms that all ranks have: free memory differs, but schedules must not."""
    if collectives is None:
        return placement
    rooms = placement.cache_bytes, placement.least_cache_bytes, placement.device_cache_bytes, placement.may_defer
    rows = collectives.agree(rooms)
    cache, least, on_device, may_defer = (int(min(column)) for column in zip(*rows, strict=True))
    return replace(
        placement, cache_bytes=cache, least_cache_bytes=least, device_cache_bytes=on_device, may_defer=bool(may_defer)
    )  # fmt: skip


def _bytes(part: Part) -> Tensor:
    return tensor_at(part.arena, part.arena.address, part.num_elements * part.dtype.itemsize, torch.uint8)
