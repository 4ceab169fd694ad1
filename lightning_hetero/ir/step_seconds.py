"""Break-even of updates before the verdict, from the seconds of a step by its verdict."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Seconds of a step, simulated or measured, in steady state.

    See [Note: Speculation] in ``ir.schedule``.

    Attributes:
        waiting_s: A step in which all updates follow the verdict.
        kept_s: A step that speculates, and the verdict keeps the updates.
        redone_s: A step that speculates, and the verdict discards the updates.
    """

    waiting_s: float
    kept_s: float
    redone_s: float

    def expected_s(self, discard_rate: float) -> float:
        """Mean seconds of a speculating step at this discard rate.

        Interactions between steps are left out.
        """
        return self.kept_s + discard_rate * (self.redone_s - self.kept_s)

    @property
    def break_even(self) -> float:
        """The highest discard rate at which speculating takes no longer than waiting, in [0, 1]."""
        if self.kept_s >= self.waiting_s:
            return 0.0
        if self.redone_s <= self.waiting_s:
            return 1.0
        return (self.waiting_s - self.kept_s) / (self.redone_s - self.kept_s)
