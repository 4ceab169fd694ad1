"""Holistic: the joint space of all planners, bounded by a linear programme and searched."""

from lightning_hetero.planners.holistic.planner import plan

__all__ = ["plan"]
