"""The contract of lanes: what the runtime calls, whatever runs the ops. See [Note: Lanes]."""

# ruff: noqa: B027  # many devices have nothing to do in these methods

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lightning_hetero._native import Ticket
from lightning_hetero.clock import now_s
from lightning_hetero.ir.schedule import Op
from lightning_hetero.lanes.base import Event, Moment, OpEvent
from lightning_hetero.lanes.memory import POISON, DeviceArena
from lightning_hetero.lanes.op import Failures
from lightning_hetero.store.raw_memory import page_aligned


class Lanes(ABC):
    """Runs ops, each lane in the order of submission: see [Note: Lanes].

    A kind of lanes says how ops run and where compute is. What only some devices have does nothing
    here.

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

    # ---- ops -------------------------------------------------------------------------------------

    @abstractmethod
    def submit(self, op: Op, run: Callable[[], Iterable[Ticket]], after: Sequence[Event]) -> OpEvent:
        """Queues an op on ``op.lane``; see [Note: Lanes].

        ``run`` does it, in the lane's thread, with the lane's stream current and without gradients;
        it may return native tickets. The op waits for the events ``after``: if it works on results
        of compute, for a mark. Returns the end of the op.

        Raises:
            HeteroError: The lanes are closed.
        """

    @abstractmethod
    def mark(self) -> Event:
        """Passes once compute has done everything that it was given so far."""

    @abstractmethod
    def now(self, name: str = "") -> Moment:
        """The moment that compute has come to, for the trace; device profilers show the name."""

    @abstractmethod
    def compute_waits(self, events: Sequence[Event]) -> None:
        """Compute waits for these events; blocks the host only as far as needed.

        Raises:
            BaseException: The error of an op whose event is among them.
        """

    # ---- memory ----------------------------------------------------------------------------------

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor) -> None:
        """Moves and converts ``source`` to ``target``, of the same shape, at the lane's bandwidth.

        Inside ``run`` it is part of the op, and both tensors live until it is done. Outside of any
        op, it is done when the call returns, and so is everything that compute was given before.
        """

    @abstractmethod
    def copies(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copies many tensors by one call, as :meth:`copy` does."""

    @abstractmethod
    def host_buffer(self, num_bytes: int) -> Tensor:
        """Host memory of this size: uint8, flat, page-locked if that speeds copies.

        It begins with a page, and is freed with its last view.
        """

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

    @abstractmethod
    def peak_bytes(self) -> int:
        """The most device memory that ops and torch have used at any time."""

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

    @abstractmethod
    def drain(self) -> None:
        """Waits for all ops; compute is at rest until it next waits or marks.

        Raises:
            BaseException: The first error since the last drain.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the lanes: ops that have not started fail. Idempotent; waits a bounded time.

        Raises:
            HeteroError: An op did not return in time; names it. Its thread is a daemon.
        """


def host_moment(name: str = "") -> Moment:
    """Now, where compute is the calling thread."""
    at_s = now_s()
    return lambda: at_s


def host_memory(num_bytes: int, *, poison: bool) -> Tensor:
    """Host memory that begins with a page: uint8, flat."""
    buffer = page_aligned(num_bytes)
    return buffer.fill_(POISON) if poison else buffer
