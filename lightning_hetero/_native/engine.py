"""The engine: transfers and updates that run in native threads, and the tickets that say when."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning_hetero._native.kernels import Hyper
from lightning_hetero._native.library import (
    DTYPE_BYTES,
    EPOISONED,
    ETIMEDOUT,
    FLOATS,
    CEngineOptions,
    CHyper,
    CSegment,
    CStats,
    CTask,
    CTimes,
    check,
    check_address,
    check_dtype,
    check_range,
    functions,
)
from lightning_hetero._native.store import Handle, NativePart, Patch, Store, check_run
from lightning_hetero.clock import now_s
from lightning_hetero.errors import ConfigError, HeteroError

# What a ticket has reached.
READY, DONE = 1, 2

_IO_BACKENDS = {"auto": 0, "io_uring": 1, "pool": 2, "synthetic": 3}
_WAIT_SLICE_S = 0.2  # how late Ctrl-C may be noticed
MAX_DISKS = 64  # api.h's
_INT31 = 2**31 - 1
_INT63 = 2**63 - 1


class Segment(NamedTuple):
    """A run of a block that shares one gradient and one set of hyper-parameters.

    Attributes:
        offset: First element in the block's flat order.
        numel: Elements.
        grad: Address of the dense gradient, ``numel`` elements.
        grad_dtype: F32, BF16 or F16.
        hyper: Index into the hyper-parameters given with it.
    """

    offset: int
    numel: int
    grad: int
    grad_dtype: int
    hyper: int


class TicketTimes(NamedTuple):
    """When a task passed its stages (CLOCK_MONOTONIC ns, 0 if not reached), and what it moved."""

    submitted_ns: int
    started_ns: int
    ready_ns: int
    done_ns: int
    bytes_read: int
    bytes_written: int
    read_busy_ns: int
    compute_busy_ns: int
    write_busy_ns: int


class EngineStats(NamedTuple):
    """The engine's counters since it was created."""

    bytes_read: int
    bytes_written: int
    staging_bytes: int
    staging_in_use_peak_bytes: int
    tasks_done: int


class Ticket:
    """A submitted task. Holds what the task works on until the engine no longer touches it.

    Thread-safe. Dropping a ticket never stops its task.
    """

    __slots__ = ("__weakref__", "_engine", "_gradients", "_keep", "block", "id")

    def __init__(self, engine: Engine, identifier: int, *, block: NativePart | None, keep: object) -> None:
        self._engine: Engine | None = engine
        self.id = identifier
        self.block = block
        self._keep: list[object] = [block, keep]
        self._gradients: object = None  # of an update; once it is READY the kernels have read them

    def wait(self, what: int = DONE, timeout: float | None = None) -> None:
        """Blocks until the task is ``READY`` or ``DONE``; Ctrl-C is noticed meanwhile.

        Args:
            what: ``READY`` (new weights are in host memory, or the data asked for is there) or
                ``DONE``.
            timeout: Seconds; None waits for ever.

        Raises:
            TimeoutError: time ran out; the task goes on.
            HeteroError: the task failed; its class says how. Or the ticket was released.
        """
        engine = self._live()
        pointer = engine.pointer
        check_range("what", what, low=READY, high=DONE)
        call = functions()["wait"]
        begin = now_s()
        deadline = math.inf if timeout is None else begin + timeout
        while True:
            remaining = deadline - now_s()
            code = call(pointer, self.id, what, min(max(remaining, 0.0), _WAIT_SLICE_S))
            if code != ETIMEDOUT or remaining <= _WAIT_SLICE_S:
                break
        engine.waited_s += now_s() - begin
        if code == ETIMEDOUT:
            raise TimeoutError(f"ticket {self.id} did not get there within {timeout} s; its task goes on.")
        self._let_go(DONE if code < 0 else what)  # failed tasks drain their transfers
        self._live().check(code)

    def poll(self) -> int:
        """0, ``READY`` or ``DONE``, at once; raises the task's error."""
        engine = self._live()
        reached = engine.check(functions()["poll"](engine.pointer, self.id))
        self._let_go(reached)
        return reached

    def times(self) -> TicketTimes:
        """When the task passed its stages, and what it moved."""
        out = CTimes()
        check(functions()["ticket_times"](self._live().pointer, self.id, ctypes.byref(out)))
        return TicketTimes(*(getattr(out, name) for name in TicketTimes._fields))

    def release(self) -> None:
        """Lets the engine forget the task once it is done; a second call does nothing."""
        engine, self._engine = getattr(self, "_engine", None), None
        if engine is not None and engine.is_open:
            engine.retire(self.id, [*self._keep, self._gradients])

    def __del__(self) -> None:
        self.release()

    def _let_go(self, reached: int) -> None:
        if reached >= READY:
            self._gradients = None
        if reached == DONE:
            self._keep.clear()

    def _live(self) -> Engine:
        if self._engine is not None:
            self._engine.check_process()
        if self._engine is None or not self._engine.is_open:
            raise HeteroError(f"ticket {self.id} was released, or its engine closed; wait before that.")
        return self._engine


