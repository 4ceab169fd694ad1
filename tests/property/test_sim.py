"""Whatever the plan and the machine: links are not overdrawn, edges and orders are kept, bounds
hold, tiers do not overflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.cost import Rates, Work, amount_of, backward_s
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile, OperatorProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import NO_BLOCK, Lane, Op, OpKind, Phase, Schedule
from lightning_hetero.ir.stalls import stalls
from lightning_hetero.ir.trace import Span
from lightning_hetero.lowering import CacheSizes, cache_sizes, fitted, needs_of, steady
from lightning_hetero.lowering.needs import total_bytes
from lightning_hetero.sim import Simulation, simulate
from lightning_hetero.sim.links import Flow, max_min

MIB = 2**20
NEARLY = 1e-6  # relative; seconds are sums of many events


# ---- links ---------------------------------------------------------------------------------------


@given(
    st.lists(
        st.builds(
            Flow,
            speed=st.floats(0.1, 100),
            uses=st.dictionaries(st.sampled_from("abc"), st.floats(0.1, 10), max_size=3),
        ),
        min_size=1,
        max_size=6,
    ),
    st.fixed_dictionaries({link: st.floats(0.1, 100) for link in "abc"}),
)
def test_shares_are_max_min_fair(flows: list[Flow], capacity: Mapping[str, float]) -> None:
    rates = max_min(flows, capacity)
    load = {link: sum(rate * flow.uses.get(link, 0) for rate, flow in zip(rates, flows, strict=True)) for link in capacity}
    assert all(load[link] <= capacity[link] * (1 + NEARLY) for link in capacity)
    for rate, flow in zip(rates, flows, strict=True):
        assert 0 < rate <= flow.speed * (1 + NEARLY)
        if rate < flow.speed * (1 - NEARLY):
            # It is held up by a full link on which nobody has more.
            full = [link for link in flow.uses if load[link] >= capacity[link] * (1 - NEARLY)]
            most = [max(r for r, f in zip(rates, flows, strict=True) if link in f.uses) for link in full]
            assert any(rate >= m * (1 - NEARLY) for m in most)


# ---- cases ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    model: ModelProfile
    plan: Plan
    hardware: HardwareProfile
    sizes: CacheSizes
    schedules: tuple[Schedule, ...]

    def simulate(self) -> Simulation:
        return simulate(self.schedules, self.plan, self.model, self.hardware, sizes=self.sizes, keep_trace=True)


@st.composite
def models(draw: st.DrawFn) -> ModelProfile:
    blocks = []
    seconds = st.floats(0.01, 2)
    for index in range(draw(st.integers(1, 6))):
        saved = draw(st.integers(0, 4)) * MIB
        operators = tuple(
            OperatorProfile(name=f"o{i}", flop=draw(st.floats(0, 0.3)), bytes=saved // 4) for i in range(draw(st.integers(0, 2)))
        )
        params = draw(st.integers(1, 5)) * MIB // 4
        blocks.append(
            BlockProfile(
                name=f"b{index}",
                num_params=params,
                num_trainable_params=params * (draw(st.integers(0, 5)) > 0),
                forward_s=draw(seconds),
                backward_s=draw(seconds),
                forward_flop=1.0,
                activation_bytes=saved,
                boundary_bytes=saved // 4,
                transient_bytes=draw(st.integers(0, 2)) * MIB,
                operators=operators,
                pinned=draw(st.integers(0, 5)) == 0,
            )
        )
    return ModelProfile(
        name="m", tokens=1, compute_itemsize=draw(st.sampled_from([2, 4])), constant_device_bytes=MIB, constant_host_bytes=MIB,
        blocks=tuple(blocks),
    )  # fmt: skip


@st.composite
def block_plans(draw: st.DrawFn, block: BlockProfile, *, shared: bool, weights: Tier | None = None) -> BlockPlan:
    """``weights`` is their tier wherever that is possible."""
    memory = [Tier.DEVICE, Tier.HOST]
    update = UpdateLane.CPU if weights is Tier.DISK else draw(st.sampled_from(UpdateLane))
    on_device = update is UpdateLane.DEVICE
    saved = Saved.KEEP if shared else draw(st.sampled_from(Saved))
    tiers = memory if on_device or block.pinned else list(Tier)
    return BlockPlan(
        name=block.name,
        weights=weights if weights in tiers else draw(st.sampled_from(tiers)),
        state=draw(st.sampled_from(memory if on_device else [Tier.HOST, Tier.DISK])),
        update=update,
        saved=saved,
        boundary=Saved.KEEP if shared else draw(st.sampled_from([Saved.KEEP, Saved.SWAP_HOST, Saved.SWAP_DISK])),
        operators={} if shared else {o.name: draw(st.sampled_from(Saved)) for o in block.operators if draw(st.booleans())},
    )


@st.composite
def machines(draw: st.DrawFn, *, shared: bool) -> HardwareProfile:
    """With more memory than any plan here needs."""
    rate = st.sampled_from([2.0, 5.0, 20.0, 100.0])
    kinds = ("compute", "update", "copy", "disk")
    pairs = [f"{a}|{b}" for a in kinds for b in kinds if a != b]
    return HardwareProfile(
        name="h",
        device_memory_bytes=1000 * MIB,
        host_memory_bytes=4000 * MIB,
        disk_capacity_bytes=10_000 * MIB,
        device_flop_per_s=1.0,
        link_h2d_bytes_per_s=draw(rate) * MIB,
        link_d2h_bytes_per_s=draw(rate) * MIB,
        disk_read_bytes_per_s=draw(rate) * MIB,
        disk_write_bytes_per_s=draw(rate) * MIB,
        disk_duplex=draw(st.booleans()),
        host_dram_bytes_per_s=draw(st.sampled_from([20.0, 100.0, 1000.0])) * MIB,
        cpu_update_params_per_s=draw(rate) * MIB / 4,
        device_update_params_per_s=draw(rate) * MIB,
        cpu_downcast_params_per_s=1.0,
        shared_memory=shared,
        contention=draw(st.dictionaries(st.sampled_from(pairs), st.floats(1, 2), max_size=3)),
    )


@st.composite
def memories(draw: st.DrawFn, plan: Plan, model: ModelProfile, hardware: HardwareProfile) -> HardwareProfile:
    """The machine with all the memory that the plan needs, and hardly more."""
    needs = needs_of(plan, model, shared_memory=hardware.shared_memory)
    spare = st.integers(0, 20).map(lambda size: size * MIB)
    return replace(
        hardware,
        device_memory_bytes=total_bytes(needs.device) + max(needs.device_caches, default=0) + draw(spare),
        host_memory_bytes=total_bytes(needs.host) + max(needs.host_caches, default=0) + draw(spare),
    )


@st.composite
def cases(draw: st.DrawFn, *, priority: bool | None = None, shared: bool | None = None, micro_batches: int | None = None) -> Case:
    """Any case, or any with what is given."""
    shared = draw(st.booleans()) if shared is None else shared
    model, hardware = draw(models()), draw(machines(shared=shared))
    weights = draw(st.sampled_from([None, *Tier]))
    plan = Plan(
        name="p",
        blocks=tuple(draw(block_plans(b, shared=shared, weights=weights)) for b in model.blocks),
        prefetch_depth=draw(st.integers(1, 3)),
        gradient_depth=draw(st.integers(1, 3)),
        update_order=draw(st.sampled_from(UpdateOrder)),
        priority=draw(st.booleans()) if priority is None else priority,
        micro_batches=micro_batches or (1 if shared else draw(st.sampled_from([1, 1, 2, 3]))),
        host_cache_bytes=draw(st.sampled_from([None, 0])),  # all that is left, or just the largest block
        device_cache_bytes=draw(st.sampled_from([None, 0])),
    )
    plan = fitted(plan, model.shape(), device=not shared)  # as the strategy and the planners do before anything is lowered
    hardware = draw(memories(plan, model, hardware))
    space = cache_sizes(plan, model, hardware)
    schedules = steady(plan, model.shape(), sizes=space)
    return Case(model=model, plan=plan, hardware=hardware, sizes=space, schedules=schedules)


# ---- what holds for all --------------------------------------------------------------------------


@given(cases())
def test_the_same_case_gives_the_same_simulation(case: Case) -> None:
    assert case.simulate() == case.simulate()


def _compute_s(case: Case) -> float:
    pairs = zip(case.model.blocks, case.plan.blocks, strict=True)
    return case.plan.micro_batches * sum(block.forward_s + backward_s(block, placed) for block, placed in pairs)


def _bounds_s(case: Case) -> dict[str, float]:
    """Seconds that each link needs for a step's bytes, at least."""
    rates = Rates(case.hardware)
    need: dict[str, float] = {}
    for schedule in case.schedules:
        for op in schedule.ops:
            amount = amount_of(op, case.plan, case.model, case.hardware)
            if amount is None:
                continue
            demand = rates.demand(amount.work)
            need[amount.work.name] = need.get(amount.work.name, 0) + amount.units / demand.speed
            for link, use in demand.uses.items():
                need[link] = need.get(link, 0) + amount.units * use / rates.capacity[link]
    return need


