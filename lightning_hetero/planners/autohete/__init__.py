"""AutoHete: blocks to recompute, to offload and to update on the CPU, by an integer programme."""

from lightning_hetero.planners.autohete.planner import plan

__all__ = ["plan"]
