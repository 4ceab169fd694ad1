"""What the door reads and writes: weights, native state and state blobs, wherever they live at that moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_hetero.optim.adam import MASTER
from lightning_hetero.store.blocks import Part, own_memory, tensor_at
from lightning_hetero.store.geometry import WEIGHTS, versions
from lightning_hetero.store.mirrors import writes_of
from lightning_hetero.store.tiers import TierStore


class DeviceCopies(Protocol):
    """What a device with memory of its own holds of the weights."""

    def newest(self, part: Part, index: int) -> Tensor | None:
        """A fresh CPU tensor with a parameter's weights, if the device has newer ones than the host; else ``None``."""

    def written(self, part: Part, index: int) -> None:
        """The host has got new weights of a parameter: what the device holds of them is outdated."""


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The weights of one parameter.

    [Note: Which copy counts]
    Weights are read from host memory, or from disk while they are not there; that is where updates write them. A device with memory
    of its own holds copies. Only a copy that was changed there (an update on the device, user code while its block was in use) and
    has not been brought back yet is newer. Writes go to the host, and tell the device.

    Attributes:
        store: The tiers.
        part: The part that holds the parameter.
        index: The parameter's position in the part.
        settle: Waits until no update of the part is under way.
        device: The copies on the device; ``None`` where the device is the host.
    """

    store: TierStore
    part: Part
    index: int
    settle: Callable[[Part], None]
    device: DeviceCopies | None = None

    @property
    def name(self) -> str:
        """For messages."""
        return self.part.names[self.index]

    @property
    def shape(self) -> torch.Size:
        """The parameter's or tensor's shape."""
        return self.part.params[self.index].shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what is read."""
        return self.part.dtype

    @property
    def address(self) -> int:
        """The parameter's fixed address; its pages are empty while the weights are away."""
        return self.part.memory(self.index).data_ptr()

    def read(self) -> Tensor:
        """A fresh tensor with the current content."""
        self.settle(self.part)
        newest = None if self.device is None else self.device.newest(self.part, self.index)
        if newest is not None:
            return newest
        if self.part.block.resident:
            memory = self.part.memory(self.index)
            return self.part.shaped(self.index, own_memory(memory.numel(), self.dtype)).copy_(memory)
        self.store.check_open(self.part, self.name)
        out = own_memory(self.part.params[self.index].numel(), self.dtype)
        self.store.read(self.part, WEIGHTS, self.index, out)
        return self.part.shaped(self.index, out)

    def write(self, value: Tensor) -> None:
        """Replaces the content."""
        self.settle(self.part)
        if self.part.block.resident:
            if self.part.block.weights_on_disk:
                self.store.barrier(self.part)  # the last update's write may still read this memory
            for ticket in writes_of(self.part):
                ticket.wait()  # and so may that of a mirror
            self.part.memory(self.index).copy_(value)
            self.part.dirty = self.part.block.weights_on_disk
            self.part.master_versions = -1  # no version counter has seen this write
            self.store.on_patched(value)
        else:
            self.store.check_open(self.part, self.name)
            self.store.patch(self.part, self.index, self.part.flat(self.index, value, self.dtype))
        if self.device is not None:
            self.device.written(self.part, self.index)


@dataclass(frozen=True, slots=True)
class StateSource:
    """One fp32 state array's run for one parameter, on any tier."""

    store: TierStore
    part: Part
    index: int
    array: int
    key: str

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.part.names[self.index]}.{self.key}"

    @property
    def shape(self) -> torch.Size:
        """The parameter's or tensor's shape."""
        return self.part.params[self.index].shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what is read."""
        return torch.float32

    @property
    def address(self) -> None:
        """None: it has none of its own."""

    def read(self) -> Tensor:
        """A fresh tensor with the current content."""
        self.store.check_open(self.part, self.name)
        if self.part.state_home is not None:
            return self.part.shaped(self.index, self.part.state_home.read(self.part, self.array, self.index))
        out = own_memory(self.part.params[self.index].numel(), torch.float32)
        if self._is_outdated:
            return self.part.shaped(self.index, out).copy_(self.part.memory(self.index))
        self.store.read(self.part, self.array, self.index, out)
        return self.part.shaped(self.index, out)

    @property
    def _is_outdated(self) -> bool:
        """It is a master, and the 16-bit weights were written to since the last update: the next one will make them the master."""
        return self.key == MASTER and self.part.block.resident and self.part.master_versions != versions(self.part)

    def write(self, value: Tensor) -> None:
        """Replaces the content."""
        self.store.check_open(self.part, self.name)
        write_state(self.store, self.part, [(self.array, self.index, self.part.flat(self.index, value, torch.float32))])

    def take(self) -> Tensor:
        """The content as an ordinary tensor that outlives the store; where it is in memory it is not copied."""
        native = self.part.native
        away = native is None or self.part.on_disk or self.part.state_home is not None or self._is_outdated
        address = None if away or native is None else native.state_address(self.array)
        if address is None:
            return self.read()
        start = address + 4 * self.part.offsets[self.index]
        return self.part.shaped(self.index, tensor_at(native, start, self.part.params[self.index].numel(), torch.float32))


def write_state(store: TierStore, part: Part, runs: Sequence[tuple[int, int, Tensor]]) -> None:
    """Overwrites runs ``(array, index, flat values)`` of a part's state arrays, wherever they are.

    Args:
        store: The tiers.
        part: The part.
        runs: Number of the array, parameter's position in the part, fp32 values in the parameter's memory order.
    """
    if part.state_home is None:
        store.write_state(part, runs)
    else:
        part.state_home.write(part, runs)


@dataclass(frozen=True, slots=True)
class BlobSource:
    """One tensor of a state blob on disk."""

    store: TierStore
    part: Part
    index: int
    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def address(self) -> None:
        """None: it has none of its own."""

    def read(self) -> Tensor:
        """A fresh tensor with the current content."""
        self.store.check_open(self.part, self.name)
        out = own_memory(self.shape.numel(), self.dtype)
        self.store.read(self.part, WEIGHTS, self.index, out.view(torch.uint8))
        return out.view(self.shape)

    def write(self, value: Tensor) -> None:
        """Replaces the content."""
        flat = value.to(self.dtype).contiguous().view(-1).view(torch.uint8)
        self.store.write_state(self.part, [(WEIGHTS, self.index, flat)])