@given(cases())
def test_a_steady_step_takes_at_least_the_time_of_compute_and_of_every_link(case: Case) -> None:
    simulation = case.simulate()
    iteration_s = simulation.prediction.iteration_s
    assert iteration_s >= _compute_s(case) * (1 - NEARLY)
    assert simulation.prediction.forward_s <= iteration_s * (1 + NEARLY)
    if simulation.steady:
        assert {name: s for name, s in _bounds_s(case).items() if s > iteration_s * (1 + NEARLY)} == {}


@given(cases())
def test_lanes_are_busy_no_longer_than_the_step_and_compute_waits_for_the_rest(case: Case) -> None:
    simulation = case.simulate()
    assert all(0 < share <= 1 + NEARLY for share in simulation.busy.values())
    waited = sum(simulation.waits.values())
    assert simulation.busy["compute"] * simulation.prediction.iteration_s + waited == pytest.approx(
        simulation.prediction.iteration_s
    )


@given(cases())
def test_no_tier_ever_holds_more_than_it_has(case: Case) -> None:
    prediction = case.simulate().prediction
    assert prediction.host_peak_bytes <= case.hardware.host_memory_bytes
    if not case.hardware.shared_memory:
        assert prediction.device_peak_bytes <= case.hardware.device_memory_bytes


