"""On small models the joint planner finds a plan that is as fast as the fastest of all, which
trying all of them gives.
"""

from __future__ import annotations

import pytest
from brute_force import SmallCase, fastest, small_cases
from support.covers import is_deep

from lightning_hetero.errors import PlanError
from lightning_hetero.ir.plan import Plan
from lightning_hetero.planners.holistic import plan

WITHIN = 0.02
MOST_GAP = 0.05  # at which a search may stop although there is more to try

CASES = [*small_cases(50, 0)][:: 1 if is_deep() else 2]
ONE_MEMORY = [*small_cases(25, 4, most_plans=1300, unified=True)][:: 1 if is_deep() else 3]
NO_RATE = [*small_cases(25, 2, most_plans=1300, zero_rates=True)][:: 1 if is_deep() else 3]
RANKS = [*small_cases(25, 6, most_plans=1300, ranks=True)][:: 1 if is_deep() else 2]

DEVICES = [*small_cases(24, 8, most_plans=1300, ranks=True, devices=True)][:: 1 if is_deep() else 6]

# More simulations only add plans to choose from, so few of them are tried first by default.
FEW = 150


def _plan(case: SmallCase, evaluations: int | None) -> Plan:
    return plan(case.model, case.hardware, updates=case.updates, prefer_resident=0.0, evaluations=evaluations)


def _check(case: SmallCase) -> None:
    best = fastest(case)
    try:
        found = _plan(case, None if is_deep() else FEW)
        assert found.objective_s is not None
        if found.objective_s > best.seconds * (1 + WITHIN):
            found = _plan(case, None)
    except PlanError:
        assert best.plan is None, case.name
        return
    assert found.objective_s is not None
    assert found.objective_s <= best.seconds * (1 + WITHIN), case.name
    gap, ended = found.decisions["gap"], found.decisions["ended"]
    assert gap <= MOST_GAP or ended in ("time", "all tried"), (case.name, gap, ended)


@pytest.mark.parametrize("part", range(3))
def test_no_plan_of_a_small_model_is_much_faster(part: int) -> None:
    for case in CASES[part::3]:
        _check(case)


def test_the_same_where_device_and_host_have_one_memory() -> None:
    for case in ONE_MEMORY:
        _check(case)


def test_the_same_if_the_machine_has_no_rate_for_some_work() -> None:
    for case in NO_RATE:
        _check(case)


def test_the_same_for_ranks_that_share_a_model() -> None:
    for case in (*RANKS, *DEVICES):
        _check(case)
