"""`simulate`: traces and pictures of a plan."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.cli import HARDWARE, MODEL, invoke, parsed

from lightning_hetero.cli import output, planning, timeline
from lightning_hetero.cli.simulate import last_stalls, longest
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier
from lightning_hetero.ir.schedule import Lane
from lightning_hetero.ir.stalls import op_of_block
from lightning_hetero.ir.trace import Span
from lightning_hetero.planners.evaluation import simulation
from lightning_hetero.units import MIB


def test_simulate_writes_a_chrome_trace_and_a_picture(plan_file: Path, tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "timeline.png"
    got = parsed("simulate", plan_file, "--trace", trace, "--timeline", picture)
    assert got["predicted"] == json.loads(plan_file.read_text(encoding="utf-8"))["predicted"]
    assert got["steady"] is True
    assert sum(row["seconds"] for row in got["stalls"]) == pytest.approx(sum(got["waits_s"].values()))
    assert all(row["waited_for"] for row in got["stalls"])
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert {"compute", "h2d"} <= {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert any(e["name"] == "F layers.5" for e in events)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert picture.stat().st_size > 20_000
    text = invoke("simulate", plan_file, "--timeline", tmp_path / "timeline.svg").stdout
    assert "Lanes" in text
    assert "Wrote the timeline to" in text
    assert "optimizer update" in (tmp_path / "timeline.svg").read_text(encoding="utf-8")


def test_a_plan_that_splits_the_batch_computes_its_parts(tmp_path: Path, profiles: list[str]) -> None:
    rule = BlockPlan(name="*", weights=Tier.DEVICE, saved=Saved.RECOMPUTE)
    times = {}
    for parts in (1, 2):
        path = tmp_path / f"{parts}.json"
        path.write_text(Plan(name="mine", blocks=(rule,), micro_batches=parts).to_json(), encoding="utf-8")
        got = parsed("simulate", path, *profiles)
        times[parts] = got["busy"]["compute"] * got["predicted"]["iteration_s"]
        explained = parsed("explain", path, *profiles)
        assert explained["predicted"] == got["predicted"]
        assert sum(explained["where"]["activations"].values()) == 7 * 140 * MIB // parts
    # The same work in halves; how much of it runs beside updates, which slow it down, differs a
    # little.
    assert times[2] == pytest.approx(times[1], rel=0.02)


def test_a_picture_that_cannot_be_drawn_exits_2(plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Name a .png" in parsed("simulate", plan_file, "--timeline", tmp_path / "timeline.doc", code=2)["error"]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
        refused = parsed("simulate", plan_file, "--timeline", tmp_path / "timeline.png", code=2)["error"]
    assert "needs matplotlib" in refused
    assert "pip install" in refused


def test_a_plan_that_no_longer_fits_exits_2(plan_file: Path, profiles: list[str]) -> None:
    Path(profiles[-1]).write_text(replace(HARDWARE, host_memory_bytes=400 * MIB).to_json(), encoding="utf-8")
    got = parsed("simulate", plan_file, code=2)
    assert got["shortfall_bytes"] > 0


def test_a_picture_shows_the_steady_step_with_ops_across_its_ends() -> None:
    """Updates outlast backward: what the step finds at its begin is what it leaves at its end."""
    hardware = replace(HARDWARE, cpu_update_params_per_s=4e8)
    plan = planning.planners("zero_infinity")["zero_infinity"](MODEL, hardware)
    plan = replace(plan, priority=True)
    simulated = simulation(plan, MODEL, hardware, keep_trace=True)
    assert simulated.steady
    begin, end = timeline.window(simulated)
    assert end - begin == pytest.approx(simulated.prediction.iteration_s)
    begin, end = begin - 1e-6, end - 1e-6  # what ends exactly as the step does crosses it, too
    lanes = timeline.bars(timeline.spans(simulated), begin, end)
    bars = [(lane, bar) for lane, row in lanes.items() if lane is not Lane.COMPUTE for bar in row]
    found = {(lane, bar.kind, bar.label) for lane, bar in bars if bar.start_s == 0}
    left = {(lane, bar.kind, bar.label) for lane, bar in bars if bar.end_s == end - begin}
    assert found
    assert found == left


def test_the_longest_waits_of_a_step_are_listed_with_their_ops() -> None:
    hardware = replace(HARDWARE, cpu_update_params_per_s=4e8)
    plan = planning.planners("zero_infinity")["zero_infinity"](MODEL, hardware)
    simulated = simulation(plan, MODEL, hardware, keep_trace=True)
    rows = last_stalls(simulated)
    assert sum(row.seconds for row in rows) == pytest.approx(sum(simulated.waits.values()))
    shown = longest(simulated, most=1)
    before, time, waited_for, meanwhile = (str(next(iter(column.cells))) for column in shown.columns)
    assert shown.row_count == 1
    assert before == rows[0].at
    assert time == output.seconds(rows[0].seconds)
    assert waited_for == op_of_block(rows[0].waited_for)
    assert "UPDATE" in meanwhile


def test_bars_of_one_lane_that_overlap_get_their_own_tracks_and_are_cut_to_the_window() -> None:
    def span(name: str, lane: Lane, start: float, end: float) -> Span:
        return Span(step=0, name=name, lane=lane.value, start_s=start, end_s=end)

    spans = [
        span("F layers.0", Lane.COMPUTE, 0.0, 1.0),
        span("wait F layers.1", Lane.COMPUTE, 1.0, 1.5),
        span("RELEASE layers.0", Lane.COMPUTE, 1.2, 1.2),
        span("UPDATE layers.12", Lane.CPU, 0.5, 2.5),
        span("UPDATE layers.3", Lane.CPU, 1.0, 2.0),
        span("FETCH state layers.3", Lane.DISK_READ, 0.0, 0.4),
        span("FETCH layers.4", Lane.DISK_READ, 1.0, 4.0),
    ]
    found = timeline.bars(spans, 0.5, 3.0)
    assert [(b.kind, b.start_s, b.end_s, b.track) for b in found[Lane.COMPUTE]] == [("F", 0.0, 0.5, 0), ("wait", 0.5, 1.0, 0)]
    assert [(b.label, b.track) for b in found[Lane.CPU]] == [("12", 0), ("3", 1)]
    assert [(b.kind, b.end_s) for b in found[Lane.DISK_READ]] == [("FETCH", 2.5)]
