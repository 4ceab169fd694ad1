"""Rules *acyclic* and *order*: edges lead backwards, and ops on the same bytes are ordered."""

from __future__ import annotations

from lightning_hetero.ir.schedule import COLLECTIVES, NO_BLOCK, Anchor, Lane, Op, OpKind, Payload
from lightning_hetero.lowering.chains import carried_into
from lightning_hetero.lowering.check.history import History
from lightning_hetero.lowering.lower import expected_anchors, last_kept, last_step


def anchors(h: History) -> None:
    """Anchors are those of the signature, and wait for ops that exist."""
    signature, found = h.schedule.signature, h.schedule.anchors
    if [(a.phase, a.block) for a in found] != [(a.phase, a.block) for a in expected_anchors(signature)]:
        got = " ".join(map(str, found))
        h.fail("acyclic", None, NO_BLOCK, f"anchors {got} are not those of the signature {signature}")
    for index, anchor in enumerate(found):
        if any(not 0 <= i < len(h.schedule.ops) or h.schedule.ops[i].at > index for i in anchor.needs):
            got = f"anchor {index} ({anchor}) waits for ops {anchor.needs}, not all issued by then"
            h.fail("acyclic", None, anchor.block, got)


def edges(h: History) -> None:
    """Ids, blocks, edges and anchors of ops make sense."""
    at = 0
    for index, op in enumerate(h.schedule.ops):
        if op.id != index:
            h.fail("acyclic", op, op.block, f"has id {op.id}, its place is {index}")
        if not (op.kind in (OpKind.COMMIT, OpKind.AGREE) and op.block == NO_BLOCK) and not 0 <= op.block < len(h.model.blocks):
            h.fail("acyclic", op, NO_BLOCK, f"names block {op.block} of {len(h.model.blocks)}")
        if any(not 0 <= i < index for i in op.after):
            h.fail("acyclic", op, op.block, f"waits for ops {op.after}; allowed: ids from 0 to {index - 1}")
        if not at <= op.at < len(h.schedule.anchors):
            last = len(h.schedule.anchors) - 1
            h.fail("acyclic", op, op.block, f"is issued at anchor {op.at}; allowed: {at} to {last}")
        at = op.at
        h.behind.append(h.union(op.after) | 1 << index)


def first_anchor(h: History) -> None:
    """The first forward waits for the last step if the plan, or a kept step, requires it."""
    if not h.plan.priority and h.schedule.anchors:
        first = h.schedule.anchors[0]
        missing = [edge for edge in last_step(h.placed, h.schedule.signature.order, arrival=h.arrival) if edge not in first.carried]
        if missing:
            kind, block = missing[0]
            got = f"anchor 0 ({first}) does not wait for its {kind.value} of the step before, as a plan without priority must"
            h.fail("order", None, block, got)
    for edge in last_kept(h.placed, h.schedule.signature.order):
        first = h.schedule.anchors[0]
        if edge not in first.carried:
            got = f"anchor 0 ({first}) does not wait for its {edge[0].value} of the step before, which is kept"
            h.fail("order", None, edge[1], got)


def chain(h: History, op: Op) -> None:
    """The op follows the one before on the same bytes, in this step or an earlier one."""
    for link in h.chains(op):
        previous = h.last.get((op.block, link))
        if previous is not None and not h.is_behind(op, previous.id):
            h.fail("order", op, op.block, f"does not wait for the block's op before it ({previous})")
        if previous is None:
            for kind, block in carried_into(link, op.kind, op.block, h.placed[op.block]):
                if (kind, block) not in op.carried:
                    h.fail("order", op, op.block, f"does not wait for the block's {kind.value} of the step before")


def moves_its_payload(h: History, op: Op, _: Anchor) -> None:
    """An op moves exactly its payload. The simulator's times and memory depend on that."""
    shape = h.placed[op.block].shape
    sizes = {Payload.WEIGHTS: shape.weight_bytes, Payload.STATE: shape.state_bytes, Payload.GRADIENTS: shape.gradient_bytes}
    size = sizes[op.payload] + (shape.weight_bytes if op.kind is OpKind.STORE and op.payload is Payload.STATE else 0)
    if op.kind in (OpKind.SWAP_IN, OpKind.SWAP_OUT):  # of several ranks' slices gradients take weights along
        size += shape.weight_bytes if op.payload is Payload.GRADIENTS else 0
    elif op.lane in COLLECTIVES or (op.lane in (Lane.H2D, Lane.D2H) and (not h.on_devices or op.kind is OpKind.RELEASE)):
        size *= h.ranks  # whole weights and gradients; slices where devices exchange them
    if op.lane is Lane.NET and op.payload is Payload.WEIGHTS and h.schedule.gathers_in_place:
        size = 0
    if op.num_bytes != size:
        h.fail("order", op, op.block, f"moves {op.num_bytes} bytes of {op.payload.value}; there are {size}")
