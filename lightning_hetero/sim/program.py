"""The jobs of one optimizer step, which the simulation's engine runs step after step.

[Note: Jobs]
A job is one piece of work on one server, or an instant. Most ops are one job. The compute of an
anchor is a job; so are the ops on the compute lane, which run between the anchors. An edge is a
count on the waiting job and an entry with the other job: ``after`` within the step, ``next_step``
from one step to the next (carried edges, and the order of lanes).

[Note: Pieces]
FETCH STATE, UPDATE and STORE of one block are one task of the native engine, which works on them
chunk by chunk. Here the task is cut into a few pieces, each of them read, updated and written, so
that the three overlap inside one block as they do there. The UPDATE is READY when its last piece is
computed, and the STORE is done when its last piece is written. Anchors wait for the first, FETCHes
and the COMMIT for the second.

[Note: Servers]
A server does one job at a time. Copies and collectives run in the order of the schedule, as on
streams. The update threads take the most urgent ready job, and leave it for a more urgent one, as
the native engine does between chunks. The disk does nearly the same, see [Note: Depth] in
``sim.disk``. Jobs that compute waits for are most urgent; then updates, lowest block first if the
plan says so, and for one block writes before reads; then the state of updates that are only opened.
With priorities, gradients too are copied lowest block first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from lightning_hetero.ir.schedule import Anchor, Op, Phase
from lightning_hetero.sim.step_memory import Effect


class Server(IntEnum):
    """The resource that runs a job."""

    INSTANT = -1
    COMPUTE = 0
    H2D = 1
    D2H = 2
    NET = 3
    CPU = 4
    DISK = 5  # reads, and writes unless the disk is duplex
    DISK_WRITE = 6


class Role(IntEnum):
    """The role of a job in its streamed update."""

    NONE = 0
    OPEN = 1  # reads may begin
    READ = 2  # takes staging
    ARM = 3  # the gradients are available
    LAST = 4  # frees staging


@dataclass(slots=True)
class Job:
    """One job; see [Note: Jobs].

    Attributes:
        source: Its op or anchor; ``None`` for the wait at the end of a step.
        group: The number of this occurrence of ``source``, since micro-batches may share a
            schedule.
        server: Its resource, as a plain number: enums are slow in the inner loop.
        work: Its kind of work.
        amount: The amount of work, in the kind's unit.
        rank: Its rank on servers that choose, lowest first.
        transfers: The number of its transfers on the disk.
        role: Its role in its stream.
        stream: Its streamed update.
        starts: Memory that it takes when it starts; ``None``: none.
        ends: Memory that it frees when it ends.
        needs: Jobs of the same step that it waits for.
        carried: Jobs of the step before that it waits for.
        after: Jobs of the same step that wait for it.
        next_step: Jobs of the next step that wait for it.
    """

    source: Op | Anchor | None
    group: int
    server: int
    work: int = 0
    amount: float = 0.0
    rank: int = 0
    transfers: float = 0.0
    role: int = 0
    stream: int = -1
    starts: Effect | None = None
    ends: Effect | None = None
    needs: int = 0
    carried: int = 0
    after: list[int] = field(default_factory=list)
    next_step: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Program:
    """The jobs of one step.

    Attributes:
        jobs: In the order of issue.
        piece_bytes: Staging of one piece of each streamed update.
        buffer_bytes: Staging of one chunk.
        first: The compute job of the first anchor.
        last: The last job on the compute lane.
        turns: Compute jobs at the end of a phase, and the next phase.
        constant: Memory in use before the first job.
        chooses_d2h: Whether copies to the host run by rank instead of in order.
    """

    buffer_bytes: int
    chooses_d2h: bool
    jobs: list[Job] = field(default_factory=list)
    piece_bytes: list[float] = field(default_factory=list)
    first: int = -1
    last: int = -1
    turns: dict[int, Phase] = field(default_factory=dict)
    constant: Effect = (0, 0)

    def add(self, job: Job, after: Iterable[int] = ()) -> int:
        """Adds a job that waits for the jobs ``after``; returns its number."""
        number = len(self.jobs)
        self.jobs.append(job)
        if job.amount <= 0 and job.server != Server.COMPUTE:
            job.server = int(Server.INSTANT)
        for other in after:
            self.jobs[other].after.append(number)
            job.needs += 1
        return number

    def edge(self, first: int, then: int) -> None:
        """``then`` waits for ``first`` of the same step."""
        self.jobs[first].after.append(then)
        self.jobs[then].needs += 1

    def carry(self, first: int, then: int) -> None:
        """``then`` waits for ``first`` of the step before."""
        self.jobs[first].next_step.append(then)
        self.jobs[then].carried += 1
