"""A tier's memory for weights that live below it.

[Note: Residency]
Weights that live below a tier share ``capacity_bytes`` of its memory: those on disk share host
memory, those on the host or on disk share device memory. A step uses blocks in a known order
(forward, then backward in reverse), so eviction is Belady's: when memory is needed, the weights
whose next use lies farthest ahead go. At the turn from forward to backward, and from backward to
the next forward, this keeps the blocks that are used again at once.

A step without backward uses each block once, and so does the next one. Whatever is evicted then is
read once per step, so the bytes of a step are the weights less those that stay. These *stay*, the
same in every step (``staying``): as many blocks as fit beside a window of two, the block that
computes and the next one that comes. They are spread evenly over the order, so that the disk or
the link always reads while blocks that stay compute. Prefetching looks for blocks that are not
there, into the next step too, and only other blocks are evicted for it.

Next uses are in a heap. Where one may have become farther (an anchor has passed, a copy higher up
serves it) there is a new entry, and each entry is looked up again when it comes first.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterator, Sequence
from heapq import heapify, heappop, heappush

_FAR = sys.maxsize  # in the place of a next use that is yet to be looked up
WINDOW = 2
"""Blocks that come and go in a step without backward: one computes, and the next one comes."""


def staying(order: Sequence[int], sizes: Sequence[int], capacity_bytes: int) -> frozenset[int]:
    """The blocks that stay on a tier from one step without backward to the next.

    Args:
        order: The order in which a step uses blocks.
        sizes: Bytes of each block's weights; 0 for blocks that do not come and go.
        capacity_bytes: Bytes of the tier for weights that come and go.
    """
    blocks = [block for block in dict.fromkeys(order) if sizes[block]]
    total = sum(sizes[block] for block in blocks)
    if total <= capacity_bytes:
        return frozenset(blocks)
    room = capacity_bytes - sum(sorted(sizes[block] for block in blocks)[-WINDOW:])
    kept, kept_bytes, passed_bytes = set[int](), 0, 0
    for block in blocks:
        passed_bytes += sizes[block]
        if kept_bytes * total < room * passed_bytes and kept_bytes + sizes[block] <= room:
            kept.add(block)
            kept_bytes += sizes[block]
    for block in blocks:  # blocks of different sizes leave gaps
        if block not in kept and kept_bytes + sizes[block] <= room:
            kept.add(block)
            kept_bytes += sizes[block]
    return frozenset(kept)


class Uses:
    """The anchors that use each block's weights, in this step and in the next forward.

    Args:
        anchors: The block that each anchor of the step uses; ``None`` where it uses none.
        following: The same for the next step's forward.
    """

    def __init__(self, anchors: Sequence[int | None], following: Sequence[int]) -> None:
        self.anchors = anchors
        self.last = {block: index for index, block in enumerate(anchors) if block is not None}
        self._positions: dict[int, list[int]] = {}
        for index, block in enumerate([*anchors, *following]):
            if block is not None:
                self._positions.setdefault(block, []).append(index)

    def add(self, index: int, block: int) -> None:
        """Anchor ``index`` uses ``block`` too: it issues an update on the device."""
        insort(self._positions.setdefault(block, []), index)

    def of(self, blocks: Collection[int]) -> list[int]:
        """The anchors that use one of ``blocks``."""
        return [index for index, block in enumerate(self.anchors) if block in blocks]

    def after(self, index: int, anchors: Sequence[int], *, place: int = 0) -> Iterator[tuple[int, int]]:
        """The anchors that follow ``index`` with their blocks, each block once."""
        seen = {None, self.anchors[index]}
        for i in range(max(place, bisect_right(anchors, index)), len(anchors)):
            block = self.anchors[anchors[i]]
            if block is not None and block not in seen:
                seen.add(block)
                yield anchors[i], block

    def following(self, index: int, block: int, *, skip: bool = False) -> int:
        """The first anchor from ``index`` on that uses ``block``; ``skip``: the second one."""
        positions = self._positions.get(block, [])
        place = bisect_left(positions, index) + skip
        return positions[place] if place < len(positions) else len(self.anchors) * 2


class Cache:
    """The weights that one tier holds though they live below it; see [Note: Residency].

    Args:
        sizes: Bytes of each block's weights; 0 for blocks whose weights have a place of their own
            on the tier.
        capacity_bytes: What the weights that it holds may take together.
        held: Blocks that it holds as the step begins.
        uses: When weights are used.
        stays: Blocks that make way only for one that is used at once; see [Note: Residency].

    Attributes:
        arriving: Block → the op of this step that brings its weights.
        last_release: The latest RELEASE of this step. Each follows the one before, so what follows
            it may take over the memory of all.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        capacity_bytes: int,
        held: Collection[int],
        uses: Uses,
        stays: Collection[int] = (),
    ) -> None:
        self.held, self.stays = set(held), stays
        self.arriving: dict[int, int] = {}
        self.last_release: int | None = None
        self._sizes, self._capacity_bytes, self._uses = sizes, capacity_bytes, uses
        self._used_bytes = sum(sizes[b] for b in self.held)
        self._at = 0  # the anchor for which victims were sought last
        self._farthest = [
            (-_FAR, -b) for b in self.held if sizes[b]
        ]  # a heap; of each block's next uses, negated, the first is no nearer
        heapify(self._farthest)

    def victims(self, index: int, block: int, *, keep: Collection[int], served: Collection[int] = ()) -> list[int] | None:
        """The weights to evict for ``block`` at anchor ``index``: those with the farthest next use.

        The next use of blocks that are ``served``, by a copy higher up, is the one after. ``None``
        if that is not enough.
        """
        excess = self._used_bytes + self._sizes[block] - self._capacity_bytes
        if excess <= 0 or not self._sizes[block]:
            return []
        for used in self._uses.anchors[self._at : index]:
            self.touch(used)
        self._at = index
        found: dict[int, tuple[int, int]] = {}
        victims: list[int] = []
        while self._farthest and excess > 0:
            entry = heappop(self._farthest)
            victim = -entry[1]
            if victim not in self.held or victim in found:
                continue
            use = -1 if victim in self.stays else self._uses.following(index, victim, skip=victim in served)
            if entry != (-use, -victim):
                heappush(self._farthest, (-use, -victim))
                continue
            found[victim] = entry
            if victim not in keep:
                victims.append(victim)
                excess -= self._sizes[victim]
        for entry in found.values():
            heappush(self._farthest, entry)
        return victims if excess <= 0 else None

    def touch(self, block: int | None) -> None:
        """The block's next use may be farther than it was."""
        if block in self.held and self._sizes[block]:
            heappush(self._farthest, (-_FAR, -block))

    def add(self, block: int, op: int) -> None:
        """``op`` brings the block's weights."""
        self.held.add(block)
        self.arriving[block] = op
        self._used_bytes += self._sizes[block]
        self.touch(block)

    def remove(self, block: int, op: int | None = None) -> None:
        """``op`` releases the block's weights; ``None``: they are outdated and take no memory."""
        self.held.remove(block)
        self.arriving.pop(block, None)
        self._used_bytes -= self._sizes[block]
        self.last_release = op if op is not None else self.last_release

    def after_release(self) -> tuple[int, ...]:
        """What an op that takes memory waits for."""
        return () if self.last_release is None else (self.last_release,)
