"""Rule *activations*: what leaves the device comes back in time; see [Note: Swaps]."""

from __future__ import annotations

from lightning_hetero.ir.schedule import Anchor, Lane, Op, OpKind, Phase
from lightning_hetero.lowering.activation_moves import swapped_before
from lightning_hetero.lowering.check.history import History
from lightning_hetero.lowering.check.swap_uses import SwapUse


def hop(h: History, op: Op, _: Anchor) -> None:
    """One hop of one use."""
    placed = h.placed[op.block]
    match op.kind, op.lane:
        case OpKind.SWAP_OUT, Lane.D2H:
            _use(h, op, placed.swapped_bytes)
            if any(edge not in op.carried for edge in swapped_before(op.block, placed)):
                h.fail("order", op, op.block, "does not wait for the block's SWAP_OUT of the step before")
            if placed.swaps_to_disk:
                _takes_over_memory(h, op)
        case OpKind.SWAP_OUT, Lane.DISK_WRITE:
            _follows(h, op, _use(h, op, placed.saved.to_disk).out)
        case OpKind.SWAP_IN, Lane.DISK_READ:
            _follows(h, op, _use(h, op, placed.saved.to_disk).out_disk)
            _takes_over_memory(h, op)
        case OpKind.SWAP_IN, Lane.H2D:
            use = _use(h, op, placed.swapped_bytes)
            _follows(h, op, use.in_disk if placed.swaps_to_disk else use.out)
            early = len(h.swaps.early_at(op.at))
            if use.place < h.swaps.place_of(op.at) and early >= h.plan.prefetch_depth:
                got = f"comes back while {early} uses are back early; allowed: {h.plan.prefetch_depth - 1}"
                h.fail("activations", op, op.block, got)
        case _:
            h.fail("activations", op, op.block, f"swaps activations on lane {op.lane.value!r}")


def anchor_begins(h: History, index: int, anchor: Anchor) -> None:
    """A forward has room; what a backward needs is back."""
    if not h.schedule.signature.training:
        return
    leaving = h.swaps.leaving
    if len(leaving) > h.plan.prefetch_depth:
        got = f"anchor {index} ({anchor}) begins while activations of {len(leaving)} uses leave the device"
        h.fail("activations", h.schedule.ops[leaving[0]], anchor.block, f"{got}; allowed: {h.plan.prefetch_depth}")
    if anchor.phase is Phase.FORWARD:
        return
    use = h.swaps.by_place.get(h.swaps.place_of(index))
    if use is not None and (use.back is None or not h.has_waited(use.back)):
        h.fail("activations", None, anchor.block, f"has not got its activations back when anchor {index} ({anchor}) begins")


def all_back(h: History) -> None:
    """Nothing stays away."""
    for use in h.swaps.by_place.values():
        if use.back is None:
            h.fail("activations", None, use.block, f"does not get its activations of use {use.place} back")


def _use(h: History, op: Op, num_bytes: int) -> SwapUse:
    found = h.swaps.waiting_for(op)
    if not found or op.num_bytes != num_bytes:
        got = f"swaps {op.num_bytes} bytes of activations over a hop; {num_bytes} of {len(found)} uses have to take it"
        h.fail("activations", op, op.block, got)
    return found[-1]


def _takes_over_memory(h: History, op: Op) -> None:
    """Once the memory between two hops is used up, each use takes over that of an earlier one."""
    staged, given = h.swaps.staged[op.kind], h.swaps.given[op.kind]
    most = 2 * h.plan.prefetch_depth
    place = len(staged) - most
    if place >= 0 and (place >= len(given) or not h.is_behind(op, given[place])):
        got = f"does not wait for the host memory that it takes over; {most} uses may have some on the way"
        h.fail("activations", op, op.block, got)


def _follows(h: History, op: Op, before: int | None) -> None:
    if before is None or not h.is_behind(op, before):
        h.fail("activations", op, op.block, "does not wait for the hop before it")
