"""On any model and machine: no plan beats the lower bound, and no other planner beats ours."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.profiles import machines, models, plans
from support.properties import examples

from lightning_hetero.errors import PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Saved, UpdateLane
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.planners import PLANNERS
from lightning_hetero.planners.evaluation import evaluated
from lightning_hetero.planners.holistic import plan
from lightning_hetero.planners.holistic.plan_bounds import PlanBounds
from lightning_hetero.planners.holistic.relaxation import Relaxation
from lightning_hetero.planners.micro_batches import split

TIE = 1 + 1e-9
EVALUATIONS = 12  # that a search may use here: what is promised does not depend on how long it looks
SOLVED = 1 + 1e-6  # the solver's tolerance


@examples(100)
@given(models(), machines(), st.sampled_from([Updates.IN_BACKWARD, Updates.AFTER_VERDICT, Updates.SPECULATIVE]), st.data())
def test_no_plan_is_faster_than_the_bound(
    model: ModelProfile, hardware: HardwareProfile, updates: Updates, data: st.DataObject
) -> None:
    placed = data.draw(plans(model, hardware))
    try:
        found = evaluated(placed, model, hardware, updates=updates)
    except PlanError:
        assume(False)
    assert found.predicted is not None
    relaxation = Relaxation(model, hardware, micro_batches=placed.micro_batches, updates=updates)
    bound = relaxation.bound_s()
    assert bound is not None, "a plan fits and the relaxation does not"
    assert bound <= found.predicted.iteration_s * SOLVED
    assert PlanBounds(relaxation).seconds(found) <= found.predicted.iteration_s * TIE


@examples(20)
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
    ours = plan(model, hardware, prefer_resident=0.0, evaluations=EVALUATIONS, seconds=60.0)
    assert ours.predicted is not None
    assert all(ours.predicted.iteration_s <= seconds * TIE for seconds in others.values()), others
    assert ours.decisions["lower_bound_s"] <= ours.predicted.iteration_s * SOLVED
    if hardware.shared_memory:
        assert {(b.saved, b.boundary) for b in ours.blocks} == {(Saved.KEEP, Saved.KEEP)}


@examples(20)
@given(models(), machines())
def test_resident_is_chosen_if_nothing_is_faster(model: ModelProfile, hardware: HardwareProfile) -> None:
    roomy = replace(hardware, device_memory_bytes=10**11, host_memory_bytes=10**11, cpu_update_params_per_s=1e5)
    found = plan(model, roomy, prefer_resident=0.0)
    if hardware.shared_memory:
        return  # the same threads update, whichever lane they are said to be on
    assert {b.update for b, p in zip(found.blocks, model.blocks, strict=True) if p.num_trainable_params} <= {UpdateLane.DEVICE}
    assert {b.saved for b in found.blocks} == {Saved.KEEP}
    assert found.objective_s == pytest.approx(PLANNERS["resident"](model, roomy).objective_s)


@examples(20)
@given(models(), machines(), st.sampled_from([2, 4]))
def test_a_split_batch_is_never_worse_than_a_whole_one(model: ModelProfile, hardware: HardwareProfile, parts: int) -> None:
    try:
        whole = plan(model, hardware, evaluations=EVALUATIONS, seconds=60.0)
    except PlanError:
        return
    either = plan(model, hardware, micro_batches=(1, parts), evaluations=EVALUATIONS, seconds=60.0)
    assert whole.objective_s is not None
    assert either.objective_s is not None
    assert either.objective_s <= whole.objective_s * TIE
    part = split(model, either.micro_batches)
    assert evaluated(either, part, hardware).predicted == either.predicted
