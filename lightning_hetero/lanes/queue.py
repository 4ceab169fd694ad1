"""Lanes that are in-order queues with a worker thread each."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from lightning_hetero._native import Ticket
from lightning_hetero.clock import now_s
from lightning_hetero.errors import HeteroError
from lightning_hetero.ir.schedule import Lane, Op
from lightning_hetero.lanes.base import All, Event, Moment, OpEvent
from lightning_hetero.lanes.memory import POISON, DeviceArena
from lightning_hetero.lanes.op import Failures, QueuedOp
from lightning_hetero.store.raw_memory import page_aligned

_JOIN_S = 30.0  # for all threads together; only an op that hangs in foreign code takes longer
_TIDY = 8  # ended ops that a submission forgets; more than the one that it adds


def host_moment(name: str = "") -> Moment:
    """Now, where compute is the calling thread."""
    at_s = now_s()
    return lambda: at_s


class Queue:
    """One lane: a thread that does one op after the other.

    ``begin`` is called first in the thread. ``work`` waits for the events before an op, runs it,
    and returns its tickets. ``tidy`` is called between two ops; it returns after how many idle
    seconds to call it again, if ever.
    """

    def __init__(
        self,
        lane: Lane,
        begin: Callable[[], object],
        work: Callable[[QueuedOp], Iterable[Ticket]],
        tidy: Callable[[Lane], float | None],
    ) -> None:
        self.lane = lane
        self.current: Op | None = None
        self._begin, self._work, self._tidy = begin, work, tidy
        self._waiting: SimpleQueue[QueuedOp | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"lightning-hetero {lane.value}", daemon=True)
        self._thread.start()

    def put(self, op: QueuedOp | None) -> None:
        """Adds an op; ``None`` ends the thread."""
        self._waiting.put(op)

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread, unless it is the caller; false if it has not ended in time."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive() or self._thread is threading.current_thread()

    def _loop(self) -> None:
        self._begin()
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
            del op  # else it lives until the next one comes


class Lanes:
    """Runs ops, each lane in the order of submission: see [Note: Lanes].

    Here the device is the host: compute runs in the calling thread and has always done its work,
    and ops share the device's memory with torch. Subclasses are other devices.

    One thread at a time submits and computes; the other methods are thread-safe. Nothing runs after
    :meth:`close`, which has to be called whatever happens.
    """

    def __init__(self, device: torch.device, memory: DeviceArena, *, poison: bool) -> None:
        self.device = device  # of parameters and activations
        self.device_type = device.type  # that tensors there report
        self.timed = False  # events know their times on streams too, which costs something; may be set between two ops
        self.observer: Callable[[OpEvent], None] | None = None  # called with every op as it is submitted
        # Inside ``run``: tickets of earlier ops. The engine waits for them, the lane has not.
        self.behind: Sequence[Ticket] = ()
        self.counts = False  # storages that torch allocates have to be reported (:meth:`allocated`)
        self._memory = memory
        self._poison = poison
        self._failures = Failures()
        self._queues: dict[Lane, Queue] = {}
        self._submitted: deque[QueuedOp] = deque()  # those not known to have ended
        self._number = 0
        self._local = threading.local()  # .op: the op whose `run` this thread is in
        self._lock = threading.Lock()  # nothing is queued behind the end

    # ---- ops -------------------------------------------------------------------------------------

    def submit(self, op: Op, run: Callable[[], Iterable[Ticket]], after: Sequence[Event]) -> OpEvent:
        """Queues an op on ``op.lane``; see [Note: Lanes].

        ``run`` does it, in the lane's thread, with the lane's stream current and without gradients;
        it may return native tickets. The op waits for the events ``after``: if it works on results
        of compute, for a mark. Returns the end of the op.

        Raises:
            HeteroError: The lanes are closed.
        """
        self._failures.owner.check("the device's lane")
        queued = QueuedOp(op, run, tuple(after), self._number, self._failures)
        self._number += 1
        if self.observer is not None:
            queued.is_observed = True
            self.observer(queued)
        for _ in range(_TIDY):
            if not self._submitted or not self._submitted[0].ended():
                break
            self._submitted.popleft()
        with self._lock:
            if self._failures.closing.is_set():
                raise HeteroError(f"op {op.id} ({op.kind}, block {op.block}) was not taken: the lanes are closed. Create new ones.")
            self._submitted.append(queued)
            if has_queue := self._has_queue(op.lane):
                self._queue(op.lane).put(queued)
        if not has_queue:
            queued.perform(self._work)
        return queued

    def mark(self) -> Event:
        """Passes once compute has done everything that it was given so far."""
        return All(())

    def now(self, name: str = "") -> Moment:
        """The moment that compute has come to, for the trace; device profilers show the name."""
        return host_moment(name)

    def compute_waits(self, events: Sequence[Event]) -> None:
        """Compute waits for these events; blocks the host only as far as needed.

        Raises:
            BaseException: The error of an op whose event is among them.
        """
        for event in events:
            event.wait()

    def _has_queue(self, lane: Lane) -> bool:
        return lane is not Lane.COMPUTE

    def _queue(self, lane: Lane) -> Queue:
        queue = self._queues.get(lane)
        if queue is None:
            queue = self._queues[lane] = Queue(lane, self._thread_begins, self._work, self._tidy)
        return queue

    def _thread_begins(self) -> None:
        """The thread of a lane begins; called there."""

    def _work(self, queued: QueuedOp) -> Iterable[Ticket]:
        """Waits for the events before the op and runs it, in its lane's thread."""
        for event in queued.after:
            event.wait()
        return self._run(queued)

    def _run(self, queued: QueuedOp) -> Iterable[Ticket]:
        """Runs the op; :meth:`copy` finds it as the current one."""
        outer, self._local.op = self._current(), queued
        queued.started_s = queued.started_s or now_s()
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

    # ---- memory ----------------------------------------------------------------------------------

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Moves and converts ``source`` to ``target``, of the same shape, at the lane's bandwidth.

        Inside ``run`` it is part of the op, and both tensors live until it is done. Outside of any
        op, it is done when the call returns, and so is everything that compute was given before.
        """
        with torch.no_grad():
            target.copy_(source)

    def copies(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copies many tensors by one call, as :meth:`copy` does."""
        for target, source in zip(targets, sources, strict=True):
            self.copy(target, source)

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Host memory of this size: uint8, flat, page-locked if that speeds copies.

        It begins with a page, and is freed with its last view.
        """
        buffer = page_aligned(num_bytes)
        return buffer.fill_(POISON) if self._poison else buffer

    def page_lock(self, memory: Tensor) -> None:
        """Page-locks existing host memory, if that speeds copies, until :meth:`close`.

        The memory must stay mapped, and its pages must not go back to the system.
        """

    def page_unlock(self, memory: Tensor) -> None:
        """Undoes :meth:`page_lock`, so that the pages may go back; no copy is under way."""

    def catch_up(self) -> None:
        """The host waits for the current stream: of the lane inside ``run``, else of compute."""

    def resize(self, num_bytes: int) -> None:
        """Reserves another amount of memory for ops, if the device is partitioned.

        The lanes are at rest, and nothing of their memory is taken.

        Raises:
            OutOfMemoryBudgetError: The device has less free.
        """

    def allocated(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage of torch that outlives its operator, until it is freed.

        Only for an emulated device; others have an allocator that counts.

        Raises:
            DeviceMemoryError: It does not fit beside the memory in use.
        """

    def memory(self) -> DeviceArena:
        """The device's memory."""
        return self._memory

    def peak_bytes(self) -> int:
        """The most device memory that ops and torch have used at any time."""
        return self._memory.peak_bytes

    def spare_bytes(self) -> int | None:
        """What torch can still allocate, in any pieces; ``None`` without a partitioned device."""
        return None

    def allocator_retries(self) -> int:
        """How often torch's allocator has emptied its cache because an allocation failed."""
        return 0

    def allocated_bytes(self) -> int:
        """Device memory that torch has allocated beside the lanes; 0 if that is not counted."""
        return 0

    def take_peak_bytes(self) -> int:
        """The peak of :meth:`allocated_bytes` since the last call."""
        return 0

    # ---- the end ---------------------------------------------------------------------------------

    def drain(self) -> None:
        """Waits for all ops; compute is at rest until it next waits or marks.

        Raises:
            BaseException: The first error since the last drain.
        """
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
        """Ends the lanes: ops that have not started fail. Idempotent; waits a bounded time.

        Raises:
            HeteroError: An op did not return in time; names it. Its thread is a daemon.
        """
        self._failures.owner.check("the device's lane")
        with self._lock:
            self._failures.closing.set()
        queues = list(self._queues.values())
        for queue in queues:
            queue.put(None)
        deadline = now_s() + _JOIN_S
        stuck = [q for q in queues if not q.join(max(0.0, deadline - now_s()))]
        self._submitted.clear()
        if stuck:
            which = ", ".join(f"{q.lane.value}: {q.current}" for q in stuck)
            raise HeteroError(
                f"ops did not return within {_JOIN_S:.0f} s of closing the lanes ({which}); their threads are daemons and end with "
                f"the process. What these ops work on must not be freed."
            )
        self._queues.clear()


class InlineLanes(Lanes):
    """Runs ops when they are submitted; nothing overlaps but what the native engine does.

    Ops may take ``memory_bytes``, as if the device had memory of its own; 0 for the host.
    """

    def __init__(self, *, memory_bytes: int = 0, poison: bool = False) -> None:
        host = torch.device("cpu")
        super().__init__(host, DeviceArena(memory_bytes, host, poison=poison), poison=poison)

    def _has_queue(self, lane: Lane) -> bool:
        return False
