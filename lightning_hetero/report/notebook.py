"""What a plan and a trace show of themselves in a notebook.

The style stands at the elements: a notebook keeps no style sheet, and has its own colours.
"""

from __future__ import annotations

from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.schedule import Lane
from lightning_hetero.ir.trace import Trace
from lightning_hetero.report.bars import KINDS, LANES
from lightning_hetero.report.drawing import busy_s, duration, escape
from lightning_hetero.report.groups import groups
from lightning_hetero.report.steps import measured
from lightning_hetero.units import format_bytes

_TIERS = {"device": "#7a5fd0", "host": "#2a9d98", "disk": "#c07a24"}
_WIDTH, _TRACK = 10_000, 12


def plan_fragment(plan: Plan) -> str:
    """The plan's placement as a table, with its prediction."""
    rows = "".join(
        f"<tr><td style='text-align:left'>{escape(group.names(plan))}</td><td>{len(group.indices)}</td>"
        f"{_tier(group.placed.weights.value)}{_tier(group.placed.state.value)}<td>{group.placed.update.value}</td>"
        f"<td>{escape(group.placed.saved.value)}</td></tr>"
        for group in groups(plan)
    )
    head = "".join(f"<th>{name}</th>" for name in ("blocks", "count", "weights", "state", "update", "activations"))
    predicted, said = plan.predicted, ""
    if predicted is not None:
        peaks = {"device": predicted.device_peak_bytes, "host": predicted.host_peak_bytes, "disk": predicted.disk_bytes}
        memory = ", ".join(f"{tier} {format_bytes(size)}" for tier, size in peaks.items() if size)
        said = f"<p>Predicted: {duration(predicted.iteration_s)} a step; {memory}.</p>"
    return f"<div><b>Plan {escape(plan.name)}</b>{said}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"


def _tier(name: str) -> str:
    return f"<td><span style='color:{_TIERS.get(name, 'inherit')}'>&#9632;</span> {escape(name)}</td>"


def trace_fragment(trace: Trace) -> str:
    """One usual step of the trace, lane by lane, and what compute waits for in it."""
    strip = measured(trace)
    if strip is None:
        return f"<div>Trace of {len(trace.spans)} spans, without a whole step.</div>"
    drawn = []
    for lane in (lane for lane in Lane if lane in strip.lanes):
        row = strip.lanes[lane]
        height = _TRACK * (1 + max(bar.track for bar in row))
        rects = "".join(
            f'<rect x="{_WIDTH * bar.start_s / strip.seconds:.0f}" y="{bar.track * _TRACK}" '
            f'width="{max(6.0, _WIDTH * (bar.end_s - bar.start_s) / strip.seconds):.0f}" height="{_TRACK - 2}" '
            f'fill="{KINDS[bar.kind][1]}"><title>{escape(bar.span.name)}: {duration(bar.end_s - bar.start_s)}</title></rect>'
            for bar in row
        )
        share = f"{100 * busy_s(row) / strip.seconds:.0f} % busy"
        drawn.append(
            f"<div style='font-size:smaller'>{LANES[lane]}, {share}</div><svg viewBox='0 0 {_WIDTH} {height}' "
            f"preserveAspectRatio='none' style='width:100%;height:{height}px;background:#8882'>{rects}</svg>"
        )
    waits = "".join(f"<li>{escape(sentence)}</li>" for sentence in strip.sentences)
    return f"<div><b>Trace</b>, {escape(strip.title)}: {duration(strip.seconds)}{''.join(drawn)}<ul>{waits}</ul></div>"
