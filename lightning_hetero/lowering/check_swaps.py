"""The invariants of activations that leave the device and come back; see [Note: Swaps] in ``activations``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_hetero.ir.schedule import Anchor, Lane, Op, OpKind, Phase
from lightning_hetero.lowering.activations import swapped_before

if TYPE_CHECKING:
    from lightning_hetero.lowering.check_device import DeviceCheck


@dataclass(slots=True)
class _Use:
    """One use of a block that swaps: its place in the forward order, and the op of each hop."""

    place: int
    block: int
    out: int | None = None
    out_disk: int | None = None
    in_disk: int | None = None
    back: int | None = None


class SwapCheck:
    """Follows the activations of every use of a block, hop by hop.

    Args:
        walk: The check that walks the schedule.
    """

    def __init__(self, walk: DeviceCheck) -> None:
        self._walk, self._depth = walk, walk.plan.prefetch_depth
        order = walk.schedule.signature.order if walk.schedule.signature.training else ()
        self._uses = {i: _Use(i, b) for i, b in enumerate(order) if walk.placed[b].swaps}  # by place
        self._of: dict[int, list[_Use]] = {}  # block -> its uses
        for use in self._uses.values():
            self._of.setdefault(use.block, []).append(use)
        self._leaving: list[int] = []  # ops from the device that compute has not waited for
        self._early: list[int] = []  # places of uses that are back before their backward
        self._staged: dict[OpKind, list[int]] = {OpKind.SWAP_OUT: [], OpKind.SWAP_IN: []}  # ops that take memory between the hops
        self._given: dict[OpKind, list[int]] = {OpKind.SWAP_OUT: [], OpKind.SWAP_IN: []}  # ops that give it back

    def check_op(self, op: Op) -> None:
        """One hop of one use."""
        match op.kind, op.lane:
            case OpKind.SWAP_OUT, Lane.D2H:
                self._out(op)
            case OpKind.SWAP_OUT, Lane.DISK_WRITE:
                self._out_disk(op)
            case OpKind.SWAP_IN, Lane.DISK_READ:
                self._in_disk(op)
            case OpKind.SWAP_IN, Lane.H2D:
                self._back(op)
            case _:
                self._walk.fail("activations", op, op.block, f"swaps activations on lane {op.lane.value!r}")

    def check_anchor(self, index: int, anchor: Anchor) -> None:
        """A forward has room; what a backward needs is back."""
        waited = self._walk.waited
        self._leaving = [i for i in self._leaving if not waited >> i & 1]
        if len(self._leaving) > self._depth:
            got = f"anchor {index} ({anchor}) begins while activations of {len(self._leaving)} uses leave the device"
            self._walk.fail(
                "activations", self._walk.schedule.ops[self._leaving[0]], anchor.block, f"{got}; allowed: {self._depth}"
            )
        if anchor.phase is Phase.FORWARD:
            return
        use = self._uses.get(self._place_of(index))
        if use is not None and (use.back is None or not waited >> use.back & 1):
            self._walk.fail(
                "activations", None, anchor.block, f"has not got its activations back when anchor {index} ({anchor}) begins"
            )

    def check_end(self) -> None:
        """Nothing stays away."""
        for use in self._uses.values():
            if use.back is None:
                self._walk.fail("activations", None, use.block, f"does not get its activations of use {use.place} back")

    def _place_of(self, index: int) -> int:
        """The use whose backward an anchor is."""
        return len(self._walk.schedule.anchors) - 2 - index

    def _out(self, op: Op) -> None:
        found = [u for u in self._of.get(op.block, ()) if u.place < op.at and u.out is None]
        use = self._one(op, found, self._walk.placed[op.block].swapped_bytes)
        if any(edge not in op.carried for edge in swapped_before(op.block, self._walk.placed[op.block])):
            self._walk.fail("order", op, op.block, "does not wait for the block's SWAP_OUT of the step before")
        if self._walk.placed[op.block].swaps_to_disk:
            self._check_staging(op)
        use.out = op.id
        self._leaving.append(op.id)

    def _out_disk(self, op: Op) -> None:
        found = [u for u in self._of.get(op.block, ()) if u.out is not None and u.out_disk is None]
        use = self._one(op, found, self._walk.placed[op.block].saved.to_disk)
        self._check_behind(op, use.out)
        self._given[op.kind].append(op.id)
        use.out_disk = op.id

    def _in_disk(self, op: Op) -> None:
        found = [u for u in self._of.get(op.block, ()) if u.out_disk is not None and u.in_disk is None]
        use = self._one(op, found, self._walk.placed[op.block].saved.to_disk)
        self._check_behind(op, use.out_disk)
        self._check_staging(op)
        use.in_disk = op.id

    def _back(self, op: Op) -> None:
        found = [u for u in self._of.get(op.block, ()) if u.out is not None and u.back is None]
        use = self._one(op, found, self._walk.placed[op.block].swapped_bytes)
        self._check_behind(op, use.in_disk if self._walk.placed[op.block].swaps_to_disk else use.out)
        now = self._place_of(op.at)
        self._early = [place for place in self._early if place < now]
        if use.place < now and len(self._early) >= self._depth:
            self._walk.fail(
                "activations", op, op.block, f"comes back while {len(self._early)} uses are back early; allowed: {self._depth - 1}"
            )
        if self._walk.placed[op.block].swaps_to_disk:
            self._given[op.kind].append(op.id)
        use.back = op.id
        self._early.append(use.place)

    def _one(self, op: Op, found: list[_Use], num_bytes: int) -> _Use:
        """The latest use: those of one block nest."""
        if not found or op.num_bytes != num_bytes:
            got = f"swaps {op.num_bytes} bytes of activations over a hop; {num_bytes} of {len(found)} uses have to take it"
            self._walk.fail("activations", op, op.block, got)
        return found[-1]

    def _check_staging(self, op: Op) -> None:
        """Each takes over the memory of one before, once all that there is between the two hops has been taken."""
        staged, given = self._staged[op.kind], self._given[op.kind]
        place = len(staged) - 2 * self._depth
        if place >= 0 and (place >= len(given) or not self._is_behind(op, given[place])):
            got = f"does not wait for the host memory that it takes over; {2 * self._depth} uses may have some on the way"
            self._walk.fail("activations", op, op.block, got)
        staged.append(op.id)

    def _check_behind(self, op: Op, hop: int | None) -> None:
        if hop is None or not self._is_behind(op, hop):
            self._walk.fail("activations", op, op.block, "does not wait for the hop before it")

    def _is_behind(self, op: Op, other: int) -> bool:
        return bool(self._walk.behind[op.id] >> other & 1)
