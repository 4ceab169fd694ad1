"""ProTrain: persistent chunks, buffers and interleaved policies, by exhaustive search."""

from lightning_hetero.planners.protrain.planner import plan

__all__ = ["plan"]
