"""When ops run: lanes, priorities, shared memory, micro-batches, collectives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.simulations import (
    CPU,
    GPU,
    HOST_STEP,
    ON_HOST,
    RESIDENT,
    UPDATE_0,
    UPDATE_1,
    make_op,
    model_of,
    plan_of,
    schedule_of,
    simulated,
    spans_of,
    update_op,
    upload_schedule,
)

from lightning_hetero.ir.plan import Saved
from lightning_hetero.ir.schedule import Lane, Op, OpKind, Payload, Schedule
from lightning_hetero.planners.protrain.formulas import ChunkTimes, backward_s


def test_updates_on_the_device_follow_backward_on_the_compute_lane() -> None:
    schedule = schedule_of(2, [update_op(0, 4, Lane.COMPUTE), update_op(1, 4, Lane.COMPUTE)])
    simulation = simulated(schedule, plan_of(RESIDENT, RESIDENT), model_of(20, 40))
    assert spans_of(simulation) == {
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


def test_an_update_on_the_cpu_overlaps_with_backward_and_the_next_forward_waits_for_the_rest() -> None:
    simulation = simulated(HOST_STEP, plan_of(ON_HOST, ON_HOST), model_of(10, 20))
    assert spans_of(simulation)["UPDATE l1"] == (4, 6)
    assert spans_of(simulation)["UPDATE l0"] == (6, 7)
    assert simulation.prediction.iteration_s == 7
    assert (simulation.prediction.forward_s, simulation.prediction.backward_s) == (2, 5)
    assert simulation.waits == {"UPDATE": 1}
    assert simulation.busy == pytest.approx({"compute": 6 / 7, "cpu": 3 / 7})


@pytest.mark.parametrize(("pinned", "begin_s"), [(False, 4), (True, 6)])
def test_the_backward_of_a_pinned_block_issues_nothing(pinned: bool, begin_s: float) -> None:
    """The runtime has no anchor there: what the schedule issues at it comes with the verdict, after
    the block's backward.
    """
    model = model_of(10, 10)
    model = replace(model, blocks=(replace(model.blocks[0], pinned=pinned), model.blocks[1]))
    simulation = simulated(schedule_of(2, [update_op(1, 3)]), plan_of(ON_HOST, ON_HOST), model, CPU)
    assert spans_of(simulation)["UPDATE l1"] == (begin_s, begin_s + 1)


def test_the_update_of_a_lower_block_overtakes_so_that_the_next_forward_begins_early() -> None:
    simulation = simulated(HOST_STEP, plan_of(ON_HOST, ON_HOST), model_of(30, 30))
    assert spans_of(simulation)["UPDATE l1"] == (4, 10)  # 2 s of it before it is overtaken
    assert spans_of(simulation)["UPDATE l0"] == (6, 9)
    assert simulation.prediction.iteration_s == 9
    assert simulation.waits == {"UPDATE": 3}


def test_without_priority_updates_run_as_they_were_issued() -> None:
    simulation = simulated(HOST_STEP, plan_of(ON_HOST, ON_HOST, priority=False), model_of(30, 30))
    assert spans_of(simulation)["UPDATE l1"] == (4, 7)
    assert spans_of(simulation)["UPDATE l0"] == (7, 10)
    assert simulation.prediction.iteration_s == 10


def test_a_forward_waits_for_its_own_update_only() -> None:
    """Block 1's update lasts until after block 0's next forward; compute waits for it there."""
    simulation = simulated(HOST_STEP, plan_of(ON_HOST, ON_HOST), model_of(10, 60))
    spans = spans_of(simulation, 1)
    assert spans["wait F l1"] == (1, 4)
    assert spans["F l1"] == (4, 5)
    # The step: 4 + 2 forward and waiting, 4 backward (its update of block 1 has run 2 of its 6 s),
    # 1 update of block 0.
    assert simulation.prediction.iteration_s == 5 + 4 + 1
    assert simulation.waits == {"UPDATE": 1 + 3}
    waited = [s.waited_for for s in simulation.trace.spans if s.name == "wait F l1"]
    assert set(waited) == {"UPDATE l1"}


def test_copies_of_one_direction_run_in_the_order_of_the_schedule() -> None:
    simulation = simulated(upload_schedule(), plan_of(ON_HOST, ON_HOST), model_of(1, 1))
    spans = spans_of(simulation)  # the clock of a step begins with its first forward
    assert (spans["UPLOAD l0"], spans["UPLOAD l1"]) == ((-1, 0), (0, 3))
    assert spans["F l1"] == (3, 4)
    # 1 + wait 2 + 1 forward, 4 backward, and the next step's first upload.
    assert simulation.prediction.iteration_s == 9
    assert simulation.waits == {"UPLOAD": 3}


def test_copies_and_updates_share_host_memory() -> None:
    """An update that takes 28 bytes a parameter of memory of 290 bytes a second: 280 alone, 280
    beside a copy of 10 as well.
    """
    ops = [
        make_op(OpKind.GRAD, 1, Lane.D2H, 3, Payload.GRADIENTS, num_bytes=10),
        update_op(1, 3),
        update_op(0, 4),
    ]
    schedule = schedule_of(2, ops, waits={"F:0": {"carried": UPDATE_0}})
    plan, model = plan_of(ON_HOST, ON_HOST), model_of(10, 10)
    assert spans_of(simulated(schedule, plan, model, replace(GPU, host_dram_bytes_per_s=290.0)))["UPDATE l1"] == (4, 5)
    # 285: the update gets 275 for the second of the copy and does the last 5 alone, at 280.
    spans = spans_of(simulated(schedule, plan, model, replace(GPU, host_dram_bytes_per_s=285.0)))
    assert spans["UPDATE l1"] == pytest.approx((4, 5 + 5 / 280))
    assert spans["GRAD l1"] == (4, 5)


def test_work_slows_down_only_while_the_other_kind_runs() -> None:
    hardware = replace(GPU, contention={"compute|update": 2.0, "update|compute": 4.0})
    simulation = simulated(HOST_STEP, plan_of(ON_HOST, ON_HOST), model_of(10, 3), hardware)
    # Update 1 (0.3 s alone) takes 1.2 s, in which B:0 does 0.6 of its 2 s; update 0 then runs
    # alone.
    assert spans_of(simulation)["UPDATE l1"] == pytest.approx((4, 5.2))
    assert spans_of(simulation)["B l0"] == pytest.approx((4, 6.6))
    assert simulation.prediction.iteration_s == pytest.approx(7.6)


def test_gradients_are_copied_lowest_block_first_if_the_plan_says_so() -> None:
    ops = [
        make_op(OpKind.GRAD, 2, Lane.D2H, 4, Payload.GRADIENTS, num_bytes=50),
        make_op(OpKind.GRAD, 1, Lane.D2H, 5, Payload.GRADIENTS, num_bytes=10),
        make_op(OpKind.GRAD, 0, Lane.D2H, 6, Payload.GRADIENTS, num_bytes=10),
    ]
    schedule, model = schedule_of(3, ops), model_of(1, 1, 1)

    def order(*, priority: bool) -> list[str]:
        spans = spans_of(simulated(schedule, plan_of(ON_HOST, ON_HOST, ON_HOST, priority=priority), model))
        assert spans["GRAD l2"] == (5, 10)  # a copy under way is not taken back
        return sorted((s for s in spans if s.startswith("GRAD")), key=lambda s: spans[s])

    assert order(priority=True) == ["GRAD l2", "GRAD l0", "GRAD l1"]
    assert order(priority=False) == ["GRAD l2", "GRAD l1", "GRAD l0"]


def test_micro_batches_follow_each_other_and_only_the_last_one_updates() -> None:
    accumulate = schedule_of(2, waits={"F:0": {"carried": UPDATE_0}, "F:1": {"carried": UPDATE_1}})
    simulation = simulated([accumulate, accumulate, HOST_STEP], plan_of(ON_HOST, ON_HOST), model_of(10, 20))
    assert simulation.prediction.iteration_s == 3 * 6 + 1
    assert (simulation.prediction.forward_s, simulation.prediction.backward_s) == (6, 13)
    assert sum(s.name == "F l0" and s.step == 0 for s in simulation.trace.spans) == 3


def _reduced(*sizes: int) -> Schedule:
    """Gradients are summed over devices before each block's update on the device; collectives take
    their turns.
    """
    anchors = range(len(sizes) + 1, 2 * len(sizes) + 1)  # the begins that end the backwards of the last, ..., the first block
    ops: list[Op] = []
    for at, block in zip(anchors, reversed(range(len(sizes))), strict=True):
        ops.append(make_op(OpKind.REDUCE, block, Lane.NET, at, Payload.GRADIENTS, num_bytes=sizes[block]))
    reduces = {op.block: i for i, op in enumerate(ops)}
    ops += [update_op(b, anchors[-1], Lane.COMPUTE, after=(reduces[b],)) for b in reversed(range(len(sizes)))]
    return schedule_of(len(sizes), ops)


def test_collectives_run_one_after_the_other_beside_compute() -> None:
    """Of two devices each sends half: 80 bytes take 4 s at 10 bytes a second. The first one hides
    in part behind backward.
    """
    machine = replace(GPU, world_size=2, collective_bytes_per_s=10.0)
    simulation = simulated(_reduced(60, 80), plan_of(RESIDENT, RESIDENT), model_of(20, 20), machine)
    spans = spans_of(simulation)
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
    model, size, none = model_of(20, 20, 20, 20), 80, (0.0,) * 4
    machine = replace(GPU, world_size=world_size, collective_bytes_per_s=rate, device_update_params_per_s=1e9)
    reduce = (size * (world_size - 1) / world_size / rate,) * 4
    chunks = ChunkTimes(
        forward=(1.0,) * 4, backward=(2.0,) * 4, gather=none, reduce=reduce, upload=none, upload_again=none, offload=none,
        gpu_update=none, cpu_update=none,
    )  # fmt: skip
    expected = 4 * 1.0 + backward_s(chunks, none, persistent=4, buffers=0)
    simulation = simulated(_reduced(*[size] * 4), plan_of(*[RESIDENT] * 4), model, machine)
    assert simulation.prediction.iteration_s == pytest.approx(expected, rel=1e-6)


def test_one_device_alone_reduces_nothing() -> None:
    simulation = simulated(_reduced(60, 80), plan_of(RESIDENT, RESIDENT), model_of(20, 20))
    assert simulation.prediction.iteration_s == 8
    assert "net" not in simulation.busy


def test_recomputation_lengthens_backward() -> None:
    plan = plan_of(replace(RESIDENT, saved=Saved.RECOMPUTE), RESIDENT)
    assert simulated(schedule_of(2), plan, model_of(1, 1)).prediction.iteration_s == 2 + 2 + 3


def test_a_host_that_is_the_device_waits_for_all_updates_once_it_runs_some_itself() -> None:
    schedule = schedule_of(2, [update_op(1, 3), update_op(0, 4, Lane.COMPUTE)])
    plan, model = plan_of(RESIDENT, ON_HOST), model_of(10, 50)
    assert simulated(schedule, plan, model).prediction.iteration_s == 6.5
    # The two share the update threads: block 1 has run 2 s of 5 as they meet; 1 s at half speed for
    # 0.5 s each, and the rest.
    simulation = simulated(schedule, plan, model, CPU)
    assert simulation.prediction.iteration_s == pytest.approx(6 + 2 + 2)
    assert simulation.waits == {"UPDATE": pytest.approx(2)}
