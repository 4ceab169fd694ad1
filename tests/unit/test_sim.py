"""Tiny steps whose times and bytes are worked out by hand: blocks with a forward of 1 s, a backward of 2 s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from support.effort import python_calls

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane
from lightning_hetero.ir.schedule import NO_BLOCK, Anchor, Lane, Op, OpKind, Payload, Phase, Schedule, StepSignature, Updates
from lightning_hetero.lowering import lower, rooms, steady
from lightning_hetero.planners.protrain.formulas import ChunkTimes, backward_s
from lightning_hetero.sim import Simulation, simulate

MIB = 2**20
UPDATE_0, UPDATE_1 = ((OpKind.UPDATE, 0),), ((OpKind.UPDATE, 1),)

# Updates: 10 parameters a second on the CPU, 20 on the device. Links: 10 bytes a second each way. Memory never binds.
GPU = HardwareProfile(
    name="gpu", device_memory_bytes=1000, host_memory_bytes=1000, disk_capacity_bytes=1000, device_flop_per_s=1.0,
    link_h2d_bytes_per_s=10.0, link_d2h_bytes_per_s=10.0, disk_read_bytes_per_s=3.0 * MIB, disk_write_bytes_per_s=3.0 * MIB,
    disk_duplex=True, host_dram_bytes_per_s=1e15, cpu_update_params_per_s=10.0, device_update_params_per_s=20.0,
    cpu_downcast_params_per_s=0.0,
)  # fmt: skip
CPU = replace(GPU, name="cpu", shared_memory=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    staging_bytes: int = 0


def _model(*params: int, itemsize: int = 4, **block: int) -> ModelProfile:
    sizes = {"activation_bytes": 0, "boundary_bytes": 0, "transient_bytes": 0} | block
    blocks = [
        BlockProfile(name=f"l{i}", num_params=n, num_trainable_params=n, forward_s=1.0, backward_s=2.0, forward_flop=1.0, **sizes)
        for i, n in enumerate(params)
    ]
    return ModelProfile(
        name="m", tokens=1, compute_itemsize=itemsize, constant_device_bytes=0, constant_host_bytes=0, blocks=tuple(blocks)
    )


def _plan(*blocks: BlockPlan, priority: bool = True) -> Plan:
    return Plan(name="p", blocks=tuple(replace(b, name=f"l{i}") for i, b in enumerate(blocks)), priority=priority)


ON_HOST = BlockPlan(name="")
RESIDENT = BlockPlan(name="", weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE)
ON_DISK = BlockPlan(name="", weights=Tier.DISK, state=Tier.DISK)


def _op(kind: OpKind, block: int, lane: Lane, at: int, payload: Payload = Payload.WEIGHTS, **rest: object) -> Op:
    return Op(id=0, kind=kind, block=block, lane=lane, at=at, payload=payload, **rest)  # type: ignore[arg-type]


def _update(block: int, at: int, lane: Lane = Lane.CPU, **rest: object) -> Op:
    return _op(OpKind.UPDATE, block, lane, at, Payload.STATE, **rest)


def _schedule(
    num_blocks: int,
    ops: Sequence[Op] = (),
    *,
    waits: dict[str, dict[str, object]] | None = None,
    resident: frozenset[int] = frozenset(),
) -> Schedule:
    """A step over ``num_blocks`` blocks; ``waits`` gives anchors, by their text, their ``needs`` and ``carried``."""
    order = range(num_blocks)
    rows = [(Phase.FORWARD, b) for b in order] + [(Phase.BACKWARD, b) for b in reversed(order)] + [(Phase.VERDICT, NO_BLOCK)]
    anchors = [Anchor(phase=phase, block=block) for phase, block in rows]
    return Schedule(
        signature=StepSignature(order=tuple(order), training=True, updates=Updates.IN_BACKWARD),
        anchors=tuple(replace(a, **(waits or {}).get(str(a), {})) for a in anchors),  # type: ignore[arg-type]
        ops=tuple(replace(op, id=i) for i, op in enumerate(ops)),
        resident_before=resident,
        resident_after=resident,
    )


def _simulate(
    schedule: Schedule | Sequence[Schedule], plan: Plan, model: ModelProfile, hardware: HardwareProfile = GPU, *, staging: int = 0,
    **options: object,
) -> Simulation:  # fmt: skip
    schedules = [schedule] if isinstance(schedule, Schedule) else schedule
    return simulate(schedules, plan, model, hardware, rooms=Staging(staging_bytes=staging), keep_trace=True, **options)  # type: ignore[arg-type]


def _spans(simulation: Simulation, step: int = 0) -> dict[str, tuple[float, float]]:
    """Spans of one step, by name, since the step began."""
    spans = [s for s in simulation.trace.spans if s.step == step]
    begin = min(s.start_s for s in spans if s.name.startswith("F "))
    return {s.name: (s.start_s - begin, s.end_s - begin) for s in spans}


# ---- time -----------------------------------------------------------------------------------------------------------------


def test_updates_on_the_device_follow_backward_on_the_compute_lane() -> None:
    schedule = _schedule(2, [_update(0, 4, Lane.COMPUTE), _update(1, 4, Lane.COMPUTE)])
    simulation = _simulate(schedule, _plan(RESIDENT, RESIDENT), _model(20, 40))
    assert _spans(simulation) == {
        "F l0": (0, 1),
        "F l1": (1, 2),
        "B l1": (2, 4),
        "B l0": (4, 6),
        "UPDATE l0": (6, 7),
        "UPDATE l1": (7, 9),
    }
    prediction = simulation.prediction
    assert (prediction.iteration_s, prediction.forward_s, prediction.backward_s) == (9, 2, 7)
    assert simulation.busy == {"compute": 1.0}
    assert simulation.waits == {}


HOST_STEP = _schedule(
    2, [_update(1, 3), _update(0, 4)], waits={"F:0": {"carried": UPDATE_0}, "F:1": {"carried": UPDATE_1}}
)  # block 1's gradients are complete as B:0 begins, block 0's after it


def test_an_update_on_the_cpu_overlaps_with_backward_and_the_next_forward_waits_for_the_rest() -> None:
    simulation = _simulate(HOST_STEP, _plan(ON_HOST, ON_HOST), _model(10, 20))
    assert _spans(simulation)["UPDATE l1"] == (4, 6)
    assert _spans(simulation)["UPDATE l0"] == (6, 7)
    assert simulation.prediction.iteration_s == 7
    assert (simulation.prediction.forward_s, simulation.prediction.backward_s) == (2, 5)
    assert simulation.waits == {"UPDATE": 1}
    assert simulation.busy == pytest.approx({"compute": 6 / 7, "cpu": 3 / 7})


@pytest.mark.parametrize(("pinned", "begin_s"), [(False, 4), (True, 6)])
def test_the_backward_of_a_pinned_block_issues_nothing(pinned: bool, begin_s: float) -> None:
    """The runtime has no anchor there: what the schedule issues at it comes with the verdict, after the block's backward."""
    model = _model(10, 10)
    model = replace(model, blocks=(replace(model.blocks[0], pinned=pinned), model.blocks[1]))
    simulation = _simulate(_schedule(2, [_update(1, 3)]), _plan(ON_HOST, ON_HOST), model, CPU)
    assert _spans(simulation)["UPDATE l1"] == (begin_s, begin_s + 1)


