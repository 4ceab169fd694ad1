"""On any model and machine: no plan beats the lower bound, and no other planner beats ours."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.properties import examples

from lightning_hetero.errors import PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile, OperatorProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, UpdateLane, UpdateOrder
from lightning_hetero.planners import PLANNERS
from lightning_hetero.planners.choices import placements, policies
from lightning_hetero.planners.floors import Floors
from lightning_hetero.planners.holistic import plan
from lightning_hetero.planners.judge import judged
from lightning_hetero.planners.micro_batches import split
from lightning_hetero.planners.relaxation import Relaxation

MB = 10**6
TIE = 1 + 1e-9
SOLVED = 1 + 1e-6  # the solver's tolerance


@st.composite
def block_profiles(draw: st.DrawFn, name: str, *, pinned: bool = False) -> BlockProfile:
    params, saved = draw(st.integers(1, 20)) * MB, draw(st.integers(0, 20)) * 10 * MB
    trained = params if draw(st.integers(0, 7)) else 0
    seconds, flop = draw(st.integers(1, 40)) * 1e-3, 100.0
    shares = draw(st.lists(st.integers(1, 10), max_size=3))
    operators = tuple(
        OperatorProfile(name=f"op{i}", flop=flop * draw(st.integers(0, 30)) / 100, bytes=saved * share // 40)
        for i, share in enumerate(shares)
    )
    return BlockProfile(
        name=name,
        num_params=params,
        num_trainable_params=trained,
        forward_s=seconds,
        backward_s=2 * seconds,
        forward_flop=flop,
        activation_bytes=saved,
        boundary_bytes=saved // 10,
        transient_bytes=draw(st.integers(0, 5)) * 10 * MB,
        operators=operators,
        pinned=pinned,
    )


@st.composite
def models(draw: st.DrawFn) -> ModelProfile:
    count = draw(st.integers(1, 6))
    if draw(st.booleans()):
        layer = draw(block_profiles("layer"))
        layers = [replace(layer, name=f"layers.{i}") for i in range(count)]
    else:
        layers = [draw(block_profiles(f"layers.{i}")) for i in range(count)]
    ends = [draw(block_profiles(name, pinned=True)) for name in ("embedding", "head")] if draw(st.booleans()) else []
    return ModelProfile(
        name="m",
        tokens=8,
        compute_itemsize=draw(st.sampled_from([2, 4])),
        constant_device_bytes=draw(st.integers(0, 3)) * 10 * MB,
        constant_host_bytes=draw(st.integers(0, 3)) * 10 * MB,
        blocks=(*ends[:1], *layers, *ends[1:]),
    )


@st.composite
def machines(draw: st.DrawFn) -> HardwareProfile:
    def rate(lowest: float) -> float:
        return lowest * 2 ** draw(st.integers(0, 7))

    shared, disk = draw(st.integers(0, 3)) == 0, draw(st.integers(0, 3)) > 0
    device = draw(st.integers(2, 40)) * 50 * MB
    pairs = st.sampled_from(["compute|update", "update|compute", "compute|copy", "copy|compute", "disk|update", "update|disk"])
    return HardwareProfile(
        name="h",
        device_memory_bytes=device,
        host_memory_bytes=(device if shared else 0) + draw(st.integers(1, 40)) * 50 * MB,
        disk_capacity_bytes=draw(st.integers(1, 40)) * 100 * MB if disk else 0,
        device_flop_per_s=1e12,
        link_h2d_bytes_per_s=0.0 if shared else rate(1e9),
        link_d2h_bytes_per_s=0.0 if shared else rate(1e9),
        disk_read_bytes_per_s=rate(2e8) if disk else 0.0,
        disk_write_bytes_per_s=rate(2e8) if disk else 0.0,
        disk_duplex=draw(st.booleans()),
        host_dram_bytes_per_s=rate(2e9),
        cpu_update_params_per_s=rate(5e7),
        device_update_params_per_s=rate(5e8),
        cpu_downcast_params_per_s=1e9,
        shared_memory=shared,
        contention=draw(st.dictionaries(pairs, st.floats(1, 3), max_size=3)),
    )


@st.composite
def plans(draw: st.DrawFn, model: ModelProfile, hardware: HardwareProfile) -> Plan:
    """Anything that the machine can do, whether it fits or not."""
    allowed = policies(hardware)
    inputs = [policy for policy in allowed if policy is not Saved.RECOMPUTE]
    rows = []
    for block in model.blocks:
        weights, state, update = draw(st.sampled_from(placements(block, hardware)))
        rows.append(
            BlockPlan(
                name=block.name,
                weights=weights,
                state=state,
                update=update,
                saved=draw(st.sampled_from(allowed)),
                boundary=draw(st.sampled_from(inputs)),
                operators={o.name: draw(st.sampled_from(allowed)) for o in block.operators if draw(st.booleans())},
            )
        )
    return Plan(
        name="random",
        blocks=tuple(rows),
        prefetch_depth=draw(st.integers(1, 4)),
        gradient_depth=draw(st.integers(1, 6)),
        update_order=draw(st.sampled_from(UpdateOrder)),
        priority=draw(st.booleans()),
        micro_batches=1 if hardware.shared_memory else draw(st.integers(1, 3)),
    )


@examples(300)
@given(models(), machines(), st.data())
def test_no_plan_is_faster_than_the_bound(model: ModelProfile, hardware: HardwareProfile, data: st.DataObject) -> None:
    placed = data.draw(plans(model, hardware))
    try:
        found = judged(placed, model, hardware)
    except PlanError:
        assume(False)
    assert found.predicted is not None
    relaxation = Relaxation(model, hardware, micro_batches=placed.micro_batches)
    bound = relaxation.bound_s()
    assert bound is not None, "a plan fits and the relaxation does not"
    assert bound <= found.predicted.iteration_s * SOLVED
    assert Floors(relaxation).seconds(found) <= found.predicted.iteration_s * TIE


@examples(40)
@given(models(), machines())
def test_no_other_planner_is_faster(model: ModelProfile, hardware: HardwareProfile) -> None:
    others = {}
    for name, planner in PLANNERS.items():
        if name != "holistic":
            try:
                others[name] = planner(model, hardware).predicted.iteration_s
            except PlanError:
                continue
    if not others:
        with suppress(PlanError):
            plan(model, hardware)
        return
    ours = plan(model, hardware, prefer_resident=0.0, seconds=60.0)
    assert ours.predicted is not None
    assert all(ours.predicted.iteration_s <= seconds * TIE for seconds in others.values()), others
    assert ours.decisions["lower_bound_s"] <= ours.predicted.iteration_s * SOLVED
    if hardware.shared_memory:
        assert {(b.saved, b.boundary) for b in ours.blocks} == {(Saved.KEEP, Saved.KEEP)}


@examples(40)
@given(models(), machines())
def test_resident_is_chosen_where_nothing_is_faster(model: ModelProfile, hardware: HardwareProfile) -> None:
    roomy = replace(hardware, device_memory_bytes=10**11, host_memory_bytes=10**11, cpu_update_params_per_s=1e5)
    found = plan(model, roomy, prefer_resident=0.0)
    if hardware.shared_memory:
        return  # the same threads update, whichever lane they are said to be on
    assert {b.update for b, p in zip(found.blocks, model.blocks, strict=True) if p.num_trainable_params} <= {UpdateLane.DEVICE}
    assert {b.saved for b in found.blocks} == {Saved.KEEP}
    assert found.objective_s == pytest.approx(PLANNERS["resident"](model, roomy).objective_s)


@examples(40)
@given(models(), machines(), st.sampled_from([2, 4]))
def test_a_split_batch_is_never_worse_than_a_whole_one(model: ModelProfile, hardware: HardwareProfile, parts: int) -> None:
    try:
        whole = plan(model, hardware, seconds=60.0)
    except PlanError:
        return
    either = plan(model, hardware, micro_batches=(1, parts), seconds=60.0)
    assert whole.objective_s is not None
    assert either.objective_s is not None
    assert either.objective_s <= whole.objective_s * TIE
    part = split(model, either.micro_batches)
    assert judged(either, part, hardware).predicted == either.predicted
