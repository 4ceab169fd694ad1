"""In-order queues with a worker thread each."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from lightning_hetero._native import Ticket as NativeTicket
from lightning_hetero.clock import now_s
from lightning_hetero.errors import HeteroError
from lightning_hetero.ir.schedule import Lane, Op
from lightning_hetero.runtime.lanes.base import DeviceMemory, Event, Moment, OpEvent, Ticket
from lightning_hetero.runtime.lanes.memory import POISON
from lightning_hetero.runtime.lanes.op import Failures, QueuedOp

_JOIN_S = 30.0  # for all threads together; only an op that hangs in foreign code takes longer
_TIDY = 8  # ended ops that a submission forgets; more than the one that it adds


def host_moment(name: str = "") -> Moment:
    """Now, where compute is the calling thread."""
    at_s = now_s()
    return lambda: at_s


class Queue:
    """One lane: a thread that does one op after the other.

    Args:
        lane: Which one.
        work: Waits for the events before an op, runs it, and returns its tickets.
        tidy: Called between two ops; returns after how many idle seconds to call it again, if ever.
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
        """Waits for the thread, unless it is the caller; false if it has not ended in time."""
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
            del op  # else it lives until the next one comes


class Passed:
    """A moment that has passed."""

    def done(self) -> bool:
        """Yes."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


class QueuedLanes:
    """Lanes with a queue each; see :class:`~lightning_hetero.runtime.lanes.base.Lanes`.

    Here the device is the host: compute runs in the calling thread and has always done its work.
    Subclasses are devices.

    Args:
        device: Where parameters and activations live.
        memory: The device's memory.
        poison: Fill host buffers with NaN (tests).
    """

    def __init__(self, device: torch.device, memory: DeviceMemory, *, poison: bool) -> None:
        self.device, self.device_type = device, device.type
        self.timed = False
        self.observer: Callable[[OpEvent], None] | None = None
        self.behind: Sequence[NativeTicket] = ()
        self.counts = False
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
        """Queues an op; see :meth:`Lanes.submit`."""
        self._failures.owner.check("the device's lane")
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
        """Nothing: ops share the device's memory with torch; see :meth:`Lanes.resize`."""

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

    def take_peak_bytes(self) -> int:
        """The most that torch has had allocated; see :meth:`Lanes.take_peak_bytes`."""
        return 0

    # ---- the end ---------------------------------------------------------------------------------

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
