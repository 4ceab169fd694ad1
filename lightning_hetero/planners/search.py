"""From shares to whole blocks, and from one plan to better ones: what the joint planner tries, and who judges it.

[Note: Starts]
The programme of :mod:`.relaxation` knows work and memory, not how a schedule spends them: that weights pass through a tier two or
three blocks at a time, that a queue runs dry, that a transfer begins late. So it is solved several times, with more or less of that
(:class:`Start`), its shares become whole blocks in one of two arrangements, and the simulator says which of these
plans is the best. Then the depths of that plan are moved up and down for as long as it helps.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.errors import PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Prediction, Saved, Tier, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.lowering import rooms
from lightning_hetero.lowering.needs import needs_of, total_bytes
from lightning_hetero.planners.baselines import zero_infinity
from lightning_hetero.planners.bounds import Vector
from lightning_hetero.planners.judge import simulation
from lightning_hetero.planners.relaxation import INPUT, REST, Choice, Practice, Relaxation, Relaxed, Segment, policies

NAME = "holistic"
_NEAR = 3e-3  # of the bound: nobody can gain more
_REPAIRS = 24  # times that something of a start is demoted because it does not fit
_MOST_DEPTH = 1024  # of a plan
_COLUMNS = 2500  # of all programmes of one search together: the larger a programme, the fewer are solved


class Referee:
    """Simulates plans of one model on one machine, each once, and keeps the fastest.

    Args:
        model: The model.
        hardware: The machine.
        updates: When updates may run.
        evaluations: How many simulations are allowed.
        deadline_s: Monotonic time after which none is allowed any more.

    Attributes:
        evaluations: Simulations so far.
        best: The fastest plan so far, with its prediction.
        best_s: Its step, seconds; infinite before there is one.
        proved: Whether the invariants of its schedules have been proved.
        refusal: Why the last plan that did not fit did not.
    """

    def __init__(
        self, model: ModelProfile, hardware: HardwareProfile, *, updates: Updates, evaluations: int, deadline_s: float = math.inf
    ) -> None:
        self.model, self.hardware, self.updates = model, hardware, updates
        self.evaluations = 0
        self.best: Plan | None = None
        self.best_s = math.inf
        self.proved = False
        self.refusal: PlanError | None = None
        self._most, self._deadline_s = evaluations, deadline_s
        self._known: dict[object, float] = {}

    @property
    def exhausted(self) -> bool:
        """No simulation is left."""
        return self.evaluations >= self._most or time.monotonic() >= self._deadline_s

    def shortfall(self, plan: Plan) -> PlanError | None:
        """Why a resolved plan does not fit; ``None`` if it may."""
        try:
            rooms(plan, self.model, self.hardware, updates=self.updates)
        except PlanError as error:
            self.refusal = error
            return error
        return None

    def admit(self, plan: Plan, *, proved: bool) -> None:
        """Takes a plan with its prediction, which may have been proved."""
        assert plan.predicted is not None
        if plan.predicted.iteration_s < self.best_s:
            self.best, self.best_s, self.proved = plan, plan.predicted.iteration_s, proved

    def seconds(self, plan: Plan, *, always: bool = False) -> float:
        """A resolved plan's step; infinite if it does not fit, or no simulation is left and ``always`` does not ask for one."""
        key = _key(plan)
        if key not in self._known:
            if self.exhausted and not always:
                return math.inf
            predicted = self._simulated(plan)
            self._known[key] = math.inf if predicted is None else predicted.iteration_s
            if predicted is not None:
                self.admit(replace(plan, predicted=predicted), proved=False)
        return self._known[key]

    def _simulated(self, plan: Plan) -> Prediction | None:
        if self.shortfall(plan) is not None:
            return None
        self.evaluations += 1
        p, h = simulation(plan, self.model, self.hardware, updates=self.updates).prediction, self.hardware
        device = h.host_memory_bytes if h.shared_memory else h.device_memory_bytes
        peaks = ((p.device_peak_bytes, device), (p.host_peak_bytes, h.host_memory_bytes), (p.disk_bytes, h.disk_capacity_bytes))
        return p if all(peak <= most for peak, most in peaks) else None


