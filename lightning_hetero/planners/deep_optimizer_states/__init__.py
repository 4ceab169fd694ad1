"""Deep Optimizer States: state on the host, updates shared between CPU and device."""

from lightning_hetero.planners.deep_optimizer_states.planner import plan

__all__ = ["plan"]
