"""From shares to whole blocks: rounding, and moving down what then does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.ir.model import BlockProfile
from lightning_hetero.ir.plan import BlockPlan, Saved, Tier, UpdateLane
from lightning_hetero.planners.holistic.block_choices import INPUT, REST, Choice
from lightning_hetero.planners.holistic.bounds import Vector
from lightning_hetero.planners.holistic.relaxation import Relaxation, Relaxed
from lightning_hetero.planners.holistic.segments import BlockRun

Indices = NDArray[np.intp]
Chosen = list[dict[str | None, Choice]]  # per block as they are arranged: placement and policies


def rounded(relaxed: Relaxed, segments: Sequence[BlockRun], *, grouped: bool) -> Chosen:
    """Whole blocks whose choices come as close to the shares as they can.

    Args:
        relaxed: The shares.
        segments: Their segments.
        grouped: Of equal blocks those that the device updates come first and those that the CPU
            updates last, so that the CPU ends long before the next forward needs their weights
            (AutoHete's insight 2); else blocks that choose alike lie as far from each other as they
            can.
    """
    chosen: Chosen = []
    for _, group in groupby(zip(segments, relaxed.shares, strict=True), key=lambda pair: pair[0].kind):
        run = list(group)
        columns = {what: _spread([(shares[what], len(segment)) for segment, shares in run]) for what in run[0][1]}
        if grouped:
            columns[None].sort(key=list(run[0][1][None]).index)
        chosen += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return chosen


_ENOUGH = 0.2  # share of a device update that makes the first of equal blocks one


def _spread(shares: Sequence[tuple[Mapping[Choice, float], int]]) -> list[Choice]:
    """For each block of segments that follow each other the choice that is owed most.

    The first block is rounded towards the device: the next forward begins with it, and nothing
    hides an update elsewhere.
    """
    owed = dict.fromkeys(shares[0][0], 0.0)
    found: list[Choice] = []
    for mine, count in shares:
        for _ in range(count):
            for choice, share in mine.items():
                owed[choice] += share
            eager = [c for c in mine if not found and mine[c] >= _ENOUGH and isinstance(c, tuple) and c[2] is UpdateLane.DEVICE]
            best = max(eager or owed, key=lambda choice: owed[choice])
            owed[best] -= 1.0
            found.append(best)
    return found


def rule(block: BlockProfile, choices: Mapping[str | None, Choice]) -> BlockPlan:
    """A block's rule from its choices; what most of its bytes do becomes ``saved``."""
    placed, rest, boundary = choices[None], choices.get(REST), choices.get(INPUT, Saved.KEEP)
    assert isinstance(placed, tuple)
    assert isinstance(boundary, Saved)
    policies = {o.name: policy for o in block.operators if isinstance(policy := choices.get(o.name, Saved.KEEP), Saved)}
    if isinstance(rest, Saved):
        saved = rest
    else:
        # A recomputed block repeats what no operator accounts for too.
        unnamed = block.forward_flop - sum(o.flop for o in block.operators)
        totals: Counter[Saved] = Counter()
        for o in block.operators:
            if policies[o.name] is not Saved.RECOMPUTE or unnamed <= 1e-6 * block.forward_flop:
                totals[policies[o.name]] += o.bytes
        saved = max(totals, key=lambda policy: totals[policy], default=Saved.KEEP)
    others = {name: policy for name, policy in policies.items() if policy is not saved}
    weights, state, update = placed
    return BlockPlan(name=block.name, weights=weights, state=state, update=update, saved=saved, boundary=boundary, operators=others)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choices:
    """A segment's choices for one ``what``: what a block holds on each tier, and the price."""

    place: int
    what: str | None
    choices: tuple[Choice, ...]
    held: Vector  # choices x tiers
    prices: Vector


_TIERS = tuple(Tier)


class Demotion:
    """Moves parts of a rounded plan to lower tiers, or recomputes them, until it fits.

    Args:
        relaxation: The programme.
        relaxed: The solution that was rounded; work on resources that it keeps busy costs most.
    """

    def __init__(self, relaxation: Relaxation, relaxed: Relaxed) -> None:
        self._segments = relaxation.segments
        self._tables = tuple(_tables(relaxation, relaxed))
        # Every change of one block's choice for another, of all tables one after the other.
        pairs = [np.indices((len(t.choices),) * 2).reshape(2, -1) for t in self._tables]
        self._table = np.repeat(np.arange(len(pairs)), [p.shape[1] for p in pairs])
        self._now, self._other = np.hstack(pairs)
        self._gain = np.vstack([t.held[now] - t.held[other] for t, (now, other) in zip(self._tables, pairs, strict=True)])
        self._cost = np.hstack([t.prices[other] - t.prices[now] for t, (now, other) in zip(self._tables, pairs, strict=True)])
        self._place = np.array([t.place for t in self._tables])[self._table]
        self._saves = np.array([t.what is not None for t in self._tables])[self._table]
        self._last: tuple[Tier, float] | None = None
        self._changed: list[tuple[int, int, str | None, Choice]] = []
        self._useless: dict[Tier, int] = {}
        self._full: set[Tier] = set()

    def demote(self, chosen: Chosen, tier: Tier, short: float) -> bool:
        """Frees about ``short`` bytes of a tier, cheapest first; false if nothing is left to free.

        What it held goes to no other tier that has been full before, if that can be avoided. Where
        freeing did not change the shortfall the last time, activations were not there when the tier
        was fullest: they are put back, and left alone in these segments and in those behind, which
        are emptier at any such moment.
        """
        if self._last == (tier, short):
            for place, index, what, choice in self._changed:
                if what is not None:
                    chosen[index][what] = choice
                    self._useless[tier] = min(self._useless.get(tier, place), place)
        self._last, self._changed = (tier, short), []
        self._full.add(tier)
        while short > 0:
            freed = self._free(chosen, tier, short)
            if freed <= 0:
                break
            short -= freed
        return bool(self._changed)

    def _free(self, chosen: Chosen, tier: Tier, short: float) -> float:
        """Makes the cheapest changes that are needed, at least one; returns the freed bytes."""
        gain = self._gain[:, _TIERS.index(tier)]
        possible = (gain > 0) & ~(self._saves & (self._place >= self._useless.get(tier, len(self._segments))))
        if tier is not Tier.DEVICE:
            possible &= self._gain[:, _TIERS.index(Tier.DEVICE)] >= 0
        others = [_TIERS.index(other) for other in self._full - {tier}]
        pairs = np.flatnonzero(possible & (self._gain[:, others] >= 0).all(axis=1))
        freed = self._make(chosen, pairs, gain, short)
        return freed if freed else self._make(chosen, np.flatnonzero(possible), gain, short)

    def _make(self, chosen: Chosen, pairs: Indices, gain: Vector, short: float) -> float:
        pairs = pairs[np.lexsort((-gain[pairs], self._cost[pairs] / np.minimum(gain[pairs], short)))]
        freed = 0.0
        blocks: dict[tuple[int, int], list[int]] = {}
        for pair in pairs.tolist():
            number, now = int(self._table[pair]), int(self._now[pair])
            table = self._tables[number]
            if (number, now) not in blocks:
                blocks[number, now] = self._blocks(chosen, table, table.choices[now])
            mine = blocks[number, now]
            while mine:
                if freed and (freed >= short or gain[pair] > short - freed):
                    return freed
                index = mine.pop()
                self._changed.append((table.place, index, table.what, chosen[index][table.what]))
                chosen[index][table.what] = table.choices[int(self._other[pair])]
                freed += float(gain[pair])
        return freed

    def _blocks(self, chosen: Chosen, table: _Choices, choice: Choice) -> list[int]:
        segment = self._segments[table.place]
        return [index for index in range(segment.start, segment.stop) if chosen[index][table.what] == choice]


def _tables(relaxation: Relaxation, relaxed: Relaxed) -> Iterator[_Choices]:
    columns = list(zip(relaxation.columns, relaxation.prices(relaxed).tolist(), strict=True))
    for (place, what), group in groupby(columns, key=lambda pair: (pair[0].segment, pair[0].what)):
        count = len(relaxation.segments[place])
        # State on its way to a device update takes memory there too: such a choice is neither made
        # nor left here.
        mine = [(column, relaxation.held_bytes(column), price) for column, price in group if not column.moving_bytes]
        yield _Choices(
            place=place,
            what=what,
            choices=tuple(column.choice for column, _, _ in mine),
            held=np.array([[held[tier] / count for tier in _TIERS] for _, held, _ in mine]).reshape(-1, len(_TIERS)),
            prices=np.array([price / count for _, _, price in mine]),
        )
