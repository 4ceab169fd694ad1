"""The plans that need no search."""

from __future__ import annotations

from collections.abc import Callable

from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier, UpdateLane


def resident(model: ModelShape) -> Plan:
    """Nothing is offloaded: weights and state on the device, updates after backward, as without the strategy."""
    rows = (BlockPlan(name=b.name, weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE) for b in model.blocks)
    return Plan(name="resident", blocks=tuple(rows))


def host(model: ModelShape) -> Plan:
    """State and weights in host memory; updates on CPU threads while backward runs."""
    return Plan(name="host", blocks=tuple(BlockPlan(name=b.name) for b in model.blocks))


def disk(model: ModelShape) -> Plan:
    """State on disk, and the weights of repeated blocks too; the others' (embeddings, head, tied) stay in host memory."""
    rows = (
        BlockPlan(name=b.name, weights=Tier.HOST if b.pinned else Tier.DISK, state=Tier.DISK if b.state_bytes else Tier.HOST)
        for b in model.blocks
    )
    return Plan(name="disk", blocks=tuple(rows))


BUILTIN_PLANS: dict[str, Callable[[ModelShape], Plan]] = {"resident": resident, "host": host, "disk": disk}
