"""Ops in the order of issue, each behind what came before it.

[Note: Chains]
Ops on the same bytes run one after the other. Where the device is the host, all ops of one block form one chain. A device with
memory of its own works on several copies of a block at once, so there a block has three chains:

- *device*: the copy of its weights on the device, and what reads or writes it there;
- *host*: its weights and state on the host and on disk;
- *gradients*.

An UPDATE belongs to all of them. An op follows the previous op of each of its chains; the first one of a chain follows what ended
it in an earlier step. RELEASEs of one tier run one after the other too, so an op that follows the last of them may take over the
memory of all. Activations have one chain per use of a block, see ``lowering.activations``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

from lightning_hetero.ir.schedule import NO_BLOCK, Lane, Op, OpKind, Payload
from lightning_hetero.lowering.placement import Placement

Carried = tuple[OpKind, int]


class Chain(Enum):
    """Which copies of a block's bytes an op works on."""

    DEVICE = 0
    HOST = 1
    GRADIENTS = 2


_ALL = (Chain.DEVICE, Chain.HOST, Chain.GRADIENTS)
_BOTH = (Chain.DEVICE, Chain.HOST)
_CHAINS = {
    (OpKind.FETCH, Lane.DISK_READ): _BOTH,
    (OpKind.UPLOAD, Lane.H2D): (Chain.DEVICE,),
    (OpKind.RELEASE, Lane.H2D): (Chain.DEVICE,),
    (OpKind.RELEASE, Lane.DISK_READ): _BOTH,
    (OpKind.GRAD, Lane.D2H): (Chain.GRADIENTS,),
    (OpKind.UPDATE, Lane.CPU): _ALL,
    (OpKind.UPDATE, Lane.COMPUTE): _ALL,
    (OpKind.STORE, Lane.DISK_WRITE): (Chain.HOST,),
    (OpKind.SWAP_IN, Lane.H2D): (Chain.HOST,),
    (OpKind.SWAP_OUT, Lane.D2H): _BOTH,
}


def chains_of(kind: OpKind, lane: Lane, payload: Payload, *, device: bool) -> tuple[Chain, ...]:
    """The chains of its block that an op belongs to; none for activations and COMMIT."""
    if kind is OpKind.COMMIT or payload is Payload.ACTIVATIONS:
        return ()
    if not device:
        return (Chain.HOST,)
    if kind is OpKind.FETCH and payload is Payload.STATE:
        return (Chain.HOST,)
    return _CHAINS.get((kind, lane), _ALL)


def carried_into(chain: Chain, kind: OpKind, block: int, placed: Placement) -> Iterator[Carried]:
    """What the first op of a chain waits for, of earlier steps.

    - On the host: the STORE, which reads what the UPDATE wrote; state that goes up waits for its way back.
    - On the device: an UPLOAD waits for the CPU's UPDATE, which makes what it copies; where the device updates weights that live
      on the host, the copy it leaves there.
    """
    if chain is Chain.HOST and placed.stored:
        yield OpKind.STORE, block
    if chain is Chain.HOST and kind is OpKind.SWAP_IN:
        yield OpKind.SWAP_OUT, block
    if chain is Chain.DEVICE and kind is OpKind.UPLOAD and placed.on_cpu:
        yield OpKind.UPDATE, block
    if chain is Chain.DEVICE and kind in (OpKind.UPLOAD, OpKind.RELEASE) and placed.weights_return:
        yield OpKind.SWAP_OUT, block


class Issue:
    """Issues ops: the only place that makes them.

    Args:
        placed: The blocks.
        device: The device has memory of its own.

    Attributes:
        ops: All ops so far.
        at: The anchor that issues the next ones.
    """

    def __init__(self, placed: Sequence[Placement], *, device: bool) -> None:
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
        for chain in chains_of(kind, lane, payload, device=self._device):
            previous = self._last.get((block, chain))
            if previous is None:
                earlier += carried_into(chain, kind, block, self._placed[block])
            else:
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
            carried=(*earlier, *carried),
        )
        self.ops.append(op)
        return number

    def commit(self, stores: Sequence[int]) -> None:
        """The record that ends the step's writes."""
        self(OpKind.COMMIT, NO_BLOCK, Lane.DISK_WRITE, after=stores)
