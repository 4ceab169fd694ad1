"""In-order queues with a worker thread each, and the ops on their way through them."""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from lightning_hetero.errors import HeteroError
from lightning_hetero.ir.schedule import Lane, Op
from lightning_hetero.runtime.lanes.base import DeviceMemory, Event, Moment, Ticket, passed_at
from lightning_hetero.runtime.lanes.memory import POISON

_TICKET_SLICE_S = 0.2  # how late the wait for a ticket notices that the lanes are closed
_JOIN_S = 30.0  # for all threads together; only an op that hangs in foreign code takes longer
_TIDY = 8  # ended ops that a submission forgets; more than the one that it adds

_T = TypeVar("_T")


def host_moment(name: str = "") -> Moment:
    """Now, where compute is the calling thread."""
    now_s = time.monotonic()
    return lambda: now_s


class StreamEvent(Protocol):
    """What is used of ``torch.cuda.Event`` here."""

    def query(self) -> bool:
        """Whether the stream has passed it."""

    def synchronize(self) -> None:
        """Blocks the host until the stream has passed it."""


class Failures:
    """The first error of any op, and whether the lanes are closing."""

    def __init__(self) -> None:
        self.closing = threading.Event()
        self.first: BaseException | None = None

    def note(self, error: BaseException) -> None:
        """Remembers the first error. That an op was interrupted, or no longer ran because the lanes close, is none."""
        if self.first is None and not self.closing.is_set() and not isinstance(error, KeyboardInterrupt):
            self.first = error


class QueuedOp:
    """An op on its way through its lane, and its end as an event.

    Args:
        op: The op.
        run: Does it.
        after: What it waits for.
        number: Its place in the order of submission.
        failures: Where its error is noted.

    Attributes:
        moment: Where on its stream the op ends; ``None`` if it ends on the host.
        stream_times: Its start and end as the stream knows them.
        keep: What must live until the stream is through with it.
        submitted_s: When it was submitted, in seconds of ``time.monotonic``.
        started_s: When it started; 0 before.
        is_observed: Whether its tickets are kept, in :attr:`tickets`.
        tickets: What ``run`` returned.
    """

    __slots__ = (
        "_ended_s",
        "_error",
        "_failures",
        "_returned",
        "_tickets",
        "_traceback",
        "after",
        "is_observed",
        "keep",
        "moment",
        "number",
        "op",
        "run",
        "started_s",
        "stream_times",
        "submitted_s",
        "tickets",
    )

    def __init__(
        self, op: Op, run: Callable[[], Iterable[Ticket]], after: Sequence[Event], *, number: int, failures: Failures
    ) -> None:
        self.op, self.run, self.after, self.number = op, run, tuple(after), number
        self.moment: StreamEvent | None = None
        self.stream_times: Callable[[], tuple[float, float]] | None = None
        self.keep: list[Tensor] = []
        self.submitted_s = time.monotonic()
        self.started_s = self._ended_s = 0.0
        self.is_observed = False
        self.tickets: tuple[Ticket, ...] = ()
        self._returned = threading.Event()
        self._tickets: tuple[Ticket, ...] = ()
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._failures = failures

    # ---- for the lane -----------------------------------------------------------------------------------------------------

    def perform(self, work: Callable[[QueuedOp], Iterable[Ticket]]) -> None:
        """Does the op by ``work``, which waits and runs; what it raises, but for Ctrl-C, becomes the op's error."""
        try:
            self._check_open()
            self._tickets = tuple(work(self))
            if self.is_observed:
                self.tickets = self._tickets
        except BaseException as error:
            self._fail(error)
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise
        finally:
            self._ended_s = time.monotonic()
            del self.run, self.after  # they may hold large things
            self._returned.set()

    # ---- for those who wait -----------------------------------------------------------------------------------------------

    def handed(self) -> None:
        """Blocks until ``run`` has returned."""
        self._returned.wait()
        self._check()

    def issued(self) -> None:
        """Blocks until ``run`` has returned and its tickets have passed; what it gave to a stream may be under way."""
        self.handed()
        what = passed_at(self.op)
        for ticket in self._tickets if what else ():
            self.passes(ticket, what)
        self._tickets = ()

    def wait(self) -> None:
        """Blocks until the op has ended."""
        self.issued()
        if self.moment is not None:
            self._guarded(self.moment.synchronize)
            self.keep.clear()

    def done(self) -> bool:
        """Whether the op has ended."""
        if not self._returned.is_set():
            return False
        self._check()
        what = passed_at(self.op)
        if what and not all(self._guarded(ticket.poll) >= what for ticket in self._tickets):
            return False
        self._tickets = ()
        if self.moment is not None and not self._guarded(self.moment.query):
            return False
        self.keep.clear()
        return True

    def settled(self) -> bool:
        """Whether the op has ended or failed; raises nothing of the op."""
        try:
            return self.done()
        except BaseException as error:
            if error is not self._error:
                raise
            return True

    def times(self) -> tuple[float, float] | None:
        """When the op started and ended."""
        if not self.settled() or self._error is not None:
            return None
        if self.moment is not None:
            return None if self.stream_times is None else self.stream_times()
        return self.started_s, self._ended_s

    # ---- errors -----------------------------------------------------------------------------------------------------------

    @property
    def error(self) -> BaseException | None:
        """What the op raised, or an op that it depends on."""
        return self._error

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            traceback.clear_frames(error.__traceback__)  # they hold tensors, and what follows an error may need the memory
            self._error, self._traceback = error, error.__traceback__
            self._failures.note(error)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)  # else every raise would lengthen the traceback

    def _guarded(self, call: Callable[[], _T]) -> _T:
        """What a ticket or a stream raises is the op's error, from then on."""
        try:
            return call()
        except TimeoutError:
            raise
        except Exception as error:
            self._fail(error)
            assert self._error is not None
            raise self._error from None

    def passes(self, ticket: Ticket, what: int) -> None:
        """Blocks until one of its tickets has come so far."""
        while self._guarded(ticket.poll) < what:
            try:
                self._guarded(lambda: ticket.wait(what, _TICKET_SLICE_S))
            except TimeoutError:
                self._check_open()

    def _check_open(self) -> None:
        if self._failures.closing.is_set():
            op = self.op
            raise HeteroError(f"op {op.id} ({op.kind}, block {op.block}) has not ended: the lanes are closed. Create new ones.")


