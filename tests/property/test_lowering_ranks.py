"""Ranks that share a model: every lowering keeps every invariant, the ranks really work together,
and every broken schedule is caught.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.rank_machines import RankMachines

from lightning_hetero.errors import ScheduleError
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Gather, Plan, Saved, Tier, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import COLLECTIVES, NO_BLOCK, Lane, Op, OpKind, Payload, Schedule, StepSignature, Updates
from lightning_hetero.lowering import DeviceRoom, check, lower
from lightning_hetero.lowering.check import same_order


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    model: ModelProfile  # one rank's slice
    plan: Plan
    signatures: tuple[StepSignature, ...]
    ranks: int
    capacity_bytes: int
    whole_bytes: int
    shared_memory: bool = True  # the devices are the host's own CPU
    in_place: bool = False

    def lower(self) -> list[Schedule]:
        """All steps, beginning with empty caches."""
        resident, held = frozenset[int](), frozenset[int]()
        schedules: list[Schedule] = []
        for signature in self.signatures:
            room = DeviceRoom(
                resident=held, capacity_bytes=self.whole_bytes, ranks=self.ranks, shared_memory=self.shared_memory,
                gathers_in_place=self.in_place,
            )  # fmt: skip
            schedules.append(
                lower(self.plan, self.model.shape(), signature, resident=resident, capacity_bytes=self.capacity_bytes, device=room)
            )
            resident, held = schedules[-1].resident_after, schedules[-1].device_after
        return schedules

    def check(self, schedule: Schedule) -> None:
        capacity, whole = self.capacity_bytes, self.whole_bytes
        check(schedule, self.plan, self.model.shape(), capacity_bytes=capacity, device_capacity_bytes=whole)


@st.composite
def blocks(draw: st.DrawFn, index: int) -> BlockProfile:
    params = draw(st.integers(1, 9))
    return BlockProfile(
        name=f"b{index}",
        num_params=params,
        num_trainable_params=draw(st.sampled_from([0, params, params]) | st.integers(1, params)),
        forward_s=1.0,
        backward_s=2.0,
        forward_flop=4.0,
        activation_bytes=draw(st.integers(0, 5)),
        boundary_bytes=0,
        transient_bytes=draw(st.integers(0, 5)),
        pinned=draw(st.integers(0, 5)) == 0,
    )


ANY = st.sampled_from(Updates)


@st.composite
def cases(draw: st.DrawFn, updates: st.SearchStrategy[Updates] = ANY) -> Case:
    ranks = draw(st.integers(2, 4))
    whole = ModelProfile(
        name="m", tokens=1, compute_itemsize=draw(st.sampled_from([2, 4])), constant_device_bytes=3, constant_host_bytes=5,
        blocks=tuple(draw(blocks(i)) for i in range(draw(st.integers(1, 6)))), kept_every=draw(st.integers(0, 2)),
    )  # fmt: skip
    model, on_host, in_place = whole.slice_of(ranks), draw(st.booleans()), draw(st.booleans())
    gather = draw(st.sampled_from(Gather)) if in_place and not on_host else Gather.HOST
    policies = [Saved.KEEP] if on_host else list(Saved)
    rows = []
    for b in model.blocks:
        weights = Tier.DEVICE if b.pinned else draw(st.sampled_from(Tier))
        there = not on_host and weights is not Tier.DISK and draw(st.booleans())
        rows.append(
            BlockPlan(
                name=b.name,
                weights=weights,
                state=draw(st.sampled_from([Tier.HOST, Tier.DEVICE if there else Tier.DISK])),
                update=UpdateLane.DEVICE if there else UpdateLane.CPU,
                saved=Saved.KEEP if b.pinned else draw(st.sampled_from(policies)),
            )
        )
    plan = Plan(
        name="p", blocks=tuple(rows), prefetch_depth=draw(st.integers(1, 3)), gradient_depth=draw(st.integers(1, 4)),
        update_order=draw(st.sampled_from(UpdateOrder)), priority=draw(st.booleans()), gather=gather,
    )  # fmt: skip
    order = draw(st.permutations(range(len(rows))))
    order = order[: draw(st.integers(1, len(order)))] + draw(st.lists(st.sampled_from(order), max_size=3))
    signatures = []
    for _ in range(draw(st.integers(1, 4))):
        training = draw(st.integers(0, 4)) > 0
        signatures.append(StepSignature(order=tuple(order), training=training, updates=draw(updates) if training else Updates.NONE))
    sizes = [(s.weight_bytes, p.weights) for s, p in zip(model.shape().blocks, rows, strict=True)]
    slices = [size for size, tier in sizes if tier is Tier.DISK]
    wholes = [size * ranks for size, tier in sizes if tier is not Tier.DEVICE]
    return Case(
        model=model,
        plan=plan,
        signatures=tuple(signatures),
        ranks=ranks,
        capacity_bytes=max(slices, default=0) + draw(st.integers(0, sum(slices))),
        whole_bytes=0 if in_place and on_host else max(wholes, default=0) + draw(st.integers(0, sum(wholes))),
        shared_memory=on_host,
        in_place=in_place,
    )


@given(cases())
def test_every_lowering_passes_the_check(case: Case) -> None:
    schedules = case.lower()
    for schedule in schedules:
        case.check(schedule)
        assert schedule.ranks == case.ranks
    same_order([schedules[0]] * case.ranks)


@given(cases(), st.integers(0, 2**32))
def test_ranks_work_together_in_every_order_that_their_schedules_allow(case: Case, seed: int) -> None:
    machines = RankMachines(case.plan, case.model, [case.lower()] * case.ranks, seed=seed)
    machines.run()
    for machine in machines.machines:
        assert machine.peak_device_cache <= case.whole_bytes
        assert machine.peak_host_cache <= case.capacity_bytes


@given(cases(st.just(Updates.IN_BACKWARD)))
def test_gradients_are_reduced_once_after_the_last_backward_and_before_the_update(case: Case) -> None:
    for schedule in case.lower():
        reduces = {op.block: op for op in schedule.ops if op.kind is OpKind.REDUCE}
        assert len({op.lane for op in schedule.ops if op.lane in COLLECTIVES}) <= 1, "they have one order"
        updates = {op.block: op for op in schedule.ops if op.kind is OpKind.UPDATE}
        assert sum(op.kind is OpKind.REDUCE for op in schedule.ops) == len(reduces)
        grads = [op.block for op in schedule.ops if op.kind is OpKind.GRAD]
        assert grads == ([] if case.shared_memory else list(reduces))
        assert reduces.keys() == updates.keys()
        last = {anchor.block: index for index, anchor in enumerate(schedule.anchors)}
        assert all(op.at > last[block] and op.id < updates[block].id for block, op in reduces.items())


# ---- broken schedules ----------------------------------------------------------------------------


def _reach(schedule: Schedule) -> list[frozenset[int]]:
    """What every op waits for, directly or not."""
    reach: list[frozenset[int]] = []
    for op in schedule.ops:
        reach.append(frozenset(op.after).union(*(reach[i] for i in op.after)))
    return reach


def _with_op(schedule: Schedule, op: Op) -> Schedule:
    return replace(schedule, ops=tuple(op if o.id == op.id else o for o in schedule.ops))


def _drawn(case: Case, data: st.DataObject) -> Schedule:
    schedule = data.draw(st.sampled_from(case.lower()))
    assume(schedule.ops)
    return schedule


@given(cases(), st.data())
def test_a_dropped_edge_is_caught(case: Case, data: st.DataObject) -> None:
    schedule = _drawn(case, data)
    releases = [op.id for op in schedule.ops if op.kind is OpKind.RELEASE]  # that they follow each other serves others
    edges = [(op, i) for op in schedule.ops for i in op.after if op.id not in releases or i not in releases]
    assume(edges)
    op, edge = data.draw(st.sampled_from(edges))
    broken = _with_op(schedule, replace(op, after=tuple(i for i in op.after if i != edge)))
    assume(edge not in _reach(broken)[op.id])  # an edge that others imply changes nothing
    with pytest.raises(ScheduleError):
        case.check(broken)


@given(cases(), st.data())
def test_a_dropped_carried_edge_is_caught(case: Case, data: st.DataObject) -> None:
    schedule = _drawn(case, data)
    writes = any(op.kind in (OpKind.STORE, OpKind.MIRROR) for op in schedule.ops)
    edges = [(op, edge) for op in schedule.ops for edge in op.carried if writes or op.kind is not OpKind.AGREE]
    assume(edges)
    op, edge = data.draw(st.sampled_from(edges))
    with pytest.raises(ScheduleError, match="before"):
        case.check(_with_op(schedule, replace(op, carried=tuple(e for e in op.carried if e != edge))))


@given(cases(), st.data())
def test_another_lane_or_other_bytes_are_caught(case: Case, data: st.DataObject) -> None:
    schedule = _drawn(case, data)
    ops = [op for op in schedule.ops if op.kind is not OpKind.COMMIT]
    assume(ops)
    op = data.draw(st.sampled_from(ops))
    other = data.draw(st.sampled_from([lane for lane in Lane if lane is not op.lane]))
    changed = data.draw(st.sampled_from([replace(op, lane=other), replace(op, num_bytes=op.num_bytes + 1)]))
    with pytest.raises(ScheduleError):
        case.check(_with_op(schedule, changed))


@given(cases(), st.data())
def test_a_collective_that_is_missing_is_caught(case: Case, data: st.DataObject) -> None:
    schedule = _drawn(case, data)
    ids = [op.id for op in schedule.ops if op.lane in COLLECTIVES and op.kind is not OpKind.AGREE]
    assume(ids)
    missing = data.draw(st.sampled_from(ids))

    def moved(ids: tuple[int, ...]) -> tuple[int, ...]:
        bridged = {j for i in ids for j in (schedule.ops[i].after if i == missing else (i,))}
        return tuple(sorted(i - (i > missing) for i in bridged))

    ops = [replace(o, id=o.id - (o.id > missing), after=moved(o.after)) for o in schedule.ops if o.id != missing]
    anchors = [replace(a, needs=moved(a.needs)) for a in schedule.anchors]
    broken = replace(schedule, ops=tuple(ops), anchors=tuple(anchors))
    with pytest.raises(ScheduleError):
        case.check(broken)
    if schedule.ops[missing].kind is not OpKind.RELEASE:
        with pytest.raises(ScheduleError, match=f"rank {case.ranks - 1}"):
            same_order([*[schedule] * (case.ranks - 1), broken])


def _elsewhere(op: Op) -> Op:
    return replace(op, lane={Lane.NET: Lane.PEER, Lane.PEER: Lane.NET}.get(op.lane, op.lane))


MUTATIONS: dict[str, Callable[[Schedule], Schedule]] = {
    "one rank": lambda s: replace(s, ranks=1),
    "a rank more": lambda s: replace(s, ranks=s.ranks + 1),
    "other devices": lambda s: replace(s, shared_memory=not s.shared_memory),
    "collectives on the other lane": lambda s: replace(s, ops=tuple(_elsewhere(op) for op in s.ops)),
    "another end": lambda s: replace(s, device_after=s.device_after ^ {0}),
    "an AGREE of a block": lambda s: _with_op(s, replace(s.ops[0], kind=OpKind.AGREE)),
    "an UPLOAD": lambda s: _with_op(s, replace(s.ops[0], kind=OpKind.UPLOAD, lane=Lane.H2D)),
    "a COMMIT of the network": lambda s: _with_op(s, replace(s.ops[0], kind=OpKind.COMMIT, block=NO_BLOCK, payload=Payload.NONE)),
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
@given(case=cases(), data=st.data())
def test_malformed_schedules_are_caught(mutation: Callable[[Schedule], Schedule], case: Case, data: st.DataObject) -> None:
    schedule = _drawn(case, data)
    assume(any(op.kind is OpKind.REDUCE or (op.kind is OpKind.GATHER and not case.in_place) for op in schedule.ops))
    broken = mutation(schedule)
    assume(broken != schedule)  # the first op may be an UPLOAD
    with pytest.raises(ScheduleError):
        case.check(broken)


# ---- what the machines are worth -----------------------------------------------------------------


def _without_agreement(schedule: Schedule) -> Schedule:
    """Each rank's writes wait for its own record alone."""
    agreed = next((op.id for op in schedule.ops if op.kind is OpKind.AGREE), None)
    writes = (OpKind.UPDATE, OpKind.STORE)
    ops = [replace(op, after=tuple(i for i in op.after if i != agreed or op.kind not in writes)) for op in schedule.ops]
    return replace(
        schedule, ops=tuple(replace(op, carried=((OpKind.COMMIT, NO_BLOCK),)) if op.kind is OpKind.STORE else op for op in ops)
    )


