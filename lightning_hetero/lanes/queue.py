"""Lanes that are in-order queues with a worker thread each."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue

import torch

from lightning_hetero._native import Ticket
from lightning_hetero.clock import now_s
from lightning_hetero.errors import HeteroError
from lightning_hetero.ir.schedule import COLLECTIVES, Lane, Op
from lightning_hetero.lanes.base import Event, OpEvent
from lightning_hetero.lanes.contract import Lanes
from lightning_hetero.lanes.memory import DeviceArena
from lightning_hetero.lanes.op import QueuedOp

_JOIN_S = 30.0  # for all threads together; only an op that hangs in foreign code takes longer
_TIDY = 8  # so many submissions later, ops that have ended are forgotten


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
        self.put: Callable[[QueuedOp | None], None] = self._waiting.put  # adds an op; ``None`` ends the thread
        self._thread = threading.Thread(target=self._loop, name=f"lightning-hetero {lane.value}", daemon=True)
        self._thread.start()

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


def close_queues(queues: Sequence[Queue]) -> None:
    """Ends the threads of lanes that are closing.

    Raises:
        HeteroError: An op did not return in time; names it. Its thread is a daemon.
    """
    for queue in queues:
        queue.put(None)
    deadline = now_s() + _JOIN_S
    stuck = [q for q in queues if not q.join(max(0.0, deadline - now_s()))]
    if stuck:
        which = ", ".join(f"{q.lane.value}: {q.current}" for q in stuck)
        raise HeteroError(
            f"ops did not return within {_JOIN_S:.0f} s of closing the lanes ({which}); their threads are daemons and end with "
            f"the process. What these ops work on must not be freed."
        )


class QueuedLanes(Lanes):
    """Lanes with a queue and a thread each, but for compute, whose ops the caller runs."""

    def __init__(self, device: torch.device, memory: DeviceArena, *, poison: bool) -> None:
        super().__init__(device, memory, poison=poison)
        self._queues: dict[Lane, Queue] = {}
        self._submitted: deque[QueuedOp] = deque()  # those not known to have ended
        self._number = 0
        self._local = threading.local()  # .op: the op whose `run` this thread is in
        self._lock = threading.Lock()  # nothing is queued behind the end

    # ---- ops -------------------------------------------------------------------------------------

    def submit(self, op: Op, run: Callable[[], Iterable[Ticket]], after: Sequence[Event]) -> OpEvent:
        """Queues an op; see :meth:`Lanes.submit`."""
        self._failures.owner.check("the device's lane")
        queued = QueuedOp(op, run, tuple(after), self._number, self._failures)
        self._number += 1
        if self.observer is not None:
            queued.is_observed = True
            self.observer(queued)
        if not self._number % _TIDY:
            while self._submitted and self._submitted[0].ended():
                self._submitted.popleft()
        with self._lock:
            if self._failures.closing.is_set():
                raise HeteroError(f"op {op.id} ({op.kind}, block {op.block}) was not taken: the lanes are closed. Create new ones.")
            self._submitted.append(queued)
            if op.lane is not Lane.COMPUTE:
                queue = self._queues.get(op.lane)
                (self._new_queue(op.lane) if queue is None else queue).put(queued)
        if op.lane is Lane.COMPUTE:
            queued.perform(self._work)
        return queued

    def _new_queue(self, lane: Lane) -> Queue:
        queue = self._queues[lane] = Queue(lane, self._thread_begins, self._work, self._tidy)
        return queue

    def _thread_begins(self) -> None:
        """The thread of a lane begins; called there."""

    @abstractmethod
    def _work(self, queued: QueuedOp) -> Iterable[Ticket]:
        """Waits for the events before the op and runs it, in its lane's thread."""

    def _run(self, queued: QueuedOp) -> Iterable[Ticket]:
        """Runs the op; :meth:`_current` finds it meanwhile."""
        outer, self._local.op = self._current(), queued
        queued.started_s = queued.started_s or now_s()
        with_gradients = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            return tuple(queued.run())
        finally:
            torch._C._set_grad_enabled(with_gradients)
            self._local.op = outer

    def _current(self) -> QueuedOp | None:
        op: QueuedOp | None = getattr(self._local, "op", None)
        return op

    def _tidy(self, lane: Lane) -> float | None:
        """Between two ops of a lane, in its thread; see :class:`Queue`."""
        return None

    # ---- the end ---------------------------------------------------------------------------------

    def drain(self) -> None:
        """Waits for all ops; see :meth:`Lanes.drain`."""
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
        """Ends the lanes; waits a bounded time.

        Raises:
            HeteroError: An op did not return in time; names it. Its thread is a daemon.
        """
        self._failures.owner.check("the device's lane")
        collectives = [queue for lane in COLLECTIVES if (queue := self._queues.pop(lane, None)) is not None]
        try:
            close_queues(collectives)  # first, because other ranks are in those that were submitted
        finally:
            with self._lock:
                self._failures.closing.set()
        self._submitted.clear()
        close_queues(list(self._queues.values()))
        self._queues.clear()
