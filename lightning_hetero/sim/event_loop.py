"""The virtual clock: runs a program step after step until it is in steady state.

Nothing changes between two events, so the clock jumps from event to event: a job ends; the jobs
that waited for it begin; each server that is free, or whose job was overtaken by a more urgent one,
chooses its next job; if the running jobs have changed, the links are shared again. Job numbers fix
the order, so the same program always gives the same steps.

[Note: Steady state]
The future of a step depends only on the jobs that have not ended and on the rest of the running
ones. If these are the same as at the begin of an earlier step, the steps in between repeat for
ever. Usually that is one step; it is two or three if updates spill from one step into the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from lightning_hetero.ir.schedule import Phase
from lightning_hetero.sim.disk import DiskQueue
from lightning_hetero.sim.links import SharedRates
from lightning_hetero.sim.program import Job, Program, Role, Server
from lightning_hetero.sim.step_memory import Effect

# Plain numbers: enums are too slow for the inner loop.
_COMPUTE, _D2H, _DISK = int(Server.COMPUTE), int(Server.D2H), int(Server.DISK)
_CHOOSE = frozenset(map(int, (Server.D2H, Server.CPU, Server.DISK, Server.DISK_WRITE)))  # the most urgent job, not the next one
_ARM, _LAST = int(Role.ARM), int(Role.LAST)
_AT_ONCE = 1 + 1e-9  # jobs that end this soon after another one end with it
_SAME = 1e-6  # difference of shares that are equal up to rounding
_ENDED = -1  # replaces the number of jobs that a job waits for

Usage = dict[int, float]  # bit set of kinds of work → seconds in which exactly these ran


@dataclass(slots=True)
class SimulatedStep:
    """One simulated step.

    Attributes:
        begin_s: When the first forward began.
        end_s: When the first forward of the next step began.
        forward_s: Seconds of its forwards.
        usage: The work that ran in its forwards and in the rest.
        waits: The jobs that compute waited for, by number, and the seconds.
        device_peak_bytes: Peak of device memory.
        host_peak_bytes: The same for host memory.
        timeline: The moment of each change, and the bytes of each in use from then on; only if
            recorded.
    """

    begin_s: float
    device_peak_bytes: int
    host_peak_bytes: int
    end_s: float = 0.0
    forward_s: float = 0.0
    usage: dict[Phase, Usage] = field(default_factory=lambda: {Phase.FORWARD: {}, Phase.BACKWARD: {}})
    waits: dict[int, float] = field(default_factory=dict)
    timeline: list[tuple[float, int, int]] = field(default_factory=list)

    @property
    def iteration_s(self) -> float:
        """From its first forward to the next step's."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class _StepBegin:
    """The state at the begin of a step that decides the future; see [Note: Steady state]."""

    waiting: tuple[int, ...]  # per job, from the first one that has not ended: the number it waits for
    handed: tuple[int, ...]  # the disk's jobs, counted from there
    left: tuple[tuple[int, float], ...]  # running jobs, counted from there, and the share that is left

    def is_same(self, other: _StepBegin) -> bool:
        if (self.waiting, self.handed) != (other.waiting, other.handed) or len(self.left) != len(other.left):
            return False
        return all(a[0] == b[0] and abs(a[1] - b[1]) < _SAME for a, b in zip(self.left, other.left, strict=True))


