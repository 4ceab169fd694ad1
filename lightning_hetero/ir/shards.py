"""Which rank owns which elements of a part, and what moves when the number of ranks changes.

[Note: Shards]
The parameters of a part lie in one flat buffer, each behind padding. Every array of the part has
this layout: weights, gradients, fp32 masters and optimizer state. On ``ranks`` ranks the buffer is
``ranks`` slices of equal length, since collectives gather and scatter equal slices, and rank ``r``
owns slice ``r``. There are two layouts:

- *by element*: the parameters lie as on one rank, and slices cut through them. This suits
  optimizers that update each element by itself, such as Adam.
- *by parameter*: a parameter lies whole in one slice. This suits optimizers that need whole
  tensors. Runs of parameters become slices, and the longest run decides the length of all slices.

Padding, between parameters and at the end, belongs to its rank and never moves: it holds zeros,
which updates by element leave as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lightning_hetero.units import round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of one parameter's elements that one rank owns.

    Attributes:
        param: The parameter's position in the part.
        start: The first of its elements in the run.
        num_elements: Elements of the run.
        rank: The owner.
        offset: Where the run starts in the owner's slice, in elements.
    """

    param: int
    start: int
    num_elements: int
    rank: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceCopy:
    """Elements that move from one rank's slice of one layout to one rank's slice of another.

    Attributes:
        source: The rank that owns them before.
        source_offset: Where they start in its slice, in elements.
        target: The rank that owns them after.
        target_offset: Where they start in its slice, in elements.
        num_elements: How many there are.
    """

    source: int
    source_offset: int
    target: int
    target_offset: int
    num_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """One part on several ranks; see [Note: Shards].

    Attributes:
        ranks: The ranks.
        slice_elements: Elements that each of them owns, padding included.
        offsets: Where each parameter starts in the flat buffer, in elements.
        lengths: Elements of each parameter.
    """

    ranks: int
    slice_elements: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.ranks * self.slice_elements

    def pieces(self) -> Iterator[Piece]:
        """All elements of all parameters, in their order, cut where the owner changes."""
        for param in range(len(self.lengths)):
            yield from self.pieces_of(param)

    def pieces_of(self, param: int) -> Iterator[Piece]:
        """The same of one parameter."""
        first, length, start = self.offsets[param], self.lengths[param], 0
        while start < length:
            rank, offset = divmod(first + start, self.slice_elements)
            run = min(length - start, self.slice_elements - offset)
            yield Piece(param=param, start=start, num_elements=run, rank=rank, offset=offset)
            start += run


def by_element(lengths: Sequence[int], ranks: int, *, multiple: int) -> Shards:
    """Slices that cut through parameters.

    Args:
        lengths: Elements of each parameter of the part.
        ranks: The ranks.
        multiple: Elements at whose multiples parameters and slices start.
    """
    ends = [0, *accumulate(round_up(length, multiple) for length in lengths)]
    slice_elements = round_up(-(-ends[-1] // ranks), multiple)
    return Shards(ranks=ranks, slice_elements=slice_elements, offsets=tuple(ends[:-1]), lengths=tuple(lengths))


def by_parameter(lengths: Sequence[int], ranks: int, *, multiple: int) -> Shards:
    """Slices that hold whole parameters, as short as the order of the parameters allows.

    Args:
        lengths: Elements of each parameter of the part.
        ranks: The ranks.
        multiple: Elements at whose multiples parameters and slices start.
    """
    sizes = [round_up(length, multiple) for length in lengths]
    shortest, longest = max(sizes, default=0), sum(sizes)
    while shortest < longest:  # the shortest slices into which all runs fit
        middle = (shortest + longest) // 2
        if _num_runs(sizes, middle) <= ranks:
            longest = middle
        else:
            shortest = middle + 1
    slice_elements = round_up(shortest, multiple)
    offsets: list[int] = []
    rank, used = 0, 0
    for size in sizes:
        if used + size > slice_elements:
            rank, used = rank + 1, 0
        offsets.append(rank * slice_elements + used)
        used += size
    return Shards(ranks=ranks, slice_elements=slice_elements, offsets=tuple(offsets), lengths=tuple(lengths))


def _num_runs(sizes: Sequence[int], slice_elements: int) -> int:
    """The slices that the parameters fill, each as far as it goes."""
    runs, used = 1, 0
    for size in sizes:
        if used + size > slice_elements:
            runs, used = runs + 1, 0
        used += size
    return runs


def copies(source: Shards, target: Shards) -> Iterator[SliceCopy]:
    """What moves from one layout to another, for each array of the part alike.

    Args:
        source: The layout that has the elements.
        target: The layout that gets them; its parameters have the same lengths.
    """
    gives, takes = source.pieces(), target.pieces()
    give, take = next(gives, None), next(takes, None)
    while give is not None and take is not None:
        start, give_end, take_end = max(give.start, take.start), give.start + give.num_elements, take.start + take.num_elements
        yield SliceCopy(
            source=give.rank,
            source_offset=give.offset + start - give.start,
            target=take.rank,
            target_offset=take.offset + start - take.start,
            num_elements=min(give_end, take_end) - start,
        )
        if give_end <= take_end:
            give = next(gives, None)
        if take_end <= give_end:
            take = next(takes, None)
