"""Keeps the steps of a fit on disk: mirrors of what lives in memory, and the records of steps.

[Note: What keeps steps]
A fit keeps its steps if it has a store with a name (``disk_path``), a ``durability`` other than
"none", and optimizers that update part by part (docs/durability.md). With ``keep_every`` above 1
the steps between commit their writes in records that stand for no step, and the last kept step is
pinned (``format.pins``). The last step is also pinned before a record in the middle of a step:
parameters have joined an optimizer, a checkpoint was loaded, or blocks move after a write.

[Note: How much a kill loses]
The first record, of no step, is on the disk before training starts. The record of a step is written
while the next step computes. It is on the disk before the next step ends, which is when that step's
hooks run. So a kill finds at most one ended step without its record, however slow the disk is. An
earlier wait would lose the overlap. With a later wait, steps would pile up behind a slow disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.optim import Optimizer

from lightning_hetero._native import NativePart, PartGeometry, Ticket
from lightning_hetero.errors import ConfigError, HeteroError
from lightning_hetero.optim.blockwise import why_whole
from lightning_hetero.runtime.common_records import CommonRecords
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.runtime.optimizers import OptimizerBinding, Rule
from lightning_hetero.runtime.options import SessionOptions
from lightning_hetero.runtime.state_blobs import StateBlobs
from lightning_hetero.store.format import record
from lightning_hetero.store.format.audit import StoreFiles
from lightning_hetero.store.format.directory import StoreDirectory
from lightning_hetero.store.format.pins import pin, pins, unpin
from lightning_hetero.store.format.sets import root_of
from lightning_hetero.store.format.snapshots import snapshot
from lightning_hetero.store.format.state_files import StateFiles
from lightning_hetero.store.live.blocks import Block, Part, parts_of
from lightning_hetero.store.live.geometry import may_differ
from lightning_hetero.store.live.mirror_writes import arrange_mirrors, write_mirrors
from lightning_hetero.store.live.mirrors import entry_of, mirror_bytes
from lightning_hetero.store.live.moves import move
from lightning_hetero.store.live.native_parts import open_recorded
from lightning_hetero.store.live.spread_step import SpreadStep
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.units import KIB, format_bytes

log = logging.getLogger(__name__)

_NO_STEP = "no step has been committed yet"
_BETWEEN = "its last step was not to be kept (keep_every)"
_TOO_LARGE = "its record was too large (the log says so)"
_CHANGED = "it was changed after its last step, whose pin is gone, and no other step followed"


@dataclass(frozen=True, slots=True)
class _Open:
    """The store in which steps are kept."""

    store: TierStore
    blobs: StateBlobs
    directory: StoreDirectory
    states: StateFiles


class KeptSteps:
    """The kept steps of one fit, or of an evaluation, which keeps none.

    Args:
        wanted: Steps are to be kept, if possible.
        obstacle: Why the session cannot keep steps; empty if it can.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        bindings: Sequence[OptimizerBinding],
        options: SessionOptions,
        *,
        wanted: bool,
        obstacle: str = "",
    ) -> None:
        self._blocks, self._bindings = blocks, bindings
        self._parts = parts_of(blocks)
        self._entries: dict[Part, str] = {}
        self._found: dict[Part, record.PartEntry] = {}
        self._retired: list[NativePart] = []
        self._mirrored: set[int] = set()  # blocks whose MIRROR has written the step that ends
        self._state, self._why = "", _NO_STEP
        self._is_too_large = False
        self._opened: _Open | None = None
        self._every, self._count = options.keep_every, 0
        self._collectives, self._own_rank, self._ranks = options.collectives, options.own.rank, options.own.ranks
        self._source: SpreadStep | None = None
        self._has_pins = False
        self._owners: list[list[int]] = []
        self.owners_changed()
        obstacle = (obstacle or self._obstacle(options)) if wanted else ""
        self.kept, self._obstacle_found = wanted and not obstacle, obstacle
        if obstacle:
            log.warning(
                "Steps are not kept: %s. A run that is killed cannot be resumed from its store; save checkpoints.", obstacle
            )

    @property
    def _open(self) -> _Open:
        if self._opened is None:
            raise HeteroError("no store is open in which steps are kept.")
        return self._opened

    def _obstacle(self, options: SessionOptions) -> str:
        for binding in self._bindings:
            name = type(binding.optimizer).__name__
            if binding.capability is Rule.WHOLE:
                return f"optimizer {why_whole(binding.optimizer)}"
            if type(binding.optimizer).state_dict is not Optimizer.state_dict:
                return f"optimizer {name} has a state_dict of its own"
            if options.own.ranks > 1 and binding.capability is not Rule.NATIVE:
                return f"optimizer {name} updates slices by its own code, and its state is not in the stores of several ranks"
            if options.device is not None and binding.capability is not Rule.NATIVE:
                return f"optimizer {name} runs by its own code on the device, and its state is not in the store"
        return ""

    def begin(
        self, store: TierStore, blobs: StateBlobs, layout: Mapping[str, object] | None, source: SpreadStep | None = None
    ) -> None:
        """The store is open. If the run resumes from it, reads its last record.

        ``layout``, to resume: the parts of the model as a new manifest would have them. ``source``:
        the run resumes from these stores of other ranks, and this one is new.

        Raises:
            ConfigError: The record has other parts or other optimizers, or steps are not kept.
        """
        blobs.kept = self.kept
        if not self.kept:
            if layout is not None:
                why = self._obstacle_found and f": {self._obstacle_found}"
                raise ConfigError(
                    f"ckpt_path is the store at disk_path, but this run would not keep its steps{why}. Train with the optimizer "
                    f'and the kind of device of the store, and durability="process" or "power".'
                )
            return
        directory, states = store.files.directory, store.files.states
        if directory is None or states is None:
            raise HeteroError("steps are kept in a store with a directory; this one has none.")
        self._opened, self._source = _Open(store, blobs, directory, states), source
        store.describe = self._describe
        if self._collectives is not None:
            store.files.others = CommonRecords(self._collectives, store.files.step)
        if layout is None or source is not None:
            unpin(directory.path)  # of an earlier run, whose store this run has taken over
        self._has_pins = bool(pins(directory.path))
        if layout is None:
            return
        path = directory.path if source is None else source.path
        found = record.parse(store.files.recovered) if source is None else source.record
        there = directory.layout if source is None else source.layout
        same = all(there.get(key, value) == value for key, value in layout.items() if source is None or key != "alignment")
        if not same or len(found.parts) != len(self._parts):
            raise ConfigError(
                f"store {str(path)!r}: its parameters are grouped in another way, because others are frozen, of another "
                f"dtype, or with another optimizer, than now. Resume with model and optimizers as they were when training began."
            )
        kept = record.state_of(found, path, "optimizers")["optimizers"]
        if len(kept) != len(self._bindings):
            raise ConfigError(f"the model has {len(self._bindings)} optimizers, the store {len(kept)}. Resume with the same ones.")
        for binding, books in zip(self._bindings, kept, strict=True):
            binding.check(books)
        self._check_owners(found.owners)
        self._state, self._why = found.state, found.why
        self._found = dict(zip(self._parts, found.parts, strict=True))
        self._entries = {part: entry.to_json() for part, entry in self._found.items()}
        blob_optimizers = {blob.optimizer for entry in found.parts for blob in entry.blobs}
        if max(blob_optimizers, default=0) >= len(self._bindings):
            raise ConfigError(f"store {str(path)!r}: its last record names an optimizer that it does not describe.")
        if source is not None:
            source.copy_state_files(directory.path)
            states.adopt(found.files)
            return
        store.files.adopt((block.id for entry in found.parts for block in entry.files), found.files)

    def _check_owners(self, kept: Sequence[Sequence[int]] | None) -> None:
        for part, theirs, ours in zip(self._parts, kept or self._owners, self._owners, strict=True):  # older stores do not say
            if list(theirs) != ours:
                raise ConfigError(
                    f"{part.names[0]!r} belongs to {self._names(ours)}, in the store to {self._names(theirs)}. Resume with the "
                    f"optimizers that training began with, in the same order and with the same parameters."
                )

    def _names(self, numbers: Sequence[int]) -> str:
        known = [type(b.optimizer).__name__ for b in self._bindings]
        return " and ".join(f"optimizer {n}" + (f" ({known[n]})" if n < len(known) else "") for n in numbers) or "no optimizer"

    def owners_changed(self) -> None:
        """Parameters have joined or left an optimizer: the next record has the new owners."""
        numbers = {id(p): number for number, binding in enumerate(self._bindings) for p in binding.params()}
        self._owners = [sorted({numbers[id(p)] for p in part.params if id(p) in numbers}) for part in self._parts]

    def adopt(self, part: Part, geometry: PartGeometry | None) -> None:
        """Opens a part with the weights and state of the record, where ``geometry`` has them."""
        entry = self._found.pop(part)
        if self._source is not None:  # no record may come before all parts are here
            self._source.bring(self._open.store, part, self._parts.index(part), geometry)
            return
        open_recorded(self._open.store, part, entry)
        for blob in entry.blobs:
            self._open.blobs.adopt(part, blob, self._bindings[blob.optimizer].optimizer)
        part.is_whole = part.own.ranks == 1
        move(self._open.store, part, geometry, self.arrived)

    def _entry(self, part: Part) -> str:
        return entry_of(part, self._open.blobs.entries(part, [b.optimizer for b in self._bindings])).to_json()

    def arrived(self, part: Part) -> list[NativePart]:
        """The part is in place: records it. Returns mirrors to close after the next record."""
        if self._opened is None:
            return []
        gone = arrange_mirrors(self._open.store, part)
        write_mirrors(self._open.store, part)
        self._entries[part] = self._entry(part)
        return gone

    def about_to_move(self) -> None:
        """Blocks are about to move. Writes since the last kept step are not part of it."""
        if self.kept and any(part.mirrors and may_differ(part) for part in self._parts):
            self._open.store.unrecorded.changed = True

    def reopened(self, part: Part) -> None:
        """The part has new files. The record of the step under way names them."""
        if self._opened is not None:
            self._retired += arrange_mirrors(self._open.store, part)

    def placed(self) -> None:
        """All parts are in place."""
        if not self.kept:
            return
        with self._open.store.unrecorded.moving():
            for part in self._parts:
                self._retired += self.arrived(part)
        self._open.store.unrecorded.changed = False
        changing = [part for part in self._parts if part.slots > 1]
        size = sum(mirror_bytes(part, None if part.native is None else part.native.geometry) for part in changing)
        where = str(root_of(self._open.directory.path, self._ranks))
        often = "Every step" if self._every == 1 else f"One of {self._every} steps"
        log.info(
            "%s is kept in %r: pass it as ckpt_path to go on from the last one. What the plan keeps in memory is written "
            'there too, %s in each of them; durability="none" saves that, and keeps nothing.',
            often, where, format_bytes(size),
        )  # fmt: skip

    def committed(self) -> None:
        """The writes of :meth:`placed` are committed. Keeps the step that the run resumed from."""
        if not self.kept or not self._state:
            return
        if self._source is not None:
            self._source.close(removes=self._own_rank == 0)
            self._source = None
        if self._every > 1:
            self._pin()

    def keep(self, executor: Executor, state: Callable[[StateFiles], str], *, last: bool = False) -> None:
        """Commits the step that has just ended; keeps every N-th one, and the ``last`` in any case.

        ``state`` returns the training state for the record, and writes what is too large for it to
        files; it is empty if the state cannot be kept.
        """
        self._count += 1
        self._open.store.files.before_write()
        whole = last or self._count % self._every == 0
        text = ""
        if whole:
            self._open.store.files.begin_state()
            text = state(self._open.states)
            self._open.states.end()
        self._mirrored.clear()
        with executor.handed(whole=whole):
            for block in self._blocks:
                if block.index not in self._mirrored:
                    self._write(block, whole=whole)
                executor.residency.parameters.guard(block)
            executor.store.unrecorded.changed = False
            self._state, self._why = text, _BETWEEN
            if whole and not text:
                self._why = "its training state could not be kept (the log says why)"
            blobs = executor.updater.blobs
            retired = [*self._retired, *blobs.retired]
            for native in retired:
                native.retire()
        executor.commit(always=whole or bool(retired))
        with executor.context.run.turn:
            if self._state:
                self._open.states.committed()
            self._retired, blobs.retired = [], []
            for native in retired:
                executor.store.files.close_part(native)
            if self._state and self._every > 1:
                self._pin()
            elif self._state and self._has_pins:  # of a run that kept fewer steps
                executor.store.files.wait_for_commit()
                unpin(self._open.directory.path)
                self._has_pins = False

    @property
    def left_out_last(self) -> bool:
        """Whether ``keep_every`` leaves the last step out."""
        return self.kept and not self._state and self._why == _BETWEEN

    @property
    def last_kept(self) -> str:
        """The step that is lost if the store is written over, in words; empty if there is none."""
        return "the last kept step" if self.kept and (self._state or self._has_pins) else ""

    def put_aside(self, target: Path) -> None:
        """Moves the last kept step to another path; training goes on in the store without it."""
        path = self._open.directory.path
        if not self._state:
            with StoreFiles(path := pins(path)[-1]) as kept:
                snapshot(path, target, kept.record.files if kept.record is not None else ())
            unpin(path.parent)
        else:
            snapshot(path, target, self._open.store.files.committed())
        log.warning("disk_path %r held the last kept step of an earlier fit. It has been put aside: %r.", str(path), str(target))

    def await_record(self) -> None:
        """A step is about to end: waits until the record of the step before is on the disk."""
        if self._opened is not None:
            self._open.store.files.wait_for_commit()

    def _pin(self) -> None:
        """Gives the slots of the last record to a pin."""
        slots = self._open.store.files.committed()
        pin(self._open.directory.path, self._open.store.files.step, slots)
        self._has_pins = True

    def mirror(self, block: Block, after: Sequence[Ticket]) -> list[Ticket]:
        """MIRROR: writes the files of a block for a kept step, once ``after`` are done."""
        self._mirrored.add(block.index)
        return self._write(block, whole=True, after=after)

    def _write(self, block: Block, *, whole: bool, after: Sequence[Ticket] = ()) -> list[Ticket]:
        """Writes the files for the step; ``whole``: also what lives in memory."""
        store, blobs = self._open.store, self._open.blobs
        tickets: list[Ticket] = []
        for part in block.parts:
            for binding in self._bindings:
                if whole and binding.rule is not Rule.NATIVE:
                    blobs.keep(part, binding.optimizer)
            if whole or part.state_home is None:
                store.refresh_master(part)  # a resume cannot know that the next update would do it
            store.flush(part)
            tickets += write_mirrors(store, part, after=after) if whole else []
            if part.mirrors or part.native is not None:
                self._entries[part] = self._entry(part)
        return tickets

    def _describe(self) -> bytes:
        if self._open.store.unrecorded.changed and self._state:
            self._pin()
            self._state, self._why = "", _CHANGED
        parts = [self._entries.get(part, _NOWHERE) for part in self._parts]
        blob, room = record.compose(parts, self._state, self._why, self._owners), self._open.store.files.user_bytes
        if len(blob) <= room or not self._state:
            return blob
        if not self._is_too_large:
            self._is_too_large = True
            log.warning(
                "The record of a step has %s, and one of this store holds %s: the optimizer keeps too many tensors per parameter. "
                "Steps of this run cannot be resumed from; save checkpoints.", format_bytes(len(blob)), format_bytes(room),
            )  # fmt: skip
        self._state, self._why = "", _TOO_LARGE
        return record.compose(parts, self._state, self._why, self._owners)


_NOWHERE = record.PartEntry(None, stepped=False, weights=None, state=None).to_json()


def commit_ring(blocks: Sequence[Block], *, kept: bool) -> dict[str, int]:
    """The sizes of a new commit ring: room for unfreezing, moves and kept state."""
    num_params = sum(len(p.params) for b in blocks for p in b.parts)
    num_parts = sum(len(b.parts) for b in blocks)
    if not kept:
        return {"num_blocks": 8 * num_parts + 64, "user_bytes": record.USER_BYTES_WITHOUT_STATE}
    user_bytes = 256 * KIB + 256 * num_parts + 512 * num_params  # first what `store.format.state_files` leaves in it
    return {"num_blocks": 16 * num_parts + 64, "user_bytes": user_bytes}


def frozen_parts(blocks: Sequence[Block], trained: Collection[int]) -> list[int]:
    """The numbers of the parts without any trained parameter; ``trained`` has ``id``s."""
    return [number for number, part in enumerate(parts_of(blocks)) if not any(id(p) in trained for p in part.params)]


def part_names(blocks: Sequence[Block]) -> list[list[str]]:
    """The names of each part's parameters, in the order of a record's entries."""
    return [list(part.names) for part in parts_of(blocks)]
