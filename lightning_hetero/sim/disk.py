"""The disk's queue, as in the native engine: the next transfers for the device, and the staging.

[Note: Depth]
The device does transfers in the order in which it gets them; a duplex device does both directions
at once. It has at most ``DEPTH`` transfers at a time, reads and writes together. So even an urgent
transfer waits for the transfers that the device has already, and urgent writes make reads wait even
if the device could do both. Transfers that the device does not have yet are ordered by rank. The
device never has all transfers of a large job at once, so a more urgent job overtakes it.

[Note: Staging]
Updates without gradients read ahead into the staging that is left, except a reserve. An update with
gradients takes buffers back from them, the latest first, and the content of these is read again. It
needs at least three buffers.

Source: native/src/engine_schedule.cc (``Rank``, ``Flush``, ``AcquireStaging``, ``TakeBack``).
"""

from __future__ import annotations

from heapq import heappop, heappush

from lightning_hetero.sim.program import Program, Role, Server

DEPTH = 8
"""Transfers with the device (``EngineOptions.queue_depth``)."""

_RESERVED_BUFFERS = 2  # staging that updates without gradients do not use (native/src/engine.h, kPrefetchReserve)
_LEAST_BUFFERS = 3  # one being read, one computed, one written (native/src/engine_staging.h, kMinBuffers)
_LARGE = DEPTH / 2  # transfers of a large job
_READ = int(Role.READ)
_OPENED = 10**9  # rank of reads without gradients: after all others

Order = tuple[int, int]  # rank, number of a job


