"""The solvers of the holistic planner's programme."""

from __future__ import annotations

from typing import Any

import cvxpy as cp
import numpy as np
import pytest
from scipy.sparse import csr_array

from lightning_hetero.planners.holistic import solvers
from lightning_hetero.planners.holistic.solvers import Programme, UnsolvedError, minimum


def programme(seed: int, *, capacity: float = 1.0) -> Programme:
    """Shares that sum to one in each of a few groups, and a knapsack over all of them."""
    random = np.random.default_rng(seed)
    groups, choices = 4, 3
    equal = np.kron(np.eye(groups), np.ones(choices))
    sizes = random.uniform(0.5, 1.0, groups * choices)
    below = np.stack((sizes, np.where(sizes > 0.75, sizes, 0.0)))
    return Programme(
        cost=random.uniform(0.0, 1.0, groups * choices),
        below=csr_array(below),
        most=np.array([capacity * groups, capacity]),
        equal=csr_array(equal),
        value=np.ones(groups),
    )


def by_cvxpy(given: Programme) -> Any:
    x = cp.Variable(len(given.cost), nonneg=True)
    rows = [given.below @ x <= given.most, given.equal @ x == given.value]
    problem = cp.Problem(cp.Minimize(given.cost @ x), rows)
    problem.solve(solver=cp.HIGHS, highs_options={"presolve": "off"})  # type: ignore[no-untyped-call]
    return x.value


@pytest.mark.parametrize("seed", range(5))
def test_highs_has_the_optimum_that_it_has_through_cvxpy(seed: int) -> None:
    given = programme(seed)
    found = minimum(given)
    assert found is not None
    assert given.cost @ found == pytest.approx(given.cost @ by_cvxpy(given), abs=1e-12)


def test_rows_that_nothing_satisfies_have_no_optimum() -> None:
    given = programme(0, capacity=0.1)
    assert minimum(given) is None
    assert by_cvxpy(given) is None


def gives_up(_: Programme) -> Any:
    raise UnsolvedError("badly conditioned")


def test_another_solver_goes_on_where_highs_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    given = programme(1)
    expected = minimum(given)
    monkeypatch.setattr(solvers, "_highs", gives_up)
    found = minimum(given)
    assert found is not None
    assert expected is not None
    assert given.cost @ found == pytest.approx(given.cost @ expected, abs=1e-6)
    assert minimum(programme(0, capacity=0.1)) is None


def test_without_an_answer_nothing_is_said_to_be_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solvers, "_highs", gives_up)
    monkeypatch.setattr(solvers, "_clarabel", gives_up)
    with pytest.raises(UnsolvedError):
        minimum(programme(1))


def test_a_programme_with_numbers_that_are_none_is_not_solved() -> None:
    with pytest.raises(UnsolvedError):
        minimum(programme(1, capacity=float("nan")))
