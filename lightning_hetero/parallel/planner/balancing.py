"""Assigns layers to stages, and micro-batches to groups."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache, reduce
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.parallel.planner.equations import pipeline_s

Rows = tuple[tuple[float, ...], ...]  # seconds of a stage, by its first layer and its number of layers


def balance(times: Sequence[Sequence[float]], num_layers: int, micro_batches: int) -> tuple[int, ...] | None:
    """The layers of each stage, in order, that make a pipeline fastest; exact.

    Equation 4 minimises the slowest stage. This function minimises the group's term of equation 1,
    of which the slowest stage is the larger part. It minimises the sum of all stages for every
    bound on the slowest stage, in ascending order. The search ends when the bound alone costs more
    than the best result. A table that is not convex has a convex table below it; the least sum of
    that one is faster to compute, and excludes most bounds.

    Args:
        times: For each stage the seconds of one micro-batch with 0, 1, 2, … layers, as many as its
            memory holds; ascending.
        num_layers: The number of layers. Every stage gets at least one; an idle device is no stage.
        micro_batches: K.

    Returns:
        Layers by stage; ``None`` if they do not fit.
    """
    if any(len(t) < 2 for t in times) or len(times) > num_layers or sum(len(t) - 1 for t in times) < num_layers:
        return None
    bounds = sorted({t for table in times for t in table[1 : num_layers + 1]})
    first = bisect_left(bounds, num_layers, key=lambda bound: sum(_held(times, bound)))
    convex = all(_is_convex(tuple(table)) for table in times)
    least_sum = _least_sum if convex else _least_sum_of_any
    below = times if convex else [_convex_below(tuple(table)) for table in times]
    shortest, _ = _least_sum(below, num_layers, bounds[-1])
    best: tuple[float, tuple[int, ...]] | None = None
    for bound in bounds[first:]:
        if best is not None and shortest + (micro_batches - 1) * bound >= best[0]:
            break
        if best is not None and not convex:
            least, _ = _least_sum(below, num_layers, bound)
            if least * (1 - 1e-9) + (micro_batches - 1) * bound >= best[0]:
                continue
        _, layers = least_sum(times, num_layers, bound)
        seconds = pipeline_s([t[n] for t, n in zip(times, layers, strict=True)], micro_batches)
        if best is None or seconds < best[0]:
            best = seconds, layers
    return best[1] if best else None


def runs_s(tables: Sequence[Rows], layers: Sequence[int]) -> list[float]:
    """Seconds of every stage of a pipeline, from its tables and its numbers of layers."""
    begins = accumulate(layers, initial=0)
    return [rows[begin][n] for rows, begin, n in zip(tables, begins, layers, strict=False)]


def balance_runs(tables: Sequence[Rows], micro_batches: int) -> tuple[int, ...] | None:
    """Like :func:`balance` for layers that differ, so that it matters which ones a stage has.

    Exact.

    A dynamic programme over stages and cuts finds the least sum of all stages. It is repeated with
    every stage fast enough to beat the best cut so far, until there is no such cut. Each time the
    sum grows and the slowest stage gets faster.

    Args:
        tables: For each stage, by its first layer, the seconds of one micro-batch with 0, 1, 2, …
            layers, as many as its memory holds.
        micro_batches: K.

    Returns:
        Layers by stage, at least one each; ``None`` if they do not fit.
    """
    runs = [_matrix(rows) for rows in tables]
    fastest = reduce(lambda before, run: np.maximum(before[:, None], run).min(axis=0), runs, _begun(runs[0]))[-1]
    if not np.isfinite(fastest):
        return None
    best: tuple[float, tuple[int, ...]] | None = None
    # The cut with the fastest slowest stage is close to the optimum; a good early cut shortens the
    # search.
    bounds = [np.inf, float(np.nextafter(fastest, np.inf))]
    while bounds and (layers := _least_sum_of_runs(runs, bounds.pop())) is not None:
        stages = runs_s(tables, layers)
        seconds = pipeline_s(stages, micro_batches)
        if best is None or seconds < best[0]:
            best = seconds, layers
        # A cut of faster stages has no smaller sum, so only a much faster slowest stage makes it
        # better.
        if not bounds and sum(stages) + (micro_batches - 1) * fastest < best[0]:
            bounds.append(min(max(stages), (best[0] - sum(stages)) / (micro_batches - 1)))
    return best[1] if best else None


@lru_cache(maxsize=4096)  # pipelines consist of the same few stages
def _matrix(rows: Rows) -> NDArray[np.float64]:
    """Seconds by first layer and by the first layer of the next stage.

    Infinite if a stage cannot have these layers.
    """
    matrix = np.full((len(rows) + 1, len(rows) + 1), np.inf)
    for begin, row in enumerate(rows):
        held = row[1 : len(rows) - begin + 1]
        matrix[begin, begin + 1 : begin + 1 + len(held)] = held
    return matrix


def _begun(run: NDArray[np.float64]) -> NDArray[np.float64]:
    reached = np.full(len(run), np.inf)
    reached[0] = 0.0
    return reached


def _least_sum_of_runs(runs: Sequence[NDArray[np.float64]], bound: float) -> tuple[int, ...] | None:
    """The cut with the least sum of stages, each of them faster than a bound."""
    reached, choices = _begun(runs[0]), []
    for run in runs:
        sums = reached[:, None] + np.where(run < bound, run, np.inf)
        choices.append(sums.argmin(axis=0))
        reached = sums.min(axis=0)
    if not np.isfinite(reached[-1]):
        return None
    end, layers = len(reached) - 1, []
    for choice in reversed(choices):
        layers.append(end - int(choice[end]))
        end = int(choice[end])
    return tuple(reversed(layers))


def _held(times: Sequence[Sequence[float]], bound: float) -> list[int]:
    """The most layers of each stage within a bound.

    All zero if one stage holds none, because every stage needs one.
    """
    held = [bisect_right(table, bound) - 1 for table in times]
    return held if min(held) > 0 else [0] * len(held)


@lru_cache(maxsize=4096)  # pipelines consist of the same few stages
def _is_convex(table: tuple[float, ...]) -> bool:
    """Whether every further layer takes at least as long as the one before, up to rounding."""
    slack = 1e-9 * table[-1]
    return all(c - b >= b - a - slack for a, b, c in zip(table[1:], table[2:], table[3:], strict=False))


@lru_cache(maxsize=4096)
def _convex_below(table: tuple[float, ...]) -> tuple[float, ...]:
    """The largest convex table, from one layer on, that is nowhere above this one."""
    corners: list[int] = []
    for n in range(1, len(table)):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (table[b] - table[a]) * (n - b) < (table[n] - table[b]) * (b - a):
                break
            corners.pop()
        corners.append(n)
    found = list(table)
    for a, b in pairwise(corners):
        for n in range(a + 1, b):
            found[n] = table[a] + (table[b] - table[a]) * (n - a) / (b - a)
    return tuple(found)


def _least_sum(times: Sequence[Sequence[float]], num_layers: int, bound: float) -> tuple[float, tuple[int, ...]]:
    """The least sum of stages within a bound; for convex tables the cheapest layer is next."""
    held, layers = _held(times, bound), [1] * len(times)
    heap = [(table[2] - table[1], s) for s, table in enumerate(times) if held[s] > 1]
    heapq.heapify(heap)
    left = num_layers - len(times)
    while left:
        step, s = heap[0]
        table, n = times[s], layers[s]
        n, left = n + 1, left - 1
        # Layers of equal cost are taken together.
        while left and n < held[s] and table[n + 1] - table[n] <= step * (1 + 1e-9):
            n, left = n + 1, left - 1
        layers[s] = n
        if n < held[s]:
            heapq.heapreplace(heap, (table[n + 1] - table[n], s))
        else:
            heapq.heappop(heap)
    return sum(table[n] for table, n in zip(times, layers, strict=True)), tuple(layers)


def _least_sum_of_any(times: Sequence[Sequence[float]], num_layers: int, bound: float) -> tuple[float, tuple[int, ...]]:
    """The same for tables that need not be convex (equation 5), by a dynamic programme."""
    before = _layers_before(num_layers)
    choices, reached = [], np.full(num_layers + 2, np.inf)
    reached[0] = 0.0
    for stage, held in zip(times, _held(times, bound), strict=True):
        column = np.full(num_layers + 1, np.inf)
        column[1 : held + 1] = stage[1 : min(held, num_layers) + 1]
        sums = column[None, :] + reached[before]
        choices.append(sums.argmin(axis=1))
        reached[:-1] = sums.min(axis=1)
    left, layers = num_layers, []
    for choice in reversed(choices):
        layers.append(int(choice[left]))
        left -= layers[-1]
    return float(reached[num_layers]), tuple(reversed(layers))


@lru_cache(maxsize=64)
def _layers_before(num_layers: int) -> Any:
    """The layers before a stage, by the layers after and on it.

    If none, the index of an infinite entry.
    """
    n = np.arange(num_layers + 1)
    return np.where(n[:, None] < n[None, :], num_layers + 1, n[:, None] - n[None, :])


def share_out(groups: Sequence[tuple[Sequence[float], int]], micro_batches: int) -> tuple[int, ...] | None:
    """Assigns micro-batches to groups so that the slowest group's term of equation 1 is minimal.

    Exact.

    The group that would end first takes the next micro-batch. Times grow with every micro-batch, so
    no exchange makes the slowest group faster. Micro-batches that all groups complete within a
    sufficiently short time are assigned at once.

    Args:
        groups: For each group the seconds of its stages, and the fewest micro-batches that it can
            take (1F1B: as many as stages).
        micro_batches: Micro-batches of one step.

    Returns:
        K_j; ``None`` if there are too few.
    """
    fewest = [least for _, least in groups]
    if sum(fewest) > micro_batches:
        return None
    slowest = [max(s) for s, _ in groups]
    latency = [sum(s) - n for (s, _), n in zip(groups, slowest, strict=True)]
    counts = fewest
    if min(slowest) > 0:
        seconds = (micro_batches + sum(a / n for a, n in zip(latency, slowest, strict=True))) / sum(1 / n for n in slowest)
        within = [int((seconds - a) / n) - 1 for a, n in zip(latency, slowest, strict=True)]
        begun = [max(pair) for pair in zip(fewest, within, strict=True)]
        counts = begun if sum(begun) <= micro_batches else fewest
    heap = [(latency[j] + (n + 1) * slowest[j], j) for j, n in enumerate(counts)]
    heapq.heapify(heap)
    for _ in range(micro_batches - sum(counts)):
        _, j = heap[0]
        counts[j] += 1
        heapq.heapreplace(heap, (latency[j] + (counts[j] + 1) * slowest[j], j))
    return tuple(counts)
