"""What the plan says is what runs: the executor's trace against the simulator's, and against the
plan's own words.
"""

from __future__ import annotations

import tempfile
import threading
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.lane_kinds import KINDS, lanes_of
from support.machines import HARDWARE
from support.models import Recipe, Shape, run
from support.properties import examples

from lightning_hetero import BlockPlan, EmulatedDevice, Plan, Tier, UpdateLane
from lightning_hetero._native import Engine
from lightning_hetero.cost import Rates, amount_of
from lightning_hetero.ir.model import BlockProfile, ModelProfile, ModelShape
from lightning_hetero.ir.plan import Saved, UpdateOrder
from lightning_hetero.ir.schedule import Op, OpKind, Schedule, Updates
from lightning_hetero.ir.stalls import stalls
from lightning_hetero.ir.trace import Span, Trace
from lightning_hetero.lanes import EmulatedLanes
from lightning_hetero.lowering import CacheSizes
from lightning_hetero.planning.machine_profile import emulated
from lightning_hetero.sim import simulate
from lightning_hetero.sim.compile import compile_step
from lightning_hetero.strategies import HeteroOffloadStrategy

MIRROR_PAGES = 16 * 4096
FIRST = 2  # the first steps learn in which order blocks are used, and warm the cache
ON_DISK = BlockPlan(name="model.blocks.*", weights=Tier.DISK, state=Tier.DISK)


@dataclass
class Ran:
    """A short training with a trace."""

    trace: Trace
    schedules: list[Schedule]
    plan: Plan
    model: ModelShape
    armed: list[tuple[int, int]]  # block, engine priority

    def spans(self, kind: str, step: int) -> list[Span]:
        return [s for s in self.trace.spans if s.name.startswith(f"{kind} ") and s.step == step]


class Notes(pl.Callback):
    def __init__(self) -> None:
        self.schedules: list[Schedule] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        executor = trainer.strategy.session.executor
        assert executor.schedule is not None
        self.schedules.append(executor.schedule)
        self.model = executor.model
        self.blocks = {part.native: block.index for block in executor.blocks for part in block.parts}


def ran(plan: Plan, recipe: Recipe, *, tight: bool = False, device: EmulatedDevice | None = None, kept: bool = False) -> Ran:
    notes = Notes()
    armed: list[tuple[Any, int]] = []
    whole = Engine.arm_update

    def arm(engine: Engine, ticket: Any, *args: Any, priority: int = 0, **rest: Any) -> None:
        armed.append((ticket.block, priority))
        whole(engine, ticket, *args, priority=priority, **rest)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "arm_update", arm)
        cache = {"host_cache_bytes": 0} if tight else {}
        plan = Plan(**{**{f: getattr(plan, f) for f in Plan.__slots__}, **cache})
        store = Path(folder, "store") if kept else None
        strategy = HeteroOffloadStrategy(plan=plan, trace=True, device=device, disk_path=store)
        run(recipe, strategy, Path(folder), callbacks=[notes])
    assert strategy.plan is not None
    rows = [(notes.blocks[native], priority) for native, priority in armed]
    return Ran(strategy.trace, notes.schedules, strategy.plan, notes.model, rows)


def profile(model: ModelShape) -> ModelProfile:
    rows = (
        BlockProfile(
            name=b.name, num_params=b.num_params, num_trainable_params=b.num_trainable_params, forward_s=1e-4, backward_s=2e-4,
            forward_flop=1.0, activation_bytes=0, boundary_bytes=0, transient_bytes=0, pinned=b.pinned,
        )
        for b in model.blocks
    )  # fmt: skip
    return ModelProfile(
        name="m",
        tokens=1,
        compute_itemsize=4,
        constant_device_bytes=0,
        constant_host_bytes=0,
        blocks=tuple(rows),
        kept_every=model.kept_every,
    )


def rule(name: str, weights: Tier, state: Tier, on_cpu: bool) -> BlockPlan:
    on_cpu |= Tier.DISK in (weights, state)
    return BlockPlan(name=name, weights=weights, state=state, update=UpdateLane.CPU if on_cpu else UpdateLane.DEVICE)


TIERS = st.sampled_from([*Tier])
PLANS = st.builds(
    Plan,
    name=st.just("random"),
    blocks=st.tuples(
        *(
            st.builds(rule, st.just(n), TIERS, TIERS, st.booleans())
            for n in ("model.blocks.0", "model.blocks.*", "model.embed", "*")
        )
    ),
    prefetch_depth=st.integers(1, 3),
    gradient_depth=st.integers(1, 4),
    update_order=st.sampled_from(UpdateOrder),
    priority=st.booleans(),
)
RECIPES = st.builds(
    Recipe,
    shape=st.builds(
        Shape, layers=st.integers(2, 4), tied=st.booleans(), frozen=st.sampled_from([(), (1,)]), half_frozen=st.booleans()
    ),
    steps=st.just(FIRST + 2),
    clip=st.sampled_from([None, None, 0.3]),
)


