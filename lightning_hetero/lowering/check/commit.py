"""Rule *commit*: writes follow the last step's record, and this step's record follows them."""

from __future__ import annotations

from lightning_hetero.ir.schedule import NO_BLOCK, Anchor, Lane, Op, OpKind
from lightning_hetero.lowering.chains import Chain
from lightning_hetero.lowering.check.history import History


def store(h: History, op: Op, _: Anchor) -> None:
    """What an update has made goes to the disk. One on the CPU begins to write as it updates."""
    placed, previous = h.placed[op.block], h.last.get((op.block, Chain.HOST))
    if not placed.stored or previous is None or previous.kind is not OpKind.UPDATE:
        h.fail("order", op, op.block, "does not follow the UPDATE of a block with a file")
    writes = [op, *([previous] if placed.on_cpu and previous is not None and h.ranks > 1 else [])]
    for one in writes:
        if not _follows_record(h, one):
            h.fail("commit", one, one.block, "does not wait for the COMMIT of the step before")


def _follows_record(h: History, op: Op) -> bool:
    """Whether the op waits for the record of the step before; on several ranks, for all of them."""
    if h.ranks == 1:
        return (OpKind.COMMIT, NO_BLOCK) in op.carried
    return h.agreed is not None and h.is_behind(op, h.agreed)


def mirror(h: History, op: Op, _: Anchor) -> None:
    """The result of an update in memory goes to the disk; from the device by way of the host."""
    placed, previous = h.placed[op.block], h.last.get((op.block, Chain.HOST))
    # Weights on disk may have left memory since, and come back.
    repeated = previous is not None and (previous.kind, previous.lane) == (OpKind.MIRROR, Lane.DISK_WRITE)
    follows = op.block in h.updated and previous is not None and not repeated
    if op.num_bytes != placed.mirrored_bytes or not follows:
        h.fail("order", op, op.block, f"does not follow the UPDATE of a block with {placed.mirrored_bytes} B to keep")
    if not _follows_record(h, op) or not h.after_verdict(op):
        h.fail("commit", op, op.block, "does not wait for the COMMIT of the step before, or comes before the verdict")
    if placed.lent_bytes and (not h.lent or h.lent[-1].block != op.block):
        h.fail("order", op, op.block, "writes what only the device has, and no MIRROR on lane 'd2h' has brought that")


def mirror_leaves_device(h: History, op: Op, _: Anchor) -> None:
    """What only the device has comes to the host, in place of what the block before had there."""
    placed = h.placed[op.block]
    if not placed.lent_bytes or op.num_bytes != placed.lent_bytes or op.block not in h.updated:
        got = f"brings {op.num_bytes} B to the host, of which the device has {placed.lent_bytes} B alone after its UPDATE"
        h.fail("order", op, op.block, got)
    if h.lent and (h.lent[-1].lane is Lane.D2H or not h.is_behind(op, h.lent[-1].id)):
        got = f"does not wait for the MIRROR of block {h.lent[-1].block}, whose place it takes"
        h.fail("capacity", op, op.block, got)


def commit(h: History, op: Op, _: Anchor) -> None:
    """The record comes last, and stands for everything that the step has written."""
    if not h.after_verdict(op):
        h.fail("commit", op, op.block, "comes before the verdict")
    writes = (*h.stored.values(), *h.mirrored.values())
    if op.id != len(h.schedule.ops) - 1 or any(not h.is_behind(op, w) for w in writes):
        h.fail("commit", op, op.block, "is not the last op, or does not wait for every STORE and MIRROR")


def ends(h: History) -> None:
    """Every update that has to last is written to the disk, and there is a record of it."""
    for block, op in h.updated.items():
        if h.placed[block].stored and h.stored.get(block, -1) < op:
            h.fail("order", h.schedule.ops[op], block, "is updated and not stored")
        if h.placed[block].mirrored_bytes and h.mirrored.get(block, -1) < op:
            h.fail("order", h.schedule.ops[op], block, "is updated and what of it lives in memory is not kept")
    if bool(h.stored or h.mirrored) != any(op.kind is OpKind.COMMIT for op in h.schedule.ops):
        h.fail("commit", None, NO_BLOCK, "STOREs or MIRRORs without a COMMIT, or a COMMIT without any")
