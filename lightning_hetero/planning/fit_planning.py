"""A plan for a session: the planner proposes one for the available memory, the session checks it.

Planner and session count memory in different ways. The plan that runs fits both accounts, for the
way in which the training loop runs it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from lightning_hetero.errors import ConfigError, HeteroError, OutOfMemoryBudgetError, PlanError, UnsupportedError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan, Prediction
from lightning_hetero.ir.schedule import StepSignature, Updates
from lightning_hetero.lowering import cache_sizes, fitted, needs_of, steady
from lightning_hetero.lowering.cache_sizes import device_rows
from lightning_hetero.lowering.needs import total_bytes
from lightning_hetero.planners import BUILTIN_PLANS, PLANNERS
from lightning_hetero.planning.together import ALONE, Together
from lightning_hetero.runtime.optimizers import Rule
from lightning_hetero.runtime.session import Session

_ATTEMPTS = 4
_CAPACITIES = {"device": "device_memory_bytes", "host": "host_memory_bytes", "disk": "disk_capacity_bytes"}
_SPARE = 0.9  # the fraction of the machine's free memory that plans may use
_MOST_SCALE, _SCALE_STEPS = 64.0, 13  # of rates, in either direction; steps of the bisection


@dataclass(frozen=True, slots=True)
class FitPlanning:
    """Plans for the fit of a session, as its training loop runs them.

    A ``machine`` is one that :meth:`machine` has returned. Of several ranks all call :meth:`search`
    and :meth:`machine`, and get the same.
    """

    session: Session
    model: ModelProfile  # as measured; of several ranks one's slices
    micro_batches: int  # per optimizer step
    together: Together = ALONE

    @property
    def _updates(self) -> Updates:
        """When gradients leave memory: during backward, or all at once."""
        rules = self.session.rules
        return Updates.AFTER_VERDICT if rules.deferred or rules.accumulates else Updates.IN_BACKWARD

    def search(self, hardware: HardwareProfile, *, planner: str, short_bytes: int) -> tuple[Plan, HardwareProfile]:
        """Finds a plan that fits both the planner's account of memory and the session's.

        Returns the plan and the machine that it was made for: :meth:`machine` of these arguments.

        Raises:
            PlanError: No plan fits.
            ConfigError: The planner needs a package that is not installed.
        """
        session = self.session
        machine = room = self.machine(hardware, short_bytes=short_bytes)
        refusal: HeteroError | None = None
        for _ in range(_ATTEMPTS):
            plan = self.together.plan(partial(self._planned, room, planner))
            own: HeteroError | None = None
            short, on_device = 0, False
            try:
                fitting = session.fitting(plan)
                if fitting.blocks != plan.blocks and session.device_memory is not None:
                    plan = replace(fitting, predicted=None)  # the prediction was for another plan
                plan = self._predicted(plan, machine)
                session.check(plan)
            except OutOfMemoryBudgetError as error:
                on_device = error.tier == "device"
                own, short = error, error.needed_bytes - ((session.device_memory or 0) if on_device else session.host_memory())
            except PlanError as error:  # it does not fit as this loop runs it, for instance with all gradients at once
                own, short, on_device = error, error.shortfall_bytes, error.tier == "device"
            refused = [row for row in self.together.numbers(own is not None, short, on_device) if row[0]]
            if not refused:
                return plan, machine
            refusal = own or PlanError("it does not fit another rank, whose log says why", tier="host")
            _, most, where = max(refused)
            short, on_device = int(most), bool(where)
            if short <= 0:
                break
            tier = _CAPACITIES["device" if on_device else "host"]
            room = replace(room, **{tier: max(1, getattr(room, tier) - short)})
        raise PlanError(f"no plan of {planner!r} can run here: {refusal}", tier="host") from refusal

    def with_prediction(self, plan: Plan, machine: HardwareProfile) -> Plan:
        """A plan that already runs, with its prediction.

        If the plan does not fit by the planner's account, it is predicted for a machine with more
        memory.
        """
        for _ in range(_ATTEMPTS):
            try:
                return self._predicted(replace(plan, predicted=None), machine)
            except PlanError as error:
                if error.shortfall_bytes <= 0 or error.tier not in _CAPACITIES:
                    break
                key = _CAPACITIES[error.tier]
                machine = replace(machine, **{key: getattr(machine, key) + error.shortfall_bytes})
        return plan

    def next_best(self, plan: Plan, machine: HardwareProfile) -> Plan | None:
        """The fastest built-in plan that could run instead, predicted; ``None``: none could."""
        shape, device, runs = self.model.shape(), machine.copies_weights, self.session.runs
        found = []
        for make in BUILTIN_PLANS.values():
            other = fitted(runs.nearest(make(shape)), shape, device=device)
            if other.blocks == fitted(plan, shape, device=device).blocks:
                continue
            with suppress(OutOfMemoryBudgetError, PlanError, ConfigError, UnsupportedError):
                self.session.check(other)
                found.append(replace(other, predicted=self._prediction(other, machine)))
        return min(found, key=lambda one: one.require_predicted().iteration_s, default=None)

    def refined(self, plan: Plan, machine: HardwareProfile, *, step_s: float) -> tuple[float, Plan] | None:
        """Finds the factor of all rates except compute's that explains the measured time of a step.

        Compute was timed in this model's own batches, the other rates by micro-benchmarks. So the
        latter are taken to be wrong.

        Returns:
            The factor, and the plan with its prediction for such rates. ``None`` if no factor
            between 1/64 and 64 explains the ``step_s`` that a step takes.
        """

        def predicted_s(scale: float) -> float:
            return self.iteration_s(plan, scaled(machine, scale))

        try:
            low, high = 1 / _MOST_SCALE, _MOST_SCALE
            if not predicted_s(high) <= step_s <= predicted_s(low):
                return None
            for _ in range(_SCALE_STEPS):
                middle = (low * high) ** 0.5
                low, high = (low, middle) if predicted_s(middle) < step_s else (middle, high)
            scale = (low * high) ** 0.5
            return scale, self._predicted(replace(plan, predicted=None), scaled(machine, scale))
        except PlanError:  # it fits by the session's account, but not by the planner's
            return None

    def iteration_s(self, plan: Plan, machine: HardwareProfile) -> float:
        """Predicted seconds of a step under a plan."""
        plan = fitted(plan, self.model.shape(), device=machine.copies_weights)
        return self._prediction(plan, machine).iteration_s

    def machine(self, hardware: HardwareProfile, *, short_bytes: int = 0) -> HardwareProfile:
        """The machine with the capacities that training may use, and the speed of this model.

        ``short_bytes`` of the device's memory stay free.
        """
        session, model = self.session, self.model
        spare = _SPARE if session.options.host_memory is None else 1
        memory = int(spare * session.host_memory()) + self._on_top()
        disk, share = hardware.disk_capacity_bytes, session.options.disk_share
        if share is not None:
            disk = min(disk, share) if disk else share
        disk = max(1, disk - session.directories.overhead_bytes) if disk else 0
        compute_s = sum(b.forward_s + b.backward_s for b in model.blocks)
        flop = 3 * sum(b.forward_flop for b in model.blocks)
        speed = flop / compute_s if flop and compute_s else hardware.device_flop_per_s
        own = replace(
            hardware,
            host_memory_bytes=memory,
            device_memory_bytes=memory if session.device_memory is None else max(1, session.device_memory - short_bytes),
            disk_capacity_bytes=disk,
            device_flop_per_s=speed,
            unified_memory=session.options.is_unified,
            source={**hardware.source, "device_flop_per_s": "this model's training step", "host_memory_bytes": "this process"},
        )
        return self.together.machine(own)

    def _on_top(self) -> int:
        """Bytes that planners count beyond the session's budget.

        These are the process itself, rounding, and activations if the user gave a budget. The
        accounts are compared for all plans that both know, and the largest difference counts: the
        session decides.
        """
        shape, shared = self.model.shape(), self.session.device_memory is None
        plans, ranks = [self.session.running.plan, *(make(shape) for make in BUILTIN_PLANS.values())], self.together.shards
        differences, runs = list[int](), self.session.runs
        for plan in (fitted(runs.nearest(p), shape, device=not shared or ranks > 1) for p in plans):
            needs = needs_of(
                plan, self.model, shared_memory=shared, updates=self._updates, ranks=ranks,
                gathers_in_place=self.session.file is not None,
            )  # fmt: skip
            planners = total_bytes(needs.host) + max(needs.host_caches, default=0)
            planners += total_bytes(device_rows(plan, needs)) if self.session.options.is_unified else 0
            differences.append(planners - self.session.needed_bytes(plan))
        return max(differences)

    def _planned(self, room: HardwareProfile, planner: str) -> Plan:
        """The planner's plan.

        If an optimizer runs its own code on a device, only of activations. What one trains that
        runs whole, or by its own code on slices, cannot be on disk. Planners do not know that, so
        they plan without the disk, and on slices without updates on devices. If that does not fit a
        process alone, everything else is there.
        """
        try:
            return self._searched(room, planner)
        except ImportError as error:
            raise ConfigError(
                f"planner {planner!r} needs {error.name}, which cannot be imported: {error}. Run `pip install "
                f'{error.name}`, or pass plan="host" or plan="disk".'
            ) from error

    def _searched(self, room: HardwareProfile, planner: str) -> Plan:
        capabilities = {binding.capability for binding in self.session.bindings}
        diskless = replace(room, disk_capacity_bytes=0, disk_read_bytes_per_s=0.0, disk_write_bytes_per_s=0.0)
        on_slices = room.ranks > 1 and not capabilities <= {Rule.NATIVE}
        if on_slices and not room.shared_memory:
            diskless = replace(diskless, device_update_params_per_s=0.0)
        if on_slices or (room.shared_memory and Rule.WHOLE in capabilities):
            try:
                return PLANNERS[planner](self.model, diskless, updates=self._updates)
            except PlanError:
                if not room.disk_capacity_bytes or room.ranks > 1:
                    raise
                return self.session.runs.nearest(BUILTIN_PLANS["disk"](self.session.running.model))
        if room.shared_memory or capabilities <= {Rule.NATIVE}:
            return PLANNERS[planner](self.model, room, updates=self._updates)
        try:
            return PLANNERS["resident"](self.model, room, updates=self._updates)
        except PlanError:
            return PLANNERS["full_recompute"](self.model, room, updates=self._updates)

    def _predicted(self, plan: Plan, machine: HardwareProfile) -> Plan:
        """The plan with its prediction for this training loop, or a PlanError."""
        rules = self.session.rules
        is_plain = self.micro_batches == 1 and not (rules.deferred or rules.speculates or rules.accumulates)
        if plan.predicted is not None and is_plain:
            return plan
        plan = fitted(plan, self.model.shape(), device=machine.copies_weights)
        return replace(plan, predicted=self._prediction(plan, machine))

    def _prediction(self, plan: Plan, machine: HardwareProfile) -> Prediction:
        rules = self.session.rules
        if rules.speculates:  # most tried updates stay; if there is no memory for trying, none is tried
            with suppress(PlanError):
                return self._simulated(plan, machine, Updates.SPECULATIVE, room_for=Updates.SPECULATIVE)
        waits = Updates.AFTER_VERDICT if rules.deferred else Updates.IN_BACKWARD
        return self._simulated(plan, machine, waits, room_for=self._updates)

    def _simulated(self, plan: Plan, machine: HardwareProfile, updates: Updates, *, room_for: Updates) -> Prediction:
        from lightning_hetero.sim import simulate  # imported when it plans

        shape = self.model.shape()
        space = cache_sizes(plan, self.model, machine, updates=room_for)
        last = StepSignature(order=tuple(range(len(shape.blocks))), training=True, updates=updates)
        batches = (*(replace(last, updates=Updates.NONE) for _ in range(self.micro_batches - 1)), last)
        schedules = steady(plan, shape, batches, sizes=space)
        return simulate(schedules, plan, self.model, machine, sizes=space).prediction


def scaled(machine: HardwareProfile, scale: float) -> HardwareProfile:
    """The machine with all rates scaled except compute's."""
    keys = ["link_h2d_bytes_per_s", "link_d2h_bytes_per_s"]
    keys += ["disk_read_bytes_per_s", "disk_write_bytes_per_s"]
    keys += ["host_dram_bytes_per_s", "cpu_update_params_per_s", "cpu_downcast_params_per_s"]
    keys += ["collective_bytes_per_s", "peer_bytes_per_s"]
    keys += ["device_update_params_per_s"] if machine.shared_memory else []
    note = f"; times {scale:.2f}, by what steps took"
    source = {**machine.source, **{key: machine.source.get(key, "") + note for key in keys}} if scale != 1 else machine.source
    return replace(machine, **{key: getattr(machine, key) * scale for key in keys}, source=source)
