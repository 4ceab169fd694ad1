"""From one plan to better ones: what the joint planner tries.

[Note: Starts]
The programme of :mod:`.relaxation` knows work and memory, not how a schedule spends them: that
weights pass through a tier two or three blocks at a time, that a queue runs dry, that a transfer
begins late. So it is solved several times, with more or less of that (:class:`Start`), its shares
become whole blocks in one of two arrangements (:mod:`.rounding`), and the evaluator says which of
these plans is the best. Then the depths of that plan are moved up and down for as long as it helps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from typing import Any

from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier
from lightning_hetero.lowering.needs import needs_of, total_bytes
from lightning_hetero.planners.holistic.block_choices import placements, policies
from lightning_hetero.planners.holistic.evaluator import Evaluator
from lightning_hetero.planners.holistic.frontier import NAME, knobs
from lightning_hetero.planners.holistic.relaxation import Practice, Relaxation, Relaxed
from lightning_hetero.planners.holistic.rounding import Chosen, Demotion, rounded, rule
from lightning_hetero.planners.holistic.segments import arranged

_NEAR = 3e-3  # of the bound: nobody can gain more
_REPAIRS = 24  # times that something of a start is demoted because it does not fit
_MOST_DEPTH = 1024  # of a plan
_COLUMNS = 2500  # of all programmes of one search: large programmes are solved less often


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
    """Looks for plans that are faster than the evaluator's best.

    Attributes:
        relaxation: The programme.
        evaluator: Evaluates plans.
        bound_s: No plan is faster.
    """

    relaxation: Relaxation
    evaluator: Evaluator
    bound_s: float
    _weights: int = field(init=False)
    _plans: dict[Start, Plan | None] = field(init=False, default_factory=dict)
    _relaxed: dict[Practice, Relaxed | None] = field(init=False, default_factory=dict)
    _slots: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        model = self.relaxation.model
        self._weights = max((model.weight_bytes(b) for b in model.blocks if not b.pinned), default=0)

    @property
    def done(self) -> bool:
        """Nothing is left to gain, or to try with."""
        return self.evaluator.exhausted or self.evaluator.best_s <= self.bound_s * (1 + _NEAR)

    def first(self) -> None:
        """Tries the most promising start alone, or if it finds none what takes least memory."""
        if math.isinf(self._try(_FIRST)):
            for plan in self.frugal():
                self.evaluator.seconds(plan)

    def frugal(self) -> Iterator[Plan]:
        """Fitting plans of least memory: all on the lowest tier, only inputs saved.

        Where device and host have one memory, all on the device takes less than all on the host,
        beside which the device needs copies.
        """
        model, hardware = self.relaxation.model, self.evaluator.hardware
        allowed = policies(hardware)
        saved = Saved.RECOMPUTE if Saved.RECOMPUTE in allowed else Saved.KEEP
        inputs = [policy for policy in (Saved.SWAP_HOST, Saved.SWAP_DISK, Saved.KEEP) if policy in allowed]
        offered, on_host = [placements(block, hardware) for block in model.blocks], not hardware.unified_memory
        in_memory = [[p for p in own if Tier.DISK not in p][-1] if on_host else own[0] for own in offered]
        for choices, policy in product((in_memory, [own[-1] for own in offered]), inputs):
            rows = []
            for block, (weights, state, update) in zip(model.blocks, choices, strict=True):
                row = BlockPlan(name=block.name, weights=weights, state=state, update=update, saved=saved, boundary=policy)
                rows.append(row)
            plan = Plan(
                name=NAME,
                blocks=tuple(rows),
                prefetch_depth=1,
                gradient_depth=1,
                micro_batches=self.relaxation.micro_batches,
            )
            if self.evaluator.shortfall(plan) is None:
                yield plan

    def run(self) -> None:
        """Tries starts near the best one, then the depths of the best plan; see [Note: Starts]."""
        best, best_s = _FIRST, self._try(_FIRST)
        affordable = max(1, _COLUMNS // len(self.relaxation.columns))
        # Where not even this start fits, none does that takes more memory: what is left is to
        # choose other blocks.
        for change in _CHANGES[:affordable] if self.start(_FIRST) is not None else ({"grouped": False},):
            if self.done:
                return
            tried = replace(best, **change)
            seconds = self._try(tried)
            if seconds < best_s:
                best, best_s = tried, seconds
        self._tune()

    def _try(self, start: Start) -> float:
        plan = self.start(start)
        return math.inf if plan is None else self.evaluator.seconds(plan)

    def start(self, start: Start) -> Plan | None:
        """A plan that leaves the caches ``start.slots`` blocks or fewer; ``None`` if there is none.

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
        return None if relaxed is None else self.whole(relaxed, start, slots)

    def whole(self, relaxed: Relaxed, start: Start, slots: int) -> Plan | None:
        """Shares as a plan that fits and leaves the caches so many blocks, if there is one."""
        chosen = rounded(relaxed, self.relaxation.segments, grouped=start.grouped)
        demotion = Demotion(self.relaxation, relaxed)
        cache = slots * self._weights
        for _ in range(_REPAIRS):
            plan = self._plan(chosen, start, slots)
            error = self.evaluator.shortfall(replace(plan, device_cache_bytes=cache, host_cache_bytes=cache))
            if error is None:
                return self._deepened(plan, relaxed)
            if not error.tier or not demotion.demote(chosen, Tier(error.tier), error.shortfall_bytes):
                break
        return None

    def _plan(self, chosen: Chosen, start: Start, slots: int) -> Plan:
        model = self.relaxation.model
        rules = {index: rule(model.blocks[index], mine) for index, mine in zip(arranged(model), chosen, strict=True)}
        blocks = tuple(rules[index] for index in range(len(model.blocks)))
        return Plan(
            name=NAME,
            blocks=blocks,
            prefetch_depth=start.depth,
            gradient_depth=min(slots, len(blocks)),
            micro_batches=self.relaxation.micro_batches,
        )

    def _deepened(self, plan: Plan, relaxed: Relaxed) -> Plan:
        """The same with the largest gradient depth that host memory allows.

        If weights on disk need that memory, the depth stays as planned.
        """
        model, h = self.relaxation.model, self.evaluator.hardware
        sizes = sorted(map(model.gradient_bytes, model.blocks), reverse=True)
        if any(b.weights is Tier.DISK for b in plan.blocks):
            room = relaxed.waiting_bytes
        else:
            needs = needs_of(
                plan, model, shared_memory=h.shared_memory, updates=self.evaluator.updates, ranks=h.ranks,
                gathers_in_place=h.gathers_in_place,
            )  # fmt: skip
            beside = total_bytes(needs.device) + sum(needs.device_caches[:1]) if h.unified_memory else 0
            room = h.host_memory_bytes - total_bytes(needs.host) - beside + sum(sizes[: plan.gradient_depth])
        most = sum(1 for total in accumulate(sizes) if total <= room)
        for depth in (min(most, len(sizes), _MOST_DEPTH), plan.gradient_depth):
            deeper = replace(plan, gradient_depth=max(depth, plan.gradient_depth))
            if self.evaluator.shortfall(deeper) is None:
                return deeper
        return plan

    def _tune(self) -> None:
        """Moves the depths of the best plan up and down for as long as it helps."""
        better = True
        while better:
            better = False
            best = self.evaluator.best
            for plan in () if best is None else knobs(best):
                if self.done:
                    return
                before = self.evaluator.best_s
                if self.evaluator.seconds(plan) < before:
                    better = True
                    break
