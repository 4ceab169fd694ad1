"""Ranks that share a model, simulated: times and bytes worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.simulations import CPU, GPU, ON_HOST, model_of, plan_of, simulated, spans_of

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.schedule import Schedule, Updates
from lightning_hetero.lowering import CacheSizes, steady, step_signatures
from lightning_hetero.sim import Simulation

PLAN = plan_of(ON_HOST, ON_HOST)
WHOLE = model_of(20, 20)  # 80 bytes of weights each


def machine(bytes_per_s: float) -> HardwareProfile:
    return replace(CPU, ranks=2, collective_bytes_per_s=bytes_per_s)


def schedules(whole_bytes: int, updates: Updates = Updates.IN_BACKWARD, *, shared_memory: bool = True) -> tuple[Schedule, ...]:
    sizes = CacheSizes(host_cache_bytes=0, device_cache_bytes=whole_bytes, staging_bytes=0, ranks=2, shared_memory=shared_memory)
    return steady(PLAN, WHOLE.slice_of(2).shape(), step_signatures(PLAN, updates=updates), sizes=sizes)


def simulation(whole_bytes: int, bytes_per_s: float, updates: Updates = Updates.IN_BACKWARD) -> Simulation:
    return simulated(schedules(whole_bytes, updates), PLAN, WHOLE.slice_of(2), machine(bytes_per_s))


def test_a_rank_sends_half_and_updates_half() -> None:
    """Of two ranks each sends half: a collective of 80 bytes takes 1 s at 40 bytes a second. Each
    updates 10 parameters of each block in 1 s.

    Steps follow each other: block 0 is gathered when its update has ended, and meanwhile block 1
    is. Compute waits for the first GATHER alone. An update is issued once compute has waited for
    its REDUCE: here at the verdict.
    """
    spans = spans_of(simulation(160, 40.0))
    assert spans["F l0"] == (0, 1)
    assert spans["F l1"] == (1, 2)
    assert spans["B l1"] == (2, 4)
    assert spans["REDUCE gradients l1"] == (4, 5)
    assert spans["B l0"] == (4, 6)
    assert spans["UPDATE l1"] == (6, 7)
    assert spans["REDUCE gradients l0"] == (6, 7)
    assert spans["UPDATE l0"] == (7, 8)


def test_the_next_forward_waits_for_the_update_and_the_gather_of_its_first_block() -> None:
    step = simulation(160, 40.0)
    assert step.prediction.iteration_s == 6 + 1 + 1 + 1  # compute, REDUCE, UPDATE, GATHER
    assert step.waits == {"GATHER": 3}


def test_without_a_second_rank_to_wait_for_collectives_take_no_time() -> None:
    assert simulation(160, 1e12).prediction.iteration_s == pytest.approx(6 + 1)


def test_memory_has_slices_whole_weights_and_whole_gradients() -> None:
    """When block 0's backward begins: slices of weights and state (2 * (40 + 80)), whole weights
    (80) and whole gradients (80) of both blocks, since those of block 1 are about to be released
    and reduced, and the slice (40) to which they are reduced.
    """
    assert simulation(160, 40.0).prediction.host_peak_bytes == 2 * (40 + 80) + 2 * (80 + 80) + 40


def on_devices(whole_bytes: int) -> Simulation:
    """A link moves 80 bytes a second each way, the network 40."""
    gpus = replace(GPU, ranks=2, collective_bytes_per_s=40.0, link_h2d_bytes_per_s=80.0, link_d2h_bytes_per_s=80.0)
    return simulated(schedules(whole_bytes, shared_memory=False), PLAN, WHOLE.slice_of(2), gpus)


def test_devices_get_whole_weights_from_the_host_and_send_whole_gradients_there() -> None:
    """A GATHER of 80 bytes and the UPLOAD of them take 1 s each, and so do GRAD and REDUCE."""
    step = on_devices(160)
    spans = spans_of(step)
    assert spans["B l1"] == (2, 4)
    assert spans["GRAD l1"] == (4, 5)
    assert spans["REDUCE gradients l1"] == (5, 6)
    assert spans["UPDATE l1"] == (6, 7)
    assert spans["B l0"] == (4, 6)
    assert spans["UPDATE l0"] == (8, 9)
    assert step.prediction.iteration_s == 6 + 1 + 1 + 1 + 1 + 1  # compute, GRAD, REDUCE, UPDATE, GATHER, UPLOAD


def test_devices_have_whole_weights_and_gradients_and_hosts_have_slices() -> None:
    """On the device whole weights of both blocks, and gradients of two as block 0's backward
    begins. On the host slices of weights and state, whole gradients of one block, and the slice to
    which those of the other have been reduced.
    """
    step = on_devices(160)
    assert step.prediction.device_peak_bytes == 2 * 80 + 2 * 80
    assert step.prediction.host_peak_bytes == 2 * (40 + 80) + 80 + 40


def test_the_machine_has_as_many_ranks_as_the_schedule() -> None:
    with pytest.raises(ConfigError, match="a schedule for 2 ranks on machine 'cpu' with ranks=4"):
        simulated(schedules(160), PLAN, WHOLE.slice_of(2), replace(machine(40.0), ranks=4))


def test_a_slice_is_rounded_up() -> None:
    block = model_of(7).slice_of(2).blocks[0]
    assert (block.num_params, block.num_trainable_params, block.forward_s) == (4, 4, 1.0)
    assert model_of(7).slice_of(1) == model_of(7)
