"""Exchange of pieces between ranks: all ranks share their wants and compute the same schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.parallel.recovery.layer_map import LayerMap


@dataclass(frozen=True, slots=True)
class Want:
    """Pieces of one file that a rank lacks, and the ranks that it has asked already."""

    pieces: tuple[int, ...]
    asked: tuple[int, ...] = ()


@dataclass(slots=True)
class TransferOrder:
    """Transfers as (from, to, file, pieces), in one order for all ranks."""

    transfers: list[tuple[int, int, str, tuple[int, ...]]] = field(default_factory=list)


def schedule(wants: Sequence[Mapping[str, Want]], holders: Mapping[str, Sequence[int]], layer_map: LayerMap) -> TransferOrder:
    """The next transfers: for each want the least loaded holder that was not asked before.

    Args:
        wants: The wants of each rank, by file.
        holders: Ranks that have a file on a local tier.
        layer_map: The save's.
    """
    loads: dict[int, int] = defaultdict(int)
    plan = TransferOrder()
    for rank, of_rank in enumerate(wants):
        for name, want in sorted(of_rank.items()):
            open_to = [h for h in holders.get(name, ()) if h != rank and h not in want.asked]
            if open_to:
                chosen = min(open_to, key=lambda h: (loads[h], h))
                loads[chosen] += sum(end - start for start, end in (layer_map.span(name, p, p) for p in want.pieces))
                plan.transfers.append((chosen, rank, name, want.pieces))
    return plan


class PeerTransfers:
    """Point-to-point transfers between the ranks of a group; all ranks call all methods.

    Args:
        group: All ranks, with a backend for the CPU.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        """Gathers an object from every rank."""
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self._group)
        return values

    def exchange(
        self,
        wants: Mapping[str, Want],
        holders: Mapping[str, Sequence[int]],
        layer_map: LayerMap,
        read: Callable[[str, tuple[int, ...]], Tensor],
    ) -> tuple[dict[str, Tensor], dict[str, int]] | None:
        """One round: requests pieces, and sends those that other ranks request.

        Args:
            wants: The pieces that this rank lacks, by file.
            holders: Ranks that have a file on a local tier.
            layer_map: The save's.
            read: Gives pieces of a file, one after the other, as bytes; the receiver checks them.

        Returns:
            The received pieces in order, and their senders; ``None`` if no rank can be helped any
            more.
        """
        transfers = schedule(self.gather(dict(wants)), holders, layer_map).transfers
        if not transfers:
            return None
        sending, got, senders = [], {}, {}
        for source, target, name, pieces in transfers:
            if source == self.rank:
                content = read(name, pieces)
                sending.append((dist.isend(content, dst=target, group=self._group), content))
            elif target == self.rank:
                size = sum(end - start for start, end in (layer_map.span(name, p, p) for p in pieces))
                content = torch.empty(size, dtype=torch.uint8)
                self.receive(content, source)
                got[name], senders[name] = content, source
        for work, _ in sending:
            if work is not None:
                work.wait()
        return got, senders

    def receive(self, content: Tensor, source: int) -> None:
        """Receives the next bytes of ``source`` into ``content``."""
        dist.recv(content, src=source, group=self._group)
