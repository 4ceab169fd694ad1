"""Layers to stages, and micro-batches to groups."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from lightning_hetero.parallel.planner.equations import pipeline_s


def balance(times: Sequence[Sequence[float]], num_layers: int, micro_batches: int) -> tuple[int, ...] | None:
    """The layers of each stage, in order, that make a pipeline fastest; exact.

    Equation 4 minimises the slowest stage; this minimises the group's term of equation 1, of which that is the larger part. For
    every bound on the slowest stage, in ascending order from the least possible, the sum of all stages is minimised; the bound
    alone ends the search once it costs more than the best found.

    Args:
        times: For each stage the seconds of one micro-batch with 0, 1, 2, … layers, as many as its memory holds; ascending.
        num_layers: To be placed. Every stage gets at least one: a device that should not work is no stage.
        micro_batches: K.

    Returns:
        Layers by stage; ``None`` if they do not fit.
    """
    if any(len(t) < 2 for t in times) or len(times) > num_layers or sum(len(t) - 1 for t in times) < num_layers:
        return None
    bounds = sorted({t for table in times for t in table[1 : num_layers + 1]})
    first = bisect_left(bounds, num_layers, key=lambda bound: sum(_held(times, bound)))
    least_sum = _least_sum if all(_is_convex(tuple(table)) for table in times) else _least_sum_of_any
    shortest, _ = least_sum(times, num_layers, bounds[-1])
    best: tuple[float, tuple[int, ...]] | None = None
    for bound in bounds[first:]:
        if best is not None and shortest + (micro_batches - 1) * bound >= best[0]:
            break
        _, layers = least_sum(times, num_layers, bound)
        seconds = pipeline_s([t[n] for t, n in zip(times, layers, strict=True)], micro_batches)
        if best is None or seconds < best[0]:
            best = seconds, layers
    return best[1] if best else None


def _held(times: Sequence[Sequence[float]], bound: float) -> list[int]:
    """The most layers of each stage within a bound; all zero if one holds none, since every stage needs one."""
    held = [bisect_right(table, bound) - 1 for table in times]
    return held if min(held) > 0 else [0] * len(held)


@lru_cache(maxsize=4096)  # pipelines consist of the same few stages
def _is_convex(table: tuple[float, ...]) -> bool:
    """Whether every further layer takes at least as long as the one before, but for rounding."""
    slack = 1e-9 * table[-1]
    return all(c - b >= b - a - slack for a, b, c in zip(table[1:], table[2:], table[3:], strict=False))


def _least_sum(times: Sequence[Sequence[float]], num_layers: int, bound: float) -> tuple[float, tuple[int, ...]]:
    """The least sum of stages within a bound that holds all layers: convex tables take the cheapest layer next."""
    held, layers = _held(times, bound), [1] * len(times)
    heap = [(table[2] - table[1], s) for s, table in enumerate(times) if held[s] > 1]
    heapq.heapify(heap)
    left = num_layers - len(times)
    while left:
        step, s = heap[0]
        table, n = times[s], layers[s]
        # Layers that cost the same go together.
        while left and n < held[s] and table[n + 1] - table[n] <= step * (1 + 1e-9):
            n, left = n + 1, left - 1
        layers[s] = n
        if n < held[s]:
            heapq.heapreplace(heap, (table[n + 1] - table[n], s))
        else:
            heapq.heappop(heap)
    return sum(table[n] for table, n in zip(times, layers, strict=True)), tuple(layers)


def _least_sum_of_any(times: Sequence[Sequence[float]], num_layers: int, bound: float) -> tuple[float, tuple[int, ...]]:
    """The same for measured tables, which need not be convex (equation 5): a dynamic programme over stages and layers."""
    missing = num_layers + 1  # the index of an infinite entry
    n = np.arange(num_layers + 1)
    table = np.where(n[:, None] < n[None, :], missing, n[:, None] - n[None, :])
    choices, reached = [], np.append(np.where(n == 0, 0.0, np.inf), np.inf)
    for stage, held in zip(times, _held(times, bound), strict=True):
        column = np.full(num_layers + 1, np.inf)
        column[1 : held + 1] = stage[1 : min(held, num_layers) + 1]
        sums = column[None, :] + reached[table]
        choices.append(np.argmin(sums, axis=1))
        reached = np.append(np.min(sums, axis=1), np.inf)
    left, layers = num_layers, []
    for choice in reversed(choices):
        layers.append(int(choice[left]))
        left -= layers[-1]
    return float(reached[num_layers]), tuple(reversed(layers))


def share_out(groups: Sequence[tuple[Sequence[float], int]], micro_batches: int) -> tuple[int, ...] | None:
    """Micro-batches to groups so that the slowest group's term of equation 1 is least; exact.

    The group that would end first takes the next one: times grow with every micro-batch, so no exchange makes the slowest faster.

    Args:
        groups: For each group the seconds of its stages, and the fewest micro-batches that it can take (1F1B: as many as stages).
        micro_batches: Of one step.

    Returns:
        K_j; ``None`` if there are too few.
    """
    counts = [least for _, least in groups]
    left = micro_batches - sum(counts)
    if left < 0:
        return None
    heap = [(pipeline_s(s, counts[j] + 1), j) for j, (s, _) in enumerate(groups)]
    heapq.heapify(heap)
    for _ in range(left):
        _, j = heap[0]
        counts[j] += 1
        heapq.heapreplace(heap, (pipeline_s(groups[j][0], counts[j] + 1), j))
    return tuple(counts)
