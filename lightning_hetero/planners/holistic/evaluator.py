"""Evaluates the plans of one search: each once, and none that cannot be the fastest."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from lightning_hetero.clock import now_s
from lightning_hetero.errors import PlanError, RateError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan, Prediction
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.lowering import cache_sizes, fitted
from lightning_hetero.planners.evaluation import peaks, simulation
from lightning_hetero.planners.gathering import gathering

_REFUSAL = 0.1  # of the time of a simulation


class Evaluator:
    """Simulates plans of one model on one machine, each once, and keeps the fastest.

    Args:
        model: The model.
        hardware: The machine.
        updates: When updates may run.
        evaluations: How many simulations are allowed.
        bound_s: A lower bound of a plan's step, seconds. A plan whose bound is above the best step
            is not simulated.
        deadline_s: Monotonic time after which none is allowed any more.

    Attributes:
        evaluations: Simulations so far.
        best: The fastest plan so far, with its prediction.
        best_s: Its step, seconds; infinite before there is one.
        proved: Whether the invariants of its schedules have been proved.
        refusal: Why the last plan that did not fit did not.
    """

    def __init__(
        self,
        model: ModelProfile,
        hardware: HardwareProfile,
        *,
        updates: Updates,
        evaluations: int,
        bound_s: Callable[[Plan], float] = lambda plan: 0.0,
        deadline_s: float = math.inf,
    ) -> None:
        self.model, self.hardware, self.updates = model, hardware, updates
        self.evaluations = 0
        self.best: Plan | None = None
        self.best_s = math.inf
        self.proved = False
        self.refusal: PlanError | None = None
        self._most, self._bound_s, self._deadline_s = evaluations, bound_s, deadline_s
        self._known: dict[object, float] = {}
        self._evaluated: list[tuple[Plan, float]] = []
        self._refused = 0
        self._charged = 0.0

    @property
    def exhausted(self) -> bool:
        """No simulation is left."""
        return self.left <= 0 or now_s() >= self._deadline_s

    @property
    def spent(self) -> float:
        """Simulations so far. Refused plans and charged work count as fractions."""
        return self.evaluations + _REFUSAL * self._refused + self._charged

    @property
    def left(self) -> float:
        """Simulations that are left."""
        return self._most - self.spent

    @property
    def evaluated(self) -> tuple[tuple[Plan, float], ...]:
        """All plans that fit, with their steps."""
        return tuple(self._evaluated)

    def charge(self, simulations: float) -> None:
        """Counts other work as so many simulations."""
        self._charged += simulations

    def knows(self, plan: Plan) -> bool:
        """Whether a resolved plan has been evaluated, or refused."""
        return _key(self._fitted(plan)) in self._known

    def shortfall(self, plan: Plan) -> PlanError | None:
        """Why a resolved plan does not fit; ``None`` if it may."""
        try:
            cache_sizes(self._fitted(plan), self.model, self.hardware, updates=self.updates)
        except PlanError as error:
            self.refusal = error
            return error
        return None

    def admit(self, plan: Plan, *, proved: bool, anyway: bool = False) -> None:
        """Takes a plan with its prediction if it is the fastest, or ``anyway``."""
        step_s = plan.require_predicted().iteration_s
        self._evaluated.append((plan, step_s))
        if anyway or step_s < self.best_s:
            self.best, self.best_s, self.proved = plan, step_s, proved

    def seconds(self, plan: Plan, *, always: bool = False) -> float:
        """A resolved plan's step.

        Infinite if it does not fit or needs work for which the machine has no rate, if it cannot be
        the best, or if no simulation is left and ``always`` does not ask for one.
        """
        plan = self._fitted(plan)
        key = _key(plan)
        if key not in self._known:
            if self.exhausted and not always:
                return math.inf
            predicted = self._simulated(plan) if self._bound_s(plan) < self.best_s else None
            self._known[key] = math.inf if predicted is None else predicted.iteration_s
            if predicted is not None:
                self.admit(replace(plan, predicted=predicted), proved=False)
        return self._known[key]

    def _fitted(self, plan: Plan) -> Plan:
        return fitted(gathering(plan, self.hardware), self.model.shape(), device=self.hardware.copies_weights)

    def _simulated(self, plan: Plan) -> Prediction | None:
        if self.shortfall(plan) is not None:
            self._refused += 1
            return None
        try:
            p = simulation(plan, self.model, self.hardware, updates=self.updates).prediction
        except RateError:
            return None
        self.evaluations += 1
        return p if all(peak <= most for _, peak, most in peaks(p, self.hardware)) else None


def _key(plan: Plan) -> object:
    rows = tuple((b.weights, b.state, b.update, b.saved, b.boundary, tuple(sorted(b.operators.items()))) for b in plan.blocks)
    knobs = (plan.prefetch_depth, plan.gradient_depth, plan.update_order, plan.priority, plan.micro_batches)
    return rows, knobs, plan.device_cache_bytes, plan.host_cache_bytes
