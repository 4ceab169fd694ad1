"""The virtual clock: runs a program step after step, until two steps agree.

Nothing changes between two events, so the clock jumps from event to event: a job ends; what waited for it begins; each server
that is free, or whose job something more urgent has overtaken, picks its next one; the links are shared anew if what runs has
changed. The order is fixed by the numbers of the jobs, so the same program always gives the same steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from lightning_hetero.ir.schedule import Phase
from lightning_hetero.sim.links import SharedRates
from lightning_hetero.sim.program import CHUNK_BYTES, Program, Role, Server

_RESERVE_BYTES = 2 * CHUNK_BYTES  # staging that updates without gradients leave free (native/src/engine.h, kPrefetchReserve)
_OPENED = 10**9  # rank of what waits for gradients: after all others
_AGREE = 1e-9  # relative difference of two steps that are the same one

Usage = dict[int, float]  # bit set of kinds of work → seconds in which exactly these ran


@dataclass(slots=True)
class Step:
    """One step as it went.

    Attributes:
        begin_s: When the first forward began.
        end_s: When the first forward of the next step began.
        forward_s: Seconds of its forwards.
        usage: What ran in its forwards and in the rest.
        waits: What compute waited for, as numbers of jobs, and how long.
        device_peak_bytes: Most device memory at any moment.
        host_peak_bytes: The same for host memory.
        timeline: When, and how much of each is in use from then on; only if recorded.
        unfinished: Jobs of this and earlier steps that have not ended as the next step begins.
    """

    begin_s: float
    device_peak_bytes: int
    host_peak_bytes: int
    end_s: float = 0.0
    forward_s: float = 0.0
    usage: dict[Phase, Usage] = field(default_factory=lambda: {Phase.FORWARD: {}, Phase.BACKWARD: {}})
    waits: dict[int, float] = field(default_factory=dict)
    timeline: list[tuple[float, int, int]] = field(default_factory=list)
    unfinished: int = 0

    @property
    def iteration_s(self) -> float:
        """From its first forward to the next step's."""
        return self.end_s - self.begin_s


