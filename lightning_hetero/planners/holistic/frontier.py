"""Best-first search from evaluated plans to their neighbours, until none may be faster.

[Note: Frontier]
Evaluated plans are expanded, the fastest first: into plans that differ in the rule of one block, of
several equal ones, or of two that change places, or in one of the plan's other decisions. Such a
plan is expected to take as much longer than its own bound as the plan that it comes from. The one
that is expected to be the fastest is simulated next, unless its bound says that it is not faster
than the best, or its weights, state and activations alone are too large. So the search ends where
nothing is left that may be faster.

Models with few blocks have few plans: there all of them are tried, in the order of their bounds,
once the frontier has led to a good one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, count, product

import numpy as np

from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, UpdateOrder
from lightning_hetero.planners.holistic.block_choices import placements, policies
from lightning_hetero.planners.holistic.evaluator import Evaluator
from lightning_hetero.planners.holistic.plan_bounds import PlanBounds

_FEW = 6  # blocks of a model for which a neighbour may change all of a block's rule at once
_PRODUCT = 70_000  # plans of a model that are all tried: three blocks with every choice
_TOLERANCE = 5e-3  # of the best: a plan that can gain no more is not tried
_FAR = 1.5  # of the best step: a plan of a larger bound is no way to a faster one
_DEPTHS = ((2, 4), (1, 1))  # prefetch and gradient depth; the second pair if the first is too large

_MOST_DEPTH = 1024  # of a plan

NAME = "holistic"
Rows = tuple[BlockPlan, ...]
_Change = tuple[tuple[int, BlockPlan], ...]


def whole_rules(block: BlockProfile, hardware: HardwareProfile) -> tuple[BlockPlan, ...]:
    """Every rule for a block that treats all that its forward saves alike."""
    return tuple(
        BlockPlan(name=block.name, weights=weights, state=state, update=update, saved=saved, boundary=boundary)
        for (weights, state, update), (saved, boundary) in product(placements(block, hardware), _whole(block, hardware))
    )


def _whole(block: BlockProfile, hardware: HardwareProfile) -> list[tuple[Saved, Saved]]:
    """Policies for all of a block: the input stays where the rest is computed again."""
    if not block.activation_bytes:
        return [(Saved.KEEP, Saved.KEEP)]
    return [(p, Saved.KEEP if p is Saved.RECOMPUTE else p) for p in policies(hardware, block)]


@dataclass(frozen=True, slots=True)
class _Node:
    """A plan that has been evaluated, and its bound."""

    plan: Plan
    seconds: float
    bound_s: float


class Frontier:
    """The search of [Note: Frontier].

    Args:
        evaluator: Evaluates plans. The search begins with the plans that it has evaluated.
        plan_bounds: Lower bounds of plans.
        done: Whether enough is found, or nothing is left to try with.
    """

    def __init__(self, evaluator: Evaluator, plan_bounds: PlanBounds, done: Callable[[], bool]) -> None:
        self._evaluator, self._plan_bounds, self._done = evaluator, plan_bounds, done
        self._blocks, self._hardware = evaluator.model.blocks, evaluator.hardware
        self._rules = [whole_rules(b, self._hardware) for b in self._blocks]
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._far: list[tuple[float, int, _Node, _Change]] = []
        self._number = count()
        self._seen: set[object] = set()

    def run(self) -> None:
        """Searches until all that may be faster has been tried, or ``done``."""
        for plan, seconds in self._evaluator.evaluated:
            self._evaluated(plan, seconds)
        if not self._heap:  # nothing fits so far: what takes least memory is where to look further
            ahead, waiting = _DEPTHS[1]
            least = self._plan(tuple(rules[-1] for rules in self._rules), priority=True, ahead=ahead, waiting=waiting)
            heapq.heappush(self._far, (0.0, next(self._number), _Node(least, 0.0, 0.0), ()))
        few = math.prod(len(rules) for rules in self._rules) <= _PRODUCT
        half = self._evaluator.spent + (self._evaluator.left / 2 if few else self._evaluator.left)
        self._follow(half)
        if few:
            self._try_all()
        self._follow(math.inf)
        while self._far and not few and not self._done():
            self._look_further()
            self._follow(math.inf)

    def _look_further(self) -> None:
        """Expands the most promising plan that was not simulated: two changes may help together."""
        bound_s, _, node, change = heapq.heappop(self._far)
        plan = self._changed(node.plan, change)
        if self._new(plan):
            self._evaluator.charge(1.0)
            self._expand(_Node(plan, bound_s, bound_s))

    def _follow(self, until: float) -> None:
        while self._heap and not self._done() and self._evaluator.spent < until:
            expected_s, _, act = heapq.heappop(self._heap)
            if expected_s < math.inf:
                act()

    # ---- evaluated plans -------------------------------------------------------------------------

    def _evaluated(self, plan: Plan, seconds: float) -> None:
        if math.isinf(seconds):
            return
        node = _Node(plan, seconds, self._plan_bounds.seconds(plan))
        self._push(seconds, partial(self._expand, node))

    def _push(self, expected_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (expected_s, next(self._number), act))

    def _expand(self, node: _Node) -> None:
        for plan in knobs(node.plan) if node.seconds > node.bound_s else ():
            self._push(node.seconds, partial(self._simulate, plan))
        changes = list(self._changes(node.plan.blocks))
        if not changes:
            return
        base = self._plan_bounds.taken(node.plan)
        taken = np.repeat(base[None], len(changes), axis=0)
        for index, change in enumerate(changes):
            for block, rule in change:
                taken[index, block] = self._plan_bounds.taken_of(block, rule)
        fit, bounds_s = self._plan_bounds.may_fit(taken), self._plan_bounds.of(taken, priority=node.plan.priority)
        slack_s = max(0.0, node.seconds - node.bound_s)
        for change, fits, bound_s in zip(changes, fit.tolist(), bounds_s.tolist(), strict=True):
            if fits and bound_s < self._most_s:
                self._push(bound_s + slack_s, partial(self._take, node, change, bound_s))
            elif bound_s < _FAR * self._evaluator.best_s:
                heapq.heappush(self._far, (bound_s, next(self._number), node, change))

    @property
    def _most_s(self) -> float:
        return self._evaluator.best_s * (1 - _TOLERANCE)

    def _take(self, node: _Node, change: _Change, bound_s: float) -> None:
        plan = self._changed(node.plan, change)
        if bound_s < self._most_s and self._new(plan):
            self._simulate(plan)

    @staticmethod
    def _changed(plan: Plan, change: _Change) -> Plan:
        rows = list(plan.blocks)
        for block, rule in change:
            rows[block] = rule
        return replace(plan, blocks=tuple(rows), device_cache_bytes=None, host_cache_bytes=None)

    def _new(self, plan: Plan) -> bool:
        """Whether nothing like it has come from here before."""
        key = tuple(map(_key, plan.blocks)), plan.priority
        new = key not in self._seen
        self._seen.add(key)
        return new

    def _simulate(self, plan: Plan) -> None:
        for depths in dict.fromkeys(((plan.prefetch_depth, plan.gradient_depth), *_DEPTHS[1:])):
            tried = replace(plan, prefetch_depth=depths[0], gradient_depth=depths[1])
            if not self._evaluator.knows(tried):
                seconds = self._evaluator.seconds(tried)
                if seconds < math.inf:
                    self._evaluated(tried, seconds)
                    break

    # ---- plans that differ in a little -----------------------------------------------------------

    def _changes(self, rows: Rows) -> Iterator[_Change]:
        """Other rules for one block of each group of equal ones, for half of it, and for all."""
        groups: dict[object, list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault((self._plan_bounds.kinds[index], _key(row)), []).append(index)
        for members in groups.values():
            first = members[0]
            others = {_key(rule): rule for rule in self._others(first, rows[first])}
            others.pop(_key(rows[first]), None)
            for rule in others.values():
                for some in _some(members):
                    yield tuple((index, replace(rule, name=rows[index].name)) for index in some)
        if len(rows) <= _FEW:
            yield from self._pairs(rows)
        for mine, other in combinations(groups.values(), 2):
            for a, b in ((mine[0], other[-1]), (mine[-1], other[0])):
                if not self._blocks[a].pinned and not self._blocks[b].pinned and self._trained(a) == self._trained(b):
                    yield (a, _placed_as(rows[a], rows[b])), (b, _placed_as(rows[b], rows[a]))

    def _pairs(self, rows: Rows) -> Iterator[_Change]:
        """Other placements of two blocks at once: one may free what the other needs."""
        placed = [
            list({_key(r): r for r in (_placed_as(row, o) for o in rules)}.values())
            for row, rules in zip(rows, self._rules, strict=True)
        ]
        for a, b in combinations(range(len(rows)), 2):
            for mine, other in product(placed[a], placed[b]):
                if mine != rows[a] and other != rows[b]:
                    yield (a, mine), (b, other)

    def _trained(self, index: int) -> bool:
        return self._blocks[index].num_trainable_params > 0

    def _others(self, index: int, rule: BlockPlan) -> Iterator[BlockPlan]:
        """Rules with another placement or other policies; for models of few blocks also both."""
        block = self._blocks[index]
        for other in self._rules[index]:
            yield _placed_as(rule, other)
            yield _placed_as(other, rule)
            if len(self._blocks) <= _FEW:
                yield other
        policy = policies(self._hardware, block)
        for name in (o.name for o in block.operators):
            for saved_as in policy:
                if saved_as is not rule.operators.get(name, rule.saved):
                    yield replace(rule, operators={**rule.operators, name: saved_as})
        for boundary in policy:
            if block.boundary_bytes and boundary not in (Saved.RECOMPUTE, rule.boundary):
                yield replace(rule, boundary=boundary)

    # ---- all plans -------------------------------------------------------------------------------

    def _try_all(self) -> None:
        """Every plan of the product of all blocks' rules, in the order of their bounds."""
        sizes = [len(rules) for rules in self._rules]
        chosen = np.unravel_index(np.arange(math.prod(sizes)), sizes)
        tables = [np.array([self._plan_bounds.taken_of(i, rule) for rule in rules]) for i, rules in enumerate(self._rules)]
        taken = np.stack([table[picks] for table, picks in zip(tables, chosen, strict=True)], axis=1)
        bounds_s = np.where(self._plan_bounds.may_fit(taken), self._plan_bounds.of(taken, priority=True), math.inf)
        ahead, waiting = _DEPTHS[0]
        for place in np.argsort(bounds_s, kind="stable").tolist():
            rows = tuple(rules[int(picks[place])] for rules, picks in zip(self._rules, chosen, strict=True))
            for priority in (True, False):
                if bounds_s[place] >= self._most_s or self._done():
                    return
                self._simulate(self._plan(rows, priority=priority, ahead=ahead, waiting=waiting))

    def _plan(self, rows: Rows, *, priority: bool, ahead: int, waiting: int) -> Plan:
        return Plan(
            name=NAME,
            blocks=rows,
            prefetch_depth=ahead,
            gradient_depth=waiting,
            priority=priority,
            micro_batches=self._plan_bounds.micro_batches,
        )


