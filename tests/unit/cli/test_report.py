"""The page as text: what it has, that it needs no network, and that names cannot break it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.cli import HARDWARE, MODEL, invoke

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.ir.run_record import RecordedStep, RecordedTensor, RunRecord
from lightning_hetero.ir.schedule import Lane
from lightning_hetero.ir.trace import Span, Trace
from lightning_hetero.planners.evaluation import simulation
from lightning_hetero.report import PageContent, measured, page, predicted
from lightning_hetero.report.content import ShownBlock
from lightning_hetero.report.drawing import busy_s
from lightning_hetero.report.steps import traffic
from lightning_hetero.units import GIB

DISK = Plan(name="by hand", blocks=(BlockPlan(name="embed"), BlockPlan(name="*", state=Tier.DISK)))


class Tags(HTMLParser):
    """Elements that are open and elements with addresses; the text of each section."""

    VOID = frozenset({"meta", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action") and value]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(text: str) -> Tags:
    tags = Tags(text)
    assert tags.open == []
    return tags


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """A plan with state on disk, and the profiles of its model and machine."""
    (tmp_path / "model.json").write_text(MODEL.to_json(), encoding="utf-8")
    (tmp_path / "hardware.json").write_text(HARDWARE.to_json(), encoding="utf-8")
    plan = replace(DISK, origin={"model_profile": "model.json", "hardware_profile": "hardware.json"})
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    return path


def run_folder(plan_file: Path) -> Path:
    """What TraceOnDemand leaves: here the trace is the simulated one, a second later."""
    folder = plan_file.parent
    simulated = simulation(DISK, MODEL, HARDWARE, keep_trace=True)
    spans = tuple(replace(s, start_s=s.start_s + 1, end_s=s.end_s + 1) for s in simulated.trace.spans)
    (folder / "trace.json").write_text(Trace(spans=spans).to_chrome(), encoding="utf-8")
    steps = tuple(
        RecordedStep(
            step=n, seconds=0.5, host_bytes=GIB, device_bytes=0, disk_bytes=2 * GIB, read_bytes=n * GIB, written_bytes=n * 2 * GIB
        )
        for n in (7, 8, 9)
    )
    tensors = (RecordedTensor(name="layers.1.weight", block="layers.1", shape=(4, 5), dtype="float32", num_bytes=80, trains=True),)
    drive = {"drive": "vda", "rated_bytes": 1e15, "rated_by": "sheet"}
    record = RunRecord(model="Mine", steps=steps, tensors=tensors, tokens=MODEL.tokens, **drive)
    (folder / "run.json").write_text(record.to_json(), encoding="utf-8")
    return folder


def test_a_plans_page_has_every_section_and_no_address(plan_file: Path, tmp_path: Path) -> None:
    said = invoke("report", plan_file, "--out", tmp_path / "r.html").stdout
    assert "r.html" in said
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    tags = parsed(text)
    assert {"where", "when", "stalls", "memory", "bytes", "whatif"} <= set(tags.ids)
    assert tags.addresses == []
    assert not re.search(r"https?://|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text
    assert 'name=viewport content="width=device-width' in text
    assert "The cheapest remedy: " in text or "Nothing tried here" in text
    for block in MODEL.blocks:
        assert f'aria-label="{block.name}: weights' in text


def test_a_runs_page_lays_prediction_over_measurement(plan_file: Path, tmp_path: Path) -> None:
    folder = run_folder(plan_file)
    invoke("report", folder, "--out", tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    parsed(text)
    assert "One step, predicted over measured" in text
    for lane in ("compute", "disk read", "disk write", "CPU updates"):
        (part,) = re.findall(rf"<h3>{lane}</h3>(.*?)(?=<h3>|<div class=ticks>)", text, re.DOTALL)
        assert part.index("predicted · ") < part.index("measured, step "), lane
    assert "layers.1.weight: 4 x 5, float32, 80 B" in text
    assert "2.0 GiB</td>" in text  # written by a step
    assert "Disk wear: 2.15 GB written a step, 15.5 TB an hour; vda is rated for 1 PB (sheet): 3 days of training." in text
    assert "500 ms a step" in text


def test_a_trace_alone_shows_what_was_measured(plan_file: Path, tmp_path: Path) -> None:
    trace = run_folder(plan_file) / "trace.json"
    invoke("report", trace, "--out", tmp_path / "alone.html")
    text = (tmp_path / "alone.html").read_text(encoding="utf-8")
    tags = parsed(text)
    assert "when" in tags.ids
    assert not {"where", "memory", "whatif"} & set(tags.ids)
    invoke("report", trace, "--plan", plan_file, "--out", tmp_path / "both.html")
    assert "One step, predicted over measured" in (tmp_path / "both.html").read_text(encoding="utf-8")


def test_a_trace_is_known_by_its_events_wherever_they_are(plan_file: Path, tmp_path: Path) -> None:
    """Programs that cut or join traces write long metadata before the events."""
    trace = json.loads((run_folder(plan_file) / "trace.json").read_text(encoding="utf-8"))
    path = tmp_path / "late.json"
    path.write_text(json.dumps({"otherData": {"comment": "x" * 5000}, **trace}), encoding="utf-8")
    out = tmp_path / "report.html"
    invoke("report", path, "--out", out)
    assert "late: a trace" in out.read_text(encoding="utf-8")


def test_a_run_without_profiles_shows_its_plan_and_its_trace(plan_file: Path, tmp_path: Path) -> None:
    folder = run_folder(plan_file)
    resolved = DISK.resolve([block.name for block in MODEL.blocks])
    (folder / "plan.json").write_text(resolved.to_json(), encoding="utf-8")
    invoke("report", folder, "--out", tmp_path / "r.html")
    tags = parsed((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert {"where", "when", "memory", "bytes"} <= set(tags.ids)
    assert "whatif" not in tags.ids


def test_names_cannot_break_the_page() -> None:
    bad = "</script><b onclick='x()'>&\""
    block = ShownBlock(
        placed=BlockPlan(name=bad),
        tensors=[RecordedTensor(name=bad, block=bad, shape=(), dtype="float32", num_bytes=4, trains=False)],
    )
    text = page(
        PageContent(title=bad, facts={bad: bad}, summary=bad, blocks=[block], wear=bad, remedy=bad, alternatives=[(bad,) * 3])
    )
    parsed(text)
    assert "<b onclick" not in text
    (data,) = re.findall(r'<script id=blocks type="application/json">(.*?)</script>', text)
    assert json.loads(data)[0]["tensors"] == [f"{bad}: a number, float32, 4 B, frozen"]


def test_the_predicted_step_has_the_seconds_and_bytes_of_the_simulation() -> None:
    simulated = simulation(DISK, MODEL, HARDWARE, keep_trace=True)
    strip = predicted(simulated)
    assert strip.seconds == pytest.approx(simulated.prediction.iteration_s)
    busy = {lane.value: sum(1 for _ in row) for lane, row in strip.lanes.items()}
    assert set(busy) == {lane for lane, share in simulated.busy.items() if share}
    rows = {row[0]: row[1] for row in traffic(strip)}
    assert set(rows) == {
        f"{lane}, predicted" for lane in ("disk read", "CPU updates", "disk write", "host → device", "device → host")
    }
    assert strip.sentences
    assert simulated.waits
    assert busy_s(strip.lanes[Lane.COMPUTE]) / strip.seconds == pytest.approx(simulated.busy["compute"]), "waits are no work"


def test_the_usual_step_of_a_trace_is_shown() -> None:
    """The median of the steps behind the first, from one first forward to the next."""

    def compute(step: int, begin: float, end: float) -> list[Span]:
        middle = (begin + end) / 2
        return [
            Span(step=step, name="F a", lane=Lane.COMPUTE.value, start_s=begin, end_s=middle),
            Span(step=step, name="B a", lane=Lane.COMPUTE.value, start_s=middle, end_s=end),
        ]

    spans = [*compute(0, 0, 9), *compute(1, 9, 11), *compute(2, 11, 15), *compute(3, 15, 18)]
    found = measured(Trace(spans=tuple(spans)))
    assert found is not None
    assert (found.title, found.seconds, found.forward_s) == ("measured, step 3", 3, 1.5)
    assert measured(Trace(spans=())) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "none.json", "does not exist"),
        (lambda folder: folder, "has no run.json; expected a folder that the callback TraceOnDemand has written"),
        (lambda folder: written(folder / "x.json", '{"traceEvents": [{"ph": "X", "name": "a"}]}'), "is a trace of another program"),
        (lambda folder: written(folder / "x.json", '{"blocks": []}'), "is not a plan"),
    ],
    ids=["nothing", "an empty folder", "a foreign trace", "no plan"],
)
def test_other_paths_are_refused(make: object, message: str, tmp_path: Path) -> None:
    refused = invoke("report", make(tmp_path), "--out", tmp_path / "r.html", code=2)  # type: ignore[operator]
    assert message in refused.stderr
    assert not (tmp_path / "r.html").exists()


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_run_record_survives_its_file_and_refuses_others(tmp_path: Path) -> None:
    record = RunRecord(model="M", steps=(), tensors=(), tokens=3, drive="d", rated_bytes=2.0, worn_bytes=1.0, rated_by="s")
    assert RunRecord.load(written(tmp_path / "run.json", record.to_json())) == record
    with pytest.raises(ConfigError, match="missing keys \\['steps', 'tensors'\\]"):
        RunRecord.load(written(tmp_path / "run.json", '{"model": "M"}'))
    with pytest.raises(ConfigError, match="are not those of a run"):
        RunRecord.load(written(tmp_path / "run.json", '{"model": "M", "steps": [{"step": 1}], "tensors": []}'))


STEP = {
    "step": 1, "seconds": 1.0, "host_bytes": 1, "device_bytes": 0, "disk_bytes": 0, "read_bytes": 0, "written_bytes": 0,
}  # fmt: skip
TENSOR = {"name": "w", "block": "b", "shape": [2], "dtype": "float32", "num_bytes": 8, "trains": True}


@pytest.mark.parametrize("change", [
    {"seconds": "1"}, {"seconds": float("nan")}, {"host_bytes": -5}, {"written_bytes": None}, {"step": 1.5},
    {"shape": "ab"}, {"shape": 5}, {"num_bytes": "x"}, {"name": 5}, {"block": ["x"]},
], ids=str)  # fmt: skip
def test_a_record_with_a_wrong_value_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    step, tensor = ({**row, **change} if change.keys() <= row.keys() else row for row in (STEP, TENSOR))
    path = written(tmp_path / "run.json", json.dumps({"model": "M", "steps": [step], "tensors": [tensor]}))
    with pytest.raises(ConfigError, match=r"run\.json"):
        RunRecord.load(path)


@pytest.mark.parametrize("change", [
    {"ts": float("nan")}, {"dur": float("inf")}, {"dur": "1"}, {"name": 5}, {"tid": 1}, {"args": {"step": "x", "bytes": 1}},
    {"args": {"step": None, "bytes": 1}}, {"args": {"step": 1, "bytes": "x"}},
    {"args": {"step": 1, "bytes": 1, "waited_for": 5, "waited_us": 1}}, {"args": {"step": 1, "bytes": 1, "waited_us": "1"}},
], ids=str)  # fmt: skip
def test_a_trace_with_a_wrong_value_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    lanes = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": name}}
        for number, name in enumerate(("compute", "GPU 0"))
    ]
    event = {"ph": "X", "name": "B a", "pid": 0, "tid": 0, "ts": 1.0, "dur": 2.0, "args": {"step": 1, "bytes": 5}}
    for found, code in ((event, 0), ({**event, **change}, 2)):
        path = written(tmp_path / "trace.json", json.dumps({"traceEvents": [*lanes, found]}))
        said = invoke("report", path, "--out", tmp_path / "r.html", code=code)
    assert "trace.json is a trace of another program" in said.stderr


def test_a_trace_survives_its_file() -> None:
    simulated = simulation(DISK, MODEL, HARDWARE, keep_trace=True).trace
    found = Trace.from_chrome(simulated.to_chrome())
    assert [(s.step, s.name, s.lane, s.num_bytes, s.waited_for) for s in found.spans] == [
        (s.step, s.name, s.lane, s.num_bytes, s.waited_for) for s in simulated.spans
    ]
    for ours, theirs in zip(found.spans, simulated.spans, strict=True):
        assert (ours.start_s, ours.end_s) == pytest.approx((theirs.start_s, theirs.end_s))
        if theirs.waited_for:
            assert ours.wait_s == pytest.approx(theirs.wait_s)


def test_plan_and_trace_show_themselves_in_notebooks() -> None:
    simulated = simulation(DISK, MODEL, HARDWARE, keep_trace=True)
    plan = replace(DISK.resolve([b.name for b in MODEL.blocks]), predicted=simulated.prediction)
    shown = plan._repr_html_()
    parsed(shown)
    assert "layers.0 … layers.5" in shown
    assert "Predicted: " in shown
    trace = simulated.trace._repr_html_()
    parsed(trace)
    assert "% busy" in trace
    assert "<script" not in shown + trace
    assert "without a whole step" in Trace(spans=())._repr_html_()
