"""What runs the ops of a schedule beside compute: in-order lanes, the events they pass, and the device's memory.

[Note: Lanes]
Each lane is an in-order queue with a worker thread. ``compute`` is the thread that calls: what autograd does there, and ops of
lane ``compute`` as they are submitted. An op *starts* once every event in ``after`` has passed and the ``run`` of the op before
it on its lane has returned; so ``run`` must not wait for ops that are submitted later. It *ends* when ``run`` has returned,
what ``run`` gave to the device is done, and the native tickets that ``run`` returned have got far enough (:func:`passed_at`).
A lane does not wait for the tickets of one op before it starts the next: the native engine has its own queues.

[Note: Streams]
On a device with streams an op of ``h2d`` or ``d2h`` starts *on the stream*: its ``run`` is called on the host as soon as what
it waits for has been issued, and the stream does the waiting. What ``run`` does through the device, :meth:`Lanes.copy`,
:meth:`DeviceMemory.take` and :meth:`DeviceMemory.give` follows the stream's order. What ``run`` does on the host with the
*content* of host memory does not; it belongs on a host lane (``cpu``, ``disk_read``, ``disk_write``), which waits on the host.
The reverse holds too: ``compute`` is a stream, so what reads or gives up memory after compute waits for :meth:`Lanes.mark`.

[Note: Errors in lanes]
An op that raises makes its event raise, and whatever waits for that event: ops that depend on it do not run, and raise the
same. :meth:`Lanes.submit` itself raises none of this. :meth:`Lanes.drain` raises the first error since the last drain.
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


# When it was, in seconds of the package's clock, which is the engine's too; None as long as that is
# not known.
Moment = Callable[[], float | None]


def passed_at(op: Op) -> int:
    """How far the native tickets of an op have to be: READY where its result is in memory then, else DONE; 0 if they do not matter.

    A FETCH or an UPDATE has passed once the weights are there. The write-back that belongs to the UPDATE is the STORE, whose
    tickets are the UPDATE's. A FETCH of state opens an update, whose tickets wait for gradients: nothing may wait for them.
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
        """Whether it has passed; never waits. Raises what the op raised."""

    def wait(self) -> None:
        """Blocks the calling host thread until it has passed. Raises what the op raised."""


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
        """What the op waits for; only until it has run."""

    @property
    def submitted_s(self) -> float:
        """When it was submitted, in seconds of ``now_s``."""

    @property
    def error(self) -> BaseException | None:
        """What the op raised."""

    @property
    def tickets(self) -> tuple[Ticket, ...]:
        """The native tickets that ``run`` returned, where somebody observes the lanes."""

    def handed(self) -> None:
        """Blocks the calling host thread until ``run`` has returned. Raises what the op raised."""

    def settled(self) -> bool:
        """Whether it has ended or failed; never waits, and raises nothing of the op."""

    def times(self) -> tuple[float, float] | None:
        """When the op started and ended, in seconds of ``now_s``; ``None`` before its end, or where it is not known.

        Native tickets know more of what runs in the engine: the end is then when ``run`` returned. On streams times are known
        only of ops that were submitted while ``timed`` was set.
        """


class Device(Protocol):
    """A device that has memory of its own."""

    @property
    def device(self) -> torch.device:
        """Where parameters and activations live."""

    @property
    def partitioned(self) -> bool:
        """Whether memory for ops is set aside as the lanes are opened; else they share all of it with what torch allocates."""

    @property
    def memory_bytes(self) -> int:
        """What plans may use of its memory."""


class DeviceMemory(Protocol):
    """The memory of a device that ops take and give back: one run of addresses of fixed capacity. Thread-safe.

    First fit over address ranges; neighbours that are free are one. Under poison memory is filled with ``0xFF``, which is NaN in
    every floating dtype, when it is taken and when it is given back. On a device with streams both happen in the order of the
    stream that is current (see [Note: Streams]), and memory that another stream gave back is waited for by the taker's stream.
    """

    @property
    def capacity_bytes(self) -> int:
        """What it holds at most."""

    @property
    def used_bytes(self) -> int:
        """What is taken now, in whole units of 512 bytes."""

    @property
    def peak_bytes(self) -> int:
        """The most that was taken at any time."""

    def take(self, num_bytes: int, what: str) -> Tensor:
        """Takes memory: uint8, flat, aligned to 512 bytes.

        Args:
            num_bytes: Length of the tensor; at least 0.
            what: What it is for, for the error.

        Raises:
            DeviceMemoryError: There is no gap of that size.
        """

    def give(self, memory: Tensor) -> None:
        """Gives back what :meth:`take` returned."""


