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
from lightning_hetero.sim.disk import DiskQueue
from lightning_hetero.sim.links import SharedRates
from lightning_hetero.sim.memory import NOTHING
from lightning_hetero.sim.program import Program, Role, Server

# Plain numbers: enums are too slow for the inner loop.
_COMPUTE, _D2H, _DISK = int(Server.COMPUTE), int(Server.D2H), int(Server.DISK)
_CHOOSE = frozenset(map(int, (Server.D2H, Server.CPU, Server.DISK, Server.DISK_WRITE)))  # the most urgent job, not the next one
_ARM, _LAST = int(Role.ARM), int(Role.LAST)
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
        self._running: dict[int, int] = {}
        self._work = [0] * len(Server)
        self._rest = [0.0] * len(Server)
        self._order = [(0, 0)] * len(Server)
        self._mask = 0
        self._waiting: list[list[tuple[int, int]]] = [[] for _ in Server]  # on servers that choose: (rank, job)
        self._interrupted: dict[int, float] = {}  # job → what is left of it
        self._touched: set[int] = set()
        self._disk = DiskQueue(program, staging_bytes=staging_bytes)
        # The step.
        self._device, self._host = program.constant
        self._step = Step(begin_s=0.0, device_peak_bytes=self._device, host_peak_bytes=self._host)
        self._begun = 0  # steps
        self._usage: Usage = {}
        self._turned_s = 0.0  # when the phase began
        self._free_s = 0.0  # when compute ended its last job
        self._cause = -1  # the job that compute's next one waited for last
        self._stop_after = 0  # steps

    def run(self, steps: int) -> bool:
        """Runs until two consecutive steps are the same, or ``steps`` have ended; says whether they were."""
        self._stop_after = steps
        while True:
            while self._ready:
                self._begin(self._ready.pop())
            if self._stop_after <= len(self.steps):
                return self._steady()
            if self._touched:
                self._serve()
            self._advance()

    def _steady(self) -> bool:
        if len(self.steps) < 2:
            return False
        a, b = self.steps[-2:]
        return abs(a.iteration_s - b.iteration_s) <= _AGREE * b.iteration_s and a.unfinished == b.unfinished

    # ---- the clock --------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Jumps to the next end of a job."""
        mask, running, rest, work = self._mask, self._running, self._rest, self._work
        assert mask, "edges lead to earlier ops, so something can always run"
        rates = self._rates.of(mask)
        needs = {server: rest[server] / rates[work[server]] for server in running}
        rise = min(needs.values())
        self._now += rise
        self._usage[mask] = self._usage.get(mask, 0.0) + rise
        soon = rise * (1 + _AGREE)
        for server, left in needs.items():
            if left <= soon:
                self._end(server)
            else:
                rest[server] -= rise * rates[work[server]]

    def _end(self, server: int) -> None:
        job = self._running.pop(server)
        self._mask &= ~(1 << self._work[server])
        if server in _CHOOSE:
            self._touched.add(server)
            if server >= _DISK:
                self._disk.ended(job)
        self._finish(job)

    # ---- jobs -------------------------------------------------------------------------------------------------------------

    def _begin(self, job: int) -> None:
        """Everything that the job waits for has ended."""
        program, index = self._program, job % self._size
        server = program.server[index]
        if server in _CHOOSE and (server != _D2H or program.chooses_d2h):
            self._queue(server, job)
            return
        if server == _COMPUTE:
            self._begin_compute(job, index)
            if self._stop_after <= len(self.steps):
                return
        if program.amount[index] > 0:
            self._start(server, job, index)
            return
        if program.starts[index] is not NOTHING:
            self._take(program.starts[index])
        if self._record:
            self.began[job] = self._now
        self._finish(job)

    def _start(self, server: int, job: int, index: int) -> None:
        left = self._interrupted.pop(job, None) if self._interrupted else None
        if left is None:
            left = self._program.amount[index]
            if self._program.starts[index] is not NOTHING:
                self._take(self._program.starts[index])
            if self._record:
                self.began[job] = self._now
        self._running[server], self._rest[server] = job, left
        self._work[server] = work = self._program.work[index]
        self._mask |= 1 << work

    def _finish(self, job: int) -> None:
        program, index = self._program, job % self._size
        if program.ends[index] is not NOTHING:
            self._take(program.ends[index])
        self._finished += 1
        if self._record:
            self.ended[job] = self._now
        base = job - index
        if program.after[index]:
            self._let_go(index, program.after[index], base)
        if program.next_step[index]:
            self._let_go(index, program.next_step[index], base + self._size)
        if program.server[index] == _COMPUTE:
            self._free_s = self._now
            if index in program.turns:
                self._turn(program.turns[index])
            if index == program.last:
                self._extend()
        if program.role[index]:
            self._streamed(job, program.role[index])

    def _let_go(self, index: int, edges: list[int], base: int) -> None:
        """What waited for a job waits for one less."""
        left, servers = self._left, self._program.server
        for other in edges:
            job = base + other
            left[job] -= 1
            if not left[job]:
                self._ready.append(job)
                if servers[other] == _COMPUTE:
                    self._cause = index

    def _take(self, effect: tuple[int, int]) -> None:
        self._device += effect[0]
        self._host += effect[1]
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
        if server >= _DISK:
            self._disk.push(job)
        else:
            heappush(self._waiting[server], (self._program.rank[job % self._size], job))
        self._touched.add(server)

    def _serve(self) -> None:
        """Gives the servers on which something has changed their next jobs."""
        disk = False
        for server in self._touched:
            if server >= _DISK:
                disk = True
            else:
                self._choose(server)
        self._touched.clear()
        if disk:
            self._disk.hand_over()
            for job in self._disk.dropped:
                self._undo(job)
            for server, jobs in self._disk.handed.items():
                first = jobs[0] if jobs else -1
                if self._running.get(server, -1) != first:
                    self._interrupt(server)
                    if first >= 0:
                        self._start(server, first, first % self._size)

    def _choose(self, server: int) -> None:
        """Gives a server its most urgent job; the update threads leave one that is less urgent."""
        heap, running = self._waiting[server], self._running.get(server, -1)
        if not heap or (running >= 0 and (server == _D2H or self._order[server] <= heap[0])):
            return
        self._order[server], order = heappop(heap), self._order[server]
        if running >= 0:
            self._interrupt(server)
            heappush(heap, order)
        job = self._order[server][1]
        self._start(server, job, job % self._size)

    def _interrupt(self, server: int) -> None:
        """The server leaves its job, if it has one."""
        job = self._running.pop(server, -1)
        if job >= 0:
            self._interrupted[job] = self._rest[server]
            self._mask &= ~(1 << self._work[server])

    def _undo(self, job: int) -> None:
        """A read has to be done again; what waits for it has not begun, for it waits for gradients too."""
        self._finished -= 1
        for other in self._program.after[job % self._size]:
            self._left[job - job % self._size + other] += 1

    def _streamed(self, job: int, role: int) -> None:
        """A job of a streamed update has ended."""
        if role == _LAST:
            self._disk.free(job)
        elif role == _ARM:
            self._disk.arm(job)
        self._touched.add(_DISK)


def busy_s(usage: Mapping[int, float], works: int) -> float:
    """Seconds in which any of the kinds of work in the bit set ``works`` ran."""
    return sum(seconds for mask, seconds in usage.items() if mask & works)
