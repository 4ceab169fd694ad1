"""Rules *resident* and *capacity*: weights are in memory when they are used, and they fit."""

from __future__ import annotations

from lightning_hetero.ir.schedule import NO_BLOCK, Anchor, Op, OpKind, Phase, Updates
from lightning_hetero.lowering.check.history import History
from lightning_hetero.units import format_bytes

# ---- host memory ---------------------------------------------------------------------------------


def host_begins(h: History) -> None:
    """What is said to be in memory may be there."""
    for block in h.resident:
        if not h.placed[block].on_disk:
            h.fail("resident", None, block, "is in resident_before, but its weights do not live on disk")


def fetch(h: History, op: Op, _: Anchor) -> None:
    """Weights come from disk."""
    again = op.block in h.resident and h.may_redo(op)  # in the place of what was discarded
    if not h.placed[op.block].on_disk or (op.block in h.resident and not again):
        h.fail("resident", op, op.block, "fetches weights that do not live on disk, or are in memory")
    if op.block in h.opened and op.block not in h.updated:
        h.fail("resident", op, op.block, "fetches weights whose update is open")
    if op.block in h.speculated and not h.after_verdict(op):
        h.fail("resident", op, op.block, "fetches weights on which there is no verdict yet")
    if h.released & ~h.behind[op.id]:
        h.fail("capacity", op, op.block, "does not wait for every RELEASE before it, whose memory it takes over")
    num_bytes = h.resident_bytes + (0 if again else h.placed[op.block].shape.weight_bytes)
    if num_bytes > h.capacity_bytes:
        need, room = format_bytes(num_bytes), format_bytes(h.capacity_bytes)
        h.fail("capacity", op, op.block, f"brings weights that live on disk to {need}; allowed: {room}")


def release(h: History, op: Op, _: Anchor) -> None:
    """Host memory is given back."""
    if op.block not in h.resident:
        h.fail("resident", op, op.block, "releases weights that are not in memory")
    if not h.schedule.copies and op.block in h.held:
        h.fail("resident", op, op.block, "releases its slice of weights that other ranks may still compute with")


def leave(h: History, op: Op, _: Anchor) -> None:
    """The devices of all ranks have read what a rank has of a block in memory that they share."""
    if not h.schedule.gathers_in_place or op.block not in h.resident:
        h.fail("resident", op, op.block, "ends the use of weights that live on disk, where ranks do not share them in memory")


def release_shared(h: History, op: Op, _: Anchor) -> None:
    """The device of another rank does not read the slice that goes."""
    if h.schedule.gathers_in_place and op.block not in h.left:
        h.fail("resident", op, op.block, "releases its slice of weights that devices of other ranks may still read")


def release_unused(h: History, op: Op, anchor: Anchor) -> None:
    """Compute does not use the host memory that is given back.

    A device with memory of its own computes with its own copy: an UPLOAD has made it, which chains
    see to.
    """
    if op.block == anchor.block:
        h.fail("resident", op, op.block, f"releases weights that {anchor} uses")
    if op.block in h.opened and op.block not in h.updated:
        h.fail("resident", op, op.block, "releases weights whose update is open")


def host_anchor_begins(h: History, index: int, anchor: Anchor) -> None:
    """The weights that an anchor uses are in host memory, and the last update has finished."""
    block = anchor.block
    if h.placed[block].on_disk:
        _is_present(h, index, anchor, h.resident, h.fetched)
    pending = anchor.phase is Phase.FORWARD and h.placed[block].trainable and block not in h.fetched
    if pending and (OpKind.UPDATE, block) not in anchor.carried:
        h.fail("order", None, block, f"anchor {index} ({anchor}) does not wait for the UPDATE of the step before")


def host_ends(h: History) -> None:
    """What is left in host memory is what the schedule says."""
    if h.resident != h.schedule.resident_after:
        got, said = sorted(h.resident), sorted(h.schedule.resident_after)
        h.fail("resident", None, NO_BLOCK, f"the step ends with blocks {got} in memory, resident_after says {said}")


# ---- the memory of a device ----------------------------------------------------------------------


def device_begins(h: History) -> None:
    """The device may hold what it is said to hold."""
    for block in h.held:
        if not (h.placed[block].below_device or h.placed[block].renewed):
            h.fail("resident", None, block, "is in device_before, but its weights do not come to the device from below")
    _fits_device(h, None, NO_BLOCK, h.held_bytes)


