"""Deep Optimizer States: state on the host, every ``stride``-th update on the device.

Source: "Deep Optimizer States: Towards Scalable Training of Transformer Models Using Interleaved
Offloading", sections 4.2 and 4.3. The formulas are in ``formulas.py``, the search is in
``search.py``. What the paper leaves open is marked [inferred] and discussed in
docs/planners/deep_optimizer_states.md.

[Note: Subgroups]
A subgroup is what is updated at once: here one block with trainable parameters, since that is what
a plan places [inferred; eq. 1 does not depend on the size]. Weights and gradients are on the
device, as the paper presumes (section 5.3); only state moves.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from lightning_hetero.errors import PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan, Saved
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.planners.deep_optimizer_states.formulas import share_of_updates, strides, update_rates, update_ratio
from lightning_hetero.planners.deep_optimizer_states.search import candidates, with_most_residents
from lightning_hetero.planners.one_rank import one_rank


def plan(model: ModelProfile, hardware: HardwareProfile, *, updates: Updates = Updates.IN_BACKWARD) -> Plan:
    """The plan with the best stride by simulation, and as many static residents as fit.

    Activations stay on the device if they fit, else they are recomputed. ``decisions`` are ``k``,
    ``stride`` (``None``: no subgroup visits the device), ``static_residents`` and
    ``paper_strides``, those that eq. 1 names; ``k`` is ``None`` where it is infinite. Formula and
    simulation are those of one rank (:func:`share_of_updates`). Where the device is the host's own
    CPU, state has but one place: nothing is a static resident there, and the stride only says which
    updates the compute lane runs.

    Args:
        model: The model.
        hardware: The machine.
        updates: When updates may run: during backward, or only once all gradients are known.

    Raises:
        PlanError: Weights, gradients and activations do not fit the device, or the state does not
            fit the host.
    """
    if hardware.shared_memory:  # devices of their own update there, which ranks cannot run
        model, hardware = one_rank(model, hardware)
    model, hardware = share_of_updates(model, hardware)
    refusals: list[PlanError] = []
    for saved in (Saved.KEEP,) if hardware.shared_memory else (Saved.KEEP, Saved.RECOMPUTE):
        best: Plan | None = None
        for least_s, stride in candidates(model, hardware, saved=saved, updates=updates):
            if best is not None and least_s >= _iteration_s(best):
                break
            try:
                found = with_most_residents(model, hardware, stride=stride, saved=saved, updates=updates)
            except PlanError as error:
                refusals.append(error)
                continue
            if best is None or _iteration_s(found) < _iteration_s(best):
                best = found
        if best is not None:
            return _beside_paper(best, model, hardware, saved=saved, updates=updates)
    refusal = refusals[-1]
    raise PlanError(
        f"deep_optimizer_states keeps all weights and gradients on the device and the state on the host. {refusal} A planner that "
        f"offloads weights too ('protrain', 'holistic') needs less of the device, one with a disk tier less of the host.",
        tier=refusal.tier,
        shortfall_bytes=refusal.shortfall_bytes,
    )


def _iteration_s(found: Plan) -> float:
    return found.require_predicted().iteration_s


def _beside_paper(found: Plan, model: ModelProfile, hardware: HardwareProfile, *, saved: Saved, updates: Updates) -> Plan:
    """Adds the best stride that eq. 1 names, if the simulator prefers another one."""
    named = strides(update_ratio(update_rates(model, hardware)))
    if found.decisions["stride"] in named:
        return found
    plans = []
    for stride in named:
        with suppress(PlanError):
            plans.append(with_most_residents(model, hardware, stride=stride, saved=saved, updates=updates))
    if not plans:
        return found
    optimum = min(plans, key=lambda plan: plan.objective_s or 0.0)
    seconds = f"{_iteration_s(optimum):.4g} s, of this plan {_iteration_s(found):.4g} s"
    paper = {"objective_s": optimum.objective_s, "stride": optimum.decisions["stride"], "reason": f"simulated step {seconds}"}
    return replace(found, decisions={**found.decisions, "paper_optimum": paper})
