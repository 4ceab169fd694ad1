"""LoHan: activations to the host and to the SSD, by the paper's cost model."""

from lightning_hetero.planners.lohan.planner import plan

__all__ = ["plan"]