class Queue:
    """One lane: a thread that does one op after the other.

    Args:
        lane: Which one.
        work: Waits for what an op waits for, runs it, and returns its tickets.
        tidy: Called between two ops; returns after how many seconds it wants to be called again without one, if at all.
    """

    def __init__(self, lane: Lane, work: Callable[[QueuedOp], Iterable[Ticket]], tidy: Callable[[Lane], float | None]) -> None:
        self.lane = lane
        self.current: Op | None = None
        self._work, self._tidy = work, tidy
        self._waiting: SimpleQueue[QueuedOp | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"lightning-hetero {lane.value}", daemon=True)
        self._thread.start()

    def put(self, op: QueuedOp | None) -> None:
        """Adds an op; ``None`` ends the thread."""
        self._waiting.put(op)

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread; false if it has not ended in time. A thread does not wait for itself."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive() or self._thread is threading.current_thread()

    def _loop(self) -> None:
        while True:
            try:
                op = self._waiting.get(timeout=self._tidy(self.lane))
            except Empty:
                continue
            if op is None:
                return
            self.current = op.op
            op.perform(self._work)
            self.current = None
            del op  # what it holds shall not live until the next one comes


class Passed:
    """A moment that has passed."""

    def done(self) -> bool:
        """Yes."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


class QueuedLanes:
    """Lanes with a queue each; see :class:`~lightning_hetero.runtime.lanes.base.Lanes`.

    As it is, its device is the host: compute runs in the calling thread and has done what it was given, and copies are the host's.

    Args:
        device: Where parameters and activations live.
        memory: The device's memory.
        poison: Fill host buffers with NaN (tests).
    """

    def __init__(self, device: torch.device, memory: DeviceMemory, *, poison: bool) -> None:
        self.device = device
        self.timed = False
        self.observer: Callable[[QueuedOp], None] | None = None  # told of every op as it is submitted
        self.counts = False
        self._memory = memory
        self._poison = poison
        self._failures = Failures()
        self._queues: dict[Lane, Queue] = {}
        self._submitted: deque[QueuedOp] = deque()  # those not known to have ended
        self._number = 0
        self._local = threading.local()  # .op: the op whose `run` this thread is in
        self._lock = threading.Lock()  # nothing is queued behind the end

    # ---- ops --------------------------------------------------------------------------------------------------------------

    def submit(self, op: Op, run: Callable[[], Iterable[Ticket]], after: Sequence[Event]) -> QueuedOp:
        """Queues an op; see :meth:`Lanes.submit`."""
        queued = QueuedOp(op, run, after, number=self._number, failures=self._failures)
        self._number += 1
        if self.observer is not None:
            queued.is_observed = True
            self.observer(queued)
        for _ in range(_TIDY):
            if not self._submitted or not self._submitted[0].settled():
                break
            self._submitted.popleft()
        with self._lock:
            if self._failures.closing.is_set():
                raise HeteroError(f"op {op.id} ({op.kind}, block {op.block}) was not taken: the lanes are closed. Create new ones.")
            self._submitted.append(queued)
            if self._has_queue(op.lane):
                self._queue(op.lane).put(queued)
        if not self._has_queue(op.lane):
            queued.perform(self._work)
        return queued

    def mark(self) -> Event:
        """Where compute is; see :meth:`Lanes.mark`."""
        return Passed()

    def now(self, name: str = "") -> Moment:
        """The moment that compute has come to; see :meth:`Lanes.now`."""
        return host_moment(name)

    def compute_waits(self, events: Sequence[Event]) -> None:
        """Compute waits; see :meth:`Lanes.compute_waits`."""
        for event in events:
            event.wait()

    def _has_queue(self, lane: Lane) -> bool:
        return lane is not Lane.COMPUTE

    def _queue(self, lane: Lane) -> Queue:
        if lane not in self._queues:
            self._queues[lane] = Queue(lane, self._work, self._tidy)
        return self._queues[lane]

    def _work(self, queued: QueuedOp) -> Iterable[Ticket]:
        """Waits for what the op waits for and runs it, in its lane's thread; ops of ``compute`` in the calling thread."""
        for event in queued.after:
            event.wait()
        return self._run(queued)

    def _run(self, queued: QueuedOp) -> Iterable[Ticket]:
        """Runs the op, so that :meth:`copy` knows which one it is part of."""
        outer, self._local.op = self._current(), queued
        queued.started_s = queued.started_s or time.monotonic()
        try:
            with torch.no_grad():
                return tuple(queued.run())
        finally:
            self._local.op = outer

    def _current(self) -> QueuedOp | None:
        op: QueuedOp | None = getattr(self._local, "op", None)
        return op

    def _tidy(self, lane: Lane) -> float | None:
        """Between two ops of a lane, in its thread; see :class:`Queue`."""
        return None

    # ---- memory -----------------------------------------------------------------------------------------------------------

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Moves and converts; see :meth:`Lanes.copy`."""
        with torch.no_grad():
            target.copy_(source)

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Host memory; see :meth:`Lanes.host_buffer`."""
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return buffer.fill_(POISON) if self._poison else buffer

    def page_lock(self, memory: Tensor) -> None:
        """Page-locks host memory; see :meth:`Lanes.page_lock`."""

    def page_unlock(self, memory: Tensor) -> None:
        """Undoes :meth:`page_lock`; see :meth:`Lanes.page_unlock`."""

    def catch_up(self) -> None:
        """Inside ``run``; see :meth:`Lanes.catch_up`. Copies are over when they return."""

    def resize(self, num_bytes: int) -> None:
        """Sets other memory aside; see :meth:`Lanes.resize`. Here ops share the device's memory with torch."""

    def allocated(self, storage: torch.UntypedStorage) -> None:
        """Torch has allocated on the device; see :meth:`Lanes.allocated`."""

    def memory(self) -> DeviceMemory:
        """The device's memory."""
        return self._memory

    def settle(self) -> None:
        """Waits for compute; see :meth:`Lanes.settle`."""

    def peak_bytes(self) -> int:
        """The most that was used; see :meth:`Lanes.peak_bytes`."""
        return self._memory.peak_bytes

    def spare_bytes(self) -> int | None:
        """What torch can still be given; see :meth:`Lanes.spare_bytes`."""
        return None

    def allocated_bytes(self) -> int:
        """What torch has allocated beside; see :meth:`Lanes.allocated_bytes`."""
        return 0

    # ---- the end ----------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Waits for all that was submitted; see :meth:`Lanes.drain`."""
        while self._submitted:
            queued = self._submitted[0]
            try:
                queued.wait()
            except BaseException as error:
                if error is not queued.error:
                    raise  # Ctrl-C
            self._submitted.popleft()
        first, self._failures.first = self._failures.first, None
        if first is not None:
            raise first

    def close(self) -> None:
        """Ends the lanes; see :meth:`Lanes.close`."""
        with self._lock:
            self._failures.closing.set()
        queues = list(self._queues.values())
        for queue in queues:
            queue.put(None)
        deadline = time.monotonic() + _JOIN_S
        stuck = [q for q in queues if not q.join(max(0.0, deadline - time.monotonic()))]
        self._submitted.clear()
        if stuck:
            which = ", ".join(f"{q.lane.value}: {q.current}" for q in stuck)
            raise HeteroError(
                f"ops did not return within {_JOIN_S:.0f} s of closing the lanes ({which}); their threads are daemons and end with "
                f"the process. What these ops work on must not be freed."
            )
        self._queues.clear()