def _with_gathers_that_wait_for_nothing(schedule: Schedule) -> Schedule:
    ops = [replace(op, after=(), carried=()) if op.kind is OpKind.GATHER else op for op in schedule.ops]
    return replace(schedule, ops=tuple(ops))


def _with_slices_that_leave_early(schedule: Schedule) -> Schedule:
    """A rank gives its slice back before the ranks have met."""
    met = {op.id for op in schedule.ops if op.kind is OpKind.RELEASE and op.lane is Lane.NET}
    ops = [
        replace(op, after=tuple(j for i in op.after for j in (schedule.ops[i].after if i in met else (i,))))
        if op.kind is OpKind.RELEASE and op.lane is Lane.DISK_READ
        else op
        for op in schedule.ops
    ]
    return replace(schedule, ops=tuple(ops))


KINDS: dict[str, dict[str, Any]] = {
    "copies": {},
    "in place": {"in_place": True},
    "between devices": {"in_place": True, "shared_memory": False, "gather": Gather.DEVICE},
}


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (_without_agreement, "writes over a step that other ranks may need"),
        (_with_gathers_that_wait_for_nothing, "gathers slices of versions|while it is (used|written)|nothing to (upload|gather)"),
    ],
)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_machines_find_what_goes_wrong(broken: Callable[[Schedule], Schedule], said: str, kind: dict[str, Any]) -> None:
    case, schedules = _disk_on_two_ranks(**kind)
    ranks = [[broken(schedule) for schedule in schedules]] * 2
    with pytest.raises((AssertionError, KeyError), match=said):
        _run_often(case, ranks)


