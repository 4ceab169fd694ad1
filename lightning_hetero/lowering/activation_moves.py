"""Activations that leave the device after a block's forward and are back before its backward.

[Note: Swaps]
Each use of a block swaps by itself: out after its forward, to the host and from there to the disk
what the plan puts there; in ahead of its backward, the same way. From the last forward on, the next
``prefetch_depth`` uses are sent for; from the disk as many more. Memory on the way is bounded:
beside the use that computes, ``prefetch_depth`` uses have swapped activations on the device, so
forward waits for those that left longest ago; and twice ``prefetch_depth`` uses on the way to the
disk, or back, take host memory, so each takes over that of the one so many before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence

from lightning_hetero.ir.schedule import Lane, OpKind, Payload
from lightning_hetero.lowering.chains import Carried, Issue
from lightning_hetero.lowering.placed_blocks import PlacedBlock


def swapped_before(block: int, placed: PlacedBlock) -> tuple[Carried, ...]:
    """Carried edges of activations that leave: state or weights going back to the host.

    The latest SWAP_OUT of a block then stands for all before it, whatever they move.
    """
    return ((OpKind.SWAP_OUT, block),) if placed.state_moves or placed.weights_return else ()


class ActivationMoves:
    """Swaps the activations of one training step.

    A use is the place of its forward in the step's order; its backward is the anchor as far from
    the end.

    Args:
        placed: The blocks.
        issue: Issues ops.
        order: The blocks in the order of their forwards.
        depth: Uses that may be on their way.
    """

    def __init__(self, placed: Sequence[PlacedBlock], issue: Issue, order: Sequence[int], *, depth: int) -> None:
        self._placed, self._issue, self._order, self._depth = placed, issue, order, depth
        self._uses = [use for use, block in enumerate(order) if placed[block].swaps]
        self._out: dict[int, int] = {}  # use -> SWAP_OUT from the device
        self._out_disk: dict[int, int] = {}  # use -> SWAP_OUT to the disk
        self._in: dict[int, int] = {}  # use -> SWAP_IN to the device
        self._in_disk: dict[int, int] = {}  # use -> SWAP_IN from the disk
        self._leaving: deque[int] = deque()  # SWAP_OUTs that compute has not waited for
        self._written: list[int] = []  # SWAP_OUTs to the disk: each gives host memory back
        self._lifted: list[int] = []  # SWAP_INs to the device of what came from the disk: the same

    def forward_ended(self, use: int) -> None:
        """Sends what the use has saved on its way."""
        block = self._order[use]
        placed = self._placed[block]
        if not placed.swaps:
            return
        size = placed.swapped_bytes
        over = self._taken_over(self._written, len(self._written)) if placed.swaps_to_disk else ()
        carried = swapped_before(block, placed)
        self._out[use] = self._issue(OpKind.SWAP_OUT, block, Lane.D2H, Payload.ACTIVATIONS, size, after=over, carried=carried)
        self._leaving.append(self._out[use])
        if placed.swaps_to_disk:
            self._out_disk[use] = self._swap(OpKind.SWAP_OUT, block, Lane.DISK_WRITE, placed.saved.to_disk, (self._out[use],))
            self._written.append(self._out_disk[use])

    def space(self) -> Iterator[int]:
        """The SWAP_OUTs whose memory the next use takes over: all but the latest ones."""
        while len(self._leaving) > self._depth:
            yield self._leaving.popleft()

    def need(self, use: int) -> int | None:
        """Brings the use's activations back, unless that has begun. Returns the op to wait for."""
        if use in self._out and use not in self._in:
            self._bring(use)
        return self._in.get(use)

    def prefetch(self, use: int) -> None:
        """Brings back what the backwards after that of ``use`` need."""
        place = bisect_left(self._uses, use)
        ahead = self._uses[max(0, place - 2 * self._depth) : place]
        for distance, other in enumerate(reversed(ahead)):
            if other in self._out and distance < self._depth and other not in self._in:
                self._bring(other)
            elif other in self._out_disk and other not in self._in_disk:
                self._bring_from_disk(other)

    def on_the_way(self, use: int) -> bool:
        """Whether nothing of the use's activations has yet to be read from the disk's lane."""
        return not self._placed[self._order[use]].swaps_to_disk or use in self._in_disk

    def _bring(self, use: int) -> None:
        if use in self._out_disk and use not in self._in_disk:
            self._bring_from_disk(use)
        block = self._order[use]
        after = (self._in_disk.get(use, self._out[use]),)
        self._in[use] = self._swap(OpKind.SWAP_IN, block, Lane.H2D, self._placed[block].swapped_bytes, after)
        if use in self._in_disk:
            self._lifted.append(self._in[use])

    def _bring_from_disk(self, use: int) -> None:
        block = self._order[use]
        after = (self._out_disk[use], *self._taken_over(self._lifted, len(self._in_disk)))
        self._in_disk[use] = self._swap(OpKind.SWAP_IN, block, Lane.DISK_READ, self._placed[block].saved.to_disk, after)

    def _swap(self, kind: OpKind, block: int, lane: Lane, size: int, after: Sequence[int]) -> int:
        return self._issue(kind, block, lane, Payload.ACTIVATIONS, size, after=after)

    def _taken_over(self, freed: Sequence[int], num_taken: int) -> Sequence[int]:
        """The op whose host memory between the hops use number ``num_taken`` takes over."""
        place = num_taken - 2 * self._depth
        return freed[place : place + 1] if place >= 0 else ()
