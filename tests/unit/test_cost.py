from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_hetero.cost import Rates, Work, amount_of, backward_s, cpu_update_bytes, stored_bytes
from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile, OperatorProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane
from lightning_hetero.ir.schedule import NO_BLOCK, Lane, Op, OpKind, Payload

MACHINE = HardwareProfile(
    name="toy",
    device_memory_bytes=1000,
    host_memory_bytes=1000,
    disk_capacity_bytes=1000,
    device_flop_per_s=1.0,
    link_h2d_bytes_per_s=20.0,
    link_d2h_bytes_per_s=10.0,
    disk_read_bytes_per_s=4.0,
    disk_write_bytes_per_s=2.0,
    disk_duplex=False,
    host_dram_bytes_per_s=280.0,
    cpu_update_params_per_s=5.0,
    device_update_params_per_s=50.0,
    cpu_downcast_params_per_s=0.0,
)
BLOCK = BlockProfile(
    name="b", num_params=10, num_trainable_params=8, forward_s=1.0, backward_s=2.0, forward_flop=100.0, activation_bytes=50,
    boundary_bytes=10, transient_bytes=0, operators=(OperatorProfile(name="mlp", flop=40.0, bytes=20),),
)  # fmt: skip


def _model(itemsize: int) -> ModelProfile:
    return ModelProfile(
        name="m", tokens=1, compute_itemsize=itemsize, constant_device_bytes=0, constant_host_bytes=0, blocks=(BLOCK,)
    )


def _op(kind: OpKind, lane: Lane, num_bytes: int = 0, block: int = 0) -> Op:
    return Op(id=0, kind=kind, block=block, lane=lane, at=0, payload=Payload.STATE, num_bytes=num_bytes)


def test_work_alone_takes_its_amount_over_the_slowest_rate_it_draws_on() -> None:
    rates = Rates(MACHINE)
    assert rates.alone_s(Work.COMPUTE, 3.0) == 3.0
    assert rates.alone_s(Work.H2D, 40) == 2.0
    assert rates.alone_s(Work.DISK_READ, 8) == 2.0
    assert rates.alone_s(Work.DISK_WRITE, 8) == 4.0
    assert rates.alone_s(Work.DEVICE_UPDATE, 100) == 2.0
    # 5 parameters a second are 140 bytes a second; memory allows twice that, or half of it.
    assert rates.alone_s(Work.CPU_UPDATE, cpu_update_bytes(10)) == 2.0
    assert Rates(replace(MACHINE, host_dram_bytes_per_s=70.0)).alone_s(Work.CPU_UPDATE, cpu_update_bytes(10)) == 4.0


def test_a_cpu_update_moves_28_bytes_a_parameter() -> None:
    assert cpu_update_bytes(3) == 84


def test_updates_on_a_device_that_is_the_host_run_at_the_speed_of_its_kernels() -> None:
    shared = Rates(replace(MACHINE, shared_memory=True))
    amount = amount_of(_op(OpKind.UPDATE, Lane.COMPUTE), _plan(), _model(4), replace(MACHINE, shared_memory=True))
    assert amount is not None
    assert amount.alone_s(shared) == 8 / 5.0
    own = amount_of(_op(OpKind.UPDATE, Lane.COMPUTE), _plan(), _model(4), MACHINE)
    assert own is not None
    assert own.alone_s(Rates(MACHINE)) == 8 / 50.0


def test_a_missing_rate_is_an_error_that_names_it_and_only_for_work_that_needs_it() -> None:
    rates = Rates(replace(MACHINE, disk_read_bytes_per_s=0.0))
    assert rates.alone_s(Work.DISK_WRITE, 2) == 1.0
    assert rates.alone_s(Work.DISK_READ, 0) == 0.0
    with pytest.raises(ConfigError, match="disk_read_bytes_per_s=0"):
        rates.alone_s(Work.DISK_READ, 2)


def test_contention_slows_each_kind_by_the_product_over_the_other_kinds() -> None:
    rates = Rates(
        replace(MACHINE, contention={"compute|update": 2.0, "compute|disk": 1.5, "update|compute": 1.25, "copy|disk": 0.5})
    )
    assert rates.speed(Work.COMPUTE, [Work.COMPUTE]) == 1.0
    assert rates.speed(Work.COMPUTE, [Work.COMPUTE, Work.CPU_UPDATE]) == 0.5
    # Reads and writes are one kind; a factor below 1 is none.
    assert rates.speed(Work.COMPUTE, [Work.CPU_UPDATE, Work.DISK_READ, Work.DISK_WRITE]) == pytest.approx(1 / 3)
    assert rates.speed(Work.CPU_UPDATE, [Work.COMPUTE, Work.DISK_READ]) == 140 / 1.25
    assert rates.speed(Work.H2D, [Work.DISK_READ]) == 20.0


