"""What speculative updates are worth: a step whose verdict keeps them, one whose verdict discards them, and one without."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.planners.judge import simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Simulated seconds of a step, in steady state; see [Note: Speculation] in ``ir.schedule``.

    Attributes:
        waiting_s: All updates follow the verdict.
        kept_s: They speculate, and the verdict keeps them.
        redone_s: They speculate, and the verdict discards them.
    """

    waiting_s: float
    kept_s: float
    redone_s: float

    def expected_s(self, discard_rate: float) -> float:
        """Seconds of a step that speculates where this share of the verdicts discards; how steps follow each other is left out."""
        return self.kept_s + discard_rate * (self.redone_s - self.kept_s)

    @property
    def break_even(self) -> float:
        """The share of discards up to which speculating takes no longer than waiting, in [0, 1]."""
        if self.kept_s >= self.waiting_s:
            return 0.0
        if self.redone_s <= self.waiting_s:
            return 1.0
        return (self.waiting_s - self.kept_s) / (self.redone_s - self.kept_s)


def speculation(plan: Plan, model: ModelProfile, hardware: HardwareProfile) -> Speculation:
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
    return Speculation(waiting_s=waiting, kept_s=kept, redone_s=redone)
