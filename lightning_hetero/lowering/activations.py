"""Activations that leave the device after a block's forward and are back before its backward.

[Note: Swaps]
Each use of a block swaps by itself: out after its forward, to the host and from there to the disk what the plan puts there; in
ahead of its backward, the same way. From the last forward on, the next ``prefetch_depth`` uses are sent for; from the disk as many
more. Memory on the way is bounded: beside the use that computes, ``prefetch_depth``
uses have swapped activations on the device, so forward waits for those that left longest ago; and twice ``prefetch_depth`` uses
on the way to the disk, or back, take host memory, so each takes over that of the one so many before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from lightning_hetero.ir.schedule import Lane, OpKind, Payload
from lightning_hetero.lowering.chains import Carried, Issue
from lightning_hetero.lowering.placement import Placement


def swapped_before(block: int, placed: Placement) -> tuple[Carried, ...]:
    """What activations that leave wait for of an earlier step: state or weights on their way back to the host.

    The latest SWAP_OUT of a block then stands for all before it, whatever they move.
    """
    return ((OpKind.SWAP_OUT, block),) if placed.state_moves or placed.weights_return else ()


class ActivationMoves:
    """Swaps the activations of one training step.

    A use is the place of its forward in the step's order; its backward is the anchor as far from the end.

    Args:
        placed: The blocks.
        issue: Issues ops.
        order: The blocks in the order of their forwards.
        depth: Uses that may be on their way.
    """

    def __init__(self, placed: Sequence[Placement], issue: Issue, order: Sequence[int], *, depth: int) -> None:
        self._placed, self._issue, self._order, self._depth = placed, issue, order, depth
        self._backward = [u for u in reversed(range(len(order))) if placed[order[u]].swaps]
        self._out: dict[int, int] = {}  # use -> SWAP_OUT from the device, in the order of issue
        self._out_disk: dict[int, int] = {}  # use -> SWAP_OUT to the disk
        self._in: dict[int, int] = {}  # use -> SWAP_IN to the device
        self._in_disk: dict[int, int] = {}  # use -> SWAP_IN from the disk
        self._waited = 0  # SWAP_OUTs that compute has waited for

    def forward_ended(self, use: int) -> None:
        """Sends what the use has saved on its way."""
        block = self._order[use]
        placed = self._placed[block]
        if not placed.swaps:
            return
        size = placed.swapped_bytes
        over = _taken_over(self._out_disk.values(), len(self._out_disk), 2 * self._depth) if placed.swaps_to_disk else ()
        carried = swapped_before(block, placed)
        self._out[use] = self._issue(OpKind.SWAP_OUT, block, Lane.D2H, Payload.ACTIVATIONS, size, after=over, carried=carried)
        if placed.swaps_to_disk:
            self._out_disk[use] = self._swap(OpKind.SWAP_OUT, block, Lane.DISK_WRITE, placed.saved.to_disk, (self._out[use],))

    def space(self) -> Iterator[int]:
        """The SWAP_OUTs whose memory the next use takes over: all but the latest ones."""
        out = list(self._out.values())[self._waited : max(0, len(self._out) - self._depth)]
        self._waited += len(out)
        yield from out

    def need(self, use: int) -> int | None:
        """Brings the use's activations back if they are not under way; returns the op to wait for, if there is any."""
        if use in self._out and use not in self._in:
            self._bring(use)
        return self._in.get(use)

    def prefetch(self, use: int) -> None:
        """Brings back what the backwards after that of ``use`` need."""
        ahead = [u for u in self._backward if u < use][: 2 * self._depth]
        for distance, other in enumerate(ahead):
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

    def _bring_from_disk(self, use: int) -> None:
        block = self._order[use]
        arrived = [op for other, op in self._in.items() if other in self._in_disk]
        over = _taken_over(arrived, len(self._in_disk), 2 * self._depth)
        after = (self._out_disk[use], *over)
        self._in_disk[use] = self._swap(OpKind.SWAP_IN, block, Lane.DISK_READ, self._placed[block].saved.to_disk, after)

    def _swap(self, kind: OpKind, block: int, lane: Lane, size: int, after: Sequence[int]) -> int:
        return self._issue(kind, block, lane, Payload.ACTIVATIONS, size, after=after)


def _taken_over(freed: Iterable[int], num_taken: int, most: int) -> tuple[int, ...]:
    """The op whose memory one more takes over, where ``num_taken`` have taken some before and ``most`` may hold some."""
    place = num_taken - most
    return tuple(freed)[place : place + 1] if place >= 0 else ()