def test_copies_both_ways_slow_each_other_beside_other_work() -> None:
    rates = Rates(replace(MACHINE, contention={"copy|copy": 2.0, "copy|update": 1.25}))
    assert rates.speed(Work.H2D, [Work.H2D]) == rates.speed(Work.H2D, []) == 20.0
    assert rates.speed(Work.H2D, [Work.H2D, Work.D2H]) == 20.0 / 2
    assert rates.speed(Work.H2D, [Work.H2D, Work.D2H, Work.CPU_UPDATE]) == 20.0 / 2 / 1.25
    assert rates.speed(Work.DISK_READ, [Work.DISK_READ, Work.DISK_WRITE]) == rates.speed(Work.DISK_READ, [])


def test_contention_beside_all_others_is_never_less_than_beside_one() -> None:
    beside = [Work.CPU_UPDATE, Work.DISK_READ]
    for together, expected in ((2.5, 2.5), (1.2, 2.0)):
        factors = {"compute|update": 2.0, "compute|disk": 1.5, "compute|disk+update": together}
        assert Rates(replace(MACHINE, contention=factors)).speed(Work.COMPUTE, beside) == 1 / expected


def _plan(weights: Tier = Tier.DISK, state: Tier = Tier.DISK) -> Plan:
    return Plan(name="p", blocks=(BlockPlan(name="b", weights=weights, state=state, update=UpdateLane.CPU),))


@pytest.mark.parametrize(
    ("weights", "state", "itemsize", "expected"),
    [
        (Tier.DISK, Tier.DISK, 4, 10 * 4 + 8 * 8),
        (Tier.DISK, Tier.DISK, 2, 10 * 2 + 8 * 12),
        (Tier.HOST, Tier.DISK, 2, 8 * 12),
        (Tier.DISK, Tier.HOST, 4, 10 * 4),
    ],
)
def test_an_update_writes_arrays_on_disk(weights: Tier, state: Tier, itemsize: int, expected: int) -> None:
    plan, model = _plan(weights, state), _model(itemsize)
    assert stored_bytes(BLOCK, plan.blocks[0], model) == expected
    amount = amount_of(_op(OpKind.STORE, Lane.DISK_WRITE, num_bytes=1), plan, model, MACHINE)
    assert amount is not None
    assert (amount.work, amount.units) == (Work.DISK_WRITE, expected)


def test_transfers_are_as_much_work_as_they_move_and_the_rest_is_free() -> None:
    plan, model = _plan(), _model(4)

    def work(kind: OpKind, lane: Lane) -> tuple[Work, float] | None:
        amount = amount_of(_op(kind, lane, num_bytes=30), plan, model, MACHINE)
        return None if amount is None else (amount.work, amount.units)

    assert work(OpKind.FETCH, Lane.DISK_READ) == (Work.DISK_READ, 30)
    assert work(OpKind.UPLOAD, Lane.H2D) == (Work.H2D, 30)
    assert work(OpKind.SWAP_IN, Lane.H2D) == (Work.H2D, 30)
    assert work(OpKind.GRAD, Lane.D2H) == (Work.D2H, 30)
    assert work(OpKind.SWAP_OUT, Lane.DISK_WRITE) == (Work.DISK_WRITE, 30)
    assert work(OpKind.UPDATE, Lane.CPU) == (Work.CPU_UPDATE, 8 * 28)
    assert work(OpKind.RELEASE, Lane.H2D) is None
    commit = _op(OpKind.COMMIT, Lane.DISK_WRITE, block=NO_BLOCK)
    assert amount_of(commit, plan, model, MACHINE) is None


def test_weights_go_up_at_the_link_s_rate_wherever_they_live() -> None:
    upload = _op(OpKind.UPLOAD, Lane.H2D, num_bytes=30)
    for weights in (Tier.DISK, Tier.HOST):
        amount = amount_of(upload, _plan(weights), _model(4), MACHINE)
        assert amount is not None
        assert amount.alone_s(Rates(MACHINE)) == pytest.approx(1.5)


@pytest.mark.parametrize(("world_size", "sent"), [(1, 0.0), (2, 15.0), (3, 20.0)])
def test_in_a_collective_a_device_sends_all_but_its_own_share(world_size: int, sent: float) -> None:
    reduce = _op(OpKind.REDUCE, Lane.NET, num_bytes=30)
    amount = amount_of(reduce, _plan(), _model(4), replace(MACHINE, world_size=world_size))
    assert amount is not None
    assert (amount.work, amount.num_bytes) == (Work.COLLECTIVE, 30)
    assert amount.units == pytest.approx(sent)


def test_backward_takes_longer_by_its_recomputation() -> None:
    assert backward_s(BLOCK, BlockPlan(name="b")) == 2.0
    assert backward_s(BLOCK, BlockPlan(name="b", saved=Saved.RECOMPUTE)) == 3.0
    kept = BlockPlan(name="b", saved=Saved.RECOMPUTE, operators={"mlp": Saved.KEEP})
    assert backward_s(BLOCK, kept) == pytest.approx(2.6)
    only = BlockPlan(name="b", operators={"mlp": Saved.RECOMPUTE})
    assert backward_s(BLOCK, only) == pytest.approx(2.4)