def test_the_machines_find_slices_that_leave_while_another_device_reads_them() -> None:
    case, schedules = _disk_on_two_ranks(in_place=True, shared_memory=False)
    _run_often(case, [schedules] * 2)
    with pytest.raises(AssertionError, match=r"reads a slice of version None|while it is used|slice while its rank writes"):
        _run_often(case, [[_with_slices_that_leave_early(schedule) for schedule in schedules]] * 2)


def _run_often(case: Case, ranks: list[list[Schedule]]) -> None:
    for seed in range(20):
        RankMachines(case.plan, case.model, ranks, seed=seed).run()


def test_ranks_with_different_plans_do_not_meet() -> None:
    case, schedules = _disk_on_two_ranks()
    others = replace(case, plan=replace(case.plan, prefetch_depth=1)).lower()
    with pytest.raises(AssertionError, match=r"ranks meet in|wait for each other"):
        _run_often(case, [schedules, others])
    with pytest.raises(ScheduleError, match=r"collective 5 of the step is GATHER .* on rank 0 and REDUCE"):
        same_order([schedules[0], others[0]])


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_machines_find_nothing_wrong_with_these(kind: dict[str, Any]) -> None:
    case, schedules = _disk_on_two_ranks(**kind)
    _run_often(case, [schedules] * 2)


