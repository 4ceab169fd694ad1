"""Lanes for the host as device: the native engine does the work, and its tickets are the events.

[Note: The engine waits]
An op's ``run`` is called as the op is submitted, in the calling thread, and does not wait there.
:attr:`EngineLanes.behind` holds the tickets of the ops that it follows. ``run`` passes them on, and
the engine starts the task once they are done.

Collectives are no work for the engine. So ops of lane ``net`` have a queue with a thread, as on a
device with memory of its own; it begins with the first of them.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_hetero._native import DONE, Ticket
from lightning_hetero.clock import now_s
from lightning_hetero.errors import HeteroError
from lightning_hetero.ir.schedule import Lane, Op
from lightning_hetero.lanes.base import All, Event, Moment, passed_at
from lightning_hetero.lanes.contract import Lanes, host_memory, host_moment
from lightning_hetero.lanes.memory import DeviceArena
from lightning_hetero.lanes.op import DELAY_S, Failures, QueuedOp
from lightning_hetero.lanes.queue import Queue, close_queues

_FORGET = 256  # ops that are remembered before those that have ended are forgotten
_MANY = 32  # tickets of which an op looks whether they are done


@dataclass(eq=False, repr=False, slots=True)
class EngineOp:
    """An op that the engine does, and its end as an event."""

    op: Op
    after: Sequence[Event]  # the events that it waits for
    tickets: tuple[Ticket, ...] = ()
    # The tickets that a later op waits for: its own, or those before it if it has none. A FETCH of
    # state has none for others, because its ticket waits for gradients.
    behind: Sequence[Ticket] = ()
    error: BaseException | None = None  # of ``run``
    submitted_s: float = field(default_factory=now_s)  # when it was submitted, in seconds of ``now_s``
    _ended_s: float = 0.0
    _passed_at: int = field(init=False)

    def __post_init__(self) -> None:
        self._passed_at = passed_at(self.op)

    def ran(self, tickets: Iterable[Ticket], behind: Sequence[Ticket]) -> None:
        """``run`` has returned ``tickets``; it followed those ``behind``."""
        self.tickets, self._ended_s = tuple(tickets), now_s()
        own = [ticket for ticket in self.tickets if isinstance(ticket, Ticket)] if self._passed_at else []
        if not own and len(behind) > _MANY:  # it hands them on, and would hand on those of all steps before
            behind = [ticket for ticket in behind if ticket.poll() < DONE]
        self.behind = own or behind

    def failed(self, error: BaseException, failures: Failures) -> None:
        """``run`` has raised an error."""
        traceback.clear_frames(error.__traceback__)  # they hold tensors
        self.error, self._ended_s = error, now_s()
        failures.note(error)

    def handed(self) -> None:
        """Raises the error of ``run``."""
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        """Blocks until the op has ended."""
        if self.error is not None:
            raise self.error
        for ticket in self.tickets if self._passed_at else ():
            ticket.wait(self._passed_at)

    def done(self) -> bool:
        """Whether the op has ended."""
        if self.error is not None:
            raise self.error
        return all([ticket.poll() >= self._passed_at for ticket in self.tickets])  # noqa: C419  # one call, not one each

    def ended(self) -> bool:
        """Whether the op has ended or failed; raises the error of a ticket."""
        return self.error is not None or self.done()

    def times(self) -> tuple[float, float] | None:
        """When the op was submitted, and when ``run`` returned: its tickets know the rest."""
        return (self.submitted_s, self._ended_s) if self.error is None else None


class EngineLanes(Lanes):
    """Gives ops to the native engine as they are submitted; see [Note: The engine waits].

    Events without a ticket of the engine are waited for before ``run`` is called. Compute runs in
    the calling thread and has always done its work.

    Ops may take ``memory_bytes``, as if the device had memory of its own; 0 for the host. Under
    ``poison`` ops of lane ``net`` are late at random.
    """

    def __init__(self, *, memory_bytes: int = 0, poison: bool = False) -> None:
        host = torch.device("cpu")
        super().__init__(host, DeviceArena(memory_bytes, host, poison=poison), poison=poison)
        self._ops: list[EngineOp | QueuedOp] = []
        self._net: Queue | None = None
        self._delays = random.Random(0) if poison else None

    def submit(self, op: Op, run: Callable[[], Iterable[Ticket]], after: Sequence[Event]) -> EngineOp | QueuedOp:
        """Runs an op; see :meth:`Lanes.submit`."""
        if self._failures.closing.is_set():
            raise HeteroError(f"op {op.id} ({op.kind}, block {op.block}) was not taken: the lanes are closed. Create new ones.")
        return self._queue(op, run, after) if op.lane is Lane.NET else self._give(op, run, after)

    def _queue(self, op: Op, run: Callable[[], Iterable[Ticket]], after: Sequence[Event]) -> QueuedOp:
        self._net = self._net or Queue(Lane.NET, lambda: torch._C._set_grad_enabled(False), self._work, lambda _: None)
        end = QueuedOp(op, run, tuple(after), len(self._ops), self._failures)
        if self.observer is not None:
            end.is_observed = True
            self.observer(end)
        self._net.put(end)
        self._remember(end)
        return end

    def _work(self, queued: QueuedOp) -> Iterable[Ticket]:
        for event in queued.after:
            event.wait()
        if self._delays is not None:
            self._failures.closing.wait(self._delays.uniform(0, DELAY_S))
        queued.started_s = now_s()
        return queued.run()

    def _give(self, op: Op, run: Callable[[], Iterable[Ticket]], after: Sequence[Event]) -> EngineOp:
        end = EngineOp(op, after)
        with_gradients = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            self.behind = behind = self._tickets_of(after)
            end.ran(run(), behind)
        except BaseException as error:
            end.failed(error, self._failures)
            if isinstance(error, KeyboardInterrupt):
                raise
        finally:
            self.behind = ()
            torch._C._set_grad_enabled(with_gradients)
        if self.observer is not None and end.tickets:
            self.observer(end)
        end.after = ()  # it may lead to the ops of all steps before
        self._remember(end)
        return end

    def _remember(self, end: EngineOp | QueuedOp) -> None:
        self._ops.append(end)
        if len(self._ops) > _FORGET:
            self._ops = [one for one in self._ops if not one.ended()]

    def _tickets_of(self, events: Sequence[Event]) -> Sequence[Ticket]:
        """The engine's tickets of these events, each once; waits for an event that has none."""
        found: list[Ticket] = []
        waiting = list(events)
        while waiting:
            event = waiting.pop()
            if isinstance(event, All):
                waiting += event.events
            elif isinstance(event, EngineOp) and (event.behind or not event.tickets) and event.error is None:
                found += event.behind
            else:
                event.wait()
        return list(dict.fromkeys(found))

    def mark(self) -> Event:
        """Compute has always done its work."""
        return All(())

    def now(self, name: str = "") -> Moment:
        """Now."""
        return host_moment()

    def compute_waits(self, events: Sequence[Event]) -> None:
        """The calling thread waits for these events."""
        for event in events:
            event.wait()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Moves and converts, at once."""
        with torch.no_grad():
            target.copy_(source)

    def copies(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copies many tensors, one after the other."""
        for target, source in zip(targets, sources, strict=True):
            self.copy(target, source)

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Host memory of this size."""
        return host_memory(num_bytes, poison=self._poison)

    def peak_bytes(self) -> int:
        """The most that ops have taken at any time."""
        return self._memory.peak_bytes

    def drain(self) -> None:
        """Waits for all that was submitted; see :meth:`Lanes.drain`."""
        ops, self._ops = self._ops, []
        for one in ops:
            try:
                one.wait()
            except Exception as error:
                if error is not one.error:  # which has been noted
                    self._failures.note(error)
        first, self._failures.first = self._failures.first, None
        if first is not None:
            raise first

    def close(self) -> None:
        """Ends the lanes; see :meth:`Lanes.close`."""
        self._ops.clear()
        net, self._net = self._net, None
        try:
            if net is not None:
                close_queues([net])  # first, because other ranks are in the collectives that were submitted
        finally:
            self._failures.closing.set()
