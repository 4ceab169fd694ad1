from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_hetero.ir.trace import Span, Trace


def _span(lane: str, start_s: float, end_s: float, waited_for: str = "") -> Span:
    return Span(step=1, name="UPDATE a", lane=lane, start_s=start_s, end_s=end_s, num_bytes=7, waited_for=waited_for)


def test_busy_time_counts_overlapping_spans_once() -> None:
    trace = Trace(
        spans=(
            _span("cpu", 0.0, 2.0),
            _span("cpu", 1.0, 3.0),
            _span("cpu", 5.0, 6.0),
            _span("cpu", 5.2, 5.3),
            _span("disk_read", 0.0, 1.0),
        )
    )
    assert trace.busy_s() == pytest.approx({"cpu": 4.0, "disk_read": 1.0})


def test_chrome_trace_has_one_named_row_per_lane_in_microseconds(tmp_path: Path) -> None:
    trace = Trace(spans=(_span("cpu", 0.5, 2.0), _span("compute", 0.0, 1.0, waited_for="FETCH a"), _span("cpu", 2.0, 2.5)))
    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [e for e in events if e["ph"] == "X"]
    assert sorted(rows.values()) == ["compute", "cpu"]
    assert [rows[e["tid"]] for e in spans] == ["cpu", "compute", "cpu"]
    assert (spans[0]["ts"], spans[0]["dur"]) == (500_000.0, 1_500_000.0)
    assert [e["args"].get("waited_for") for e in spans] == [None, "FETCH a", None]


def test_an_empty_trace_is_valid() -> None:
    assert json.loads(Trace(spans=()).to_chrome()) == {"traceEvents": []}
    assert Trace(spans=()).busy_s() == {}