def _disk_on_two_ranks(
    *, in_place: bool = False, shared_memory: bool = True, gather: Gather = Gather.HOST
) -> tuple[Case, list[Schedule]]:
    """Three steps of four blocks that live on disk; two of them fit in memory."""
    row = BlockProfile(
        name="", num_params=8, num_trainable_params=8, forward_s=1.0, backward_s=2.0, forward_flop=1.0, activation_bytes=0,
        boundary_bytes=0, transient_bytes=0,
    )  # fmt: skip
    model = ModelProfile(
        name="m", tokens=1, compute_itemsize=4, constant_device_bytes=0, constant_host_bytes=0,
        blocks=tuple(replace(row, name=f"b{i}") for i in range(4)),
    ).slice_of(2)  # fmt: skip
    step = StepSignature(order=(0, 1, 2, 3), training=True, updates=Updates.IN_BACKWARD)
    case = Case(
        model=model,
        plan=Plan(
            name="p", blocks=tuple(BlockPlan(name=b.name, weights=Tier.DISK, state=Tier.DISK) for b in model.blocks), gather=gather
        ),
        signatures=(step,) * 3,
        ranks=2,
        capacity_bytes=2 * 16,
        whole_bytes=0 if in_place and shared_memory else 3 * 32,
        shared_memory=shared_memory,
        in_place=in_place,
    )
    return case, case.lower()
