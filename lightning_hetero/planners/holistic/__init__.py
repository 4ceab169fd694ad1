"""Holistic: the joint space of all the other planners, bounded by a linear programme and searched by simulation."""

from lightning_hetero.planners.holistic.planner import plan

__all__ = ["plan"]
