"""Memory of each tier over time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from support.simulations import (
    CPU,
    GPU,
    HOST_STEP,
    MIB,
    ON_DISK,
    ON_HOST,
    RESIDENT,
    UPDATE_0,
    UPDATE_1,
    make_op,
    model_of,
    plan_of,
    schedule_of,
    simulated,
    update_op,
    upload_schedule,
)

from lightning_hetero.ir.plan import Saved, Tier, UpdateLane
from lightning_hetero.ir.schedule import Lane, OpKind, Payload, Updates
from lightning_hetero.sim import Simulation


def _changes(simulation: Simulation, tier: str) -> list[tuple[float, int]]:
    """When the tier's occupancy changes in the reported step, and to what; simultaneous changes are
    one.
    """
    column = {"device": 1, "host": 2}[tier]
    last = {row[0]: row[column] for row in simulation.memory.timeline}
    rows = list(last.items())
    return rows[:1] + [now for before, now in pairwise(rows) if now[1] != before[1]]


def test_device_memory_has_resident_data_and_memory_of_compute() -> None:
    sizes = {"activation_bytes": 100, "boundary_bytes": 10, "transient_bytes": 7}
    model = replace(model_of(10, 10, itemsize=2, **sizes), constant_device_bytes=1000, constant_host_bytes=500)
    schedule = schedule_of(2, [update_op(0, 4, Lane.COMPUTE), update_op(1, 4, Lane.COMPUTE)])
    simulation = simulated(schedule, plan_of(RESIDENT, RESIDENT), model)
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
    model = model_of(1, 1, 1, itemsize=2, activation_bytes=100, boundary_bytes=10)
    recompute = replace(RESIDENT, saved=Saved.RECOMPUTE)
    simulation = simulated(schedule_of(3), plan_of(recompute, RESIDENT, recompute), model)
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
    model = model_of(1, 1, itemsize=2, activation_bytes=100, boundary_bytes=100)
    plan = plan_of(replace(RESIDENT, saved=Saved.SWAP_HOST, boundary=Saved.SWAP_HOST), RESIDENT)
    ops = [
        make_op(OpKind.SWAP_OUT, 0, Lane.D2H, 1, Payload.ACTIVATIONS, num_bytes=100),
        make_op(OpKind.SWAP_IN, 0, Lane.H2D, 3, Payload.ACTIVATIONS, num_bytes=100, after=(0,)),
    ]
    hardware = replace(GPU, link_d2h_bytes_per_s=200.0, link_h2d_bytes_per_s=100.0)
    simulation = simulated(schedule_of(2, ops, waits={"B:0": {"needs": (1,)}}), plan, model, hardware)
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
    model = model_of(1, 1, itemsize=2, activation_bytes=100, boundary_bytes=100)
    plan = plan_of(replace(RESIDENT, saved=Saved.SWAP_DISK, boundary=Saved.SWAP_DISK), RESIDENT)
    ops = [
        make_op(OpKind.SWAP_OUT, 0, Lane.D2H, 1, Payload.ACTIVATIONS, num_bytes=100),
        make_op(OpKind.SWAP_OUT, 0, Lane.DISK_WRITE, 1, Payload.ACTIVATIONS, num_bytes=100, after=(0,)),
        make_op(OpKind.SWAP_IN, 0, Lane.DISK_READ, 3, Payload.ACTIVATIONS, num_bytes=100, after=(1,)),
        make_op(OpKind.SWAP_IN, 0, Lane.H2D, 3, Payload.ACTIVATIONS, num_bytes=100, after=(2,)),
    ]
    hardware = replace(
        GPU, link_d2h_bytes_per_s=200.0, link_h2d_bytes_per_s=100.0, disk_read_bytes_per_s=50.0, disk_write_bytes_per_s=100.0
    )
    simulation = simulated(schedule_of(2, ops, waits={"B:0": {"needs": (3,)}}), plan, model, hardware)
    assert _changes(simulation, "host") == [(0, 0), (1, 100), (2.5, 0), (4, 100), (7, 0)]
    assert simulation.prediction.disk_bytes == 100
    assert simulation.prediction.iteration_s == 9


def test_gradients_are_on_the_device_until_they_are_copied_and_on_the_host_until_they_are_used() -> None:
    ops = [
        make_op(OpKind.GRAD, 1, Lane.D2H, 3, Payload.GRADIENTS, num_bytes=20),
        update_op(1, 3, after=(0,)),
        make_op(OpKind.GRAD, 0, Lane.D2H, 4, Payload.GRADIENTS, num_bytes=20),
        update_op(0, 4, after=(2,)),
    ]
    schedule = schedule_of(2, ops, waits={"F:0": {"carried": UPDATE_0}, "F:1": {"carried": UPDATE_1}})
    simulation = simulated(schedule, plan_of(ON_HOST, ON_HOST), model_of(10, 10, itemsize=2))
    host = 2 * 20 + 2 * 120
    # Copies take 2 s, updates 1 s.
    assert _changes(simulation, "host") == [(0, host), (4, host + 20), (6, host + 40), (7, host + 20), (9, host)]
    assert _changes(simulation, "device") == [(0, 0), (2, 20), (4, 40), (6, 20), (8, 0)]


def test_gradients_of_micro_batches_add_up_in_one_place_on_the_host() -> None:
    grad = make_op(OpKind.GRAD, 0, Lane.D2H, 2, Payload.GRADIENTS, num_bytes=20)
    accumulate = schedule_of(1, [grad], waits={"F:0": {"carried": UPDATE_0}})
    last = schedule_of(1, [grad, update_op(0, 2, after=(0,))])
    simulation = simulated([accumulate, last], plan_of(ON_HOST), model_of(10, itemsize=2))
    host = 20 + 120
    assert _changes(simulation, "host") == [(0, host), (3, host + 20), (9, host)]
    assert simulation.prediction.device_peak_bytes == 40  # B of the second runs while those of the first are copied


def test_weights_below_the_device_take_room_there_between_upload_and_release() -> None:
    simulation = simulated(upload_schedule(), plan_of(ON_HOST, ON_HOST), model_of(1, 1))
    device = [(at, num_bytes) for at, num_bytes in _changes(simulation, "device")]
    # Block 0's upload comes before the step begins. RELEASEs are issued as F:0 and F:1 end;
    # gradients follow.
    assert device == [(0, 40), (1, 30), (4, 4), (6, 8), (8, 10)]


def test_weights_on_disk_take_host_memory_between_fetch_and_release() -> None:
    ops = [
        make_op(OpKind.RELEASE, 0, Lane.DISK_READ, 1, num_bytes=3 * MIB),
        make_op(OpKind.FETCH, 1, Lane.DISK_READ, 1, num_bytes=3 * MIB, after=(0,)),
        make_op(OpKind.RELEASE, 1, Lane.DISK_READ, 3, num_bytes=3 * MIB, after=(1,)),
        make_op(OpKind.FETCH, 0, Lane.DISK_READ, 3, num_bytes=3 * MIB, after=(2,)),
    ]
    waits = {"F:1": {"needs": (1,)}, "B:0": {"needs": (3,)}}
    schedule = schedule_of(2, ops, waits=waits, resident=frozenset({0}))
    plan = plan_of(*[replace(ON_DISK, state=Tier.HOST)] * 2)
    model = model_of(3 * MIB // 4, 3 * MIB // 4)
    simulation = simulated(schedule, plan, model, CPU, staging=5)
    constant = 5 + 2 * 2 * 3 * MIB  # staging and state; one block's weights; gradients
    # Block 0's weights, or block 1's; gradients of one, of both.
    expected = [(0, 3 * MIB), (3, 6 * MIB), (6, 9 * MIB), (8, 3 * MIB)]
    assert _changes(simulation, "host") == [(at, constant + num_bytes) for at, num_bytes in expected]
    assert simulation.prediction.disk_bytes == 2 * 6 * MIB
    assert simulation.waits == {"FETCH": 2}


def test_shared_memory_is_one_pool_that_both_peaks_report() -> None:
    model = replace(model_of(10, 10, activation_bytes=100), constant_device_bytes=1000, constant_host_bytes=500)
    prediction = simulated(HOST_STEP, plan_of(RESIDENT, ON_HOST), model, CPU).prediction
    assert prediction.host_peak_bytes == prediction.device_peak_bytes == 1500 + 2 * 40 + 2 * 80 + 200 + 40


def test_gradients_that_wait_for_the_verdict_stay_until_the_next_backward() -> None:
    """As the runtime keeps them: the next forward saves its activations beside all of them."""
    model, waits = model_of(10, 20, activation_bytes=100), {"F:0": {"carried": UPDATE_0}, "F:1": {"carried": UPDATE_1}}
    schedule = schedule_of(2, [update_op(0, 4), update_op(1, 4)], waits=waits)
    signature = replace(schedule.signature, updates=Updates.AFTER_VERDICT)
    simulation = simulated(replace(schedule, signature=signature), plan_of(ON_HOST, ON_HOST), model, CPU)
    constant, gradients = 30 * (4 + 8), 30 * 4
    assert _changes(simulation, "host") == [
        (0, constant + gradients + 100),
        (2, constant + gradients + 200),  # compute has waited a second for update 1
        (3, constant + 20 * 4 + 200),
        (5, constant + gradients + 100),
        (7, constant + gradients),
    ]
    assert simulated(schedule, plan_of(ON_HOST, ON_HOST), model, CPU).prediction.host_peak_bytes == constant + 200 + 20 * 4


def test_a_cpu_update_of_weights_on_the_device_keeps_a_copy_on_the_host() -> None:
    on_device = replace(RESIDENT, state=Tier.HOST, update=UpdateLane.CPU)
    prediction = simulated(schedule_of(1), plan_of(on_device), model_of(10, itemsize=2)).prediction
    assert prediction.host_peak_bytes == 14 * 10  # AutoHete eq. 2
    assert simulated(schedule_of(1), plan_of(on_device), model_of(10, itemsize=2), CPU).prediction.host_peak_bytes == 14 * 10 + 20
