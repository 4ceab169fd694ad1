"""Who is to blame for a wait of compute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_hetero.ir.stalls import Stall, blame, describe, op_of_block, stalls, with_reasons
from lightning_hetero.ir.trace import Span, Trace


def _op(
    name: str, lane: str, start_s: float, end_s: float, *, issued_s: float = 0.0, after: tuple[str, ...] = (), step: int = 0
) -> Span:
    return Span(step=step, name=name, lane=lane, start_s=start_s, end_s=end_s, order=1, issued_s=issued_s, after=after)


def _wait(at: str, start_s: float, end_s: float, *after: str, step: int = 0) -> Span:
    return Span(step=step, name=f"wait {at}", lane="compute", start_s=start_s, end_s=end_s, after=after)


# Compute comes to F b at 4 and goes on at 10: UPLOAD b runs from 8 to 10, after FETCH b, from 3 to
# 8, which had to let FETCH a pass on the disk.
CHAIN = [
    _op("FETCH a", "disk_read", 0, 3),
    _op("FETCH b", "disk_read", 3, 8),
    _op("UPLOAD b", "h2d", 8, 10, issued_s=1, after=("FETCH b",)),
    _op("UPLOAD a", "h2d", 3, 4, after=("FETCH a",)),
    _wait("F b", 4, 10, "UPLOAD a", "UPLOAD b"),
]


def _reasons(*spans: Span) -> dict[str, str]:
    return {s.name: s.waited_for for s in with_reasons(spans)}


def test_the_op_that_ended_last_is_to_blame_and_a_lane_keeps_its_order() -> None:
    assert _reasons(*CHAIN) == {
        "FETCH a": "", "FETCH b": "FETCH a", "UPLOAD b": "FETCH b", "UPLOAD a": "FETCH a", "wait F b": "UPLOAD b",
    }  # fmt: skip


def test_a_wait_is_split_along_the_chain_of_those_to_blame() -> None:
    (stall,) = stalls(Trace(spans=with_reasons(CHAIN)))
    assert stall == Stall(
        step=0, at="F b", start_s=4, seconds=6, waited_for="UPLOAD b", chain=(("UPLOAD b", 2.0), ("FETCH b", 4.0))
    )  # fmt: skip


def test_time_before_the_first_op_is_blamed_on_no_op() -> None:
    spans = with_reasons([_op("FETCH b", "disk_read", 5, 8, issued_s=5), _wait("F b", 4, 8, "FETCH b")])
    (stall,) = stalls(Trace(spans=spans))
    assert stall.chain == (("FETCH b", 3.0), ("", 1.0))


def test_ops_that_ended_before_the_wait_began_are_not_to_blame() -> None:
    assert _reasons(_op("UPLOAD b", "h2d", 0, 4), _wait("F b", 4, 5, "UPLOAD b"))["wait F b"] == ""


def test_an_op_is_found_in_the_step_before_and_the_latest_of_a_name_counts() -> None:
    spans = [
        _op("UPDATE b", "cpu", 0, 1, step=0),
        _op("UPDATE b", "cpu", 5, 9, step=1),
        _wait("F b", 8, 9, "UPDATE b", step=2),
        _op("UPDATE b", "cpu", 9, 12, step=2),
    ]
    (stall,) = stalls(Trace(spans=with_reasons(spans)))
    assert (stall.waited_for, stall.chain) == ("UPDATE b", (("UPDATE b", 1.0),))


def test_an_op_that_another_streams_into_is_to_blame_while_both_run() -> None:
    spans = [_op("FETCH state b", "disk_read", 0, 6), _op("UPDATE b", "cpu", 4, 7, issued_s=1, after=("FETCH state b",))]
    assert _reasons(*spans)["UPDATE b"] == "FETCH state b"


def test_blame_ranks_and_the_sentence_names_the_longest() -> None:
    found = [
        Stall(step=3, at="F b", start_s=1, seconds=0.12, waited_for="UPDATE model.layers.3", chain=()),
        Stall(step=3, at="B b", start_s=2, seconds=0.05, waited_for="FETCH state model.layers.4", chain=()),
        Stall(step=3, at="B a", start_s=3, seconds=0.01, waited_for="", chain=()),
        Stall(step=4, at="B a", start_s=3, seconds=9.0, waited_for="x", chain=()),
    ]
    assert list(blame(found[:3]).items()) == [("UPDATE model.layers.3", 0.12), ("FETCH state model.layers.4", 0.05), ("", 0.01)]
    assert describe(3, found, most=2) == (
        "step 3: compute waited 0.18 s: 0.12 s for UPDATE of model.layers.3, 0.05 s for FETCH state of model.layers.4, "
        "0.01 s for 1 more"
    )
    assert describe(5, found) == "step 5: compute waited for nothing"
    assert [op_of_block(name) for name in ("COMMIT ", "V", "")] == ["COMMIT", "V", "the runtime"]


def test_a_reason_that_is_known_stays() -> None:
    (span,) = with_reasons([replace(_wait("F b", 0, 1), waited_for="STORE a")])
    assert span.waited_for == "STORE a"


@pytest.mark.parametrize("seconds", [1, 0])
def test_a_wait_of_no_time_is_none(seconds: int) -> None:
    assert len(stalls(Trace(spans=(_wait("F b", 1, 1 + seconds),)))) == seconds
