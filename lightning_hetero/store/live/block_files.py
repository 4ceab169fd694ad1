"""The files of a run: their numbers, and the commit records that name them.

A number stays taken until a record is written that no longer names it, since a crash goes back to the last record.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack

from lightning_hetero._native import Engine, NativePart, PartGeometry, Store, Ticket
from lightning_hetero.store.format.directory import StoreDirectory
from lightning_hetero.store.format.state_files import StateFiles
from lightning_hetero.store.live.engine_options import EngineOptions
from lightning_hetero.store.live.geometry import has_file


class BlockFiles:
    """Block files and commit records in the directory of a run, while it has one.

    Args:
        directory: The directory of the disk tier; ``None`` when nothing lives on disk. It is closed with the files, and removed
            when they cannot be opened.
        options: The engine's options.
        num_blocks: Largest number of block files.
        user_bytes: Largest user blob of a commit record.
        resume: The directory's files are those of an earlier run; :attr:`recovered` is its last record.

    Attributes:
        step: Number of the last commit record.
        recovered: The user blob of the record that was resumed from.
        states: What of the training state is beside the records; ``None`` without a directory.
        last_commit: The latest commit that nobody has waited for.
    """

    def __init__(
        self, directory: StoreDirectory | None, options: EngineOptions, *, num_blocks: int, user_bytes: int, resume: bool
    ) -> None:
        self.directory = directory
        self.step, self.recovered = 0, b""
        self.states: StateFiles | None = None
        self.last_commit: Ticket | None = None
        self._options, self._num_blocks, self._user_bytes = options, num_blocks, user_bytes
        self._store: Store | None = None
        self._ids: set[int] = set()
        self._natives: dict[int, NativePart] = {}  # those with files that are open, by number
        self._closed_ids: set[int] = set()  # closed since the last commit record, which still names them
        self._free_ids: set[int] = set()
        if directory is not None:
            with ExitStack() as undo:
                undo.callback(directory.close, remove=not resume)
                self._store = self._open(directory, create=not resume)
                undo.callback(self._store.close)
                if resume:
                    self.step, self.recovered = self._store.recover()
                undo.pop_all()

    def _open(self, directory: StoreDirectory, *, create: bool) -> Store:
        self.states = StateFiles(directory, durable=self._options.durability == "power")
        return Store(
            os.fspath(directory.path),
            uuid=directory.uuid,
            create=create,
            direct_io=self._options.direct_io and not directory.in_memory,
            durability={"none": 0, "process": 1, "power": 2}[self._options.durability],
            write_digests=not directory.temporary and self._options.durability != "none",
            verify_digests=self._options.verify_digests,
            num_blocks=self._num_blocks,
            user_bytes=self._user_bytes,
        )

    def attach(self, directory: StoreDirectory) -> None:
        """From now on blocks may have files; the directory is the run's own, and closed where it cannot be used."""
        assert self.directory is None, "one directory at a time"
        with ExitStack() as undo:
            undo.callback(directory.close, remove=True)
            self._store = self._open(directory, create=True)
            undo.pop_all()
        self.directory = directory

    def detach(self) -> None:
        """Closes and removes what :meth:`attach` or the constructor opened; no block has files any more."""
        if self.directory is None or self._store is None:
            return
        self.wait_for_commit()
        directory, store = self.directory, self._store
        self.directory = self._store = self.states = None
        store.close()
        directory.close()
        self._ids, self._closed_ids, self._free_ids = set(), set(), set()
        self._natives.clear()

    def close(self, *, remove: bool | None = None) -> None:
        """Closes all; ``remove``: the files go too; ``None``: they do if the directory is temporary."""
        self._natives.clear()
        if self._store is not None:
            self._store.close()
        if self.directory is not None:
            self.directory.close(remove)

    @property
    def num_open(self) -> int:
        """Files of blocks that are open: two slots of each."""
        return 2 * len(self._natives)

    @property
    def user_bytes(self) -> int:
        """Largest user blob of a record of this store, which an earlier run may have laid out."""
        return self._user_bytes if self._store is None else self._store.user_bytes

    # ---- blocks -----------------------------------------------------------------------------------------------------------

    def next_id(self) -> int:
        """A number for a block's files: one that no block has, nor a commit record names."""
        self.wait_for_commit()
        return min(self._free_ids, default=max(self._ids, default=-1) + 1)

    def free_id(self, wanted: int) -> int:
        """``wanted`` if no block of this run has had it: in a new store parts are numbered as the manifest lists them."""
        return wanted if wanted not in self._ids else self.next_id()

    def adopt(self, identifiers: Iterable[int], states: Mapping[str, int]) -> None:
        """Numbers of block files that the last record names, whose blocks are not open yet, and its state files with their bytes.

        Numbers in between are free: a run that dies soon after its parts have moved leaves gaps below; without them the record's
        places would run out.
        """
        self._ids.update(identifiers)
        if self._store is not None:
            between = set(range(max(self._ids, default=0))) - self._ids
            self._free_ids |= {number for number in between if not self._store.names(number)}
        if self.directory is not None:
            assert self.states is not None
            self.directory.remove_all_but(self._ids, states)
            self.states.adopt(states)

    def open_part(self, geometry: PartGeometry, address: int) -> NativePart:
        """A native part over the memory at ``address``, with files if the geometry has sections there."""
        self.wait_for_commit()
        native = NativePart(self._store if has_file(geometry) else None, geometry, address)
        if has_file(geometry):  # the numbers of others mean nothing
            self._ids.add(geometry.id)
            self._natives[geometry.id] = native
            self._free_ids.discard(geometry.id)
        return native

    def close_part(self, native: NativePart) -> None:
        """Closes a native part and removes its files; everything that was written of it is committed."""
        self.wait_for_commit()
        native.discard()
        if self.directory is not None and has_file(native.geometry):
            del self._natives[native.geometry.id]
            self._closed_ids.add(native.geometry.id)
            self.directory.remove_block(native.geometry.id)

    def committed(self) -> list[str]:
        """Names of the slot files that the last record names, and of the last kept step's state files.

        They stay as they are until there is another one.
        """
        self.wait_for_commit()
        assert self.states is not None
        slots = {number: native.committed_slot() for number, native in self._natives.items()}
        blocks = [f"block-{number:05d}.{'ab'[slot]}" for number, slot in slots.items() if slot is not None]
        return [*blocks, *self.states.kept]

    # ---- records ----------------------------------------------------------------------------------------------------------

    def begin_state(self) -> None:
        """The state of a step is about to be taken: state files that no record needs any more are removed."""
        assert self.states is not None
        if self.states.has_old:
            self.wait_for_commit()
        self.states.begin()

    def commit(self, engine: Engine, user: bytes) -> Ticket:
        """Writes a record behind everything submitted so far."""
        assert self._store is not None
        self.step += 1
        self._free_ids |= self._closed_ids  # free once this record is there, which `next_id` waits for
        self._closed_ids = set()
        self.last_commit = engine.commit(self._store, self.step, user, priority=-2)
        return self.last_commit

    def wait_for_commit(self) -> None:
        """The set of blocks may not change while a commit record is being written."""
        if self.last_commit is not None:
            self.last_commit.wait()
            self.last_commit = None
