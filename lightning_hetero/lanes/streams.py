"""Lanes of a device with streams, and events.

[Note: Streams and the host]
``h2d``, ``d2h`` and ``peer`` have a stream and a thread each. The thread waits on the host until
the events before an op have been *issued*, and lets its stream wait for them. Then it calls
``run``, which gives work to the stream, and records the op's end there. Compute's stream is the
calling thread's current one. Nothing here synchronizes the device. Only host lanes, which use the
results of copies, wait for events on the host, asleep where the backend has such a wait, and so do
exchanges between devices that go through the host.

[Note: Lifetimes on streams]
The source and the target of a copy live until the stream has passed the op. Device memory of
torch's allocator belongs to compute's stream, so it may be freed as soon as compute waits for the
op, and the schedule counts on that; ``record_stream`` would free it at an unknown time. Other
memory is freed when the lane's thread sees that the op has ended.

[Note: Times on streams]
The driver gives the time between two events as milliseconds in fp32: 8 ms apart after a day. So
times count from an origin that is at most minutes old. The first origin is an event whose time on
the host's clock is known, because the host waited for it. Later ones are events that compute's
stream has passed since.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import Tensor

from lightning_hetero._native import Ticket
from lightning_hetero.clock import now_s
from lightning_hetero.errors import OutOfMemoryBudgetError
from lightning_hetero.ir.schedule import Lane, Op
from lightning_hetero.lanes.backends import BACKENDS, Backend
from lightning_hetero.lanes.base import Event, Moment
from lightning_hetero.lanes.memory import POISON, DeviceArena
from lightning_hetero.lanes.op import QueuedOp
from lightning_hetero.lanes.pinned import PageLocker
from lightning_hetero.lanes.queue import QueuedLanes
from lightning_hetero.lanes.stream_device import spare_bytes
from lightning_hetero.store.capacity import available_memory_bytes
from lightning_hetero.store.partition import is_dense
from lightning_hetero.units import MIB, format_bytes
from lightning_hetero.untyped import Value

Origin = tuple[torch.Event, float]  # a timed event that has passed, and when, in seconds of ``now_s``

_ORIGIN_S = 60.0  # then the resolution is 4 microseconds; more often, roundings would add up
_TIDY_S = 0.005  # how late an idle lane may free the memory of an op that has ended


class StreamLanes(QueuedLanes):
    """See [Note: Streams and the host] and [Note: Lifetimes on streams].

    Takes its memory as it is created, on the current stream, and none later.

    Args:
        device: The device; without a number it is the current one.
        memory_bytes: Device memory for ops.
        poison: Fill memory with NaN when it is taken and when it is given back (tests).
        staging_bytes: Device memory for each direction, where the device converts between dtypes.
        host_room: Returns the bytes of host memory that are free for this process, within its
            control groups.
        backend: What the device's backend has of its own. Default: the row of its table.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        memory_bytes: int,
        poison: bool = False,
        staging_bytes: int = 16 * MIB,
        host_room: Callable[[], int] = available_memory_bytes,
        backend: Backend | None = None,
    ) -> None:
        device = torch.device(device)
        if device.type in BACKENDS and device.index is None:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        self._backend = BACKENDS[device.type] if backend is None else backend
        self._timed = False
        self._peak_bytes = 0
        self._origin: Origin | None = None  # of times on streams
        self._next_origin: torch.Event | None = None  # the next one, once the stream has passed it
        _forget_peak(device)
        super().__init__(device, _set_aside(memory_bytes, device, poison=poison, backend=self._backend), poison=poison)
        self._streams = {lane: self._backend.new_stream(device) for lane in (Lane.H2D, Lane.D2H, Lane.PEER)}
        self._staging = {lane: torch.empty(staging_bytes, dtype=torch.uint8, device=device) for lane in (Lane.H2D, Lane.D2H)}
        self._scratch = torch.empty(1, dtype=torch.uint8, device=device)
        self._holding: dict[Lane, deque[QueuedOp]] = {lane: deque() for lane in self._streams}
        self._locker = PageLocker(self._backend, self._forget_error, host_room)
        self._profiled = self._backend.profiler in os.environ
        self._follow_allocator()

    def _follow_allocator(self) -> None:
        allocated = self._record(self._compute_stream())
        for stream in self._streams.values():
            stream.wait_event(allocated)  # compute -> copies: compute may still use this memory

    @property
    def timed(self) -> bool:
        """Whether ops that are submitted from now on know their times on streams."""
        return self._timed

    @timed.setter
    def timed(self, timed: bool) -> None:
        if timed:
            self._current_origin()
        self._timed = timed

    def _current_origin(self) -> Origin:
        """The origin of times: [Note: Times on streams]. Compute's thread makes the first one."""
        if self._origin is None:
            event = self._record(self._compute_stream(), timed=True)
            event.synchronize()
            self._origin = event, now_s()
        return self._origin

    def _renew_origin(self, event: torch.Event) -> None:
        """Maybe takes a timed event of compute's stream for the next origin."""
        origin = self._current_origin()
        if self._next_origin is None and now_s() - origin[1] > _ORIGIN_S:
            self._next_origin = event
        elif self._next_origin is not None and self._next_origin.query():
            self._origin, self._next_origin = (self._next_origin, _at_s(origin, self._next_origin)), None

    # ---- waits -----------------------------------------------------------------------------------

    def mark(self) -> Event:
        """Where compute's stream is."""
        return _Mark(self._record(self._compute_stream()))

    def now(self, name: str = "") -> Moment:
        """The moment that compute's stream will have come to, once it has."""
        if name:
            self._backend.mark(name)
        origin = self._current_origin()
        event = self._record(self._compute_stream(), timed=True)
        self._renew_origin(event)
        return lambda: _at_s(origin, event) if event.query() else None

    def compute_waits(self, events: Sequence[Event]) -> None:
        """Compute's stream waits; the host waits until the events have been issued."""
        stream = self._compute_stream()
        for event in events:
            self._order(stream, event)
            if isinstance(event, QueuedOp):
                # d2h -> compute: torch may reuse the device memory from here on
                event.keep = [t for t in event.keep if t.is_cpu]

    def _order(self, stream: torch.Stream, event: Event) -> None:
        """The stream waits for the event before all later work."""
        if isinstance(event, QueuedOp):
            event.issued()
        if not isinstance(event, QueuedOp | _Mark):
            event.wait()
        elif event.moment is not None:
            stream.wait_event(event.moment)

    def _compute_stream(self) -> torch.Stream:
        return self._backend.current_stream(self.device)

    def _record(self, stream: torch.Stream, *, timed: bool = False) -> torch.Event:
        event = self._backend.event(timed=timed)
        event.record(stream)
        return event

    # ---- ops -------------------------------------------------------------------------------------

    def _thread_begins(self) -> None:
        # Else page-locking, and what waits for events, would make a context on the first device.
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)

    def _work(self, queued: QueuedOp) -> Iterable[Ticket]:
        lane = queued.op.lane
        if lane is Lane.COMPUTE:
            return self._on_stream(queued, self._compute_stream())
        if lane in self._streams:
            with self._backend.on(self._streams[lane]):
                return self._on_stream(queued, self._streams[lane])
        for event in queued.after:
            event.wait()
        with self._named(queued.op):
            return self._run(queued)

    def _on_stream(self, queued: QueuedOp, stream: torch.Stream) -> Iterable[Ticket]:
        for event in queued.after:
            self._order(stream, event)
        timed = self._timed
        start = self._record(stream, timed=True) if timed else None
        try:
            with self._named(queued.op):
                return self._run(queued)
        finally:  # an op that fails may have given work to the stream before
            queued.moment = self._record(stream, timed=timed)
            if queued.keep:
                self._holding[queued.op.lane].append(queued)
            if start is not None:
                queued.stream_times = partial(_times, self._current_origin(), start, queued.moment)

    @contextmanager
    def _named(self, op: Op) -> Iterator[None]:
        if not (self._profiled or self._timed):
            yield
            return
        self._backend.range_begins(f"{op.kind} {op.payload} {op.block}")
        try:
            yield
        finally:
            self._backend.range_ends()

    def _tidy(self, lane: Lane) -> float | None:
        holding = self._holding.get(lane)
        if holding is None:
            return None
        while holding and _passed(holding[0]):
            holding.popleft().keep.clear()
        return _TIDY_S if holding else None

    # ---- memory ----------------------------------------------------------------------------------

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Moves and converts, on the current stream; the device converts."""
        self.copies((target,), (source,))

    def copies(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copies many tensors by one call, as :meth:`copy` does."""
        queued = self._current()
        staging = None if queued is None else self._staging.get(queued.op.lane)
        with torch.no_grad():
            if queued is not None and staging is not None:
                queued.keep += (*targets, *sources)
            for target, source in zip(targets, sources, strict=True):
                up = source.is_cpu if queued is None or staging is None else queued.op.lane is Lane.H2D
                self._move(target, source, staging, up=up)
            if staging is None:
                self.catch_up()

    def _move(self, target: Tensor, source: Tensor, staging: Tensor | None, *, up: bool) -> None:
        """Bytes cross the link as the host has them: in its dtype and its order of elements."""
        if target.dtype is source.dtype and target.is_contiguous() and source.is_contiguous():
            target.copy_(source, non_blocking=True)
            return
        host = source if up else target
        if target.stride() != source.stride() or not is_dense(host):
            staged = torch.empty_like(host, device=self.device)
            staged.copy_(source, non_blocking=True)
            target.copy_(staged, non_blocking=True)
        elif target.dtype is source.dtype or target.device == source.device != torch.device("cpu"):
            target.copy_(source, non_blocking=True)
        else:
            if staging is None:
                staging = torch.empty_like(self._staging[Lane.H2D])
            piece = staging[: staging.numel() // host.itemsize * host.itemsize].view(host.dtype)
            to, from_ = (t.as_strided((t.numel(),), (1,)) for t in (target, source))
            for start in range(0, to.numel(), piece.numel()):
                part = slice(start, start + piece.numel())
                staged = piece[: to[part].numel()]
                staged.copy_(from_[part], non_blocking=True)
                to[part].copy_(staged, non_blocking=True)

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Host memory, page-locked if the machine allows it."""
        buffer = self._locker.buffer(num_bytes)
        return buffer.fill_(POISON) if self._poison else buffer

    def page_lock(self, memory: Tensor) -> None:
        """Page-locks host memory that exists."""
        self._locker.lock(memory)

    def page_unlock(self, memory: Tensor) -> None:
        """Undoes :meth:`page_lock`."""
        self._locker.unlock(memory)

    def catch_up(self) -> None:
        """The host waits for the current stream."""
        self._record(self._compute_stream()).synchronize()

    def resize(self, num_bytes: int) -> None:
        """Gives the memory for ops back to the device, and takes another amount."""
        assert not self._memory.used_bytes, "all memory has been given back"
        if num_bytes == self._memory.capacity_bytes:
            return
        self._peak_bytes = self.peak_bytes()
        _forget_peak(self.device)
        self._rest()  # an error may have left copies that nothing has waited for
        self._memory = _set_aside(0, self.device, poison=self._poison, backend=self._backend)  # frees the old memory first
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()
        self._memory = _set_aside(num_bytes, self.device, poison=self._poison, backend=self._backend)
        self._follow_allocator()

    def peak_bytes(self) -> int:
        """The peak of torch's allocator since the lanes were opened, the memory for ops included.

        Allocations while nothing is set aside, or after :meth:`close`, belong to others and do not
        count.
        """
        if not self._memory.capacity_bytes or self._failures.closing.is_set():
            return self._peak_bytes
        own = self._memory.peak_bytes if self.device.type == "cpu" else torch.accelerator.max_memory_allocated(self.device)
        return max(self._peak_bytes, own)

    def allocator_retries(self) -> int:
        """How often torch's allocator has emptied its cache because an allocation failed."""
        return 0 if self.device.type == "cpu" else torch.accelerator.memory_stats(self.device).get("num_alloc_retries", 0)

    def allocated_bytes(self) -> int:
        """What torch has allocated beside the lanes."""
        if self.device.type == "cpu":
            return 0
        return max(0, torch.accelerator.memory_allocated(self.device) - self._own_bytes)

    def take_peak_bytes(self) -> int:
        """The most that torch has had allocated beside the lanes since the last call."""
        if self.device.type == "cpu":
            return 0
        self._peak_bytes = self.peak_bytes()  # the counter starts anew
        found = max(0, torch.accelerator.max_memory_allocated(self.device) - self._own_bytes)
        _forget_peak(self.device)
        return found

    @property
    def _own_bytes(self) -> int:
        return self._memory.capacity_bytes + sum(staging.numel() for staging in self._staging.values())

    def spare_bytes(self) -> int | None:
        """What torch's allocator can still give out; ``None`` for a stand-in."""
        return None if self.device.type == "cpu" else spare_bytes(self.device, self._backend)

    def _forget_error(self) -> None:
        # Torch checks the driver's last error after every launch, and has no call to clear it.
        with suppress(RuntimeError):
            self._scratch.fill_(0)

    # ---- the end ---------------------------------------------------------------------------------

    def drain(self) -> None:
        """Waits for all ops, and for the copies that failed ones have given to their streams."""
        try:
            super().drain()
        except BaseException:
            self._rest()
            raise

    def _rest(self) -> None:
        with suppress(RuntimeError):  # a device that has failed copies nothing more
            for stream in self._streams.values():
                stream.synchronize()

    def close(self) -> None:
        """Ends the lanes; waits for the copies that the streams were given."""
        self._peak_bytes = self.peak_bytes()
        super().close()
        self._rest()
        for holding in self._holding.values():
            while holding:
                holding.popleft().keep.clear()
        self._locker.close()


class _Mark:
    """A moment of compute's stream."""

    def __init__(self, moment: torch.Event) -> None:
        self.moment = moment

    def done(self) -> bool:
        return bool(self.moment.query())

    def wait(self) -> None:
        self.moment.synchronize()


class _StreamArena(DeviceArena):
    """Memory that is taken and given back in the order of the current stream."""

    def __init__(self, capacity_bytes: int, device: torch.device, *, poison: bool, backend: Backend) -> None:
        super().__init__(capacity_bytes, device, poison=poison)
        self._device, self._backend = device, backend

    def _given(self) -> Iterable[tuple[Hashable, object]]:
        stream, moment = self._backend.current_stream(self._device), self._backend.event(timed=False)
        moment.record(stream)
        return ((stream, moment),)

    def _wait(self, given: dict[Hashable, tuple[int, object]]) -> None:
        stream: Value = self._backend.current_stream(self._device)
        for other, (_, moment) in given.items():
            if other != stream:
                stream.wait_event(moment)


def _times(origin: Origin, start: torch.Event, end: torch.Event) -> tuple[float, float]:
    return _at_s(origin, start), _at_s(origin, end)


def _at_s(origin: Origin, event: torch.Event) -> float:
    """When a stream passed a timed event, in seconds of ``now_s``."""
    return origin[1] + origin[0].elapsed_time(event) / 1e3


def _forget_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def _set_aside(num_bytes: int, device: torch.device, *, poison: bool, backend: Backend) -> _StreamArena:
    try:
        return _StreamArena(num_bytes, device, poison=poison, backend=backend)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryBudgetError(
            f"{format_bytes(num_bytes)} of device memory are to be set aside for weights and optimizer state, and the device has "
            f"not so much in one piece: {error} Lower device_memory, or end what else uses the device.",
            num_bytes,
            "device",
        ) from None


def _passed(queued: QueuedOp) -> bool:
    try:
        return queued.moment is None or queued.moment.query()
    except RuntimeError:
        return True  # a device that has failed copies nothing more; waiting for the op raises
