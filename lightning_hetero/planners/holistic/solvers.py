"""The least value of a linear programme: by HiGHS itself, and by Clarabel where that gives up.

HiGHS gets the programme as cvxpy would give it, equations first and columns compressed, so the
optimum has the same bits. cvxpy takes a second to import, and HiGHS a tenth: only Clarabel is
called through cvxpy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from lightning_hetero.planners.holistic.bounds import Vector

Sparse = Any  # a matrix of scipy.sparse, which has no types


class UnsolvedError(RuntimeError):
    """No solver could say whether a programme has an optimum."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Programme:
    """The least of ``cost @ x`` where ``x >= 0``, ``below @ x <= most``, ``equal @ x == value``."""

    cost: Vector
    below: Sparse
    most: Vector
    equal: Sparse
    value: Vector


def load_solver() -> None:
    """Imports the solver once, so that it is no part of the time that planning takes.

    Raises:
        ImportError: highspy is not installed.
    """
    import_module("highspy")


def minimum(programme: Programme) -> Vector | None:
    """The values of the variables at the optimum; ``None`` if nothing satisfies all rows.

    Raises:
        UnsolvedError: No solver knows.
    """
    parts = (programme.cost, programme.most, programme.value, programme.below.data, programme.equal.data)
    solvers: tuple[Callable[[Programme], Vector | None], ...] = (_highs, _clarabel)
    for solver in solvers if all(np.isfinite(part).all() for part in parts) else ():
        try:
            return solver(programme)
        except UnsolvedError:
            continue
    raise UnsolvedError("no solver finds an optimum")


def _highs(programme: Programme) -> Vector | None:
    highs: Any = import_module("highspy")  # no types of its own
    from scipy.sparse import vstack  # slow

    matrix = vstack((programme.equal, programme.below)).tocsc()
    free = np.full(len(programme.most), -highs.kHighsInf)
    model = highs.HighsModel()
    lp = model.lp_
    lp.num_row_, lp.num_col_ = matrix.shape
    lp.col_cost_ = programme.cost
    lp.col_lower_, lp.col_upper_ = np.zeros(len(programme.cost)), np.full(len(programme.cost), highs.kHighsInf)
    lp.row_lower_ = np.concatenate((programme.value, free))
    lp.row_upper_ = np.concatenate((programme.value, programme.most))
    lp.a_matrix_.format_ = highs.MatrixFormat.kColwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = matrix.indptr, matrix.indices, matrix.data
    solver = highs.Highs()
    solver.setOptionValue("log_to_console", False)
    solver.setOptionValue("presolve", "off")  # it takes longer than it saves
    solver.passModel(model)
    solver.run()
    status = solver.getModelStatus()
    if status == highs.HighsModelStatus.kOptimal:
        return np.array(solver.getSolution().col_value)
    if status == highs.HighsModelStatus.kInfeasible:
        return None
    raise UnsolvedError(f"HiGHS: {status.name}")


def _clarabel(programme: Programme) -> Vector | None:
    """It solves a few badly conditioned programmes on which HiGHS gives up."""
    import cvxpy as cp  # takes a second to import

    x = cp.Variable(len(programme.cost), nonneg=True)
    constraints = [programme.below @ x <= programme.most, programme.equal @ x == programme.value]
    problem = cp.Problem(cp.Minimize(programme.cost @ x), constraints)
    try:
        problem.solve(solver=cp.CLARABEL)
    except (cp.SolverError, ValueError) as error:
        raise UnsolvedError(f"Clarabel: {error}") from error
    if problem.status == cp.INFEASIBLE:
        return None
    if problem.status != cp.OPTIMAL or x.value is None:
        raise UnsolvedError(f"Clarabel: {problem.status}")
    return np.asarray(x.value)
