"""The disk, staging, and updates that stream."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.simulations import (
    DISK_PARAMS,
    DISK_STATE,
    DISK_WEIGHTS,
    FAST_CPU,
    GPU,
    MIB,
    ON_DISK,
    UPDATE_0,
    UPDATE_1,
    disk_model,
    disk_step,
    make_op,
    model_of,
    plan_of,
    schedule_of,
    simulated,
    spans_of,
    update_op,
)

from lightning_hetero.ir.plan import Tier
from lightning_hetero.ir.schedule import NO_BLOCK, Lane, Op, OpKind, Payload


def test_reading_updating_and_writing_of_one_block_overlap_piece_by_piece() -> None:
    model, plan = disk_model()
    simulation = simulated(disk_step(open_at=2), plan, model, FAST_CPU, staging=100 * MIB)
    assert spans_of(simulation) == {
        "F l0": (0, 1),
        "B l0": (1, 3),
        "FETCH state l0": (3, 6),
        "UPDATE l0": (4, 7),
        "STORE l0": (5, 8),
        "COMMIT ": (8, 8),
    }
    # The next forward needs the update, not the file: READY comes before DONE.
    assert simulation.prediction.iteration_s == 7


def test_on_a_disk_that_is_not_duplex_reads_and_writes_take_turns() -> None:
    model, plan = disk_model()
    hardware = replace(FAST_CPU, disk_duplex=False)
    simulation = simulated(disk_step(open_at=2), plan, model, hardware, staging=100 * MIB)
    spans = spans_of(simulation)
    # All three reads are with the disk before there is anything to write.
    assert spans["FETCH state l0"] == (3, 6)
    assert spans["UPDATE l0"] == (4, 7)
    assert spans["STORE l0"] == (6, 9)
    assert simulation.prediction.iteration_s == 7
    assert simulation.prediction.bottleneck == {"forward": "compute", "backward": "disk"}


def test_among_transfers_that_wait_for_the_disk_writes_of_a_block_come_before_its_reads() -> None:
    """12 pieces of 2 transfers each, their state and weights: the disk is handed four reads, then
    what is most urgent.
    """
    model = model_of(12 * 2**18)
    ops = [
        make_op(OpKind.RELEASE, 0, Lane.DISK_READ, 2, num_bytes=12 * MIB),
        make_op(OpKind.FETCH, 0, Lane.DISK_READ, 2, Payload.STATE, num_bytes=24 * MIB, after=(0,)),
        update_op(0, 2, after=(1,)),
        make_op(OpKind.STORE, 0, Lane.DISK_WRITE, 2, Payload.STATE, num_bytes=36 * MIB, after=(2,)),
    ]
    hardware = replace(GPU, disk_duplex=False, cpu_update_params_per_s=1e15)  # a second a piece, read or written
    schedule = schedule_of(1, ops, resident=frozenset({0}), waits={"F:0": {"carried": ((OpKind.STORE, 0),)}})
    spans = spans_of(simulated(schedule, plan_of(ON_DISK), model, hardware, staging=100 * MIB))
    # A fifth read takes the place of the first, whose update is over a moment later; its write is
    # the next, behind four.
    assert spans["STORE l0"][0] == 3 + 5
    assert spans["STORE l0"][1] == 3 + 24
    assert 3 + 12 < spans["FETCH state l0"][1] < 3 + 24


def test_an_opened_update_reads_ahead_while_compute_runs() -> None:
    model, plan = disk_model()
    simulation = simulated(disk_step(open_at=1), plan, model, FAST_CPU, staging=100 * MIB)
    assert spans_of(simulation)["FETCH state l0"] == (1, 4)
    assert spans_of(simulation)["UPDATE l0"] == (3, 6)
    assert simulation.prediction.iteration_s == 6


@pytest.mark.parametrize(("staging_mib", "pieces_ahead"), [(18, 3), (17, 2), (14, 2), (13, 1), (11, 1), (10, 0)])
def test_reading_ahead_stops_where_staging_ends_but_for_two_buffers(staging_mib: int, pieces_ahead: int) -> None:
    """A buffer has room for the weights too: 3.5 MiB."""
    model, plan = disk_model()
    hardware = replace(FAST_CPU, disk_read_bytes_per_s=6 * MIB)  # half a second a piece: all three would be there as B ends
    simulation = simulated(disk_step(open_at=1), plan, model, hardware, staging=staging_mib * MIB)
    begin, end = spans_of(simulation)["FETCH state l0"]
    assert begin == (1 if pieces_ahead else 3)
    assert end == (2.5 if pieces_ahead == 3 else 3 + (3 - pieces_ahead) / 2)


def test_an_update_with_gradients_works_with_three_buffers_however_small_staging_is() -> None:
    model, plan = disk_model()
    simulation = simulated(disk_step(open_at=2), plan, model, FAST_CPU, staging=1)
    assert spans_of(simulation)["STORE l0"] == (5, 8)


def test_nothing_is_computed_that_may_not_be_written_yet() -> None:
    """Another block's write outlasts the next step's backward; this one's update waits for the
    commit behind both.
    """
    model, plan = model_of(DISK_PARAMS, DISK_PARAMS, itemsize=2), plan_of(*[replace(ON_DISK, weights=Tier.HOST)] * 2)
    first = disk_step(open_at=2).ops[:3]
    second = [replace(o, block=1, id=o.id + 3, after=tuple(i + 3 for i in o.after)) for o in first]
    # Only block 0 waits for its own file, and nobody for block 1's.
    ops = [*first, *(replace(o, carried=tuple(c for c in o.carried if c[0] is OpKind.COMMIT)) for o in second)]
    ops = [replace(o, at=4) for o in ops] + [make_op(OpKind.COMMIT, NO_BLOCK, Lane.DISK_WRITE, 4, Payload.NONE, after=(2, 5))]
    hardware = replace(FAST_CPU, disk_write_bytes_per_s=0.5 * MIB)  # 6 s a piece, block 0 first
    schedule = schedule_of(2, ops, waits={"F:0": {"carried": UPDATE_0}})
    simulation = simulated(schedule, plan, model, hardware, staging=100 * MIB)
    commits = [s.end_s for s in simulation.trace.spans if s.name == "COMMIT "]
    reads = [s.start_s for s in simulation.trace.spans if s.name == "FETCH state l0"]
    updates = [s.start_s for s in simulation.trace.spans if s.name == "UPDATE l0"]
    assert len(updates) > 2
    assert reads[1] < commits[0] - 9  # nothing keeps it from being read
    assert updates[1] == commits[0]


def test_weights_that_compute_waits_for_overtake_queued_transfers() -> None:
    """Block 1 has 12 chunks of state to read, a second each; of the 8 that are with the disk 2 are
    done as block 0 is fetched.
    """
    model = model_of(DISK_PARAMS, 12 * 2**18, itemsize=2)
    plan = plan_of(ON_DISK, replace(ON_DISK, weights=Tier.HOST))
    weights = 2 * DISK_PARAMS  # half a second
    ops = [
        make_op(OpKind.RELEASE, 0, Lane.DISK_READ, 1, num_bytes=weights),
        make_op(OpKind.FETCH, 1, Lane.DISK_READ, 2, Payload.STATE, num_bytes=12 * 12 * 2**18),
        make_op(OpKind.FETCH, 0, Lane.DISK_READ, 3, num_bytes=weights, after=(0,)),
    ]
    schedule = schedule_of(2, ops, waits={"B:0": {"needs": (2,)}}, resident=frozenset({0}))
    spans = spans_of(simulated(schedule, plan, model, staging=100 * MIB))
    # At 3 it is handed a ninth, at 4 the weights: 7 are before them.
    assert spans["FETCH l0"] == (11, 11.5)
    assert spans["B l0"] == (11.5, 13.5)
    assert spans["FETCH state l1"] == (2, 14.5)


def test_large_reads_are_never_with_the_disk_as_a_whole() -> None:
    """The same with a block of 480 chunks, 40 s a piece: its weights are there at once."""
    model = model_of(DISK_PARAMS, 480 * 2**18, itemsize=2)
    plan = plan_of(ON_DISK, replace(ON_DISK, weights=Tier.HOST))
    ops = [
        make_op(OpKind.RELEASE, 0, Lane.DISK_READ, 1, num_bytes=2 * DISK_PARAMS),
        make_op(OpKind.FETCH, 1, Lane.DISK_READ, 2, Payload.STATE, num_bytes=480 * 12 * 2**18),
        make_op(OpKind.FETCH, 0, Lane.DISK_READ, 3, num_bytes=2 * DISK_PARAMS, after=(0,)),
    ]
    schedule = schedule_of(2, ops, waits={"B:0": {"needs": (2,)}}, resident=frozenset({0}))
    spans = spans_of(simulated(schedule, plan, model, staging=10_000 * MIB))
    assert spans["FETCH l0"] == (4, 4.5)


def test_an_update_with_gradients_takes_staging_back_from_those_without() -> None:
    """Five buffers: block 0 has read ahead into three, block 1 then needs three, so one of block
    0's is read again.
    """
    model, plan = model_of(DISK_PARAMS, DISK_PARAMS, itemsize=2), plan_of(*[replace(ON_DISK, weights=Tier.HOST)] * 2)
    ops = [
        make_op(OpKind.FETCH, 0, Lane.DISK_READ, 1, Payload.STATE, num_bytes=9 * MIB),
        make_op(OpKind.FETCH, 1, Lane.DISK_READ, 3, Payload.STATE, num_bytes=9 * MIB),
        update_op(1, 3, after=(1,)),
        make_op(OpKind.STORE, 1, Lane.DISK_WRITE, 3, Payload.STATE, num_bytes=9 * MIB, after=(2,)),
        update_op(0, 4, after=(0,)),
        make_op(OpKind.STORE, 0, Lane.DISK_WRITE, 4, Payload.STATE, num_bytes=9 * MIB, after=(4,)),
    ]
    # Writes last, so that no buffer comes back before both are updated.
    hardware = replace(FAST_CPU, disk_read_bytes_per_s=6 * MIB, disk_write_bytes_per_s=0.125 * MIB)
    schedule = schedule_of(2, ops, waits={"F:0": {"carried": UPDATE_0}, "F:1": {"carried": UPDATE_1}})
    spans = spans_of(simulated(schedule, plan, model, hardware, staging=5 * 7 * MIB // 2))
    assert spans["FETCH state l1"] == (4, 5.5)
    # Block 0 has all by 2.5; its third piece comes again once block 1 has written its first, 24 s
    # after that is updated at 5.5.
    assert spans["FETCH state l0"] == (1, 30)
    roomy = spans_of(simulated(schedule, plan, model, hardware, staging=100 * MIB))
    assert roomy["FETCH state l0"] == (1, 2.5)


def test_an_update_of_weights_that_are_not_in_memory_reads_them_too() -> None:
    model, plan = model_of(DISK_PARAMS), plan_of(ON_DISK)  # fp32: 8 bytes of state and 4 of weights
    ops = [
        make_op(OpKind.RELEASE, 0, Lane.DISK_READ, 2, num_bytes=DISK_WEIGHTS),
        make_op(OpKind.FETCH, 0, Lane.DISK_READ, 2, Payload.STATE, num_bytes=DISK_STATE, after=(0,)),
        update_op(0, 2, after=(1,)),
        make_op(OpKind.STORE, 0, Lane.DISK_WRITE, 2, Payload.STATE, num_bytes=DISK_STATE, after=(2,)),
    ]
    in_memory = [replace(op, after=tuple(i - 1 for i in op.after if i)) for op in ops[1:]]

    def spans(ops: list[Op]) -> dict[str, tuple[float, float]]:
        schedule = schedule_of(1, ops, resident=frozenset({0}))
        return spans_of(simulated(schedule, plan, model, FAST_CPU, staging=100 * MIB))

    # Three pieces of 3 MiB to read instead of 2; what is written is the same.
    assert spans(ops)["FETCH state l0"] == (3, 6)
    assert spans(ops)["STORE l0"] == (5, 8)
    assert spans(in_memory)["FETCH state l0"] == pytest.approx((3, 5))