def upload(h: History, op: Op, _: Anchor) -> None:
    """Weights come to the device."""
    placed = h.placed[op.block]
    if op.block in h.held or not (placed.below_device or placed.renewed):
        h.fail("resident", op, op.block, "uploads weights that the device holds, or that no one else makes")
    if placed.on_disk and op.block not in h.resident:
        h.fail("resident", op, op.block, "uploads weights that are not in host memory")
    # The block's last use is over, and its update is still to come.
    outdated = op.block not in h.updated and op.at > h.last_use.get(op.block, -1)
    if h.schedule.signature.updates is not Updates.NONE and placed.renewed and outdated:
        h.fail("order", op, op.block, "uploads weights that the coming UPDATE outdates, after their last use")
    if op.block in h.speculated and (not h.after_verdict(op) or h.may_redo(op)):
        h.fail("resident", op, op.block, "uploads weights on which there is no verdict yet, or that it has discarded")
    if placed.below_device and h.released_there & ~h.behind[op.id]:
        h.fail("capacity", op, op.block, "does not wait for every RELEASE before it, whose memory it takes over")
    _fits_device(h, op, op.block, h.held_bytes + h.copied_bytes(op.block))


def gather(h: History, op: Op, _: Anchor) -> None:
    """Slices of all ranks become whole on the host, for the UPLOAD that follows."""
    placed = h.placed[op.block]
    if op.block in h.held or op.block in h.coming or not (placed.below_device or placed.renewed):
        h.fail("resident", op, op.block, "gathers weights that the device holds or that are whole, or that no one else makes")
    if placed.on_disk and op.block not in h.resident:
        h.fail("resident", op, op.block, "gathers weights that are not in host memory")


def upload_whole(h: History, op: Op, _: Anchor) -> None:
    """What goes up is whole."""
    if op.block not in h.coming:
        h.fail("resident", op, op.block, "uploads weights of which the ranks have slices: no GATHER comes before it")


def upload_slice(h: History, op: Op, anchor: Anchor) -> None:
    """A slice comes to its place among whole weights, which take their memory then."""
    if op.block in h.coming:
        h.fail("resident", op, op.block, "uploads a slice again that no GATHER has followed")
    upload(h, op, anchor)


def gather_uploaded(h: History, op: Op, _: Anchor) -> None:
    """Devices give each other the slices that have come to them."""
    if op.block not in h.coming:
        h.fail("resident", op, op.block, "gathers slices on devices: no UPLOAD comes before it")


def device_release(h: History, op: Op, anchor: Anchor) -> None:
    """Device memory is given back."""
    if op.block not in h.held or not h.placed[op.block].below_device:
        h.fail("resident", op, op.block, "releases weights that are not on the device, or that live there")
    if op.block == anchor.block:
        h.fail("resident", op, op.block, f"releases weights that {anchor} uses")


def update_of_copy(h: History, op: Op, _: Anchor) -> None:
    """The CPU updates what the device has no copy of; the device updates what it holds."""
    placed = h.placed[op.block]
    comes = h.on_devices and op.block in h.coming
    if placed.through_host and placed.below_device and (op.block in h.held or comes):
        h.fail("resident", op, op.block, "is updated by the CPU while the device holds a copy, which is outdated then")
    if not placed.through_host and placed.below_device and op.block not in h.held:
        h.fail("resident", op, op.block, "is updated on the device, which does not hold its weights")


def device_anchor_begins(h: History, index: int, anchor: Anchor) -> None:
    """The weights that an anchor uses are on the device, and the last update has finished."""
    block, placed = anchor.block, h.placed[anchor.block]
    if placed.below_device or placed.renewed:
        _is_present(h, index, anchor, h.held, h.uploaded)
    if anchor.phase is Phase.FORWARD and placed.trainable and block not in h.uploaded:
        kind = h.arrival if placed.renewed else OpKind.UPDATE
        if not (placed.below_device and placed.through_host) and (kind, block) not in anchor.carried:
            h.fail("order", None, block, f"anchor {index} ({anchor}) does not wait for the {kind.value} of the step before")


def device_ends(h: History) -> None:
    """What is left on the device is what the schedule says."""
    for block, first in h.coming.items() if h.on_devices else ():
        h.fail("resident", h.schedule.ops[first], block, "uploads a slice that no GATHER follows")
    if h.held != h.schedule.device_after:
        got, said = sorted(h.held), sorted(h.schedule.device_after)
        h.fail("resident", None, NO_BLOCK, f"the step ends with blocks {got} on the device, device_after says {said}")


def _is_present(h: History, index: int, anchor: Anchor, held: set[int], arriving: dict[int, int]) -> None:
    """The anchor's weights are in memory and have been waited for."""
    block = anchor.block
    if block not in held:
        h.fail("resident", None, block, f"is not in memory when anchor {index} ({anchor}) begins")
    if block in arriving and not h.has_waited(arriving[block]):
        h.fail("resident", h.schedule.ops[arriving[block]], block, f"is not waited for by anchor {index} ({anchor})")


def _fits_device(h: History, op: Op | None, block: int, num_bytes: int) -> None:
    """Copies of weights from below fit the device's memory."""
    if num_bytes > h.device_capacity_bytes:
        need, room = format_bytes(num_bytes), format_bytes(h.device_capacity_bytes)
        h.fail("capacity", op, block, f"brings weights that live below the device to {need} there; allowed: {room}")