@given(cases())
def test_a_step_gives_back_all_the_memory_that_it_takes(case: Case) -> None:
    simulation = case.simulate()
    timeline = simulation.memory.timeline
    if simulation.steady and simulation.prediction.iteration_s == simulation.iterations_s[-1]:
        assert timeline[0][1:] == timeline[-1][1:]
    assert max(device for _, device, _ in timeline) <= simulation.memory.device_peak_bytes
    assert max(host for _, _, host in timeline) <= simulation.memory.host_peak_bytes
    assert min(device for _, device, _ in timeline) >= case.model.constant_device_bytes
    assert min(host for _, _, host in timeline) >= case.model.constant_host_bytes


def _occurrences(case: Case, simulation: Simulation) -> list[dict[str, list[Span]]]:
    """Spans of each step by name, in the order in which they began."""
    steps: list[dict[str, list[Span]]] = []
    for span in simulation.trace.spans:
        while len(steps) <= span.step:
            steps.append({})
        steps[span.step].setdefault(span.name, []).append(span)
    return steps


def _title(case: Case, op: Op) -> str:
    return f"{op.what} {'' if op.block == NO_BLOCK else case.model.blocks[op.block].name}"


@given(cases(micro_batches=1))
def test_ops_begin_after_their_dependencies(case: Case) -> None:
    """But for the pieces of one update, which overlap."""
    (schedule,) = case.schedules
    simulation = case.simulate()
    titles = [_title(case, op) for op in schedule.ops]
    once = {t for t in titles if titles.count(t) == 1}
    for spans in _occurrences(case, simulation):
        for op in schedule.ops:
            for other in (schedule.ops[i] for i in op.after):
                mine, theirs = _title(case, op), _title(case, other)
                same_update = op.block == other.block and {op.kind, other.kind} <= {OpKind.FETCH, OpKind.UPDATE, OpKind.STORE}
                if {mine, theirs} <= once and mine in spans and not same_update:
                    assert spans[mine][0].start_s >= spans[theirs][0].end_s * (1 - NEARLY)


@given(cases(priority=False, shared=False, micro_batches=1))
def test_copies_keep_the_order_of_the_schedule(case: Case) -> None:
    (schedule,) = case.schedules
    simulation = case.simulate()
    for lane in (Lane.H2D, Lane.D2H):
        names = [_title(case, op) for op in schedule.lane(lane) if op.kind is not OpKind.RELEASE and op.num_bytes]
        for step in range(len(simulation.iterations_s)):
            spans = [s for s in simulation.trace.spans if (s.step, s.lane) == (step, lane.value) and s.num_bytes]
            spans = [s for s in spans if not s.name.startswith("RELEASE")]
            assert [s.name for s in sorted(spans, key=lambda s: (s.start_s, s.end_s))] == names[: len(spans)]
            assert all(a.end_s <= b.start_s * (1 + NEARLY) for a, b in pairwise(spans))


