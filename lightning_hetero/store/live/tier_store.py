"""The tiers behind one contract: submits a part's transfers and updates, and commits them.

Host and disk differ only in a block's geometry: which of its arrays have a section in a file.
Everything else, updates included, goes through the same engine (native/include/hetero/api.h).

[Note: Commits]
A rewrite of a part goes to the slot that the last commit record does not name. So does a second
rewrite before the next record. A commit makes the newest slots the valid ones. So a step may write
a part several times, and only its end needs a record.

[Note: Verdicts]
A speculative update awaits :meth:`TierStore.keep` or :meth:`TierStore.revoke`. A read of the old
part, or a commit, before that revokes it. A revoked update can always be repeated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import torch
from torch import Tensor

from lightning_hetero._native import U8, Engine, EngineStats, Hyper, NativePart, Patch, Segment, Ticket
from lightning_hetero.errors import HeteroError
from lightning_hetero.store.format.directory import StoreDirectory
from lightning_hetero.store.live.block_files import BlockFiles
from lightning_hetero.store.live.blocks import Block, Part, lost
from lightning_hetero.store.live.engine_options import EngineOptions, least_staging_bytes, staging_bytes
from lightning_hetero.store.live.geometry import WEIGHTS, has_master, own_versions, versions, weights_on_file
from lightning_hetero.store.live.loans import Loans
from lightning_hetero.store.live.mirrors import writes_of
from lightning_hetero.store.live.moved_weights import weights_now
from lightning_hetero.store.live.own_slots import bytes_at, differs, is_written_once, with_two_slots
from lightning_hetero.store.live.unrecorded import Unrecorded
from lightning_hetero.store.numa import started_on
from lightning_hetero.store.raw_memory import own_memory, zero_pages
from lightning_hetero.units import MIB

_PATCHES_IN_MEMORY = 64 * MIB


class TierStore:
    """Files, memory and the engine of one run.

    Args:
        options: The engine's options.
        directory: The directory of the disk tier; ``None`` when nothing lives on disk. It is closed
            with the store, and removed when the store cannot be opened.
        num_blocks: Largest number of block files.
        chunk_bytes_max: Largest staged chunk.
        user_bytes: Largest user blob of a commit record.
        resume: The directory's files are those of an earlier run.

    Attributes:
        files: The files, and the records that name them.
        blobs: Parts that are no parameters.
        describe: Makes a record's user blob.
        unrecorded: What no record names yet.
        on_patched: Told of values that have reached the file.
        loans: Copies of what is not in memory, for code that needs an address.
        read_spread: Reads runs (first element, length) of a parameter's array of which several
            ranks have slices; ``None`` while the others do not answer.
        all_write: All ranks write the same values to the weights that they share.
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
        self.chunk_bytes_max = chunk_bytes_max
        self.describe: Callable[[], bytes] = self._describe
        self.unrecorded = Unrecorded()
        self.loans = Loans()
        self.read_spread: Callable[[Part, int, int, Sequence[tuple[int, int]]], Tensor] | None = None
        self.all_write = False
        self.blobs: list[Part] = []
        self.on_patched: Callable[[Tensor], object] = id
        self._opened: dict[Part, Ticket] = {}  # not armed; other work on the part cancels them
        self._tried: dict[Part, bool] = {}  # speculative updates: had the part state before?
        self._patched: dict[Part, int] = {}  # parts with patches that wait, and their bytes
        self._least_staging_bytes = least_staging_bytes(options, chunk_bytes_max)
        self.staging_bytes = staging_bytes(options, chunk_bytes_max) if directory is not None else 0
        self.files = BlockFiles(directory, options, num_blocks=num_blocks, user_bytes=user_bytes, resume=resume)
        with ExitStack() as undo:
            undo.callback(self.files.close, remove=not resume)
            with started_on(options.cpus):
                self.engine = Engine(
                    io_backend="synthetic" if options.emulated_bytes_per_s else options.io_backend,
                    io_threads=options.io_threads,
                    queue_depth=options.queue_depth,
                    update_threads=options.threads(),
                    staging_bytes=max(self.staging_bytes, self._least_staging_bytes),
                    chunk_bytes_max=chunk_bytes_max,
                    synthetic_read_bytes_per_s=options.emulated_bytes_per_s,
                    synthetic_write_bytes_per_s=options.emulated_bytes_per_s,
                    num_disks=options.num_disks,
                )
            undo.pop_all()

    def resize_staging(self, num_bytes: int) -> None:
        """Changes the size of the staging memory; no task may be running (:meth:`barrier`)."""
        self.files.wait_for_commit()
        self.staging_bytes = num_bytes
        self.engine.resize_staging(max(num_bytes, self._least_staging_bytes))

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
            with suppress(HeteroError):  # closing the engine raises it
                self.files.wait_for_record()
            self.engine.close()
        finally:
            for part in [p for b in blocks for p in b.parts] + self.blobs:
                for mirror in part.mirrors.values():
                    mirror.native.close()
                part.mirrors.clear()
                if part.native is not None and part.on_disk:
                    part.native.close()  # others go with the last tensor that looks at their state
                self.forget(part)
            self.files.close(remove=remove)

    def forget(self, part: Part) -> None:
        """The part has no native part any more."""
        part.native = part.last_write = part.opened = part.updated = None
        part.mirrored_versions = -1
        part.on_disk = part.stepped = part.fresh = part.dirty = False
        part.uncommitted = 0
        part.patches.clear()
        self._patched.pop(part, None)
        self._opened.pop(part, None)
        self._tried.pop(part, None)

    @contextmanager
    def all_writing(self) -> Iterator[None]:
        """In the context all ranks write the same values to weights that they share."""
        before, self.all_write = self.all_write, True
        try:
            yield
        finally:
            self.all_write = before

    def check_open(self, part: Part, name: str) -> None:
        """Refuses to read or write what is in no memory any more.

        Raises:
            OffloadedAccessError: The store was closed: an error stopped it, or another model took
                its place.
        """
        if part.native is None:
            raise lost(name)

    # ---- weights ---------------------------------------------------------------------------------

    def fetch(self, part: Part, *, priority: int, after: Sequence[Ticket] = ()) -> Ticket:
        """Brings the part's weights into its memory."""
        self.cancel_update(part)
        self.revoke(part)
        self.flush(part)
        part.last_write = self.engine.fetch(part.require_native(), priority=priority, after=after)
        return part.last_write

    def release(self, part: Part, *, priority: int) -> list[Ticket]:
        """Gives the weight memory back, after writing it if it was changed in memory.

        Lent memory is free as this returns, which waits for the part's tasks.
        """
        self.cancel_update(part)
        self.flush(part)
        if part.lent is None:
            return [self.engine.release(part.require_native(), priority=priority)]
        self.place(part, None, copies=False)
        return []

    def place(self, part: Part, memory: Tensor | None, *, copies: bool) -> None:
        """Weights from the disk lie in ``memory`` from now on, or (``None``) in the part's own.

        Waits for the part's tasks. Without ``copies`` the memory has no content.
        """
        self.cancel_update(part)
        native, before = part.require_native(), part.run if copies else None
        self.engine.read(native, []).wait()  # tasks of one part run in order
        part.lent = memory
        if before is not None:
            part.run.copy_(before)
        native.bind(part.address, keep=memory)

    def flush(self, part: Part) -> None:
        """Writes changes outside updates to the file: the weight memory, or collected patches.

        The part may have another native part afterwards: see [Note: One slot].
        """
        if not part.dirty and not part.patches:
            return
        if part.on_disk:
            self.files.before_write()  # all ranks wait, also one whose slice is as it was
        if self._is_unchanged(part):
            self._forget_changes(part)
            return
        master = has_master(part)
        if part.dirty:
            part.dirty, is_beginning = False, part.fresh or not part.stepped
            runs = _masters(part) if master else []
            ticket = self.rewrite(part, runs, from_memory=weights_on_file(part), state=master)
            if master:
                part.fresh = is_beginning
                # A part keeps its ticket, and a ticket its copies: else those of all would live.
                ticket.wait()
            self.master_is_current(part)
        if part.patches:
            patches, part.patches = part.patches, []
            self._patched.pop(part, None)
            runs = [(WEIGHTS, offset, value) for offset, value in patches]
            runs += [(0, offset, value.float()) for offset, value in patches] if master else []
            self.rewrite(part, runs, from_memory=False, state=master).wait()  # may be views of a file
            for _, value in patches:
                self.on_patched(value)

    def _is_unchanged(self, part: Part) -> bool:
        """Whether the changes of a part that is written once are none; see [Note: One slot]."""
        native = part.require_native()
        if not is_written_once(self.files, native):
            return False
        unit = part.dtype.itemsize
        changes = [(offset * unit, value) for offset, value in part.patches]
        changes += bytes_at(part.holder, part.slice_address, native.geometry.num_elements) if part.dirty else []
        return not self.files.on_any_rank(differs(self.engine, native, changes))

    def _forget_changes(self, part: Part) -> None:
        patches, part.patches, part.dirty = part.patches, [], False
        self._patched.pop(part, None)
        for _, value in patches:
            self.on_patched(value)

    def refresh_master(self, part: Part) -> None:
        """Makes 16-bit weights that were written outside updates the fp32 master again."""
        if has_master(part) and part.master_versions != versions(part):
            part.dirty = True
            self.flush(part)

    def master_is_current(self, part: Part) -> None:
        """The fp32 master and the 16-bit weights agree now."""
        part.master_versions = own_versions(part)

    def patch(self, part: Part, index: int, value: Tensor) -> None:
        """Sets parameter ``index`` of a part with weights on disk, with the next flush.

        All ranks that share it call this with the same values, and flush at the same time.
        """
        part.patches.append(part.own_piece(index, value))
        self._patched[part] = self._patched.get(part, 0) + value.nbytes
        if sum(self._patched.values()) > _PATCHES_IN_MEMORY:
            for waiting in list(self._patched):
                self.flush(waiting)

    # ---- updates ---------------------------------------------------------------------------------

    def open_update(
        self, part: Part, *, resident: bool, priority: int, after: Sequence[Ticket] = (), speculative: bool = False
    ) -> Ticket:
        """Announces an update of the part; once ``after`` are done its state starts to stream.

        ``speculative``: see [Note: Verdicts].
        """
        self.revoke(part)
        in_memory = part.dirty and resident and not has_master(part) and not speculative
        part.dirty &= not in_memory  # the update writes the weight memory anyway
        self.flush(part)
        part.dirty = in_memory  # but it may be taken back before it is armed
        if part.on_disk:
            self.unrecorded.begin(part)
        native, after = part.require_native(), [*after, *writes_of(part)]
        ticket = self.engine.open_update(native, weights_resident=resident, speculative=speculative, priority=priority, after=after)
        part.opened = self._opened[part] = ticket
        if speculative:
            self._tried[part] = part.stepped
        return ticket

    def may_speculate(self, part: Part) -> bool:
        """Whether the commit record has the part's content, so that an update can be revoked."""
        current = not has_master(part) or part.master_versions == versions(part)
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
        """Hands over the gradients of an opened update. ``keep`` is held until it is READY."""
        if part.on_disk:
            self.files.before_write()
        ticket = self._opened[part]
        self.engine.arm_update(ticket, segments, hypers, grad_scale=scale, step=self.files.step + 1, priority=priority, keep=keep)
        del self._opened[part]  # only now: an update that is refused has to be cancelled
        part.opened = None
        part.last_write = part.updated = ticket
        part.stepped = self.unrecorded.changed = True
        part.fresh = False
        if not speculative:
            part.dirty = False
            self.keep(part)
        return ticket

    def keep(self, part: Part) -> bool:
        """The part's speculative update holds; false if there is none, because it was revoked."""
        if part not in self._tried:
            return False
        self._tried.pop(part)
        self.engine.keep(part.require_native())
        return True

    def revoke(self, part: Part) -> None:
        """Revokes the part's speculative update, if there is one; its weights in memory come back.

        Its gradients are in use until its ticket is READY, which is soon.
        """
        if part not in self._tried or part.opened is not None:
            return
        native = part.require_native()
        part.stepped = self._tried.pop(part)
        ticket = self.engine.discard(native, priority=-1)
        part.last_write = part.updated = ticket
        if weights_on_file(part):
            part.last_write = self.engine.fetch(native) if part.block.resident else None
        self.unrecorded.undo(part)

    def cancel_update(self, part: Part) -> None:
        """Takes back an update that was opened but not armed."""
        if part.opened is not None:
            self.engine.cancel_update(part.opened)
            part.opened = None
            self._opened.pop(part, None)
            self._tried.pop(part, None)
            self.unrecorded.undo(part)

    # ---- state -----------------------------------------------------------------------------------

    def begin_read(self, part: Part, runs: Sequence[tuple[int, int, Tensor]]) -> Ticket:
        """Begins to read runs ``(array, index, flat tensor)``: parameter ``index``'s values.

        What lies in one chunk of the file comes in one transfer.
        """
        return self.begin_read_at(part, [(array, part.offsets[index], out) for array, index, out in runs])

    def begin_read_at(self, part: Part, runs: Sequence[tuple[int, int, Tensor]]) -> Ticket:
        """Begins to read runs ``(array, first element in the part, flat tensor)``."""
        self.cancel_update(part)
        self.revoke(part)
        self.flush(part)
        native = part.require_native()
        return self.engine.read(native, _patches(part, native, runs), keep=[out for _, _, out in runs])

    def read_piece(self, part: Part, array: int, index: int) -> Tensor:
        """What the native part has of parameter ``index`` in an array, flat."""
        start, length = part.pieces[index]
        out = own_memory(length, part.dtype if array == WEIGHTS else torch.float32)
        if length:
            self.refresh_master(part)
            self.begin_read_at(part, [(array, start, out)]).wait()
        return out

    def write_state(self, part: Part, runs: Sequence[tuple[int, int, Tensor]]) -> None:
        """Overwrites runs ``(array, index, flat values)`` of the state arrays in one rewrite."""
        self.flush(part)
        part.fresh = False
        rows = [(array, *part.own_piece(index, value)) for array, index, value in runs]
        self.rewrite(part, rows, from_memory=False, state=True).wait()
        for _, _, value in rows:
            self.on_patched(value)

    def store_weights(self, part: Part) -> Ticket:
        """Writes the weight memory to the file after an update that ran in Python."""
        part.dirty, part.versions = False, versions(part)
        return self.rewrite(part, [], from_memory=True, state=True)

    # ---- commit ----------------------------------------------------------------------------------

    def barrier(self, part: Part) -> None:
        """Waits for all tasks of the part: they run in order."""
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
        # A commit waits for every write before it, and these may never be armed.
        for part in list(self._opened):
            self.cancel_update(part)
        for part in list(self._tried):
            self.revoke(part)
        for part in list(self._patched):
            self.flush(part)
        if not self.files.on_disk or not (always or self.unrecorded):
            return None
        self.files.before_write()
        self.unrecorded.recorded()
        return self.files.commit(self.engine, self.describe())

    def _describe(self) -> bytes:
        return json.dumps({"step": self.files.step + 1}).encode()

    def rewrite(self, part: Part, runs: Sequence[tuple[int, int, Tensor]], *, from_memory: bool, state: bool = False) -> Ticket:
        """Writes runs ``(array, first element, flat values)``, and the rest as it was.

        Args:
            part: The part.
            runs: What is new.
            from_memory: The weights come whole from the weight memory.
            state: The state is no longer all zeros.
        """
        self.cancel_update(part)
        self.revoke(part)
        self._move_to_two_slots(part, whole=from_memory)
        native = part.require_native()
        if part.on_disk:
            self.files.before_write()
            self.unrecorded.begin(part)
        self.unrecorded.changes()
        patches, keep = _patches(part, native, runs), [value for _, _, value in runs]
        part.stepped |= state
        stamp = self.files.step + 1 if part.stepped else 0  # 0: state is zeros, not written
        after = writes_of(part)
        ticket = self.engine.store(
            native, patches, weights_from_memory=from_memory, step=stamp, priority=-1, after=after, keep=keep
        )
        part.updated = ticket
        if not part.on_disk:
            part.mirrored_versions = -1
        return ticket

    def _move_to_two_slots(self, part: Part, *, whole: bool) -> None:
        """Before a part is written that was to be written once; ``whole``: all of it is new."""
        old = part.require_native()
        if not part.on_disk or not is_written_once(self.files, old):
            return
        self.barrier(part)
        new = with_two_slots(self.files, old, part.slice_address)
        if not whole:  # the block is not in memory, so its memory is free
            read = self.engine.fetch(old)
            self.engine.store(new, [], weights_from_memory=True, step=0, priority=-1, after=[read])
            if part.lent is None:
                self.engine.release(new).wait()
        part.native, part.slots, part.last_write, part.in_place = new, new.geometry.num_slots, None, None


