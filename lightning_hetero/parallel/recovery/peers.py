"""Pieces from the ranks that have them: everyone says what it lacks, all find the same schedule, and bytes go point to point."""

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
    """Pieces of one file that a rank lacks, and the ranks that it asked before."""

    pieces: tuple[int, ...]
    asked: tuple[int, ...] = ()


@dataclass(slots=True)
class Schedule:
    """Who sends what to whom: (from, to, file, pieces), in the one order that all ranks follow."""

    transfers: list[tuple[int, int, str, tuple[int, ...]]] = field(default_factory=list)


def schedule(wants: Sequence[Mapping[str, Want]], holders: Mapping[str, Sequence[int]], layer_map: LayerMap) -> Schedule:
    """The next transfers: for each want the least loaded of the holders that were not asked before.

    Args:
        wants: Of each rank, by file.
        holders: Ranks that have a file on a local tier.
        layer_map: The save's.
    """
    loads: dict[int, int] = defaultdict(int)
    plan = Schedule()
    for rank, of_rank in enumerate(wants):
        for name, want in sorted(of_rank.items()):
            open_to = [h for h in holders.get(name, ()) if h != rank and h not in want.asked]
            if open_to:
                chosen = min(open_to, key=lambda h: (loads[h], h))
                loads[chosen] += sum(end - start for start, end in (layer_map.span(name, p, p) for p in want.pieces))
                plan.transfers.append((chosen, rank, name, want.pieces))
    return plan


class Peers:
    """Point-to-point transfers between the ranks of a group; all of its methods are called by all ranks.

    Args:
        group: All ranks, with a backend for the CPU.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        """What every rank has here."""
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
        """One round: asks for pieces, and sends what others ask for.

        Args:
            wants: What this rank lacks, by file.
            holders: Ranks that have a file on a local tier.
            layer_map: The save's.
            read: Gives pieces of a file, one after the other, as bytes; whoever gets them judges them.

        Returns:
            The pieces that came, one after the other, and who sent them; ``None`` if no rank can be helped any more.
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
        """Fills ``content`` with what ``source`` sends next."""
        dist.recv(content, src=source, group=self._group)