def test_the_update_of_a_lower_block_overtakes_so_that_the_next_forward_begins_early() -> None:
    simulation = _simulate(HOST_STEP, _plan(ON_HOST, ON_HOST), _model(30, 30))
    assert _spans(simulation)["UPDATE l1"] == (4, 10)  # 2 s of it before it is overtaken
    assert _spans(simulation)["UPDATE l0"] == (6, 9)
    assert simulation.prediction.iteration_s == 9
    assert simulation.waits == {"UPDATE": 3}


def test_without_priority_updates_run_as_they_were_issued() -> None:
    simulation = _simulate(HOST_STEP, _plan(ON_HOST, ON_HOST, priority=False), _model(30, 30))
    assert _spans(simulation)["UPDATE l1"] == (4, 7)
    assert _spans(simulation)["UPDATE l0"] == (7, 10)
    assert simulation.prediction.iteration_s == 10


def test_a_forward_waits_for_its_own_update_only() -> None:
    """Block 1's update lasts until after block 0's next forward; compute waits for it there."""
    simulation = _simulate(HOST_STEP, _plan(ON_HOST, ON_HOST), _model(10, 60))
    spans = _spans(simulation, 1)
    assert spans["wait F l1"] == (1, 4)
    assert spans["F l1"] == (4, 5)
    # The step: 4 + 2 forward and waiting, 4 backward (its update of block 1 has run 2 of its 6 s), 1 update of block 0.
    assert simulation.prediction.iteration_s == 5 + 4 + 1
    assert simulation.waits == {"UPDATE": 1 + 3}
    waited = [s.waited_for for s in simulation.trace.spans if s.name == "wait F l1"]
    assert set(waited) == {"UPDATE l1"}


def _uploads() -> Schedule:
    ops = [
        _op(OpKind.UPLOAD, 0, Lane.H2D, 0, num_bytes=10),
        _op(OpKind.UPLOAD, 1, Lane.H2D, 0, num_bytes=30),
        _op(OpKind.RELEASE, 0, Lane.H2D, 1, num_bytes=10, after=(0,)),
        _op(OpKind.RELEASE, 1, Lane.H2D, 2, num_bytes=30, after=(1, 2)),
    ]
    return _schedule(2, ops, waits={"F:0": {"needs": (0,)}, "F:1": {"needs": (1,)}})


def test_copies_of_one_direction_run_in_the_order_of_the_schedule() -> None:
    simulation = _simulate(_uploads(), _plan(ON_HOST, ON_HOST), _model(1, 1))
    spans = _spans(simulation)  # the clock of a step begins with its first forward
    assert (spans["UPLOAD l0"], spans["UPLOAD l1"]) == ((-1, 0), (0, 3))
    assert spans["F l1"] == (3, 4)
    # 1 + wait 2 + 1 forward, 4 backward, and the next step's first upload.
    assert simulation.prediction.iteration_s == 9
    assert simulation.waits == {"UPLOAD": 3}


def test_copies_and_updates_share_host_memory() -> None:
    """An update that takes 28 bytes a parameter of memory of 290 bytes a second: 280 alone, 280 beside a copy of 10 as well."""
    ops = [
        _op(OpKind.GRAD, 1, Lane.D2H, 3, Payload.GRADIENTS, num_bytes=10),
        _update(1, 3),
        _update(0, 4),
    ]
    schedule = _schedule(2, ops, waits={"F:0": {"carried": UPDATE_0}})
    plan, model = _plan(ON_HOST, ON_HOST), _model(10, 10)
    assert _spans(_simulate(schedule, plan, model, replace(GPU, host_dram_bytes_per_s=290.0)))["UPDATE l1"] == (4, 5)
    # 285: the update gets 275 for the second of the copy and does the last 5 alone, at 280.
    spans = _spans(_simulate(schedule, plan, model, replace(GPU, host_dram_bytes_per_s=285.0)))
    assert spans["UPDATE l1"] == pytest.approx((4, 5 + 5 / 280))
    assert spans["GRAD l1"] == (4, 5)


