"""Every lowering keeps every invariant, and every broken schedule is caught."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_hetero.errors import ScheduleError
from lightning_hetero.ir.model import BlockShape, ModelShape
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import NO_BLOCK, Op, OpKind, Payload, Schedule, StepSignature, Updates
from lightning_hetero.lowering import check, lower

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    model: ModelShape
    plan: Plan
    signature: StepSignature
    resident: frozenset[int]
    capacity_bytes: int

    def lower(self) -> Schedule:
        return lower(self.plan, self.model, self.signature, resident=self.resident, capacity_bytes=self.capacity_bytes)

    def check(self, schedule: Schedule) -> None:
        check(schedule, self.plan, self.model, capacity_bytes=self.capacity_bytes)


@st.composite
def block_plans(draw: st.DrawFn, name: str, *, pinned: bool = False) -> BlockPlan:
    memory = [Tier.DEVICE, Tier.HOST]
    update = draw(st.sampled_from(UpdateLane))
    on_device = update is UpdateLane.DEVICE
    return BlockPlan(
        name=name,
        weights=draw(st.sampled_from(memory if on_device or pinned else list(Tier))),
        state=draw(st.sampled_from(memory if on_device else list(Tier))),
        update=update,
    )


@st.composite
def models(draw: st.DrawFn, *, unpinned: int = 0) -> ModelShape:
    """The first ``unpinned`` blocks are there, and not pinned."""
    blocks = []
    for index in range(draw(st.integers(max(1, unpinned), 7))):
        weight_bytes = draw(st.integers(1, 9))
        trained = draw(st.sampled_from([0, weight_bytes, weight_bytes]) | st.integers(1, weight_bytes))
        blocks.append(
            BlockShape(
                name=f"b{index}",
                num_params=weight_bytes,
                num_trainable_params=trained,
                weight_bytes=weight_bytes,
                gradient_bytes=trained,
                state_bytes=2 * trained,
                pinned=index >= unpinned and draw(st.integers(0, 5)) == 0,
            )
        )
    return ModelShape(name="m", blocks=tuple(blocks), kept_every=draw(st.integers(0, 1)))


@st.composite
def cases(draw: st.DrawFn, *, disk_only: bool = False, tight: bool = False) -> Case:
    """``tight``: blocks on disk that do not fit memory together are used, so weights are fetched
    and released.
    """
    disk_only, always = disk_only or tight, range(2 if tight else 0)
    model = draw(models(unpinned=len(always)))
    rows = []
    for block in model.blocks:
        row = draw(block_plans(block.name, pinned=block.pinned))
        if disk_only and not block.pinned:
            row = BlockPlan(name=block.name, weights=Tier.DISK, state=row.state, update=UpdateLane.CPU)
        rows.append(row)
    plan = Plan(
        name="p",
        blocks=tuple(rows),
        prefetch_depth=draw(st.integers(1, 4)),
        gradient_depth=draw(st.integers(1, 4)),
        update_order=draw(st.sampled_from(UpdateOrder)),
        priority=draw(st.booleans()),
    )
    order = draw(st.permutations(range(len(rows))))
    used = {*order[: draw(st.integers(1, len(order)))], *always}
    order = [block for block in order if block in used]
    order += draw(st.lists(st.sampled_from(order), max_size=3))
    training = draw(st.integers(0, 4)) > 0
    signature = StepSignature(
        order=tuple(order), training=training, updates=draw(st.sampled_from(Updates)) if training else Updates.NONE
    )
    sizes = {i: b.weight_bytes for i, b in enumerate(model.blocks) if rows[i].weights is Tier.DISK}
    largest = max(sizes.values(), default=0)
    spare = sum(size for block, size in sizes.items() if block in used) - largest - 1 if tight else sum(sizes.values())
    capacity = largest + draw(st.integers(0, max(0, spare)))
    resident: set[int] = set()
    for block in draw(st.permutations(sorted(sizes))):
        if draw(st.booleans()) and sum(sizes[b] for b in resident) + sizes[block] <= capacity:
            resident.add(block)
    return Case(model=model, plan=plan, signature=signature, resident=frozenset(resident), capacity_bytes=capacity)


@given(cases(disk_only=True))
def test_every_lowering_onto_disk_passes_the_check(case: Case) -> None:
    case.check(case.lower())


@given(cases())
def test_every_lowering_of_a_mixed_plan_passes_the_check(case: Case) -> None:
    case.check(case.lower())


@given(cases(), st.lists(st.sampled_from(Updates), min_size=1, max_size=4))
def test_steps_follow_each_other(case: Case, steps: list[Updates]) -> None:
    resident = case.resident
    for updates in steps:
        step = replace(case, resident=resident, signature=replace(case.signature, training=True, updates=updates))
        schedule = step.lower()
        step.check(schedule)
        resident = schedule.resident_after


@given(cases())
def test_schedules_are_equal_up_to_the_verdict(case: Case) -> None:
    """The runtime begins with one schedule and goes over to the other."""
    steps = [replace(case.signature, training=True, updates=u) for u in (Updates.SPECULATIVE, Updates.REDONE)]
    kept, redone = (replace(case, signature=step).lower() for step in steps)
    verdict = len(kept.anchors) - 1
    assert kept.anchors == redone.anchors
    assert [op for op in kept.ops if op.at < verdict] == [op for op in redone.ops if op.at < verdict]
    again = [op.block for op in redone.ops if op.kind is OpKind.UPDATE and op.at == verdict]
    assert again == [b for b in dict.fromkeys(case.signature.order) if case.model.blocks[b].num_trainable_params]
    assert kept.resident_after == redone.resident_after


@given(cases())
def test_lowering_is_deterministic(case: Case) -> None:
    assert case.lower().to_text() == case.lower().to_text()


@given(cases(disk_only=True))
def test_weights_are_fetched_at_most_once_per_use(case: Case) -> None:
    schedule = case.lower()
    for block in set(case.signature.order):
        fetches = [op for op in schedule.ops if op.kind is OpKind.FETCH and op.block == block and op.payload is Payload.WEIGHTS]
        following = not case.signature.training  # without backward the last FETCH may be for the next step
        assert len(fetches) <= sum(a.block == block for a in schedule.anchors) + following


def turned(items: Sequence[T]) -> st.SearchStrategy[list[T]]:
    """All items, beginning with any of them."""
    return st.integers(0, max(0, len(items) - 1)).map(lambda start: [*items[start:], *items[:start]])


def _order(schedule: Schedule) -> list[frozenset[int]]:
    """What every op waits for, directly or not; that RELEASEs follow each other only serves the
    FETCHes behind them.
    """
    reach: list[frozenset[int]] = []
    for op in schedule.ops:
        reach.append(frozenset(op.after).union(*(reach[i] for i in op.after)))

    def matters(op: Op, other: Op) -> bool:
        return op.kind is not OpKind.RELEASE or op.block == other.block

    return [frozenset(i for i in reach[op.id] if matters(op, schedule.ops[i])) for op in schedule.ops]


def _with_op(schedule: Schedule, op: Op) -> Schedule:
    return replace(schedule, ops=tuple(op if o.id == op.id else o for o in schedule.ops))


def _removed(schedule: Schedule, index: int) -> Schedule:
    """The schedule without one op: ids close up and edges to it vanish."""

    def moved(ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(i - (i > index) for i in ids if i != index)

    ops = [replace(o, id=o.id - (o.id > index), after=moved(o.after)) for o in schedule.ops if o.id != index]
    anchors = [replace(a, needs=moved(a.needs)) for a in schedule.anchors]
    return replace(schedule, ops=tuple(ops), anchors=tuple(anchors))


def _swapped(schedule: Schedule, index: int) -> Schedule:
    """The schedule with two neighbouring ops issued the other way round, edges as they were."""
    ops = list(schedule.ops)
    a, b = ops[index], ops[index + 1]
    ops[index], ops[index + 1] = replace(b, id=index), replace(a, id=index + 1)
    return replace(schedule, ops=tuple(ops))


@given(cases(tight=True), st.data())
def test_a_dropped_edge_is_caught(case: Case, data: st.DataObject) -> None:
    schedule = case.lower()
    edges = [(op, i) for op in schedule.ops for i in op.after]
    without = (_with_op(schedule, replace(op, after=tuple(i for i in op.after if i != e))) for op, e in data.draw(turned(edges)))
    # An edge that others imply changes nothing.
    broken = next((changed for changed in without if _order(changed) != _order(schedule)), None)
    assume(broken is not None)
    with pytest.raises(ScheduleError):
        case.check(broken)


@given(cases(tight=True), st.data())
def test_a_dropped_carried_edge_is_caught(case: Case, data: st.DataObject) -> None:
    schedule = case.lower()
    edges = [(op, edge) for op in schedule.ops for edge in op.carried]
    assume(edges)
    op, edge = data.draw(st.sampled_from(edges))
    with pytest.raises(ScheduleError, match="before"):
        case.check(_with_op(schedule, replace(op, carried=tuple(e for e in op.carried if e != edge))))


@given(cases(), st.data())
def test_an_anchor_that_stops_waiting_is_caught(case: Case, data: st.DataObject) -> None:
    schedule = case.lower()
    anchors = list(schedule.anchors)
    waits, waited, again = [], set[int](), set[int]()
    for index, anchor in enumerate(anchors):
        carried = (OpKind.UPDATE, anchor.block) in anchor.carried and anchor.block not in again
        waits += [index] if carried or set(anchor.needs) - waited else []
        waited.update(anchor.needs)
        again.add(anchor.block)
    assume(waits)
    index = data.draw(st.sampled_from(waits))
    anchors[index] = replace(anchors[index], needs=(), carried=())
    with pytest.raises(ScheduleError):
        case.check(replace(schedule, anchors=tuple(anchors)))


@given(cases(tight=True), st.data())
def test_a_removed_op_is_caught(case: Case, data: st.DataObject) -> None:
    schedule = case.lower()
    others = [op.id for op in schedule.ops if op.kind is not OpKind.RELEASE]  # see the next test
    with pytest.raises(ScheduleError):
        case.check(_removed(schedule, data.draw(st.sampled_from(others))))


@given(cases(tight=True), st.data())
def test_a_removed_release_is_caught(case: Case, data: st.DataObject) -> None:
    schedule = case.lower()
    releases = [op.id for op in schedule.ops if op.kind is OpKind.RELEASE]
    assume(releases)
    # Either memory runs over, or the weights are in memory when they are fetched again or when the
    # step ends.
    with pytest.raises(ScheduleError, match=r"capacity|resident|order"):
        case.check(_removed(schedule, data.draw(st.sampled_from(releases))))


@given(cases(tight=True), st.data())
def test_swapped_ops_are_caught(case: Case, data: st.DataObject) -> None:
    schedule = case.lower()
    pairs = [i for i in range(len(schedule.ops) - 1) if i in schedule.ops[i + 1].after]
    assume(pairs)
    with pytest.raises(ScheduleError):
        case.check(_swapped(schedule, data.draw(st.sampled_from(pairs))))


def _extra(schedule: Schedule, op: Op) -> Schedule:
    op = replace(op, id=len(schedule.ops), at=len(schedule.anchors) - 1, after=tuple(range(len(schedule.ops))))
    return replace(schedule, ops=(*schedule.ops, op))


@given(cases(tight=True), st.data())
def test_an_op_issued_twice_is_caught(case: Case, data: st.DataObject) -> None:
    schedule = case.lower()
    with pytest.raises(ScheduleError):
        case.check(_extra(schedule, data.draw(st.sampled_from(schedule.ops))))


@given(cases(tight=True), st.integers(1, 9))
def test_a_smaller_budget_is_caught(case: Case, missing: int) -> None:
    schedule = case.lower()
    sizes = [
        case.model.blocks[op.block].weight_bytes for op in schedule.ops if op.kind is OpKind.FETCH and op.payload is Payload.WEIGHTS
    ]
    with pytest.raises(ScheduleError, match="capacity"):
        check(schedule, case.plan, case.model, capacity_bytes=max(sizes) - missing)


MUTATIONS: dict[str, Callable[[Schedule], Schedule]] = {
    "an edge to a later op": lambda s: _with_op(s, replace(s.ops[0], after=(len(s.ops) - 1,))),
    "an op at an anchor that is not there": lambda s: _with_op(s, replace(s.ops[-1], at=len(s.anchors))),
    "an op of a block that is not there": lambda s: _with_op(s, replace(s.ops[0], block=99)),
    "an op without a block": lambda s: _with_op(s, replace(s.ops[0], block=NO_BLOCK)),
    "another end": lambda s: replace(s, resident_after=s.resident_after ^ {0}),
    "anchors of another step": lambda s: replace(s, anchors=s.anchors[1:]),
    "a kind that does not run yet": lambda s: _with_op(s, replace(s.ops[0], kind=OpKind.REDUCE)),
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
@given(case=cases(tight=True))
def test_malformed_schedules_are_caught(mutation: Callable[[Schedule], Schedule], case: Case) -> None:
    with pytest.raises(ScheduleError):
        case.check(mutation(case.lower()))


@given(st.data())
def test_plans_survive_json(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=5))
    plan = Plan(
        name=data.draw(st.text(max_size=20)),
        blocks=tuple(data.draw(block_plans(name)) for name in names),
        prefetch_depth=data.draw(st.integers(1, 1024)),
        gradient_depth=data.draw(st.integers(1, 1024)),
    )
    assert Plan.from_json(plan.to_json()) == plan
