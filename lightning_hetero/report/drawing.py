"""Pieces of the page as HTML and SVG: block maps, timelines, curves of memory, tables.

Drawings have no text of their own, so that they stretch with the window: names stand beside them.
All text that is not written here passes through :func:`escape`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence

from lightning_hetero.ir.plan import Saved
from lightning_hetero.ir.run_record import RecordedStep
from lightning_hetero.ir.schedule import Lane
from lightning_hetero.report.bars import KINDS, LANES, Bar
from lightning_hetero.report.content import Curve, ShownBlock, Strip
from lightning_hetero.units import format_bytes

_WIDTH = 10_000  # of a drawing, in its own units
_TRACK = 14  # height of one row of bars, pixels
_CHART = 120  # height of a chart, pixels
_NARROWEST = 6  # a shorter bar could not be seen
_TICKS = 5


def escape(text: object) -> str:
    """Text as HTML."""
    return html.escape(str(text))


def duration(value: float) -> str:
    """Seconds in a fitting unit."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= factor or unit == "µs":
            return f"{value / factor:.3g} {unit}"
    raise AssertionError


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = (), id: str = "") -> str:
    """A table in a box that scrolls by itself; ``right``: the numbers of columns with figures."""
    cells = ["".join(f"<td{' class=r' if i in right else ''}>{escape(cell)}</td>" for i, cell in enumerate(row)) for row in rows]
    titles = "".join(f"<th{' class=r' if i in right else ''}>{escape(name)}</th>" for i, name in enumerate(head))
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<div class=box><table{f' id={id}' if id else ''}><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"


# ---- where everything lives ----------------------------------------------------------------------


def block_map(blocks: Sequence[ShownBlock]) -> str:
    """One column of cells per block: its weights, its optimizer state and its activations."""
    rows = []
    for what in ("weights", "state", "activations"):
        cells = "".join(_cell(index, block, what) for index, block in enumerate(blocks))
        rows.append(f"<div class=maprow><span>{what}</span><div class=cells>{cells}</div></div>")
    return f"<div class=map>{''.join(rows)}</div>"


def _cell(index: int, block: ShownBlock, what: str) -> str:
    placed = block.placed
    where = {"weights": placed.weights.value, "state": placed.state.value}.get(what) or _saved_in(block)
    label = escape(f"{placed.name}: {what} {where}")
    return f'<button class="cell t-{where}" data-block={index} title="{label}" aria-label="{label}"></button>'


def _saved_in(block: ShownBlock) -> str:
    others = {Saved.SWAP_HOST: "host", Saved.SWAP_DISK: "disk", Saved.RECOMPUTE: "recomputed"}
    return block.mostly_in or others.get(block.placed.saved, "device")


def tier_bars(tiers: Mapping[str, Mapping[str, int]]) -> str:
    """For each tier a bar of what lives there, by kind; the widest tier fills the width."""
    names = list(dict.fromkeys(tier for row in tiers.values() for tier, size in row.items() if size))
    totals = {tier: sum(row.get(tier, 0) for row in tiers.values()) for tier in names}
    most = max(totals.values(), default=0)
    out = []
    for tier in names:
        parts = [
            f'<i class="w-{escape(what)}" style="width:{100 * row[tier] / most:.3f}%" title="{escape(what)}: '
            f'{format_bytes(row[tier])}"></i>'
            for what, row in tiers.items()
            if row.get(tier)
        ]
        said = ", ".join(f"{what} {format_bytes(row[tier])}" for what, row in tiers.items() if row.get(tier))
        out.append(
            f"<div class=tier><b>{escape(tier)}</b> <span>{format_bytes(totals[tier])}: {escape(said)}</span>"
            f"<div class=stack>{''.join(parts)}</div></div>"
        )
    kinds = "".join(f'<li><i class="w-{escape(what)}"></i>{escape(what)}</li>' for what, row in tiers.items() if any(row.values()))
    return "".join(out) + (f"<ul class=legend>{kinds}</ul>" if out else "")


# ---- the timeline --------------------------------------------------------------------------------


def timeline(strips: Sequence[Strip]) -> str:
    """The steps on one clock, lane by lane, so that what was predicted stands above what was."""
    longest = max((strip.seconds for strip in strips), default=0.0)
    if not longest:
        return ""
    lanes = [lane for lane in Lane if any(lane in strip.lanes for strip in strips)]
    rows = []
    for lane in lanes:
        drawn = [_lane(strip, strip.lanes.get(lane, ()), longest) for strip in strips]
        rows.append(f"<h3>{LANES[lane]}</h3>{''.join(drawn)}")
    ticks = "".join(f"<span>{duration(longest * i / _TICKS) if i else '0'}</span>" for i in range(_TICKS + 1))
    zoom = "".join(f"<button data-zoom={n}>{n}x</button>" for n in (1, 2, 4, 8))
    return (
        f"<div class=zoom>zoom {zoom}</div>"
        f"<div class=scroll><div id=lanes>{''.join(rows)}<div class=ticks>{ticks}</div></div></div>"
        f"<p id=detail class=detail aria-live=polite>Click a bar: what it is, when, how many bytes, and what it waited for.</p>"
        f"{_legend(strips)}"
    )