@examples(12)
@given(recipe=RECIPES, plan=PLANS, tight=st.booleans())
def test_lanes_see_the_ops_in_the_order_that_the_simulator_predicts(recipe: Recipe, plan: Plan, tight: bool) -> None:
    got = ran(plan, recipe, tight=tight)
    model, sizes = profile(got.model), CacheSizes(host_cache_bytes=0, device_cache_bytes=None, staging_bytes=2**20)
    for step in range(FIRST, len(got.schedules)):
        predicted = simulate([got.schedules[step]], got.plan, model, HARDWARE, sizes=sizes, keep_trace=True)
        issued = got.trace.issued(step)
        assert issued == predicted.trace.issued(0)
        assert any(name.startswith("UPDATE ") for names in issued.values() for name in names)


@examples(5)
@given(recipe=RECIPES, plan=PLANS)
def test_a_kept_step_writes_the_predicted_bytes(recipe: Recipe, plan: Plan) -> None:
    got = ran(plan, recipe, kept=True)
    model, sizes = profile(got.model), CacheSizes(host_cache_bytes=0, device_cache_bytes=None, staging_bytes=2**20)
    assert model.kept_every == 1
    for step in range(FIRST, len(got.schedules)):
        predicted = simulate([got.schedules[step]], got.plan, model, HARDWARE, sizes=sizes, keep_trace=True).trace
        assert got.trace.issued(step) == predicted.issued(0)
        written = {s.name: s.num_bytes for s in got.spans("MIRROR", step)}
        expected = {s.name: s.num_bytes for s in predicted.spans if s.name.startswith("MIRROR ") and s.step == 0}
        assert written.keys() == expected.keys()
        for name, size in expected.items():
            assert size <= written[name] <= size + MIRROR_PAGES, name  # whole pages, and a head


DEVICE = replace(HARDWARE, shared_memory=False, link_h2d_bytes_per_s=1e9, link_d2h_bytes_per_s=1e9, device_update_params_per_s=1e9)


@examples(5)
@given(
    plan=PLANS,
    shape=st.builds(Shape, layers=st.integers(2, 4), tied=st.booleans(), frozen=st.sampled_from([(), (1,)])),
    swaps=st.booleans(),
    options=st.sampled_from([{}, {"clip": 0.3}, {"clip": 0.3, "clip_by": "value"}]),
)
def test_lanes_of_every_kind_see_the_ops_in_the_predicted_order(
    plan: Plan, shape: Shape, swaps: bool, options: dict[str, Any]
) -> None:
    """Lanes in the calling thread, with threads, and on streams; and those of the simulator."""
    saved = Saved.SWAP_HOST if swaps else Saved.KEEP
    rows = [replace(r, saved=saved) if r.update is UpdateLane.CPU else r for r in plan.blocks]
    rows = [r if r.state is not Tier.DEVICE or r.update is UpdateLane.DEVICE else replace(r, state=Tier.HOST) for r in rows]
    plan = replace(plan, blocks=tuple(rows))
    for kind in KINDS:
        with lanes_of(kind):
            got = ran(plan, Recipe(shape=shape, steps=FIRST + 2, **options), device=EmulatedDevice(memory="2MiB", seed=3))
        model, sizes = profile(got.model), CacheSizes(host_cache_bytes=0, device_cache_bytes=0, staging_bytes=2**20)
        for step in range(FIRST, len(got.schedules)):
            predicted = simulate([got.schedules[step]], got.plan, model, DEVICE, sizes=sizes, keep_trace=True)
            assert got.trace.issued(step) == predicted.trace.issued(0), kind