class Engine(Handle):
    """Runs fetches, updates, stores and commits in native threads.

    Thread-safe. Tasks of one block run in submission order; among tasks that may start the lowest
    ``priority`` goes first. Every submit takes ``after``, tickets that must be done before it
    starts; ``keep`` is held until the task is done.

    Args:
        io_backend: ``"auto"`` (io_uring where the kernel allows it, else threads), ``"io_uring"``,
            ``"pool"`` or ``"synthetic"`` (a duplex device that sleeps, for tests and benchmarks).
        io_threads: Threads of the pool for each disk.
        queue_depth: Transfers in flight on each disk.
        update_threads: Threads that run kernels.
        staging_bytes: Memory for state that streams from disk; at least three chunks for each disk.
        chunk_bytes_max: The largest staged chunk of any block.
        synthetic_read_bytes_per_s: The synthetic device's read bandwidth.
        synthetic_write_bytes_per_s: Its write bandwidth.
        num_disks: Disks on which stores have their files.

    Attributes:
        waited_s: Seconds that callers have spent in :meth:`Ticket.wait`; near enough where several
            threads wait.

    Raises:
        ConfigError: an option is out of range.
        UnsupportedError: this machine lacks the back end.
    """

    __slots__ = ("_retired", "waited_s")

    def __init__(
        self,
        *,
        io_backend: str = "auto",
        io_threads: int = 3,
        queue_depth: int = 8,
        update_threads: int = 1,
        staging_bytes: int,
        chunk_bytes_max: int,
        synthetic_read_bytes_per_s: float = 0.0,
        synthetic_write_bytes_per_s: float = 0.0,
        num_disks: int = 1,
    ) -> None:
        if io_backend not in _IO_BACKENDS:
            raise ConfigError(f"io_backend is {io_backend!r}; allowed: {', '.join(_IO_BACKENDS)}.")
        options = CEngineOptions(
            _IO_BACKENDS[io_backend],
            check_range("io_threads", io_threads, low=1, high=1024),
            check_range("queue_depth", queue_depth, low=1, high=4096),
            check_range("update_threads", update_threads, low=1, high=1024),
            check_range("staging_bytes", staging_bytes, low=0, high=_INT63),
            synthetic_read_bytes_per_s,
            synthetic_write_bytes_per_s,
            check_range("chunk_bytes_max", chunk_bytes_max, low=0, high=_INT63),
        )
        self._retired: dict[int, list[object]] = {}
        self.waited_s = 0.0
        disks = check_range("num_disks", num_disks, low=1, high=MAX_DISKS)
        super().__init__(functions()["engine_create_for"](ctypes.byref(options), disks), "engine_destroy")

    @property
    def io_backend(self) -> str:
        """The back end in use."""
        code = check(functions()["engine_io_backend"](self.pointer))
        return next(name for name, value in _IO_BACKENDS.items() if value == code)

    # ---- weights ---------------------------------------------------------------------------------

    def fetch(self, block: NativePart, *, priority: int = 0, after: Sequence[Ticket] = ()) -> Ticket:
        """Reads the newest weights into the block's weight memory."""
        return self._submit("submit_fetch", block, priority=priority, after=after)

    def release(self, block: NativePart, *, priority: int = 0, after: Sequence[Ticket] = ()) -> Ticket:
        """Gives the pages of the block's weight memory back to the system."""
        return self._submit("submit_release", block, priority=priority, after=after)

    # ---- updates ---------------------------------------------------------------------------------

    def open_update(
        self,
        block: NativePart,
        *,
        weights_resident: bool,
        speculative: bool = False,
        priority: int = 0,
        after: Sequence[Ticket] = (),
    ) -> Ticket:
        """Opens an update: its state may stream in; kernels run after ``arm_update``.

        Args:
            block: The block.
            weights_resident: The weight memory holds the current weights and receives the new ones;
                else they go from file to file.
            speculative: It may be taken back. :meth:`keep` or :meth:`discard` follows once it is
                armed; until then the block is neither rewritten nor committed. What of it is in
                memory only is copied to spare memory first.
            priority: Lowest first.
            after: Tickets to wait for.
        """
        name = "open_speculative_update" if speculative else "open_update"
        return self._submit(name, block, bool(weights_resident), priority=priority, after=after)

    def arm_update(
        self,
        ticket: Ticket,
        segments: Sequence[Segment],
        hypers: Sequence[Hyper],
        *,
        grad_scale: float = 1.0,
        step: int,
        priority: int = 0,
        keep: object = None,
    ) -> None:
        """Hands an opened update its gradients.

        Args:
            ticket: From ``open_update``.
            segments: Sorted by offset, disjoint; elements outside them keep weights and state.
            hypers: Sets of hyper-parameters that the segments index.
            grad_scale: Factor on all gradients, applied in fp32.
            step: Stamp of the slot written, at least 1.
            priority: Replaces the open's.
            keep: What must live until the task is READY: the gradients.

        Raises:
            ConfigError: a segment leaves the block, overlaps another, or its gradient is
                misaligned.
        """
        if ticket.block is None:
            raise ConfigError(f"ticket {ticket.id} is of a commit; allowed: a ticket of open_update.")
        check_range("step", step, low=1, high=_INT63)
        segments_c = _segments_as_c(segments, ticket.block.geometry.num_elements, len(hypers))
        hypers_c = (CHyper * len(hypers))(*(CHyper(*hyper) for hyper in hypers))
        call = functions()["arm_update"]
        ticket._gradients = keep
        counts = (len(segments), hypers_c, len(hypers))
        self.check(call(self.pointer, ticket.id, segments_c, *counts, grad_scale, step, priority))

    def cancel_update(self, ticket: Ticket) -> None:
        """Takes back an opened update that was not armed; nothing was written."""
        self.check(functions()["cancel_update"](self.pointer, ticket.id))

    def keep(self, block: NativePart) -> None:
        """The block's speculative update holds; it goes on if it is not over.

        Raises:
            HeteroError: none awaits a verdict, or it was not armed.
        """
        self.check(functions()["keep_update"](self.pointer, block.pointer))

    def discard(self, block: NativePart, *, priority: int = 0, after: Sequence[Ticket] = ()) -> Ticket:
        """Stops and revokes the block's speculative update; its own ticket ends without an error.

        Once this is done the block is what it was; the weight memory of weights in a file holds
        anything, and is to be fetched.

        Raises:
            HeteroError: none awaits a verdict.
        """
        return self._submit("submit_discard", block, priority=priority, after=after)

    # ---- contents --------------------------------------------------------------------------------

    def store(
        self,
        block: NativePart,
        patches: Sequence[Patch],
        *,
        weights_from_memory: bool,
        step: int,
        priority: int = 0,
        after: Sequence[Ticket] = (),
        keep: object = None,
    ) -> Ticket:
        """Writes patches, and the rest unchanged, into the block's other slot or in memory.

        Args:
            block: The block.
            patches: Runs to overwrite.
            weights_from_memory: The weights come whole from the weight memory.
            step: Stamp; 0 means that all state is zero and none is written.
            priority: Lowest first.
            after: Tickets to wait for.
            keep: What must live until the task is done: the patches' memory.
        """
        check_range("step", step, low=0, high=_INT63)
        arguments = (block.patches_as_c(patches), len(patches), bool(weights_from_memory), step)
        return self._submit("submit_store", block, *arguments, priority=priority, after=after, keep=keep)

    def read(
        self,
        block: NativePart,
        patches: Sequence[Patch],
        *,
        priority: int = 0,
        after: Sequence[Ticket] = (),
        keep: object = None,
    ) -> Ticket:
        """Reads runs of the newest slot into each patch's memory."""
        arguments = (block.patches_as_c(patches), len(patches))
        return self._submit("submit_read", block, *arguments, priority=priority, after=after, keep=keep)

    def commit(self, store: Store, step: int, user: bytes = b"", *, priority: int = 0, after: Sequence[Ticket] = ()) -> Ticket:
        """Writes one commit record, after every write submitted before it.

        Args:
            store: The store.
            step: The step that it stands for.
            user: Blob that ``Store.recover`` returns; at most the store's ``user_bytes``.
            priority: Lowest first.
            after: Tickets to wait for.
        """
        if len(user) > store.user_bytes:
            raise ConfigError(f"user has {len(user)} bytes; allowed: {store.user_bytes}, the store's user_bytes.")
        check_range("step", step, low=0, high=_INT63)
        task = _task(priority, after)
        identifier = self.check(functions()["submit_commit"](self.pointer, store.pointer, step, user, len(user), task))
        self._sweep()
        return Ticket(self, identifier, block=None, keep=(store, user))

    # ---- life ------------------------------------------------------------------------------------

    def check(self, result: int) -> int:
        """Returns a result that is not negative. A stopped engine raises its first error again."""
        return check(functions()["engine_error"](self.pointer) if result == EPOISONED else result)

    def stats(self) -> EngineStats:
        """The engine's counters."""
        out = CStats()
        check(functions()["engine_get_stats"](self.pointer, ctypes.byref(out)))
        return EngineStats(*(getattr(out, name) for name in EngineStats._fields))

    def bytes_beyond(self) -> int:
        """Bytes that were read beyond the requested ones, because pages are read whole."""
        return check(functions()["engine_bytes_beyond"](self.pointer))

    def resize_staging(self, staging_bytes: int) -> None:
        """Changes the size of the staging memory; every task must be done.

        Raises:
            ConfigError: less than three chunks.
            HeteroError: a task is not done.
        """
        num_bytes = check_range("staging_bytes", staging_bytes, low=0, high=_INT63)
        self.check(functions()["engine_resize_staging"](self.pointer, num_bytes))

    def close(self) -> None:
        """Waits for running tasks and joins all threads. Raises the engine's first error."""
        try:
            super().close()
        finally:
            self._retired.clear()  # only now does nothing touch the buffers any more

    def retire(self, identifier: int, keep: list[object]) -> None:
        """Forgets an unused ticket once its task is done; its buffers live until then."""
        if not self._try_release(identifier):
            self._retired[identifier] = keep

    def _try_release(self, identifier: int) -> bool:
        if functions()["poll"](self.pointer, identifier) in (0, READY):
            return False
        functions()["release_ticket"](self.pointer, identifier)
        return True

    def _sweep(self) -> None:
        for identifier in list(self._retired):
            if self._try_release(identifier):
                self._retired.pop(identifier, None)

    def _submit(
        self, name: str, block: NativePart, *arguments: Any, priority: int, after: Sequence[Ticket], keep: object = None
    ) -> Ticket:
        task = _task(priority, after)
        identifier = self.check(functions()[name](self.pointer, block.pointer, *arguments, task))
        self._sweep()
        return Ticket(self, identifier, block=block, keep=(keep, arguments))


