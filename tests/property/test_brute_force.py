"""On small models the joint planner finds a plan that is as fast as the fastest of all, which
trying all of them gives.
"""

from __future__ import annotations

import pytest
from brute_force import SmallCase, fastest, small_cases
from support.covers import is_deep

from lightning_hetero.errors import PlanError
from lightning_hetero.planners.holistic import plan

WITHIN = 0.02
MOST_GAP = 0.05  # at which a search may stop although there is more to try

# Most cases have few plans, so that trying all of them takes a fraction of a second;
# benchmarks/planners.py has larger ones. A third of each kind by default, all with
# HYPOTHESIS_PROFILE=deep.
EVERY = 1 if is_deep() else 3
CASES = [*small_cases(38, 0, most_plans=1300), *small_cases(12, 1, most_plans=3500)][::EVERY]
NO_RATE = [*small_cases(25, 2, most_plans=1300, zero_rates=True)][::EVERY]


def _check(case: SmallCase) -> None:
    best = fastest(case)
    try:
        found = plan(case.model, case.hardware, updates=case.updates, prefer_resident=0.0, evaluations=None)
    except PlanError:
        assert best.plan is None, case.name
        return
    assert found.objective_s is not None
    assert found.objective_s <= best.seconds * (1 + WITHIN), case.name
    gap, ended = found.decisions["gap"], found.decisions["ended"]
    assert gap <= MOST_GAP or ended in ("time", "all tried"), (case.name, gap, ended)


@pytest.mark.parametrize("part", range(5))
def test_no_plan_of_a_small_model_is_much_faster(part: int) -> None:
    for case in CASES[part::5]:
        _check(case)


def test_the_same_if_the_machine_has_no_rate_for_some_work() -> None:
    for case in NO_RATE:
        _check(case)
