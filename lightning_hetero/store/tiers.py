"""The tiers behind one contract: opens a native block for every part that needs one, and submits its transfers.

Host and disk differ only in a block's geometry: which of its arrays have a section in a file. Everything else, updates
included, goes through the same engine (native/include/hetero/api.h).

[Note: Commits]
A rewrite of a part goes to the slot that the last commit record does not name; a commit makes the newest slots the valid ones.
Between two commits a part is rewritten at most once, so whoever wants to write an ``uncommitted`` part commits first.

[Note: Verdicts]
A speculative update awaits :meth:`TierStore.keep` or :meth:`TierStore.revoke`. Who needs the part as it was, or commits, before
that revokes it: what was tried too early can always be done again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hetero import _native
from lightning_hetero._native import Block as NativeBlock
from lightning_hetero._native import BlockGeometry, Engine, EngineStats, Hyper, Patch, Segment, Store, Ticket
from lightning_hetero.errors import HeteroError, OffloadedAccessError, StoreCorruptError
from lightning_hetero.ir.plan import Tier
from lightning_hetero.store import mirrors
from lightning_hetero.store.blocks import Block, Part
from lightning_hetero.store.capacity import available_cores
from lightning_hetero.store.directory import StoreDirectory
from lightning_hetero.store.record import PartEntry
from lightning_hetero.units import KIB, MIB, round_up

NATIVE_DTYPES = {torch.float32: _native.F32, torch.bfloat16: _native.BF16, torch.float16: _native.F16}
WEIGHTS = -1  # the array number of a block's weights

_CHUNK_ELEMENTS = 256 * KIB  # 3 MiB of fp32 weights and moments: evidence.md found 2-4 MB best
_CHUNK_ALIGN = 4096
_PATCHES_IN_MEMORY = 64 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How transfers and updates run; the defaults suit most machines.

    Attributes:
        io_backend: ``"auto"`` (io_uring where the kernel allows it, else threads), ``"io_uring"`` or ``"pool"``.
        io_threads: Threads of the pool.
        queue_depth: Transfers in flight.
        update_threads: Threads that run update kernels; 0 means half of the processors that the process may use.
        staging_bytes: Memory through which state streams; 0 means eight chunks.
        durability: ``"process"`` survives ``kill -9``, ``"power"`` also a crash of the system, ``"none"`` nothing.
        direct_io: Bypass the page cache.
        verify_digests: Check the contents of every chunk that is read, not only its stamp.
    """

    io_backend: str = "auto"
    io_threads: int = 3
    queue_depth: int = 8
    update_threads: int = 0
    staging_bytes: int = 0
    durability: str = "process"
    direct_io: bool = True
    verify_digests: bool = False

    def threads(self) -> int:
        """Update threads, resolved."""
        return self.update_threads or max(1, available_cores() // 2)


def geometry_of(part: Part, identifier: int, *, num_state: int, weights: Tier, state: Tier) -> BlockGeometry:
    """The native geometry of a part.

    Args:
        part: The part.
        identifier: Number of its files.
        num_state: fp32 state arrays of a native update rule; 0 for parts that the engine does not update, whose weights
            it then sees as bytes.
        weights: Tier of the weights.
        state: Tier of the state arrays.
    """
    opaque = num_state == 0
    length = part.num_elements * (part.dtype.itemsize if opaque else 1)
    chunk = min(_CHUNK_ELEMENTS * (4 if opaque else 1), round_up(length, _CHUNK_ALIGN))
    return BlockGeometry(
        id=identifier,
        weight_dtype=_native.U8 if opaque else NATIVE_DTYPES[part.dtype],
        num_elements=round_up(length, 16),
        num_state=num_state,
        weights_on_disk_file=weights is Tier.DISK,
        state_on_disk_file=bool(num_state) and state is Tier.DISK,
        num_slots=2,
        chunk_elements=chunk,
    )


def chunk_bytes(geometry: BlockGeometry) -> int:
    """Bytes of one staged chunk: all of a block's arrays and the footers."""
    width = {_native.F32: 4, _native.BF16: 2, _native.F16: 2, _native.U8: 1}[geometry.weight_dtype]
    return int(geometry.chunk_elements * (width + 4 * geometry.num_state)) + 4 * _CHUNK_ALIGN


class TierStore:
    """Files, memory and the engine of one run.

    Args:
        options: The engine's options.
        directory: The directory of the disk tier; ``None`` when nothing lives on disk. It is closed with the store, and removed
            when the store cannot be opened.
        num_blocks: Largest number of block files.
        chunk_bytes_max: Largest staged chunk.
        user_bytes: Largest user blob of a commit record.
        resume: The directory's files are those of an earlier run; :attr:`recovered` is its last record.

    Attributes:
        describe: Makes a record's user blob.
        recovered: The user blob of the record that was resumed from.
        written: Something was written since the last commit, or since :meth:`commit_step` was last called, that is no move.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        directory: StoreDirectory | None,
        num_blocks: int,
        chunk_bytes_max: int,
        user_bytes: int = 256,
        resume: bool = False,
    ) -> None:
        self.options = options
        self.directory = directory
        self.chunk_bytes_max = chunk_bytes_max
        self.step = 0
        self.describe: Callable[[], bytes] = self._describe
        self.recovered = b""
        self.written = False
        self._moving = False
        self._mirrored = False  # a mirror was written since the last commit
        self._ids: set[int] = set()
        self._closed_ids: set[int] = set()  # closed since the last commit record, which still names them
        self._free_ids: set[int] = set()
        self._blobs: list[Part] = []
        self._uncommitted: list[Part] = []
        self._last_commit: Ticket | None = None
        self._opened: set[Part] = set()  # parts with an update that is open but not armed; other work on the part takes it back
        self._tried: dict[Part, bool] = {}  # parts with a speculative update; whether they had state before
        self._patched: dict[Part, int] = {}  # parts with patches that wait, and their bytes
        self.on_patched: Callable[[Tensor], object] = id  # told of values that have reached the file
        self._store: Store | None = None
        self._num_blocks, self._user_bytes = num_blocks, user_bytes
        self.staging_bytes = staging_bytes(options, chunk_bytes_max) if directory is not None else 0
        with ExitStack() as undo:
            if directory is not None:
                undo.callback(directory.close, remove=not resume)
                self._store = _open_store(directory, options, num_blocks, user_bytes, create=not resume)
                undo.callback(self._store.close)
                if resume:
                    self.step, self.recovered = self._store.recover()
            self.engine = Engine(
                io_backend=options.io_backend,
                io_threads=options.io_threads,
                queue_depth=options.queue_depth,
                update_threads=options.threads(),
                staging_bytes=max(self.staging_bytes, 3 * chunk_bytes_max),
                chunk_bytes_max=chunk_bytes_max,
            )
            undo.pop_all()

    def next_id(self) -> int:
        """A number for a block's files: one that no block has, nor a commit record names."""
        self.wait_for_commit()
        return min(self._free_ids, default=max(self._ids, default=-1) + 1)

    def free_id(self, wanted: int) -> int:
        """``wanted`` if no block of this store has had it: in a new store parts are numbered as the manifest lists them."""
        return wanted if wanted not in self._ids else self.next_id()

    def attach(self, directory: StoreDirectory) -> None:
        """From now on blocks may have files; the directory is the store's own, and closed where it cannot be used."""
        assert self.directory is None, "one directory at a time"
        with ExitStack() as undo:
            undo.callback(directory.close, remove=True)
            self._store = _open_store(directory, self.options, self._num_blocks, self._user_bytes, create=True)
            undo.pop_all()
        self.directory = directory

    def detach(self) -> None:
        """Closes and removes what :meth:`attach` or the constructor opened; no block has files any more."""
        if self.directory is None or self._store is None:
            return
        assert not any(part.on_disk for part in self._blobs), "blobs are dropped first"
        self.wait_for_commit()
        directory, store = self.directory, self._store
        self.directory = self._store = None
        store.close()
        directory.close()
        self._ids, self._closed_ids, self._free_ids = set(), set(), set()

    def resize_staging(self, num_bytes: int) -> None:
        """Changes the memory that state streams through; nothing may be under way (:meth:`barrier`)."""
        self.wait_for_commit()
        self.staging_bytes = num_bytes
        self.engine.resize_staging(max(num_bytes, 3 * self.chunk_bytes_max))

    def open(self, part: Part, geometry: BlockGeometry) -> None:
        """Opens the part's native block and, where its weights live on disk, writes them there."""
        self.give_home(part, self.new_home(part, geometry))

    def new_home(self, part: Part, geometry: BlockGeometry) -> NativeBlock:
        """A native block for the part, beside the one that it may have."""
        return self._new_block(geometry, part.arena.address)

    def _new_block(self, geometry: BlockGeometry, address: int) -> NativeBlock:
        self.wait_for_commit()
        native = NativeBlock(self._store if _has_file(geometry) else None, geometry, address)
        if _has_file(geometry):  # the numbers of others mean nothing
            self._ids.add(geometry.id)
            self._free_ids.discard(geometry.id)
        return native

    def give_home(self, part: Part, native: NativeBlock) -> None:
        """The part, which has none, gets its native block."""
        part.native = native
        if not part.params:
            self._blobs.append(part)
        part.on_disk = _has_file(native.geometry)
        # Weights that live on disk, and fp32 masters, have to be written once before the block is complete.
        part.dirty = bool(native.geometry.weights_on_disk_file) or _has_master(part)

    @property
    def last_commit(self) -> Ticket | None:
        """The latest commit that nobody has waited for."""
        return self._last_commit

    def wait_for_commit(self) -> None:
        """The set of blocks may not change while a commit record is being written."""
        if self._last_commit is not None:
            self._last_commit.wait()
            self._last_commit = None

    def opaque_chunk(self, num_bytes: int) -> int:
        """Elements of one chunk of a block of plain bytes."""
        return min(_CHUNK_ELEMENTS, round_up(num_bytes, _CHUNK_ALIGN), self.chunk_bytes_max // _CHUNK_ALIGN * _CHUNK_ALIGN)

    def discard(self, part: Part) -> None:
        """Closes a part's native block and removes its files; the weights are in memory, the state is given up."""
        self.close_home(self.take_home(part))

    def take_home(self, part: Part) -> NativeBlock:
        """Takes the native block off the part, which has none then; everything of it is written and committed."""
        assert part.native is not None
        self.barrier(part)
        self.commit()
        self.wait_for_commit()
        native = part.native
        self._forget(part)
        if part in self._blobs:
            self._blobs.remove(part)
        return native

    # ---- what a resume finds, and mirrors -------------------------------------------------------------------------------

    def reserve_ids(self, identifiers: Iterable[int]) -> None:
        """Numbers of files that a record names; their blocks are not open yet."""
        self._ids.update(identifiers)
        if self.directory is not None:
            self.directory.remove_blocks_but(self._ids)

    def adopt(self, part: Part, entry: PartEntry) -> None:
        """Opens the part's blocks as a record names them and brings weights, and state whose home is memory, into memory."""
        tickets = []
        if entry.home is not None:
            part.native = self._new_block(entry.home, part.arena.address)
            part.on_disk = _has_file(entry.home)
            part.dirty = False
            if entry.home.weights_on_disk_file:
                tickets.append(self.engine.fetch(part.native))
        part.stepped = entry.stepped
        for kind, geometry in ((mirrors.WEIGHTS, entry.weights), (mirrors.STATE, entry.state)):
            if geometry is not None:
                address, num_bytes = mirrors.spans(part)[kind]
                if geometry.num_elements != num_bytes:
                    raise StoreCorruptError(
                        f"block {geometry.id}: the commit record gives it {geometry.num_elements} bytes; {num_bytes} are needed "
                        f"for the {kind} of {part.names[0]!r}."
                    )
                native = self._new_block(geometry, address)
                part.mirrors[kind] = mirrors.Mirror(native, part.native)
                if kind == mirrors.WEIGHTS or entry.stepped:
                    tickets.append(self.engine.fetch(native))
        for ticket in tickets:
            ticket.wait()
        self.master_is_current(part)
        part.mirrored_versions = versions(part)

    def arrange_mirrors(self, part: Part) -> list[NativeBlock]:
        """Gives the part the mirrors that it needs where it is now; :meth:`write_mirrors` and a commit have to follow.

        Returns:
            Mirrors that it does not need any more, to be closed by :meth:`close_home` after that commit.
        """
        wanted = mirrors.spans(part)
        gone = {kind: m for kind, m in part.mirrors.items() if kind not in wanted or not mirrors.is_current(part, kind)}
        for kind in gone:
            del part.mirrors[kind]
        for kind, (address, num_bytes) in wanted.items():
            if kind not in part.mirrors:
                geometry = mirrors.geometry_of_mirror(self.next_id(), num_bytes)
                part.mirrors[kind] = mirrors.Mirror(self._new_block(geometry, address), part.native)
                part.mirrored_versions = -1
        return [m.native for m in gone.values()]

    def committed_slots(self, blocks: Sequence[Block]) -> list[str]:
        """Names of the slot files that the last record names, once it is written; nothing was written since."""
        self.wait_for_commit()
        natives = [part.native for b in blocks for part in b.parts if part.native is not None and part.on_disk]
        natives += [m.native for b in blocks for part in b.parts for m in part.mirrors.values() if m.ticket or part.stepped]
        return [f"block-{native.geometry.id:05d}.{'ab'[native.slot()[0]]}" for native in natives]

    def write_mirrors(self, part: Part) -> None:
        """Writes the part's mirrors if what they mirror may have changed; the tickets are kept with them."""
        now = versions(part)
        if not part.mirrors or part.mirrored_versions == now:
            return
        part.mirrored_versions = now
        after = [part.updated] if part.updated is not None else []
        for kind, mirror in part.mirrors.items():
            if kind == mirrors.STATE and not part.stepped:
                continue
            mirror.ticket = self.engine.store(
                mirror.native, [], weights_from_memory=True, step=self.step + 1, priority=-1, after=after
            )
            self._mirrored = True

    def close_home(self, native: NativeBlock) -> None:
        """Closes what :meth:`take_home` gave, and removes its files."""
        self.wait_for_commit()
        native.discard()
        if self.directory is not None and _has_file(native.geometry):
            self._closed_ids.add(native.geometry.id)
            self.directory.remove_block(native.geometry.id)

    def reset(self, part: Part) -> None:
        """Gives up a part's state; the weights are in memory, and are written anew by the next :meth:`flush`."""
        assert part.native is not None
        self.flush(part)
        geometry = part.native.geometry
        zeros = torch.zeros(geometry.num_elements)  # shared pages of zeros: nothing is written to them
        runs = [(array, 0, zeros) for array in range(geometry.num_state)]
        if part.stepped:
            self.rewrite(part, runs, from_memory=False, state=True).wait()
        part.dirty = _weights_on_file(part) or _has_master(part)

    def stats(self) -> EngineStats:
        """Counters of the engine since the start."""
        return self.engine.stats()

    def close(self, blocks: Sequence[Block], *, remove: bool | None = None) -> None:
        """Waits for everything under way and closes all files.

        Args:
            blocks: The blocks that were opened.
            remove: Remove the files; ``None``: if the directory is temporary.

        Raises:
            StoreError: A transfer had failed.
        """
        try:
            for block in blocks:
                if any(part.last_write is not None and _has_failed(part.last_write) for part in block.parts):
                    block.resident = False  # memory holds half of what should have come
            if self._last_commit is not None and not _has_failed(self._last_commit):  # the engine closes without what has not begun
                self._last_commit = None
            self.engine.close()
        finally:
            for part in [p for b in blocks for p in b.parts] + self._blobs:
                for mirror in part.mirrors.values():
                    mirror.native.close()
                part.mirrors.clear()
                if part.native is not None and part.on_disk:
                    part.native.close()  # others go with the last tensor that looks at their state
                self._forget(part)
            if self._store is not None:
                self._store.close()
            if self.directory is not None:
                self.directory.close(remove)

    def _forget(self, part: Part) -> None:
        part.native = part.last_write = part.opened = part.updated = None
        part.mirrored_versions = -1
        part.on_disk = part.stepped = part.dirty = part.uncommitted = False
        part.patches.clear()
        self._patched.pop(part, None)
        self._opened.discard(part)
        self._tried.pop(part, None)

    def check_open(self, part: Part, name: str) -> None:
        """Refuses to read or write what is in no memory any more.

        Raises:
            OffloadedAccessError: The store was closed: an error stopped it, or another model took its place.
        """
        if part.native is None:
            raise OffloadedAccessError(
                f"{name!r} is lost: its store has been closed by an error, or because the strategy went on to another model. Build "
                f"the model anew and load a checkpoint; next time save one before."
            )

    # ---- weights --------------------------------------------------------------------------------------------------------

    def fetch(self, part: Part, *, priority: int, after: Sequence[Ticket] = ()) -> Ticket:
        """Brings the part's weights into its memory."""
        assert part.native is not None
        self.cancel_update(part)
        self.revoke(part)
        self.flush(part)
        part.last_write = self.engine.fetch(part.native, priority=priority, after=after)
        return part.last_write

    def release(self, part: Part, *, priority: int) -> Ticket:
        """Gives the weight memory back, after writing it if it was changed in memory."""
        assert part.native is not None
        self.cancel_update(part)
        self.flush(part)
        return self.engine.release(part.native, priority=priority)

    def flush(self, part: Part) -> None:
        """Brings the file up to date with writes that went around updates: whole weight memory, or collected patches."""
        master = _has_master(part)
        if part.dirty:
            part.dirty = False
            runs = (
                [(0, part.offsets[i], part.flat(i, part.memory(i), torch.float32)) for i in range(len(part.params))]
                if master
                else []
            )
            self.rewrite(part, runs, from_memory=_weights_on_file(part), state=master)
            self.master_is_current(part)
        if part.patches:
            patches, part.patches = part.patches, []
            self._patched.pop(part, None)
            runs = [(WEIGHTS, offset, value) for offset, value in patches]
            runs += [(0, offset, value.float()) for offset, value in patches] if master else []
            self.rewrite(part, runs, from_memory=False, state=master).wait()  # they may be views of a file that will be closed
            for _, value in patches:
                self.on_patched(value)

    def refresh_master(self, part: Part) -> None:
        """16-bit weights that were written to around the updates (a loaded checkpoint, an average) become the master again."""
        if _has_master(part) and part.master_versions != versions(part):
            part.dirty = True
            self.flush(part)

    def master_is_current(self, part: Part) -> None:
        """The fp32 master and the 16-bit weights agree now."""
        part.master_versions = versions(part)

    def patch(self, part: Part, index: int, value: Tensor) -> None:
        """Sets parameter ``index`` of a part whose weights are not in memory; patches of one part are written together."""
        part.patches.append((part.offsets[index], value))
        self._patched[part] = self._patched.get(part, 0) + value.nbytes
        if sum(self._patched.values()) > _PATCHES_IN_MEMORY:
            for waiting in list(self._patched):
                self.flush(waiting)

    # ---- updates --------------------------------------------------------------------------------------------------------

    def open_update(
        self, part: Part, *, resident: bool, priority: int, after: Sequence[Ticket] = (), speculative: bool = False
    ) -> Ticket:
        """Announces an update of the part; once ``after`` are done its state starts to stream.

        ``speculative``: see [Note: Verdicts].
        """
        assert part.native is not None
        self.revoke(part)
        if resident and not _has_master(part) and not speculative:
            part.dirty = False  # the update writes the weight memory anyway
        self.flush(part)
        if part.on_disk:
            self._begin_write(part)
        after = [*after, *mirrors.writes_of(part)]
        part.opened = self.engine.open_update(
            part.native, weights_resident=resident, speculative=speculative, priority=priority, after=after
        )
        self._opened.add(part)
        if speculative:
            self._tried[part] = part.stepped
        return part.opened

    def may_speculate(self, part: Part) -> bool:
        """Whether what the commit record names is what the part holds, so that an update of it can be taken back."""
        current = not _has_master(part) or part.master_versions == versions(part)
        if part.opened is not None:
            return part in self._tried and current
        return part.on_disk and current and not (part.uncommitted or part.dirty or part.patches)

    def arm_update(
        self,
        part: Part,
        segments: Sequence[Segment],
        hypers: Sequence[Hyper],
        keep: Sequence[Tensor],
        *,
        scale: float,
        priority: int,
        speculative: bool = False,
    ) -> Ticket:
        """Hands the gradients of an opened update over; ``keep`` lives until the kernels are done."""
        assert part.opened is not None
        ticket, part.opened = part.opened, None
        self._opened.discard(part)
        self.engine.arm_update(ticket, segments, hypers, grad_scale=scale, step=self.step + 1, priority=priority, keep=keep)
        part.last_write = part.updated = ticket
        part.stepped = self.written = True
        if not speculative:
            self.keep(part)
        return ticket

    def keep(self, part: Part) -> bool:
        """The part's speculative update holds; false if there is none, because it was revoked."""
        if part not in self._tried:
            return False
        assert part.native is not None
        self._tried.pop(part)
        self.engine.keep(part.native)
        return True

    def revoke(self, part: Part) -> None:
        """Takes the part's speculative update back, if there is one; weights that are in memory come back there.

        Its gradients are in use until its ticket is READY, which is soon.
        """
        if part not in self._tried or part.opened is not None:
            return
        assert part.native is not None
        part.stepped = self._tried.pop(part)
        ticket = self.engine.discard(part.native, priority=-1)
        part.last_write = part.updated = ticket
        if _weights_on_file(part):
            part.last_write = self.engine.fetch(part.native) if part.block.resident else None
        if part.uncommitted:
            part.uncommitted = False
            self._uncommitted.remove(part)

    def cancel_update(self, part: Part) -> None:
        """Takes back an update that was opened but not armed."""
        if part.opened is not None:
            self.engine.cancel_update(part.opened)
            part.opened = None
            self._opened.discard(part)
            self._tried.pop(part, None)
            if part.uncommitted:  # by this update alone: opening commits what was written before
                part.uncommitted = False
                self._uncommitted.remove(part)

    # ---- state ----------------------------------------------------------------------------------------------------------

    def read(self, part: Part, array: int, index: int, out: Tensor) -> None:
        """Reads parameter ``index``'s run of an array into ``out``, a flat contiguous tensor; waits for it."""
        assert part.native is not None
        self.cancel_update(part)
        self.revoke(part)
        self.flush(part)
        offset, numel = self._run(part, part.offsets[index], out)
        patch = Patch(offset=offset, numel=numel, data=out.data_ptr(), array=array)
        self.engine.read(part.native, [patch], keep=[out]).wait()

    def write_state(self, part: Part, runs: Sequence[tuple[int, int, Tensor]]) -> None:
        """Overwrites runs ``(array, index, flat values)`` of the state arrays, in one rewrite of the block."""
        self.flush(part)
        rows = [(array, part.offsets[index], value) for array, index, value in runs]
        self.rewrite(part, rows, from_memory=False, state=True).wait()
        for _, _, value in rows:
            self.on_patched(value)

    def store_weights(self, part: Part) -> Ticket:
        """Writes the weight memory to the file after an update that ran in Python."""
        part.dirty = False
        return self.rewrite(part, [], from_memory=True, state=True)

    # ---- commit ---------------------------------------------------------------------------------------------------------

    def barrier(self, part: Part) -> None:
        """Waits until everything submitted for the part is done: the tasks of one block run in order."""
        if part.native is not None:
            self.cancel_update(part)
            out = torch.empty(16, dtype=torch.float64)
            patch = Patch(offset=0, numel=1, data=out.data_ptr(), array=WEIGHTS)
            self.engine.read(part.native, [patch], keep=[out]).wait()

    def commit(self, *, always: bool = False) -> Ticket | None:
        """Makes everything written so far one step that survives; returns at once.

        Args:
            always: Write a record even where no block has changed since the last one.
        """
        for part in list(self._opened):  # a commit follows every write before it, and nobody knows when these will be armed
            self.cancel_update(part)
        for part in list(self._tried):
            self.revoke(part)
        for part in list(self._patched):
            self.flush(part)
        if self._store is None or not (always or self._uncommitted or self._mirrored):
            return None
        self._mirrored = False
        for part in self._uncommitted:
            part.uncommitted = False
        self._uncommitted.clear()
        self.step += 1
        self._free_ids |= self._closed_ids  # free once this record is there, which `next_id` waits for
        self._closed_ids = set()
        self._last_commit = self.engine.commit(self._store, self.step, self.describe(), priority=-2)
        return self._last_commit

    def _describe(self) -> bytes:
        return json.dumps({"step": self.step}).encode()

    @contextmanager
    def moving(self) -> Iterator[None]:
        """What is written in the context was there before: it only moves."""
        before, self._moving = self._moving, True
        try:
            yield
        finally:
            self._moving = before

    def _begin_write(self, part: Part) -> None:
        if part.uncommitted:
            self.commit()
        part.uncommitted = True
        self._uncommitted.append(part)

    def rewrite(self, part: Part, runs: Sequence[tuple[int, int, Tensor]], *, from_memory: bool, state: bool = False) -> Ticket:
        """Writes runs ``(array, first element, flat values)``, and the rest as it was.

        Args:
            part: The part.
            runs: What is new.
            from_memory: The weights come whole from the weight memory.
            state: The state is no longer all zeros.
        """
        assert part.native is not None
        self.cancel_update(part)
        self.revoke(part)
        if part.on_disk:
            self._begin_write(part)
        self.written |= not self._moving
        patches, keep = [], []
        for array, offset, value in runs:
            start, numel = self._run(part, offset, value)
            patches.append(Patch(offset=start, numel=numel, data=value.data_ptr(), array=array))
            keep.append(value)
        part.stepped |= state
        stamp = self.step + 1 if part.stepped else 0  # 0: state reads as zeros, none is written
        after = mirrors.writes_of(part)
        ticket = self.engine.store(
            part.native, patches, weights_from_memory=from_memory, step=stamp, priority=-1, after=after, keep=keep
        )
        if not part.on_disk:
            part.updated, part.mirrored_versions = ticket, -1
        return ticket

    def _run(self, part: Part, offset: int, value: Tensor) -> tuple[int, int]:
        assert part.native is not None
        unit = part.dtype.itemsize if part.native.geometry.weight_dtype == _native.U8 else 1
        return offset * unit, value.numel() * unit


def _has_failed(ticket: Ticket) -> bool:
    try:
        ticket.wait()
    except HeteroError:
        return True
    return False


def _open_store(directory: StoreDirectory, options: EngineOptions, num_blocks: int, user_bytes: int, *, create: bool) -> Store:
    return Store(
        os.fspath(directory.path),
        uuid=directory.uuid,
        create=create,
        direct_io=options.direct_io and not directory.in_memory,
        durability={"none": 0, "process": 1, "power": 2}[options.durability],
        verify_digests=options.verify_digests,
        num_blocks=num_blocks,
        user_bytes=user_bytes,
    )


def versions(part: Part) -> int:
    """Changes when a parameter of the part is written to in place."""
    return sum(p._version for p in part.params)


def _has_master(part: Part) -> bool:
    return part.native is not None and part.native.geometry.num_state == 3


def _has_file(geometry: BlockGeometry) -> bool:
    return bool(geometry.weights_on_disk_file or geometry.state_on_disk_file)


def _weights_on_file(part: Part) -> bool:
    return part.native is not None and part.native.geometry.weights_on_disk_file


def staging_bytes(options: EngineOptions, chunk_bytes_max: int) -> int:
    """Bytes of staging that the options ask for; never less than one update needs to make progress."""
    return max(options.staging_bytes or 8 * chunk_bytes_max, 3 * chunk_bytes_max)
