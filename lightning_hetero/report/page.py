"""The page: one HTML file with its style, its drawings and its script, and without network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from lightning_hetero.report import drawing
from lightning_hetero.report.content import PageContent, ShownBlock, WhatIf
from lightning_hetero.report.drawing import duration, escape, table
from lightning_hetero.units import format_bytes

_HERE = Path(__file__).parent
_TIERS = ("device", "host", "disk", "recomputed")


def page(report: PageContent) -> str:
    """The report as HTML text."""
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    sections = (_where, _when, _stalls, _memory, _bytes, _what_ifs)
    body = "".join(section(report) for section in sections)
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in report.facts.items())
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{escape(report.title)}</title>"
        f'<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<style>{drawing.colours()}{style}</style></head><body><h1>{escape(report.title)}</h1>"
        f"<p class=lead>{escape(report.summary)}</p><dl>{facts}</dl>{body}"
        f"<footer>Written by lightning-hetero report. Predicted times are the simulator's.</footer>"
        f'<script id=blocks type="application/json">{_blocks(report.blocks)}</script><script>{script}</script></body></html>\n'
    )


def _section(title: str, parts: Iterable[str], *, id: str) -> str:
    text = "".join(parts)
    return f"<section id={id}><h2>{escape(title)}</h2>{text}</section>" if text else ""


def _where(report: PageContent) -> str:
    if not report.blocks:
        return ""
    chips = "".join(f'<button data-tier={tier} aria-pressed=false><i class="t-{tier}"></i>{tier}</button>' for tier in _TIERS)
    head = ("block", "weights", "", "state", "", "update", "activations")
    rows = [
        (
            block.placed.name,
            block.placed.weights.value,
            _size(block.weight_bytes),
            block.placed.state.value,
            _size(block.state_bytes),
            block.placed.update.value,
            block.activations or block.placed.saved.value,
        )
        for block in report.blocks
    ]
    parts = (
        drawing.tier_bars(report.tiers),
        f"<div class=chips>{chips}</div>{drawing.block_map(report.blocks)}",
        "<div id=block class=detail aria-live=polite>Click a cell: its block, and its tensors if a run has recorded them.</div>",
        "<details><summary>All blocks</summary>",
        "<p><input id=search type=search placeholder='Filter' aria-label='Filter blocks'></p>",
        table(head, rows, right=(2, 4), id="placement") + "</details>",
    )
    return _section("Where every tensor lives", parts, id="where")


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else format_bytes(num_bytes)


def _blocks(blocks: Sequence[ShownBlock]) -> str:
    """What a click on a block shows, as JSON that may stand in HTML."""
    rows = []
    for block in blocks:
        placed = block.placed
        weights, state = (f" ({_size(size)})" if size is not None else "" for size in (block.weight_bytes, block.state_bytes))
        rows.append(
            {
                "text": f"{placed.name}: weights on {placed.weights.value}{weights}, state on {placed.state.value}{state}, "
                f"update on {placed.update.value}, activations: {block.activations or placed.saved.value}",
                "tensors": [
                    f"{t.name}: {' x '.join(map(str, t.shape)) or 'a number'}, {t.dtype}, {format_bytes(t.num_bytes)}"
                    f"{'' if t.trains else ', frozen'}"
                    for t in block.tensors
                ],
            }
        )
    return json.dumps(rows).replace("<", "\\u003c")


def _when(report: PageContent) -> str:
    title = "One step, predicted over measured" if len(report.strips) > 1 else "One step"
    lengths = ", ".join(f"{strip.title} {duration(strip.seconds)}" for strip in report.strips)
    parts = (f"<p>{escape(lengths)}. The dashed line is where backward begins.</p>", drawing.timeline(report.strips))
    return _section(title, parts, id="when") if report.strips else ""


def _stalls(report: PageContent) -> str:
    parts = [
        f"<h3>{escape(strip.title)}</h3><ul>{''.join(f'<li>{escape(line)}</li>' for line in strip.sentences)}</ul>"
        for strip in report.strips
        if strip.sentences
    ]
    return _section("What compute waits for", parts, id="stalls")


def _memory(report: PageContent) -> str:
    seconds = report.strips[0].seconds if report.curves else 0.0
    parts = [drawing.curve(one, seconds) for one in report.curves]
    if report.steps:
        parts.append(f"<h3>Measured, step by step</h3>{drawing.step_table(report.steps)}")
    return _section("Memory of each tier over time", parts, id="memory")


def _bytes(report: PageContent) -> str:
    parts = [table(("what", "bytes a step", "busy", "rate"), report.traffic, right=(1, 2, 3))] if report.traffic else []
    if report.wear:
        parts.append(f"<p>Disk wear: {escape(report.wear)}.</p>")
    return _section("Bytes and wear", parts, id="bytes")


def _what_ifs(report: PageContent) -> str:
    parts = [f"<p class=lead>{escape(report.remedy)}</p>"] if report.remedy else []
    if report.what_ifs:
        parts.append(table(("change", "step", "tokens/s", "gain", ""), map(_what_if, report.what_ifs), right=(1, 2, 3)))
    if report.alternatives:
        parts.append("<h3>Why not otherwise: one block placed in another way</h3>")
        parts.append(table(("block", "change", "step"), report.alternatives))
    return _section("What if", parts, id="whatif")


def _what_if(one: WhatIf) -> tuple[str, str, str, str, str]:
    if one.step_s is None or one.tokens_per_s is None or one.gain is None:
        return one.change, "no plan", "", "", one.remark
    return one.change, duration(one.step_s), f"{one.tokens_per_s:,.0f}", f"{100 * one.gain:+.0f} %", one.remark
