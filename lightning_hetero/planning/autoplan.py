"""Planning during training: which batches are profiled, when a plan is made, when it is made anew.

The stages of a fit: *record* the operators of one batch, *time* the blocks (in several batches,
whose median counts), *plan* before the next batch, then *run* and compare steps with the plan. A
drift goes back to the stage whose result has become outdated. "When a new plan is made" in
docs/auto.md says what counts as a drift, and when the machine's rates are corrected.

[Note: A batch that does not fit]
If the device's memory is too small for a batch, the runtime continues with a lesser plan
(``strategies/step_retry.py``), and the next batches are recorded and timed again; a profile is the
same under any plan (``profiling/memory.py``). Then a new plan is made. If the plan that failed was
made from a profile of these batches, the new one leaves the missing memory free. If there is no
such plan, training continues with the lesser one, which fits.

[Note: Ranks plan together]
Ranks that share a model have one plan. Each looks at its own batches, steps and budget, and before
each batch they tell each other what they came to (:meth:`Autoplan._agree`): the earliest stage
counts for all, so none goes on alone. The batches that are measured are the same on all ranks, and
their profiles are merged (``planning/merged.py``).
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

from lightning_hetero.clock import now_s
from lightning_hetero.errors import DeviceMemoryError, OutOfMemoryBudgetError, PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile, ModelShape
from lightning_hetero.ir.plan import Plan
from lightning_hetero.lanes import Device
from lightning_hetero.lanes.decisions import Decisions
from lightning_hetero.lowering.rank_rules import EVERYTHING
from lightning_hetero.planners import BUILTIN_PLANS
from lightning_hetero.planners.baselines import check_machine
from lightning_hetero.planning.fit_planning import FitPlanning, scaled
from lightning_hetero.planning.machine_profile import Machine
from lightning_hetero.planning.together import ALONE, Together
from lightning_hetero.profiling.memory import Observed, OperatorMeasure, kept_bytes, measures
from lightning_hetero.profiling.model import BatchProfiler, check_activations, model_profile
from lightning_hetero.runtime.optimizers import Rule
from lightning_hetero.runtime.session import Session
from lightning_hetero.store.capacity import heap_size
from lightning_hetero.units import format_bytes

_TIMED = 3  # batches: the fewest whose median ignores one outlier
_WINDOW = 5  # batches or steps that a drift must last
_PATIENCE = 16  # steps after a plan before a drift of time or budget may cause another one
_REFINE = 0.15  # relative difference of the first steps that corrects the machine's rates
_GAIN = 0.02  # relative: with corrected rates, a smaller gain does not justify a move
_LEAST_S = 0.02  # difference per step below which planning is not worth it
_LONG_S = 5.0  # a measured batch that takes longer is spoken of
_UNKNOWN_SHORT = 32  # this fraction of the device's memory, if the error gives no size
_LEAST_SHORT = 4096  # bytes: the least that a device is assumed to be too small by

log = logging.getLogger(__name__)


class Stage(Enum):
    """What the next batch is for."""

    RECORD = "record"
    TIME = "time"
    PLAN = "plan"
    RUN = "run"


_ORDER = tuple(Stage)  # the earliest one that a rank has come to counts


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """What planning needs to know of a batch."""

    tokens: int  # samples if there are no tokens
    micro_batches: int  # per optimizer step


class Autoplan:
    """Plans for one strategy by a planner's name, for the machine that the fit runs ``on``.

    ``drift`` is the relative change of batch, budget or step time that causes a new plan, if any.
    """

    def __init__(self, planner: str, on: Machine, *, drift: float | None) -> None:
        self.planner, self._on, self._drift, self._together = planner, on, drift, ALONE
        self._runs = EVERYTHING  # that the fit's ranks run
        self._corrects = not on.is_given  # the first steps correct rates that were measured
        self.stage = Stage.RECORD  # what the next batch is for
        self.plan: Plan | None = None
        self.model: ModelProfile | None = None  # once there is one
        self.machine: HardwareProfile | None = None  # that the plan was made with
        self.profiler: BatchProfiler | None = None  # profiles the current batch, if that batch is profiled
        self.planned_s = 0.0  # of the last planning, including measuring the machine
        self.moved_s = 0.0  # to move weights and state to where that plan puts them
        self._observed: list[Observed] = []  # the recorded batch first, then the timed ones
        self._constant_bytes = self._constant_device_bytes = 0
        self._heap_bytes = 0  # before the first batch
        self._budget_bytes = 0
        self._from_profile = False  # the plan in force was made from the profile
        self._is_lesser = False  # the plan in force has given something up
        self._micro_batches = 1
        self._short_bytes = 0  # device memory that batches needed beyond what plans left them
        self._expected_s: float | None = None
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._odd_batches = 0
        self._patience, self._steps = _PATIENCE, 0
        self._reason = ""
        self._measures = False  # the current batch is measured, on all ranks
        self._measured_from_s = 0.0  # when the batch that is being measured began
        self._trust_machine()

    def _trust_machine(self) -> None:
        """Forgets the corrections of the machine's profile."""
        self._scale = 1.0  # of all rates except compute, from the times of steps
        self._may_refine, self._may_measure = self._corrects, True
        self._held: Plan | None = None  # the plan in force, predicted with corrected rates
        self._doubted_s: float | None = None  # a step's time that differs from its prediction

    @property
    def _basis(self) -> tuple[Plan, ModelProfile, HardwareProfile] | None:
        """The last plan with the profiles that it was made from."""
        if self.plan is None or self.model is None or self.machine is None:
            return None
        return self.plan, self.model, self.machine

    def operators(self) -> tuple[OperatorMeasure, ...]:
        """The operators of the recorded batch, one by one."""
        return measures(self._observed[0]) if self._observed else ()

    @property
    def steady(self) -> bool:
        """Whether the prediction applies to the last step: not to a first or a profiled one."""
        return self.stage is Stage.RUN and self._steps > 1

    def join(self, decisions: Decisions) -> None:
        """Says that this process is one of several ranks, before a fit."""
        self._together = Together(decisions)

    @property
    def may_plan(self) -> bool:
        """Whether :meth:`before_batch` may plan."""
        return self.stage is Stage.PLAN or self._together.shards > 1

    # ---- calls of the strategy ---------------------------------------------------------------

    def provisional(self, device: Device | None) -> tuple[Callable[[ModelShape], Plan], ...]:
        """Plans to start with, in order: the model's earlier one, all in memory, the least.

        Nothing is on the host of which the device, in the same memory, would need copies.
        """
        names = ("host",) if device is None else ("resident",) if device.is_unified else ("host", "resident")
        first, *others = (BUILTIN_PLANS[name] for name in (*names, "disk"))
        return partial(self._known, first), *(partial(self._as_ranks_can, one) for one in others)  # a strategy can be pickled

    def _as_ranks_can(self, make: Callable[[ModelShape], Plan], model: ModelShape) -> Plan:
        return self._runs.nearest(make(model))

    def _known(self, first: Callable[[ModelShape], Plan], model: ModelShape) -> Plan:
        if self.plan is not None and self._knows((b.name, b.num_params) for b in model.blocks):
            return self.plan
        return self._as_ranks_can(first, model)

    def _knows(self, sizes: Iterable[tuple[str, int]]) -> bool:
        return self.model is not None and [(b.name, b.num_params) for b in self.model.blocks] == list(sizes)

    def fit_begins(self, session: Session) -> None:
        """A fit is about to start.

        The plan of an earlier fit stays if the model has the same blocks.
        """
        check_machine(self.planner, "CPU", shared_memory=session.options.device is None)
        self._runs = session.runs
        self._times.clear()
        self._steps = self._odd_batches = 0
        if not self._knows((b.name, sum(p.num_elements for p in b.parts)) for b in session.blocks):
            self.plan = self.model = None
            self.stage = Stage.RECORD
            self._constant_bytes = 0
            self._trust_machine()
        if self.stage is Stage.RECORD:
            log.info("the first %d batches are measured; then planner %r makes a plan.", 1 + _TIMED, self.planner)
        self._from_profile, self._is_lesser = self.plan is not None, False
        session.profile = self.model

    def request(self, *, budget: bool = False) -> None:
        """Asks for a new plan. If only the budget has changed, the model's profile stays valid."""
        if self.stage is Stage.RUN:
            log.info("planning anew: asked for%s.", ", with another budget" if budget else "")
            self.stage, self._reason = Stage.PLAN if budget else Stage.TIME, ""

    def before_batch(self, session: Session, batch: BatchSize) -> Plan | None:
        """A training batch is about to begin.

        Returns the plan if a new one has just come into force.
        """
        self.abandon_batch()
        self._check_batch(batch)
        batch = self._agree(batch)
        made = self._plan(session, batch) if self.stage is Stage.PLAN else None
        self._measures = self.stage in (Stage.RECORD, Stage.TIME)
        if self._measures:
            if not self._constant_bytes:  # later the process also holds what malloc keeps for the next step
                self._constant_bytes = max(1, session.resident_meter() - session.present_bytes)
                self._heap_bytes = heap_size()
                self._constant_device_bytes = session.running.lanes.allocated_bytes()
            self.profiler = BatchProfiler(session, tokens=batch.tokens, operators=self.stage is Stage.RECORD)
            self.profiler.start()
            self._measured_from_s = now_s()
        return made

    def after_batch(self) -> None:
        """The batch is over."""
        if not self._measures:
            return
        profiler, self.profiler, self._measures = self.profiler, None, False
        observed = None if profiler is None else profiler.stop()
        if not self._together.all(observed is not None) or observed is None:
            return  # it had no backward: the next batch is profiled instead
        if self.stage is Stage.RECORD:
            self._observed, self.stage = [observed], Stage.TIME
            self._say_measured(1)
            return
        recorded, *timed = self._observed
        if len(timed) == _TIMED:
            timed = []  # they are from before the last plan
        self._say_measured(len(timed) + 2)
        self._observed = [recorded, *timed, observed]
        if len(timed) + 1 == _TIMED:
            self.stage = Stage.PLAN

    def _say_measured(self, number: int) -> None:
        took_s, of = now_s() - self._measured_from_s, 1 + _TIMED
        if took_s >= _LONG_S:
            log.info("batch %d of the %d that are measured took %.0f s.", number, of, took_s)

    def abandon_batch(self) -> None:
        """The current batch will not end normally."""
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None

    def demoted(self, error: BaseException, memory_bytes: int) -> None:
        """A batch did not fit the device's memory: see [Note: A batch that does not fit]."""
        self.abandon_batch()
        if self._from_profile:  # otherwise the plan did not know yet what the batch needs
            unknown = 0 if isinstance(error, DeviceMemoryError) else memory_bytes // _UNKNOWN_SHORT
            short = getattr(error, "needed_bytes", 0) - getattr(error, "free_bytes", 0)
            self._short_bytes += max(_LEAST_SHORT, short, unknown)
        if self.stage is Stage.RUN:
            self._replan(Stage.RECORD, f"the device's memory was too small: {error}")
        self.stage, self._from_profile, self._is_lesser = Stage.RECORD, False, True

    def lesser(self, session: Session, plan: Plan) -> Plan:
        """The plan to continue with after :meth:`demoted`, predicted if the model was profiled."""
        if self.model is None or self.machine is None:
            return plan
        return self._planning(session, self.model).with_prediction(plan, self.machine)

    def after_step(self, session: Session, seconds: float) -> None:
        """An optimizer step has taken ``seconds`` for its batches."""
        if self.stage is not Stage.RUN:
            return
        self._steps += 1
        if self._steps == 1:  # the first step under a new plan brings weights where they belong
            return
        self._times.append(seconds)
        if self._drift is None or len(self._times) < _WINDOW:
            return
        if self._may_refine:
            self._refine(session)
        for check in (self._check_time, self._check_budget):
            if self.stage is Stage.RUN and self._steps >= self._patience:
                check(session, self._drift)

    def _agree(self, batch: BatchSize) -> BatchSize:
        """Goes on as all ranks do; see [Note: Ranks plan together]. Returns the largest batch."""
        if self._together.shards == 1:
            return batch
        mine = (_ORDER.index(self.stage), batch.tokens, batch.micro_batches, -self._scale, self._doubted_s or 0.0, self._patience)
        rows = self._together.numbers(*mine)
        stages = [int(row[0]) for row in rows]
        tokens, micro_batches, scale, doubted_s, patience = (max(row[i] for row in rows) for i in range(1, 6))
        if _ORDER[min(stages)] is not self.stage:
            rank, self.stage = stages.index(min(stages)), _ORDER[min(stages)]
            log.info("planning anew: rank %d asks for it.", rank)
        self._scale, self._doubted_s, self._patience = -scale, doubted_s or None, int(patience)
        return BatchSize(tokens=int(tokens), micro_batches=int(micro_batches))

    # ---- drifts ------------------------------------------------------------------------------

    def _check_batch(self, batch: BatchSize) -> None:
        if self.stage is not Stage.RUN or self._drift is None or self.model is None:
            return
        self._odd_batches = self._odd_batches + 1 if _differs(batch.tokens, self.model.tokens, self._drift) else 0
        if self._odd_batches >= _WINDOW and self._steps >= self._patience - _PATIENCE:
            self._odd_batches = 0
            self._replan(Stage.RECORD, f"batches have {batch.tokens} tokens, the plan is for {self.model.tokens}")

    def _refine(self, session: Session) -> None:
        """Corrects the machine's rates, which were measured quickly, by the first steady steps."""
        self._may_refine = False
        measured, expected, basis = statistics.median(self._times), self._expected_s, self._basis
        if basis is None or expected is None or abs(measured - expected) < _LEAST_S or not _differs(measured, expected, _REFINE):
            return
        plan, model, machine = basis
        found = self._planning(session, model).refined(plan, machine, step_s=measured)
        if found is None:
            return
        scale, self._held = found
        self._scale *= scale
        self.stage, self._reason = Stage.PLAN, "the machine's rates are corrected"
        log.info(
            "planning once more: a step takes %.3g s, expected were %.3g s; transfers and updates reach %.2f times the rates that "
            "were measured.", measured, expected, scale,
        )  # fmt: skip

    def _check_time(self, _session: Session, drift: float) -> None:
        measured, expected = statistics.median(self._times), self._expected_s
        if expected is not None and abs(measured - expected) >= _LEAST_S and _differs(measured, expected, drift):
            self._doubted_s = measured
            self._replan(Stage.TIME, f"a step takes {measured:.3g} s, expected were {expected:.3g} s")

    def _check_budget(self, session: Session, drift: float) -> None:
        budget = session.host_memory()
        if _differs(budget, self._budget_bytes, drift):
            text = f"the budget of host memory is {format_bytes(budget)}, the plan is for {format_bytes(self._budget_bytes)}"
            self._replan(Stage.PLAN, text)

    def _replan(self, stage: Stage, reason: str) -> None:
        log.info("planning anew: %s.", reason)
        self.stage, self._reason = stage, reason
        self._patience *= 2

    # ---- planning ----------------------------------------------------------------------------

    def _plan(self, session: Session, batch: BatchSize) -> Plan:
        begin, executor = now_s(), session.running
        session.profile = self.model = self._together.model(self._profile(session))
        if session.device_memory is not None:
            check_activations(self.model)
        self._micro_batches = batch.micro_batches
        before = executor.plan
        plan = self._search(session, self.model)
        self.planned_s = now_s() - begin
        if plan.blocks != before.blocks:
            log.info("moving weights and optimizer state to where plan %r wants them.", plan.name)
        try:
            plan = session.replan(plan)
        except OutOfMemoryBudgetError as error:
            if not self._is_lesser:
                raise
            # Batches have shown that the lesser plan fits. The profile counts more than they need.
            log.warning("Training goes on with plan %r, which has fitted: %s", before.name, error)
        self.plan = plan
        if executor.speculation.enabled and self.machine is not None:
            from lightning_hetero.planners.evaluation import speculation  # brings the simulator

            with suppress(PlanError):  # by the planner's account alone, the plan may not fit
                executor.speculation.worth.given = speculation(plan, self.model, self.machine).break_even
        self.moved_s = now_s() - begin - self.planned_s
        changed = (plan.blocks, plan.gather) != (before.blocks, before.gather) or plan.predicted is None
        if self._reason and not changed and self._times:
            self._expected_s = statistics.median(self._times)
        else:
            self._expected_s = None if plan.predicted is None else plan.predicted.iteration_s
        self._budget_bytes = session.host_memory()
        self._times.clear()
        self._steps, self._odd_batches, self._reason = 0, 0, ""
        self.stage = Stage.RUN
        return plan

    def _planning(self, session: Session, model: ModelProfile) -> FitPlanning:
        return FitPlanning(session, model, self._micro_batches, self._together)

    def next_best(self, session: Session) -> Plan | None:
        """The fastest built-in plan that could run instead of the plan in force, predicted."""
        if self._basis is None:
            return None
        plan, model, machine = self._basis
        return self._planning(session, model).next_best(plan, machine)

    def _search(self, session: Session, model: ModelProfile) -> Plan:
        """The planner's plan. If it finds none, a lesser plan stays in force."""
        planning, again = self._planning(session, model), self._is_machine_wrong(session, model)
        if again:
            self._scale, self._may_measure = 1.0, False
        needs_disk = session.on_disk or session.device_memory is not None or self.planner != "holistic"
        # Without the disk first: if everything fits memory, no plan uses the disk.
        for disk in (True,) if needs_disk else (False, True):
            try:
                hardware = scaled(self._on.profile(session, disk=disk, again=again, together=self._together), self._scale)
            except OutOfMemoryBudgetError as error:
                return self._unmeasured(session, model, error)
            log.info("searching a plan with %r%s.", self.planner, _at_most(self.planner))
            try:
                plan, self.machine = planning.search(hardware, planner=self.planner, short_bytes=self._short_bytes)
                break
            except PlanError as error:
                if not disk:
                    continue
                if not self._is_lesser:
                    raise
                log.warning("Training goes on with the plan that fits the device by what it has given up: %s", error)
                self.machine = planning.machine(hardware)
                return planning.with_prediction(session.running.plan, self.machine)
        self._from_profile, self._is_lesser = True, False
        held, self._held = self._held, None
        return self._together.plan(lambda: self._better(plan, held))

    def _better(self, plan: Plan, held: Plan | None) -> Plan:
        """The new plan, unless the plan in force is about as fast."""
        if held is not None and held.predicted is not None and plan.predicted is not None:
            return plan if plan.predicted.iteration_s < (1 - _GAIN) * held.predicted.iteration_s else held
        return plan

    def _unmeasured(self, session: Session, model: ModelProfile, error: OutOfMemoryBudgetError) -> Plan:
        """Without memory for measuring the machine: the plan in force, else ``disk``."""
        self.machine = self._held = None
        self._from_profile = self._is_lesser = False
        plan = replace(session.running.plan, predicted=None)
        try:
            session.check(plan)
        except OutOfMemoryBudgetError:
            plan = session.fitting(BUILTIN_PLANS["disk"](model.shape()))
            session.check(plan)
        log.warning("No plan is searched for, and training goes on with plan %r: %s", plan.name, error)
        return plan

    def _is_machine_wrong(self, session: Session, model: ModelProfile) -> bool:
        """Whether the blocks' new times leave a drift unexplained, so rates are wrong."""
        doubted_s, self._doubted_s = self._doubted_s, None
        basis, drift = self._basis, self._drift
        if doubted_s is None or not self._may_measure or basis is None or drift is None:
            return False
        plan, _, machine = basis
        try:
            expected_s = self._planning(session, model).iteration_s(plan, machine)
        except PlanError:
            return True
        return _differs(doubted_s, expected_s, drift)

    def _profile(self, session: Session) -> ModelProfile:
        recorded, *timed = self._observed
        shape = session.running.model
        native = all(binding.capability is Rule.NATIVE for binding in session.bindings)  # else the heap has optimizer state too
        grown = heap_size() - self._heap_bytes
        parts = [part for block in session.blocks for part in block.parts]
        wide = sum(p.num_elements for p in parts if p.dtype.itemsize > 2)
        profile = model_profile(
            shape,
            recorded,
            timed,
            compute_itemsize=4 if 2 * wide >= sum(p.num_elements for p in parts) else 2,
            constant_device_bytes=self._constant_device_bytes,
            constant_host_bytes=self._constant_bytes + (kept_bytes(recorded, grown) if native else 0),
        )
        return replace(profile, kept_every=shape.kept_every)


def _at_most(planner: str) -> str:
    """How long a planner searches, as far as it has a limit."""
    if planner != "holistic":
        return ""
    from lightning_hetero.planners.holistic.planner import SECONDS  # imported when it plans

    return f", for {SECONDS:.0f} s at most"


def _differs(value: float, reference: float, drift: float) -> bool:
    return abs(value - reference) > drift * reference
