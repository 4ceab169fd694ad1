"""Plans for a device that is too small: activations leave it first, then state, then weights.

Each of them changes half of the blocks that can still give something. The first blocks go first,
because their memory is in use longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane

_Change = Callable[[BlockPlan], BlockPlan]


def demotions(plan: Plan, model: ModelShape, *, native: bool, trains: bool = True) -> Iterator[tuple[Plan, str]]:
    """Yields plans that need less device memory, the cheapest first, each with the change in words.

    ``native``: no optimizer updates state on the device by its own code, so state may leave it.
    ``trains``: forward saves activations for a backward.
    """

    def off_device(row: BlockPlan) -> BlockPlan:
        return replace(row, state=Tier.HOST if row.state is Tier.DEVICE else row.state, update=UpdateLane.CPU)

    activations: list[tuple[str, Callable[[BlockPlan], bool], _Change]] = [
        (
            "recomputes what forward saves",
            lambda row: row.saved is Saved.KEEP,
            lambda row: replace(row, saved=Saved.RECOMPUTE, operators={}),
        ),
        (
            "swaps block inputs to the host",
            lambda row: row.boundary is Saved.KEEP,
            lambda row: replace(row, boundary=Saved.SWAP_HOST),
        ),
    ]
    tiers: list[tuple[str, Callable[[BlockPlan], bool], _Change]] = [
        ("moves optimizer state to the host", lambda row: row.update is UpdateLane.DEVICE, off_device),
        ("moves weights to the host", lambda row: row.weights is Tier.DEVICE, lambda row: replace(row, weights=Tier.HOST)),
    ]
    kinds = [*(activations if trains else []), *(tiers if native else [])]
    recomputes = trains and any(not model.blocks[i].pinned and row.saved is Saved.KEEP for i, row in enumerate(plan.blocks))
    if not recomputes and plan.prefetch_depth > 1:
        yield replace(plan, prefetch_depth=1, predicted=None, objective_s=None), "brings one block at a time"
    for what, gives, change in kinds:
        able = [i for i, row in enumerate(plan.blocks) if not model.blocks[i].pinned and gives(row)]
        chosen = set(able[: (len(able) + 1) // 2])
        if chosen:
            rows = tuple(change(row) if i in chosen else row for i, row in enumerate(plan.blocks))
            yield replace(plan, blocks=rows, predicted=None, objective_s=None), f"{what} ({len(chosen)} blocks)"
