"""Schedules → the jobs of one optimizer step; see the notes in ``sim.program``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lightning_hetero.cost import Amount, Rates, Work, amount_of, backward_s, stored_bytes, update_amount
from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.ir.schedule import Anchor, Lane, Op, OpKind, Payload, Phase, Schedule, Updates, urgency
from lightning_hetero.sim.disk import DEPTH
from lightning_hetero.sim.program import Job, Program, Role, Server
from lightning_hetero.sim.step_memory import Occupancy
from lightning_hetero.units import KIB, MIB

_CHUNK_PARAMS = 256 * KIB  # what the native engine stages at a time (store/live/geometry.py, _CHUNK_ELEMENTS)
_TRANSFER_BYTES = 4 * MIB  # the largest transfer of weights (native/src/engine_tasks.cc, kFetchBytes)
_PIECES_OF_A_BLOCK = (3, 12)
_PIECES_OF_A_STEP = 300  # more only cost time: many blocks overlap anyway

_SERVERS = {
    Work.COMPUTE: Server.COMPUTE,
    Work.DEVICE_UPDATE: Server.COMPUTE,
    Work.H2D: Server.H2D,
    Work.D2H: Server.D2H,
    Work.CPU_UPDATE: Server.CPU,
    Work.DISK_READ: Server.DISK,
    Work.COLLECTIVE: Server.NET,
    Work.PEER: Server.NET,  # no schedule has both
}

Key = tuple[OpKind, int]


@dataclass(slots=True)
class _StagedUpdate:
    """An update that streams through staging, or whose file is written piece by piece."""

    number: int
    num_pieces: int
    num_chunks: int
    read_bytes: float
    write_bytes: float
    reads_arrays: int  # transfers per chunk: state, weights
    writes_arrays: int
    issued_at: int = -1  # the anchor that issues the UPDATE
    reads: list[int] = field(default_factory=list)
    computes: list[int] = field(default_factory=list)

    def transfers(self, arrays: int) -> float:
        """Transfers of one piece.

        For a large piece as many as leave the disk's queue room for another.
        """
        return min(DEPTH / 2, self.num_chunks / self.num_pieces * arrays)


def compile_step(schedules: Sequence[Schedule], plan: Plan, model: ModelProfile, rates: Rates, *, staging_bytes: int) -> Program:
    """The jobs of one optimizer step.

    Args:
        schedules: The schedules of one step: micro-batches that only accumulate, then the one with
            updates.
        plan: The resolved plan of the schedules.
        model: The model.
        rates: The machine's rates.
        staging_bytes: Host memory through which state on disk streams.
    """
    return _Compiler(schedules, plan, model, rates, staging_bytes).run()


def _spare_bytes(schedule: Schedule, plan: Plan, model: ModelProfile) -> int:
    """Copies of weights in memory that a discarded update restores; see [Note: Speculation]."""
    if schedule.signature.updates not in (Updates.SPECULATIVE, Updates.REDONE):
        return 0
    shapes = model.shape().blocks
    early = {o.block for o in schedule.ops if o.kind is OpKind.UPDATE and schedule.anchors[o.at].phase is not Phase.VERDICT}
    return sum(shapes[block].weight_bytes for block in early if plan.blocks[block].weights is not Tier.DISK)


class _Compiler:
    def __init__(self, schedules: Sequence[Schedule], plan: Plan, model: ModelProfile, rates: Rates, staging_bytes: int) -> None:
        self._schedules, self._plan, self._model = schedules, plan, model
        self._hardware, self._shared, self._duplex = rates.hardware, rates.hardware.shared_memory, rates.hardware.disk_duplex
        buffer_bytes = _CHUNK_PARAMS * (model.compute_itemsize + model.state_itemsize)
        self._program = Program(buffer_bytes=buffer_bytes, chooses_d2h=plan.priority)
        ranks = schedules[-1].ranks
        if ranks not in (1, self._hardware.ranks):
            raise ConfigError(
                f"a schedule for {ranks} ranks on machine {self._hardware.name!r} with ranks={self._hardware.ranks}; both have to "
                f"be the same."
            )
        deferred = self._shared and ranks == 1 and schedules[-1].signature.updates not in (Updates.NONE, Updates.IN_BACKWARD)
        self._memory = Occupancy(
            plan, model, shared_memory=self._shared, staging_bytes=staging_bytes + _spare_bytes(schedules[-1], plan, model),
            ranks=ranks, keeps_gradients=deferred,
        )  # fmt: skip
        self._in_order = {Server.H2D, Server.NET} | (set() if plan.priority else {Server.D2H})
        self._lane_first: dict[Server, int] = {}  # servers that keep the schedule's order
        self._lane_last: dict[Server, int] = {}
        self._latest: dict[Key, int] = {}  # of the previous schedules
        self._carried: list[tuple[Key, int]] = []
        self._at_begin: list[int] = []  # jobs that the step's first anchor issues
        self._compute: int | None = None  # the last job on the compute lane so far
        self._group = 0
        streams = sum(op.kind is OpKind.UPDATE and self._is_streamed(op.block) for s in schedules for op in s.ops)
        least, most = _PIECES_OF_A_BLOCK
        self._num_pieces = max(least, min(most, _PIECES_OF_A_STEP // max(1, streams)))

    def run(self) -> Program:
        program = self._program
        program.constant = self._memory.constant(self._schedules[0])
        for schedule in self._schedules:
            self._schedule(schedule)
        if self._compute is not None:
            program.last = self._compute
        for job in self._at_begin:
            program.carry(program.last, job)
        for server, job in self._lane_first.items():
            program.carry(self._lane_last[server], job)
        for key, job in self._carried:
            if key in self._latest:
                program.carry(self._latest[key], job)
        last = program.jobs[program.last]
        if (left := self._memory.end()) is not None:
            device, host = last.ends or (0, 0)
            last.ends = device + left[0], host + left[1]
        return program

    # ---- one schedule ----------------------------------------------------------------------------

    def _schedule(self, schedule: Schedule) -> None:
        self._updates, self._verdict = schedule.signature.updates, len(schedule.anchors) - 1
        self._done: dict[int, int] = {}  # op -> the job that ends it
        self._streams: dict[int, _StagedUpdate] = {}  # block -> its update
        self._stores = {op.block: op for op in schedule.ops if op.kind is OpKind.STORE}
        self._resident = set(schedule.resident_before)
        if self._compute is not None:
            self._program.turns[self._compute] = Phase.FORWARD
        provided: dict[Key, int] = {}
        ops = iter(schedule.ops)
        op = next(ops, None)
        for index, anchor in enumerate(schedule.anchors):
            turns = anchor.phase is not Phase.FORWARD and (index == 0 or schedule.anchors[index - 1].phase is Phase.FORWARD)
            if turns and self._compute is not None:
                self._program.turns[self._compute] = Phase.BACKWARD
            arrival = self._compute
            seen = not self._is_unseen(anchor)
            while seen and op is not None and op.at <= index:
                self._group += 1
                self._done[op.id] = provided[op.kind, op.block] = self._op(op, arrival)
                op = next(ops, None)
            self._group += 1
            self._anchor(anchor, seen=seen, training=schedule.signature.training)
        if self._shared and any(o.kind is OpKind.UPDATE and o.lane is Lane.COMPUTE for o in schedule.ops):
            # If some updates of a step run on the device, the runtime waits for all
            # (Executor.handover).
            self._group += 1
            updates = [self._done[o.id] for o in schedule.ops if o.kind is OpKind.UPDATE]
            self._on_compute(self._job(None, Server.COMPUTE), after=updates)
        self._latest |= provided

    def _is_unseen(self, anchor: Anchor) -> bool:
        """Whether the runtime skips the anchor: it does not stop at a pinned block's backward."""
        return anchor.phase is Phase.BACKWARD and self._model.blocks[anchor.block].pinned

    def _anchor(self, anchor: Anchor, *, seen: bool, training: bool) -> None:
        job = self._job(anchor, Server.COMPUTE)
        if anchor.phase is not Phase.VERDICT:
            block, placed = self._placed(anchor.block)
            job.amount = block.forward_s if anchor.phase is Phase.FORWARD else backward_s(block, placed)
            job.starts, job.ends = self._memory.anchor(anchor.phase, anchor.block, training=training)
        else:
            job.ends = self._memory.verdict(keeps=self._updates is not Updates.REDONE)
        number = self._on_compute(job, after=[self._done[i] for i in anchor.needs] if seen else ())
        if seen:
            self._carry(anchor.carried, number)
        if self._program.first < 0:
            self._program.first = number

    def _job(
        self, source: Op | Anchor | None, server: Server, *, amount: float = 0.0, work: Work = Work.COMPUTE, rank: int = 0,
        transfers: float = 0.0, stream: _StagedUpdate | None = None, role: Role = Role.NONE,
    ) -> Job:  # fmt: skip
        number = -1 if stream is None else stream.number
        return Job(source, self._group, int(server), int(work), amount, rank, transfers, int(role), number)

    def _on_compute(self, job: Job, *, after: Iterable[int]) -> int:
        number = self._program.add(job, after)
        self._issued(number, self._compute)
        self._compute = number
        return number

    def _issued(self, job: int, arrival: int | None) -> None:
        """An anchor begins when the previous compute has ended."""
        if arrival is None:
            self._at_begin.append(job)
        else:
            self._program.edge(arrival, job)

    def _carry(self, keys: Iterable[Key], job: int) -> None:
        """Edges to the latest ops of earlier schedules of this step or of the step before."""
        for key in keys:
            if key in self._latest:
                self._program.edge(self._latest[key], job)
            else:
                self._carried.append((key, job))

    # ---- ops -------------------------------------------------------------------------------------

    def _op(self, op: Op, arrival: int | None) -> int:
        again = op.kind is OpKind.FETCH and op.payload is Payload.WEIGHTS and op.block in self._resident
        if op.kind is OpKind.FETCH and op.payload is Payload.WEIGHTS:
            self._resident.add(op.block)
        elif op.kind is OpKind.RELEASE and op.lane is Lane.DISK_READ:
            self._resident.discard(op.block)
        after = [self._done[i] for i in op.after]
        if op.kind is OpKind.FETCH and op.payload is Payload.STATE:
            return self._open(op, arrival, after)
        if op.kind is OpKind.UPDATE and op.lane is Lane.CPU and self._is_streamed(op.block):
            return self._update(op, arrival, after)
        if op.kind is OpKind.STORE and op.block in self._streams:
            return self._store(op, arrival, after)
        whole = self._whole(op, arrival, after)
        if again:
            self._program.jobs[whole].starts = None  # they replace the discarded ones
        return whole

    def _whole(self, op: Op, arrival: int | None, after: list[int]) -> int:
        """An op that is one job."""
        amount = amount_of(op, self._plan, self._model, self._hardware)
        job = self._job(op, Server.INSTANT) if amount is None else self._transfer(op, amount)
        job.starts, job.ends = self._memory.op(op)
        if op.lane is Lane.COMPUTE and amount is not None:
            number = self._on_compute(job, after=after)
        else:
            number = self._program.add(job, after)
            self._issued(number, arrival)
            self._keep_order(number, Server(job.server))
        self._carry(op.carried, number)
        return number

    def _transfer(self, op: Op, amount: Amount) -> Job:
        return self._job(
            op, self._server(amount.work), amount=amount.units, work=amount.work,
            rank=self._rank(op, amount.work), transfers=max(1.0, amount.num_bytes / _TRANSFER_BYTES),
        )  # fmt: skip

    def _keep_order(self, job: int, server: Server) -> None:
        if server in self._in_order:
            if server in self._lane_last:
                self._program.edge(self._lane_last[server], job)
            self._lane_first.setdefault(server, job)
            self._lane_last[server] = job

    def _server(self, work: Work) -> Server:
        if work is Work.DISK_WRITE:
            return Server.DISK_WRITE if self._duplex else Server.DISK
        return _SERVERS[work]

    def _rank(self, op: Op, work: Work) -> int:
        """The engine's rank: of equal urgency, writes go first (native/src/engine_schedule.cc)."""
        return 2 * urgency(op.kind, op.payload, op.block, lowest_first=self._plan.priority) + (work is Work.DISK_READ)

    # ---- streamed updates: [Note: Pieces] --------------------------------------------------------

    def _is_streamed(self, block: int) -> bool:
        return stored_bytes(*self._placed(block), self._model) > 0

    def _stream(self, block: int) -> _StagedUpdate:
        """The block's update; the first of its ops begins it."""
        if block not in self._streams:
            profile, placed = self._placed(block)
            on_disk = placed.weights is Tier.DISK, placed.state is Tier.DISK
            read = self._model.state_bytes(profile) * on_disk[1]
            # Weights that are not in memory go from file to file. With an fp32 master they are only
            # written.
            staged = on_disk[0] and block not in self._resident and self._model.compute_itemsize == 4
            read += self._model.weight_bytes(profile) * staged
            num_chunks = -(-profile.num_params // _CHUNK_PARAMS)
            num_pieces = min(self._num_pieces, num_chunks)
            number = len(self._program.piece_bytes)
            self._program.piece_bytes.append(num_chunks / num_pieces * self._program.buffer_bytes)
            self._streams[block] = _StagedUpdate(
                number=number,
                num_pieces=num_pieces,
                num_chunks=num_chunks,
                read_bytes=float(read),
                write_bytes=float(stored_bytes(profile, placed, self._model)),
                reads_arrays=on_disk[1] + staged,
                writes_arrays=sum(on_disk),
            )
        return self._streams[block]

    def _open(self, op: Op, arrival: int | None, after: list[int]) -> int:
        """The reads of a streamed update.

        Later ops other than UPDATE wait only for it to be opened.
        """
        if op.block in self._streams and self._streams[op.block].computes:
            del self._streams[op.block]  # the verdict has discarded it, and it is repeated
        stream, program = self._stream(op.block), self._program
        opened = program.add(self._job(op, Server.INSTANT, stream=stream, role=Role.OPEN), after)
        self._issued(opened, arrival)
        self._carry(op.carried, opened)
        rank = self._rank(op, Work.DISK_READ)
        amount, transfers = stream.read_bytes / stream.num_pieces, stream.transfers(stream.reads_arrays)
        for _ in range(stream.num_pieces):
            job = self._job(
                op, Server.DISK, amount=amount, work=Work.DISK_READ, rank=rank, transfers=transfers, stream=stream, role=Role.READ
            )
            stream.reads.append(program.add(job, (opened,)))
        return opened

    def _update(self, op: Op, arrival: int | None, after: list[int]) -> int:
        program, store, stream = self._program, self._stores.get(op.block), self._stream(op.block)
        if stream.read_bytes and not stream.reads:
            self._open(op, arrival, after)
        arm = program.add(self._job(op, Server.INSTANT, stream=stream, role=Role.ARM), after)
        self._issued(arm, arrival)
        stream.issued_at = op.at
        # The engine computes only what it may write: the commit of the step before comes first.
        self._carry(dict.fromkeys((*op.carried, *(store.carried if store else ()))), arm)
        for agreed in () if store is None else [i for i in store.after if i < op.id and i not in op.after]:
            program.edge(self._done[agreed], arm)  # on several ranks: the commits of all
        amount = update_amount(op, self._model, shared_memory=self._shared)
        rank, units = self._rank(op, Work.CPU_UPDATE), amount.units / stream.num_pieces
        role = Role.LAST if store is None and stream.reads else Role.NONE
        for piece in range(stream.num_pieces):
            job = self._job(op, Server.CPU, amount=units, work=Work.CPU_UPDATE, rank=rank, stream=stream, role=role)
            stream.computes.append(program.add(job, (arm, *stream.reads[piece : piece + 1])))
        _, program.jobs[-1].ends = self._memory.op(op, tried=self._is_tried(op))
        return stream.computes[-1]

    def _store(self, op: Op, arrival: int | None, after: list[int]) -> int:
        stream, program, server = self._streams[op.block], self._program, self._server(Work.DISK_WRITE)
        others = [i for i in after if i not in stream.computes]
        rank = self._rank(op, Work.DISK_WRITE)
        amount, transfers = stream.write_bytes / stream.num_pieces, stream.transfers(stream.writes_arrays)
        role = Role.LAST if stream.reads else Role.NONE
        number = -1
        for compute in stream.computes:
            job = self._job(
                op, server, amount=amount, work=Work.DISK_WRITE, rank=rank, transfers=transfers, stream=stream, role=role
            )
            number = program.add(job, (compute, *others))
            if op.at != stream.issued_at:
                self._issued(number, arrival)
        return number

    def _is_tried(self, op: Op) -> bool:
        """Whether a later verdict may discard an UPDATE; only streamed ones qualify."""
        return self._updates in (Updates.SPECULATIVE, Updates.REDONE) and op.at != self._verdict

    def _placed(self, block: int) -> tuple[BlockProfile, BlockPlan]:
        return self._model.blocks[block], self._plan.blocks[block]
