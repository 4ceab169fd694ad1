"""Keeps every step of a fit on disk: mirrors of what lives in memory, and the records that name everything.

[Note: What keeps steps]
A fit keeps its steps if it has a store with a name (``disk_path``), a ``durability`` that promises something, and optimizers
that update part by part. Everything else is scratch: it goes with the process. The price of a kept step is the bytes of
mirrors, which the log names as fit begins, and of state in memory that only the optimizer's own code knows. With ``keep_every``
above 1 only every so many steps pay it: the others commit what they write to the disk, in records that stand for no step, and the
last one that was kept is pinned (``format.pins``). So is the last step of any run before a record that comes in the middle of a
step: parameters have joined an optimizer, a checkpoint was loaded, blocks move although something was written since.

[Note: How much a kill loses]
The record of a step is written while the next step computes. Before that next step counts as ended, which is when its hooks run,
the record has to be on the disk. So a kill finds at most one ended step without its record, however slow the disk is. Waiting any
earlier would take away the overlap; waiting later, or not at all, lets steps pile up behind a slow disk.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_hetero._native import NativePart, Ticket
from lightning_hetero.errors import ConfigError, HeteroError
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.runtime.optimizers import OptimizerBinding, Rule
from lightning_hetero.runtime.options import SessionOptions
from lightning_hetero.runtime.state_blobs import StateBlobs
from lightning_hetero.store.format import record
from lightning_hetero.store.format.directory import StoreDirectory
from lightning_hetero.store.format.pins import pin, pins, unpin
from lightning_hetero.store.format.snapshots import snapshot
from lightning_hetero.store.format.state_files import StateFiles
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.store.live.geometry import versions
from lightning_hetero.store.live.mirror_writes import arrange_mirrors, write_mirrors
from lightning_hetero.store.live.mirrors import entry_of, mirror_bytes
from lightning_hetero.store.live.native_parts import open_recorded
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.units import KIB, format_bytes

log = logging.getLogger(__name__)

_NO_STEP = "no step has been committed yet"
_BETWEEN = "its last step was not to be kept (keep_every)"
_TOO_LARGE = "its record was too large (the log says so)"
_CHANGED = "it was changed after its last step, whose pin is gone, and no other step followed"


@dataclass(frozen=True, slots=True)
class _Open:
    """The store in which steps are kept: its tiers, state that the engine does not know, its directory, and files of state."""

    store: TierStore
    blobs: StateBlobs
    directory: StoreDirectory
    states: StateFiles


class KeptSteps:
    """What a session needs to keep its steps.

    Args:
        root: The model.
        blocks: Its blocks.
        bindings: The optimizers.
        options: The user's choices.
        obstacle: Why steps cannot be kept, as far as the session knows; empty if they can.

    Attributes:
        kept: Whether steps are kept.
    """

    def __init__(
        self,
        root: nn.Module,
        blocks: Sequence[Block],
        bindings: Sequence[OptimizerBinding],
        options: SessionOptions,
        obstacle: str = "",
    ) -> None:
        self._root, self._blocks, self._bindings = root, blocks, bindings
        self._parts = [part for block in blocks for part in block.parts]
        self._entries: dict[Part, str] = {}
        self._found: dict[Part, record.PartEntry] = {}
        self._retired: list[NativePart] = []
        self._mirrored: set[int] = set()  # blocks whose files a MIRROR has brought up to date with the step that ends
        self._state, self._why = "", _NO_STEP
        self._is_too_large = False
        self._opened: _Open | None = None
        self._every, self._count = options.keep_every, 0
        self._has_pins = False
        self._owners: list[list[int]] = []
        self.owners_changed()
        obstacle = (obstacle or self._obstacle(options)) if options.wants_steps else ""
        self.kept = options.wants_steps and not obstacle
        if obstacle:
            log.warning(
                "Steps are not kept: %s. A run that is killed cannot be resumed from its store; save checkpoints.", obstacle
            )

    @property
    def _open(self) -> _Open:
        """Where steps are kept.

        Raises:
            HeteroError: They are not, or not yet.
        """
        if self._opened is None:
            raise HeteroError("no store is open in which steps are kept.")
        return self._opened

    def _obstacle(self, options: SessionOptions) -> str:
        for binding in self._bindings:
            name = type(binding.optimizer).__name__
            if binding.capability is Rule.WHOLE:
                return f"optimizer {name} is not torch's, so it is not known to update parameters independently"
            if type(binding.optimizer).state_dict is not Optimizer.state_dict:
                return f"optimizer {name} has a state_dict of its own"
            if options.device is not None and binding.capability is not Rule.NATIVE:
                return f"optimizer {name} runs by its own code on the device, and its state is not in the store"
        return ""

    def begin(self, store: TierStore, blobs: StateBlobs, layout: dict[str, Any] | None) -> None:
        """The store is open; where a run goes on from it, its last record says where everything is.

        Args:
            store: The store.
            blobs: State that the engine does not know.
            layout: To go on: what the manifest of a new store would say of the model's parts.

        Raises:
            ConfigError: The record is of another partition of the model, or of other optimizers, or steps are not kept.
        """
        blobs.kept = self.kept
        if not self.kept:
            if layout is not None:
                raise ConfigError(
                    "ckpt_path is the store at disk_path, but this run would not keep its steps. Train with the optimizer of the "
                    'store, and durability="process" or "power".'
                )
            return
        directory, states = store.files.directory, store.files.states
        if directory is None or states is None:
            raise HeteroError("steps are kept in a store with a directory; this one has none.")
        self._opened = _Open(store, blobs, directory, states)
        store.describe = self._describe
        self._has_pins = bool(pins(directory.path))
        if layout is None:
            unpin(directory.path)  # an earlier run's, whose store has been taken over
            return
        found = record.parse(store.files.recovered)
        same = all(directory.layout.get(key, value) == value for key, value in layout.items())  # older stores say less
        if not same or len(found.parts) != len(self._parts):
            raise ConfigError(
                f"store {str(directory.path)!r}: its parameters are grouped in another way, because others are frozen, of another "
                f"dtype, or with another optimizer, than now. Resume with model and optimizers as they were when training began."
            )
        self._check_optimizers(record.state_of(found, directory.path, "optimizers")["optimizers"])
        self._check_owners(found.owners)
        self._state, self._why = found.state, found.why
        self._found = dict(zip(self._parts, found.parts, strict=True))
        self._entries = {part: entry.to_json() for part, entry in self._found.items()}
        blob_optimizers = {blob.optimizer for entry in found.parts for blob in entry.blobs}
        if max(blob_optimizers, default=0) >= len(self._bindings):
            raise ConfigError(f"store {str(directory.path)!r}: its last record names an optimizer that it does not describe.")
        store.files.adopt((block.id for entry in found.parts for block in entry.files), found.files)

    def _check_optimizers(self, kept: list[dict[str, Any]]) -> None:
        if len(kept) != len(self._bindings):
            raise ConfigError(f"the model has {len(self._bindings)} optimizers, the store {len(kept)}. Resume with the same ones.")
        for binding, books in zip(self._bindings, kept, strict=True):
            binding.check(books)

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
        """Parameters have joined an optimizer: the next record says which part belongs to which."""
        numbers = {id(p): number for number, binding in enumerate(self._bindings) for p in binding.params()}
        self._owners = [sorted({numbers[id(p)] for p in part.params if id(p) in numbers}) for part in self._parts]

    def adopt(self, part: Part) -> None:
        """Brings back what the store holds of a part."""
        entry = self._found.pop(part)
        open_recorded(self._open.store, part, entry)
        for blob in entry.blobs:
            self._open.blobs.adopt(part, blob, self._bindings[blob.optimizer].optimizer)

    def _entry(self, part: Part) -> str:
        return entry_of(part, self._open.blobs.entries(part, [b.optimizer for b in self._bindings])).to_json()

    def settled(self, part: Part) -> list[NativePart]:
        """The part is whole where a plan wants it; the next record says so. Returns mirrors to close after that."""
        if self._opened is None:
            return []
        gone = arrange_mirrors(self._open.store, part)
        write_mirrors(self._open.store, part)
        self._entries[part] = self._entry(part)
        return gone

    def about_to_move(self) -> None:
        """Blocks are about to move, mirrors included: memory that was changed since the last kept step is no part of it."""
        if self.kept and any(part.mirrors and part.mirrored_versions != versions(part) for part in self._parts):
            self._open.store.unrecorded.changed = True

    def reopened(self, part: Part) -> None:
        """The part has got a new home during a step, whose record says so."""
        if self._opened is not None:
            self._retired += arrange_mirrors(self._open.store, part)

    def placed(self) -> None:
        """All parts are where the plan wants them."""
        if not self.kept:
            return
        with self._open.store.unrecorded.moving():
            for part in self._parts:
                self._retired += self.settled(part)
        self._open.store.unrecorded.changed = False
        size = sum(mirror_bytes(part, None if part.native is None else part.native.geometry) for part in self._parts)
        where = str(self._open.directory.path)
        often = "Every step" if self._every == 1 else f"One of {self._every} steps"
        log.info(
            "%s is kept in %r: pass it as ckpt_path to go on from the last one. What the plan keeps in memory is written "
            'there too, %s in each of them; durability="none" saves that, and keeps nothing.',
            often, where, format_bytes(size),
        )  # fmt: skip

    def committed(self) -> None:
        """What :meth:`placed` has written is committed: the step that was resumed from is there until the next one is kept."""
        if not self.kept or not self._state:
            return
        self._open.store.files.wait_for_commit()  # hooks as training starts may change what is written
        if self._every > 1:
            self._pin()

    def keep(self, executor: Executor, state: Callable[[StateFiles], str], *, last: bool = False) -> None:
        """Commits the step that has just ended, whole if it is one to be kept.

        Args:
            executor: The executor.
            state: Takes the training state as the record has it, and puts into files what is too large for that; empty if it
                cannot be kept.
            last: Training may end with it, so it is kept in any case.
        """
        self._count += 1
        whole = last or self._count % self._every == 0
        text = self._take(state) if whole else ""
        self._mirrored.clear()
        with executor.handed(whole=whole):
            for block in self._blocks:
                if block.index not in self._mirrored:
                    self._write(block, whole=whole)
                executor.residency.doors.guard(block)
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
                self._states.committed()
            self._retired, blobs.retired = [], []
            for native in retired:
                executor.store.files.close_part(native)
            if self._state and self._every > 1:
                self._pin()
            elif self._state and self._has_pins:  # of a run that kept fewer steps
                executor.store.files.wait_for_commit()
                self._unpin()

    @property
    def left_out_last(self) -> bool:
        """Whether the last step is one that ``keep_every`` leaves out."""
        return self.kept and not self._state and self._why == _BETWEEN

    @property
    def last_kept(self) -> str:
        """What would be lost if the store were written over, in words; empty where nothing would."""
        if not self.kept or not (self._state or self._has_pins):
            return ""
        return "the last kept step"

    def put_aside(self, target: Path) -> None:
        """Links the last kept step to another path, where it stays; training goes on in the store without it."""
        path = self._open.directory.path
        if not self._state:
            path = pins(path)[-1]
            os.rename(path, target)
        else:
            snapshot(path, target, self._open.store.files.committed())
        log.warning("disk_path %r held the last kept step of an earlier fit. It has been put aside: %r.", str(path), str(target))

    def await_record(self) -> None:
        """A step is about to end: the record of the one before it is on the disk."""
        if self._opened is not None:
            self._open.store.files.wait_for_commit()

    def _take(self, state: Callable[[StateFiles], str]) -> str:
        self._open.store.files.begin_state()
        text = state(self._states)
        self._states.end()
        return text

    @property
    def _states(self) -> StateFiles:
        return self._open.states

    def _pin(self) -> None:
        """Gives the slots of the last record to a pin."""
        slots = self._open.store.files.committed()
        pin(self._open.directory.path, self._open.store.files.step, slots)
        self._has_pins = True

    def _unpin(self) -> None:
        unpin(self._open.directory.path)
        self._has_pins = False

    def mirror(self, block: Block, after: Sequence[Ticket]) -> list[Ticket]:
        """MIRROR: brings the files of a block up to date with a step that is kept.

        Args:
            block: The block.
            after: What the writes wait for.
        """
        self._mirrored.add(block.index)
        return self._write(block, whole=True, after=after)

    def _write(self, block: Block, *, whole: bool, after: Sequence[Ticket] = ()) -> list[Ticket]:
        """Brings the files up to date with the step; ``whole``: those of what lives in memory too."""
        store, blobs = self._open.store, self._open.blobs
        tickets: list[Ticket] = []
        for part in block.parts:
            for binding in self._bindings:
                if whole and binding.rule is not Rule.NATIVE:
                    blobs.keep(part, binding.optimizer)
            if whole or part.state_home is None:
                store.refresh_master(part)  # the next update would do it, and a resume cannot know
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
    """``num_blocks`` and ``user_bytes`` of a new store's commit ring: room for unfreezing, moves, and a state that is kept."""
    num_params = sum(len(p.params) for b in blocks for p in b.parts)
    num_parts = sum(len(b.parts) for b in blocks)
    if not kept:
        return {"num_blocks": 8 * num_parts + 64, "user_bytes": record.USER_BYTES_WITHOUT_STATE}
    user_bytes = 256 * KIB + 256 * num_parts + 512 * num_params  # first what `store.format.state_files` leaves in it
    return {"num_blocks": 16 * num_parts + 64, "user_bytes": user_bytes}


def frozen_parts(blocks: Sequence[Block], trained: Collection[int]) -> list[int]:
    """The numbers of parts that are frozen: none of their parameters has its ``id`` among the trained ones."""
    parts = [part for block in blocks for part in block.parts]
    return [number for number, part in enumerate(parts) if not any(id(p) in trained for p in part.params)]


def part_names(blocks: Sequence[Block]) -> list[list[str]]:
    """The names of each part's parameters: what a record's entries count by."""
    return [list(part.names) for block in blocks for part in block.parts]


__all__: list[Any] = ["KeptSteps", "commit_ring", "frozen_parts", "part_names"]
