"""Divides devices into data-parallel groups.

Devices of one kind are interchangeable, so counts of kinds are grouped, not devices.

:func:`grouping` is equation 3 solved exactly by a dynamic programme over count vectors;
:func:`reference` is the same as an integer programme in cvxpy, solved by HiGHS. Property tests
compare them. Devices may idle: equation 3e with <= for =.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from lightning_hetero.parallel.planner.equations import effective_power

Counts = tuple[int, ...]  # of each kind, weakest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The input of equation 3.

    A device here may be several that compute as one (tensor parallelism).

    Attributes:
        counts: Devices of each kind.
        powers: g_i, FLOP/s of one device of each kind.
        memories: m_i, bytes of one device of each kind.
        least_bytes: M_min, bytes that a group must hold.
        micro_batches: Micro-batches of one step, of all groups together.
        most_stages: The most devices of a group.
    """

    counts: Counts
    powers: tuple[float, ...]
    memories: tuple[float, ...]
    least_bytes: float
    micro_batches: int
    most_stages: int

    def power(self, group: Counts, groups: int) -> float:
        """G_j (equation 2) of a group, one of ``groups`` that share the micro-batches equally."""
        total = sum(n * g for n, g in zip(group, self.powers, strict=True))
        return effective_power(total, sum(group), self.micro_batches / groups)

    def powers_by_counts(self, groups: int, most: int) -> Any:
        """:meth:`power` of all groups by their counts.

        -inf for groups that are too large or cannot hold the model.
        """
        counts = np.indices([n + 1 for n in self.counts])
        zeros: Any
        sizes, zeros = counts.sum(axis=0), np.zeros(counts.shape[1:])
        held = sum((n * m for n, m in zip(counts, self.memories, strict=True)), start=zeros)
        total = sum((n * g for n, g in zip(counts, self.powers, strict=True)), start=zeros)
        power = effective_power(total, np.maximum(sizes, 1), self.micro_batches / groups)  # in the order of operations of power()
        return np.where((sizes > 0) & (sizes <= most) & (held >= self.least_bytes), power, -np.inf)

    def holds(self, group: Counts) -> bool:
        """Equation 3b."""
        return sum(n * m for n, m in zip(group, self.memories, strict=True)) >= self.least_bytes


def vectors(counts: Counts, most: int) -> list[Counts]:
    """All counts of 1 to ``most`` devices out of ``counts``, fewest devices first."""
    found = [v for v in itertools.product(*(range(min(n, most) + 1) for n in counts)) if 1 <= sum(v) <= most]
    return sorted(found, key=lambda v: (sum(v), v))


class Packing:
    """The most valuable groups out of given counts: an unbounded knapsack over count vectors.

    A cell holds the value of the best groups out of its counts. Adding a group compares each cell
    with the cell that has the group's counts less. Cells are visited in slabs along one axis, so
    that a group may be taken several times.
    """

    def __init__(self, counts: Counts) -> None:
        shape = tuple(n + 1 for n in counts)
        self.counts = counts
        self.value = np.zeros(shape, dtype=np.int64)
        self._last = np.full(shape, -1, dtype=np.int32)
        self._groups: list[Counts] = []

    def worth(self, group: Counts) -> int:
        """The value of the best groups out of these counts."""
        return int(self.value[group])

    def add(self, group: Counts, value: int) -> None:
        """Offers a group any number of times. Larger groups must come after smaller ones."""
        number = len(self._groups)
        self._groups.append(group)
        axis = max(range(len(group)), key=lambda i: group[i])
        step, end = group[axis], self.counts[axis] + 1
        target = [slice(n, None) for n in group]
        source = [slice(None, c + 1 - n) for c, n in zip(self.counts, group, strict=True)]
        for begin in range(step, end, step):
            target[axis] = slice(begin, min(begin + step, end))
            source[axis] = slice(begin - step, min(begin + step, end) - step)
            into, offered = self.value[tuple(target)], self.value[tuple(source)] + value
            better = offered > into
            np.copyto(into, offered, where=better)
            np.copyto(self._last[tuple(target)], np.int32(number), where=better)

    def best(self) -> list[Counts]:
        """The most valuable groups out of all counts."""
        out, left = [], self.counts
        while (number := int(self._last[left])) >= 0:
            out.append(self._groups[number])
            left = tuple(n - taken for n, taken in zip(left, out[-1], strict=True))
        return out