def test_work_slows_down_only_while_the_other_kind_runs() -> None:
    hardware = replace(GPU, contention={"compute|update": 2.0, "update|compute": 4.0})
    simulation = _simulate(HOST_STEP, _plan(ON_HOST, ON_HOST), _model(10, 3), hardware)
    # Update 1 (0.3 s alone) takes 1.2 s, in which B:0 does 0.6 of its 2 s; update 0 then runs alone.
    assert _spans(simulation)["UPDATE l1"] == pytest.approx((4, 5.2))
    assert _spans(simulation)["B l0"] == pytest.approx((4, 6.6))
    assert simulation.prediction.iteration_s == pytest.approx(7.6)


def test_gradients_are_copied_lowest_block_first_where_the_plan_says_so() -> None:
    ops = [
        _op(OpKind.GRAD, 2, Lane.D2H, 4, Payload.GRADIENTS, num_bytes=50),
        _op(OpKind.GRAD, 1, Lane.D2H, 5, Payload.GRADIENTS, num_bytes=10),
        _op(OpKind.GRAD, 0, Lane.D2H, 6, Payload.GRADIENTS, num_bytes=10),
    ]
    schedule, model = _schedule(3, ops), _model(1, 1, 1)

    def order(*, priority: bool) -> list[str]:
        spans = _spans(_simulate(schedule, _plan(ON_HOST, ON_HOST, ON_HOST, priority=priority), model))
        assert spans["GRAD l2"] == (5, 10)  # a copy under way is not taken back
        return sorted((s for s in spans if s.startswith("GRAD")), key=lambda s: spans[s])

    assert order(priority=True) == ["GRAD l2", "GRAD l0", "GRAD l1"]
    assert order(priority=False) == ["GRAD l2", "GRAD l1", "GRAD l0"]


def test_micro_batches_follow_each_other_and_only_the_last_one_updates() -> None:
    accumulate = _schedule(2, waits={"F:0": {"carried": UPDATE_0}, "F:1": {"carried": UPDATE_1}})
    simulation = _simulate([accumulate, accumulate, HOST_STEP], _plan(ON_HOST, ON_HOST), _model(10, 20))
    assert simulation.prediction.iteration_s == 3 * 6 + 1
    assert (simulation.prediction.forward_s, simulation.prediction.backward_s) == (6, 13)
    assert sum(s.name == "F l0" and s.step == 0 for s in simulation.trace.spans) == 3


def _reduced(*sizes: int) -> Schedule:
    """Gradients are summed over devices before each block's update on the device; collectives take their turns."""
    anchors = range(len(sizes) + 1, 2 * len(sizes) + 1)  # the begins that end the backwards of the last, ..., the first block
    ops: list[Op] = []
    for at, block in zip(anchors, reversed(range(len(sizes))), strict=True):
        ops.append(_op(OpKind.REDUCE, block, Lane.NET, at, Payload.GRADIENTS, num_bytes=sizes[block]))
    reduces = {op.block: i for i, op in enumerate(ops)}
    ops += [_update(b, anchors[-1], Lane.COMPUTE, after=(reduces[b],)) for b in reversed(range(len(sizes)))]
    return _schedule(len(sizes), ops)


def test_collectives_run_one_after_the_other_beside_compute() -> None:
    """Of two devices each sends half: 80 bytes take 4 s at 10 bytes a second. The first one hides in part behind backward."""
    machine = replace(GPU, world_size=2, collective_bytes_per_s=10.0)
    simulation = _simulate(_reduced(60, 80), _plan(RESIDENT, RESIDENT), _model(20, 20), machine)
    spans = _spans(simulation)
    assert spans["REDUCE gradients l1"] == (4, 8)
    assert spans["REDUCE gradients l0"] == (8, 11)
    assert (spans["UPDATE l1"], spans["UPDATE l0"]) == ((8, 9), (11, 12))
    assert simulation.prediction.iteration_s == 12
    assert simulation.waits == {"REDUCE gradients": 4}
    assert simulation.busy == pytest.approx({"compute": 8 / 12, "net": 7 / 12})


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("rate", [4.0, 20.0, 1000.0])
def test_the_slower_of_backward_and_collectives_binds(world_size: int, rate: float) -> None:
    """As in ProTrain's equations 5 and 6, for chunks of one block each that stay on the device."""
    model, size, none = _model(20, 20, 20, 20), 80, (0.0,) * 4
    machine = replace(GPU, world_size=world_size, collective_bytes_per_s=rate, device_update_params_per_s=1e9)
    reduce = (size * (world_size - 1) / world_size / rate,) * 4
    chunks = ChunkTimes(
        forward=(1.0,) * 4, backward=(2.0,) * 4, gather=none, reduce=reduce, upload=none, upload_again=none, offload=none,
        gpu_update=none, cpu_update=none,
    )  # fmt: skip
    expected = 4 * 1.0 + backward_s(chunks, none, persistent=4, buffers=0)
    simulation = _simulate(_reduced(*[size] * 4), _plan(*[RESIDENT] * 4), model, machine)
    assert simulation.prediction.iteration_s == pytest.approx(expected, rel=1e-6)


def test_one_device_alone_reduces_nothing() -> None:
    simulation = _simulate(_reduced(60, 80), _plan(RESIDENT, RESIDENT), _model(20, 20))
    assert simulation.prediction.iteration_s == 8
    assert "net" not in simulation.busy


def test_backward_takes_longer_by_what_it_recomputes() -> None:
    plan = _plan(replace(RESIDENT, saved=Saved.RECOMPUTE), RESIDENT)
    assert _simulate(_schedule(2), plan, _model(1, 1)).prediction.iteration_s == 2 + 2 + 3


