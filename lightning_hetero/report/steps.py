"""Steps of traces, predicted and measured, on clocks that begin at 0."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise

from lightning_hetero.ir.schedule import Lane
from lightning_hetero.ir.stalls import Stall, describe, op_of_block, stalls
from lightning_hetero.ir.trace import Span, Trace
from lightning_hetero.report.bars import LANES, bars, spans, window
from lightning_hetero.report.content import Strip
from lightning_hetero.report.drawing import busy_s, duration
from lightning_hetero.sim import Simulation
from lightning_hetero.units import format_bytes

_LONGEST = 6  # waits that are told one by one
_LEAST_SHARE = 0.001  # of a step: a shorter wait is not told


def predicted(simulation: Simulation) -> Strip:
    """The simulated step; the simulation has kept its trace."""
    begin_s, end_s = window(simulation)
    found = [stall for stall in stalls(simulation.trace) if stall.start_s >= begin_s]
    return Strip(
        title="predicted",
        seconds=end_s - begin_s,
        lanes=bars(spans(simulation), begin_s, end_s),
        forward_s=simulation.prediction.forward_s,
        sentences=_sentences(found, end_s - begin_s),
    )


def measured(trace: Trace) -> Strip | None:
    """The step of a trace whose duration is the median of its whole steps; ``None`` without one.

    The first step is left out if there are others: its beginning may not be recorded.
    """
    windows = _windows(trace)
    if not windows:
        return None
    usual = list(windows)[1:] or list(windows)
    middle = statistics.median_low(windows[step][1] - windows[step][0] for step in usual)
    step = next(step for step in usual if windows[step][1] - windows[step][0] == middle)
    begin_s, end_s = windows[step]
    found = [stall for stall in stalls(trace) if stall.step == step]
    backwards = [s.start_s for s in trace.spans if s.step == step and s.name.startswith(("B ", "wait B "))]
    return Strip(
        title=f"measured, step {step}",
        seconds=end_s - begin_s,
        lanes=bars(trace.spans, begin_s, end_s),
        forward_s=min(backwards) - begin_s if backwards else None,
        sentences=[describe(step, found), *_sentences(found, end_s - begin_s)],
    )


def _windows(trace: Trace) -> dict[int, tuple[float, float]]:
    """Begin and end of each step that has a backward, in order.

    A step lasts from its first compute to that of the next step, or to its own last.
    """
    computes: dict[int, list[Span]] = {}
    for span in trace.spans:
        if span.lane == Lane.COMPUTE and span.end_s > span.start_s:
            computes.setdefault(span.step, []).append(span)
    begins = {step: min(s.start_s for s in row) for step, row in sorted(computes.items())}
    whole = [step for step in begins if any(s.name.startswith("B ") for s in computes[step])]
    following = dict(pairwise(begins))  # numbers may skip: several optimizers make several steps
    return {
        step: (begins[step], begins[following[step]] if step in following else max(s.end_s for s in computes[step]))
        for step in whole
    }


def traffic(strip: Strip) -> list[tuple[str, str, str, str]]:
    """Bytes, busy seconds and rate of each lane that moves bytes, in words."""
    rows = []
    for lane, row in strip.lanes.items():
        moved, busy = sum(bar.span.num_bytes for bar in row), busy_s(row)
        if moved and lane is not Lane.COMPUTE:
            rate = f"{format_bytes(moved / busy)}/s" if busy else ""
            rows.append((f"{LANES[lane]}, {strip.title}", format_bytes(moved), duration(busy), rate))
    return rows


def _sentences(found: Iterable[Stall], step_s: float) -> list[str]:
    """The longest waits, one sentence each."""
    told = sorted((s for s in found if s.seconds >= _LEAST_SHARE * step_s), key=lambda stall: -stall.seconds)
    if not told:
        return ["Compute waits for nothing."]
    out = [f"Before {_anchor(s.at)}, compute waits {duration(s.seconds)} for {op_of_block(s.waited_for)}{_chain(s)}." for s in told]
    rest = sum(stall.seconds for stall in told[_LONGEST:])
    return out[:_LONGEST] + ([f"{len(told) - _LONGEST} shorter waits take {duration(rest)} together."] if rest else [])


def _anchor(at: str) -> str:
    """``"the forward of model.layers.3"``."""
    kind, _, block = at.partition(" ")
    words = {"F": "the forward", "B": "the backward"}
    return f"{words[kind]} of {block}" if kind in words and block else "the next step" if kind == "V" else at


def _chain(stall: Stall) -> str:
    """What happened meanwhile, by kind of op, if it was more than one."""
    totals: dict[str, float] = {}
    for name, seconds in stall.chain:
        kind = name.rpartition(" ")[0] or name or "other"
        totals[kind] = totals.get(kind, 0.0) + seconds
    ranked: Sequence[tuple[str, float]] = sorted(totals.items(), key=lambda item: -item[1])
    return f" ({', '.join(f'{kind} {duration(seconds)}' for kind, seconds in ranked)})" if len(ranked) > 1 else ""
