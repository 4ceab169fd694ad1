"""The space of placements and policies as a linear programme: a bound and starting points.

Its variables are shares of a segment's blocks ([Note: Segments] in :mod:`.segments`) that make each
choice (:mod:`.block_choices`). Every plan is a point of this space, its step takes what the rows of
:mod:`.bounds` say or longer, and its memory at the moments looked at here is at least what the rows
say; so no plan is faster than the programme's optimum.

Source: our own; the rows of time generalise LoHan eqs. 4 and 5 and AutoHete eqs. 3 and 5, which are
maxima over resources too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Tier
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.lowering.staging import least_staging, read_ahead
from lightning_hetero.planners.holistic.block_choices import Choice, Column, columns
from lightning_hetero.planners.holistic.bounds import LANES, SPARE_FOR, Matrices, Quantity, SpareMemory, Vector, rows
from lightning_hetero.planners.holistic.segments import arranged, places, segments
from lightning_hetero.planners.holistic.solvers import Programme, UnsolvedError, minimum

GB = 1e9  # the programme's unit of memory: solvers' tolerances are absolute
STRESSED = ("h2d", "d2h", "cpu", "disk_read", "disk_write", "disk", "dram", "update", "swap", "net", "peer")

_EASE = 3e-3  # weight of a second of transfers or CPU updates: among equal starts the one that moves least
_HINT = 1e-6  # GB that a step shorter by its compute is worth where memory is what counts
_STEEPNESS = 3  # of the price of work on a resource over the share of the step in which it is busy


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


class _Extra(IntEnum):
    """Variables beside the columns and the rooms."""

    MOVING = 0  # GB of device memory for state on its way to an update there
    STAGING = 1  # GB of host memory through which what lives on disk streams
    LACKING = 2  # GB that one tier lacks
    TIME = 3  # seconds of the step, in units of its compute


_SECONDS = np.isin(np.arange(len(Quantity)), (Quantity.COMPUTE_S, Quantity.FORWARD_S))
_Row = tuple[Vector, float]
Matrix = Vector  # of two dimensions


def _sparse(matrix: Matrix) -> Any:
    from scipy.sparse import csr_array  # slow

    return csr_array(matrix)


class Relaxation:
    """The programme of one model on one machine.

    Args:
        model: The model; its times and activations are those of one micro-batch.
        hardware: The machine.
        micro_batches: Forwards and backwards of one step.
        updates: When updates may run.
    """

    def __init__(
        self,
        model: ModelProfile,
        hardware: HardwareProfile,
        *,
        micro_batches: int = 1,
        updates: Updates = Updates.IN_BACKWARD,
    ) -> None:
        self.model, self.hardware, self.micro_batches = model, hardware, micro_batches
        self.segments = segments(model)
        self.staging_bytes = 0
        if hardware.disk_capacity_bytes:
            streamed = sum(model.state_bytes(b) for b in model.blocks)
            self.staging_bytes = least_staging(model) + read_ahead(4 * hardware.host_memory_bytes, streamed)
        found = rows(model, hardware, micro_batches=micro_batches, staging_bytes=self.staging_bytes, updates=updates)
        self.matrices = Matrices(found)
        self.columns = tuple(columns(self.segments, model, hardware, micro_batches))
        self._places = places(self.segments)
        self._compute_s = sum(b.forward_s + b.backward_s for b in model.blocks) * micro_batches
        self._unit_s = self._compute_s or 1.0
        self._segment = np.array([c.segment for c in self.columns])
        self._taken = np.array([c.taken for c in self.columns]).T
        # Segments between two places form a group, and those at a place one each. The rows of time
        # count what a group takes.
        starts = sorted({place + end for place in self._places for end in (0, 1)} - {len(self.segments)})
        self._group = np.searchsorted(starts, self._segment, side="right") - 1
        # Variables: the columns, then the rooms, the others, and what each group takes of each use.
        self._rooms = len(self.columns) + np.arange(len(SpareMemory))
        self._extra = self._rooms[-1] + 1 + np.arange(len(_Extra))
        self._sums = self._extra[-1] + 1 + np.arange(len(starts) * len(Quantity)).reshape(len(starts), len(Quantity))
        self._size = int(self._sums[-1, -1]) + 1
        self._times: dict[tuple[float, bool], tuple[Matrix, Vector]] = {}

    def resized(self, hardware: HardwareProfile) -> Relaxation:
        """The same on a machine with other tier sizes. Its optima are starts, and no bounds."""
        other = copy(self)
        other.hardware = hardware
        return other

    # ---- rows: pairs of coefficients and the most that they may come to --------------------------

    def _time(self, practice: Practice) -> tuple[Matrix, Vector]:
        """Every bound of a step at each of :func:`places`: coefficients and right-hand sides."""
        key = practice.stress, practice.slots > 1
        if key not in self._times:
            self._times[key] = self._rows_of_time(*key)
        return self._times[key]

    def _rows_of_time(self, stress: float, in_practice: bool) -> tuple[Matrix, Vector]:
        found, groups = self.matrices, np.arange(len(self._sums))
        factor = np.array([stress if row.resource in STRESSED else 1.0 for row in found.rows])
        units = np.where(_SECONDS, 1.0, GB * factor[:, None]) / self._unit_s
        always, early, late, here = ((table * units)[:, None, :] for table in (found.always, found.early, found.late, found.here))
        chosen, seconds = [np.flatnonzero(found.uncut)], [np.repeat(always[found.uncut], len(groups), axis=1)]
        for place in self._places:
            first, count = self._group[self._segment == place][0], len(self.segments[place])
            before, behind, at = (compare(groups, first)[:, None] for compare in (np.less, np.greater_equal, np.equal))
            # A row for one block holds for a segment of several only in practice: for the one of
            # mean shares.
            holds = np.flatnonzero(~found.uncut & (~found.single | (count == 1 or in_practice)))
            chosen.append(holds)
            seconds.append(always[holds] + early[holds] * before + late[holds] * behind + here[holds] * (at / count))
        rows = np.concatenate(chosen)
        matrix = np.zeros((len(rows), self._size))
        matrix[:, self._sums.ravel()] = np.concatenate(seconds).reshape(len(rows), -1)
        matrix[:, self._rooms] = (found.rooms * factor[:, None])[rows] * GB / self._unit_s
        matrix[:, self._extra[_Extra.TIME]] = -1.0
        return matrix, -found.constant_s[rows] / self._unit_s

    @cached_property
    def _equalities(self) -> tuple[Any, Vector]:
        """What shares and sums come to: a sparse matrix, and its product with the variables."""
        shares, sums = self._shares(), self._taken_by_groups()
        return _sparse(np.vstack((shares, sums))), np.append(np.ones(len(shares)), np.zeros(len(sums)))

    def _taken_by_groups(self) -> Matrix:
        """Rows that are 0: what each group's columns take, less the variable that stands for it."""
        units = np.where(_SECONDS, 1.0, GB)
        matrix = np.zeros((self._sums.size, self._size))
        for place, column in enumerate(self.columns):
            matrix[self._group[place] * len(Quantity) + np.arange(len(Quantity)), place] = column.taken / units
        matrix[np.arange(self._sums.size), self._sums.ravel()] = -1.0
        return matrix

    def _memory(self, practice: Practice) -> Iterator[tuple[Tier, _Row]]:
        """What must fit each tier, and both where device and host have one memory; in GB."""
        found, h = list(self._of_tiers(practice)), self.hardware
        yield from found
        if h.unified_memory:
            device, host = ([row for tier, row in found if tier is one] for one in (Tier.DEVICE, Tier.HOST))
            for (above, room), (below, rest) in product(device, host):
                yield Tier.HOST, (above + below, room + rest - h.device_memory_bytes / GB)

    def _of_tiers(self, practice: Practice) -> Iterator[tuple[Tier, _Row]]:
        """What must fit each tier, at the moments of [Note: Needs] in ``lowering.needs``; in GB."""
        h, m = self.hardware, self.model
        device, host = self._uses(Quantity.DEVICE_HELD), self._uses(Quantity.HOST_HELD)
        saved, swapped = (
            self._variables(self._taken[Quantity.DEVICE_SAVED] / GB),
            self._variables(self._taken[Quantity.SWAPPED] / GB),
        )
        below = host + self._rooms_of(SpareMemory.PASSED_DISK, SpareMemory.GATHERED) + self._extras_of(_Extra.STAGING)
        above = device + self._rooms_of(SpareMemory.PASSED_CPU, SpareMemory.PASSED_DEVICE)
        after_backward = above + self._extras_of(_Extra.MOVING)
        if practice.depth:  # else state may take the place of activations
            above = after_backward
        gradients = self._uses(Quantity.DEVICE_GRADIENTS)
        room = {
            Tier.DEVICE: h.device_memory_bytes - m.constant_device_bytes,
            Tier.HOST: h.host_memory_bytes - m.constant_host_bytes,
        }
        if h.shared_memory:
            room = {Tier.HOST: room[Tier.HOST] - m.constant_device_bytes}
            above = below = below + device
        top = Tier.HOST if h.shared_memory else Tier.DEVICE
        for place, segment in enumerate(self.segments):
            block = segment.least
            own = block.transient_bytes + m.gradient_bytes(block) * (2 if practice.depth else 1)
            waiting = gradients if self.micro_batches > 1 else 0.0
            before = self._saved_before(place)
            here = self._variables((self._segment == place).astype(np.float64))
            # Of this segment's blocks one computes, with all that it saves; others on their way.
            passing = swapped * here * min(practice.depth, len(segment) - 1) / len(segment)
            yield top, (above + waiting + before + passing, (room[top] - own - block.activation_bytes) / GB)
            share = (len(segment) - 1) / len(segment) if practice.depth else 1.0
            least = block.activation_bytes if practice.depth else 0
            yield top, (above + waiting + before + saved * here * share + passing, (room[top] - own - least) / GB)
        if not h.shared_memory:
            yield top, (after_backward, room[top] / GB)
        first = self.segments[0].least
        after = gradients if h.shared_memory else 0.0
        least = first.activation_bytes + first.transient_bytes if h.shared_memory else 0
        yield Tier.HOST, (below + self._uses(Quantity.HOST_SAVED), room[Tier.HOST] / GB)
        yield Tier.HOST, (below + after + self._rooms_of(SpareMemory.WAITING), (room[Tier.HOST] - least) / GB)
        yield Tier.DISK, (self._uses(Quantity.DISK_HELD), h.disk_capacity_bytes / GB)

    def _least(self, practice: Practice) -> Iterator[_Row]:
        """Rooms are at least what one block needs, and serve at most what passes them."""
        staging = least_staging(self.model) / GB
        disk = np.array([isinstance(c.choice, tuple) and Tier.DISK in c.choice for c in self.columns]) * staging
        sizes = [(c.passing_bytes, c.fetched_bytes, c.waiting_bytes, c.moving_bytes) for c in self.columns]
        device, host, waiting, moving = (np.array(column) / GB for column in zip(*sizes, strict=True))
        rooms = (
            (device, self._rooms_of(SpareMemory.PASSED_CPU, SpareMemory.PASSED_DEVICE), practice.slots),
            (host, self._rooms_of(SpareMemory.PASSED_DISK), practice.slots),
            (waiting, self._rooms_of(SpareMemory.WAITING), practice.slots),
            (moving, self._extras_of(_Extra.MOVING), 1),
            (disk, self._extras_of(_Extra.STAGING), 1),
        )
        for place, segment in enumerate(self.segments):
            for needed, room, slots in rooms:
                mine = needed * (self._segment == place)
                if mine.any():
                    yield min(slots, len(segment)) * self._variables(mine) - room, 0.0
        for use, place in SPARE_FOR.items():
            yield self._rooms_of(place) - self._uses(use), 0.0
        if practice.depth:  # a plan has whole weights of a few blocks, or keeps them whole
            yield self._rooms_of(SpareMemory.GATHERED), 0.0
        if self.micro_batches > 1:
            yield self._variables(waiting) - self._rooms_of(SpareMemory.WAITING), 0.0

    def _variables(self, columns: Vector) -> Vector:
        return np.append(columns, np.zeros(self._size - len(self.columns)))

    def _uses(self, use: Quantity) -> Vector:
        """What all columns take of a quantity, GB, by the variables of the groups."""
        return self._chosen(self._sums[:, use])

    def _saved_before(self, place: int) -> Vector:
        """What the segments before one keep on the device: groups, and columns of its group."""
        group = self._group[self._segment == place][0]
        mine = (self._group == group) & (self._segment < place)
        return self._chosen(self._sums[:group, Quantity.DEVICE_SAVED]) + self._variables(
            mine * self._taken[Quantity.DEVICE_SAVED] / GB
        )

    def _rooms_of(self, *rooms: SpareMemory) -> Vector:
        return self._chosen(self._rooms[list(rooms)])

    def _extras_of(self, extra: _Extra) -> Vector:
        return self._chosen(self._extra[extra])

    def _chosen(self, places: Any) -> Vector:
        row = np.zeros(self._size)
        row[places] = 1.0
        return row

    # ---- optima ----------------------------------------------------------------------------------

    def bound_s(self) -> float | None:
        """A lower bound of every plan's step, seconds; ``None`` if nothing fits."""
        try:
            found = self._minimum(self._extras_of(_Extra.TIME), Practice())
        except UnsolvedError:
            return self._compute_s
        return None if found is None else float(found[self._extra[_Extra.TIME]]) * self._unit_s

    def start(self, practice: Practice) -> Relaxed | None:
        """Shares that take little time in practice; among equals those that move least.

        Returns:
            ``None`` if nothing fits, or nothing was found.
        """
        try:
            found = self._minimum(self._extras_of(_Extra.TIME) + _EASE * self._moved(), practice)
        except UnsolvedError:
            return None
        return None if found is None else self._read(found)

    def lacking(self, tier: Tier, practice: Practice) -> tuple[int, Relaxed] | None:
        """The least memory to add on one tier so that some plan fits, bytes, and the tier.

        Returns:
            ``None`` if no amount is enough, or none was found.
        """
        try:
            found = self._minimum(self._extras_of(_Extra.LACKING) + _HINT * self._extras_of(_Extra.TIME), practice, short=tier)
        except UnsolvedError:
            return None
        return None if found is None else (math.ceil(found[self._extra[_Extra.LACKING]] * GB), self._read(found))

    def _minimum(self, objective: Vector, practice: Practice, *, short: Tier | None = None) -> Vector | None:
        """Values of all variables at the least of an objective."""
        rows = list(self._least(practice))
        for tier, (row, capacity) in self._memory(practice):
            spare = self._extras_of(_Extra.LACKING) if tier is short else 0.0
            rows.append((row - spare, capacity))
        if not practice.state_moves:
            rows.append((self._uses(Quantity.STATE_UP), 0.0))
        if short is None:
            rows.append((self._extras_of(_Extra.LACKING), 0.0))
        (equal, value), (seconds, most_s) = self._equalities, self._time(practice)
        matrix = np.vstack((seconds, *(row for row, _ in rows)))
        most = np.concatenate((most_s, [most for _, most in rows]))
        scale = np.abs(matrix).max(axis=1)
        scale[scale == 0] = 1.0
        return minimum(
            Programme(cost=objective, below=_sparse(matrix / scale[:, None]), most=most / scale, equal=equal, value=value)
        )

    def prices(self, relaxed: Relaxed) -> Vector:
        """Seconds of work of each column on all resources, weighted by their load."""
        rows = self._whole(("compute", *LANES))
        busy = np.array([relaxed.busy_s[self.matrices.rows[i].resource] for i in rows])
        weights: Vector = (busy / relaxed.seconds) ** _STEEPNESS if relaxed.seconds else np.ones(len(rows))
        price: Vector = weights @ self.matrices.always[rows] @ self._taken
        # Nothing hides the update of a block that the next forward needs first.
        before = [None, *(self.model.blocks[index] for index in arranged(self.model))]
        first = np.array([(b := before[s.start]) is None or b.pinned for s in self.segments])[self._segment]
        exposed = self.matrices.here[[r.resource == "update" for r in self.matrices.rows]][0] @ self._taken
        return price + np.where(first, exposed, 0.0)

    def held_bytes(self, column: Column) -> dict[Tier, float]:
        """What a column's choice holds on each tier."""
        device = float(column.taken[Quantity.DEVICE_HELD] + column.taken[Quantity.DEVICE_SAVED])
        host = float(column.taken[Quantity.HOST_HELD] + column.taken[Quantity.HOST_SAVED])
        disk = float(column.taken[Quantity.DISK_HELD])
        if self.hardware.shared_memory:
            return {Tier.DEVICE: 0.0, Tier.HOST: device + host, Tier.DISK: disk}
        if self.hardware.unified_memory:
            return {Tier.DEVICE: device, Tier.HOST: device + host, Tier.DISK: disk}
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
            waiting_bytes=float(rooms[SpareMemory.WAITING]),
        )