def test_a_host_that_is_the_device_waits_for_all_updates_once_it_runs_some_itself() -> None:
    schedule = _schedule(2, [_update(1, 3), _update(0, 4, Lane.COMPUTE)])
    plan, model = _plan(RESIDENT, ON_HOST), _model(10, 50)
    assert _simulate(schedule, plan, model).prediction.iteration_s == 6.5
    # The two share the update threads: block 1 has run 2 s of 5 as they meet; 1 s at half speed for 0.5 s each, and the rest.
    simulation = _simulate(schedule, plan, model, CPU)
    assert simulation.prediction.iteration_s == pytest.approx(6 + 2 + 2)
    assert simulation.waits == {"UPDATE": pytest.approx(2)}


# ---- the disk -------------------------------------------------------------------------------------------------------------

# fp32: 9 MiB in state and weights of 0.75 Mi parameters; 3 pieces of 3 MiB, a second each. Their update is 1 s a piece.
_PARAMS = 3 * MIB // 4
_STATE, _WEIGHTS = 8 * _PARAMS, 4 * _PARAMS


def _disk_step(*, open_at: int) -> Schedule:
    ops = [
        _op(OpKind.FETCH, 0, Lane.DISK_READ, open_at, Payload.STATE, num_bytes=_STATE, carried=((OpKind.STORE, 0),)),
        _update(0, 2, after=(0,)),
        _op(OpKind.STORE, 0, Lane.DISK_WRITE, 2, Payload.STATE, num_bytes=_STATE, after=(1,), carried=((OpKind.COMMIT, NO_BLOCK),)),
        _op(OpKind.COMMIT, NO_BLOCK, Lane.DISK_WRITE, 2, Payload.NONE, after=(2,)),
    ]
    return _schedule(1, ops, waits={"F:0": {"carried": UPDATE_0}})


def _disk_model() -> tuple[ModelProfile, Plan]:
    # 16 bit: 12 bytes of state, 9 MiB.
    model = _model(_PARAMS, itemsize=2)
    return model, _plan(replace(ON_DISK, weights=Tier.HOST))


FAST_CPU = replace(GPU, cpu_update_params_per_s=_PARAMS / 3)


