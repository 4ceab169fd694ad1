"""LoHan's search for activations to swap: Algorithm 1, and the programme of section IV-D.

Source: "LoHan: Low-Cost High-Performance Framework to Fine-Tune 100B Model on a Consumer GPU". The
formulas are in ``formulas.py``; what the paper leaves open is marked [inferred] and discussed in
docs/planners/lohan.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import accumulate
from typing import Any, Literal

from lightning_hetero.planners.lohan.formulas import Layer, Quantities, iteration_s

_SLACK = 1e-9  # relative: iteration times this close to the programme's optimum count as optimal


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapChoice:
    """A choice of activations to swap.

    Attributes:
        layers: The layers, best first.
        swapped_bytes: A of the formulas; all swapped bytes under the reading ``"first"``.
        iteration_s: T_iter there, seconds.
        case: 1: T_iter rises from the least that may be swapped on; 2: it falls to the last layer;
            3: its minimum is between.
    """

    layers: tuple[Layer, ...]
    swapped_bytes: int
    iteration_s: float
    case: Literal[1, 2, 3]


def _amounts(q: Quantities, layers: Sequence[Layer]) -> list[float]:
    """A when the first 0, 1, 2, … layers are swapped."""
    return list(accumulate((layer.num_bytes for layer in layers), initial=q.swapped_first_bytes))


def _points(q: Quantities, layers: Sequence[Layer]) -> list[tuple[float, float]]:
    """A and T_iter when the first 0, 1, 2, … layers are swapped."""
    spared = accumulate((layer.flop for layer in layers), initial=0.0)
    return [(a, iteration_s(q, a, max(0.0, q.dropped_flop - f))) for a, f in zip(_amounts(q, layers), spared, strict=True)]


def least_layers(q: Quantities, layers: Sequence[Layer]) -> int:
    """The fewest layers with which A reaches A_interBlock; all of them where it cannot."""
    return next((k for k, a in enumerate(_amounts(q, layers)) if a >= q.boundary_bytes), len(layers))


def _swap(q: Quantities, layers: Sequence[Layer], count: int) -> SwapChoice:
    case: Literal[1, 2, 3] = 1 if count == least_layers(q, layers) else 2 if count == len(layers) else 3
    swapped, seconds = _points(q, layers[:count])[count]
    return SwapChoice(layers=tuple(layers[:count]), swapped_bytes=int(swapped), iteration_s=seconds, case=case)


def at_most(q: Quantities, swap: SwapChoice, layers: Sequence[Layer], swapped_bytes: float) -> SwapChoice:
    """The best choice that swaps at most ``swapped_bytes``, but at least A_interBlock.

    T_iter is convex, so it is the longest such choice.

    The case stays what it is without that limit.
    """
    count = max((k for k, a in enumerate(_amounts(q, layers)) if a <= swapped_bytes), default=0)
    return replace(_swap(q, layers, max(least_layers(q, layers), min(count, len(swap.layers)))), case=swap.case)


def walk(q: Quantities, layers: Sequence[Layer]) -> SwapChoice:
    """Takes layers in order until one does not improve T_iter, but at least A_interBlock.

    T_iter is convex in A, so that the first layer which does not improve it is past the minimum.
    The layer that ends the walk is not swapped. The paper tests ``A >= A_interBlock`` with that
    layer in A and then leaves it out, which can end below A_interBlock; here A is tested without it
    [inferred].

    Args:
        q: The symbols.
        layers: As :func:`swap_order` gives them.

    Source: Algorithm 1.
    """
    points = _points(q, layers)
    count = least_layers(q, layers)
    while count < len(layers) and points[count + 1][1] < points[count][1]:
        count += 1
    return _swap(q, layers, count)


def relaxed(q: Quantities, layers: Sequence[Layer]) -> tuple[float, float]:
    """The convex programme: minimise ``T_f + T_b`` over ``A = sum x_l A_l``.

    Subject to ``0 <= x_l <= 1`` and ``A >= A_interBlock``.

    Epigraph form, ``F_r = F - sum x_l FLOP_l``; a linear programme in cvxpy, solved by HiGHS. Where
    T_iter is flat, the least A of all optimal ones is returned.

    Returns:
        A in bytes, which may cut through a layer, and T_iter there in seconds.

    Source: section IV-D (convexity of T_iter).
    """
    cp: Any = import_module("cvxpy")  # takes a second, and has no types

    least, most = _points(q, layers)[0][0], _points(q, layers)[-1][0]
    if not layers:
        return least, iteration_s(q, least, q.dropped_flop)
    # Bytes and seconds in units in which everything is near 1: solvers' tolerances are absolute.
    size, span = max(most, 1.0), iteration_s(q, least, q.forward_flop)
    x, forward, backward = cp.Variable(len(layers)), cp.Variable(), cp.Variable()
    swapped = least / size + cp.sum(cp.multiply([layer.num_bytes / size for layer in layers], x))
    spared = cp.sum(cp.multiply([layer.flop / q.flop_per_s / span for layer in layers], x))
    spill = cp.pos(swapped - q.host_bytes / size) if math.isfinite(q.host_bytes) else 0.0

    def disk(read: Any, write: Any) -> Any:
        read_s = read * size / q.disk_read_bytes_per_s / span
        write_s = write * size / q.disk_write_bytes_per_s / span
        return cp.maximum(read_s, write_s) if q.disk_duplex else read_s + write_s

    fixed_forward = max(q.forward_flop / q.flop_per_s, q.weight_bytes / q.upload_bytes_per_s) / span
    fixed_backward = max(q.gradient_bytes / q.download_bytes_per_s, 2 * q.forward_flop / q.flop_per_s) / span
    constraints = [
        x >= 0,
        x <= 1,
        swapped >= min(q.boundary_bytes, most) / size,
        forward >= fixed_forward,
        forward >= swapped * (size / q.download_bytes_per_s / span),
        forward >= disk(q.weight_bytes / size, spill),
        backward >= fixed_backward,
        backward >= (2 * q.forward_flop + q.dropped_flop) / q.flop_per_s / span - spared,
        backward >= (q.weight_bytes / size + swapped) * (size / q.upload_bytes_per_s / span),
        backward >= disk(q.read_bytes / size + spill, q.written_bytes / size),
    ]
    total = forward + backward
    cp.Problem(cp.Minimize(total), constraints).solve(solver=cp.HIGHS)
    least_time = float(total.value)
    cp.Problem(cp.Minimize(swapped), [*constraints, total <= least_time * (1 + _SLACK)]).solve(solver=cp.HIGHS)
    return float(swapped.value) * size, least_time * span


def convex(q: Quantities, layers: Sequence[Layer]) -> SwapChoice:
    """The whole layers nearest to the convex programme's optimum.

    The layer that the optimum cuts is taken or left, whichever is faster.

    Args:
        q: The symbols.
        layers: As :func:`swap_order` gives them.
    """
    swapped, _ = relaxed(q, layers)
    points, least = _points(q, layers), least_layers(q, layers)
    tolerance = _SLACK * max(points[-1][0], 1.0)
    below = max((k for k, (a, _) in enumerate(points) if a <= swapped + tolerance), default=0)
    count = min((k for k in (below, min(below + 1, len(layers))) if k >= least), key=lambda k: points[k][1], default=least)
    return _swap(q, layers, count)


METHODS: Mapping[str, Callable[[Quantities, Sequence[Layer]], SwapChoice]] = {"walk": walk, "convex": convex}
