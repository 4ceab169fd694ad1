"""Divides one batch among all ranks by their speed: the samples of each rank, and their weight.

[Note: Weights]
A loss is a mean over its batch, and data parallelism takes the mean over ranks. With b_r of B
samples on rank r of W, the gradient of the mean over all B samples is the mean over ranks of
``w_r g_r`` with ``w_r = W b_r / B``: the loss is multiplied by w_r before its backward. With equal
batches w_r is 1 and nothing is multiplied. A rank without samples in a short last batch computes
another rank's sample with weight 0, because every rank must take part in the reduction.
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
    """One rank's share of a batch.

    Attributes:
        samples: Its number of samples, at least 1.
        weight: The weight of its mean loss, relative to an equal share.
    """

    samples: int
    weight: float


def cut(batch: int, seconds: Sequence[float], *, least: int = 0) -> tuple[int, ...]:
    """Assigns samples to ranks so that the slowest rank ends as early as possible; exact.

    Args:
        batch: Samples in total.
        seconds: Seconds of one sample on each rank, or proportional values.
        least: The least number of samples of each rank.

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
    """Batches of one rank: its share of every global batch, in the order of the global sampler.

    All ranks have the same sampler with the same seed, so they agree without communication;
    :meth:`take_order` verifies that. Shares may change from one global batch on; every rank must
    use the same one.

    Args:
        sampler: The order of all samples, the same on all ranks.
        batch: Samples of a global batch.
        seconds: Seconds of one sample on each rank, or proportional values.
        rank: This rank.
        drop_last: Whether to leave out a last global batch that is not full.
    """

    def __init__(self, sampler: Any, *, batch: int, seconds: Sequence[float], rank: int, drop_last: bool) -> None:
        self.sampler = sampler
        self.batch = batch
        self.rank = rank
        self.drop_last = drop_last
        self.given = 0  # global batches given out, over all epochs
        self._changes: list[tuple[int, tuple[float, ...]]] = [(0, tuple(seconds))]
        self._taken: deque[Taken] = deque()
        self._begins = False  # no batch of the epoch has been given out
        self._order: int | None = None
        self._begin = 0  # the first global batch of the next epoch
        cut(batch, seconds, least=1)  # refuses a batch that cannot be divided

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of one sample on each rank, from which the latest shares were made."""
        return self._changes[-1][1]

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank in a full batch, by the latest shares."""
        return cut(self.batch, self.seconds, least=1)

    def change(self, seconds: Sequence[float], *, start: int) -> None:
        """New shares from global batch ``start`` on, counted like :attr:`given`."""
        assert start >= self.given, "batches that were handed out cannot be cut again"
        self._changes = [(begin, before) for begin, before in self._changes if begin < start] + [(start, tuple(seconds))]

    def next_taken(self) -> Taken:
        """This rank's share of the batch that is computed next.

        Batches are computed in the order given out.
        """
        return self._taken.popleft()

    def take_order(self) -> int | None:
        """A checksum of an epoch's first global batch, once.

        ``None`` if no epoch has begun since.
        """
        order, self._order = self._order, None
        return order

    def begin_at(self, batch: int) -> None:
        """The next epoch skips its first global batches, which were trained on before."""
        self._begin = batch

    def __len__(self) -> int:
        """Global batches of an epoch."""
        full, rest = divmod(len(self.sampler), self.batch)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's part of every global batch."""
        # At the first batch, not at the iterator: loaders with workers make two and use one.
        self._taken.clear()  # left over from an interrupted epoch
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