def test_reading_updating_and_writing_of_one_block_overlap_piece_by_piece() -> None:
    model, plan = _disk_model()
    simulation = _simulate(_disk_step(open_at=2), plan, model, FAST_CPU, staging=100 * MIB)
    assert _spans(simulation) == {
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
    model, plan = _disk_model()
    hardware = replace(FAST_CPU, disk_duplex=False)
    simulation = _simulate(_disk_step(open_at=2), plan, model, hardware, staging=100 * MIB)
    spans = _spans(simulation)
    # All three reads are with the disk before there is anything to write.
    assert spans["FETCH state l0"] == (3, 6)
    assert spans["UPDATE l0"] == (4, 7)
    assert spans["STORE l0"] == (6, 9)
    assert simulation.prediction.iteration_s == 7
    assert simulation.prediction.bottleneck == {"forward": "compute", "backward": "disk"}


def test_among_transfers_that_wait_for_the_disk_writes_of_a_block_come_before_its_reads() -> None:
    """12 pieces of 2 transfers each, their state and weights: the disk is handed four reads, then what is most urgent."""
    model = _model(12 * 2**18)
    ops = [
        _op(OpKind.RELEASE, 0, Lane.DISK_READ, 2, num_bytes=12 * MIB),
        _op(OpKind.FETCH, 0, Lane.DISK_READ, 2, Payload.STATE, num_bytes=24 * MIB, after=(0,)),
        _update(0, 2, after=(1,)),
        _op(OpKind.STORE, 0, Lane.DISK_WRITE, 2, Payload.STATE, num_bytes=36 * MIB, after=(2,)),
    ]
    hardware = replace(GPU, disk_duplex=False, cpu_update_params_per_s=1e15)  # a second a piece, read or written
    schedule = _schedule(1, ops, resident=frozenset({0}), waits={"F:0": {"carried": ((OpKind.STORE, 0),)}})
    spans = _spans(_simulate(schedule, _plan(ON_DISK), model, hardware, staging=100 * MIB))
    # A fifth read takes the place of the first, whose update is over a moment later; its write is the next, behind four.
    assert spans["STORE l0"][0] == 3 + 5
    assert spans["STORE l0"][1] == 3 + 24
    assert 3 + 12 < spans["FETCH state l0"][1] < 3 + 24


def test_an_opened_update_reads_ahead_while_compute_runs() -> None:
    model, plan = _disk_model()
    simulation = _simulate(_disk_step(open_at=1), plan, model, FAST_CPU, staging=100 * MIB)
    assert _spans(simulation)["FETCH state l0"] == (1, 4)
    assert _spans(simulation)["UPDATE l0"] == (3, 6)
    assert simulation.prediction.iteration_s == 6


@pytest.mark.parametrize(("staging_mib", "pieces_ahead"), [(18, 3), (17, 2), (14, 2), (13, 1), (11, 1), (10, 0)])
def test_reading_ahead_stops_where_staging_ends_but_for_two_buffers(staging_mib: int, pieces_ahead: int) -> None:
    """A buffer has room for the weights too: 3.5 MiB."""
    model, plan = _disk_model()
    hardware = replace(FAST_CPU, disk_read_bytes_per_s=6 * MIB)  # half a second a piece: all three would be there as B ends
    simulation = _simulate(_disk_step(open_at=1), plan, model, hardware, staging=staging_mib * MIB)
    begin, end = _spans(simulation)["FETCH state l0"]
    assert begin == (1 if pieces_ahead else 3)
    assert end == (2.5 if pieces_ahead == 3 else 3 + (3 - pieces_ahead) / 2)


def test_an_update_with_gradients_works_with_three_buffers_however_small_staging_is() -> None:
    model, plan = _disk_model()
    simulation = _simulate(_disk_step(open_at=2), plan, model, FAST_CPU, staging=1)
    assert _spans(simulation)["STORE l0"] == (5, 8)


def test_nothing_is_computed_that_may_not_be_written_yet() -> None:
    """Another block's write outlasts the next step's backward; this one's update waits for the commit behind both."""
    model, plan = _model(_PARAMS, _PARAMS, itemsize=2), _plan(*[replace(ON_DISK, weights=Tier.HOST)] * 2)
    first = _disk_step(open_at=2).ops[:3]
    second = [replace(o, block=1, id=o.id + 3, after=tuple(i + 3 for i in o.after)) for o in first]
    # Only block 0 waits for its own file, and nobody for block 1's.
    ops = [*first, *(replace(o, carried=tuple(c for c in o.carried if c[0] is OpKind.COMMIT)) for o in second)]
    ops = [replace(o, at=4) for o in ops] + [_op(OpKind.COMMIT, NO_BLOCK, Lane.DISK_WRITE, 4, Payload.NONE, after=(2, 5))]
    hardware = replace(FAST_CPU, disk_write_bytes_per_s=0.5 * MIB)  # 6 s a piece, block 0 first
    schedule = _schedule(2, ops, waits={"F:0": {"carried": UPDATE_0}})
    simulation = _simulate(schedule, plan, model, hardware, staging=100 * MIB)
    commits = [s.end_s for s in simulation.trace.spans if s.name == "COMMIT "]
    reads = [s.start_s for s in simulation.trace.spans if s.name == "FETCH state l0"]
    updates = [s.start_s for s in simulation.trace.spans if s.name == "UPDATE l0"]
    assert len(updates) > 2
    assert reads[1] < commits[0] - 9  # nothing keeps it from being read
    assert updates[1] == commits[0]


def test_weights_that_compute_waits_for_overtake_what_the_disk_has_not_been_handed() -> None:
    """Block 1 has 12 chunks of state to read, a second each; of the 8 that are with the disk 2 are done as block 0 is fetched."""
    model = _model(_PARAMS, 12 * 2**18, itemsize=2)
    plan = _plan(ON_DISK, replace(ON_DISK, weights=Tier.HOST))
    weights = 2 * _PARAMS  # half a second
    ops = [
        _op(OpKind.RELEASE, 0, Lane.DISK_READ, 1, num_bytes=weights),
        _op(OpKind.FETCH, 1, Lane.DISK_READ, 2, Payload.STATE, num_bytes=12 * 12 * 2**18),
        _op(OpKind.FETCH, 0, Lane.DISK_READ, 3, num_bytes=weights, after=(0,)),
    ]
    schedule = _schedule(2, ops, waits={"B:0": {"needs": (2,)}}, resident=frozenset({0}))
    spans = _spans(_simulate(schedule, plan, model, staging=100 * MIB))
    # At 3 it is handed a ninth, at 4 the weights: 7 are before them.
    assert spans["FETCH l0"] == (11, 11.5)
    assert spans["B l0"] == (11.5, 13.5)
    assert spans["FETCH state l1"] == (2, 14.5)


def test_large_reads_are_never_with_the_disk_as_a_whole() -> None:
    """The same with a block of 480 chunks, 40 s a piece: its weights are there at once."""
    model = _model(_PARAMS, 480 * 2**18, itemsize=2)
    plan = _plan(ON_DISK, replace(ON_DISK, weights=Tier.HOST))
    ops = [
        _op(OpKind.RELEASE, 0, Lane.DISK_READ, 1, num_bytes=2 * _PARAMS),
        _op(OpKind.FETCH, 1, Lane.DISK_READ, 2, Payload.STATE, num_bytes=480 * 12 * 2**18),
        _op(OpKind.FETCH, 0, Lane.DISK_READ, 3, num_bytes=2 * _PARAMS, after=(0,)),
    ]
    schedule = _schedule(2, ops, waits={"B:0": {"needs": (2,)}}, resident=frozenset({0}))
    spans = _spans(_simulate(schedule, plan, model, staging=10_000 * MIB))
    assert spans["FETCH l0"] == (4, 4.5)


def test_an_update_with_gradients_takes_staging_back_from_those_without() -> None:
    """Five buffers: block 0 has read ahead into three, block 1 then needs three, so one of block 0's is read again."""
    model, plan = _model(_PARAMS, _PARAMS, itemsize=2), _plan(*[replace(ON_DISK, weights=Tier.HOST)] * 2)
    ops = [
        _op(OpKind.FETCH, 0, Lane.DISK_READ, 1, Payload.STATE, num_bytes=9 * MIB),
        _op(OpKind.FETCH, 1, Lane.DISK_READ, 3, Payload.STATE, num_bytes=9 * MIB),
        _update(1, 3, after=(1,)),
        _op(OpKind.STORE, 1, Lane.DISK_WRITE, 3, Payload.STATE, num_bytes=9 * MIB, after=(2,)),
        _update(0, 4, after=(0,)),
        _op(OpKind.STORE, 0, Lane.DISK_WRITE, 4, Payload.STATE, num_bytes=9 * MIB, after=(4,)),
    ]
    # Writes last, so that no buffer comes back before both are updated.
    hardware = replace(FAST_CPU, disk_read_bytes_per_s=6 * MIB, disk_write_bytes_per_s=0.125 * MIB)
    schedule = _schedule(2, ops, waits={"F:0": {"carried": UPDATE_0}, "F:1": {"carried": UPDATE_1}})
    spans = _spans(_simulate(schedule, plan, model, hardware, staging=5 * 7 * MIB // 2))
    assert spans["FETCH state l1"] == (4, 5.5)
    # Block 0 has all by 2.5; its third piece comes again once block 1 has written its first, 24 s after that is updated at 5.5.
    assert spans["FETCH state l0"] == (1, 30)
    roomy = _spans(_simulate(schedule, plan, model, hardware, staging=100 * MIB))
    assert roomy["FETCH state l0"] == (1, 2.5)


def test_an_update_of_weights_that_are_not_in_memory_reads_them_too() -> None:
    model, plan = _model(_PARAMS), _plan(ON_DISK)  # fp32: 8 bytes of state and 4 of weights
    ops = [
        _op(OpKind.RELEASE, 0, Lane.DISK_READ, 2, num_bytes=_WEIGHTS),
        _op(OpKind.FETCH, 0, Lane.DISK_READ, 2, Payload.STATE, num_bytes=_STATE, after=(0,)),
        _update(0, 2, after=(1,)),
        _op(OpKind.STORE, 0, Lane.DISK_WRITE, 2, Payload.STATE, num_bytes=_STATE, after=(2,)),
    ]
    in_memory = [replace(op, after=tuple(i - 1 for i in op.after if i)) for op in ops[1:]]

    def spans(ops: list[Op]) -> dict[str, tuple[float, float]]:
        schedule = _schedule(1, ops, resident=frozenset({0}))
        return _spans(_simulate(schedule, plan, model, FAST_CPU, staging=100 * MIB))

    # Three pieces of 3 MiB to read instead of 2; what is written is the same.
    assert spans(ops)["FETCH state l0"] == (3, 6)
    assert spans(ops)["STORE l0"] == (5, 8)
    assert spans(in_memory)["FETCH state l0"] == pytest.approx((3, 5))


# ---- steady state ---------------------------------------------------------------------------------------------------------


def test_a_step_that_leaves_all_as_it_found_it_is_reported() -> None:
    """The first step finds all weights up to date; the others wait for what the step before has left."""
    simulation = _simulate(HOST_STEP, _plan(ON_HOST, ON_HOST), _model(10, 60), steps=8)
    assert simulation.iterations_s == (7, 10)
    assert simulation.steady
    assert simulation.prediction.iteration_s == 10


def test_one_step_shows_no_steady_state() -> None:
    simulation = _simulate(HOST_STEP, _plan(ON_HOST, ON_HOST), _model(10, 60), steps=1)
    assert simulation.iterations_s == (7,)
    assert not simulation.steady


def test_steps_that_never_settle_are_averaged_without_the_first() -> None:
    """A copy of 9 s in each step of 6 s that nothing waits for: the lane falls behind for ever."""
    schedule = _schedule(2, [_op(OpKind.GRAD, 0, Lane.D2H, 4, Payload.GRADIENTS, num_bytes=90)])
    simulation = _simulate(schedule, _plan(ON_HOST, ON_HOST), _model(1, 1), steps=5)
    assert simulation.iterations_s == (6, 6, 6, 6, 6)
    assert not simulation.steady
    assert simulation.busy == {"compute": 1, "d2h": 1}  # nothing is copied in the first


def test_steps_that_take_turns_are_averaged_over_their_cycle() -> None:
    """Writes take longer than compute; what of them spills into the next step differs from step to step."""
    model = _model(*[2**20] * 8)
    blocks = tuple(replace(b, forward_s=0.01, backward_s=0.02) for b in model.blocks)
    model, plan = replace(model, blocks=blocks), _plan(*[ON_DISK] * 8)
    hardware = replace(CPU, disk_read_bytes_per_s=2e8, disk_write_bytes_per_s=2e8, cpu_update_params_per_s=8e8)
    signature = StepSignature(order=tuple(range(8)), training=True, updates=Updates.IN_BACKWARD)
    everything = frozenset(range(8))
    schedule = lower(plan, model.shape(), signature, resident=everything, capacity_bytes=32 * MIB)
    simulation = _simulate(schedule, plan, model, hardware, staging=40 * MIB, steps=12)
    assert simulation.steady
    *_, a, b, c = simulation.iterations_s
    assert len({a, b, c}) == 3
    assert simulation.prediction.iteration_s == pytest.approx((a + b + c) / 3)
    assert simulation.prediction.iteration_s >= 8 * 12 * 2**20 / 2e8  # what has to be written


def test_the_same_plan_always_gives_the_same_simulation() -> None:
    model, plan = _disk_model()
    assert _simulate(_disk_step(open_at=1), plan, model, FAST_CPU) == _simulate(_disk_step(open_at=1), plan, model, FAST_CPU)


# ---- memory ---------------------------------------------------------------------------------------------------------------


def _changes(simulation: Simulation, tier: str) -> list[tuple[float, int]]:
    """When the tier's occupancy changes in the reported step, and to what; simultaneous changes are one."""
    column = {"device": 1, "host": 2}[tier]
    last = {row[0]: row[column] for row in simulation.memory.timeline}
    rows = list(last.items())
    return rows[:1] + [now for before, now in pairwise(rows) if now[1] != before[1]]


def test_device_memory_is_what_lives_there_and_what_compute_holds() -> None:
    sizes = {"activation_bytes": 100, "boundary_bytes": 10, "transient_bytes": 7}
    model = replace(_model(10, 10, itemsize=2, **sizes), constant_device_bytes=1000, constant_host_bytes=500)
    schedule = _schedule(2, [_update(0, 4, Lane.COMPUTE), _update(1, 4, Lane.COMPUTE)])
    simulation = _simulate(schedule, _plan(RESIDENT, RESIDENT), model)
    constant = 1000 + 2 * 20 + 2 * 120  # weights and state of both
    assert _changes(simulation, "device") == [
        (0, constant + 107),
        (1, constant + 207),
        (2, constant + 207 + 20),  # block 1's gradients
        (4, constant + 107 + 40),
        (6, constant + 40),
        (6.5, constant + 20),
        (7, constant),
    ]
    assert simulation.prediction.device_peak_bytes == constant + 227
    assert simulation.prediction.host_peak_bytes == 500
    assert simulation.prediction.disk_bytes == 0


def test_recomputed_activations_are_gone_between_forward_and_backward() -> None:
    model = _model(1, 1, 1, itemsize=2, activation_bytes=100, boundary_bytes=10)
    recompute = replace(RESIDENT, saved=Saved.RECOMPUTE)
    simulation = _simulate(_schedule(3), _plan(recompute, RESIDENT, recompute), model)
    constant = 3 * 2 + 3 * 12
    assert _changes(simulation, "device") == [
        (0, constant + 100),
        (1, constant + 10 + 100),
        (2, constant + 10 + 100 + 100),
        (3, constant + 10 + 100 + 100 + 2),  # F:2 has dropped what B:2 computes again; gradients
        (6, constant + 10 + 100 + 4),
        (8, constant + 100 + 6),
        (11, constant),
    ]


def test_swapped_activations_are_on_one_tier_or_on_two_while_they_move() -> None:
    model = _model(1, 1, itemsize=2, activation_bytes=100, boundary_bytes=100)
    plan = _plan(replace(RESIDENT, saved=Saved.SWAP_HOST, boundary=Saved.SWAP_HOST), RESIDENT)
    ops = [
        _op(OpKind.SWAP_OUT, 0, Lane.D2H, 1, Payload.ACTIVATIONS, num_bytes=100),
        _op(OpKind.SWAP_IN, 0, Lane.H2D, 3, Payload.ACTIVATIONS, num_bytes=100, after=(0,)),
    ]
    hardware = replace(GPU, link_d2h_bytes_per_s=200.0, link_h2d_bytes_per_s=100.0)
    simulation = _simulate(_schedule(2, ops, waits={"B:0": {"needs": (1,)}}), plan, model, hardware)
    device = 2 * 2 + 2 * 12
    assert _changes(simulation, "host") == [(0, 0), (1, 100), (5, 0)]
    assert _changes(simulation, "device") == [
        (0, device + 100),
        (1, device + 200),
        (1.5, device + 100),
        (2, device + 102),
        (5, device + 104),  # at 4 block 1's have gone and block 0's are coming
        (7, device),
    ]
    assert simulation.waits == {"SWAP_IN activations": 1}


def test_activations_on_disk_pass_through_the_host() -> None:
    model = _model(1, 1, itemsize=2, activation_bytes=100, boundary_bytes=100)
    plan = _plan(replace(RESIDENT, saved=Saved.SWAP_DISK, boundary=Saved.SWAP_DISK), RESIDENT)
    ops = [
        _op(OpKind.SWAP_OUT, 0, Lane.D2H, 1, Payload.ACTIVATIONS, num_bytes=100),
        _op(OpKind.SWAP_OUT, 0, Lane.DISK_WRITE, 1, Payload.ACTIVATIONS, num_bytes=100, after=(0,)),
        _op(OpKind.SWAP_IN, 0, Lane.DISK_READ, 3, Payload.ACTIVATIONS, num_bytes=100, after=(1,)),
        _op(OpKind.SWAP_IN, 0, Lane.H2D, 3, Payload.ACTIVATIONS, num_bytes=100, after=(2,)),
    ]
    hardware = replace(
        GPU, link_d2h_bytes_per_s=200.0, link_h2d_bytes_per_s=100.0, disk_read_bytes_per_s=50.0, disk_write_bytes_per_s=100.0
    )
    simulation = _simulate(_schedule(2, ops, waits={"B:0": {"needs": (3,)}}), plan, model, hardware)
    assert _changes(simulation, "host") == [(0, 0), (1, 100), (2.5, 0), (4, 100), (7, 0)]
    assert simulation.prediction.disk_bytes == 100
    assert simulation.prediction.iteration_s == 9


def test_gradients_are_on_the_device_until_they_are_copied_and_on_the_host_until_they_are_used() -> None:
    ops = [
        _op(OpKind.GRAD, 1, Lane.D2H, 3, Payload.GRADIENTS, num_bytes=20),
        _update(1, 3, after=(0,)),
        _op(OpKind.GRAD, 0, Lane.D2H, 4, Payload.GRADIENTS, num_bytes=20),
        _update(0, 4, after=(2,)),
    ]
    schedule = _schedule(2, ops, waits={"F:0": {"carried": UPDATE_0}, "F:1": {"carried": UPDATE_1}})
    simulation = _simulate(schedule, _plan(ON_HOST, ON_HOST), _model(10, 10, itemsize=2))
    host = 2 * 20 + 2 * 120
    # Copies take 2 s, updates 1 s.
    assert _changes(simulation, "host") == [(0, host), (4, host + 20), (6, host + 40), (7, host + 20), (9, host)]
    assert _changes(simulation, "device") == [(0, 0), (2, 20), (4, 40), (6, 20), (8, 0)]


def test_gradients_of_micro_batches_add_up_in_one_place_on_the_host() -> None:
    grad = _op(OpKind.GRAD, 0, Lane.D2H, 2, Payload.GRADIENTS, num_bytes=20)
    accumulate = _schedule(1, [grad], waits={"F:0": {"carried": UPDATE_0}})
    last = _schedule(1, [grad, _update(0, 2, after=(0,))])
    simulation = _simulate([accumulate, last], _plan(ON_HOST), _model(10, itemsize=2))
    host = 20 + 120
    assert _changes(simulation, "host") == [(0, host), (3, host + 20), (9, host)]
    assert simulation.prediction.device_peak_bytes == 40  # B of the second runs while those of the first are copied


def test_weights_below_the_device_take_room_there_between_upload_and_release() -> None:
    simulation = _simulate(_uploads(), _plan(ON_HOST, ON_HOST), _model(1, 1))
    device = [(at, num_bytes) for at, num_bytes in _changes(simulation, "device")]
    # Block 0's upload comes before the step begins. RELEASEs are issued as F:0 and F:1 end; gradients follow.
    assert device == [(0, 40), (1, 30), (4, 4), (6, 8), (8, 10)]


def test_weights_on_disk_take_host_memory_between_fetch_and_release() -> None:
    ops = [
        _op(OpKind.RELEASE, 0, Lane.DISK_READ, 1, num_bytes=3 * MIB),
        _op(OpKind.FETCH, 1, Lane.DISK_READ, 1, num_bytes=3 * MIB, after=(0,)),
        _op(OpKind.RELEASE, 1, Lane.DISK_READ, 3, num_bytes=3 * MIB, after=(1,)),
        _op(OpKind.FETCH, 0, Lane.DISK_READ, 3, num_bytes=3 * MIB, after=(2,)),
    ]
    waits = {"F:1": {"needs": (1,)}, "B:0": {"needs": (3,)}}
    schedule = _schedule(2, ops, waits=waits, resident=frozenset({0}))
    plan = _plan(*[replace(ON_DISK, state=Tier.HOST)] * 2)
    model = _model(3 * MIB // 4, 3 * MIB // 4)
    simulation = _simulate(schedule, plan, model, CPU, staging=5)
    constant = 5 + 2 * 2 * 3 * MIB  # staging and state; one block's weights; gradients
    # Block 0's weights, or block 1's; gradients of one, of both.
    expected = [(0, 3 * MIB), (3, 6 * MIB), (6, 9 * MIB), (8, 3 * MIB)]
    assert _changes(simulation, "host") == [(at, constant + num_bytes) for at, num_bytes in expected]
    assert simulation.prediction.disk_bytes == 2 * 6 * MIB
    assert simulation.waits == {"FETCH": 2}


def test_shared_memory_is_one_pool_that_both_peaks_report() -> None:
    model = replace(_model(10, 10, activation_bytes=100), constant_device_bytes=1000, constant_host_bytes=500)
    prediction = _simulate(HOST_STEP, _plan(RESIDENT, ON_HOST), model, CPU).prediction
    assert prediction.host_peak_bytes == prediction.device_peak_bytes == 1500 + 2 * 40 + 2 * 80 + 200 + 40


def test_gradients_that_wait_for_the_verdict_stay_until_the_next_backward() -> None:
    """As the runtime keeps them: the next forward saves its activations beside all of them."""
    model, waits = _model(10, 20, activation_bytes=100), {"F:0": {"carried": UPDATE_0}, "F:1": {"carried": UPDATE_1}}
    schedule = _schedule(2, [_update(0, 4), _update(1, 4)], waits=waits)
    signature = replace(schedule.signature, updates=Updates.AFTER_VERDICT)
    simulation = _simulate(replace(schedule, signature=signature), _plan(ON_HOST, ON_HOST), model, CPU)
    constant, gradients = 30 * (4 + 8), 30 * 4
    assert _changes(simulation, "host") == [
        (0, constant + gradients + 100),
        (2, constant + gradients + 200),  # compute has waited a second for update 1
        (3, constant + 20 * 4 + 200),
        (5, constant + gradients + 100),
        (7, constant + gradients),
    ]
    assert _simulate(schedule, _plan(ON_HOST, ON_HOST), model, CPU).prediction.host_peak_bytes == constant + 200 + 20 * 4


def test_a_cpu_update_of_weights_on_the_device_keeps_a_copy_on_the_host() -> None:
    on_device = replace(RESIDENT, state=Tier.HOST, update=UpdateLane.CPU)
    prediction = _simulate(_schedule(1), _plan(on_device), _model(10, itemsize=2)).prediction
    assert prediction.host_peak_bytes == 14 * 10  # AutoHete eq. 2
    assert _simulate(_schedule(1), _plan(on_device), _model(10, itemsize=2), CPU).prediction.host_peak_bytes == 14 * 10 + 20


# ---- refusals -------------------------------------------------------------------------------------------------------------


def test_a_plan_that_needs_what_the_machine_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="cpu_update_params_per_s=0"):
        _simulate(HOST_STEP, _plan(ON_HOST, ON_HOST), _model(10, 20), replace(GPU, cpu_update_params_per_s=0.0))


# ---- effort ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", Tier)
def test_a_step_of_100_blocks_is_simulated_with_little_effort(tier: Tier) -> None:
    model = _model(*[7_000_000] * 100)
    blocks = tuple(replace(b, forward_s=0.05, backward_s=0.1) for b in model.blocks)
    model = replace(model, blocks=blocks)
    placed = {Tier.DEVICE: RESIDENT, Tier.HOST: ON_HOST, Tier.DISK: ON_DISK}[tier]
    plan, hardware = _plan(*[placed] * 100), replace(CPU, host_memory_bytes=60 * 2**30, disk_capacity_bytes=2**40)
    hardware = replace(hardware, disk_read_bytes_per_s=2e9, disk_write_bytes_per_s=2e9, cpu_update_params_per_s=1e9)
    space = rooms(replace(plan, host_cache_bytes=2**30), model, hardware)
    schedules = steady(plan, model.shape(), rooms=space)

    steps = len(simulate(schedules, plan, model, hardware, rooms=space).iterations_s)
    assert python_calls(lambda: simulate(schedules, plan, model, hardware, rooms=space)) < 80_000 * steps  # some 40 ms each