def _key(plan: Plan) -> object:
    rows = tuple((b.weights, b.state, b.update, b.saved, b.boundary, tuple(sorted(b.operators.items()))) for b in plan.blocks)
    knobs = (plan.prefetch_depth, plan.gradient_depth, plan.update_order, plan.priority, plan.micro_batches)
    return rows, knobs, plan.device_cache_bytes, plan.host_cache_bytes


# ---- from shares to blocks ---------------------------------------------------------------------------------------------------


Indices = NDArray[np.intp]
Chosen = list[dict[str | None, Choice]]  # for each block its placement, and the policies of what it saves


def rounded(relaxed: Relaxed, segments: Sequence[Segment], *, grouped: bool) -> Chosen:
    """Whole blocks whose choices come as close to the shares as they can.

    Args:
        relaxed: The shares.
        segments: Their segments.
        grouped: Of equal blocks those that the device updates come first and those that the CPU updates last, so that the CPU ends
            long before the next forward needs their weights (AutoHete's insight 2); else blocks that choose alike lie as far from
            each other as they can.
    """
    chosen: Chosen = []
    for _, group in groupby(zip(segments, relaxed.shares, strict=True), key=lambda pair: pair[0].kind):
        run = list(group)
        columns = {what: _spread([(shares[what], len(segment)) for segment, shares in run]) for what in run[0][1]}
        if grouped:
            columns[None].sort(key=list(run[0][1][None]).index)
        chosen += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return chosen


_ENOUGH = 0.2  # share of a device update that makes the first of equal blocks one


def _spread(shares: Sequence[tuple[Mapping[Choice, float], int]]) -> list[Choice]:
    """For each block of segments that follow each other the choice that is owed most.

    The first block is rounded towards the device: the next forward begins with it, and nothing hides an update elsewhere.
    """
    owed = dict.fromkeys(shares[0][0], 0.0)
    found: list[Choice] = []
    for mine, count in shares:
        for _ in range(count):
            for choice, share in mine.items():
                owed[choice] += share
            eager = [c for c in mine if not found and mine[c] >= _ENOUGH and isinstance(c, tuple) and c[2] is UpdateLane.DEVICE]
            best = max(eager or owed, key=lambda choice: owed[choice])
            owed[best] -= 1.0
            found.append(best)
    return found


def rule(block: BlockProfile, choices: Mapping[str | None, Choice]) -> BlockPlan:
    """A block's rule from its choices; what most of its bytes do becomes ``saved``."""
    placed, rest, boundary = choices[None], choices.get(REST), choices.get(INPUT, Saved.KEEP)
    assert isinstance(placed, tuple)
    assert isinstance(boundary, Saved)
    policies = {o.name: policy for o in block.operators if isinstance(policy := choices.get(o.name, Saved.KEEP), Saved)}
    if isinstance(rest, Saved):
        saved = rest
    else:
        # A recomputed block repeats what no operator accounts for too.
        unnamed = block.forward_flop - sum(o.flop for o in block.operators)
        totals: Counter[Saved] = Counter()
        for o in block.operators:
            if policies[o.name] is not Saved.RECOMPUTE or unnamed <= 1e-6 * block.forward_flop:
                totals[policies[o.name]] += o.bytes
        saved = max(totals, key=lambda policy: totals[policy], default=Saved.KEEP)
    others = {name: policy for name, policy in policies.items() if policy is not saved}
    weights, state, update = placed
    return BlockPlan(name=block.name, weights=weights, state=state, update=update, saved=saved, boundary=boundary, operators=others)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choices:
    """The choices that a segment has for one of its columns' ``what``: what one block holds on each tier by it, and its price."""

    place: int
    what: str | None
    choices: tuple[Choice, ...]
    held: Vector  # choices x tiers
    prices: Vector


_TIERS = tuple(Tier)


