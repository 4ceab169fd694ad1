"""What speculative updates are worth: a step whose verdict keeps them, one whose verdict discards them, and one without."""

from __future__ import annotations

from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.ir.speculation import StepSeconds
from lightning_hetero.planners.evaluation import simulation


def speculation(plan: Plan, model: ModelProfile, hardware: HardwareProfile) -> StepSeconds:
    """Simulates a plan's step with and without speculation.

    Args:
        plan: The plan; patterns are resolved.
        model: The model's profile.
        hardware: The machine's profile.

    Raises:
        PlanError: A tier is too small for it; speculation takes spare memory for weights that no file has.
        ConfigError: The plan does not fit the model.
    """
    waiting, kept, redone = (
        simulation(plan, model, hardware, updates=updates).prediction.iteration_s
        for updates in (Updates.AFTER_VERDICT, Updates.SPECULATIVE, Updates.REDONE)
    )
    return StepSeconds(waiting_s=waiting, kept_s=kept, redone_s=redone)