def _patches(part: Part, native: NativePart, runs: Sequence[tuple[int, int, Tensor]]) -> list[Patch]:
    """Runs as the engine takes them, without those of empty parameters, which have no address."""
    unit = part.dtype.itemsize if native.geometry.weight_dtype == U8 else 1
    return [
        Patch(offset=start * unit, numel=value.numel() * unit, data=value.data_ptr(), array=array)
        for array, start, value in runs
        if value.numel()
    ]


def _masters(part: Part) -> list[tuple[int, int, Tensor]]:
    """All of the native part's master. A rank's slice of few parameters may be padding alone."""
    runs = [(0, *_as_master(part, i)) for i in range(len(part.params))]
    has_any = any(value.numel() for _, _, value in runs)
    return runs if has_any else [(0, 0, zero_pages(part.require_native().geometry.num_elements))]


def _as_master(part: Part, index: int) -> tuple[int, Tensor]:
    """The native part's piece of 16-bit weights: where it has it, and a copy as flat fp32.

    The memory of the copy goes back to the system with it.
    """
    start, piece = part.own_piece(index, part.flat(index, weights_now(part, index), part.dtype))
    return start, own_memory(piece.numel(), torch.float32).copy_(piece)


def _has_failed(ticket: Ticket) -> bool:
    try:
        ticket.wait()
    except HeteroError:
        return True
    return False
