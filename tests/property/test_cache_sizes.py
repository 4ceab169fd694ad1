"""Random plans on random machines: a plan whose caches fit does fit by the simulator's count;
others are refused.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.errors import PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile, OperatorProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.lowering import CacheSizes, Purpose, cache_sizes, check, needs_of, steady, step_signatures
from lightning_hetero.lowering.needs import total_bytes
from lightning_hetero.sim import simulate

MACHINE = HardwareProfile(
    name="box",
    device_memory_bytes=0,
    host_memory_bytes=0,
    disk_capacity_bytes=10**12,
    device_flop_per_s=1.0,
    link_h2d_bytes_per_s=7.0,
    link_d2h_bytes_per_s=5.0,
    disk_read_bytes_per_s=3e6,
    disk_write_bytes_per_s=2e6,
    disk_duplex=False,
    host_dram_bytes_per_s=1e9,
    cpu_update_params_per_s=3.0,
    device_update_params_per_s=20.0,
    cpu_downcast_params_per_s=0.0,
)


@st.composite
def models(draw: st.DrawFn) -> ModelProfile:
    blocks = []
    for index in range(draw(st.integers(1, 5))):
        params, boundary = draw(st.integers(1, 9)), draw(st.integers(0, 5))
        trained = draw(st.sampled_from([0, params, params]) | st.integers(1, params))
        operator = draw(st.integers(0, 9))
        blocks.append(
            BlockProfile(
                name=f"b{index}",
                num_params=params,
                num_trainable_params=trained,
                forward_s=draw(st.floats(0.1, 3)),
                backward_s=draw(st.floats(0.1, 3)),
                forward_flop=4.0,
                activation_bytes=boundary + operator + draw(st.integers(0, 5)),
                boundary_bytes=boundary,
                transient_bytes=draw(st.integers(0, 5)),
                operators=(OperatorProfile(name="o", flop=1.0, bytes=operator),),
                pinned=draw(st.integers(0, 5)) == 0,
            )
        )
    itemsize = draw(st.sampled_from([2, 4]))
    return ModelProfile(
        name="m", tokens=1, compute_itemsize=itemsize, constant_device_bytes=3, constant_host_bytes=5, blocks=tuple(blocks),
        kept_every=draw(st.integers(0, 2)),
    )  # fmt: skip


@st.composite
def plans(draw: st.DrawFn, model: ModelProfile, *, shared: bool) -> Plan:
    rows = []
    for block in model.blocks:
        update = draw(st.sampled_from(UpdateLane))
        on_device = update is UpdateLane.DEVICE
        memory = [Tier.DEVICE, Tier.HOST]
        rows.append(
            BlockPlan(
                name=block.name,
                update=update,
                weights=draw(st.sampled_from(memory if on_device or block.pinned else list(Tier))),
                state=draw(st.sampled_from(memory if on_device else [Tier.HOST, Tier.DISK])),
                saved=Saved.KEEP if shared else draw(st.sampled_from(Saved)),
                boundary=Saved.KEEP if shared else draw(st.sampled_from([Saved.KEEP, Saved.SWAP_HOST, Saved.SWAP_DISK])),
                operators={} if shared else {"o": draw(st.sampled_from(Saved))},
            )
        )
    return Plan(
        name="p",
        blocks=tuple(rows),
        prefetch_depth=draw(st.integers(1, 3)),
        gradient_depth=draw(st.integers(1, 4)),
        update_order=draw(st.sampled_from(UpdateOrder)),
        priority=draw(st.booleans()),
        micro_batches=1 if shared else draw(st.integers(1, 3)),
    )


@pytest.mark.parametrize("shared", [False, True], ids=["device", "shared memory"])
@given(data=st.data())
def test_a_plan_within_its_room_fits_the_machine(shared: bool, data: st.DataObject) -> None:
    model = data.draw(models())
    plan = data.draw(plans(model, shared=shared))
    updates = data.draw(st.sampled_from([u for u in Updates if u is not Updates.NONE]))
    needs = needs_of(plan, model, shared_memory=shared, updates=updates)
    spare = data.draw(st.integers(0, 100))
    machine = replace(
        MACHINE,
        shared_memory=shared,
        device_memory_bytes=total_bytes(needs.device) + max(needs.device_caches, default=0) + spare,
        host_memory_bytes=total_bytes(needs.host) + max(needs.host_caches, default=0) + spare,
    )
    space = cache_sizes(plan, model, machine, updates=updates)
    schedules = steady(plan, model.shape(), step_signatures(plan, updates=updates), sizes=space)
    for schedule in schedules:
        device = space.device_cache_bytes
        check(schedule, plan, model.shape(), capacity_bytes=space.host_cache_bytes, device_capacity_bytes=device)
    predicted = simulate(schedules, plan, model, machine, sizes=space).prediction
    assert predicted.host_peak_bytes <= machine.host_memory_bytes
    assert shared or predicted.device_peak_bytes <= machine.device_memory_bytes


@given(st.data())
def test_one_memory_holds_what_device_and_host_take_together(data: st.DataObject) -> None:
    model = data.draw(models())
    plan = data.draw(plans(model, shared=False))
    caches = st.none() | st.integers(0, 60)
    plan = replace(plan, device_cache_bytes=data.draw(caches), host_cache_bytes=data.draw(caches))
    updates = data.draw(st.sampled_from([u for u in Updates if u is not Updates.NONE]))
    needs = needs_of(plan, model, shared_memory=False, updates=updates)
    given_away = (
        min(plan.device_cache_bytes or 0, sum(needs.device_caches)),
        min(plan.host_cache_bytes or 0, sum(needs.host_caches)),
    )
    device, host = (
        total_bytes(rows) + max(cache, *caches, 0)
        for rows, cache, caches in zip(
            (needs.device, needs.host), given_away, (needs.device_caches, needs.host_caches), strict=True
        )
    )  # fmt: skip
    spare = data.draw(st.integers(0, 100))
    memory = device + host + spare
    most = data.draw(st.integers(device, memory))
    machine = replace(MACHINE, unified_memory=True, device_memory_bytes=most, host_memory_bytes=memory)
    space = cache_sizes(plan, model, machine, updates=updates)
    assert space.device_cache_bytes is not None
    on_device = total_bytes(needs.device) + space.device_cache_bytes
    on_host = total_bytes(needs.host) - needs.host[Purpose.STAGING] + space.staging_bytes + space.host_cache_bytes
    assert on_device <= most
    assert on_device + on_host <= memory
    schedules = steady(plan, model.shape(), step_signatures(plan, updates=updates), sizes=space)
    predicted = simulate(schedules, plan, model, machine, sizes=space).prediction
    assert predicted.device_peak_bytes + predicted.host_peak_bytes <= memory
    with pytest.raises(PlanError) as caught:
        cache_sizes(plan, model, replace(machine, host_memory_bytes=device + host - 1), updates=updates)
    assert (caught.value.tier, caught.value.shortfall_bytes) == ("host", 1)
    if device:
        with pytest.raises(PlanError) as caught:
            cache_sizes(plan, model, replace(machine, device_memory_bytes=device - 1), updates=updates)
        assert (caught.value.tier, caught.value.shortfall_bytes) == ("device", 1)


@given(st.data())
def test_a_byte_less_than_the_least_is_refused(data: st.DataObject) -> None:
    model = data.draw(models())
    plan = data.draw(plans(model, shared=False))
    needs = needs_of(plan, model, shared_memory=False)
    least = {
        "device": total_bytes(needs.device) + max(needs.device_caches, default=0),
        "host": total_bytes(needs.host) + max(needs.host_caches, default=0),
    }
    machine = replace(MACHINE, device_memory_bytes=least["device"], host_memory_bytes=least["host"])
    assert isinstance(cache_sizes(plan, model, machine), CacheSizes)
    tier = data.draw(st.sampled_from(sorted(least)))
    with pytest.raises(PlanError) as caught:
        cache_sizes(plan, model, replace(machine, **{f"{tier}_memory_bytes": least[tier] - 1}))
    assert (caught.value.tier, caught.value.shortfall_bytes) == (tier, 1)
