"""The disk's queue, as the native engine keeps it: what is handed to the device next, and what may be staged.

[Note: Depth]
The device works on what it has been handed in that order, one direction beside the other where it is duplex. At most ``DEPTH``
transfers are with it, reads and writes together. So a transfer that is handed over late waits for those before it however urgent
it is, and writes that are more urgent than reads keep reads waiting even where the device could do both. Whatever has not been
handed over is ordered by rank. A job of many transfers is never with the device as a whole, so something more urgent overtakes it.

[Note: Staging]
Updates without gradients read ahead into what staging is left, but for a reserve. One with gradients takes buffers back from them,
the latest first, and what was in those is read again. It works with three buffers if it has to.

Source: native/src/engine_schedule.cc (``Rank``, ``Flush``, ``AcquireStaging``, ``TakeBack``).
"""

from __future__ import annotations

from heapq import heappop, heappush

from lightning_hetero.sim.program import DEPTH, Program, Role, Server

_RESERVED_BUFFERS = 2  # staging that updates without gradients leave free (native/src/engine.h, kPrefetchReserve)
_LEAST_BUFFERS = 3  # one being read, one computed, one written (native/src/engine_staging.h, kMinBuffers)
_LARGE = DEPTH / 2  # transfers of a job that is not with the device as a whole
_READ = int(Role.READ)
_OPENED = 10**9  # rank of what waits for gradients: after all others

Order = tuple[int, int]  # rank, job


