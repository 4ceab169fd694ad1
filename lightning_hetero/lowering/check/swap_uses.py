"""The uses of blocks that swap, hop by hop; see [Note: Swaps] in ``activation_moves.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.ir.schedule import Lane, Op, OpKind, StepSignature
from lightning_hetero.lowering.placed_blocks import PlacedBlock


@dataclass(slots=True)
class SwapUse:
    """One use of a block that swaps: its place in the forward order, and the op of each hop."""

    place: int
    block: int
    out: int | None = None
    out_disk: int | None = None
    in_disk: int | None = None
    back: int | None = None


class SwapUses:
    """Follows the activations of every use of a block, hop by hop.

    Args:
        signature: The step.
        placed: The blocks.

    Attributes:
        by_place: The uses by their place in the forward order.
        leaving: Ops that bring activations off the device and that compute has not waited for.
        early: Places of the uses that are back before their backward.
        staged: For each direction the ops that take host memory between the hops.
        given: For each direction the ops that give it back.
    """

    def __init__(self, signature: StepSignature, placed: Sequence[PlacedBlock]) -> None:
        self._placed = placed
        order = signature.order if signature.training else ()
        self._last_backward = 2 * len(signature.order) - 1  # the index of its anchor
        self.by_place = {i: SwapUse(i, b) for i, b in enumerate(order) if placed[b].swaps}
        self._of_block: dict[int, list[SwapUse]] = {}
        for use in self.by_place.values():
            self._of_block.setdefault(use.block, []).append(use)
        self.leaving: list[int] = []
        self.early: list[int] = []
        self.staged: dict[OpKind, list[int]] = {OpKind.SWAP_OUT: [], OpKind.SWAP_IN: []}
        self.given: dict[OpKind, list[int]] = {OpKind.SWAP_OUT: [], OpKind.SWAP_IN: []}

    def place_of(self, index: int) -> int:
        """The place of the use whose backward an anchor is."""
        return self._last_backward - index

    def waiting_for(self, op: Op) -> list[SwapUse]:
        """The uses whose next hop the op may be. Uses of a block nest, so the last one is meant."""
        uses = self._of_block.get(op.block, [])
        match op.kind, op.lane:
            case OpKind.SWAP_OUT, Lane.D2H:
                return [u for u in uses if u.place < op.at and u.out is None]
            case OpKind.SWAP_OUT, _:
                return [u for u in uses if u.out is not None and u.out_disk is None]
            case OpKind.SWAP_IN, Lane.DISK_READ:
                return [u for u in uses if u.out_disk is not None and u.in_disk is None]
            case _:
                return [u for u in uses if u.out is not None and u.back is None]

    def record(self, op: Op) -> None:
        """The op, which the rules allow, has been issued."""
        use, to_disk = self.waiting_for(op)[-1], self._placed[op.block].swaps_to_disk
        match op.kind, op.lane:
            case OpKind.SWAP_OUT, Lane.D2H:
                use.out = op.id
                self.leaving.append(op.id)
                self.staged[op.kind] += [op.id] * to_disk
            case OpKind.SWAP_OUT, _:
                use.out_disk = op.id
                self.given[op.kind].append(op.id)
            case OpKind.SWAP_IN, Lane.DISK_READ:
                use.in_disk = op.id
                self.staged[op.kind].append(op.id)
            case _:
                use.back = op.id
                self.given[op.kind] += [op.id] * to_disk
                self.early = [*self.early_at(op.at), use.place]

    def early_at(self, index: int) -> list[int]:
        """Places of the uses that are back before their backward when an anchor begins."""
        return [place for place in self.early if place < self.place_of(index)]
