"""ProTrain: persistent chunks, chunk buffers and interleaved activation policies, by exhaustive search."""

from lightning_hetero.planners.protrain.planner import plan

__all__ = ["plan"]