class DiskQueue:
    """Decides what the disk does.

    Args:
        program: The jobs.
        staging_bytes: Host memory through which state on disk streams.

    Attributes:
        handed: By direction, the jobs with the device, the one it works on first.
        dropped: Reads that had ended and have to be done again, since :meth:`hand_over` was called last.
    """

    def __init__(self, program: Program, *, staging_bytes: int) -> None:
        self.handed: dict[int, list[int]] = {int(Server.DISK): [], int(Server.DISK_WRITE): []}
        self.dropped: list[int] = []
        self._program, self._size = program, len(program.source)
        self._streams = len(program.piece_bytes)
        self._order: dict[int, Order] = {}  # of the jobs with the device
        self._in_flight = 0.0  # transfers
        self._transfers: list[Order] = []  # all but the reads of updates
        self._reads: list[Order] = []  # of updates that have their gradients
        self._opened: list[Order] = []  # of those that have not
        self._ahead: dict[int, list[int]] = {}  # stream → its reads in there
        self._loaded: dict[int, list[int]] = {}  # stream without gradients → its reads that have ended
        self._armed: set[int] = set()
        # Staging.
        self._room_bytes = staging_bytes
        self._opened_bytes = staging_bytes - _RESERVED_BUFFERS * program.buffer_bytes
        self._staged: set[int] = set()  # reads that have their staging
        self._held_bytes = 0.0

    # ---- what happens -----------------------------------------------------------------------------------------------------

    def push(self, job: int) -> None:
        """Everything that a transfer waits for has ended."""
        index = job % self._size
        if self._program.role[index] != _READ:
            heappush(self._transfers, (self._program.rank[index], job))
            return
        stream = self._stream(job, index)
        if stream in self._armed:
            heappush(self._reads, (self._program.rank[index], job))
        else:
            heappush(self._opened, (_OPENED, job))
            self._ahead.setdefault(stream, []).append(job)

    def ended(self, job: int) -> None:
        """The device has done a job."""
        index = job % self._size
        if self._order[job][0] == _OPENED:
            self._loaded.setdefault(self._stream(job, index), []).append(job)
        self.handed[self._program.server[index]].remove(job)
        del self._order[job]
        self._in_flight -= self._program.transfers[index]

    def arm(self, job: int) -> None:
        """An update has its gradients: what it has read, reads and has yet to read becomes urgent."""
        stream, rank = self._stream(job, job % self._size), self._program.rank
        self._armed.add(stream)
        for other in self._order:
            if self._program.role[other % self._size] == _READ and self._stream(other, other % self._size) == stream:
                self._order[other] = (rank[other % self._size], other)
        self._loaded.pop(stream, None)
        for other in self._ahead.pop(stream, ()):
            heappush(self._reads, (rank[other % self._size], other))

    def free(self, job: int) -> None:
        """A piece of an update is written: its staging is free."""
        self._held_bytes -= self._piece(job)

    def hand_over(self) -> None:
        """Hands the device the most urgent jobs, as many as it takes."""
        self.dropped.clear()
        while (heap := self._next()) is not None:
            order = heap[0]
            if self._in_flight >= DEPTH and not self._recall(order):
                return
            heappop(heap)
            self._hand_over(order)

    # ---- details ----------------------------------------------------------------------------------------------------------

    def _next(self) -> list[Order] | None:
        """The heap with the most urgent job that may be handed over."""
        reads, transfers, opened = self._reads, self._transfers, self._opened
        if reads and (not transfers or reads[0] < transfers[0]) and self._fits(reads[0][1], armed=True):
            return reads
        if transfers:
            return transfers
        while opened and self._stream(opened[0][1], opened[0][1] % self._size) in self._armed:
            heappop(opened)  # it went to the others
        return opened if opened and self._fits(opened[0][1], armed=False) else None

    def _hand_over(self, order: Order) -> None:
        job, index = order[1], order[1] % self._size
        handed = self.handed[self._program.server[index]]
        for other in [o for o in handed if self._is_large(o) and self._order[o] > order]:
            self._take_back(other)
        handed.append(job)
        self._order[job] = order
        self._in_flight += self._program.transfers[index]
        if self._program.role[index] == _READ:
            if order[0] == _OPENED:
                self._ahead[self._stream(job, index)].remove(job)
            if job not in self._staged:
                self._staged.add(job)
                self._held_bytes += self._piece(job)

    def _recall(self, order: Order) -> bool:
        """Takes back a large job that is less urgent; says whether there is room with the device now."""
        large = [(self._order[j], j) for jobs in self.handed.values() for j in jobs if self._is_large(j)]
        if not large or max(large)[0] <= order:
            return False
        self._take_back(max(large)[1])
        return self._in_flight < DEPTH

    def _take_back(self, job: int) -> None:
        index = job % self._size
        self.handed[self._program.server[index]].remove(job)
        del self._order[job]
        self._in_flight -= self._program.transfers[index]
        self.push(job)

    def _is_large(self, job: int) -> bool:
        return self._program.transfers[job % self._size] >= _LARGE

    def _fits(self, job: int, *, armed: bool) -> bool:
        """Whether there is staging for a piece; see [Note: Staging]."""
        if job in self._staged:
            return True
        piece = self._piece(job)
        if not armed:
            return self._held_bytes + piece <= self._opened_bytes
        room = max(self._room_bytes, _LEAST_BUFFERS * piece)
        while self._held_bytes + piece > room and self._drop():
            pass
        return self._held_bytes + piece <= room

    def _drop(self) -> bool:
        """Drops the last piece read ahead of the update without gradients that is last in order."""
        coming = {self._stream(job, job % self._size) for job, order in self._order.items() if order[0] == _OPENED}
        stream = max((s for s, jobs in self._loaded.items() if jobs and s not in coming), default=None)
        if stream is None:
            return False
        job = self._loaded[stream].pop()
        self._held_bytes -= self._piece(job)
        self._staged.discard(job)
        self.dropped.append(job)
        self.push(job)
        return True

    def _stream(self, job: int, index: int) -> int:
        """A number for the update that a job belongs to, its own in every step."""
        return job // self._size * self._streams + self._program.stream[index]

    def _piece(self, job: int) -> float:
        return self._program.piece_bytes[self._program.stream[job % self._size]]