class DiskQueue:
    """Chooses the disk's jobs.

    Args:
        program: The jobs.
        staging_bytes: Host memory through which state on disk streams.

    Attributes:
        handed: By direction, the jobs of the device in its order.
        dropped: Completed reads that must be repeated, since the last :meth:`hand_over`.
    """

    def __init__(self, program: Program, *, staging_bytes: int) -> None:
        self.handed: dict[int, list[int]] = {int(Server.DISK): [], int(Server.DISK_WRITE): []}
        self.dropped: list[int] = []
        self._program, self._jobs, self._size = program, program.jobs, len(program.jobs)
        self._streams = len(program.piece_bytes)
        self._order: dict[int, Order] = {}  # of the device's jobs
        self._in_flight = 0.0  # transfers
        self._transfers: list[Order] = []  # all but the reads of updates
        self._reads: list[Order] = []  # of updates with gradients
        self._opened: list[Order] = []  # of updates without gradients
        self._ahead: dict[int, list[int]] = {}  # stream → its reads in it
        self._loaded: dict[int, list[int]] = {}  # stream without gradients → its reads that have ended
        self._armed: set[int] = set()
        # Staging.
        self._room_bytes = staging_bytes
        self._opened_bytes = staging_bytes - _RESERVED_BUFFERS * program.buffer_bytes
        self._held_bytes = 0.0
        self._is_full = False  # the most urgent read with gradients found no staging, and none was freed since

    # ---- what happens ----------------------------------------------------------------------------

    def push(self, number: int) -> None:
        """Everything that a transfer waits for has ended."""
        job = self._jobs[number % self._size]
        if job.role != _READ:
            heappush(self._transfers, (job.rank, number))
            return
        stream = self._stream(number)
        if stream in self._armed:
            heappush(self._reads, (job.rank, number))
        else:
            heappush(self._opened, (_OPENED, number))
            self._ahead.setdefault(stream, []).append(number)

    def ended(self, number: int) -> None:
        """The device has completed a job."""
        if self._order[number][0] == _OPENED:
            self._loaded.setdefault(self._stream(number), []).append(number)
            self._is_full = False  # it may be dropped
        self._leave(number)

    def arm(self, number: int) -> None:
        """An update has its gradients: its past, current and future reads become urgent."""
        stream, jobs = self._stream(number), self._jobs
        self._armed.add(stream)
        self._loaded.pop(stream, None)
        self._is_full = False
        for other, order in self._order.items():
            if order[0] == _OPENED and self._stream(other) == stream:
                self._order[other] = (jobs[other % self._size].rank, other)
        for other in self._ahead.pop(stream, ()):
            heappush(self._reads, (jobs[other % self._size].rank, other))

    def free(self, number: int) -> None:
        """A piece of an update is written, or must be read again: its staging is free."""
        self._held_bytes -= self._piece(number)
        self._is_full = False

    def hand_over(self) -> None:
        """Hands the device the most urgent jobs, as many as it takes."""
        self.dropped.clear()
        while (heap := self._next()) is not None:
            order = heap[0]
            if self._in_flight >= DEPTH and not self._recall(order):
                return
            heappop(heap)
            self._hand_over(order)

    # ---- details ---------------------------------------------------------------------------------

    def _next(self) -> list[Order] | None:
        """The heap with the most urgent job that may be handed over."""
        reads, transfers, opened = self._reads, self._transfers, self._opened
        if reads and not self._is_full and (not transfers or reads[0] < transfers[0]):
            if self._fits(reads[0][1], armed=True):
                return reads
            self._is_full = True
        if transfers:
            return transfers
        while opened and self._stream(opened[0][1]) in self._armed:
            heappop(opened)  # it moved to the others
        return opened if opened and self._fits(opened[0][1], armed=False) else None

    def _hand_over(self, order: Order) -> None:
        number = order[1]
        job = self._jobs[number % self._size]
        handed = self.handed[job.server]
        for other in [o for o in handed if self._is_large(o) and self._order[o] > order]:
            self._take_back(other)
        handed.append(number)
        self._order[number] = order
        self._in_flight += job.transfers
        if order[0] == _OPENED:
            self._ahead[self._stream(number)].remove(number)
        if job.role == _READ:
            self._held_bytes += self._piece(number)

    def _recall(self, order: Order) -> bool:
        """Takes a less urgent large job back from the device.

        Returns whether the device has room now.
        """
        large = max(((o, number) for number, o in self._order.items() if self._is_large(number)), default=None)
        if large is None or large[0] <= order:
            return False
        self._take_back(large[1])
        return self._in_flight < DEPTH

    def _take_back(self, number: int) -> None:
        self._leave(number)
        if self._jobs[number % self._size].role == _READ:
            self.free(number)  # it continues later; its staging must not stay reserved meanwhile
        self.push(number)

    def _leave(self, number: int) -> None:
        job = self._jobs[number % self._size]
        self.handed[job.server].remove(number)
        del self._order[number]
        self._in_flight -= job.transfers

    def _is_large(self, number: int) -> bool:
        return self._jobs[number % self._size].transfers >= _LARGE

    def _fits(self, number: int, *, armed: bool) -> bool:
        """Whether there is staging for a piece; see [Note: Staging]."""
        piece = self._piece(number)
        if not armed:
            return self._held_bytes + piece <= self._opened_bytes
        room = max(self._room_bytes, _LEAST_BUFFERS * piece)
        while self._held_bytes + piece > room and self._drop():
            pass
        return self._held_bytes + piece <= room

    def _drop(self) -> bool:
        """Drops the last prefetched piece of the last update without gradients."""
        coming = {self._stream(number) for number, order in self._order.items() if order[0] == _OPENED}
        stream = max((s for s, loaded in self._loaded.items() if loaded and s not in coming), default=None)
        if stream is None:
            return False
        number = self._loaded[stream].pop()
        self.free(number)
        self.dropped.append(number)
        self.push(number)
        return True

    def _stream(self, number: int) -> int:
        """A number for a job's update, unique in every step."""
        return number // self._size * self._streams + self._jobs[number % self._size].stream

    def _piece(self, number: int) -> float:
        return self._program.piece_bytes[self._jobs[number % self._size].stream]