def _key(rule: BlockPlan) -> object:
    """All of a rule but its name."""
    return rule.weights, rule.state, rule.update, rule.saved, rule.boundary, tuple(sorted(rule.operators.items()))


def _placed_as(rule: BlockPlan, other: BlockPlan) -> BlockPlan:
    return replace(rule, weights=other.weights, state=other.state, update=other.update)


def _some(members: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All of a group, either half, and the first and the last one."""
    half = len(members) // 2
    found = (members, members[:half], members[half:], members[:1], members[-1:])
    yield from dict.fromkeys(tuple(some) for some in found if some)


def knobs(plan: Plan) -> Iterator[Plan]:
    """Plans that place everything alike and differ in one of the other decisions."""
    yield replace(plan, priority=not plan.priority)
    if plan.update_order is not UpdateOrder.OVERLAPPED:
        yield replace(plan, update_order=UpdateOrder.OVERLAPPED, priority=True)
    g, most = plan.gradient_depth, min(len(plan.blocks), _MOST_DEPTH)
    for depth in dict.fromkeys((min(2, most), max(1, g // 2), min(most, 2 * g), max(1, g - 1), min(most, g + 1))):
        if depth != g:
            yield replace(plan, gradient_depth=depth)
    p = plan.prefetch_depth
    for depth in dict.fromkeys((min(64, 2 * p), max(1, p // 2), p + 1)):
        if depth != p:
            yield replace(plan, prefetch_depth=depth)