def grouping(problem: Problem, groups: int) -> tuple[float, list[Counts]] | None:
    """The D groups whose weakest group has the most effective power; exact.

    Maximises ``D Z`` for a given D. A threshold on Z is possible if D disjoint groups reach it.
    Only groups matter that would not reach it with one device less. Candidates for Z are the powers
    of all possible groups.

    Source: equation 3.

    Returns:
        Z, FLOP/s, and the groups; ``None`` if no D groups hold the model.
    """
    most = min(problem.most_stages, problem.micro_batches // groups)  # 1F1B needs as many micro-batches as stages
    powers = problem.powers_by_counts(groups, most)
    thresholds = np.unique(powers[np.isfinite(powers)]).tolist()
    best: tuple[float, list[Counts]] | None = None
    low, high = 0, len(thresholds) - 1
    while low <= high:
        middle = (low + high) // 2
        found = _packed(problem.counts, powers >= thresholds[middle], groups)
        if len(found) >= groups:
            best, low = (thresholds[middle], found[:groups]), middle + 1
        else:
            high = middle - 1
    return best


def _packed(counts: Counts, possible: Any, enough: int) -> list[Counts]:
    """The most disjoint groups out of the possible ones.

    A group that contains a smaller one adds nothing.
    """
    holds_one, holds_smaller = possible, np.zeros_like(possible)
    for axis in range(possible.ndim):
        holds_one = np.logical_or.accumulate(holds_one, axis=axis)
    for axis in range(possible.ndim):
        after, before = np.moveaxis(holds_smaller, axis, 0), np.moveaxis(holds_one, axis, 0)
        after[1:] |= before[:-1]
    packing = Packing(counts)
    for group in sorted(map(tuple, np.argwhere(possible & ~holds_smaller).tolist()), key=lambda v: (sum(v), v)):
        packing.add(group, 1)
        if packing.worth(counts) >= enough:
            break
    return packing.best()


def reference(problem: Problem, groups: int) -> float | None:
    """Z of equation 3 for a given D as an integer programme: cvxpy and HiGHS.

    ``x[i, j]`` devices of kind i in group j. The bubble makes equation 2 a product; a switch per
    group and depth replaces it: ``Z <= K / (K + s - 1) sum_i x[i, j] g_i + L (1 - depth[j, s])``.
    Symmetric groups are ordered by power.

    Source: equations 2 and 3.

    Returns:
        The weakest group's effective power, FLOP/s; ``None`` if no D groups hold the model.
    """
    cp: Any = import_module("cvxpy")  # its import takes a second, and it has no types

    most = min(problem.most_stages, problem.micro_batches // groups, sum(problem.counts))
    if most < 1:
        return None
    unit, size = max(problem.powers), max(*problem.memories, 1.0)  # solvers' tolerances are absolute
    powers, memories = np.array(problem.powers) / unit, np.array(problem.memories) / size
    x = cp.Variable((len(problem.counts), groups), integer=True)
    depth = cp.Variable((groups, most), boolean=True)
    weakest = cp.Variable()
    power, large = powers @ x, float(np.sum(powers * np.array(problem.counts)))
    constraints = [
        x >= 0,
        cp.sum(x, axis=1) <= np.array(problem.counts),
        memories @ x >= problem.least_bytes / size,
        cp.sum(depth, axis=1) == 1,
        cp.sum(x, axis=0) == depth @ np.arange(1, most + 1),
        *(power[j] >= power[j + 1] for j in range(groups - 1)),
    ]
    for stages in range(1, most + 1):
        factor = effective_power(1.0, stages, problem.micro_batches / groups)
        constraints.append(weakest <= factor * power + large * (1 - depth[:, stages - 1]))
    solved = cp.Problem(cp.Maximize(weakest), constraints)
    solved.solve(solver=cp.HIGHS, mip_rel_gap=1e-9)
    return float(weakest.value) * unit if solved.status == cp.OPTIMAL else None