class EventLoop:
    """Runs a program.

    Args:
        program: The jobs of one step.
        rates: The speed of each kind of work beside others.
        staging_bytes: Host memory through which state on disk streams.
        record: Whether to keep the begin and end of each job, and the timeline of memory.

    Attributes:
        steps: The steps that have ended.
        began: When each job began, by its number; a step's jobs follow those of the step before.
            Only if recorded.
        ended: The same for ends.
        arrived: When compute arrived at each anchor, and the job that it waited for. Only if
            recorded.
    """

    def __init__(self, program: Program, rates: SharedRates, *, staging_bytes: int, record: bool = False) -> None:
        self.steps: list[SimulatedStep] = []
        self.began: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.arrived: dict[int, tuple[float, int]] = {}
        self._program, self._jobs, self._rates, self._record = program, program.jobs, rates, record
        self._size = len(program.jobs)
        self._now = 0.0
        self._fresh = [job.needs + job.carried for job in program.jobs]
        self._left = [job.needs for job in program.jobs]  # per job: the number of jobs that it still waits for
        self._left += self._fresh
        self._ready = [number for number, count in enumerate(self._left) if not count]
        # Servers: the running job, and the rest of it.
        self._running: dict[int, int] = {}
        self._rest = [0.0] * len(Server)
        self._work = [0] * len(Server)
        self._order = [(0, 0)] * len(Server)
        self._mask = 0  # the kinds of work that run
        self._waiting: list[list[tuple[int, int]]] = [[] for _ in Server]  # on servers that choose: (rank, job)
        self._interrupted: dict[int, float] = {}  # job → the rest of it
        self._touched: set[int] = set()
        self._disk = DiskQueue(program, staging_bytes=staging_bytes)
        # The step.
        self._device, self._host = program.constant
        self._step = SimulatedStep(begin_s=0.0, device_peak_bytes=self._device, host_peak_bytes=self._host)
        self._states: list[_StepBegin] = []  # at the begin of each step
        self._unended = 0  # all jobs before this one have ended
        self._usage: Usage = {}
        self._turned_s = 0.0  # when the phase began
        self._free_s = 0.0  # when compute ended its last job
        self._cause = -1  # the job that compute's next one waited for last
        self._stop_after = 0  # steps
        self._cycle = 0

    def run(self, steps: int) -> int:
        """Runs until steps repeat, or ``steps`` have ended.

        Returns the length of the cycle, 0 if there is none.
        """
        self._stop_after = steps
        while True:
            while self._ready:
                self._begin(self._ready.pop())
            if self._stop_after <= len(self.steps):
                return self._cycle
            if self._touched:
                self._serve()
            self._advance()

    # ---- the clock -------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Jumps to the next end of a job."""
        mask, rest, work = self._mask, self._rest, self._work
        assert mask, "edges lead to earlier ops, so something can always run"
        rates = self._rates.of(mask)
        needs = {server: rest[server] / rates[work[server]] for server in self._running}
        rise = min(needs.values())
        self._now += rise
        self._usage[mask] = self._usage.get(mask, 0.0) + rise
        soon = rise * _AT_ONCE
        for server, left in needs.items():
            if left <= soon:
                self._end(server)
            else:
                rest[server] -= rise * rates[work[server]]

    def _end(self, server: int) -> None:
        number = self._running.pop(server)
        self._mask &= ~(1 << self._work[server])
        if server in _CHOOSE:
            self._touched.add(server)
            if server >= _DISK:
                self._disk.ended(number)
        self._finish(number, self._jobs[number % self._size])

    # ---- jobs ------------------------------------------------------------------------------------

    def _begin(self, number: int) -> None:
        """All jobs that the job waits for have ended."""
        job = self._jobs[number % self._size]
        server = job.server
        if server in _CHOOSE and (server != _D2H or self._program.chooses_d2h):
            self._queue(server, number, job)
            return
        if server == _COMPUTE and self._begin_compute(number):
            return
        if job.amount > 0:
            self._start(server, number, job)
            return
        if job.starts is not None:
            self._take(job.starts)
        if self._record:
            self.began[number] = self._now
        self._finish(number, job)

    def _start(self, server: int, number: int, job: Job) -> None:
        left = self._interrupted.pop(number, None) if self._interrupted else None
        if left is None:
            left = job.amount
            if job.starts is not None:
                self._take(job.starts)
            if self._record:
                self.began[number] = self._now
        self._running[server], self._rest[server], self._work[server] = number, left, job.work
        self._mask |= 1 << job.work

    def _finish(self, number: int, job: Job) -> None:
        if job.ends is not None:
            self._take(job.ends)
        if self._record:
            self.ended[number] = self._now
        self._left[number] = _ENDED
        base = number - number % self._size
        if job.after:
            self._let_go(number, job.after, base)
        if job.next_step:
            self._let_go(number, job.next_step, base + self._size)
        if job.server == _COMPUTE:
            self._free_s = self._now
            index = number - base
            if index in self._program.turns:
                self._turn(self._program.turns[index])
            if index == self._program.last:
                self._left += self._fresh  # carried edges count jobs of a step before it begins
        if job.role:
            self._streamed(number, job)

    def _let_go(self, number: int, edges: list[int], base: int) -> None:
        """Jobs that waited for this job wait for one less."""
        left, jobs = self._left, self._jobs
        for index in edges:
            other = base + index
            left[other] -= 1
            if not left[other]:
                self._ready.append(other)
                if jobs[index].server == _COMPUTE:
                    self._cause = number % self._size

    def _take(self, effect: Effect) -> None:
        self._device += effect[0]
        self._host += effect[1]
        step = self._step
        if self._device > step.device_peak_bytes:
            step.device_peak_bytes = self._device
        if self._host > step.host_peak_bytes:
            step.host_peak_bytes = self._host
        if self._record:
            step.timeline.append((self._now, self._device, self._host))

    # ---- steps -----------------------------------------------------------------------------------

    def _begin_compute(self, number: int) -> bool:
        """Records the wait of compute; returns whether the last requested step ends here."""
        waited = self._now - self._free_s
        if waited > 0:
            self._step.waits[self._cause] = self._step.waits.get(self._cause, 0.0) + waited
        if self._record:
            self.arrived[number] = (self._free_s, self._cause)
        if number % self._size == self._program.first:
            self._next_step(number // self._size)
        return self._stop_after <= len(self.steps)

    def _next_step(self, begun: int) -> None:
        """The first forward begins, so the step before is over."""
        state = self._state(begun * self._size)
        if begun:
            self._step.end_s = self._now
            self.steps.append(self._step)
            same = [begun - i for i, earlier in enumerate(self._states) if earlier.is_same(state)]
            if same:
                self._cycle, self._stop_after = min(same), begun
        self._states.append(state)
        self._step = SimulatedStep(begin_s=self._now, device_peak_bytes=self._device, host_peak_bytes=self._host)
        if self._record:
            self._step.timeline.append((self._now, self._device, self._host))
        self._turn(Phase.FORWARD)

    def _state(self, base: int) -> _StepBegin:
        while self._left[self._unended] == _ENDED:
            self._unended += 1
        first = self._unended
        left = {number: self._rest[server] for server, number in self._running.items()} | self._interrupted
        return _StepBegin(
            waiting=(base - first, *self._left[first:]),
            handed=tuple(number - base for jobs in self._disk.handed.values() for number in jobs),
            left=tuple(sorted((number - base, rest / self._jobs[number % self._size].amount) for number, rest in left.items())),
        )

    def _turn(self, phase: Phase) -> None:
        if phase is Phase.BACKWARD:
            self._step.forward_s += self._now - self._turned_s
        self._turned_s = self._now
        self._usage = self._step.usage[phase]

    # ---- servers that choose ---------------------------------------------------------------------

    def _queue(self, server: int, number: int, job: Job) -> None:
        if server >= _DISK:
            self._disk.push(number)
        else:
            heappush(self._waiting[server], (job.rank, number))
        self._touched.add(server)

    def _serve(self) -> None:
        """Gives changed servers their next jobs."""
        disk = False
        for server in self._touched:
            if server >= _DISK:
                disk = True
            else:
                self._choose(server)
        self._touched.clear()
        if disk:
            self._disk.hand_over()
            for number in self._disk.dropped:
                self._undo(number)
            for server, numbers in self._disk.handed.items():
                first = numbers[0] if numbers else -1
                if self._running.get(server, -1) != first:
                    self._interrupt(server)
                    if first >= 0:
                        self._start(server, first, self._jobs[first % self._size])

    def _choose(self, server: int) -> None:
        """Gives a server its most urgent job; the update threads leave a less urgent one."""
        heap, running = self._waiting[server], server in self._running
        if not heap or (running and (server == _D2H or self._order[server] <= heap[0])):
            return
        self._order[server], order = heappop(heap), self._order[server]
        if running:
            self._interrupt(server)
            heappush(heap, order)
        number = self._order[server][1]
        self._start(server, number, self._jobs[number % self._size])

    def _interrupt(self, server: int) -> None:
        """The server leaves its job, if it has one."""
        number = self._running.pop(server, None)
        if number is not None:
            self._interrupted[number] = self._rest[server]
            self._mask &= ~(1 << self._work[server])

    def _undo(self, number: int) -> None:
        """A read must be repeated.

        Jobs that wait for it have not begun: they wait for gradients too.
        """
        index = number % self._size
        self._left[number] = 0
        self._unended = min(self._unended, number)
        for other in self._jobs[index].after:
            self._left[number - index + other] += 1

    def _streamed(self, number: int, job: Job) -> None:
        """A job of a streamed update has ended."""
        if job.role == _LAST:
            self._disk.free(number)
        elif job.role == _ARM:
            self._disk.arm(number)
        self._touched.add(_DISK)


def busy_s(usage: Mapping[int, float], works: int) -> float:
    """Seconds in which any of the kinds of work in the bit set ``works`` ran."""
    return sum(seconds for mask, seconds in usage.items() if mask & works)
