"""What the ops of lane ``net`` do: collectives among the ranks that share a model.

[Note: Collectives]
Each rank runs its collectives one after the other in the thread of its lane, in the order of the
schedule, which is the same on all ranks. The thread that computes may call them, too: then it waits
for the lane first (:meth:`Collectives.follow`), so that two threads never use the group at once. A
collective ends on a rank when that rank has all that it gets, and others have got its part: its
slice may change then.

A sum over ranks has one order and one rounding, whatever the layout. Each rank gets its piece of
all gradients (all-to-all), and adds them in float64 in the order of the ranks. The reduce-scatter
of gloo is an all-reduce of which each rank keeps a slice. It moves twice the bytes, rounds after
each addition, and from three ranks on the order of its sum depends on where an element lies.

Where devices exchange themselves (:mod:`lightning_hetero.lanes.peers`), the same is done in their
memory, with the same bits.

The ranks of several nodes that have the same slice each sum a piece of it, and gather the pieces
(:mod:`lightning_hetero.lanes.mesh`). So the sum is that of as many ranks on one node, to the bit. A
sum of each node's sums would send less between nodes with more than two ranks, but it adds in
another order.

[Note: Meetings]
Ranks meet before they exchange what is large. A rank whose batch uses other blocks than those of
the others would otherwise wait for ever, or exchange other weights. What a rank is going to do it
announces as it submits the op (:meth:`Collectives.announce`). Where it has not met the others for
the next op, it tells them the next ones that it has announced, up to eight. All ranks compare what
all have told, and have met for the ops at which all agree. So a lane with ops that wait has one
message for several of them. A *barrier* is told of only when its turn has come: then the ops before
it, and what these waited for, have ended on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, takewhile
from threading import Lock, get_ident
from traceback import clear_frames
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_hetero._native import Ticket
from lightning_hetero.clock import now_s
from lightning_hetero.errors import HeteroError
from lightning_hetero.ir.schedule import NO_BLOCK
from lightning_hetero.lanes.base import Event
from lightning_hetero.lanes.mesh import REPLICATE, SHARD, close
from lightning_hetero.lanes.network import EmulatedNetwork
from lightning_hetero.lanes.notes import Notes
from lightning_hetero.lanes.peers import DeviceLinks

_Value = TypeVar("_Value")

_WHAT = ("GATHER", "REDUCE", "AGREE", "BROADCAST", "CHECKPOINT", "SHARE", "MATERIALIZE", "RELEASE", "READ", "CHANGE")
_FLAGS = 3
_AHEAD = 8  # ops for which ranks meet at once, at most
_PIECE_ELEMENTS = 1 << 16  # whose sum is in memory in float64 at a time: 512 KiB
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 warns of the older name


@dataclass(eq=False, frozen=True, slots=True)
class Announced:
    """What a rank is about to do; see [Note: Meetings]."""

    what: str
    block: int
    flags: tuple[bool, ...]
    barrier: bool

    def row(self) -> tuple[float, ...]:
        """As it is told to the others."""
        return _WHAT.index(self.what), self.block, *self.flags, *[False] * (_FLAGS - len(self.flags))


_NOTHING = (-1.0, *[0.0] * (1 + _FLAGS))  # a rank has announced no more


def _sum(own: Tensor, rows: Tensor, total: Tensor, divisor: int) -> None:
    """Adds rows in float64, one after the other, and rounds once; ``total``: memory for a piece."""
    ranks = torch.full((), divisor, dtype=torch.float64, device=own.device)  # by a number, GPUs multiply by its reciprocal
    for start in range(0, own.numel(), total.numel()):
        piece = slice(start, start + total.numel())
        first, *others = rows[:, piece]
        added = total[: first.numel()]
        torch.mul(first, 1, out=added)  # the same number in float64
        for other in others:
            added.add_(other)
        torch.div(added, ranks, out=own[piece])


class Collectives:
    """The collectives of one group of ranks.

    A call returns when its collective has ended on this rank. Ops of lane ``net`` call them within
    :meth:`on_lane`, and one other thread, which submits these ops.

    Args:
        group: The ranks; ``None``: all of them. Its timeout bounds every collective.
        network: Its speed, if that is emulated.
        mesh: Their nodes, see [Note: Nodes]; ``None``: one.
        peers: Their devices, if these exchange themselves.

    Attributes:
        rank: This rank.
        ranks: How many there are.
        shard: The slice of the model that this rank owns: its place on its node.
        shards: How many slices there are: the ranks of a node.
        node: The node of this rank.
        nodes: How many there are.

    Raises:
        HeteroError: Of each method: another rank has died or hangs, or the network has failed.
            Nothing more can be done with the group.
    """

    names: Sequence[str] = ()  # of the blocks, for errors

    def __init__(
        self, group: dist.ProcessGroup | None = None, network: EmulatedNetwork | None = None, mesh: DeviceMesh | None = None,
        peers: DeviceLinks | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._network, self._shard, self._replicate, self.peers = group, network, group, None, peers
        self.node, self.nodes, self.shard, self.shards = 0, 1, self.rank, self.ranks
        if mesh is not None:
            self._shard, self._replicate = mesh.get_group(SHARD), mesh.get_group(REPLICATE)
            (self.nodes, self.shards), (self.node, self.shard) = mesh.shape, mesh.get_coordinate() or ()
        self._lane = 0  # the thread of the lane
        self._last: Event | None = None  # the end of the last op there, which nobody has waited for
        self.is_closed = False  # by this rank, which has failed
        self._failed = ""  # why the group cannot be used any more
        self.notes = Notes()  # where a rank says why it ends
        self._lock = Lock()
        self._coming: deque[Announced] = deque()  # ops that have not been met for, or not been begun
        self._met: deque[list[bool]] = deque()  # for the first of these: the flags that any rank has

    # ---- the lane --------------------------------------------------------------------------------

    def follow(self, end: Event) -> None:
        """An op was given to the lane; it ends with this event."""
        self._last = end

    def settle(self) -> None:
        """Waits until the lane has ended all of its ops. Raises the error of the last one."""
        if self._last is not None and get_ident() != self._lane:
            last, self._last = self._last, None
            last.wait()

    def on_lane(self, run: Callable[[], Iterable[Ticket]]) -> Iterable[Ticket]:
        """Runs an op of the lane, in its thread."""
        self._lane = get_ident()
        return run()

    # ---- meetings --------------------------------------------------------------------------------

    def announce(self, what: str, block: int, *flags: bool, barrier: bool = False) -> Announced:
        """Says what the op is about to do that is being given to the lane; it calls :meth:`met`.

        Args:
            what: Its kind.
            block: Of which block; ``NO_BLOCK`` if of none.
            flags: As many on all ranks where ``what`` is the same, at most three.
            barrier: All ranks meet for it once the ops before it have ended on each of them.
        """
        coming = Announced(what, block, flags, barrier)
        with self._lock:
            self._coming.append(coming)
        return coming

    def met(self, op: Announced) -> list[bool]:
        """Makes sure that all ranks are about to do the same. Returns which flags any of them has.

        Raises:
            HeteroError: Another rank is about to do something else; says what.
        """
        if self._failed:  # which says more than that an op before this one has failed
            raise HeteroError(self._failed)
        with self._lock:
            if self._coming[0] is not op:
                raise HeteroError(
                    f"{self._named(op.row())} cannot begin on rank {self.rank}: {self._named(self._coming[0].row())} has failed."
                )
        if not self._met:
            self._meet()
        with self._lock:
            self._coming.popleft()
        return self._met.popleft()[: len(op.flags)]

    def meet(self, what: str, block: int, *flags: bool) -> list[bool]:
        """Announces and meets, for what follows at once: see :meth:`announce` and :meth:`met`."""
        self.settle()
        return self.met(self.announce(what, block, *flags))

    def _meet(self) -> None:
        with self._lock:
            ahead = takewhile(lambda op: not op.barrier, islice(self._coming, 1, _AHEAD))
            rows = [op.row() for op in (self._coming[0], *ahead)]
        told = self.agree([number for row in [*rows, *[_NOTHING] * (_AHEAD - len(rows))] for number in row])
        size = len(_NOTHING)
        for start in range(0, _AHEAD * size, size):
            row = [tuple(numbers[start : start + size]) for numbers in told]
            if len({one[:2] for one in row}) > 1 or row[0] == _NOTHING:
                break
            self._met.append([any(one[2 + flag] for one in row) for flag in range(_FLAGS)])
        if not self._met:
            each = ", ".join(f"rank {rank}: {self._named(numbers)}" for rank, numbers in enumerate(told))
            self._failed = (  # they would not meet again
                f"the ranks have come to different places of a step ({each}). All of them have to use the same blocks in the same "
                f"order: in each batch, in validation, and in code that reads weights. All of them call save_checkpoint."
            )
            raise HeteroError(self._failed)

    # ---- what they exchange ----------------------------------------------------------------------

    def gather(self, whole: Tensor, own: Tensor) -> None:
        """Makes the whole from the slices of the ranks of this node.

        Args:
            whole: Flat; gets ``shards`` slices, in their order.
            own: This rank's slice, flat; it may be its place in ``whole``.
        """
        with self._naming("GATHER", whole, self.shards):
            _all_gather(whole, own, group=self._shard)

    def like_first_node(self, tensor: Tensor) -> None:
        """Gives this rank the values of the one with the same slice on the first node."""
        if self.nodes > 1:
            with self._naming("BROADCAST", tensor):
                dist.broadcast(tensor, group=self._replicate, group_src=0)

    def reduce(self, own: Tensor, whole: Tensor, received: Tensor, *, divisor: int = 1) -> None:
        """Sums gradients over all ranks; each gets its slice of the sum.

        Args:
            own: Flat; gets this rank's slice of the sum, rounded once: ``nodes`` pieces.
            whole: This rank's gradients, flat: ``ranks`` pieces, each for the rank that sums it,
                which has the piece of its slice with the number of its node.
            received: Memory of the size and dtype of ``whole``, which is overwritten.
            divisor: Divides the sum, before it is rounded.
        """
        with self._naming("REDUCE", whole):
            dist.all_to_all_single(received, whole, group=self._group)
        summed = own.view(self.nodes, -1)[self.node]
        total = torch.empty(max(1, min(summed.numel(), _PIECE_ELEMENTS)), dtype=torch.float64)
        _sum(summed, received.view(self.ranks, -1), total, divisor)
        if self.nodes > 1:
            with self._naming("REDUCE", own, self.nodes):
                _all_gather(own, summed, group=self._replicate)

    def gather_on_devices(self, whole: Tensor, own: Tensor) -> None:
        """As :meth:`gather`, of tensors on the ranks' devices."""
        peers = self._between_devices
        with self._naming("GATHER", whole, by=peers):
            peers.gather(whole, own)

    def reduce_on_devices(self, own: Tensor, whole: Tensor, received: Tensor, total: Tensor, *, divisor: int) -> None:
        """As :meth:`reduce`, of tensors on the ranks' devices; ``total``: float64 memory."""
        peers = self._between_devices
        with self._naming("REDUCE", whole, by=peers):
            peers.exchange(received, whole)
        _sum(own, received.view(self.ranks, -1), total, divisor)

    @property
    def _between_devices(self) -> DeviceLinks:
        if self.peers is None:
            raise HeteroError("devices were to exchange weights or gradients, and nothing connects them.")
        return self.peers

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Gives all ranks one rank's values: the first one's by default."""
        with self._naming("BROADCAST", tensor):
            dist.broadcast(tensor, group=self._group, group_src=source)

    def send(self, tensor: Tensor, to: int) -> None:
        """Sends a flat tensor to another rank, which receives it; nothing if it is empty."""
        if tensor.numel():
            with self._naming("SEND", tensor):
                dist.send(tensor, group=self._group, group_dst=to)

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fills a flat tensor with what another rank sends; nothing if it is empty."""
        if tensor.numel():
            with self._naming("RECEIVE", tensor):
                dist.recv(tensor, group=self._group, group_src=source)

    def close(self) -> None:
        """Ends the group on this rank, which has failed: others that wait for it fail at once.

        An op that has begun on the lane goes on; the next one there is refused.
        """
        if not self.is_closed:
            self._failed = (
                self._failed or f"rank {self.rank} of {self.ranks} has left the others after an error. Start all ranks again."
            )
            close(self._group, self._shard, self._replicate, None if self.peers is None else self.peers.group)
            self.peers = None
            del self._group, self._shard, self._replicate  # gloo closes connections with the last reference
            self.is_closed = True

    @property
    def has_failed(self) -> bool:
        """Whether the group cannot be used any more."""
        return bool(self._failed)

    def agree(self, numbers: Sequence[float]) -> list[list[float]]:
        """Tells numbers to all ranks. Returns those of each rank, the same on all of them."""
        own = torch.tensor(numbers, dtype=torch.float64)
        told = torch.empty(self.ranks, len(numbers), dtype=torch.float64)
        with self._naming("AGREE", told):
            _all_gather(told.view(-1), own, group=self._group)
        rows: list[list[float]] = told.tolist()
        return rows

    def tell_all(self, value: _Value) -> list[_Value]:
        """Gives all ranks a small value of each that can be pickled, in the order of the ranks."""
        found: list[_Value] = [value] * self.ranks
        with self._naming("AGREE", torch.empty(0)):
            dist.all_gather_object(found, value, group=self._group)
        return found

    @contextmanager
    def _naming(self, what: str, tensor: Tensor, ranks: int = 0, *, by: DeviceLinks | None = None) -> Iterator[None]:
        self.settle()
        if self._failed:  # where it has timed out, the next one would take as long
            raise HeteroError(self._failed)
        began_s = now_s()
        try:
            yield
        except RuntimeError as error:
            clear_frames(error.__traceback__)  # which refer to the group: it ends with its last reference (`close`)
            cause = self.notes.noted() or f"another rank has died or hangs, or the network has failed ({error})"
            self._failed = (
                f"rank {self.rank} of {self.ranks} cannot go on: {cause.rstrip('.')}. Start all ranks again; their logs say which "
                f"was the first. ({what} of {tensor.nbytes} bytes has failed.)"
            )
            raise HeteroError(self._failed) from error
        network = self._network if by is None else by.network
        if network is not None:
            everyone = what in ("SEND", "RECEIVE", "BROADCAST")  # else a rank keeps its own part
            network.carry(tensor.nbytes * (1.0 if everyone else 1 - 1 / (ranks or self.ranks)), began_s)

    def _named(self, row: Sequence[float]) -> str:
        kind, block = int(row[0]), int(row[1])
        name = f" ({self.names[block]!r})" if 0 <= block < len(self.names) else ""
        return _WHAT[kind] + ("" if block == NO_BLOCK else f" of block {block}{name}")
