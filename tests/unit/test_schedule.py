from __future__ import annotations

from lightning_hetero.ir.schedule import NO_BLOCK, Anchor, Lane, Op, OpKind, Payload, Phase, Schedule, StepSignature

FETCH = Op(
    id=0,
    kind=OpKind.FETCH,
    block=1,
    lane=Lane.DISK_READ,
    at=0,
    payload=Payload.WEIGHTS,
    num_bytes=64,
    carried=((OpKind.STORE, 1),),
)
UPDATE = Op(id=1, kind=OpKind.UPDATE, block=1, lane=Lane.CPU, at=1, payload=Payload.STATE, num_bytes=128, after=(0,))
COMMIT = Op(id=2, kind=OpKind.COMMIT, block=NO_BLOCK, lane=Lane.DISK_WRITE, at=1, after=(1,))
SCHEDULE = Schedule(
    signature=StepSignature(order=(1,), training=False),
    anchors=(
        Anchor(phase=Phase.FORWARD, block=1, needs=(0,), carried=((OpKind.UPDATE, 1),)),
        Anchor(phase=Phase.VERDICT, block=NO_BLOCK),
    ),
    ops=(FETCH, UPDATE, COMMIT),
    resident_before=frozenset(),
    resident_after=frozenset({1}),
)


def test_text_has_one_line_per_anchor_and_op_in_issue_order() -> None:
    assert SCHEDULE.to_text() == (
        "resident -\n"
        "@0 F:1 needs=0 carried=UPDATE:1\n"
        "    0 FETCH:1 weights disk_read bytes=64 at=0 carried=STORE:1\n"
        "@1 V\n"
        "    1 UPDATE:1 state cpu bytes=128 at=1 after=0\n"
        "    2 COMMIT - disk_write bytes=0 at=1 after=1\n"
        "resident 1\n"
    )


def test_a_lane_keeps_the_order_of_issue() -> None:
    assert list(SCHEDULE.lane(Lane.DISK_READ)) == [FETCH]
    assert list(SCHEDULE.lane(Lane.NET)) == []