class Demotion:
    """Moves something of a rounded plan to a lower tier, or recomputes it, where whole blocks take more than their shares.

    Args:
        relaxation: The programme.
        relaxed: The solution that was rounded; work on resources that it keeps busy costs most.
    """

    def __init__(self, relaxation: Relaxation, relaxed: Relaxed) -> None:
        self._segments = relaxation.segments
        self._tables = tuple(_tables(relaxation, relaxed))
        # Every change of one block's choice for another, of all tables one after the other.
        pairs = [np.indices((len(t.choices),) * 2).reshape(2, -1) for t in self._tables]
        self._table = np.repeat(np.arange(len(pairs)), [p.shape[1] for p in pairs])
        self._now, self._other = np.hstack(pairs)
        self._gain = np.vstack([t.held[now] - t.held[other] for t, (now, other) in zip(self._tables, pairs, strict=True)])
        self._cost = np.hstack([t.prices[other] - t.prices[now] for t, (now, other) in zip(self._tables, pairs, strict=True)])
        self._place = np.array([t.place for t in self._tables])[self._table]
        self._saves = np.array([t.what is not None for t in self._tables])[self._table]
        self._last: tuple[Tier, float] | None = None
        self._changed: list[tuple[int, int, str | None, Choice]] = []
        self._useless: dict[Tier, int] = {}
        self._full: set[Tier] = set()

    def demote(self, chosen: Chosen, tier: Tier, short: float) -> bool:
        """Frees about ``short`` bytes of a tier, cheapest first; false if nothing is left to free.

        What it held goes to no other tier that has been full before, if that can be avoided. Where freeing did not change the
        shortfall the last time, activations were not there when the tier was fullest: they are put back, and left alone in these
        segments and in those behind, which are emptier at any such moment.
        """
        if self._last == (tier, short):
            for place, index, what, choice in self._changed:
                if what is not None:
                    chosen[index][what] = choice
                    self._useless[tier] = min(self._useless.get(tier, place), place)
        self._last, self._changed = (tier, short), []
        self._full.add(tier)
        while short > 0:
            freed = self._free(chosen, tier, short)
            if freed <= 0:
                break
            short -= freed
        return bool(self._changed)

    def _free(self, chosen: Chosen, tier: Tier, short: float) -> float:
        """Makes the cheapest changes for as long as each is needed in whole, one at least; returns the bytes that they free."""
        gain = self._gain[:, _TIERS.index(tier)]
        possible = (gain > 0) & ~(self._saves & (self._place >= self._useless.get(tier, len(self._segments))))
        if tier is not Tier.DEVICE:
            possible &= self._gain[:, _TIERS.index(Tier.DEVICE)] >= 0
        others = [_TIERS.index(other) for other in self._full - {tier}]
        pairs = np.flatnonzero(possible & (self._gain[:, others] >= 0).all(axis=1))
        freed = self._make(chosen, pairs, gain, short)
        return freed if freed else self._make(chosen, np.flatnonzero(possible), gain, short)

    def _make(self, chosen: Chosen, pairs: Indices, gain: Vector, short: float) -> float:
        pairs = pairs[np.lexsort((-gain[pairs], self._cost[pairs] / np.minimum(gain[pairs], short)))]
        freed = 0.0
        blocks: dict[tuple[int, int], list[int]] = {}
        for pair in pairs.tolist():
            number, now = int(self._table[pair]), int(self._now[pair])
            table = self._tables[number]
            if (number, now) not in blocks:
                blocks[number, now] = self._blocks(chosen, table, table.choices[now])
            mine = blocks[number, now]
            while mine:
                if freed and (freed >= short or gain[pair] > short - freed):
                    return freed
                index = mine.pop()
                self._changed.append((table.place, index, table.what, chosen[index][table.what]))
                chosen[index][table.what] = table.choices[int(self._other[pair])]
                freed += float(gain[pair])
        return freed

    def _blocks(self, chosen: Chosen, table: _Choices, choice: Choice) -> list[int]:
        segment = self._segments[table.place]
        return [index for index in range(segment.start, segment.stop) if chosen[index][table.what] == choice]


