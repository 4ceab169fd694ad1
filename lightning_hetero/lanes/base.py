"""What runs the ops of a schedule beside compute: in-order lanes, their events, device memory.

[Note: Lanes]
Each lane is an in-order queue with a worker thread. ``compute`` is the thread that calls: it runs
autograd, and ops of lane ``compute`` as they are submitted. An op *starts* once every event in
``after`` has passed and the ``run`` of the op before it on its lane has returned. So ``run`` must
not wait for ops that are submitted later. An op *ends* when ``run`` has returned, the device has
done what ``run`` gave to it, and the native tickets that ``run`` returned have got far enough
(:func:`passed_at`). A lane starts the next op without waiting for the tickets of the last one,
because the native engine has its own queues.

[Note: Streams]
On a device with streams an op of ``h2d`` or ``d2h`` starts *on the stream*: the host calls ``run``
as soon as the events before it have been issued, and the stream waits for them. Work that ``run``
does through the device, :meth:`Lanes.copy`, :meth:`DeviceArena.take` and :meth:`DeviceArena.give`
follows the stream's order. Work on the *content* of host memory does not: it belongs on a host lane
(``cpu``, ``disk_read``, ``disk_write``), which waits on the host. ``compute`` is a stream too, so
an op that reads or frees memory after compute waits for :meth:`Lanes.mark`.

[Note: Errors in lanes]
If an op raises, its event raises the same error, and so does whatever waits for that event: ops
that depend on it do not run. :meth:`Lanes.submit` itself raises none of this. :meth:`Lanes.drain`
raises the first error since the last drain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from lightning_hetero._native import DONE, READY, Ticket
from lightning_hetero.ir.schedule import Op, OpKind, Payload

_PASSED_WHEN_READY = frozenset({OpKind.FETCH, OpKind.UPDATE})


# Returns a time in seconds of the package's clock, which is the engine's too; ``None`` until it is
# known.
Moment = Callable[[], float | None]


def passed_at(op: Op) -> int:
    """How far the native tickets of an op have to be: READY or DONE; 0 if they do not matter.

    A FETCH or an UPDATE has passed once the weights are in memory (READY). The write-back of an
    UPDATE is the STORE, whose tickets are the UPDATE's. A FETCH of state opens an update, whose
    tickets wait for gradients: nothing may wait for them.
    """
    if (op.kind, op.payload) == (OpKind.FETCH, Payload.STATE):
        return 0
    return READY if op.kind in _PASSED_WHEN_READY else DONE


class Event(Protocol):
    """A moment that a lane passes. Thread-safe."""

    def done(self) -> bool:
        """Whether it has passed; never waits. Raises the op's error."""

    def wait(self) -> None:
        """Blocks the calling host thread until it has passed. Raises the op's error."""


class All:
    """Passes when all of some events have: the end of an op that had nothing to do."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = tuple(events)

    def done(self) -> bool:
        """Whether all have passed."""
        return all(event.done() for event in self.events)

    def wait(self) -> None:
        """Waits for all."""
        for event in self.events:
            event.wait()


class OpEvent(Event, Protocol):
    """The end of an op."""

    op: Op
    after: Sequence[Event]  # the events that the op waits for; only until it has run
    submitted_s: float  # when it was submitted, in seconds of ``now_s``
    error: BaseException | None  # of the op, if it has failed
    tickets: tuple[Ticket, ...]  # that ``run`` returned, if the lanes have an observer

    def handed(self) -> None:
        """Blocks the calling host thread until ``run`` has returned. Raises the op's error."""

    def ended(self) -> bool:
        """Whether it has ended or failed; never waits, and does not raise the op's error."""

    def times(self) -> tuple[float, float] | None:
        """When the op started and ended, in seconds of ``now_s``; ``None`` if that is not known.

        If the engine does the work, the end is when ``run`` returned, and native tickets know more.
        On streams, times are known only of ops that were submitted while ``timed`` was set.
        """
