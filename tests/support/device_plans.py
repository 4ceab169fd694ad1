"""Plans for a device with memory of its own."""

from __future__ import annotations

from hypothesis import strategies as st

from lightning_hetero import BlockPlan, Plan, Tier, UpdateLane
from lightning_hetero.ir.plan import Saved, UpdateOrder

RESIDENT = BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE)


@st.composite
def device_plans(draw: st.DrawFn) -> Plan:
    """A plan by patterns, so that it fits any model."""
    rows = []
    for name in ("model.blocks.0", "model.blocks.*", "*"):
        weights, state = draw(st.sampled_from([*Tier])), draw(st.sampled_from([*Tier]))
        on_cpu = state is not Tier.DEVICE and (Tier.DISK in (weights, state) or draw(st.booleans()))
        if not on_cpu and weights is Tier.DISK:
            weights = Tier.HOST
        saved = draw(st.sampled_from([*Saved]))
        boundary = draw(st.sampled_from([Saved.KEEP, Saved.SWAP_HOST, Saved.SWAP_DISK]))
        lane = UpdateLane.CPU if on_cpu else UpdateLane.DEVICE
        rows.append(BlockPlan(name=name, weights=weights, state=state, update=lane, saved=saved, boundary=boundary))
    return Plan(
        name="random",
        blocks=tuple(rows),
        prefetch_depth=draw(st.integers(1, 3)),
        gradient_depth=draw(st.integers(1, 4)),
        priority=draw(st.booleans()),
        update_order=draw(st.sampled_from([*UpdateOrder])),
    )