def _tables(relaxation: Relaxation, relaxed: Relaxed) -> Iterator[_Choices]:
    columns = list(zip(relaxation.columns, relaxation.prices(relaxed).tolist(), strict=True))
    for (place, what), group in groupby(columns, key=lambda pair: (pair[0].segment, pair[0].what)):
        count = len(relaxation.segments[place])
        # State on its way to a device update takes memory there too: such a choice is neither made nor left here.
        mine = [(column, relaxation.held_bytes(column), price) for column, price in group if not column.moving_bytes]
        yield _Choices(
            place=place,
            what=what,
            choices=tuple(column.choice for column, _, _ in mine),
            held=np.array([[held[tier] / count for tier in _TIERS] for _, held, _ in mine]).reshape(-1, len(_TIERS)),
            prices=np.array([price / count for _, _, price in mine]),
        )


# ---- the search --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How shares are found and become a plan.

    Attributes:
        slots: Blocks whose weights pass through a tier at once, at best.
        depth: ``Plan.prefetch_depth``.
        grouped: As in :func:`rounded`.
        state_moves: Whether the device may update state that lives on the host.
        stress: How many times longer transfers and CPU updates take than by the programme.
    """

    slots: int = 3
    depth: int = 1
    grouped: bool = True
    state_moves: bool = False
    stress: float = 1.0

    def practice(self, slots: int) -> Practice:
        """What the programme has to know of it."""
        return Practice(slots=slots, depth=self.depth, state_moves=self.state_moves, stress=self.stress)


_FIRST = Start()
_CHANGES: tuple[dict[str, Any], ...] = (
    {"depth": 2},
    {"grouped": False},
    {"stress": 1.6},
    {"stress": 2.5},
    {"state_moves": True},
)


@dataclass(kw_only=True)
class Search:
    """Looks for plans that are faster than the referee's best.

    Attributes:
        relaxation: The programme.
        referee: Who judges.
        bound_s: No plan is faster.
    """

    relaxation: Relaxation
    referee: Referee
    bound_s: float
    _weights: int = field(init=False)
    _plans: dict[Start, Plan | None] = field(init=False, default_factory=dict)
    _relaxed: dict[Practice, Relaxed | None] = field(init=False, default_factory=dict)
    _slots: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        model = self.relaxation.model
        self._weights = max((b.num_params for b in model.blocks if not b.pinned), default=0) * model.compute_itemsize

    @property
    def done(self) -> bool:
        """Nothing is left to gain, or to try with."""
        return self.referee.exhausted or self.referee.best_s <= self.bound_s * (1 + _NEAR)

    def first(self) -> None:
        """Tries the most promising start alone, or if it finds none what takes least memory."""
        if math.isinf(self._try(_FIRST)):
            for plan in self.frugal():
                self.referee.seconds(plan)

    def frugal(self) -> Iterator[Plan]:
        """The plans that take least memory, of those that fit: all on the lowest tier that holds it, nothing saved but inputs."""
        model, allowed = self.relaxation.model, policies(self.referee.hardware)
        saved = Saved.RECOMPUTE if Saved.RECOMPUTE in allowed else Saved.KEEP
        inputs = [policy for policy in (Saved.SWAP_HOST, Saved.SWAP_DISK, Saved.KEEP) if policy in allowed]
        for tier, policy in product((Tier.HOST, Tier.DISK), inputs):
            placed = zero_infinity(model.shape(), tier)
            plan = Plan(
                name=NAME,
                blocks=tuple(replace(b, saved=saved, boundary=policy) for b in placed.blocks),
                prefetch_depth=1,
                gradient_depth=1,
                micro_batches=self.relaxation.micro_batches,
            )
            if self.referee.shortfall(plan) is None:
                yield plan

    def run(self) -> None:
        """Tries starts, each a change of the best one so far, then the depths of the best plan; see [Note: Starts]."""
        best, best_s = _FIRST, self._try(_FIRST)
        for change in _CHANGES[: max(1, _COLUMNS // len(self.relaxation.columns))]:
            if self.done:
                return
            tried = replace(best, **change)
            seconds = self._try(tried)
            if seconds < best_s:
                best, best_s = tried, seconds
        self._tune()

    def _try(self, start: Start) -> float:
        plan = self.start(start)
        return math.inf if plan is None else self.referee.seconds(plan)

    def start(self, start: Start) -> Plan | None:
        """A plan from the programme that leaves the caches ``start.slots`` blocks, or else fewer; ``None`` if it finds none.

        Later starts begin with as many as the first one found room for.
        """
        if start not in self._plans:
            self._plans[start] = None
            for slots in range(min(start.slots, self._slots or start.slots), 0, -1):
                found = self._with(start, slots)
                if found is not None:
                    self._plans[start], self._slots = found, self._slots or slots
                    break
            self._slots = self._slots or 1
        return self._plans[start]

    def _with(self, start: Start, slots: int) -> Plan | None:
        practice = start.practice(slots)
        if practice not in self._relaxed:
            self._relaxed[practice] = self.relaxation.start(practice)
        relaxed = self._relaxed[practice]
        if relaxed is None:
            return None
        chosen = rounded(relaxed, self.relaxation.segments, grouped=start.grouped)
        demotion = Demotion(self.relaxation, relaxed)
        cache = slots * self._weights
        for _ in range(_REPAIRS):
            plan = self._plan(chosen, start, slots)
            error = self.referee.shortfall(replace(plan, device_cache_bytes=cache, host_cache_bytes=cache))
            if error is None:
                return self._deepened(plan, relaxed)
            if not demotion.demote(chosen, Tier(error.tier), error.shortfall_bytes):
                break
        return None

    def _plan(self, chosen: Chosen, start: Start, slots: int) -> Plan:
        blocks = tuple(rule(b, choices) for b, choices in zip(self.relaxation.model.blocks, chosen, strict=True))
        return Plan(
            name=NAME,
            blocks=blocks,
            prefetch_depth=start.depth,
            gradient_depth=min(slots, len(blocks)),
            micro_batches=self.relaxation.micro_batches,
        )

    def _deepened(self, plan: Plan, relaxed: Relaxed) -> Plan:
        """The same with gradients of as many blocks waiting as host memory allows, or as planned where weights on disk want it."""
        model, h = self.relaxation.model, self.referee.hardware
        sizes = sorted((b.num_trainable_params * model.compute_itemsize for b in model.blocks), reverse=True)
        if any(b.weights is Tier.DISK for b in plan.blocks):
            room = relaxed.waiting_bytes
        else:
            needs = needs_of(plan, model, shared_memory=h.shared_memory, updates=self.referee.updates)
            room = h.host_memory_bytes - total_bytes(needs.host) + sum(sizes[: plan.gradient_depth])
        most = sum(1 for total in accumulate(sizes) if total <= room)
        for depth in (min(most, len(sizes), _MOST_DEPTH), plan.gradient_depth):
            deeper = replace(plan, gradient_depth=max(depth, plan.gradient_depth))
            if self.referee.shortfall(deeper) is None:
                return deeper
        return plan

    def _tune(self) -> None:
        """Moves the depths of the best plan up and down for as long as it helps."""
        better = True
        while better:
            better = False
            best = self.referee.best
            for plan in () if best is None else neighbours(best):
                if self.done:
                    return
                before = self.referee.best_s
                if self.referee.seconds(plan) < before:
                    better = True
                    break


def neighbours(plan: Plan) -> Iterator[Plan]:
    """Plans that place everything alike and differ in one of the other decisions."""
    if plan.update_order is not UpdateOrder.OVERLAPPED or not plan.priority:
        yield replace(plan, update_order=UpdateOrder.OVERLAPPED, priority=True)
    g, most = plan.gradient_depth, min(len(plan.blocks), _MOST_DEPTH)
    for depth in dict.fromkeys((min(2, most), max(1, g // 2), min(most, 2 * g), max(1, g - 1), min(most, g + 1))):
        if depth != g:
            yield replace(plan, gradient_depth=depth)
    p = plan.prefetch_depth
    for depth in dict.fromkeys((min(64, 2 * p), max(1, p // 2), p + 1)):
        if depth != p:
            yield replace(plan, prefetch_depth=depth)
