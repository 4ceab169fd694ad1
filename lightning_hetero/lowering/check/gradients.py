"""Rule *gradients*: they reach their update, and no more of them wait than there is memory for."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hetero.ir.schedule import Anchor, Op, OpKind, Phase
from lightning_hetero.lowering.chains import earlier_arrivals
from lightning_hetero.lowering.check.history import History
from lightning_hetero.lowering.lower import last_gradients
from lightning_hetero.lowering.needs import DEVICE_GRADIENTS
from lightning_hetero.lowering.placed_blocks import updates_in_backward, waits_for_step


def host_anchor_begins(h: History, index: int, anchor: Anchor) -> None:
    """Where the device is the host, gradients wait in host memory for their update."""
    if anchor.phase is Phase.BACKWARD and not h.speculates:
        _few_wait(h, index, anchor, h.plan.gradient_depth, "blocks wait for their update")


def grad(h: History, op: Op, _: Anchor) -> None:
    """Gradients go to the host."""
    _leave(h, op)
    if op.kind is OpKind.GRAD and h.ranks > 1:
        _few_pass(h, op, h.plan.gradient_depth, "whole gradients of over {} blocks are on the host")
    _take_over(h, op, list(h.grads))


def reduce_there(h: History, op: Op, _: Anchor) -> None:
    """Gradients become slices of their sum on devices."""
    _leave(h, op)
    _few_pass(h, op, DEVICE_GRADIENTS, "slices of sums of over {} blocks are on the device")


def slice_leaves(h: History, op: Op, _: Anchor) -> None:
    """A slice of a sum goes to the host."""
    last = h.grads.get(op.block)
    if last is None or h.schedule.ops[last].kind is not OpKind.REDUCE:
        h.fail("gradients", op, op.block, "takes gradients to the host that no REDUCE has summed, or that have gone there before")
    _take_over(h, op, [h.schedule.ops[i].block for i in h.arrived])


def _leave(h: History, op: Op) -> None:
    """Gradients leave the memory in which compute has made them."""
    if not h.placed[op.block].through_host or op.block in h.grads:
        h.fail("gradients", op, op.block, "is not updated by the CPU, or its gradients have gone to the host before")
    if op.at <= h.last_use.get(op.block, len(h.schedule.anchors)):
        h.fail("gradients", op, op.block, f"copies gradients at anchor {op.at}, before the last backward has ended")


def _take_over(h: History, op: Op, before: Sequence[int]) -> None:
    """Gradients take the place of earlier ones in host memory; ``before``: their blocks."""
    if updates_in_backward(h.plan, h.schedule.signature.updates):
        over = before[-h.plan.gradient_depth] if len(before) >= h.plan.gradient_depth else None
        if over is not None and not h.is_behind(op, h.updated.get(over, op.id + 1)):
            got = f"does not wait for the UPDATE of block {over}, whose place in host memory it takes"
            h.fail("gradients", op, op.block, got)


def _few_pass(h: History, op: Op, few: int, what: str) -> None:
    """Few gradients are between their two hops."""
    number = len(h.grads)
    before = h.arrived[number - few] if number - few in range(len(h.arrived)) else op.id + 1
    carried = earlier_arrivals(h.placed, h.schedule.signature.order, few, number, last_hop=h.last_hop)
    waits = h.is_behind(op, before) if number >= few else all(edge in op.carried for edge in carried)
    if not waits:
        h.fail("gradients", op, op.block, f"does not wait for a {h.last_hop.value} before it: {what.format(few)}")


def reduce(h: History, op: Op, _: Anchor) -> None:
    """Gradients that have left devices become slices of their sum."""
    last = h.grads.get(op.block)
    if last is None or h.schedule.ops[last].kind is not OpKind.GRAD:
        h.fail("gradients", op, op.block, "reduces gradients that no GRAD has brought to the host, or that are slices")


def update_follows(h: History, op: Op, _: Anchor) -> None:
    """The CPU updates with gradients that have come to the host."""
    if not h.placed[op.block].through_host:
        return
    last = h.grads.get(op.block, op.id + 1)
    if not h.is_behind(op, last) or h.schedule.ops[last].kind is not h.last_hop:
        h.fail("order", op, op.block, f"does not wait for its {h.last_hop.value}")


def device_anchor_begins(h: History, index: int, anchor: Anchor) -> None:
    """A backward has memory for its gradients, and those of the last step have left the device."""
    if anchor.phase is not Phase.BACKWARD:
        return
    missing = [
        edge for edge in last_gradients(h.placed, h.schedule.anchors, index, departure=h.departure) if edge not in anchor.carried
    ]
    if missing:
        got = f"anchor {index} ({anchor}) does not wait for the GRAD of block {missing[0][1]} of the step before"
        h.fail("gradients", None, anchor.block, got)
    _few_wait(h, index, anchor, DEVICE_GRADIENTS, "blocks' gradients leave the device")


def device_ends(h: History) -> None:
    """No gradients for the CPU stay on the device."""
    for block in dict.fromkeys(h.schedule.signature.order):
        if not (h.schedule.signature.training and h.placed[block].through_host):
            continue
        if waits_for_step(h.placed[block], h.schedule.signature, h.ranks):
            continue
        if block not in h.grads:
            h.fail("gradients", None, block, "is updated by the CPU, and its gradients stay on the device")
        if h.schedule.ops[h.grads[block]].kind is not h.last_hop:
            h.fail("gradients", None, block, f"has gradients on their way that no {h.last_hop.value} follows")


def _few_wait(h: History, index: int, anchor: Anchor, allowed: int, what: str) -> None:
    """Fewer than ``allowed`` gradients wait: the anchor's own take the last place."""
    if len(h.using) >= allowed:
        got = f"anchor {index} ({anchor}) begins while {len(h.using)} {what}"
        h.fail("gradients", h.schedule.ops[h.using[0]], anchor.block, f"{got}; allowed: {allowed - 1}")
