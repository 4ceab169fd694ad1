"""Schedules → jobs: what the engine of the simulation runs. One program is one optimizer step; the engine repeats it.

[Note: Jobs]
A job is one piece of work on one server, or an instant. Most ops are one job. The compute of an anchor is a job; so are the
ops on the compute lane, which run between the anchors. An edge is a count on the job that waits and an entry with the job waited
for: ``after`` within the step, ``next_step`` from one step to the next (carried edges, and the order of lanes).

[Note: Pieces]
FETCH STATE, UPDATE and STORE of one block are one task of the native engine, which works on them chunk by chunk. Here the
task is cut into a few pieces, each of them read, updated and written, so that the three overlap inside one block as they do
there. The UPDATE is READY with its last piece computed and the STORE is done with its last piece written: anchors wait for the
first, FETCHes and the COMMIT for the second.

[Note: Servers]
A server does one job at a time. Copies and collectives are done in the order of the schedule, as streams do them. The disk and
the update threads take whatever is ready and most urgent, and leave it for something more urgent, as the native engine does
between chunks (native/src/engine_schedule.cc, ``Rank``): first what compute waits for; then updates, lowest block first where
the plan says so, of one block writes before reads; then the state of updates that are only opened. With priorities, gradients
too are copied lowest block first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from lightning_hetero.cost import Amount, Rates, Work, amount_of, backward_s, stored_bytes
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.ir.schedule import Anchor, Lane, Op, OpKind, Payload, Phase, Schedule
from lightning_hetero.sim.memory import NOTHING, Effect, Occupancy
from lightning_hetero.units import KIB, MIB

_CHUNK_PARAMS = 256 * KIB  # what the native engine stages at a time (store/tiers.py, _CHUNK_ELEMENTS)
DEPTH = 8
"""Transfers that the disk is handed at a time (``EngineOptions.queue_depth``)."""
_TRANSFER_BYTES = 4 * MIB  # the largest transfer of weights (native/src/engine_tasks.cc, kFetchBytes)
_PIECES_OF_A_BLOCK = (3, 12)
_PIECES_OF_A_STEP = 400  # beyond this they only cost time: many blocks overlap anyway
_URGENT, _UPDATES = 0, 1000  # ranks, as the runtime's priorities: what compute waits for, then updates


class Server(IntEnum):
    """Who does a job."""

    INSTANT = -1
    COMPUTE = 0
    H2D = 1
    D2H = 2
    NET = 3
    CPU = 4
    DISK = 5  # reads, and writes unless the disk is duplex
    DISK_WRITE = 6


_SERVERS = {
    Work.COMPUTE: Server.COMPUTE,
    Work.DEVICE_UPDATE: Server.COMPUTE,
    Work.H2D: Server.H2D,
    Work.D2H: Server.D2H,
    Work.CPU_UPDATE: Server.CPU,
    Work.DISK_READ: Server.DISK,
    Work.COLLECTIVE: Server.NET,
}


class Role(IntEnum):
    """What a job is to the streamed update that it belongs to."""

    NONE = 0
    OPEN = 1  # it may read
    READ = 2  # takes staging
    ARM = 3  # the gradients are there
    LAST = 4  # gives staging back


@dataclass(slots=True)
class Program:
    """The jobs of one step, as parallel lists; see [Note: Jobs].

    Attributes:
        source: The op or anchor that a job belongs to.
        group: Numbers their occurrences: micro-batches may share a schedule.
        server: Who does it.
        work: Its kind of work.
        amount: How much, in the kind's unit.
        rank: On servers that choose: lowest first.
        needs: Jobs of the same step that it waits for.
        carried: Jobs of the step before that it waits for.
        after: Jobs of the same step that wait for it.
        next_step: Jobs of the next step that wait for it.
        starts: What it takes of memory as it starts.
        ends: The same as it ends.
        transfers: On the disk: how many transfers it is.
        role: What it is to its stream.
        stream: The streamed update that it belongs to, or -1.
        piece_bytes: Staging of one piece of each stream.
        buffer_bytes: Staging of one chunk.
        first: The first anchor's compute.
        last: The last job on the compute lane.
        turns: Compute jobs whose end ends a phase, and the phase that begins.
        constant: Memory in use before the first job.
        chooses_d2h: Copies to the host are done by rank instead of in order.
        num_groups: How many there are so far.
    """

    source: list[Op | Anchor | None] = field(default_factory=list)
    group: list[int] = field(default_factory=list)
    server: list[int] = field(default_factory=list)
    work: list[int] = field(default_factory=list)
    amount: list[float] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    needs: list[int] = field(default_factory=list)
    carried: list[int] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    next_step: list[list[int]] = field(default_factory=list)
    starts: list[Effect] = field(default_factory=list)
    ends: list[Effect] = field(default_factory=list)
    transfers: list[float] = field(default_factory=list)
    role: list[int] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    piece_bytes: list[float] = field(default_factory=list)
    buffer_bytes: int = 0
    first: int = -1
    last: int = -1
    turns: dict[int, Phase] = field(default_factory=dict)
    constant: Effect = NOTHING
    chooses_d2h: bool = False
    num_groups: int = 0

    def add(
        self,
        source: Op | Anchor | None,
        server: int,
        *,
        amount: float = 0.0,
        work: int = 0,
        rank: int = 0,
        transfers: float = 0.0,
        after: Iterable[int] = (),
        starts: Effect = NOTHING,
        ends: Effect = NOTHING,
    ) -> int:
        """Adds a job that waits for the jobs ``after``; returns its number."""
        job = len(self.source)
        self.source.append(source)
        self.group.append(self.num_groups)
        self.server.append(int(server if amount > 0 or server == Server.COMPUTE else Server.INSTANT))
        self.work.append(int(work))
        self.amount.append(amount)
        self.rank.append(rank)
        self.needs.append(0)
        self.carried.append(0)
        self.after.append([])
        self.next_step.append([])
        self.starts.append(starts)
        self.ends.append(ends)
        self.transfers.append(transfers)
        self.role.append(0)
        self.stream.append(-1)
        for other in after:
            self.edge(other, job)
        return job

    def edge(self, first: int, then: int) -> None:
        """``then`` waits for ``first`` of the same step."""
        self.after[first].append(then)
        self.needs[then] += 1

    def carry(self, first: int, then: int) -> None:
        """``then`` waits for ``first`` of the step before."""
        self.next_step[first].append(then)
        self.carried[then] += 1


@dataclass(slots=True)
class _Stream:
    """An update that goes through staging, or whose file is written piece by piece."""

    number: int
    num_pieces: int
    num_chunks: int
    read_bytes: float
    write_bytes: float
    reads_arrays: int  # what of a chunk is a transfer of its own: state, weights
    writes_arrays: int
    reads: list[int] = field(default_factory=list)
    computes: list[int] = field(default_factory=list)


Key = tuple[OpKind, int]


class _Compiler:
    def __init__(self, schedules: Sequence[Schedule], plan: Plan, model: ModelProfile, rates: Rates, staging_bytes: int) -> None:
        self._schedules, self._plan, self._model = schedules, plan, model
        self._shared = rates.hardware.shared_memory
        self._duplex = rates.hardware.disk_duplex
        buffer_bytes = _CHUNK_PARAMS * (model.compute_itemsize + model.state_itemsize)
        self._program = Program(chooses_d2h=plan.priority, buffer_bytes=buffer_bytes)
        self._memory = Occupancy(plan, model, shared_memory=self._shared, staging_bytes=staging_bytes)
        self._in_order = {Server.H2D, Server.NET} | (set() if plan.priority else {Server.D2H})
        self._lane_first: dict[Server, int] = {}  # on servers that keep the schedule's order
        self._lane_last: dict[Server, int] = {}
        self._latest: dict[Key, int] = {}  # in the schedules before
        self._carried: list[tuple[Key, int]] = []
        self._at_begin: list[int] = []  # jobs that the step's first anchor issues
        self._compute: int | None = None  # the last job on the compute lane so far
        streams = sum(op.kind is OpKind.UPDATE and self._is_streamed(op.block) for s in schedules for op in s.ops)
        least, most = _PIECES_OF_A_BLOCK
        self._num_pieces = max(least, min(most, _PIECES_OF_A_STEP // max(1, streams)))

    def run(self) -> Program:
        program = self._program
        program.constant = self._memory.constant(self._schedules[0])
        for schedule in self._schedules:
            self._schedule(schedule)
        assert self._compute is not None
        program.last = self._compute
        program.ends[program.last] = _sum(program.ends[program.last], self._memory.end())
        for job in self._at_begin:
            program.carry(program.last, job)
        for server, job in self._lane_first.items():
            program.carry(self._lane_last[server], job)
        for key, job in self._carried:
            if key in self._latest:
                program.carry(self._latest[key], job)
        return program

    # ---- one schedule -----------------------------------------------------------------------------------------------------

    def _schedule(self, schedule: Schedule) -> None:
        self._done: dict[int, int] = {}  # op -> the job that ends it
        self._streams: dict[int, _Stream] = {}  # block -> its update
        self._stores = {op.block: op for op in schedule.ops if op.kind is OpKind.STORE}
        self._resident = set(schedule.resident_before)
        if self._compute is not None:
            self._program.turns[self._compute] = Phase.FORWARD
        provided: dict[Key, int] = {}
        ops = iter(schedule.ops)
        op = next(ops, None)
        for index, anchor in enumerate(schedule.anchors):
            if anchor.phase is not Phase.FORWARD and (index == 0 or schedule.anchors[index - 1].phase is Phase.FORWARD):
                assert self._compute is not None, "a step begins with a forward"
                self._program.turns[self._compute] = Phase.BACKWARD
            arrival = self._compute
            while op is not None and op.at == index:
                self._op(op, arrival)
                provided[op.kind, op.block] = self._done[op.id]
                op = next(ops, None)
            self._anchor(anchor, training=schedule.signature.training)
        if self._shared and any(o.kind is OpKind.UPDATE and o.lane is Lane.COMPUTE for o in schedule.ops):
            # The runtime waits for all updates of a step that has some on the device (Executor.handover).
            updates = [self._done[o.id] for o in schedule.ops if o.kind is OpKind.UPDATE]
            self._on_compute(None, after=updates)
        self._latest |= provided

    def _anchor(self, anchor: Anchor, *, training: bool) -> None:
        self._program.num_groups += 1
        needs = [self._done[i] for i in anchor.needs]
        if anchor.phase is Phase.VERDICT:
            job = self._on_compute(anchor, after=needs)
        else:
            block, placed = self._placed(anchor.block)
            seconds = block.forward_s if anchor.phase is Phase.FORWARD else backward_s(block, placed)
            starts, ends = self._memory.anchor(anchor.phase, anchor.block, training=training)
            job = self._on_compute(anchor, amount=seconds, after=needs, starts=starts, ends=ends)
        if self._program.first < 0:
            self._program.first = job
        self._carry(anchor.carried, job)

    def _on_compute(
        self,
        source: Op | Anchor | None,
        *,
        amount: float = 0.0,
        work: Work = Work.COMPUTE,
        after: Iterable[int],
        starts: Effect = NOTHING,
        ends: Effect = NOTHING,
    ) -> int:
        job = self._program.add(source, Server.COMPUTE, amount=amount, work=work, after=after, starts=starts, ends=ends)
        self._issued(job, self._compute)
        self._compute = job
        return job

    def _issued(self, job: int, arrival: int | None) -> None:
        """An anchor begins once the compute before it has ended."""
        if arrival is None:
            self._at_begin.append(job)
        else:
            self._program.edge(arrival, job)

    def _carry(self, keys: Iterable[Key], job: int) -> None:
        """Edges to the latest ops of earlier schedules: of this step, or of the step before."""
        for key in keys:
            if key in self._latest:
                self._program.edge(self._latest[key], job)
            else:
                self._carried.append((key, job))

    # ---- ops --------------------------------------------------------------------------------------------------------------

    def _op(self, op: Op, arrival: int | None) -> None:
        self._program.num_groups += 1
        streamed = op.kind is OpKind.UPDATE and op.lane is Lane.CPU and self._is_streamed(op.block)
        if op.kind is OpKind.FETCH and op.payload is Payload.STATE:
            self._done[op.id] = self._open(op, arrival, after=[self._done[i] for i in op.after], carried=op.carried)
        elif streamed:
            self._done[op.id] = self._update(op, arrival)
        elif op.kind is OpKind.STORE and op.block in self._streams:
            self._done[op.id] = self._store(op, arrival)
        else:
            self._done[op.id] = self._whole(op, arrival)
        if op.payload is Payload.WEIGHTS and op.kind is OpKind.FETCH:
            self._resident.add(op.block)
        if op.kind is OpKind.RELEASE and op.lane is not Lane.H2D:
            self._resident.discard(op.block)

    def _whole(self, op: Op, arrival: int | None) -> int:
        """An op that is one job."""
        starts, ends = self._memory.op(op)
        after = [self._done[i] for i in op.after]
        amount = amount_of(op, self._plan, self._model, shared_memory=self._shared)
        if op.lane is Lane.COMPUTE and amount is not None:
            job = self._on_compute(op, amount=amount.units, work=amount.work, after=after, starts=starts, ends=ends)
        else:
            job = self._add(op, amount, after=after, starts=starts, ends=ends)
            self._issued(job, arrival)
        self._carry(op.carried, job)
        return job

    def _add(self, op: Op, amount: Amount | None, *, after: list[int], starts: Effect, ends: Effect) -> int:
        if amount is None:
            return self._program.add(op, Server.INSTANT, after=after, starts=starts, ends=ends)
        server = self._server(amount.work)
        rank = self._rank(op.block, urgent=op.kind not in (OpKind.UPDATE, OpKind.GRAD, OpKind.STORE), work=amount.work)
        job = self._program.add(op, server, amount=amount.units, work=amount.work, rank=rank, after=after, starts=starts, ends=ends)
        if server in self._in_order:
            if server in self._lane_last:
                self._program.edge(self._lane_last[server], job)
            self._lane_first.setdefault(server, job)
            self._lane_last[server] = job
        return job

    def _server(self, work: Work) -> Server:
        if work is Work.DISK_WRITE:
            return Server.DISK_WRITE if self._duplex else Server.DISK
        return _SERVERS[work]

    def _rank(self, block: int, *, urgent: bool, work: Work) -> int:
        level = _URGENT if urgent else _UPDATES + (block if self._plan.priority else 0)
        return 2 * level + (work is Work.DISK_READ)

    # ---- streamed updates: [Note: Pieces] -----------------------------------------------------------------------------------

    def _is_streamed(self, block: int) -> bool:
        return stored_bytes(*self._placed(block), self._model) > 0

    def _stream(self, block: int) -> _Stream:
        """The block's update; begun by whichever of its ops comes first."""
        if block not in self._streams:
            profile, placed = self._placed(block)
            on_disk = placed.weights is Tier.DISK, placed.state is Tier.DISK
            read = profile.num_trainable_params * self._model.state_itemsize * on_disk[1]
            # Weights that are not in memory go from file to file; with an fp32 master in the state they are only written.
            staged = on_disk[0] and block not in self._resident and self._model.compute_itemsize == 4
            read += profile.num_params * self._model.compute_itemsize * staged
            num_chunks = -(-profile.num_params // _CHUNK_PARAMS)
            num_pieces = min(self._num_pieces, num_chunks)
            number = len(self._program.piece_bytes)
            self._program.piece_bytes.append(num_chunks / num_pieces * self._program.buffer_bytes)
            self._streams[block] = _Stream(
                number=number,
                num_pieces=num_pieces,
                num_chunks=num_chunks,
                read_bytes=float(read),
                write_bytes=float(stored_bytes(profile, placed, self._model)),
                reads_arrays=on_disk[1] + staged,
                writes_arrays=sum(on_disk),
            )
        return self._streams[block]

    def _open(self, op: Op, arrival: int | None, *, after: list[int], carried: Iterable[Key]) -> int:
        """The reads of a streamed update. Ops behind it that are no UPDATE wait for it to be opened only."""
        stream, program = self._stream(op.block), self._program
        rank = self._rank(op.block, urgent=False, work=Work.DISK_READ)
        opened = program.add(op, Server.INSTANT, after=after)
        self._belongs(opened, stream, Role.OPEN)
        self._issued(opened, arrival)
        self._carry(carried, opened)
        for _ in range(stream.num_pieces):
            job = program.add(
                op,
                Server.DISK,
                amount=stream.read_bytes / stream.num_pieces,
                work=Work.DISK_READ,
                rank=rank,
                transfers=_transfers(stream, stream.reads_arrays),
                after=(opened,),
            )
            self._belongs(job, stream, Role.READ)
            stream.reads.append(job)
        return opened

    def _update(self, op: Op, arrival: int | None) -> int:
        program, store = self._program, self._stores.get(op.block)
        after = [self._done[i] for i in op.after]
        stream = self._stream(op.block)
        if stream.read_bytes and not stream.reads:
            self._open(op, arrival, after=after, carried=op.carried)
        arm = program.add(op, Server.INSTANT, after=after)
        self._belongs(arm, stream, Role.ARM)
        self._issued(arm, arrival)
        # The engine computes nothing that it may not write: the commit of the step before comes first.
        self._carry(dict.fromkeys((*op.carried, *(store.carried if store else ()))), arm)
        amount = amount_of(op, self._plan, self._model, shared_memory=self._shared)
        assert amount is not None
        _, ends = self._memory.op(op)
        rank = self._rank(op.block, urgent=False, work=Work.CPU_UPDATE)
        for piece in range(stream.num_pieces):
            job = program.add(
                op,
                Server.CPU,
                amount=amount.units / stream.num_pieces,
                work=Work.CPU_UPDATE,
                rank=rank,
                after=(arm, *stream.reads[piece : piece + 1]),
                ends=ends if piece == stream.num_pieces - 1 else NOTHING,
            )
            stream.computes.append(job)
            if store is None and stream.reads:
                self._belongs(job, stream, Role.LAST)
        return stream.computes[-1]

    def _store(self, op: Op, arrival: int | None) -> int:
        stream, program = self._streams[op.block], self._program
        others = [self._done[i] for i in op.after if self._done[i] not in stream.computes]
        rank, server = self._rank(op.block, urgent=False, work=Work.DISK_WRITE), self._server(Work.DISK_WRITE)
        job = -1
        for compute in stream.computes:
            job = program.add(
                op,
                server,
                amount=stream.write_bytes / stream.num_pieces,
                work=Work.DISK_WRITE,
                rank=rank,
                transfers=_transfers(stream, stream.writes_arrays),
                after=(compute, *others),
            )
            self._issued(job, arrival)
            if stream.reads:
                self._belongs(job, stream, Role.LAST)
        return job

    def _belongs(self, job: int, stream: _Stream, role: Role) -> None:
        self._program.stream[job] = stream.number
        self._program.role[job] = int(role)

    def _placed(self, block: int) -> tuple[BlockProfile, BlockPlan]:
        return self._model.blocks[block], self._plan.blocks[block]


def _transfers(stream: _Stream, arrays: int) -> float:
    """Transfers of one piece; of a large piece as many as leave room for another."""
    return min(DEPTH / 2, stream.num_chunks / stream.num_pieces * arrays)


def _sum(a: Effect, b: Effect) -> Effect:
    return a[0] + b[0], a[1] + b[1]


def compile_step(schedules: Sequence[Schedule], plan: Plan, model: ModelProfile, rates: Rates, *, staging_bytes: int) -> Program:
    """The jobs of one optimizer step.

    Args:
        schedules: Of one step: the micro-batches that only accumulate, then the one with updates.
        plan: The resolved plan that they were lowered from.
        model: The model.
        rates: The machine's rates.
        staging_bytes: Host memory through which state on disk streams.
    """
    return _Compiler(schedules, plan, model, rates, staging_bytes).run()
