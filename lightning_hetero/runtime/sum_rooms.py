"""Device memory in which a rank's device sums gradients; part of ``runtime.slice_gradients``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_hetero.errors import HeteroError
from lightning_hetero.lanes.contract import Lanes
from lightning_hetero.lanes.memory import ALIGNMENT_BYTES
from lightning_hetero.lowering.needs import DEVICE_GRADIENTS
from lightning_hetero.lowering.rank_needs import EXCHANGE_BYTES, PEER_EXCHANGE_BYTES, SUM_BYTES
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.units import round_up


class SumRooms:
    """Memory for sums on a device, for as long as a plan is in force.

    It is taken at once, so that there is room whatever else the device holds. What it takes is
    counted by ``lowering.rank_needs.on_devices_bytes``. Ops of two lanes use it; places go back
    once the host has waited for what read them.

    Args:
        lanes: Those of the device, at rest.
        ranks: The ranks that share the model.
        blocks: The model's.

    Attributes:
        total: Sums in float64.
        landing: Host memory to which a device copies fast.

    Raises:
        DeviceMemoryError: It is not free in one piece each. Nothing stays taken.
    """

    def __init__(self, lanes: Lanes, ranks: int, blocks: Iterable[Block]) -> None:
        trained = [[p for p in block.parts if any(param.requires_grad for param in p.params)] for block in blocks]
        pieces = [(piece_elements(part, ranks), part.dtype.itemsize) for parts in trained for part in parts]
        exchanged = max((elements * ranks * itemsize for elements, itemsize in pieces), default=0)
        summed = min(8 * max((elements for elements, _ in pieces), default=0), SUM_BYTES)
        slices = max((sum(map(place_bytes, parts)) for parts in trained), default=0)
        self._memory, self._taken = lanes.memory(), list[Tensor]()
        try:
            for num_bytes in (exchanged, exchanged, summed, *[slices] * DEVICE_GRADIENTS):
                self._taken.append(self._memory.take(num_bytes, "sums of gradients"))
        except BaseException:
            self.give_back()
            raise
        self._sent, self._received, total, *self._places = self._taken
        self.total, self._free = total.view(torch.float64), list(self._places)
        self.landing = lanes.host_buffer(min(max(slices, 1), EXCHANGE_BYTES))
        lanes.catch_up()  # the memory was taken in the order of another stream than those of the ops

    def give_back(self) -> None:
        """Gives all of it back, at rest."""
        while self._taken:
            self._memory.give(self._taken.pop())

    def exchanging(self, elements: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Memory for what the device sends, and for what it receives."""
        num_bytes = elements * dtype.itemsize
        return self._sent[:num_bytes].view(dtype), self._received[:num_bytes].view(dtype)

    def place(self) -> Tensor:
        """Takes a place for the slices of a block. By the schedule one is free."""
        if not self._free:
            raise HeteroError(f"slices of more than {len(self._places)} blocks' gradients wait on the device; a GRAD is missing.")
        return self._free.pop()

    def give(self, place: Tensor) -> None:
        """A block's slices have left."""
        self._free.append(place)

    def clear(self) -> None:
        """All places are free again."""
        self._free = list(self._places)


def piece_elements(part: Part, ranks: int) -> int:
    """The elements of a slice that devices sum at a time; one at least."""
    return max(1, min(part.slice_elements, PEER_EXCHANGE_BYTES // (ranks * part.dtype.itemsize)))


def place_bytes(part: Part) -> int:
    """What a part's slice takes of its block's place."""
    return round_up(part.slice_elements * part.dtype.itemsize, ALIGNMENT_BYTES)


def alignment_bytes(parts: Iterable[Sequence[Part]]) -> int:
    """What alignment may add to all of it: for three buffers, and for each part in each place."""
    return ALIGNMENT_BYTES * (3 + DEVICE_GRADIENTS * max((len(one) for one in parts), default=0))
