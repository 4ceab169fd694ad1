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
does through the device, :meth:`Lanes.copy`, :meth:`DeviceMemory.take` and :meth:`DeviceMemory.give`
follows the stream's order. Work on the *content* of host memory does not: it belongs on a host lane
(``cpu``, ``disk_read``, ``disk_write``), which waits on the host. ``compute`` is a stream too, so
an op that reads or frees memory after compute waits for :meth:`Lanes.mark`.

[Note: Errors in lanes]
If an op raises, its event raises the same error, and so does whatever waits for that event: ops
that depend on it do not run. :meth:`Lanes.submit` itself raises none of this. :meth:`Lanes.drain`
raises the first error since the last drain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_hetero._native import DONE, READY
from lightning_hetero._native import Ticket as NativeTicket
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


class Ticket(Protocol):
    """What the lanes use of :class:`lightning_hetero._native.Ticket`."""

    def wait(self, what: int = DONE, timeout: float | None = None) -> None:
        """Blocks until ``what`` is reached; raises the task's error, or ``TimeoutError``."""

    def poll(self) -> int:
        """0, ``READY`` or ``DONE``, at once; raises the task's error."""


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

    @property
    def op(self) -> Op:
        """The op."""

    @property
    def after(self) -> Sequence[Event]:
        """The events that the op waits for; only until it has run."""

    @property
    def submitted_s(self) -> float:
        """When it was submitted, in seconds of ``now_s``."""

    @property
    def error(self) -> BaseException | None:
        """The error of the op, if it has failed."""

    @property
    def tickets(self) -> tuple[Ticket, ...]:
        """The native tickets that ``run`` returned, if the lanes have an observer."""

    def handed(self) -> None:
        """Blocks the calling host thread until ``run`` has returned. Raises the op's error."""

    def settled(self) -> bool:
        """Whether it has ended or failed; never waits, and does not raise the op's error."""

    def times(self) -> tuple[float, float] | None:
        """When the op started and ended, in seconds of ``now_s``; ``None`` if that is not known.

        If the engine does the work, the end is when ``run`` returned, and native tickets know more.
        On streams, times are known only of ops that were submitted while ``timed`` was set.
        """


class Device(Protocol):
    """A device that has memory of its own."""

    @property
    def device(self) -> torch.device:
        """The torch device of parameters and activations."""

    @property
    def partitioned(self) -> bool:
        """Whether the lanes reserve memory for ops; else ops and torch share all of it."""

    @property
    def memory_bytes(self) -> int:
        """The part of its memory that plans may use."""


class DeviceMemory(Protocol):
    """The memory of a device that ops take and give back: one run of addresses. Thread-safe.

    First fit over address ranges; free neighbours are merged. Under poison, memory is filled with
    ``0xFF``, which is NaN in every floating dtype, when it is taken and when it is given back. On a
    device with streams both happen in the order of the current stream (see [Note: Streams]), and
    the taker's stream waits for the stream that gave the memory back.
    """

    @property
    def capacity_bytes(self) -> int:
        """Its size."""

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken now, in units of 512."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were taken at any time."""

    def take(self, num_bytes: int, what: str) -> Tensor:
        """Takes memory: uint8, flat, aligned to 512 bytes.

        Args:
            num_bytes: Length of the tensor; at least 0.
            what: Its purpose, for the error.

        Raises:
            DeviceMemoryError: There is no gap of that size.
        """

    def give(self, memory: Tensor) -> None:
        """Gives back memory of :meth:`take`."""


class Lanes(Protocol):
    """Runs ops, each lane in the order of submission.

    One thread at a time submits and computes; the other methods are thread-safe. Nothing runs after
    :meth:`close`, which has to be called whatever happens.

    Attributes:
        device: The torch device of parameters and activations.
        device_type: The type that tensors on it report.
        timed: Whether events know their times on streams too, which costs something. May be set
            between two ops.
        counts: Whether storages that torch allocates have to be reported (:meth:`allocated`).
        behind: Inside ``run``: native tickets of earlier ops. The engine waits for them; the lane
            has not.
        observer: Called with every op as it is submitted.
    """

    device: torch.device
    device_type: str
    timed: bool
    counts: bool
    behind: Sequence[NativeTicket]
    observer: Callable[[OpEvent], None] | None

    def submit(self, op: Op, run: Callable[[], Iterable[Ticket]], after: Sequence[Event]) -> OpEvent:
        """Queues an op on ``op.lane``; see [Note: Lanes].

        Args:
            op: The op.
            run: Does it, in the lane's thread, with the lane's stream current and without
                gradients; may return native tickets.
            after: Events of these lanes that the op waits for. An op that works on results of
                compute waits for a mark.

        Returns:
            The end of the op.

        Raises:
            HeteroError: The lanes are closed.
        """

    def mark(self) -> Event:
        """Passes once compute has done everything that it was given so far."""

    def now(self, name: str = "") -> Moment:
        """The moment that compute has come to, for the trace; device profilers show the name."""

    def compute_waits(self, events: Sequence[Event]) -> None:
        """Compute waits for these events; blocks the host only as far as needed.

        Raises:
            BaseException: The error of an op whose event is among them.
        """

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Moves and converts ``source`` to ``target``, of the same shape, at the lane's bandwidth.

        Inside ``run`` it is part of the op, and both tensors live until it is done. Outside of any
        op, it is done when the call returns, and so is everything that compute was given before.
        """

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Host memory of this size: uint8, flat, page-locked if that speeds copies.

        It is freed with its last view.
        """

    def page_lock(self, memory: Tensor) -> None:
        """Page-locks existing host memory, if that speeds copies, until :meth:`close`.

        The memory must stay mapped, and its pages must not go back to the system.
        """

    def page_unlock(self, memory: Tensor) -> None:
        """Undoes :meth:`page_lock`, so that the pages may go back; no copy is under way."""

    def catch_up(self) -> None:
        """Inside ``run``: the host waits for the lane, to work on the content of host memory."""

    def memory(self) -> DeviceMemory:
        """The device's memory."""

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

    def settle(self) -> None:
        """The host waits for compute, if compute does not run on the host."""

    def peak_bytes(self) -> int:
        """The most device memory that ops and torch have used at any time."""

    def allocated_bytes(self) -> int:
        """Device memory that torch has allocated beside the lanes; 0 if that is not counted."""

    def take_peak_bytes(self) -> int:
        """The peak of :meth:`allocated_bytes` since the last call."""

    def spare_bytes(self) -> int | None:
        """What torch can still allocate, in any pieces; ``None`` without a partitioned device."""

    def drain(self) -> None:
        """Waits for all ops; compute is at rest until it next waits or marks.

        Raises:
            BaseException: The first error since the last drain.
        """

    def close(self) -> None:
        """Ends the lanes: ops that have not started fail. Idempotent; waits a bounded time.

        Raises:
            HeteroError: An op did not return in time; names it. Its thread is a daemon.
        """