class Engine:
    """Runs a program.

    Args:
        program: The jobs of one step.
        rates: How fast each kind of work runs beside others.
        staging_bytes: Host memory through which state on disk streams.
        record: Keep when each job began and ended, and the timeline of memory.

    Attributes:
        steps: The steps that have ended.
        began: When each job began, by its number; a step's jobs follow those of the step before. Only if recorded.
        ended: The same for ends.
        arrived: When compute arrived at each anchor, ready to begin its job. Only if recorded.
    """

    def __init__(self, program: Program, rates: SharedRates, *, staging_bytes: int, record: bool = False) -> None:
        self.steps: list[Step] = []
        self.began: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.arrived: dict[int, tuple[float, int]] = {}
        self._program, self._rates, self._record = program, rates, record
        self._size = len(program.source)
        self._now = 0.0
        self._left = [*program.needs]  # per job: what it still waits for
        self._extend()
        self._ready = [job for job, count in enumerate(program.needs) if not count]
        self._finished = 0
        # Servers: the job that runs, its work and what is left of it.
        self._active = [-1] * len(Server)
        self._work = [0] * len(Server)
        self._rest = [0.0] * len(Server)
        self._order = [(0, 0)] * len(Server)
        self._mask = 0
        self._waiting: list[list[tuple[int, int]]] = [[] for _ in Server]  # on servers that choose: (rank, job)
        self._reads: list[tuple[int, int]] = []  # of updates that have their gradients
        self._opened: list[tuple[int, int]] = []  # of those that have not
        self._next_read: dict[int, int] = {}  # stream → its job in there
        self._interrupted: dict[int, float] = {}  # job → what is left of it
        self._touched: set[int] = set()
        # Staging.
        self._staging_bytes = staging_bytes
        self._held: dict[int, float] = {}  # stream → bytes
        self._held_bytes = self._held_armed_bytes = 0.0
        self._armed: set[int] = set()
        # The step.
        self._device, self._host = program.constant
        self._step = Step(begin_s=0.0, device_peak_bytes=self._device, host_peak_bytes=self._host)
        self._begun = 0  # steps
        self._usage: Usage = {}
        self._turned_s = 0.0  # when the phase began
        self._free_s = 0.0  # when compute ended its last job
        self._cause = -1  # the job that compute's next one waited for last
        self._stop_after = 0

    def run(self, steps: int) -> bool:
        """Runs until two consecutive steps are the same, or ``steps`` have ended; says whether they were."""
        self._stop_after = steps
        while True:
            while self._ready:
                self._begin(self._ready.pop())
            if self._stop_after <= len(self.steps):
                return self._steady()
            while self._touched:
                self._choose(self._touched.pop())
            self._advance()

    def _steady(self) -> bool:
        if len(self.steps) < 2:
            return False
        a, b = self.steps[-2:]
        return abs(a.iteration_s - b.iteration_s) <= _AGREE * b.iteration_s and a.unfinished == b.unfinished

    # ---- the clock --------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Jumps to the next end of a job."""
        assert self._mask, "edges lead to earlier ops, so something can always run"
        rates = self._rates.of(self._mask)
        running = [(self._rest[server] / rates[self._work[server]], server) for server, job in enumerate(self._active) if job >= 0]
        rise = min(running)[0]
        self._now += rise
        self._usage[self._mask] = self._usage.get(self._mask, 0.0) + rise
        for left, server in running:
            if left <= rise * (1 + _AGREE):
                self._end(server)
            else:
                self._rest[server] -= rise * rates[self._work[server]]

    def _end(self, server: int) -> None:
        job = self._active[server]
        self._active[server] = -1
        self._mask &= ~(1 << self._work[server])
        self._touched.add(server)
        self._finish(job)

    # ---- jobs -------------------------------------------------------------------------------------------------------------

    def _begin(self, job: int) -> None:
        """Everything that the job waits for has ended."""
        program, index = self._program, job % self._size
        server = program.server[index]
        if server >= Server.CPU or (server == Server.D2H and program.chooses_d2h):
            self._queue(server, job)
            return
        if server == Server.COMPUTE:
            self._begin_compute(job, index)
            if self._stop_after <= len(self.steps):
                return
        if program.amount[index] > 0:
            self._start(server, job, index)
            return
        self._take(program.starts[index])
        if self._record:
            self.began[job] = self._now
        self._finish(job)

    def _start(self, server: int, job: int, index: int) -> None:
        left = self._interrupted.pop(job, None) if self._interrupted else None
        if left is None:
            left = self._program.amount[index]
            self._take(self._program.starts[index])
            if self._record:
                self.began[job] = self._now
        self._active[server], self._rest[server] = job, left
        self._work[server] = work = self._program.work[index]
        self._mask |= 1 << work

    def _finish(self, job: int) -> None:
        program, index = self._program, job % self._size
        self._take(program.ends[index])
        self._finished += 1
        if self._record:
            self.ended[job] = self._now
        left, servers, base = self._left, program.server, job - index
        for edges, offset in ((program.after[index], base), (program.next_step[index], base + self._size)):
            for other in edges:
                left[offset + other] -= 1
                if not left[offset + other]:
                    self._ready.append(offset + other)
                    if servers[other] == Server.COMPUTE:
                        self._cause = index
        if servers[index] == Server.COMPUTE:
            self._free_s = self._now
            if index in program.turns:
                self._turn(program.turns[index])
            if index == program.last:
                self._extend()
        if program.role[index]:
            self._streamed(job // self._size, index)

    def _take(self, effect: tuple[int, int]) -> None:
        device, host = effect
        if device or host:
            self._device += device
            self._host += host
            step = self._step
            if self._device > step.device_peak_bytes:
                step.device_peak_bytes = self._device
            if self._host > step.host_peak_bytes:
                step.host_peak_bytes = self._host
            if self._record:
                step.timeline.append((self._now, self._device, self._host))

    # ---- steps ------------------------------------------------------------------------------------------------------------

    def _extend(self) -> None:
        """Room for the jobs of one more step: those that a step carries edges to are counted before it begins."""
        self._left += [a + b for a, b in zip(self._program.needs, self._program.carried, strict=True)]

    def _begin_compute(self, job: int, index: int) -> None:
        waited = self._now - self._free_s
        if waited > 0:
            self._step.waits[self._cause] = self._step.waits.get(self._cause, 0.0) + waited
        if self._record:
            self.arrived[job] = (self._free_s, self._cause)
        if index == self._program.first:
            self._next_step()

    def _next_step(self) -> None:
        """The first forward begins, so the step before is over."""
        if self._begun:
            step = self._step
            step.end_s = self._now
            step.unfinished = self._begun * self._size - self._finished
            self.steps.append(step)
            if self._steady():
                self._stop_after = len(self.steps)
        self._begun += 1
        self._step = Step(begin_s=self._now, device_peak_bytes=self._device, host_peak_bytes=self._host)
        if self._record:
            self._step.timeline.append((self._now, self._device, self._host))
        self._turn(Phase.FORWARD)

    def _turn(self, phase: Phase) -> None:
        if phase is Phase.BACKWARD:
            self._step.forward_s += self._now - self._turned_s
        self._turned_s = self._now
        self._usage = self._step.usage[phase]

    # ---- servers that choose ----------------------------------------------------------------------------------------------

    def _queue(self, server: int, job: int) -> None:
        program, index = self._program, job % self._size
        if program.role[index] != Role.READ:
            heappush(self._waiting[server], (program.rank[index], job))
        elif self._stream(job) in self._armed:
            heappush(self._reads, (program.rank[index], job))
        else:
            heappush(self._opened, (_OPENED, job))
            self._next_read[self._stream(job)] = job
        self._touched.add(server)

    def _choose(self, server: int) -> None:
        """Gives a server that chooses its most urgent job; one that runs and is less urgent goes back."""
        heap = self._next(server)
        if heap is None:
            return
        running = self._active[server]
        if running >= 0:
            if server == Server.D2H or self._order[server] <= heap[0]:
                return
            self._interrupted[running] = self._rest[server]
            self._mask &= ~(1 << self._work[server])
            chosen = heappop(heap)
            self._queue(server, running)
            self._touched.discard(server)
        else:
            chosen = heappop(heap)
        job = chosen[1]
        index = job % self._size
        self._order[server] = chosen
        if self._program.role[index] == Role.READ:
            self._next_read.pop(self._stream(job), None)
            if job not in self._interrupted:
                self._hold(job, index)
        self._start(server, job, index)

    def _next(self, server: int) -> list[tuple[int, int]] | None:
        """The heap with the most urgent job that may begin."""
        heap = self._waiting[server]
        if server != Server.DISK:
            return heap or None
        reads = self._reads
        if reads and (not heap or reads[0] < heap[0]) and self._fits(reads[0][1], armed=True):
            return reads
        if heap:
            return heap
        opened = self._opened
        while opened and self._stream(opened[0][1]) in self._armed:
            heappop(opened)  # it went to the others
        return opened if opened and self._fits(opened[0][1], armed=False) else None

    # ---- staging ----------------------------------------------------------------------------------------------------------

    def _stream(self, job: int) -> int:
        step, index = divmod(job, self._size)
        return step * len(self._program.piece_bytes) + self._program.stream[index]

    def _fits(self, job: int, *, armed: bool) -> bool:
        """Whether a piece may be read.

        An update that has its gradients takes staging back from those that have not, and works with three buffers if need be; these
        fill what is left, but for a reserve.
        """
        if job in self._interrupted:
            return True
        piece = self._program.piece_bytes[self._program.stream[job % self._size]]
        if armed:
            return self._held_armed_bytes + piece <= max(self._staging_bytes, 3 * piece)
        return self._held_bytes + piece <= self._staging_bytes - _RESERVE_BYTES

    def _hold(self, job: int, index: int) -> None:
        stream, piece = self._stream(job), self._program.piece_bytes[self._program.stream[index]]
        self._held[stream] = self._held.get(stream, 0.0) + piece
        self._held_bytes += piece
        if stream in self._armed:
            self._held_armed_bytes += piece

    def _streamed(self, step: int, index: int) -> None:
        """A job of a streamed update has ended."""
        stream = step * len(self._program.piece_bytes) + self._program.stream[index]
        piece = self._program.piece_bytes[self._program.stream[index]]
        if self._program.role[index] == Role.LAST:
            self._held[stream] -= piece
            self._held_bytes -= piece
            self._held_armed_bytes -= piece
            self._touched.add(Server.DISK)
        elif self._program.role[index] == Role.ARM:
            self._armed.add(stream)
            self._held_armed_bytes += self._held.get(stream, 0.0)
            self._rerank(stream)

    def _rerank(self, stream: int) -> None:
        """Its gradients are there: the piece that it reads, or would read next, becomes urgent."""
        running = self._active[Server.DISK]
        if running >= 0 and self._program.role[running % self._size] == Role.READ and self._stream(running) == stream:
            self._order[Server.DISK] = (self._program.rank[running % self._size], running)
        elif stream in self._next_read:
            job = self._next_read[stream]
            heappush(self._reads, (self._program.rank[job % self._size], job))
        self._touched.add(Server.DISK)


def busy_s(usage: Mapping[int, float], works: int) -> float:
    """Seconds in which any of the kinds of work in the bit set ``works`` ran."""
    return sum(seconds for mask, seconds in usage.items() if mask & works)
