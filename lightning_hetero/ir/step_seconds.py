"""Seconds of a step with and without speculation, and the share of discards at which both are equally fast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Seconds of a step, simulated or measured, in steady state; see [Note: Speculation] in ``ir.schedule``.

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
