"""One batch for all ranks, cut by their speed: who gets which samples, and how much a sample counts.

[Note: Weights]
A loss is a mean over its batch, and data parallelism takes the mean over ranks. With b_r of B samples on rank r of W, the gradient
of the mean over all B samples is the mean over ranks of ``w_r g_r`` with ``w_r = W b_r / B``: the loss is multiplied by w_r before
its backward. With equal batches w_r is 1 and nothing is multiplied. A rank without samples in a short last batch computes one that
others have too, with weight 0, since every rank has to take part in the reduction.
"""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Sampler

from lightning_hetero.errors import ConfigError
from lightning_hetero.parallel.planner.balancing import share_out


@dataclass(frozen=True, slots=True)
class Taken:
    """What one rank computes of a batch.

    Attributes:
        samples: Its number, at least 1.
        weight: What its mean loss counts, relative to an equal part.
    """

    samples: int
    weight: float


def cut(batch: int, seconds: Sequence[float], *, least: int = 0) -> tuple[int, ...]:
    """Samples to ranks so that the slowest is done soonest; exact.

    Args:
        batch: Samples in all.
        seconds: Of one sample on each rank, or in proportion to it.
        least: The fewest of each rank.

    Raises:
        ConfigError: A time is not positive, or there are not enough samples.
    """
    if not seconds or not all(0 < s < float("inf") for s in seconds):
        raise ConfigError(f"seconds={list(seconds)!r}; allowed: a positive number for each rank.")
    counts = share_out([([s], least) for s in seconds], batch)
    if counts is None:
        raise ConfigError(f"a batch of {batch} samples for {len(seconds)} ranks; allowed: at least {least * len(seconds)}.")
    return counts


class SharedBatches(Sampler[list[int]]):
    """Batches of one rank: of every global batch its share, in the order of the global sampler.

    All ranks have the same sampler with the same seed, so that they agree without a word; with :meth:`take_order` they make sure.
    Shares may change from one global batch on; every rank has to be told the same one.

    Args:
        sampler: The order of all samples, the same on all ranks.
        batch: Samples of a global batch.
        seconds: Of one sample on each rank, or in proportion to it.
        rank: This rank.
        drop_last: Leave out a last global batch that is not full.
    """

    def __init__(self, sampler: Any, *, batch: int, seconds: Sequence[float], rank: int, drop_last: bool) -> None:
        self.sampler = sampler
        self.batch = batch
        self.rank = rank
        self.drop_last = drop_last
        self.given = 0  # global batches that were handed out, of all epochs
        self._changes: list[tuple[int, tuple[float, ...]]] = [(0, tuple(seconds))]
        self._taken: deque[Taken] = deque()
        self._begins = False  # no batch of the epoch has been handed out
        self._order: int | None = None
        self._begin = 0  # the first global batch of the next epoch that is handed out
        cut(batch, seconds, least=1)  # refuses what cannot be cut

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of one sample on each rank, as the latest shares were made for."""
        return self._changes[-1][1]

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank in a full batch, by the latest shares."""
        return cut(self.batch, self.seconds, least=1)

    def change(self, seconds: Sequence[float], *, start: int) -> None:
        """New shares from global batch ``start`` on, counted as :attr:`given` is."""
        assert start >= self.given, "batches that were handed out cannot be cut again"
        self._changes = [(begin, before) for begin, before in self._changes if begin < start] + [(start, tuple(seconds))]

    def next_taken(self) -> Taken:
        """What this rank has of the batch that is computed next: they are computed in the order in which they were handed out."""
        return self._taken.popleft()

    def take_order(self) -> int | None:
        """A checksum of the first global batch of an epoch, once; ``None``: no epoch has begun since it was asked for."""
        order, self._order = self._order, None
        return order

    def begin_at(self, batch: int) -> None:
        """The epoch that is begun next leaves out its first global batches: they were trained on before."""
        self._begin = batch

    def __len__(self) -> int:
        """Global batches of an epoch."""
        full, rest = divmod(len(self.sampler), self.batch)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's part of every global batch."""
        # With the first batch, not with the iterator: loaders with workers make two, and use one.
        self._taken.clear()  # of an epoch that was left early
        begin, self._begin = self._begin, 0
        self._begins = True
        whole: list[int] = []
        for index in itertools.islice(self.sampler, begin * self.batch, None):
            whole.append(index)
            if len(whole) == self.batch:
                yield self._part(whole)
                whole = []
        if whole and not self.drop_last:
            yield self._part(whole)

    def _part(self, whole: list[int]) -> list[int]:
        if self._begins:
            self._begins, self._order = False, zlib.crc32(repr(whole).encode())
        seconds = next(seconds for begin, seconds in reversed(self._changes) if begin <= self.given)
        self.given += 1
        counts = cut(len(whole), seconds, least=1 if len(whole) == self.batch else 0)
        begin, own = sum(counts[: self.rank]), counts[self.rank]
        self._taken.append(Taken(max(own, 1), len(counts) * own / len(whole)))
        return whole[begin : begin + own] or whole[:1]
