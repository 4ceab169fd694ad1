"""What the ops of lane ``net`` do: collectives among the ranks that share a model.

[Note: Collectives]
Each rank runs its collectives one after the other in the thread of its lane, in the order of the
schedule, which is the same on all ranks. A collective ends on a rank when that rank has all that it
gets, and others have got its part: its slice may change then.

A sum over ranks has one order and one rounding, whatever the layout. Each rank gets its slice of
all gradients (all-to-all), and adds them in float64 in the order of the ranks. The reduce-scatter
of gloo is an all-reduce of which each rank keeps a slice. It moves twice the bytes, rounds after
each addition, and from three ranks on the order of its sum depends on where an element lies.

Ranks meet before they exchange what is large (:meth:`Collectives.meet`). A rank whose batch uses
other blocks than those of the others would otherwise wait for ever, or exchange other weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.errors import HeteroError
from lightning_hetero.ir.schedule import NO_BLOCK

_WHAT = ("GATHER", "REDUCE", "AGREE", "BROADCAST", "CHECKPOINT")
_FLAGS = 3
_PIECE_ELEMENTS = 1 << 18  # whose sum is in memory in float64 at a time: 2 MiB
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 warns of the older name


class Collectives:
    """The collectives of one group of ranks.

    One thread at a time calls them. A call returns when its collective has ended on this rank.

    Args:
        group: The ranks; ``None``: all of them. Its timeout bounds every collective.

    Raises:
        HeteroError: Of each method: another rank has died or hangs, or the network has failed.
            Nothing more can be done with the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._group = group

    def gather(self, whole: Tensor, own: Tensor) -> None:
        """Makes the whole from the slices of all ranks.

        Args:
            whole: Flat; gets ``ranks`` slices, in the order of the ranks.
            own: This rank's slice, flat; it may be its place in ``whole``.
        """
        with self._naming("GATHER", whole):
            _all_gather(whole, own, group=self._group)

    def reduce(self, own: Tensor, whole: Tensor, received: Tensor, *, divisor: int = 1) -> None:
        """Sums gradients over the ranks; each gets its slice of the sum.

        Args:
            own: Flat; gets this rank's slice of the sum, rounded once.
            whole: This rank's gradients, flat: ``ranks`` slices.
            received: Memory of the size and dtype of ``whole``, which is overwritten.
            divisor: Divides the sum, before it is rounded.
        """
        with self._naming("REDUCE", whole):
            dist.all_to_all_single(received, whole, group=self._group)
        slices = received.view(self.ranks, -1)
        for start in range(0, own.numel(), _PIECE_ELEMENTS):
            piece = slice(start, start + _PIECE_ELEMENTS)
            total = slices[0, piece].to(torch.float64)
            for other in slices[1:, piece]:
                total += other
            own[piece].copy_(total.div_(divisor))

    def broadcast(self, tensor: Tensor) -> None:
        """Gives all ranks the first rank's values."""
        with self._naming("BROADCAST", tensor):
            dist.broadcast(tensor, group=self._group, group_src=0)

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

    def meet(self, what: str, block: int, *flags: bool) -> list[bool]:
        """Makes sure that all ranks are about to do the same. Returns which flags any of them has.

        Args:
            what: The collective that follows: the name of its op.
            block: Of which block; ``NO_BLOCK`` if of none.
            flags: As many on all ranks where ``what`` is the same, at most three.

        Raises:
            HeteroError: Another rank is about to do something else; says what.
        """
        spare = [False] * (_FLAGS - len(flags))
        rows = self.agree([_WHAT.index(what), block, *flags, *spare])
        others = {(int(kind), int(at)) for kind, at, *_ in rows}
        if len(others) > 1:
            places = (_WHAT[int(kind)] + ("" if at == NO_BLOCK else f" of block {int(at)}") for kind, at, *_ in rows)
            each = ", ".join(f"rank {rank}: {place}" for rank, place in enumerate(places))
            raise HeteroError(
                f"the ranks have come to different places of a step ({each}). All of them have to use the same blocks in the same "
                f"order: in each batch, in validation, and in code that reads weights. All of them call save_checkpoint."
            )
        return [any(row[2 + flag] for row in rows) for flag in range(len(flags))]

    def agree(self, numbers: Sequence[float]) -> list[list[float]]:
        """Tells numbers to all ranks. Returns those of each rank, the same on all of them."""
        own = torch.tensor(numbers, dtype=torch.float64)
        told = torch.empty(self.ranks, len(numbers), dtype=torch.float64)
        with self._naming("AGREE", told):
            _all_gather(told.view(-1), own, group=self._group)
        rows: list[list[float]] = told.tolist()
        return rows

    @contextmanager
    def _naming(self, what: str, tensor: Tensor) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise HeteroError(
                f"{what} of {tensor.nbytes} bytes has failed on rank {self.rank} of {self.ranks}: another rank has died "
                f"or hangs, or the network has failed ({error}). Start all ranks again; their logs say which was the first."
            ) from error
