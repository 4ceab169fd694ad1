"""The joint space of placements and activation policies as a linear programme: a lower bound of every plan, and where to start.

[Note: Segments]
Blocks of one kind that follow each other form segments. A segment's variables are shares of its blocks: of each placement (tiers of
weights and state, lane of the update), of each policy for each operator's output, of each policy for the blocks' inputs. What a
share takes is linear in it (:func:`.bounds.uses`), so are the bounds of time (:mod:`.bounds`) and those of memory below.
Every plan is a point of this space, and its memory at the moments looked at here is at least what the rows say; so no plan is
faster than the programme's optimum.

Source: our own; the rows of time generalise LoHan eqs. 4 and 5 and AutoHete eqs. 3 and 5, which are maxima over resources too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import groupby, pairwise, product
from typing import Any

import numpy as np

from lightning_hetero.cost import Rates, Work
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Saved, Tier, UpdateLane
from lightning_hetero.lowering.needs import DEVICE_STATES
from lightning_hetero.lowering.staging import least_staging, read_ahead
from lightning_hetero.planners.bounds import LANES, ROOMS, Matrices, Room, Use, Vector, rows, unit_s, uses

GB = 1e9  # the programme's unit of memory: solvers' tolerances are absolute
REST = ""  # stands for what a block saves beside its input and its operators' outputs
INPUT = "\0"  # stands for its input
STRESSED = ("h2d", "d2h", "cpu", "disk_read", "disk_write", "disk", "dram", "update", "swap")  # all resources but compute

_MOST_CUTS = 2  # from each end of a run of equal blocks
_MOST_PLACES = 12  # at which a model is cut in two; every one adds some thirty rows, and any choice of them gives a bound
_EASE = 3e-3  # seconds of the step that a second of transfers or CPU updates is worth: of equal starts the one that moves least

_STEEPNESS = 3  # of the price of work on a resource over the share of the step in which it is busy

Placed = tuple[Tier, Tier, UpdateLane]  # weights, state, update
Choice = Placed | Saved

_D, _H, _K = Tier.DEVICE, Tier.HOST, Tier.DISK
_OWN_MEMORY: tuple[Placed, ...] = (
    (_D, _D, UpdateLane.DEVICE),
    (_D, _H, UpdateLane.DEVICE),
    (_D, _H, UpdateLane.CPU),
    (_H, _D, UpdateLane.DEVICE),
    (_H, _H, UpdateLane.DEVICE),
    (_H, _H, UpdateLane.CPU),
    (_D, _K, UpdateLane.CPU),
    (_H, _K, UpdateLane.CPU),
    (_K, _H, UpdateLane.CPU),
    (_K, _K, UpdateLane.CPU),
)
_UNTRAINED: tuple[Placed, ...] = ((_D, _D, UpdateLane.DEVICE), (_H, _H, UpdateLane.CPU), (_K, _H, UpdateLane.CPU))
_LINK_WORK, _DISK_WORK = frozenset({Work.H2D, Work.D2H}), frozenset({Work.DISK_READ, Work.DISK_WRITE})
_ONE_MEMORY: tuple[Placed, ...] = (
    (_D, _D, UpdateLane.DEVICE),
    (_H, _H, UpdateLane.CPU),
    (_H, _K, UpdateLane.CPU),
    (_K, _H, UpdateLane.CPU),
    (_K, _K, UpdateLane.CPU),
)


def placements(block: BlockProfile, hardware: HardwareProfile) -> tuple[Placed, ...]:
    """The placements that a machine allows for a block, those that move least first."""
    able = _able(hardware)
    trained, shared = block.num_trainable_params > 0, hardware.shared_memory

    def allowed(weights: Tier, state: Tier, update: UpdateLane) -> bool:
        if _K in (weights, state) and (not able >= _DISK_WORK or not hardware.disk_capacity_bytes):
            return False
        if weights is _K and block.pinned:
            return False
        if not shared and not able >= _LINK_WORK and (weights, state) != (_D, _D):
            return False
        if not trained:  # without state only the tier of the weights differs
            return (weights, state, update) in _UNTRAINED
        return (Work.CPU_UPDATE if update is UpdateLane.CPU else Work.DEVICE_UPDATE) in able

    return tuple(p for p in (_ONE_MEMORY if shared else _OWN_MEMORY) if allowed(*p))


def policies(hardware: HardwareProfile) -> tuple[Saved, ...]:
    """The policies that a machine allows for what forward saves."""
    if hardware.shared_memory:
        return (Saved.KEEP,)
    able = _able(hardware)
    disk = able >= _DISK_WORK and hardware.disk_capacity_bytes > 0
    swaps = ((Saved.SWAP_HOST, Saved.SWAP_DISK) if disk else (Saved.SWAP_HOST,)) if able >= _LINK_WORK else ()
    return (Saved.KEEP, Saved.RECOMPUTE, *swaps)


def _able(hardware: HardwareProfile) -> frozenset[Work]:
    rates = Rates(hardware)
    return frozenset(work for work in Work if unit_s(rates, work) > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Blocks of one kind that follow each other; see [Note: Segments].

    Attributes:
        start: Its first block.
        stop: The block behind its last.
        block: A block of mean times.
        least: A block of the least forward and transient bytes: what any of them needs at least.
    """

    start: int
    stop: int
    block: BlockProfile
    least: BlockProfile

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def kind(self) -> tuple[object, ...]:
        """What blocks have in common that are equal."""
        return _kind(self.block)