@examples(6)
@given(plan=PLANS, clip=st.sampled_from([None, 0.3]))
def test_the_engine_ranks_updates_as_the_simulator_does(plan: Plan, clip: float | None) -> None:
    got = ran(plan, Recipe(steps=FIRST + 1, clip=clip))
    model = profile(got.model)
    program = compile_step([got.schedules[-1]], got.plan, model, Rates(HARDWARE), staging_bytes=2**20)
    on_cpu = [i for i, b in enumerate(got.plan.blocks) if b.update is UpdateLane.CPU]
    ranks = {(j.source.block, j.rank // 2) for j in program.jobs if isinstance(j.source, Op) and j.source.kind is OpKind.UPDATE}
    # An update's first job, the arrival of its gradients, takes no time and has no rank.
    assert {row for row in got.armed if row[0] in on_cpu} == {row for row in ranks if row[0] in on_cpu and row[1]}
    if not plan.priority:
        assert len({priority for _, priority in got.armed}) == 1


@pytest.mark.parametrize("state", [Tier.DISK, Tier.HOST])
@pytest.mark.parametrize("clip", [None, 0.3], ids=["in_backward", "after_verdict"])
def test_a_naive_order_updates_one_block_after_the_other(state: Tier, clip: float | None) -> None:
    rules = (BlockPlan(name="model.blocks.*", weights=state, state=state), BlockPlan(name="*", state=state))
    got = ran(Plan(name="naive", blocks=rules, update_order=UpdateOrder.NAIVE), Recipe(shape=Shape(layers=6), steps=4, clip=clip))
    for step in range(FIRST, 4):
        kinds = ("FETCH state", "UPDATE", "STORE") if state is Tier.DISK else ("UPDATE",)
        updates = sorted(zip(*(got.spans(kind, step) for kind in kinds), strict=True), key=lambda spans: spans[0].order)
        assert len(updates) > 6
        for before, after in pairwise(updates):
            assert max(s.end_s for s in before) <= min(s.start_s for s in after)


def test_without_priority_the_next_forward_waits_until_the_last_step_is_on_the_disk() -> None:
    plan = Plan(name="p", blocks=(ON_DISK, BlockPlan(name="*", state=Tier.DISK)), priority=False)
    got = ran(plan, Recipe(shape=Shape(layers=12), steps=6, clip=0.3))
    assert {s.signature.updates for s in got.schedules} <= {Updates.AFTER_VERDICT, Updates.REDONE}
    forwards = [s for s in got.trace.spans if s.name.startswith("wait F ")]
    for step in range(FIRST, 6):
        first = min(s.end_s for s in forwards if s.step == step)
        stores = got.spans("STORE", step - 1)
        assert len(stores) > 12
        assert max(s.end_s for s in stores) <= first


def test_every_upload_has_the_predicted_rate() -> None:
    """Weights on the host and on disk; counted on the emulated link, which nobody waits for."""
    device = EmulatedDevice(memory="64MiB", h2d_bytes_per_s=4e9)
    host = BlockPlan(name="*", weights=Tier.HOST, state=Tier.HOST, update=UpdateLane.CPU)
    plan = Plan(name="both", blocks=(replace(ON_DISK, name="model.blocks.0", update=UpdateLane.CPU), host), device_cache_bytes=0)
    found: list[tuple[Op, int, float]] = []
    copy = EmulatedLanes.copy

    carried = threading.local()  # several lanes copy at the same time

    def carry(link: Any, size: int) -> None:
        carried.seconds = getattr(carried, "seconds", 0.0) + size * link._s_per_byte  # gradients are copied together

    def counted(lanes: EmulatedLanes, target: Any, source: Any) -> None:
        carried.seconds = 0.0
        copy(lanes, target, source)
        current = lanes._current()
        if current is not None and current.op.kind is OpKind.UPLOAD:
            found.append((current.op, source.nbytes, carried.seconds))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_hetero.lanes.emulated._Link.carry", carry)
        patch.setattr(EmulatedLanes, "copy", counted)
        got = ran(plan, Recipe(shape=Shape(layers=3), steps=1), device=device)
    rates = Rates(emulated(replace(HARDWARE, shared_memory=True, host_dram_bytes_per_s=1e12), device))
    model = profile(got.model)
    for op, num_bytes, seconds in found:
        amount = amount_of(replace(op, num_bytes=num_bytes), got.plan, model, rates.hardware)  # an op counts padding too
        assert amount is not None
        assert amount.alone_s(rates) == pytest.approx(num_bytes / 4e9)
        assert seconds == pytest.approx(amount.alone_s(rates)), op
    assert {got.plan.blocks[op.block].weights for op, *_ in found} >= {Tier.DISK, Tier.HOST}


def test_the_trace_says_for_which_fetch_compute_waited() -> None:
    """Without room for a second block, every use of one but the last waits for its own FETCH."""
    got = ran(Plan(name="p", blocks=(ON_DISK, BlockPlan(name="*"))), Recipe(steps=FIRST + 1), tight=True)
    found = {(s.at, s.waited_for) for s in stalls(got.trace) if s.step == FIRST}
    blocks = [b.name for b in got.model.blocks if b.name.startswith("model.blocks.")]
    assert len(blocks) > 2
    for name in blocks[1:]:
        assert (f"F {name}", f"FETCH {name}") in found
    for name in blocks[:-1]:
        assert (f"B {name}", f"FETCH {name}") in found
    assert all(not at or waited_for.split(" ")[-1] == at.split(" ")[-1] for at, waited_for in found if waited_for)


def test_compute_between_anchors_is_in_the_trace() -> None:
    got = ran(Plan(name="p", blocks=(BlockPlan(name="*"),)), Recipe(steps=FIRST + 1))
    spans = [s for s in got.trace.spans if s.lane == "compute" and s.step == FIRST and s.order < 0]
    forwards = [s.name for s in spans if s.name.startswith("F ")]
    backwards = [s.name for s in spans if s.name.startswith("B ")]
    names = [b.name for b in got.model.blocks]
    assert [name.removeprefix("F ") for name in forwards] == names
    assert [name.removeprefix("B ") for name in backwards] == [b.name for b in reversed(got.model.blocks) if not b.pinned]
    assert all(a.end_s <= b.start_s for a, b in pairwise(spans))