def _lane(strip: Strip, bars: Sequence[Bar], longest: float) -> str:
    """One lane of one step; every bar says itself in ``data-t``."""
    tracks = 1 + max((bar.track for bar in bars), default=0)
    busy = busy_s(bars)
    drawn = "".join(_bar(bar, longest) for bar in bars)
    mark = ""
    if strip.forward_s is not None:
        x = _WIDTH * strip.forward_s / longest
        mark = f'<path class=turn d="M{x:.0f} 0V{tracks * _TRACK}" />'
    share = f"{100 * busy / strip.seconds:.0f} % busy" if strip.seconds else ""
    return (
        f"<div class=lane><span>{escape(strip.title)} · {share}</span>"
        f'<svg viewBox="0 0 {_WIDTH} {tracks * _TRACK}" preserveAspectRatio="none" style="height:{tracks * _TRACK}px" '
        f'role="img" aria-label="{escape(strip.title)}">{drawn}{mark}</svg></div>'
    )


def _bar(bar: Bar, longest: float) -> str:
    x, width = _WIDTH * bar.start_s / longest, max(_NARROWEST, _WIDTH * (bar.end_s - bar.start_s) / longest)
    span = bar.span
    said = [span.name, f"from {duration(bar.start_s)} for {duration(span.end_s - span.start_s)}"]
    said += [format_bytes(span.num_bytes)] if span.num_bytes else []
    said += [f"waited {duration(span.wait_s)} for {span.waited_for}"] if span.waited_for and span.wait_s > 0 else []
    text = escape("; ".join(said))
    return (
        f'<rect class="k k-{_class(bar.kind)}" x={x:.0f} y={bar.track * _TRACK + 1} width={width:.0f} height={_TRACK - 2} '
        f'data-t="{text}" />'
    )


def _class(kind: str) -> str:
    return kind.replace(" ", "-")


def busy_s(bars: Iterable[Bar]) -> float:
    """Seconds in which at least one of the bars works; waiting is none."""
    total, end = 0.0, -math.inf
    for bar in sorted((bar for bar in bars if bar.kind != "wait"), key=lambda bar: bar.start_s):
        total += max(0.0, bar.end_s - max(bar.start_s, end))
        end = max(end, bar.end_s)
    return total


def _legend(strips: Sequence[Strip]) -> str:
    used = {bar.kind for strip in strips for row in strip.lanes.values() for bar in row}
    items = "".join(
        f"<li><i class='k-{_class(kind)}'></i>{escape(words)}</li>" for kind, (words, _) in KINDS.items() if kind in used
    )
    return f"<ul class=legend>{items}</ul>"


def colours() -> str:
    """The style of each kind of bar."""
    return "".join(f".k-{_class(kind)}{{fill:{colour};background:{colour}}}" for kind, (_, colour) in KINDS.items())


# ---- memory --------------------------------------------------------------------------------------


def curve(one: Curve, seconds: float) -> str:
    """Memory of a tier over a predicted step, with the machine's capacity as a line."""
    top = max(one.capacity_bytes, one.peak_bytes, 1) * 1.05
    points = [(_WIDTH * at / seconds, _CHART * (1 - value / top)) for at, value in one.points]
    path, last = "", None
    for x, y in points:
        path += f"M{x:.0f} {y:.1f}" if last is None else f"H{x:.0f}V{y:.1f}"
        last = y
    path += f"H{_WIDTH}"
    limit = _CHART * (1 - one.capacity_bytes / top)
    said = f"{one.tier}: peak {format_bytes(one.peak_bytes)} of {format_bytes(one.capacity_bytes)}"
    return (
        f"<figure><figcaption>{escape(said)}</figcaption>"
        f'<svg class=chart viewBox="0 0 {_WIDTH} {_CHART}" preserveAspectRatio="none" role="img" aria-label="{escape(said)}">'
        f'<path class=area d="{path}V{_CHART}H0Z" /><path class=line d="{path}" />'
        f'<path class=limit d="M0 {limit:.1f}H{_WIDTH}" /></svg></figure>'
    )


def step_table(steps: Sequence[RecordedStep]) -> str:
    """What each recorded step took; bytes are those of the step, not sums."""
    rows, before = [], None
    for step in steps:
        moved = ("", "") if before is None else (step.read_bytes - before.read_bytes, step.written_bytes - before.written_bytes)
        rows.append(
            (
                str(step.step),
                duration(step.seconds) if step.seconds else "?",
                format_bytes(step.host_bytes),
                format_bytes(step.device_bytes) if step.device_bytes else "",
                format_bytes(step.disk_bytes) if step.disk_bytes else "",
                *(format_bytes(size) if isinstance(size, int) else "" for size in moved),
            )
        )
        before = step
    head = ("step", "time", "host memory", "device peak", "files", "read", "written")
    return table(head, rows, right=range(1, 7))
