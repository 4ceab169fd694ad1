"""Ops in the order of issue, each behind what came before it.

[Note: Chains]
Ops on the same bytes run one after the other. Where the device is the host, all ops of one block
form one chain. A device with memory of its own works on several copies of a block at once, so there
a block has four chains: the copy of its *weights* on the *device*, that on the *host*, its *state*,
and its *gradients*. On several ranks whole weights take the place of the device's copy. An op
belongs to the chains of the copies that it reads or writes, an UPDATE to all of them. It follows
the previous op of each of its chains, unless its other edges imply that. The first op of a chain
follows what ended the chain in an earlier step. RELEASEs of one tier run one after the other too,
so an op that follows the last of them may take over the memory of all. Activations have one chain
per use of a block, see ``activation_moves.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum

from lightning_hetero.ir.schedule import NO_BLOCK, Lane, Op, OpKind, Payload
from lightning_hetero.lowering.placed_blocks import PlacedBlock

Carried = tuple[OpKind, int]


class Chain(IntEnum):
    """Which copies of a block's bytes an op works on."""

    DEVICE = 0  # weights on the device
    HOST = 1  # weights on the host, or in the file
    STATE = 2
    GRADIENTS = 3


_HOST_WEIGHTS = (Chain.DEVICE, Chain.HOST)  # of a FETCH, and of a RELEASE on the host

_CHAINS = {
    (OpKind.FETCH, Payload.WEIGHTS): _HOST_WEIGHTS,
    (OpKind.FETCH, Payload.STATE): (Chain.STATE,),
    (OpKind.UPLOAD, Payload.WEIGHTS): (Chain.DEVICE,),
    (OpKind.GATHER, Payload.WEIGHTS): (Chain.DEVICE,),
    (OpKind.REDUCE, Payload.GRADIENTS): (Chain.GRADIENTS,),
    (OpKind.GRAD, Payload.GRADIENTS): (Chain.GRADIENTS,),
    (OpKind.STORE, Payload.WEIGHTS): (Chain.HOST, Chain.STATE),
    (OpKind.STORE, Payload.STATE): (Chain.HOST, Chain.STATE),
    (OpKind.SWAP_IN, Payload.STATE): (Chain.STATE,),
    (OpKind.SWAP_IN, Payload.GRADIENTS): (Chain.HOST, Chain.STATE, Chain.GRADIENTS),
    (OpKind.SWAP_OUT, Payload.WEIGHTS): (Chain.DEVICE, Chain.HOST, Chain.STATE),
    (OpKind.SWAP_OUT, Payload.STATE): (Chain.HOST, Chain.STATE),
    (OpKind.MIRROR, Payload.WEIGHTS): (Chain.HOST, Chain.STATE),
    (OpKind.MIRROR, Payload.STATE): (Chain.HOST, Chain.STATE),
}


def chains_of(kind: OpKind, lane: Lane, payload: Payload, *, device: bool) -> tuple[Chain, ...]:
    """The chains of its block that an op belongs to; none for activations, COMMIT and AGREE."""
    if kind in (OpKind.COMMIT, OpKind.AGREE) or payload is Payload.ACTIVATIONS:
        return ()
    if not device:
        return (Chain.HOST,)
    if kind is OpKind.RELEASE:
        return _HOST_WEIGHTS if lane is Lane.DISK_READ else (Chain.DEVICE,)
    return _CHAINS.get((kind, payload), tuple(Chain))


def carried_into(chain: Chain, kind: OpKind, block: int, placed: PlacedBlock) -> Iterator[Carried]:
    """What the first op of a chain waits for, of earlier steps.

    - On the host: the STORE, which reads what the UPDATE wrote; likewise for state, which waits for
      its way back before it goes up.
    - On the device: an UPLOAD waits for the UPDATE that makes what it copies; where the device
      updates weights, for their copy on the host.
    """
    if chain in (Chain.HOST, Chain.STATE) and placed.stored:
        yield OpKind.STORE, block
    if chain is Chain.STATE and kind is OpKind.SWAP_IN:
        yield OpKind.SWAP_OUT, block
    if chain is Chain.DEVICE and kind in (OpKind.UPLOAD, OpKind.GATHER) and placed.through_host:
        yield OpKind.UPDATE, block
    if chain is Chain.DEVICE and placed.weights_return:
        yield OpKind.SWAP_OUT, block


def earlier_arrivals(
    placed: Sequence[PlacedBlock], order: Sequence[int], few: int, number: int, *, last_hop: OpKind
) -> Iterator[Carried]:
    """What the first hop of gradients waits for of an earlier step, on devices that share a model.

    So gradients of at most ``few`` blocks are between the hops, and those of two micro-batches do
    not meet there. The earlier step may have had gradients of all blocks, or not of pinned ones
    (``placed_blocks.waits_for_step``), so this waits for the last ones of both.

    Args:
        placed: The blocks.
        order: The order of their forwards; gradients come in the reverse order.
        few: How many blocks.
        number: The place of the op among those of its kind in its step.
        last_hop: The kind of op that takes gradients away from there.
    """
    every = [block for block in dict.fromkeys(order) if placed[block].through_host]
    for blocks in (every, [block for block in every if not placed[block].shape.pinned]):
        if number < min(few, len(blocks)):
            yield last_hop, blocks[min(few, len(blocks)) - 1 - number]


class Issue:
    """Issues ops: the only place that makes them.

    Args:
        placed: The blocks.
        device: The device has memory of its own.

    Attributes:
        ops: All ops so far.
        at: The anchor that issues the next ones.
    """

    def __init__(self, placed: Sequence[PlacedBlock], *, device: bool) -> None:
        self.ops: list[Op] = []
        self.at = 0
        self._placed, self._device = placed, device
        self._last: dict[tuple[int, Chain], int] = {}

    def __call__(
        self,
        kind: OpKind,
        block: int,
        lane: Lane,
        payload: Payload = Payload.NONE,
        num_bytes: int = 0,
        *,
        after: Sequence[int] = (),
        carried: Sequence[Carried] = (),
    ) -> int:
        """Issues one op, behind the ops ``after`` and those of its chains; returns its id."""
        number = len(self.ops)
        behind = set(after)
        earlier: list[Carried] = []
        chains = chains_of(kind, lane, payload, device=self._device)
        ends = {chain: self._last.get((block, chain)) for chain in chains}
        for chain, previous in ends.items():
            if previous is None:
                earlier += carried_into(chain, kind, block, self._placed[block])
            elif chains != _HOST_WEIGHTS or not self._is_implied(previous, ends.values()):
                behind.add(previous)
            self._last[block, chain] = number
        op = Op(
            id=number,
            kind=kind,
            block=block,
            lane=lane,
            at=self.at,
            payload=payload,
            num_bytes=num_bytes,
            after=tuple(sorted(behind)),
            carried=tuple(dict.fromkeys((*earlier, *carried))),
        )
        self.ops.append(op)
        return number

    def _is_implied(self, previous: int, ends: Iterable[int | None]) -> bool:
        """Whether the edge to a FETCH or UPDATE follows from the edge to the other chain.

        Both are in both chains of host weights, so whatever came later in one of these follows.
        """
        both = self.ops[previous].kind in (OpKind.FETCH, OpKind.UPDATE)
        return both and any(end is not None and end > previous for end in ends)

    def commit(self, stores: Sequence[int]) -> None:
        """The record that ends the step's writes."""
        self(OpKind.COMMIT, NO_BLOCK, Lane.DISK_WRITE, after=stores)
