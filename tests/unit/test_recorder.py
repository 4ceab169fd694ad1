"""What the recorder makes of anchors and of ops."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_hetero.ir.schedule import Lane, Op, OpKind, Payload
from lightning_hetero.lanes import EngineLanes
from lightning_hetero.runtime.recorder import Moment, Recorder


class Clock:
    """A stream's clock: a moment is known once the stream has come to it."""

    def __init__(self) -> None:
        self.at = 0.0
        self.passed = 0.0
        self.names: list[str] = []

    def now(self, name: str) -> Moment:
        self.at += 1.0
        at = self.at
        self.names.append(name)
        return lambda: at if at <= self.passed else None


def _recorder() -> tuple[Recorder, Clock]:
    recorder, clock = Recorder(enabled=True), Clock()
    recorder.now = clock.now
    return recorder, clock


def _anchors(recorder: Recorder, *names: str) -> None:
    for name in names:
        with recorder.waiting(name):
            recorder.needs = (f"UPLOAD {name}",)
    recorder.leave()


def test_time_between_two_stops_is_compute_of_the_first_anchor() -> None:
    recorder, clock = _recorder()
    _anchors(recorder, "F a", "F b")
    clock.passed = clock.at
    spans = recorder.trace().spans
    assert [(s.name, s.start_s, s.end_s) for s in spans] == [
        ("wait F a", 1, 2), ("F a", 2, 3), ("wait F b", 3, 4), ("F b", 4, 5)
    ]  # fmt: skip
    assert [s.after for s in spans] == [("UPLOAD F a",), (), ("UPLOAD F b",), ()]
    assert clock.names == ["", "F a", "", "F b", ""]


def test_a_stream_that_has_not_come_that_far_is_asked_again() -> None:
    recorder, clock = _recorder()
    _anchors(recorder, "F a", "F b")
    clock.passed = 3.0
    assert [s.name for s in recorder.trace().spans] == ["wait F a", "F a"]
    clock.passed = 5.0
    assert [s.name for s in recorder.trace().spans] == ["wait F a", "F a", "wait F b", "F b"]


def test_the_compute_of_an_anchor_ends_once() -> None:
    recorder, clock = _recorder()
    _anchors(recorder, "F a")
    recorder.leave()
    with recorder.waiting("F a"):
        pass
    clock.passed = 99.0
    assert [s.name for s in recorder.trace().spans] == ["wait F a", "F a"]


def test_a_recorder_that_is_off_only_counts_the_runtimes_time() -> None:
    recorder = Recorder(enabled=False)
    recorder.now = pytest.fail  # type: ignore[assignment]
    with recorder.waiting("F a"):
        pass
    recorder.leave()
    assert recorder.trace().spans == ()
    assert recorder.waited_s > 0


def test_only_the_latest_steps_are_kept() -> None:
    recorder, clock = _recorder()
    clock.passed = 1e9
    for _ in range(20):
        _anchors(recorder, "F a")
        recorder.end_step()
    steps = {s.step for s in recorder.trace().spans}
    assert steps == set(range(4, 20))


def test_an_op_of_the_engine_has_its_issue_time_and_its_cause_of_waiting() -> None:
    recorder, lanes = Recorder(enabled=True), EngineLanes()
    recorder.observe(lanes, ["a", "b"])
    times: Any = dict.fromkeys(("ready_ns", "bytes_read", "bytes_written"), 0)
    later = 10**18

    def ticket(started_ns: int, done_ns: int) -> Any:
        return SimpleNamespace(
            times=lambda: SimpleNamespace(started_ns=started_ns, done_ns=done_ns, **times), wait=lambda what: None
        )

    def op(kind: OpKind, block: int) -> Op:
        return Op(id=block, kind=kind, block=block, lane=Lane.DISK_READ, at=0, payload=Payload.WEIGHTS)

    first = lanes.submit(op(OpKind.RELEASE, 0), lambda: [ticket(1, later)], [])
    lanes.submit(op(OpKind.FETCH, 1), lambda: [ticket(later, 2 * later)], [first])
    spans = recorder.trace().spans
    assert [(s.name, s.waited_for) for s in spans] == [("RELEASE a", ""), ("FETCH b", "RELEASE a")]
    assert all(a.issued_s <= b.issued_s for a, b in pairwise(spans))  # type: ignore[operator]
