"""Planning while a model trains: which batches are profiled, when a plan is made, and when another one is called for.

The course of a fit, batch by batch: *record* the operators, *time* the blocks (in several batches, of which the median counts),
*plan* before the next batch, then *run* and watch. A drift goes back to the stage whose knowledge it has outdated.

[Note: No flapping]
A drift has to last for ``_WINDOW`` batches in a row. After every plan that was not asked for, twice as many steps pass before
another one is. Where planning anew changes nothing, the measured time takes the place of the predicted one, so the same difference
is not a drift again.

[Note: A batch that does not fit]
Where a device's memory is too small for a batch, the plan in force gives something up (``strategies/recovery.py``), and the next
batches are recorded and timed anew: what is seen of them is the same under any plan (``profiling/memory.py``). Then a plan is made
that keeps clear of what was missing, if the plan that did not fit was made for this profile's batches. If there is none, training
goes on with the lesser plan, which fits.

[Note: Whose fault it is]
The machine is measured in a hurry, perhaps long ago. So the first steady steps correct it: where they take another time than was
predicted, the rates of all but compute are multiplied by what explains it, and one more plan is made. A later drift has the blocks
timed again; where their times do not explain it, the machine is measured again, once.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum

import torch

from lightning_hetero.clock import now_s
from lightning_hetero.errors import OutOfMemoryBudgetError, PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile, ModelShape
from lightning_hetero.ir.plan import Plan
from lightning_hetero.planners import BUILTIN_PLANS
from lightning_hetero.planners.baselines import check_machine
from lightning_hetero.planners.evaluation import speculation
from lightning_hetero.profiling.memory import Observed, OperatorMeasure, kept_bytes, measures
from lightning_hetero.profiling.model import BatchProfiler, check_activations, model_profile
from lightning_hetero.runtime.optimizers import Rule
from lightning_hetero.runtime.session import Session
from lightning_hetero.store.capacity import heap_size, resident_bytes
from lightning_hetero.strategies.planning import iteration_s, machine_of, refined, scaled, search, with_prediction
from lightning_hetero.units import format_bytes

_TIMED = 3  # batches; the fewest of which the median tells an odd one from the others
_WINDOW = 5
_PATIENCE = 16  # steps after a plan before a drift of time or budget calls for another one
_REFINE = 0.15  # of the predicted time: a difference of the first steps that corrects the machine's rates
_GAIN = 0.02  # of a step: less is no reason for moving to another plan then
_LEAST_S = 0.02  # a difference per step that no planning is worth
_UNKNOWN_SHORT = 32  # of the device's memory, where nobody says how much was missing
_LEAST_SHORT = 4096  # bytes by which a device that is too small is taken to be smaller

log = logging.getLogger(__name__)


class Stage(Enum):
    """What the next batch is for."""

    RECORD = "record"
    TIME = "time"
    PLAN = "plan"
    RUN = "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What planning needs to know of a batch.

    Attributes:
        tokens: Tokens, or samples where there are none.
        micro_batches: Batches of one optimizer step.
    """

    tokens: int
    micro_batches: int