@given(cases())
def test_anchors_follow_each_other_and_compute_never_does_two_things(case: Case) -> None:
    simulation = case.simulate()
    expected = [
        f"{a.phase.value} {case.model.blocks[a.block].name}"
        for schedule in case.schedules
        for a in schedule.anchors
        if a.phase is not Phase.VERDICT
    ]
    spans = [s for s in simulation.trace.spans if s.lane == "compute" and s.name[:2] in ("F ", "B ")]
    assert [s.name for s in spans if s.step == 0] == expected
    assert all(a.end_s <= b.start_s * (1 + NEARLY) for a, b in pairwise(spans))


@given(cases())
def test_the_waits_of_the_trace_equal_those_of_the_prediction_and_are_split_without_rest(case: Case) -> None:
    simulation = case.simulate()
    found = stalls(simulation.trace)
    for stall in found:
        assert sum(seconds for _, seconds in stall.chain) == pytest.approx(stall.seconds)
        assert all(seconds > 0 for _, seconds in stall.chain)
        assert stall.waited_for
    if simulation.steady and simulation.prediction.iteration_s == simulation.iterations_s[-1]:
        assert sum(s.seconds for s in found if s.start_s >= simulation.begin_s) == pytest.approx(
            sum(simulation.waits.values()), rel=NEARLY, abs=NEARLY
        )


@given(cases())
def test_the_cause_of_a_wait_had_not_ended_at_issue(case: Case) -> None:
    simulation = case.simulate()
    spans = simulation.trace.spans
    for span in (s for s in spans if s.waited_for and not s.is_wait):
        ends = [o.end_s for o in spans if o.name == span.waited_for and o.start_s <= span.start_s * (1 + NEARLY)]
        assert span.issued_s is not None
        assert max(ends) > span.issued_s


_RATES = [f.name for f in fields(HardwareProfile) if f.name.endswith("_per_s")]


@given(st.data(), models())
def test_a_chain_never_gets_slower_on_a_faster_machine(data: st.DataObject, model: ModelProfile) -> None:
    """With a single block of a single chunk nothing overtakes anything; where nothing shares memory
    either, no rate can do harm.
    """
    shared = data.draw(st.booleans())
    block = replace(model.blocks[0], num_params=MIB // 4, num_trainable_params=MIB // 4)
    model = replace(model, blocks=(block,))
    hardware = replace(data.draw(machines(shared=shared)), contention={}, host_dram_bytes_per_s=1e12)
    plan = Plan(name="p", blocks=(data.draw(block_plans(model.blocks[0], shared=shared)),))
    space = cache_sizes(plan, model, hardware)
    schedules = steady(plan, model.shape(), sizes=space)
    key = data.draw(st.sampled_from(_RATES))
    faster = replace(hardware, **{key: 2 * getattr(hardware, key)})
    before = simulate(schedules, plan, model, hardware, sizes=space).prediction.iteration_s
    after = simulate(schedules, plan, model, faster, sizes=space).prediction.iteration_s
    assert after <= before * (1 + NEARLY)


@given(models(), st.floats(1.0, 3.0))
def test_without_transfers_a_step_is_the_sum_of_its_parts(model: ModelProfile, factor: float) -> None:
    resident = BlockPlan(name="", weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE)
    plan = Plan(name="p", blocks=tuple(replace(resident, name=b.name) for b in model.blocks))
    rates = dict.fromkeys(_RATES, factor * MIB)
    hardware = HardwareProfile(
        name="h", device_memory_bytes=10_000 * MIB, host_memory_bytes=10_000 * MIB, disk_capacity_bytes=0, disk_duplex=True, **rates
    )  # fmt: skip
    space = cache_sizes(plan, model, hardware)
    prediction = simulate(steady(plan, model.shape(), sizes=space), plan, model, hardware, sizes=space).prediction
    updates = sum(Rates(hardware).alone_s(Work.DEVICE_UPDATE, b.num_trainable_params) for b in model.blocks)
    assert prediction.iteration_s == pytest.approx(sum(b.forward_s + b.backward_s for b in model.blocks) + updates)
    assert prediction.forward_s == pytest.approx(sum(b.forward_s for b in model.blocks))
