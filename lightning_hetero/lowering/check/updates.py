"""Rules *update* and *order* of updates: each trainable block once, when and where planned."""

from __future__ import annotations

from lightning_hetero.ir.plan import Tier, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import Anchor, Lane, Op, OpKind, Payload, Phase, Updates
from lightning_hetero.lowering.check.history import History
from lightning_hetero.lowering.needs import DEVICE_STATES
from lightning_hetero.lowering.placed_blocks import updates_in_backward


def open_state(h: History, op: Op, _: Anchor) -> None:
    """State comes from disk."""
    again = h.opened.get(op.block, -1) < h.speculated.get(op.block, -1) and h.may_redo(op)
    if h.placed[op.block].plan.state is not Tier.DISK or (op.block in h.opened and not again):
        h.fail("order", op, op.block, "opens state that does not live on disk, or opens it twice")
    _one_by_one(h, op)
    _mirror_has_ended(h, op)


def update(h: History, op: Op, _: Anchor) -> None:
    """An update: when, where, with what."""
    updates, placed = h.schedule.signature.updates, h.placed[op.block]
    again = op.block in h.updated
    if updates is Updates.NONE or not placed.trainable or (again and not h.may_redo(op)):
        h.fail("update", op, op.block, f"is frozen, is updated twice, or the step has no updates ({updates.value})")
    if op.at <= h.last_use.get(op.block, len(h.schedule.anchors)):
        h.fail("update", op, op.block, f"is updated at anchor {op.at}, before its last backward has ended")
    if _must_follow_verdict(h, op.block) and h.schedule.anchors[op.at].phase is not Phase.VERDICT:
        h.fail("update", op, op.block, "is updated before the verdict")
    lane = Lane.COMPUTE if placed.plan.update is UpdateLane.DEVICE else Lane.CPU
    if op.lane is not lane:
        h.fail("update", op, op.block, f"is updated on lane {op.lane.value!r}, the plan says {lane.value!r}")
    opened = h.opened.get(op.block, -1)
    if placed.plan.state is Tier.DISK and opened <= h.updated.get(op.block, -1):
        h.fail("order", op, op.block, "is updated without a FETCH of its state" + " after the verdict" * again)
    if again and op.block in h.resident and h.fetched.get(op.block, -1) < h.updated[op.block]:
        h.fail("resident", op, op.block, "is updated again, and its weights in memory are those that were discarded")
    _one_by_one(h, op)
    _mirror_has_ended(h, op)


def ends(h: History) -> None:
    """Every trainable block is updated, and what the verdict discards is updated again."""
    if h.schedule.signature.updates is not Updates.NONE:
        for block in dict.fromkeys(h.schedule.signature.order):
            if h.placed[block].trainable and block not in h.updated:
                h.fail("update", None, block, "is trainable and is not updated")
    if h.schedule.signature.updates is Updates.REDONE:
        for block, op in h.updated.items():
            if h.speculated.get(block) == op:
                h.fail("update", h.schedule.ops[op], block, "is discarded by the verdict and not updated again")


# ---- state that visits a device ------------------------------------------------------------------


def state_goes_up(h: History, op: Op, _: Anchor) -> None:
    """State comes to the device, in place of what has gone back."""
    if not h.placed[op.block].state_moves or op.block in h.state_up:
        h.fail("order", op, op.block, "brings state to the device that is not updated there, lives there, or comes twice")
    over = list(h.state_up)[-DEVICE_STATES] if len(h.state_up) >= DEVICE_STATES else None
    if over is not None and not h.is_behind(op, h.state_down.get(over, op.id + 1)):
        h.fail("capacity", op, op.block, f"does not wait for the SWAP_OUT of block {over}'s state, whose place it takes")


def slices_go_up(h: History, op: Op, _: Anchor) -> None:
    """Slices of gradients and weights come to the device, in place of what has gone back."""
    if not h.placed[op.block].slices_move or op.block in h.slices_up:
        h.fail("order", op, op.block, "brings slices to the device that are not updated there, or comes twice")
    if not h.is_behind(op, h.grads.get(op.block, op.id + 1)) or h.schedule.ops[h.grads[op.block]].kind is not h.last_hop:
        h.fail("order", op, op.block, f"does not wait for its {h.last_hop.value}")
    over = list(h.slices_up)[-DEVICE_STATES] if len(h.slices_up) >= DEVICE_STATES else None
    if over is not None and not h.is_behind(op, h.returned.get(over, op.id + 1)):
        h.fail("capacity", op, op.block, f"does not wait for the SWAP_OUT of block {over}'s weights, whose place it takes")


def is_there(h: History, op: Op, _: Anchor) -> None:
    """The device updates what has come there."""
    placed = h.placed[op.block]
    if placed.state_moves and op.block not in h.state_up:
        h.fail("order", op, op.block, "is updated on the device, and its state has not come there")
    if placed.slices_move and not h.is_behind(op, h.slices_up.get(op.block, op.id + 1)):
        h.fail("order", op, op.block, "is updated on the device, and its gradients have not come there")


def goes_back(h: History, op: Op, _: Anchor) -> None:
    """What the device has updated goes to the host, where it lives."""
    placed = h.placed[op.block]
    if op.payload is Payload.STATE:
        moves = placed.state_moves and op.block not in h.state_down
    else:
        moves = placed.weights_return and op.block not in h.returned
    if not moves or op.block not in h.updated:
        got = f"takes {op.payload.value} to the host that the device has not updated, or that live there"
        h.fail("order", op, op.block, got)


def all_gone_back(h: History) -> None:
    """State and weights that live on the host do not stay on the device."""
    for block in dict.fromkeys(h.schedule.signature.order):
        placed, op = h.placed[block], h.updated.get(block)
        if op is not None and placed.state_moves and block not in h.state_down:
            h.fail("order", h.schedule.ops[op], block, "is updated, and its state stays on the device")
        if op is not None and placed.weights_return and block not in h.returned:
            h.fail("order", h.schedule.ops[op], block, "is updated, and its weights do not go back")


def _must_follow_verdict(h: History, block: int) -> bool:
    """Whether the block's update has to follow the verdict.

    A device with memory of its own may update a block between two backwards.
    """
    if h.speculates:
        return not h.placed[block].revocable
    after = not updates_in_backward(h.plan, h.schedule.signature.updates)
    return after or (not h.has_device and h.placed[block].plan.update is UpdateLane.DEVICE)


def _one_by_one(h: History, op: Op) -> None:
    """Under a naive order one block's update and its writes end before the next update begins."""
    if h.plan.update_order is not UpdateOrder.NAIVE or not h.placed[op.block].on_cpu:
        return
    for block, end in h.update_ended.items():
        if block != op.block and h.placed[block].on_cpu and not h.is_behind(op, end):
            h.fail("update", op, op.block, f"does not wait for the end of block {block}'s update, as the plan says")


def _mirror_has_ended(h: History, op: Op) -> None:
    """Memory that a MIRROR of the step before writes from does not change before that has ended."""
    if h.placed[op.block].mirrored_bytes and (OpKind.MIRROR, op.block) not in op.carried:
        h.fail("order", op, op.block, "does not wait for the block's MIRROR of the step before")