def _task(priority: int, after: Sequence[Ticket]) -> Any:
    check_range("priority", priority, low=-_INT63, high=_INT63)
    ids = (ctypes.c_int64 * len(after))(*(ticket.id for ticket in after))
    return ctypes.byref(CTask(priority, ids, len(after)))


def _segments_as_c(segments: Sequence[Segment], num_elements: int, num_hypers: int) -> ctypes.Array[CSegment]:
    out = (CSegment * len(segments))()
    end = 0
    for index, segment in enumerate(segments):
        offset, numel, grad, dtype, hyper = segment
        width = DTYPE_BYTES.get(dtype, 0) if dtype in FLOATS else 0
        ints = type(offset) is type(numel) is type(grad) is type(hyper) is int
        inside = ints and end <= offset <= num_elements and 0 <= numel <= num_elements - offset and 0 <= hyper < num_hypers
        if not (inside and width and 0 < grad < 1 << 63 and grad % width == 0):
            _check_segment(f"segment {index}", segment, end, num_elements, num_hypers)  # it says what is wrong
        end = offset + numel
        out[index] = CSegment(offset, numel, grad, dtype, hyper)
    return out


def _check_segment(name: str, segment: Segment, end: int, num_elements: int, num_hypers: int) -> None:
    """Checks one segment, which begins at ``end`` or later."""
    check_run(name, segment.offset, segment.numel, num_elements)
    if segment.offset < end:
        raise ConfigError(f"{name} starts at {segment.offset}; allowed: sorted, disjoint segments, so at least {end}.")
    check_range(f"hyper of {name}", segment.hyper, low=0, high=num_hypers - 1)
    width = check_dtype(f"grad_dtype of {name}", segment.grad_dtype, allowed=FLOATS)
    check_address(f"grad of {name}", segment.grad, alignment=width)