class Autoplan:
    """Plans for one strategy.

    Args:
        planner: A name in ``PLANNERS``.
        hardware: Gives the machine's profile, as :meth:`~lightning_hetero.strategies.machine.Machine.profile` does; asked when a
            plan is due, so that nothing is measured before.
        drift: By how much, relatively, the batch, the budget or the step's time may differ from what was planned with;
            ``None``: by anything.
        corrects: The first steps may correct the machine's rates, which have been measured.

    Attributes:
        stage: What the next batch is for.
        plan: The last plan made.
        model: The model's profile, once there is one.
        machine: The machine's profile that the plan was made with.
        profiler: Looks at the batch under way, if it is profiled.
        planned_s: Seconds that the last planning took, measuring the machine included.
        moved_s: Seconds until weights and state were where that plan wants them.
    """

    def __init__(
        self, planner: str, hardware: Callable[..., HardwareProfile], *, drift: float | None, corrects: bool = True
    ) -> None:
        self.planner, self._hardware, self._drift, self._corrects = planner, hardware, drift, corrects
        self.stage = Stage.RECORD
        self.plan: Plan | None = None
        self.model: ModelProfile | None = None
        self.machine: HardwareProfile | None = None
        self.profiler: BatchProfiler | None = None
        self.planned_s = self.moved_s = 0.0
        self._recorded: Observed | None = None
        self._timed: list[Observed] = []
        self._constant_bytes = self._constant_device_bytes = 0
        self._heap_bytes = 0  # before the first batch
        self._budget_bytes = 0
        self._made = False  # the plan in force was made from the profile
        self._is_lesser = False  # it has given something up
        self._micro_batches = 1
        self._short_bytes = 0  # of device memory: what batches needed beyond what plans left them
        self._expected_s: float | None = None
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._odd_batches = 0
        self._patience, self._steps = _PATIENCE, 0
        self._reason = ""
        self._micro_batches = 1
        self._trust()

    def _trust(self) -> None:
        """Nothing is known yet that speaks against the machine's profile."""
        self._scale = 1.0  # of its rates but compute's, by what steps have taken
        self._may_refine, self._may_measure = self._corrects, True
        self._held: Plan | None = None  # the plan in force with its prediction for corrected rates
        self._doubted_s: float | None = None  # what a step takes where the prediction is another

    def operators(self) -> tuple[OperatorMeasure, ...]:
        """The operators of the recorded batch, one by one."""
        return () if self._recorded is None else measures(self._recorded)

    @property
    def steady(self) -> bool:
        """Whether the last step was one that the plan's prediction speaks of: not the first one under it, nor a profiled one."""
        return self.stage is Stage.RUN and self._steps > 1

    # ---- what the strategy asks -------------------------------------------------------------------------------------------

    def provisional(self, *, on_device: bool) -> tuple[Callable[[ModelShape], Plan], ...]:
        """What a session starts with: the plan made for its model before, else everything in memory, else as little as possible.

        Args:
            on_device: The device has memory of its own, where an optimizer whose own code runs finds everything.
        """
        device = (BUILTIN_PLANS["resident"],) if on_device else ()
        return self._known, BUILTIN_PLANS["host"], *device, BUILTIN_PLANS["disk"]

    def _known(self, model: ModelShape) -> Plan:
        known = self.plan is not None and self._knows((b.name, b.num_params) for b in model.blocks)
        return self.plan if known and self.plan is not None else BUILTIN_PLANS["host"](model)

    def _knows(self, sizes: Iterable[tuple[str, int]]) -> bool:
        return self.model is not None and [(b.name, b.num_params) for b in self.model.blocks] == list(sizes)

    def fit_begins(self, session: Session) -> None:
        """A fit is about to start: the plan of an earlier one counts if the model has the same blocks.

        Raises:
            PlanError: The planner has no plan for a machine of this kind.
        """
        check_machine(self.planner, "CPU", shared_memory=session.options.device is None)
        self._times.clear()
        self._steps = self._odd_batches = 0
        if not self._knows((b.name, sum(p.num_elements for p in b.parts)) for b in session.blocks):
            self.plan = self.model = None
            self.stage = Stage.RECORD
            self._constant_bytes = 0
            self._trust()
        if self.stage is Stage.RECORD:
            log.info("the first %d batches are measured; then planner %r makes a plan.", 1 + _TIMED, self.planner)
        self._made, self._is_lesser = self.plan is not None, False
        session.profile = self.model

    def request(self, *, budget: bool = False) -> None:
        """A new plan is wanted.

        Args:
            budget: Because the budget is another: what is known of the model holds.
        """
        if self.stage is Stage.RUN:
            log.info("planning anew: asked for%s.", ", with another budget" if budget else "")
            self.stage, self._reason = Stage.PLAN if budget else Stage.TIME, ""

    def before_batch(self, session: Session, batch: Batch) -> Plan | None:
        """A training batch is about to begin; returns the plan if one has just come into force.

        Raises:
            PlanError: No plan fits; nothing has changed.
            ConfigError: Planning lacks something.
        """
        self.abandon_batch()
        self._look_at(batch)
        made = None
        if self.stage is Stage.PLAN:
            made = self._plan(session, batch)
        if self.stage in (Stage.RECORD, Stage.TIME):
            if not self._constant_bytes:  # later the process also holds what malloc keeps for the next step
                self._constant_bytes = max(1, resident_bytes() - session.present_bytes)
                self._heap_bytes = heap_size()
                executor = session.executor
                self._constant_device_bytes = executor.lanes.allocated_bytes() if executor is not None else 0
            self.profiler = BatchProfiler(session, tokens=batch.tokens, operators=self.stage is Stage.RECORD)
            self.profiler.start()
        return made

    def after_batch(self) -> None:
        """The batch is over."""
        if self.profiler is None:
            return
        profiler, self.profiler = self.profiler, None
        observed = profiler.stop()
        if observed is None:
            return  # it had no backward: the next one is looked at instead
        if self.stage is Stage.RECORD:
            self._recorded, self._timed, self.stage = observed, [], Stage.TIME
        else:
            earlier = self._timed if len(self._timed) < _TIMED else []  # as many belong to the plan before
            self._timed = [*earlier, observed]
            if len(self._timed) == _TIMED:
                self.stage = Stage.PLAN

    def abandon_batch(self) -> None:
        """The batch under way will not end in order."""
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None

    def demoted(self, error: BaseException, memory_bytes: int) -> None:
        """The device's memory was too small for the batch under way: see [Note: A batch that does not fit].

        Args:
            error: What was raised; that of torch's allocator does not say how much was missing.
            memory_bytes: The device's memory.
        """
        self.abandon_batch()
        if self._made:  # else nobody knew yet what the batch takes
            self._keep_clear(error, memory_bytes)
        if self.stage is Stage.RUN:
            self._replan(Stage.RECORD, f"the device's memory was too small: {error}")
        self.stage, self._made, self._is_lesser = Stage.RECORD, False, True

    def lesser(self, session: Session, plan: Plan) -> Plan:
        """The plan to go on with after :meth:`demoted`, with a prediction where the model was profiled before."""
        if self.model is None or self.machine is None:
            return plan
        return with_prediction(session, plan, self.model, self.machine, micro_batches=self._micro_batches)

    def _keep_clear(self, error: BaseException, memory_bytes: int) -> None:
        unknown = memory_bytes // _UNKNOWN_SHORT if isinstance(error, torch.OutOfMemoryError) else 0
        short = getattr(error, "needed_bytes", 0) - getattr(error, "free_bytes", 0)
        self._short_bytes += max(_LEAST_SHORT, short, unknown)

    def after_step(self, session: Session, seconds: float) -> None:
        """An optimizer step has taken ``seconds`` of its batches."""
        if self.stage is not Stage.RUN:
            return
        self._steps += 1
        if self._steps == 1:  # the first one under a new plan brings weights where they belong
            return
        self._times.append(seconds)
        if self._drift is not None and self._may_refine and len(self._times) == _WINDOW:
            self._refine(session)
        if self._drift is None or self.stage is not Stage.RUN or self._steps < self._patience or len(self._times) < _WINDOW:
            return
        self._look_at_time()
        if self.stage is Stage.RUN:
            self._look_at_budget(session)

    # ---- drifts -----------------------------------------------------------------------------------------------------------

    def _look_at(self, batch: Batch) -> None:
        if self.stage is not Stage.RUN or self._drift is None or self.model is None:
            return
        self._odd_batches = self._odd_batches + 1 if _differs(batch.tokens, self.model.tokens, self._drift) else 0
        if self._odd_batches >= _WINDOW and self._steps >= self._patience - _PATIENCE:
            self._odd_batches = 0
            self._replan(Stage.RECORD, f"batches have {batch.tokens} tokens, the plan is for {self.model.tokens}")

    def _refine(self, session: Session) -> None:
        """See [Note: Whose fault it is]."""
        self._may_refine = False
        measured, expected = statistics.median(self._times), self._expected_s
        if expected is None or abs(measured - expected) < _LEAST_S or not _differs(measured, expected, _REFINE):
            return
        assert self.plan is not None
        assert self.model is not None
        assert self.machine is not None
        found = refined(session, self.model, self.plan, self.machine, micro_batches=self._micro_batches, step_s=measured)
        if found is None:
            return
        scale, self._held = found
        self._scale *= scale
        self.stage, self._reason = Stage.PLAN, "the machine's rates are corrected"
        log.info(
            "planning once more: a step takes %.3g s, expected were %.3g s; transfers and updates reach %.2f times the rates that "
            "were measured.", measured, expected, scale,
        )  # fmt: skip

    def _look_at_time(self) -> None:
        assert self._drift is not None
        measured = statistics.median(self._times)
        if self._expected_s is None or abs(measured - self._expected_s) < _LEAST_S:
            return
        if _differs(measured, self._expected_s, self._drift):
            self._doubted_s = measured
            self._replan(Stage.TIME, f"a step takes {measured:.3g} s, expected were {self._expected_s:.3g} s")

    def _look_at_budget(self, session: Session) -> None:
        assert self._drift is not None
        budget = session.host_memory()
        if _differs(budget, self._budget_bytes, self._drift):
            text = f"the budget of host memory is {format_bytes(budget)}, the plan is for {format_bytes(self._budget_bytes)}"
            self._replan(Stage.PLAN, text)

    def _replan(self, stage: Stage, reason: str) -> None:
        log.info("planning anew: %s.", reason)
        self.stage, self._reason = stage, reason
        self._patience *= 2

    # ---- planning ---------------------------------------------------------------------------------------------------------

    def _plan(self, session: Session, batch: Batch) -> Plan:
        assert self._recorded is not None
        assert session.executor is not None
        begin = now_s()
        session.profile = self.model = self._profile(session)
        if session.device_memory is not None:
            check_activations(self.model)
        self._micro_batches = batch.micro_batches
        before = session.executor.plan
        plan = self._found(session, self.model)
        self.planned_s = now_s() - begin
        if plan.blocks != before.blocks:
            log.info("moving weights and optimizer state to where plan %r wants them.", plan.name)
        try:
            plan = session.replan(plan)
        except OutOfMemoryBudgetError as error:
            if not self._is_lesser:
                raise
            # Batches have shown that it fits. The profile counts more than they take.
            log.warning("Training goes on with plan %r, which has fitted: %s", before.name, error)
        self.plan = plan
        if session.executor.speculation.enabled and self.machine is not None:
            with suppress(PlanError):  # only where it might not fit the machine as the planner sees it
                session.executor.speculation.worth.given = speculation(plan, self.model, self.machine).break_even
        self.moved_s = now_s() - begin - self.planned_s
        changed = plan.blocks != before.blocks or plan.predicted is None
        if self._reason and not changed and self._times:
            self._expected_s = statistics.median(self._times)
        else:
            self._expected_s = None if plan.predicted is None else plan.predicted.iteration_s
        self._budget_bytes = session.host_memory()
        self._times.clear()
        self._steps, self._odd_batches, self._reason = 0, 0, ""
        self.stage = Stage.RUN
        return plan

    def _found(self, session: Session, model: ModelProfile) -> Plan:
        """What the planner finds. Where it finds none, a lesser plan stays in force."""
        assert session.executor is not None
        again = self._is_machine_wrong(session, model)
        if again:
            self._scale, self._may_measure = 1.0, False
        needs_disk = session.on_disk or session.device_memory is not None or self.planner != "holistic"
        for disk in (True,) if needs_disk else (False, True):  # without it first: where everything fits memory no plan uses it
            try:
                hardware = scaled(self._hardware(session, disk=disk, again=again), self._scale)
            except OutOfMemoryBudgetError as error:
                return self._unmeasured(session, model, error)
            log.info("searching a plan with %r.", self.planner)
            try:
                plan, self.machine = search(
                    session, model, hardware, planner=self.planner, micro_batches=self._micro_batches, short_bytes=self._short_bytes
                )
                break
            except PlanError as error:
                if not disk:
                    continue
                if not self._is_lesser:
                    raise
                log.warning("Training goes on with the plan that fits the device by what it has given up: %s", error)
                self.machine = machine_of(session, model, hardware, micro_batches=self._micro_batches)
                return with_prediction(session, session.executor.plan, model, self.machine, micro_batches=self._micro_batches)
        self._made, self._is_lesser = True, False
        held, self._held = self._held, None
        if held is not None and held.predicted is not None and plan.predicted is not None:
            return plan if plan.predicted.iteration_s < (1 - _GAIN) * held.predicted.iteration_s else held
        return plan

    def _unmeasured(self, session: Session, model: ModelProfile, error: OutOfMemoryBudgetError) -> Plan:
        """The plan in force where the machine cannot be measured beside it; ``disk`` where that does not fit with activations.

        Raises:
            OutOfMemoryBudgetError: Neither fits.
        """
        assert session.executor is not None
        self.machine = self._held = None
        self._made = self._is_lesser = False
        plan = replace(session.executor.plan, predicted=None)
        try:
            session.check(plan)
        except OutOfMemoryBudgetError:
            plan = session.fitting(BUILTIN_PLANS["disk"](model.shape()))
            session.check(plan)
        log.warning("No plan is searched for, and training goes on with plan %r: %s", plan.name, error)
        return plan

    def _is_machine_wrong(self, session: Session, model: ModelProfile) -> bool:
        """Whether what the blocks take now, timed again, leaves a drift unexplained; see [Note: Whose fault it is]."""
        doubted_s, self._doubted_s = self._doubted_s, None
        if doubted_s is None or not self._may_measure or self.plan is None or self.machine is None or self._drift is None:
            return False
        try:
            expected_s = iteration_s(session, model, self.plan, self.machine, micro_batches=self._micro_batches)
        except PlanError:
            return True
        return _differs(doubted_s, expected_s, self._drift)

    def _profile(self, session: Session) -> ModelProfile:
        assert self._recorded is not None
        assert session.executor is not None
        native = all(binding.capability is Rule.NATIVE for binding in session.bindings)  # else the heap has optimizer state too
        grown = heap_size() - self._heap_bytes
        parts = [part for block in session.blocks for part in block.parts]
        wide = sum(p.num_elements for p in parts if p.dtype.itemsize > 2)
        profile = model_profile(
            session.executor.model,
            self._recorded,
            self._timed,
            compute_itemsize=4 if 2 * wide >= sum(p.num_elements for p in parts) else 2,
            constant_device_bytes=self._constant_device_bytes,
            constant_host_bytes=self._constant_bytes + (kept_bytes(self._recorded, grown) if native else 0),
        )
        return replace(profile, kept_every=session.executor.model.kept_every)


def _differs(value: float, reference: float, drift: float) -> bool:
    return abs(value - reference) > drift * reference
