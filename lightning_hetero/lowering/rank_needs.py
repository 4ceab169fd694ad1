"""What one of several ranks that share a model needs beside its slices.

One account for planners, simulator and runtime, as ``needs`` is for the rest.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Gather, Plan, Tier
from lightning_hetero.units import MIB

EXCHANGE_BYTES = 2 * MIB
"""Gradients that a rank sends in one transfer; it receives as many. Every rank has both buffers."""

PEER_EXCHANGE_BYTES = 16 * MIB
"""The same of a device that exchanges gradients itself, where every call takes its time."""

SUM_BYTES = 8 * MIB
"""Sums in float64 that are in a device's memory at a time."""


def whole_bytes(plan: Plan, model: ModelShape, ranks: int, *, in_place: bool) -> int:
    """Room for whole weights of blocks of which a rank keeps a slice.

    Args:
        plan: The resolved plan.
        model: The sizes of one rank's slices.
        ranks: The ranks that share the model.
        in_place: They have whole weights in the same memory, where their slices are.
    """
    if in_place:
        return 0
    rows = zip(model.blocks, plan.blocks, strict=True)
    sizes = sorted(b.weight_bytes * ranks for b, p in rows if p.weights is not Tier.DEVICE)
    least = sum(sizes[-plan.prefetch_depth - 1 :])
    return least if plan.device_cache_bytes is None else min(sum(sizes), max(least, plan.device_cache_bytes))


def beside_slices_bytes(plan: Plan, model: ModelShape, ranks: int, *, in_place: bool) -> int:
    """Host memory for whole weights and gradients, and room to exchange them; 0 for one rank.

    Whole gradients are those of two repeated blocks, one in backward and one that is being reduced,
    and of all pinned ones. The largest of these counts twice: autograd may add up two gradients of
    it, as of an embedding that is also the head.

    Args:
        plan: The resolved plan.
        model: The sizes of one rank's slices.
        ranks: The ranks that share the model.
        in_place: They have whole weights in the same memory, where their slices are.
    """
    if ranks == 1:
        return 0
    more = 0 if in_place else ranks - 1
    stay = sum(more * b.weight_bytes for b, p in zip(model.blocks, plan.blocks, strict=True) if p.weights is Tier.DEVICE)
    repeated = [b.gradient_bytes * ranks for b in model.blocks if not b.pinned]
    pinned = [b.gradient_bytes * ranks for b in model.blocks if b.pinned]
    gradients = sum(sorted(repeated)[-2:]) + sum(pinned) + max(pinned, default=0)
    exchanged = 2 * min(max(*repeated, *pinned, 0), EXCHANGE_BYTES)
    return whole_bytes(plan, model, ranks, in_place=in_place) + stay + gradients + exchanged


def beside_devices_bytes(plan: Plan, model: ModelShape, ranks: int, *, in_place: bool) -> int:
    """The same where whole weights are on devices with memory of their own.

    On the host whole gradients are those that wait for their REDUCE; weights that go up are whole.
    Where devices exchange, gradients there are slices, which land piece by piece. Other buffers are
    for devices that cannot exchange without the host.
    """
    if ranks == 1:
        return 0
    sizes = sorted(b.gradient_bytes * ranks for b in model.blocks)
    others = 0 if in_place else (ranks - 1) * sum(b.weight_bytes for b in model.blocks)
    landing = min(max(sizes, default=0) // ranks, EXCHANGE_BYTES)
    waiting = landing if plan.gather is Gather.DEVICE else sum(sizes[-plan.gradient_depth :])
    return others + waiting + 2 * min(max(sizes, default=0), EXCHANGE_BYTES)


def on_devices_bytes(model: ModelShape, ranks: int, few: int) -> int:
    """What a device needs that exchanges gradients itself: buffers, and slices of ``few`` blocks.

    All blocks use the same places. Gradients of 16 bits have sums of four times their size.
    """
    largest = max((b.gradient_bytes for b in model.blocks), default=0)
    return 2 * min(largest * ranks, PEER_EXCHANGE_BYTES) + min(4 * largest, SUM_BYTES) + few * largest


def whole_of(model: ModelShape, ranks: int) -> ModelShape:
    """The sizes with whole weights and gradients; ``model`` has those of one rank's slices."""
    rows = tuple(
        replace(
            b, num_params=b.num_params * ranks, weight_bytes=b.weight_bytes * ranks, gradient_bytes=b.gradient_bytes * ranks
        )
        for b in model.blocks
    )  # fmt: skip
    return replace(model, blocks=rows)
