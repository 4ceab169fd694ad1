"""Planners: from a model's shape to a plan."""

from lightning_hetero.planners.baselines import BUILTIN_PLANS, disk, host, resident

__all__ = ["BUILTIN_PLANS", "disk", "host", "resident"]