class Lanes(Protocol):
    """Runs ops, each lane in the order of submission. One thread at a time submits and computes; the rest is thread-safe.

    After :meth:`close`, and only then, nothing runs any more; it is to be called whatever happens.

    Attributes:
        device: Where parameters and activations live.
        device_type: The type of device that tensors there say.
        timed: Whether events know their times on streams too, where that costs something. May be set between two ops.
        counts: Whether what torch allocates on the device has to be reported (:meth:`allocated`).
        behind: Inside ``run``: native tickets of ops before, which the engine waits for and the lane has not waited for.
        observer: Told of every op as it is submitted.
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
            run: Does it, in the lane's thread, with the lane's stream current and without gradients; may return native tickets.
            after: Events of these lanes that the op waits for. An op that works on what compute made waits for a mark.

        Returns:
            The end of the op.

        Raises:
            HeteroError: The lanes are closed.
        """

    def mark(self) -> Event:
        """Compute has come this far: passes once all that compute was given so far is done."""

    def now(self, name: str = "") -> Moment:
        """The moment that compute has come to, for the trace; profilers of the device show it under ``name`` if there is one."""

    def compute_waits(self, events: Sequence[Event]) -> None:
        """What compute is given from now on comes after these events; blocks the host only as far as needed.

        Raises:
            BaseException: What an op raised whose event is among them.
        """

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Moves and converts ``source`` to ``target``, of the same shape; between host and device at the lane's bandwidth.

        Inside ``run`` it is part of the op. Both tensors are kept alive until it is done. Outside of any op it is done, with all
        that compute was given before, when the call returns.
        """

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Host memory of exactly this size: uint8, flat, page-locked where that speeds copies; freed with its last view."""

    def page_lock(self, memory: Tensor) -> None:
        """Page-locks host memory that exists, where that speeds copies; until :meth:`close`.

        The memory must stay mapped that long, and its pages must not be given back to the system.
        """

    def page_unlock(self, memory: Tensor) -> None:
        """Undoes :meth:`page_lock`, before the memory's pages may be given back; no copy of it is under way."""

    def catch_up(self) -> None:
        """Inside ``run``: the host waits until the lane has done what it was given, to work on the content of host memory."""

    def memory(self) -> DeviceMemory:
        """The device's memory."""

    def resize(self, num_bytes: int) -> None:
        """Sets other memory aside for ops, where it is set aside; nothing of it is taken, and the lanes are at rest.

        Raises:
            OutOfMemoryBudgetError: The device has not so much free.
        """

    def allocated(self, storage: torch.UntypedStorage) -> None:
        """A storage that torch has allocated on the device outlives its operator: it counts as used until it is freed.

        An emulated device counts what it is told; others have an allocator that does.

        Raises:
            DeviceMemoryError: It does not fit beside what is used.
        """

    def settle(self) -> None:
        """The host waits until compute has done what it was given, where compute is not the host's."""

    def peak_bytes(self) -> int:
        """The most of the device's memory that ops and torch have used at any time."""

    def allocated_bytes(self) -> int:
        """What torch has allocated on the device beside the lanes, where it counts that; else 0."""

    def take_peak_bytes(self) -> int:
        """The most that torch has had allocated beside the lanes since the last call; 0 where it does not count that."""

    def spare_bytes(self) -> int | None:
        """What torch can still be given on the device, however it is cut; ``None`` where ops and torch share its memory."""

    def drain(self) -> None:
        """Waits for all that was submitted; compute is at rest until it next waits or marks.

        Raises:
            BaseException: The first error since the last drain.
        """

    def close(self) -> None:
        """Ends the lanes: what has not started never will, and raises so; idempotent, waits a bounded time.

        Raises:
            HeteroError: An op did not return in time; names it. Its thread is a daemon.
        """
