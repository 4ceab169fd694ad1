"""The files of a run: their numbers, and the commit records that name them.

A number stays taken until a record is written that no longer names it, since a crash goes back to
the last record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from lightning_hetero._native import Engine, InPlacePart, NativePart, PartGeometry, RunFile, Store, Ticket, file_bytes
from lightning_hetero.store.format.directory import StoreDirectory
from lightning_hetero.store.format.in_place import InPlace
from lightning_hetero.store.format.state_files import StateFiles
from lightning_hetero.store.live.engine_options import EngineOptions
from lightning_hetero.store.live.geometry import has_file


class OtherRanks(Protocol):
    """The ranks that share the model; see [Note: Common steps] in ``store/common_steps.py``."""

    def settle(self, number: int) -> None:
        """Returns once all ranks have a record, which this one has. All of them call it."""

    def any(self, found: bool) -> bool:
        """Whether any rank has found something. All of them call it."""

    def agree(self, meeting: Callable[[], object], number: int, record: Ticket | None) -> None:
        """The same as an op, once they have met, with the record if it may not be on the disk."""


@dataclass(frozen=True, slots=True)
class _Disk:
    """What a run has on disk: all of it, or nothing."""

    directory: StoreDirectory
    states: StateFiles
    store: Store


def _bytes_of(geometry: PartGeometry) -> int:
    """Bytes of both slots."""
    return geometry.num_slots * file_bytes(geometry)


class BlockFiles:
    """Block files and commit records in the directory of a run, while it has one.

    Args:
        directory: The directory of the disk tier; ``None`` when nothing lives on disk. It is closed
            with the files, and removed when they cannot be opened.
        options: The engine's options.
        num_blocks: Largest number of block files.
        user_bytes: Largest user blob of a commit record.
        resume: The directory's files are those of an earlier run; :attr:`recovered` is its last
            record.

    Attributes:
        on_disk: There is a directory.
        step: Number of the last commit record.
        recovered: The user blob of the record that was resumed from.
        last_commit: The latest commit that nobody has waited for.
        others: The other ranks whose records count together with these, if there are any.
        room_bytes: Bytes that ``disk_capacity`` allows beside the files that were counted before.
        added_bytes: Bytes of files that were not counted before.
    """

    def __init__(
        self, directory: StoreDirectory | None, options: EngineOptions, *, num_blocks: int, user_bytes: int, resume: bool
    ) -> None:
        self.on_disk = False
        self.step, self.recovered = 0, b""
        self.last_commit: Ticket | None = None
        self.others: OtherRanks | None = None
        self.room_bytes: Callable[[], float] = lambda: math.inf
        self.added_bytes = 0
        self._options, self._num_blocks, self._user_bytes = options, num_blocks, user_bytes
        self._disk: _Disk | None = None
        self._ids: set[int] = set()
        self._natives: dict[int, NativePart] = {}  # those with files that are open, by number
        self._replaced: list[NativePart] = []  # the next record will not name them
        self._leaving: list[NativePart] = []  # the record that is being written does not name them
        self._closed_ids: set[int] = set()  # closed, but the last record names them
        self._free_ids: set[int] = set()
        if directory is not None:
            with ExitStack() as undo:
                undo.callback(directory.close, remove=not resume)
                disk = self._open(directory, create=not resume)
                undo.callback(disk.store.close)
                if resume:
                    self.step, self.recovered = disk.store.recover()
                undo.pop_all()

    @property
    def directory(self) -> StoreDirectory | None:
        """The directory, if there is one."""
        return None if self._disk is None else self._disk.directory

    @property
    def states(self) -> StateFiles | None:
        """What of the training state is beside the records; ``None`` without a directory."""
        return None if self._disk is None else self._disk.states

    def _open(self, directory: StoreDirectory, *, create: bool) -> _Disk:
        states = StateFiles(directory, durable=self._options.durability == "power")
        store = Store(
            directory.path,
            further=directory.places[1:],
            uuid=directory.uuid,
            create=create,
            direct_io=self._options.direct_io and not directory.in_memory,
            durability={"none": 0, "process": 1, "power": 2}[self._options.durability],
            write_digests=not directory.temporary and self._options.durability != "none",
            verify_digests=self._options.verify_digests,
            num_blocks=self._num_blocks,
            user_bytes=self._user_bytes,
        )
        self._disk, self.on_disk = _Disk(directory, states, store), True
        return self._disk

    def attach(self, directory: StoreDirectory) -> None:
        """Gives the run a directory for block files; it is closed if it cannot be used."""
        assert self._disk is None, "one directory at a time"
        with ExitStack() as undo:
            undo.callback(directory.close, remove=True)
            self._open(directory, create=True)
            undo.pop_all()

    def detach(self) -> None:
        """Closes and removes the directory, once no block has files any more."""
        disk = self._disk
        if disk is None:
            return
        self.wait_for_commit()
        self._close_replaced()
        self._disk, self.on_disk = None, False
        disk.store.close()
        disk.directory.close()
        self._ids, self._closed_ids, self._free_ids = set(), set(), set()
        self._natives.clear()

    def close(self, *, remove: bool | None = None) -> None:
        """Closes all. ``remove``: removes the files; ``None``: if they are temporary."""
        for native in [*self._natives.values(), *self._replaced, *self._leaving]:
            native.close()  # also those that wait for a record that does not come
        self._natives.clear()
        if self._disk is not None:
            self._disk.store.close()
            self._disk.directory.close(remove)

    @property
    def num_open(self) -> int:
        """Files of blocks that are open."""
        return sum(native.geometry.num_slots for native in self._natives.values())

    @property
    def user_bytes(self) -> int:
        """Largest user blob of a record of this store, which an earlier run may have laid out."""
        return self._user_bytes if self._disk is None else self._disk.store.user_bytes

    # ---- blocks ----------------------------------------------------------------------------------

    def next_id(self) -> int:
        """A number for a block's files: one that no block has, nor a commit record names."""
        self.wait_for_commit()
        return min(self._free_ids, default=max(self._ids, default=-1) + 1)

    def free_id(self, wanted: int) -> int:
        """``wanted`` if it is free: in a new store parts have the numbers of the manifest."""
        return wanted if wanted not in self._ids else self.next_id()

    def adopt(self, identifiers: Iterable[int], states: Mapping[str, int]) -> None:
        """Takes over the block files and state files that the last record names.

        A block whose state was never written has a number, but the record names no slot of it. What
        lies under that number was never committed, and the engine makes new files: the old ones go.

        Numbers in between are free: a run that dies soon after its parts have moved leaves gaps
        below; without them the record's places would run out.
        """
        self._ids.update(identifiers)
        if self._disk is not None:
            between = set(range(max(self._ids, default=0))) - self._ids
            self._free_ids |= {number for number in between if not self._disk.store.names(number)}
            committed = {number for number in self._ids if self._disk.store.names(number)}
            self._disk.directory.remove_all_but(committed, states)
            self._disk.states.adopt(states)

    def open_part(self, geometry: PartGeometry, address: int) -> NativePart:
        """A native part over the memory at ``address``, with files if the geometry needs them."""
        self.wait_for_commit()
        store = self._disk.store if self._disk is not None and has_file(geometry) else None
        disk = 0 if store is None or self._disk is None else self._disk.directory.disk_of(geometry.id, _bytes_of(geometry))
        native = NativePart(store, geometry, address, disk=disk)
        if has_file(geometry):  # the numbers of others mean nothing
            self._ids.add(geometry.id)
            self._natives[geometry.id] = native
            self._free_ids.discard(geometry.id)
        return native

    def open_in_place(self, geometry: PartGeometry, address: int, source: InPlace) -> InPlacePart:
        """A native part whose weights are read from files of somebody else."""
        files = [RunFile(file.path, file.num_bytes, file.mtime_ns) for file in source.files]
        return InPlacePart(geometry, address, files=files, runs=source.runs, direct_io=self._options.direct_io)

    def close_part(self, native: NativePart) -> None:
        """Closes a native part and removes its files. All of its writes are committed."""
        self.wait_for_commit()
        native.discard()
        if self._disk is not None and self._natives.get(native.geometry.id) is native:
            del self._natives[native.geometry.id]
            self._closed_ids.add(native.geometry.id)
            self._disk.directory.remove_block(native.geometry.id, native.disk, _bytes_of(native.geometry))

    def replace(self, native: NativePart) -> None:
        """Another native part has taken this one's place: closes it behind the next record."""
        native.retire()
        self._replaced.append(native)

    def committed(self) -> list[str]:
        """The slot files that the last record names, and the last kept step's state files.

        They stay as they are until there is another one.
        """
        self.wait_for_commit()
        slots = {number: native.committed_slot() for number, native in self._natives.items()}
        blocks = [f"block-{number:05d}.{'ab'[slot]}" for number, slot in slots.items() if slot is not None]
        return [*blocks, *(() if self._disk is None else self._disk.states.kept)]

    # ---- records ---------------------------------------------------------------------------------

    def begin_state(self) -> None:
        """Before the state of a step is taken: removes state files that no record needs."""
        if self._disk is None:
            return
        if self._disk.states.has_old:
            self.wait_for_commit()
        self._disk.states.begin()

    def commit(self, engine: Engine, user: bytes) -> Ticket | None:
        """Writes a record behind everything submitted so far, if there is a directory."""
        if self._disk is None:
            return None
        self.step += 1
        self._free_ids |= self._closed_ids  # free after this record (next_id waits)
        self._closed_ids = set()
        self._leaving, self._replaced = [*self._leaving, *self._replaced], []
        self.last_commit = engine.commit(self._disk.store, self.step, user, priority=-2)
        return self.last_commit

    def wait_for_record(self) -> None:
        """The last record is on the disk; other ranks may not have theirs."""
        if self.last_commit is not None:
            self.last_commit.wait()
            self.last_commit = None

    def wait_for_commit(self) -> None:
        """The last record is on the disk, on those of other ranks, too: the one before may go.

        The set of blocks may not change before.
        """
        self.wait_for_record()
        if self.others is not None:
            self.others.settle(self.step)
        leaving, self._leaving = self._leaving, []
        for native in leaving:
            self.close_part(native)

    def before_write(self) -> None:
        """A slot that the last record does not name is about to be written, or another record.

        The engine orders writes behind this process's own record.
        """
        if self.others is not None:
            self.wait_for_commit()

    def on_any_rank(self, found: bool) -> bool:
        """Whether this process has found something, or one of the other ranks."""
        return found if self.others is None else self.others.any(found)

    def _close_replaced(self) -> None:
        """The files of all parts are going: closes the parts that no record names any more."""
        replaced, self._replaced = self._replaced, []
        for native in replaced:
            self.close_part(native)
