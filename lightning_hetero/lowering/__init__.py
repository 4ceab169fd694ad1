"""Lowering: plan → schedule, pure; and the invariants every schedule must keep."""

from lightning_hetero.lowering.check import check
from lightning_hetero.lowering.lower import lower

__all__ = ["check", "lower"]
