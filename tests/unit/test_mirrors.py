"""What keeping every step costs where state lives in memory: in the schedule, its proof, the
simulator and the planners' choice.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.machines import MB, ROOMY

from lightning_hetero.errors import PlanError, ScheduleError
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier, UpdateLane
from lightning_hetero.ir.schedule import Lane, Op, OpKind, Payload, Schedule, StepSignature, Updates, urgency
from lightning_hetero.lowering import DeviceRoom, check, lower
from lightning_hetero.planners import PLANNERS, disk, host, resident
from lightning_hetero.planners.evaluation import evaluated, simulation
from lightning_hetero.sim.simulation import disk_bytes
from lightning_hetero.store.live.mirror_writes import write_mirrors
from lightning_hetero.store.live.mirrors import STATE, WEIGHTS

OWN_CPU = replace(ROOMY, name="cpu", shared_memory=True, disk_read_bytes_per_s=1e9, disk_write_bytes_per_s=1e9)
LAYERS, PARAMS = 4, 5 * MB


def _block(name: str, *, trainable: bool = True) -> BlockProfile:
    return BlockProfile(
        name=name, num_params=PARAMS, num_trainable_params=PARAMS * trainable, forward_flop=1e9, forward_s=0.01, backward_s=0.03,
        activation_bytes=MB, boundary_bytes=MB, transient_bytes=MB,
    )  # fmt: skip


KEPT = ModelProfile(
    name="m", tokens=1, compute_itemsize=4, constant_device_bytes=0, constant_host_bytes=0, kept_every=1,
    blocks=(_block("frozen", trainable=False), *(_block(f"layers.{i}") for i in range(LAYERS))),
)  # fmt: skip
FREE = replace(KEPT, kept_every=0)
STEP = StepSignature(order=tuple(range(LAYERS + 1)), training=True, updates=Updates.IN_BACKWARD)
STATE_ON_DISK = Plan(name="state", blocks=(BlockPlan(name="*", state=Tier.DISK),))


@pytest.mark.parametrize("updates", [Updates.IN_BACKWARD, Updates.AFTER_VERDICT, Updates.SPECULATIVE, Updates.REDONE])
@pytest.mark.parametrize(("plan", "size"), [("host", 12), ("resident", 12), ("state", 4), ("disk", 0)])
def test_a_kept_step_writes_mirrors_before_its_record(plan: str, size: int, updates: Updates) -> None:
    shape = KEPT.shape()
    made = {"host": host(shape), "resident": resident(shape), "disk": disk(shape)}.get(plan, STATE_ON_DISK)
    resolved = made.resolve(b.name for b in shape.blocks)
    signature, room = replace(STEP, updates=updates), 8 * PARAMS
    schedule = lower(resolved, shape, signature, resident=frozenset(), capacity_bytes=room)
    check(schedule, resolved, shape, capacity_bytes=room)
    mirrors = [op for op in schedule.ops if op.kind is OpKind.MIRROR]
    assert [op.block for op in mirrors] == (list(range(1, LAYERS + 1)) if size else [])
    assert all(op.num_bytes == size * PARAMS for op in mirrors)
    assert schedule.ops[-1].kind is OpKind.COMMIT
    assert {op.id for op in mirrors} <= set(schedule.ops[-1].after)
    for op in schedule.ops:
        if op.kind is OpKind.UPDATE and size:
            assert (OpKind.MIRROR, op.block) in op.carried


def test_a_schedule_that_writes_over_a_mirror_in_progress_is_refused() -> None:
    shape = KEPT.shape()
    plan = host(shape)
    schedule = lower(plan, shape, STEP, resident=frozenset(), capacity_bytes=0)
    update = next(op for op in schedule.ops if op.kind is OpKind.UPDATE)
    mirror = next(op for op in schedule.ops if op.kind is OpKind.MIRROR)
    for broken, what in (
        (replace(update, carried=()), "MIRROR of the step before"),
        (replace(mirror, num_bytes=1), "to keep"),
        (replace(mirror, carried=()), "COMMIT of the step before"),
        (replace(schedule.ops[-1], after=()), "every STORE and MIRROR"),
    ):
        ops = tuple(broken if op.id == broken.id else op for op in schedule.ops)
        with pytest.raises(ScheduleError, match=what):
            check(replace(schedule, ops=ops), plan, shape, capacity_bytes=0)
    less = tuple(op for op in schedule.ops if op.kind not in (OpKind.MIRROR, OpKind.COMMIT))
    with pytest.raises(ScheduleError, match="is not kept"):
        check(replace(schedule, ops=less), plan, shape, capacity_bytes=0)


@pytest.mark.parametrize("lowest_first", [False, True])
def test_a_mirror_goes_before_all_that_may_start_beside_it(lowest_first: bool) -> None:
    mirror = urgency(OpKind.MIRROR, Payload.STATE, LAYERS, lowest_first=lowest_first)
    others = (urgency(k, p, 0, lowest_first=lowest_first) for k in OpKind for p in Payload if k is not OpKind.MIRROR)
    assert mirror < min(others)  # the record, and so the next step's update, wait for it


def test_the_engine_writes_mirrors_with_the_urgency_that_the_simulator_gives_them() -> None:
    taken: list[int] = []
    engine = SimpleNamespace(store=lambda *_, priority, **__: taken.append(priority))
    files = SimpleNamespace(step=1, before_write=lambda: None)
    store = SimpleNamespace(engine=engine, files=files, unrecorded=SimpleNamespace(mirrored=False))
    part: Any = SimpleNamespace(
        slots=2,
        mirrors={WEIGHTS: SimpleNamespace(native=None), STATE: SimpleNamespace(native=None)},
        mirrored_versions=-1, params=[], updated=None, stepped=True, moved={}, num_moves=0, is_lent=False,
    )  # fmt: skip
    write_mirrors(store, part)  # type: ignore[arg-type]
    assert taken == [urgency(OpKind.MIRROR, Payload.STATE, 3, lowest_first=True)] * 2


def test_the_simulator_writes_them_and_counts_their_space() -> None:
    shape = KEPT.shape()
    plan = host(shape)
    kept, free = (simulation(plan, model, OWN_CPU, keep_trace=True) for model in (KEPT, FREE))
    step = max(s.step for s in kept.trace.spans) - 1
    spans = [s for s in kept.trace.spans if s.step == step and s.name.startswith("MIRROR ")]
    assert sum(s.num_bytes for s in spans) == 12 * PARAMS * LAYERS
    seconds = sum(s.end_s - s.start_s for s in spans)
    assert seconds >= 12 * PARAMS * LAYERS / OWN_CPU.disk_write_bytes_per_s * (1 - 1e-6)
    assert kept.prediction.iteration_s >= max(free.prediction.iteration_s, seconds * (1 - 1e-6))
    assert kept.prediction.disk_bytes - free.prediction.disk_bytes == (2 * 12 * LAYERS + 4) * PARAMS
    on_disk = disk(shape)
    assert disk_bytes(on_disk, KEPT, kept_every=1) == disk_bytes(on_disk, FREE), "what lives on disk has its slots there"


def test_a_step_in_so_many_costs_a_share_and_a_third_slot() -> None:
    plan, model = host(KEPT.shape()), replace(KEPT, kept_every=10)
    free, kept = (simulation(plan, m, OWN_CPU).prediction for m in (FREE, model))
    assert kept.iteration_s - free.iteration_s == pytest.approx(12 * PARAMS * LAYERS / OWN_CPU.disk_write_bytes_per_s / 10)
    assert kept.disk_bytes == (3 * 12 * LAYERS + 4) * PARAMS
    on_disk = simulation(disk(KEPT.shape()), model, OWN_CPU).prediction
    assert on_disk.iteration_s == simulation(disk(FREE.shape()), FREE, OWN_CPU).prediction.iteration_s
    small = replace(OWN_CPU, disk_capacity_bytes=kept.disk_bytes - PARAMS)
    with pytest.raises(PlanError, match="copies of what lives in memory"):
        evaluated(plan, model, small)
    evaluated(plan, KEPT, small)


def test_a_disk_without_room_for_them_is_named() -> None:
    small = replace(OWN_CPU, disk_capacity_bytes=20 * PARAMS * LAYERS)
    evaluated(host(FREE.shape()), FREE, small)
    with pytest.raises(PlanError, match="copies of what lives in memory") as refusal:
        evaluated(host(KEPT.shape()), KEPT, small)
    assert 'durability="none"' in str(refusal.value)


def test_auto_considers_the_cost_of_keeping() -> None:
    """Updates during backward wait for the mirrors of the step before; those after it leave them
    all of forward and backward.
    """
    free, kept = (PLANNERS["holistic"](model, OWN_CPU) for model in (FREE, KEPT))
    seconds = {
        (make, bool(model.kept_every)): simulation(make(model.shape()), model, OWN_CPU).prediction.iteration_s
        for make in (host, resident, disk)
        for model in (FREE, KEPT)
    }
    assert seconds[host, False] < seconds[resident, False]
    assert seconds[resident, True] < seconds[host, True]
    assert {b.update for b in free.blocks[1:]} == {UpdateLane.CPU}
    assert {b.update for b in kept.blocks[1:]} == {UpdateLane.DEVICE}
    assert kept.predicted is not None
    assert kept.predicted.iteration_s == pytest.approx(min(seconds[make, True] for make in (host, resident, disk)))


# ---- a device with memory of its own -------------------------------------------------------------


GPU = replace(
    OWN_CPU, shared_memory=False, device_memory_bytes=1 << 30, link_h2d_bytes_per_s=1e9, link_d2h_bytes_per_s=1e9,
    device_update_params_per_s=1e9,
)  # fmt: skip
RULES = {  # what a kept step writes per parameter, and what of that passes through host memory
    "cpu": (BlockPlan(name="*"), 12, 0),
    "cpu, weights on the device": (BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.HOST, update=UpdateLane.CPU), 12, 0),
    "cpu, state on disk": (BlockPlan(name="*", state=Tier.DISK), 4, 0),
    "cpu, all on disk": (BlockPlan(name="*", weights=Tier.DISK, state=Tier.DISK), 0, 0),
    "device": (BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE), 12, 12),
    "device, state below": (BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.HOST, update=UpdateLane.DEVICE), 12, 4),
    "device, weights below": (BlockPlan(name="*", weights=Tier.HOST, state=Tier.DEVICE, update=UpdateLane.DEVICE), 12, 8),
}


def on_gpu(model: ModelProfile, rule: BlockPlan, updates: Updates, **options: Any) -> tuple[Plan, Schedule]:
    plan = Plan(name="p", blocks=(rule,), **options).resolve(b.name for b in model.blocks)
    room = DeviceRoom(resident=frozenset(), capacity_bytes=8 * PARAMS)
    schedule = lower(
        plan, model.shape(), replace(STEP, updates=updates), resident=frozenset(), capacity_bytes=8 * PARAMS, device=room
    )
    check(schedule, plan, model.shape(), capacity_bytes=8 * PARAMS, device_capacity_bytes=8 * PARAMS)
    return plan, schedule


@pytest.mark.parametrize("priority", [True, False])
@pytest.mark.parametrize("updates", [Updates.IN_BACKWARD, Updates.AFTER_VERDICT, Updates.SPECULATIVE, Updates.REDONE])
@pytest.mark.parametrize("name", RULES)
def test_a_device_s_kept_step_has_its_mirrors_and_its_commit(name: str, updates: Updates, priority: bool) -> None:
    rule, size, lent = RULES[name]
    plan, schedule = on_gpu(KEPT, rule, updates, priority=priority)
    found = {lane: [op for op in schedule.ops if op.kind is OpKind.MIRROR and op.lane is lane] for lane in Lane}
    trained = list(range(1, LAYERS + 1))
    for lane, expected in ((Lane.DISK_WRITE, size), (Lane.D2H, lent)):
        assert [(op.block, op.num_bytes) for op in found[lane]] == [(b, expected * PARAMS) for b in trained if expected]
    assert schedule.ops[-1].kind is OpKind.COMMIT
    assert {op.id for op in found[Lane.DISK_WRITE]} <= set(schedule.ops[-1].after)
    on_device = {(OpKind.MIRROR, b) for b in trained if plan.blocks[b].update is UpdateLane.DEVICE}
    assert on_device <= set(schedule.anchors[0].carried), "the next batch waits until what the device has updated is mirrored"
    _, free = on_gpu(FREE, rule, updates, priority=priority)
    rest = [op for op in schedule.ops if op.kind not in (OpKind.MIRROR, OpKind.COMMIT)]
    others = [op for op in free.ops if op.kind is not OpKind.COMMIT]
    assert [(op.kind, op.block, op.lane, op.at, op.num_bytes) for op in rest] == [
        (op.kind, op.block, op.lane, op.at, op.num_bytes) for op in others
    ], "nothing else changes"


def test_a_device_s_schedule_that_leaves_a_mirror_out_is_refused() -> None:
    plan, schedule = on_gpu(KEPT, RULES["device"][0], Updates.AFTER_VERDICT)
    shape = KEPT.shape()

    def refused(what: str, changed: Schedule) -> None:
        with pytest.raises(ScheduleError, match=what):
            check(changed, plan, shape, capacity_bytes=8 * PARAMS, device_capacity_bytes=8 * PARAMS)

    def with_op(op: Op) -> Schedule:
        return replace(schedule, ops=tuple(op if other.id == op.id else other for other in schedule.ops))

    down = [op for op in schedule.ops if (op.kind, op.lane) == (OpKind.MIRROR, Lane.D2H)]
    refused("has 60000000 B alone", with_op(replace(down[0], num_bytes=1)))
    refused("whose place it takes", with_op(replace(down[1], after=tuple(i for i in down[1].after if i != down[1].id - 1))))
    first = replace(schedule.anchors[0], carried=())
    refused("does not wait for its MIRROR", replace(schedule, anchors=(first, *schedule.anchors[1:])))


@pytest.mark.parametrize("name", ["cpu", "device"])
def test_the_simulator_and_the_disk_s_account_see_a_device_s_mirrors(name: str) -> None:
    rule, size, lent = RULES[name]
    plan = Plan(name="p", blocks=(rule,)).resolve(b.name for b in KEPT.blocks)
    kept, free = (simulation(plan, model, GPU, keep_trace=True) for model in (KEPT, FREE))
    step = max(s.step for s in kept.trace.spans) - 1
    spans = [s for s in kept.trace.spans if s.step == step and s.name.startswith("MIRROR ")]
    assert sum(s.num_bytes for s in spans if s.lane == "disk_write") == size * PARAMS * LAYERS
    assert sum(s.num_bytes for s in spans if s.lane == "d2h") == lent * PARAMS * LAYERS
    written = size * PARAMS * LAYERS / GPU.disk_write_bytes_per_s
    assert kept.prediction.iteration_s >= written * (1 - 1e-6)
    if lent:  # the next batch waits for all of it
        down = lent * PARAMS * LAYERS / GPU.link_d2h_bytes_per_s
        assert kept.prediction.iteration_s >= (free.prediction.iteration_s + written + down / 2) * (1 - 1e-3)
    assert kept.prediction.disk_bytes - free.prediction.disk_bytes == (2 * 12 * LAYERS + 4) * PARAMS
    with pytest.raises(PlanError, match="copies of what lives in memory"):
        evaluated(plan, KEPT, replace(GPU, disk_capacity_bytes=20 * PARAMS * LAYERS))
    seldom = simulation(plan, replace(KEPT, kept_every=10), GPU).prediction
    assert seldom.iteration_s - free.prediction.iteration_s == pytest.approx(
        (written + lent * PARAMS * LAYERS / GPU.link_d2h_bytes_per_s) / 10
    )