def segments(model: ModelProfile) -> tuple[Segment, ...]:
    """Cuts a model into segments: runs of equal blocks, long ones in several, shorter ones towards both ends of the model.

    The next step needs the first blocks' updates first, and backward the last blocks' activations: there the windows of
    [Note: Bound] are narrow.
    """
    found: list[Segment] = []
    for _, run in groupby(enumerate(model.blocks), key=lambda pair: _kind(pair[1])):
        indices = [index for index, _ in run]
        found += [_segment(model.blocks, indices[a:b]) for a, b in pairwise(_cuts(len(indices)))]
    return tuple(found)


def _cuts(count: int) -> list[int]:
    """0, 1, 3, 7, and so on from both ends of a run."""
    ends = {0, count}
    for power in range(1, _MOST_CUTS + 1):
        step = 2**power - 1
        if 2 * step < count:
            ends |= {step, count - step}
    return sorted(ends)


def _kind(block: BlockProfile) -> tuple[object, ...]:
    """All that decides what a block takes, but for what is measured and so never quite the same."""
    sizes = (block.num_params, block.num_trainable_params, block.activation_bytes, block.boundary_bytes, block.pinned)
    return (*sizes, *((o.name, o.bytes) for o in block.operators))


def _segment(blocks: Sequence[BlockProfile], indices: Sequence[int]) -> Segment:
    chosen = [blocks[i] for i in indices]
    first, count = chosen[0], len(chosen)
    mean = replace(first, forward_s=sum(b.forward_s for b in chosen) / count, backward_s=sum(b.backward_s for b in chosen) / count)
    least = replace(first, forward_s=min(b.forward_s for b in chosen), transient_bytes=min(b.transient_bytes for b in chosen))
    return Segment(start=indices[0], stop=indices[-1] + 1, block=mean, least=least)


