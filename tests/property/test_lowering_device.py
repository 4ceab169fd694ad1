"""A device with memory of its own: every lowering keeps every invariant, really works, and every
broken schedule is caught.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.machine import Machine

from lightning_hetero.errors import ScheduleError
from lightning_hetero.ir.model import BlockProfile, ModelProfile, OperatorProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import Lane, Op, OpKind, Payload, Phase, Schedule, StepSignature, Updates
from lightning_hetero.lowering import CacheSizes, DeviceRoom, check, lower, needs_of, steady
from lightning_hetero.lowering.needs import Purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    model: ModelProfile
    plan: Plan
    signatures: tuple[StepSignature, ...]
    capacity_bytes: int
    device_capacity_bytes: int

    def lower(self) -> list[Schedule]:
        """All steps, beginning with empty caches."""
        resident, held = frozenset[int](), frozenset[int]()
        schedules: list[Schedule] = []
        for signature in self.signatures:
            device = DeviceRoom(resident=held, capacity_bytes=self.device_capacity_bytes)
            capacity = self.capacity_bytes
            shape = self.model.shape()
            schedules.append(lower(self.plan, shape, signature, resident=resident, capacity_bytes=capacity, device=device))
            resident, held = schedules[-1].resident_after, schedules[-1].device_after
        return schedules

    def check(self, schedule: Schedule) -> None:
        device = self.device_capacity_bytes
        check(schedule, self.plan, self.model.shape(), capacity_bytes=self.capacity_bytes, device_capacity_bytes=device)


@st.composite
def models(draw: st.DrawFn) -> ModelProfile:
    blocks = []
    for index in range(draw(st.integers(1, 6))):
        params = draw(st.integers(1, 9))
        trained = draw(st.sampled_from([0, params, params]) | st.integers(1, params))
        sizes = draw(st.lists(st.integers(0, 9), max_size=3))
        boundary = draw(st.integers(0, 5))
        blocks.append(
            BlockProfile(
                name=f"b{index}",
                num_params=params,
                num_trainable_params=trained,
                forward_s=1.0,
                backward_s=2.0,
                forward_flop=4.0,
                activation_bytes=boundary + sum(sizes) + draw(st.integers(0, 5)),
                boundary_bytes=boundary,
                transient_bytes=draw(st.integers(0, 5)),
                operators=tuple(OperatorProfile(name=f"o{i}", flop=1.0, bytes=size) for i, size in enumerate(sizes)),
                pinned=draw(st.integers(0, 5)) == 0,
            )
        )
    return ModelProfile(
        name="m", tokens=1, compute_itemsize=draw(st.sampled_from([2, 4])), constant_device_bytes=3, constant_host_bytes=5,
        blocks=tuple(blocks), kept_every=draw(st.integers(0, 2)),
    )  # fmt: skip


@st.composite
def block_plans(draw: st.DrawFn, block: BlockProfile) -> BlockPlan:
    memory = [Tier.DEVICE, Tier.HOST]
    update = draw(st.sampled_from(UpdateLane))
    on_device = update is UpdateLane.DEVICE
    saved = draw(st.sampled_from(Saved))
    return BlockPlan(
        name=block.name,
        weights=draw(st.sampled_from(memory if on_device or block.pinned else list(Tier))),
        state=draw(st.sampled_from(memory if on_device else [Tier.HOST, Tier.DISK])),
        update=update,
        saved=saved,
        boundary=draw(st.sampled_from([Saved.KEEP, Saved.SWAP_HOST, Saved.SWAP_DISK])),
        operators={o.name: draw(st.sampled_from(Saved)) for o in block.operators if draw(st.booleans())},
    )


@st.composite
def plans(draw: st.DrawFn, model: ModelProfile) -> Plan:
    return Plan(
        name="p",
        blocks=tuple(draw(block_plans(b)) for b in model.blocks),
        prefetch_depth=draw(st.integers(1, 3)),
        gradient_depth=draw(st.integers(1, 4)),
        update_order=draw(st.sampled_from(UpdateOrder)),
        priority=draw(st.booleans()),
        micro_batches=draw(st.integers(1, 3)),
    )


@st.composite
def capacities(draw: st.DrawFn, model: ModelProfile, plan: Plan, tiers: tuple[Tier, ...]) -> int:
    rows = zip(model.shape().blocks, plan.blocks, strict=True)
    sizes = [b.weight_bytes for b, p in rows if p.weights in tiers]
    return max(sizes, default=0) + draw(st.integers(0, sum(sizes)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    model = draw(models())
    plan = draw(plans(model))
    order = draw(st.permutations(range(len(model.blocks))))
    order = order[: draw(st.integers(1, len(order)))] + draw(st.lists(st.sampled_from(order), max_size=3))
    signatures = []
    for _ in range(draw(st.integers(1, 4))):
        training = draw(st.integers(0, 4)) > 0
        updates = draw(st.sampled_from(Updates)) if training else Updates.NONE
        signatures.append(StepSignature(order=tuple(order), training=training, updates=updates))
    return Case(
        model=model,
        plan=plan,
        signatures=tuple(signatures),
        capacity_bytes=draw(capacities(model, plan, (Tier.DISK,))),
        device_capacity_bytes=draw(capacities(model, plan, (Tier.HOST, Tier.DISK))),
    )


@given(cases())
def test_every_lowering_passes_the_check(case: Case) -> None:
    for schedule in case.lower():
        case.check(schedule)


@given(cases(), st.integers(0, 2**32))
def test_every_order_that_a_schedule_allows_computes_with_the_right_bytes(case: Case, seed: int) -> None:
    machine = Machine(case.plan, case.model, case.lower(), seed=seed)
    machine.run()
    assert machine.peak_device_cache <= case.device_capacity_bytes
    assert machine.peak_host_cache <= case.capacity_bytes


@given(cases())
def test_schedules_are_equal_up_to_the_verdict(case: Case) -> None:
    """The runtime begins with one schedule and goes over to the other."""
    kept, redone = (
        replace(case, signatures=(replace(case.signatures[0], training=True, updates=updates),)).lower()[0]
        for updates in (Updates.SPECULATIVE, Updates.REDONE)
    )
    verdict = len(kept.anchors) - 1
    assert kept.anchors == redone.anchors
    assert [op for op in kept.ops if op.at < verdict] == [op for op in redone.ops if op.at < verdict]
    again = [op.block for op in redone.ops if op.kind is OpKind.UPDATE and op.at == verdict]
    assert again == [b for b in dict.fromkeys(redone.signature.order) if case.model.blocks[b].num_trainable_params]
    assert (kept.resident_after, kept.device_after) == (redone.resident_after, redone.device_after)


@given(cases())
def test_lowering_is_deterministic(case: Case) -> None:
    assert [s.to_text() for s in case.lower()] == [s.to_text() for s in case.lower()]


@given(st.data(), st.integers(0, 2**32))
def test_memory_in_use_never_exceeds_the_plans_needs(data: st.DataObject, seed: int) -> None:
    model = data.draw(models())
    plan = data.draw(plans(model))
    updates = data.draw(st.sampled_from([u for u in Updates if u is not Updates.NONE]))
    sizes = CacheSizes(
        host_cache_bytes=data.draw(capacities(model, plan, (Tier.DISK,))),
        device_cache_bytes=data.draw(capacities(model, plan, (Tier.HOST, Tier.DISK))),
        staging_bytes=0,
    )
    step = StepSignature(order=tuple(range(len(model.blocks))), training=True, updates=updates)
    micro = (replace(step, updates=Updates.NONE),) * (plan.micro_batches - 1) + (step,)
    case = Case(
        model=model,
        plan=plan,
        signatures=micro * 2,
        capacity_bytes=sizes.host_cache_bytes,
        device_capacity_bytes=sizes.device_cache_bytes or 0,
    )
    machine = Machine(plan, model, case.lower(), seed=seed)
    machine.run()
    needs = needs_of(plan, model, shared_memory=False, updates=updates)
    moving = (Purpose.ACTIVATIONS, Purpose.GRADIENTS, Purpose.MOVING)
    assert machine.peak_device <= sum(needs.device.get(p, 0) for p in moving)
    assert machine.peak_host <= sum(needs.host.get(p, 0) for p in moving)


@given(st.data())
def test_steady_steps_begin_with_the_state_of_the_previous_step(data: st.DataObject) -> None:
    model = data.draw(models())
    plan = data.draw(plans(model))
    sizes = CacheSizes(
        host_cache_bytes=data.draw(capacities(model, plan, (Tier.DISK,))),
        device_cache_bytes=data.draw(capacities(model, plan, (Tier.HOST, Tier.DISK))),
        staging_bytes=0,
    )
    schedules = steady(plan, model.shape(), sizes=sizes)
    assert len(schedules) == plan.micro_batches
    for before, after in zip((schedules[-1], *schedules), schedules, strict=False):
        assert (after.resident_before, after.device_before) == (before.resident_after, before.device_after)


# ---- broken schedules ----------------------------------------------------------------------------


def _reach(schedule: Schedule) -> list[frozenset[int]]:
    """What every op waits for, directly or not."""
    reach: list[frozenset[int]] = []
    for op in schedule.ops:
        reach.append(frozenset(op.after).union(*(reach[i] for i in op.after)))
    return reach


def _with_op(schedule: Schedule, op: Op) -> Schedule:
    return replace(schedule, ops=tuple(op if o.id == op.id else o for o in schedule.ops))


def _removed(schedule: Schedule, index: int) -> Schedule:
    """The schedule without one op: ids close up, and what waited for it waits for what it waited
    for.
    """

    def moved(ids: tuple[int, ...]) -> tuple[int, ...]:
        bridged = {j for i in ids for j in (schedule.ops[i].after if i == index else (i,))}
        return tuple(sorted(i - (i > index) for i in bridged))

    ops = [replace(o, id=o.id - (o.id > index), after=moved(o.after)) for o in schedule.ops if o.id != index]
    anchors = [replace(a, needs=moved(a.needs)) for a in schedule.anchors]
    return replace(schedule, ops=tuple(ops), anchors=tuple(anchors))


def _drawn(case: Case, data: st.DataObject) -> Schedule:
    return data.draw(st.sampled_from(case.lower()))


@given(cases(), st.data())
def test_a_removed_op_is_caught(case: Case, data: st.DataObject) -> None:
    schedule = _drawn(case, data)
    removable = [op.id for op in schedule.ops]
    assume(removable)
    with pytest.raises(ScheduleError):
        case.check(_removed(schedule, data.draw(st.sampled_from(removable))))


def _is_needed(schedule: Schedule, op: Op, edge: int) -> bool:
    """Whether an edge is one that the op needs; that RELEASEs follow each other only serves the ops
    behind them.
    """
    other = schedule.ops[edge]
    return not (op.kind is other.kind is OpKind.RELEASE and op.block != other.block)


@given(cases(), st.data())
def test_a_dropped_edge_is_caught(case: Case, data: st.DataObject) -> None:
    schedule = _drawn(case, data)
    edges = [(op, i) for op in schedule.ops for i in op.after if _is_needed(schedule, op, i)]
    assume(edges)
    op, edge = data.draw(st.sampled_from(edges))
    broken = _with_op(schedule, replace(op, after=tuple(i for i in op.after if i != edge)))
    assume(edge not in _reach(broken)[op.id])  # an edge that others imply changes nothing
    with pytest.raises(ScheduleError):
        case.check(broken)


@given(cases(), st.data())
def test_a_dropped_carried_edge_is_caught(case: Case, data: st.DataObject) -> None:
    schedule = _drawn(case, data)
    edges = [(op, edge) for op in schedule.ops for edge in op.carried]
    assume(edges)
    op, edge = data.draw(st.sampled_from(edges))
    with pytest.raises(ScheduleError, match="before"):
        case.check(_with_op(schedule, replace(op, carried=tuple(e for e in op.carried if e != edge))))


@given(cases(), st.data())
def test_an_anchor_that_stops_waiting_is_caught(case: Case, data: st.DataObject) -> None:
    schedule = _drawn(case, data)
    reach = _reach(schedule)
    waited: set[int] = set()
    waits = []
    for index, anchor in enumerate(schedule.anchors):
        waits += [(index, i) for i in anchor.needs if i not in waited]
        waited.update(*(reach[i] | {i} for i in anchor.needs))
    assume(waits)
    index, dropped = data.draw(st.sampled_from(waits))
    anchors = list(schedule.anchors)
    others = [i for i in anchors[index].needs if i != dropped]
    assume(not any(dropped in reach[i] for i in others))
    anchors[index] = replace(anchors[index], needs=tuple(others))
    with pytest.raises(ScheduleError):
        case.check(replace(schedule, anchors=tuple(anchors)))


@given(cases(), st.data())
def test_an_op_on_another_lane_or_with_other_bytes_is_caught(case: Case, data: st.DataObject) -> None:
    schedule = _drawn(case, data)
    ops = [op for op in schedule.ops if op.kind is not OpKind.COMMIT]
    assume(ops)
    op = data.draw(st.sampled_from(ops))
    other = data.draw(st.sampled_from([lane for lane in Lane if lane is not op.lane]))
    changed = data.draw(st.sampled_from([replace(op, lane=other), replace(op, num_bytes=op.num_bytes + 1)]))
    with pytest.raises(ScheduleError):
        case.check(_with_op(schedule, changed))


@given(cases(), st.data())
def test_an_op_issued_twice_is_caught(case: Case, data: st.DataObject) -> None:
    schedule = _drawn(case, data)
    assume(schedule.ops)
    again = data.draw(st.sampled_from(schedule.ops))
    at, number = len(schedule.anchors) - 1, len(schedule.ops)
    again = replace(again, id=number, at=at, after=tuple(range(number)))
    with pytest.raises(ScheduleError):
        case.check(replace(schedule, ops=(*schedule.ops, again)))


@given(cases())
def test_a_smaller_device_is_caught(case: Case) -> None:
    uploads = [
        (schedule, op.num_bytes)
        for schedule in case.lower()
        for op in schedule.ops
        if op.kind is OpKind.UPLOAD and case.plan.blocks[op.block].weights is not Tier.DEVICE
    ]
    assume(uploads)
    schedule, size = max(uploads, key=lambda row: row[1])
    with pytest.raises(ScheduleError, match="capacity"):
        replace(case, device_capacity_bytes=size - 1).check(schedule)


MUTATIONS: dict[str, Callable[[Schedule], Schedule]] = {
    "another end": lambda s: replace(s, device_after=s.device_after ^ {0}),
    "another beginning": lambda s: replace(s, device_before=s.device_before ^ {s.signature.order[0]}),
    "a collective": lambda s: _with_op(s, replace(s.ops[0], kind=OpKind.REDUCE)),
    "an op of a block that is not there": lambda s: _with_op(s, replace(s.ops[0], block=99)),
    "a backward less": lambda s: replace(s, anchors=s.anchors[:-1]),
    "gradients of weights": lambda s: _with_op(s, replace(s.ops[0], kind=OpKind.GRAD, payload=Payload.WEIGHTS)),
    "a forward again": lambda s: replace(s, anchors=(*s.anchors, replace(s.anchors[0], phase=Phase.FORWARD))),
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
@given(case=cases(), data=st.data())
def test_malformed_schedules_are_caught(mutation: Callable[[Schedule], Schedule], case: Case, data: st.DataObject) -> None:
    schedule = _drawn(case, data)
    assume(schedule.ops)
    with pytest.raises(ScheduleError):
        case.check(mutation(schedule))
