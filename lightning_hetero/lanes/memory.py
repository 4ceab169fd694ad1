"""One run of device memory that ops take from and give back to: first fit over addresses."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_hetero.errors import DeviceMemoryError, HeteroError
from lightning_hetero.lanes.backends import is_library_out_of_memory
from lightning_hetero.units import format_bytes, round_up

ALIGNMENT_BYTES = 512  # torch's own allocators align to as much
POISON = 0xFF  # NaN in every floating dtype


@dataclass(slots=True)
class _Gap:
    """Free addresses, and by stream when it gave some back: (order, moment to wait for)."""

    start: int
    end: int
    given: dict[Hashable, tuple[int, object]] = field(default_factory=dict)


class DeviceArena:
    """The memory of a device that ops take and give back: one run of addresses. Thread-safe.

    First fit over address ranges; free neighbours are merged. Under poison, memory is filled with
    ``0xFF``, which is NaN in every floating dtype, when it is taken and when it is given back. On a
    device with streams both happen in the order of the current stream (see [Note: Streams]): a
    subclass marks the moment that memory is given back (:meth:`_given`), and the stream of the next
    taker waits for it (:meth:`_wait`).
    """

    def __init__(self, capacity_bytes: int, device: torch.device, *, poison: bool) -> None:
        assert capacity_bytes >= 0, "a capacity is not negative"
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0  # bytes that are taken now, in units of 512
        self.peak_bytes = 0  # the most bytes that were taken at any time
        self._poison = poison
        buffer = torch.empty(capacity_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
        self._buffer = buffer[-buffer.data_ptr() % ALIGNMENT_BYTES :][:capacity_bytes]
        self._gaps = [_Gap(0, capacity_bytes)] if capacity_bytes else []
        self._taken: dict[int, int] = {}  # address -> end, both relative to the buffer
        self._order = 0
        self._lock = threading.Lock()
        self._reserved_bytes = 0
        # A deque, because the garbage collector may free memory in a thread that holds the lock.
        self._unreserved: deque[int] = deque()

    def take(self, num_bytes: int, what: str) -> Tensor:
        """Takes memory: uint8, flat, aligned to 512 bytes.

        Raises:
            DeviceMemoryError: There is no gap of that size. It says for ``what``.
        """
        if not num_bytes:
            return self._buffer[:0]
        size = round_up(num_bytes, ALIGNMENT_BYTES)
        with self._lock:
            gap = next((g for g in self._gaps if g.end - g.start >= size), None)
            if gap is None or size > self._free_bytes():
                raise self._error(num_bytes, what, in_one_piece=True)
            self._wait(gap.given)
            # `.data` has a version counter of its own; a view would share that of the buffer.
            memory = self._buffer[gap.start : gap.start + num_bytes].data
            self._taken[gap.start] = gap.start + size
            gap.start += size
            if gap.start == gap.end:
                self._gaps.remove(gap)
            self.used_bytes += size
            self._note_peak()
        if self._poison:
            memory.fill_(POISON)
        return memory

    def reserve(self, num_bytes: int, what: str) -> None:
        """Counts memory that something else uses, at no address of its own.

        Raises:
            DeviceMemoryError: There is less free.
        """
        with self._lock:
            if num_bytes > self._free_bytes():
                raise self._error(num_bytes, what, in_one_piece=False)
            self._reserved_bytes += num_bytes
            self._note_peak()

    def unreserve(self, num_bytes: int) -> None:
        """Undoes :meth:`reserve`; may be called from a destructor."""
        self._unreserved.append(num_bytes)

    def _note_peak(self) -> None:  # right after _free_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes + self._reserved_bytes)

    def _free_bytes(self) -> int:
        while self._unreserved:
            self._reserved_bytes -= self._unreserved.popleft()
        return self.capacity_bytes - self.used_bytes - self._reserved_bytes

    def give(self, memory: Tensor) -> None:
        """Gives back memory of :meth:`take`."""
        if not memory.numel():
            return
        start = memory.data_ptr() - self._buffer.data_ptr()
        with self._lock:
            end = self._taken.pop(start, None)
        assert end is not None, "this memory was not taken here, or was given back before"
        if self._poison:
            self._buffer[start:end].fill_(POISON)
        with self._lock:
            self.used_bytes -= end - start
            self._order += 1
            self._insert(_Gap(start, end, {stream: (self._order, moment) for stream, moment in self._given()}))

    def _insert(self, gap: _Gap) -> None:
        place = bisect_left(self._gaps, gap.start, key=lambda g: g.start)
        if place < len(self._gaps) and self._gaps[place].start == gap.end:
            gap = _merged(gap, self._gaps.pop(place))
        if place and self._gaps[place - 1].end == gap.start:
            place -= 1
            gap = _merged(self._gaps.pop(place), gap)
        self._gaps.insert(place, gap)

    def _given(self) -> Iterable[tuple[Hashable, object]]:
        """The stream that gives memory back now, and the moment; empty without streams."""
        return ()

    def _wait(self, given: dict[Hashable, tuple[int, object]]) -> None:
        """The taker comes after these moments."""

    def _error(self, num_bytes: int, what: str, *, in_one_piece: bool) -> DeviceMemoryError:
        free = self._free_bytes()
        # Reserved bytes have no addresses, so a gap may seem larger than the free bytes.
        largest = min(free, max((g.end - g.start for g in self._gaps), default=0))
        gap = f", the largest gap is {format_bytes(largest)}" if in_one_piece else ""
        return DeviceMemoryError(
            f"{what} needs {format_bytes(num_bytes)} of device memory; {format_bytes(free)} of {format_bytes(self.capacity_bytes)} "
            f"are free{gap}.",
            needed_bytes=num_bytes,
            free_bytes=free,
            largest_gap_bytes=largest,
            capacity_bytes=self.capacity_bytes,
        )


def _merged(low: _Gap, high: _Gap) -> _Gap:
    """One gap of two neighbours. Of each stream the later moment counts."""
    given = dict(low.given)
    for stream, moment in high.given.items():
        given[stream] = max(moment, given.get(stream, moment), key=lambda m: m[0])
    return _Gap(low.start, high.end, given)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's memory ended: in an arena, in torch's allocator, or in a library.

    Libraries allocate without torch, and raise errors of their own.
    """
    if isinstance(error, DeviceMemoryError | torch.OutOfMemoryError):
        return True
    # An error of ours may quote it, for a step that does not begin again.
    return isinstance(error, RuntimeError) and not isinstance(error, HeteroError) and is_library_out_of_memory(str(error))
