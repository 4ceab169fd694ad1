"""LoHan: weights and state on disk; activations swapped as long as that saves time."""

from lightning_hetero.planners.lohan.planner import plan

__all__ = ["plan"]