def _places(found: Sequence[Segment]) -> tuple[int, ...]:
    """The segments in front of which a model is cut: all, or where they are many those at both ends and at equal shares of compute.

    At the ends the windows of [Note: Bound] are narrow.
    """
    if len(found) <= _MOST_PLACES:
        return tuple(range(len(found)))
    seconds = np.cumsum([len(s) * (s.block.forward_s + s.block.backward_s) for s in found])
    ends = (0, 1, len(found) - 2, len(found) - 1)
    shares = np.linspace(0.0, seconds[-1], _MOST_PLACES - len(ends) + 2)[1:-1]
    return tuple(sorted({*ends, *np.searchsorted(seconds, shares).tolist()}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One variable: the share of a segment's blocks that make one choice.

    Attributes:
        segment: The segment's place.
        what: ``None`` for a placement; else the operator, ``REST`` or ``INPUT``, whose bytes the choice is for.
        choice: The placement or the policy.
        taken: What the whole segment takes by it; of a policy what it takes beside keeping everything.
        moving_bytes: Of a placement: device memory that state passes through on its way to an update there.
        passing_bytes: Of a placement: device memory that one block's weights pass through.
        waiting_bytes: Of a placement: host memory that one block's gradients pass through.
        fetched_bytes: Of a placement: host memory that one block's weights pass through.
    """

    segment: int
    what: str | None
    choice: Choice
    taken: Vector
    moving_bytes: float = 0.0
    passing_bytes: float = 0.0
    waiting_bytes: float = 0.0
    fetched_bytes: float = 0.0


def saved_rules(block: BlockProfile, allowed: Sequence[Saved]) -> Iterator[tuple[str, Saved, BlockPlan]]:
    """Every single choice for what a block saves, and the block's rule if all else is kept."""
    names = [o.name for o in block.operators]
    rest = block.activation_bytes - block.boundary_bytes - sum(o.bytes for o in block.operators)
    for name, policy in product(names, allowed):
        yield name, policy, BlockPlan(name=block.name, operators={name: policy})
    for policy in allowed if rest > 0 else ():
        yield REST, policy, BlockPlan(name=block.name, saved=policy, operators=dict.fromkeys(names, Saved.KEEP))
    for policy in allowed if block.boundary_bytes else ():
        if policy is not Saved.RECOMPUTE:
            yield INPUT, policy, BlockPlan(name=block.name, boundary=policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """An optimum of the programme.

    Attributes:
        seconds: What a step takes by the programme.
        busy_s: Seconds in which each resource works.
        shares: For each segment and each ``what`` of its columns the shares of the choices.
        waiting_bytes: Host memory for gradients that wait for their update.
    """

    seconds: float
    busy_s: Mapping[str, float]
    shares: tuple[Mapping[str | None, Mapping[Choice, float]], ...]
    waiting_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Practice:
    """What a real schedule takes beyond the least that the bound counts.

    Attributes:
        slots: Blocks whose weights pass through a tier at once: one computes while others come.
        depth: Blocks whose swapped activations are on their way (``Plan.prefetch_depth``).
        state_moves: Whether the device may update state that lives on the host.
        stress: How many times longer all but compute takes than it does.
    """

    slots: int = 1
    depth: int = 0
    state_moves: bool = True
    stress: float = 1.0


class UnsolvedError(RuntimeError):
    """No solver could say whether a programme has an optimum."""


class _Extra(IntEnum):
    """Variables beside the columns and the rooms."""

    MOVING = 0  # GB of device memory for state on its way to an update there
    STAGING = 1  # GB of host memory through which what lives on disk streams
    LACKING = 2  # GB that one tier lacks
    TIME = 3  # seconds of the step, in units of its compute


_Row = tuple[Vector, float]
Matrix = Vector  # of two dimensions


class Relaxation:
    """The programme of one model on one machine.

    Args:
        model: The model; its times and activations are those of one micro-batch.
        hardware: The machine.
        micro_batches: Forwards and backwards of one step.
    """

    def __init__(self, model: ModelProfile, hardware: HardwareProfile, *, micro_batches: int = 1) -> None:
        self.model, self.hardware, self.micro_batches = model, hardware, micro_batches
        self.segments = segments(model)
        self.staging_bytes = 0
        if hardware.disk_capacity_bytes:
            streamed = sum(b.num_trainable_params for b in model.blocks) * model.state_itemsize
            self.staging_bytes = least_staging(model) + read_ahead(4 * hardware.host_memory_bytes, streamed)
        self.matrices = Matrices(rows(model, hardware, micro_batches=micro_batches, staging_bytes=self.staging_bytes))
        self.columns = tuple(column for index in range(len(self.segments)) for column in self._columns(index))
        self._places = _places(self.segments)
        self._compute_s = sum(b.forward_s + b.backward_s for b in model.blocks) * micro_batches
        self._unit_s = self._compute_s or 1.0
        self._segment = np.array([c.segment for c in self.columns])
        self._taken = np.array([c.taken for c in self.columns]).T
        # Segments between two places form a group, and those at a place one each. The rows of time count what a group takes.
        starts = sorted({place + end for place in self._places for end in (0, 1)} - {len(self.segments)})
        self._group = np.searchsorted(starts, self._segment, side="right") - 1
        # Variables: the columns, then the rooms, the others, and what each group takes of each use.
        self._rooms = len(self.columns) + np.arange(len(Room))
        self._extra = self._rooms[-1] + 1 + np.arange(len(_Extra))
        self._sums = self._extra[-1] + 1 + np.arange(len(starts) * len(Use)).reshape(len(starts), len(Use))
        self._size = int(self._sums[-1, -1]) + 1

    def _columns(self, index: int) -> Iterator[Column]:
        segment, m = self.segments[index], self.micro_batches
        count, name, shared = len(segment), segment.block.name, self.hardware.shared_memory
        weights_bytes = segment.block.num_params * self.model.compute_itemsize
        gradient_bytes = segment.block.num_trainable_params * self.model.compute_itemsize
        for weights, state, update in placements(segment.block, self.hardware):
            rule = BlockPlan(name=name, weights=weights, state=state, update=update)
            moves = not shared and update is UpdateLane.DEVICE and state is Tier.HOST
            on_host = update is UpdateLane.CPU or shared
            yield Column(
                segment=index,
                what=None,
                choice=(weights, state, update),
                taken=count * uses(segment.block, rule, self.model, self.hardware, m),
                moving_bytes=moves * min(count, DEVICE_STATES) * segment.block.num_trainable_params * self.model.state_itemsize,
                passing_bytes=weights_bytes * (not shared and weights is not Tier.DEVICE),
                waiting_bytes=gradient_bytes * on_host * (count if m > 1 else 1),
                fetched_bytes=weights_bytes * (weights is Tier.DISK),
            )
        kept = uses(segment.least, BlockPlan(name=name), self.model, self.hardware, m)
        for what, policy, rule in saved_rules(segment.least, policies(self.hardware)):
            taken = uses(segment.least, rule, self.model, self.hardware, m) - kept
            yield Column(segment=index, what=what, choice=policy, taken=count * taken)

    # ---- rows: pairs of coefficients and the most that they may come to ---------------------------------------------------------

    def _time(self, practice: Practice) -> tuple[Matrix, Vector]:
        """Every bound of a step, at every place of :func:`_places`: coefficients, and the most that each row may come to."""
        found, groups = self.matrices, np.arange(len(self._sums))
        factor = np.array([practice.stress if row.resource in STRESSED else 1.0 for row in found.rows])
        units = np.where(np.arange(len(Use)) == Use.COMPUTE_S, 1.0, GB * factor[:, None]) / self._unit_s
        always, early, late, here = ((table * units)[:, None, :] for table in (found.always, found.early, found.late, found.here))
        chosen, seconds = [np.flatnonzero(found.uncut)], [np.repeat(always[found.uncut], len(groups), axis=1)]
        for place in self._places:
            first, count = self._group[self._segment == place][0], len(self.segments[place])
            before, behind, at = (compare(groups, first)[:, None] for compare in (np.less, np.greater_equal, np.equal))
            # A row for one block holds for a segment of several only in practice: for the one of mean shares.
            holds = np.flatnonzero(~found.uncut & (~found.single | (count == 1 or practice.slots > 1)))
            chosen.append(holds)
            seconds.append(always[holds] + early[holds] * before + late[holds] * behind + here[holds] * (at / count))
        rows = np.concatenate(chosen)
        matrix = np.zeros((len(rows), self._size))
        matrix[:, self._sums.ravel()] = np.concatenate(seconds).reshape(len(rows), -1)
        matrix[:, self._rooms] = (found.rooms * factor[:, None])[rows] * GB / self._unit_s
        matrix[:, self._extra[_Extra.TIME]] = -1.0
        return matrix, -found.constant_s[rows] / self._unit_s

    def _taken_by_groups(self) -> Matrix:
        """Rows that are 0: what the columns of each group take of each use, less the variable that stands for it."""
        units = np.where(np.arange(len(Use)) == Use.COMPUTE_S, 1.0, GB)
        matrix = np.zeros((self._sums.size, self._size))
        for place, column in enumerate(self.columns):
            matrix[self._group[place] * len(Use) + np.arange(len(Use)), place] = column.taken / units
        matrix[np.arange(self._sums.size), self._sums.ravel()] = -1.0
        return matrix

    def _memory(self, practice: Practice) -> Iterator[tuple[Tier, _Row]]:
        """What must fit each tier, at the moments of [Note: Needs] in ``lowering.needs``; in GB."""
        h, m = self.hardware, self.model
        saved, device, host = self._uses(Use.DEVICE_SAVED), self._uses(Use.DEVICE_HELD), self._uses(Use.HOST_HELD)
        swapped = self._uses(Use.SWAPPED)
        below = host + self._rooms_of(Room.PASSED_DISK) + self._extras_of(_Extra.STAGING)
        above = device + self._rooms_of(Room.PASSED_CPU, Room.PASSED_DEVICE) + self._extras_of(_Extra.MOVING)
        gradients = self._uses(Use.DEVICE_GRADIENTS)
        room = {
            Tier.DEVICE: h.device_memory_bytes - m.constant_device_bytes,
            Tier.HOST: h.host_memory_bytes - m.constant_host_bytes,
        }
        if h.shared_memory:
            room = {Tier.HOST: room[Tier.HOST] - m.constant_device_bytes}
            above = below = device + host + self._rooms_of(Room.PASSED_DISK) + self._extras_of(_Extra.STAGING)
        top = Tier.HOST if h.shared_memory else Tier.DEVICE
        for place, segment in enumerate(self.segments):
            block = segment.least
            own = block.transient_bytes + block.num_trainable_params * m.compute_itemsize * (2 if practice.depth else 1)
            waiting = gradients if self.micro_batches > 1 else 0.0
            before = self._variables((self._segment < place).astype(np.float64))
            here = self._variables((self._segment == place).astype(np.float64))
            # Of this segment's blocks one computes, with all that it saves; others on their way.
            passing = swapped * here * min(practice.depth, len(segment) - 1) / len(segment)
            yield top, (above + waiting + saved * before + passing, (room[top] - own - block.activation_bytes) / GB)
            share = (len(segment) - 1) / len(segment) if practice.depth else 1.0
            least = block.activation_bytes if practice.depth else 0
            yield top, (above + waiting + saved * (before + here * share) + passing, (room[top] - own - least) / GB)
        first = self.segments[0].least
        after = gradients if h.shared_memory else 0.0
        least = first.activation_bytes + first.transient_bytes if h.shared_memory else 0
        yield Tier.HOST, (below + self._uses(Use.HOST_SAVED), room[Tier.HOST] / GB)
        yield Tier.HOST, (below + after + self._rooms_of(Room.WAITING), (room[Tier.HOST] - least) / GB)
        yield Tier.DISK, (self._uses(Use.DISK_HELD), h.disk_capacity_bytes / GB)

    def _least(self, practice: Practice) -> Iterator[_Row]:
        """Rooms are at least what one block needs, and serve at most what passes them."""
        staging = least_staging(self.model) / GB
        disk = np.array([isinstance(c.choice, tuple) and Tier.DISK in c.choice for c in self.columns]) * staging
        sizes = [(c.passing_bytes, c.fetched_bytes, c.waiting_bytes, c.moving_bytes) for c in self.columns]
        device, host, waiting, moving = (np.array(column) / GB for column in zip(*sizes, strict=True))
        rooms = (
            (device, self._rooms_of(Room.PASSED_CPU, Room.PASSED_DEVICE), practice.slots),
            (host, self._rooms_of(Room.PASSED_DISK), practice.slots),
            (waiting, self._rooms_of(Room.WAITING), practice.slots),
            (moving, self._extras_of(_Extra.MOVING), 1),
            (disk, self._extras_of(_Extra.STAGING), 1),
        )
        for place, segment in enumerate(self.segments):
            for needed, room, slots in rooms:
                mine = needed * (self._segment == place)
                if mine.any():
                    yield min(slots, len(segment)) * self._variables(mine) - room, 0.0
        for use, place in ROOMS.items():
            yield self._rooms_of(place) - self._uses(use), 0.0
        if self.micro_batches > 1:
            yield self._variables(waiting) - self._rooms_of(Room.WAITING), 0.0

    def _variables(self, columns: Vector) -> Vector:
        return np.append(columns, np.zeros(self._size - len(self.columns)))

    def _uses(self, use: Use) -> Vector:
        return self._variables(self._taken[use] / GB)

    def _rooms_of(self, *rooms: Room) -> Vector:
        return self._chosen(self._rooms[list(rooms)])

    def _extras_of(self, extra: _Extra) -> Vector:
        return self._chosen(self._extra[extra])

    def _chosen(self, places: Any) -> Vector:
        row = np.zeros(self._size)
        row[places] = 1.0
        return row

    # ---- optima ---------------------------------------------------------------------------------------------------------------

    def bound_s(self) -> float | None:
        """No plan's step is shorter, seconds; ``None`` if not even this relaxation fits. What compute takes if no solver knows."""
        try:
            found = self._minimum(self._extras_of(_Extra.TIME), Practice())
        except UnsolvedError:
            return self._compute_s
        return None if found is None else float(found[self._extra[_Extra.TIME]]) * self._unit_s

    def start(self, practice: Practice) -> Relaxed | None:
        """Shares that take little time in practice, and of those that take as little the ones that move least.

        Returns:
            ``None`` if nothing fits, or nothing was found.
        """
        try:
            found = self._minimum(self._extras_of(_Extra.TIME) + _EASE * self._moved(), practice)
        except UnsolvedError:
            return None
        return None if found is None else self._read(found)

    def shortfall_bytes(self, tier: Tier) -> int | None:
        """The least memory that would have to be added on one tier alone for the relaxation to fit; ``None`` if none is enough."""
        try:
            found = self._minimum(self._extras_of(_Extra.LACKING), Practice(), short=tier)
        except UnsolvedError:
            return None
        return None if found is None else math.ceil(found[self._extra[_Extra.LACKING]] * GB)

    def _minimum(self, objective: Vector, practice: Practice, *, short: Tier | None = None) -> Vector | None:
        """Values of all variables at the least of an objective."""
        import cvxpy as cp  # takes a second to import
        from scipy.sparse import csr_array  # type: ignore[import-untyped]

        rows = list(self._least(practice))
        for tier, (row, capacity) in self._memory(practice):
            spare = self._extras_of(_Extra.LACKING) if tier is short else 0.0
            rows.append((row - spare, capacity))
        if not practice.state_moves:
            rows.append((self._uses(Use.STATE_UP), 0.0))
        if short is None:
            rows.append((self._extras_of(_Extra.LACKING), 0.0))
        x, shares = cp.Variable(self._size, nonneg=True), self._shares()
        sums = self._taken_by_groups()
        seconds, most_s = self._time(practice)
        matrix = np.vstack((seconds, *(row for row, _ in rows)))
        most = np.concatenate((most_s, [most for _, most in rows]))
        scale = np.abs(matrix).max(axis=1)
        scale[scale == 0] = 1.0
        constraints: list[Any] = [
            csr_array(matrix / scale[:, None]) @ x <= most / scale,
            csr_array(np.vstack((shares, sums))) @ x == np.append(np.ones(len(shares)), np.zeros(len(sums))),
        ]
        problem = cp.Problem(cp.Minimize(objective @ x), constraints)
        for solver in (cp.HIGHS, cp.CLARABEL):  # the first gives up on a few badly conditioned programmes
            try:
                problem.solve(solver=solver)  # type: ignore[no-untyped-call]
            except (cp.SolverError, ValueError):
                continue
            if problem.status in (cp.OPTIMAL, cp.INFEASIBLE):
                return None if problem.status == cp.INFEASIBLE or x.value is None else np.asarray(x.value)
        raise UnsolvedError(f"no solver finds an optimum of the programme for model {self.model.name!r} on {self.hardware.name!r}")

    def prices(self, relaxed: Relaxed) -> Vector:
        """Seconds of work of each column on all resources, those that a solution keeps busy most counted most."""
        rows = self._whole(("compute", *LANES))
        busy = np.array([relaxed.busy_s[self.matrices.rows[i].resource] for i in rows])
        weights: Vector = (busy / relaxed.seconds) ** _STEEPNESS if relaxed.seconds else np.ones(len(rows))
        price: Vector = weights @ self.matrices.always[rows] @ self._taken
        # Nothing hides the update of a block that the next forward needs first.
        first = np.array([s.start == 0 or self.model.blocks[s.start - 1].pinned for s in self.segments])[self._segment]
        exposed = self.matrices.here[[r.resource == "update" for r in self.matrices.rows]][0] @ self._taken
        return price + np.where(first, exposed, 0.0)

    def held_bytes(self, column: Column) -> dict[Tier, float]:
        """What a column's choice holds on each tier."""
        device = float(column.taken[Use.DEVICE_HELD] + column.taken[Use.DEVICE_SAVED])
        host = float(column.taken[Use.HOST_HELD] + column.taken[Use.HOST_SAVED])
        disk = float(column.taken[Use.DISK_HELD])
        if self.hardware.shared_memory:
            return {Tier.DEVICE: 0.0, Tier.HOST: device + host, Tier.DISK: disk}
        return {Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk}

    def _whole(self, resources: Sequence[str]) -> list[int]:
        return [i for i, row in enumerate(self.matrices.rows) if row.whole and row.resource in resources]

    def _moved(self) -> Vector:
        """Seconds of all transfers and CPU updates, in units of the step's compute."""
        lanes = self._whole(tuple(LANES))
        moved = self._variables(self.matrices.always[lanes].sum(axis=0) @ self._taken / self._unit_s)
        moved[self._rooms] = self.matrices.rooms[lanes].sum(axis=0) * GB / self._unit_s
        return moved

    def _shares(self) -> Matrix:
        """One row for each choice that a segment has to make: its shares sum to 1."""
        groups: dict[tuple[int, str | None], int] = {}
        places = [groups.setdefault((c.segment, c.what), len(groups)) for c in self.columns]
        rows = np.zeros((len(groups), self._size))
        rows[places, np.arange(len(places))] = 1.0
        return rows

    def _read(self, values: Vector) -> Relaxed:
        shares: list[dict[str | None, dict[Choice, float]]] = [{} for _ in self.segments]
        for column, value in zip(self.columns, values, strict=False):
            shares[column.segment].setdefault(column.what, {})[column.choice] = min(1.0, max(0.0, float(value)))
        taken, rooms = self._taken @ values[: len(self.columns)], values[self._rooms] * GB
        work = self.matrices.always @ taken + self.matrices.rooms @ rooms
        return Relaxed(
            busy_s={self.matrices.rows[i].resource: max(0.0, float(work[i])) for i in self._whole(("compute", *LANES))},
            seconds=float(values[self._extra[_Extra.TIME]]) * self._unit_s,
            shares=tuple(shares),
            waiting_bytes=float(rooms[Room.WAITING]),
        )
