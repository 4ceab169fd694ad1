"""What the door reads and writes: weights, native state and state blobs, wherever they live at that moment.

[Note: Reads under way]
A read can be begun and waited for later, so that several are on their way from the disk at the same time. It gives the content as
it was when it was begun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_hetero._native import U8, Ticket
from lightning_hetero.optim.adam import MASTER
from lightning_hetero.runtime.offloaded_tensor import OffloadedTensor, with_strides
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.store.live.geometry import WEIGHTS, versions, weights_on_file
from lightning_hetero.store.live.mirrors import writes_of
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.store.raw_memory import own_memory, tensor_at


class DeviceCopies(Protocol):
    """What a device with memory of its own holds of the weights."""

    def newest(self, part: Part, index: int) -> Tensor | None:
        """A fresh CPU tensor with a parameter's weights, if the device has newer ones than the host; else ``None``."""

    def written(self, part: Part, index: int) -> None:
        """The host has got new weights of a parameter: what the device holds of them is outdated."""


@dataclass(frozen=True, slots=True)
class FileRun:
    """Where in the files of a native part a tensor lies, once all that was written is committed.

    Attributes:
        number: Number of the files.
        array: -1 the weights, 0.. a state array.
        first: First element in the block's flat order.
    """

    number: int
    array: int
    first: int


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
        changes: Told of the block before its weights are written.
    """

    store: TierStore
    part: Part
    index: int
    settle: Callable[[Part], None]
    device: DeviceCopies | None = None
    changes: Callable[[Block], None] | None = None

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
        return self.begin()()

    def begin(self) -> Callable[[], Tensor]:
        """Begins to :meth:`read`; see [Note: Reads under way]."""
        self.settle(self.part)
        newest = None if self.device is None else self.device.newest(self.part, self.index)
        if newest is not None:
            return lambda: newest
        flat = own_memory(self.part.params[self.index].numel(), self.dtype)
        content = self.part.shaped(self.index, flat)
        if self.part.block.resident:
            content.copy_(self.part.memory(self.index))
            return lambda: content
        self.store.check_open(self.part, self.name)
        return _once_read(self.store.begin_read(self.part, [(WEIGHTS, self.index, flat)]), content)

    def on_file(self) -> FileRun | None:
        """Where the current content lies in a file, while no update is under way; ``None``: in none."""
        native = self.part.native
        if native is None or not weights_on_file(self.part) or self.part.block.uses or self.part.dirty or self.part.patches:
            return None
        if self.device is not None and self.device.newest(self.part, self.index) is not None:
            return None
        unit = self.dtype.itemsize if native.geometry.weight_dtype == U8 else 1
        return FileRun(native.geometry.id, WEIGHTS, self.part.offsets[self.index] * unit)

    def write(self, value: Tensor) -> None:
        """Replaces the content."""
        if self.changes is not None:
            self.changes(self.part.block)
        self.settle(self.part)
        if self.part.block.resident:
            if self.part.block.weights_on_disk:
                self.store.barrier(self.part)  # the last update's write may still read this memory
            for ticket in writes_of(self.part):
                ticket.wait()  # and so may that of a mirror
            self.part.memory(self.index).copy_(value)
            self.part.dirty = self.part.block.weights_on_disk
            self.part.master_versions = self.part.mirrored_versions = -1  # no version counter has seen this write
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
        return self.begin()()

    def begin(self) -> Callable[[], Tensor]:
        """Begins to :meth:`read`; see [Note: Reads under way]."""
        self.store.check_open(self.part, self.name)
        if self.part.state_home is not None:
            newest = self.part.shaped(self.index, self.part.state_home.read(self.part, self.array, self.index))
            return lambda: newest
        flat, content = self.room()
        if self._is_outdated:
            content.copy_(self.part.memory(self.index))
            return lambda: content
        return _once_read(self.store.begin_read(self.part, [(self.array, self.index, flat)]), content)

    def room(self) -> tuple[Tensor, Tensor]:
        """Fresh memory for the content, as the engine fills it and as it is seen."""
        flat = own_memory(self.part.params[self.index].numel(), torch.float32)
        return flat, self.part.shaped(self.index, flat)

    def on_file(self) -> FileRun | None:
        """As for :class:`WeightSource`."""
        native = self.part.native
        on_file = native is not None and native.geometry.state_on_disk_file and self.part.state_home is None
        if native is None or not on_file or self._is_outdated:
            return None
        return FileRun(native.geometry.id, self.array, self.part.offsets[self.index])

    @property
    def _is_outdated(self) -> bool:
        """It is a master, and the 16-bit weights were written to since the last update: the next one will make them the master."""
        return self.key == MASTER and self.part.block.resident and self.part.master_versions != versions(self.part)

    def write(self, value: Tensor) -> None:
        """Replaces the content."""
        self.store.check_open(self.part, self.name)
        write_state(self.store, self.part, [(self.array, self.index, self.part.flat(self.index, value, torch.float32))])

    @property
    def is_in_file(self) -> bool:
        """Whether a read of it goes to the disk."""
        native = self.part.native
        in_file = native is not None and native.geometry.state_on_disk_file
        return in_file and self.part.state_home is None and not self._is_outdated

    def take(self) -> Tensor:
        """The content as an ordinary tensor that outlives the store; where it is in memory it is not copied."""
        native = self.part.native
        away = native is None or self.part.on_disk or self.part.state_home is not None or self._is_outdated
        address = None if away or native is None else native.state_address(self.array)
        if address is None:
            return self.read()
        start = address + 4 * self.part.offsets[self.index]
        return self.part.shaped(self.index, tensor_at(native, start, self.part.params[self.index].numel(), torch.float32))


def _once_read(ticket: Ticket, content: Tensor) -> Callable[[], Tensor]:
    def wait() -> Tensor:
        ticket.wait()
        return content

    return wait


def take_all(tensors: Sequence[OffloadedTensor]) -> list[Tensor]:
    """What handles of optimizer state stand for, as ordinary tensors that outlive the store.

    What lies in files is read at the same time, and every chunk of them once, whatever number of tensors lies in it.
    """
    found: list[Tensor] = []
    runs: dict[tuple[TierStore, Part], list[tuple[int, int, Tensor]]] = {}
    for tensor in tensors:
        source = tensor.source
        if isinstance(source, BlobSource) or (isinstance(source, StateSource) and source.is_in_file):
            source.store.check_open(source.part, source.name)
            array = source.array if isinstance(source, StateSource) else WEIGHTS
            flat, content = source.room()
            runs.setdefault((source.store, source.part), []).append((array, source.index, flat))
            found.append(content)
        else:
            found.append(source.take() if isinstance(source, StateSource) else tensor.clone())
    for ticket in [store.begin_read(part, of_part) for (store, part), of_part in runs.items()]:
        ticket.wait()
    return [with_strides(content, tensor.stride()) for content, tensor in zip(found, tensors, strict=True)]


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
        return self.begin()()

    def begin(self) -> Callable[[], Tensor]:
        """Begins to :meth:`read`; see [Note: Reads under way]."""
        self.store.check_open(self.part, self.name)
        flat, content = self.room()
        return _once_read(self.store.begin_read(self.part, [(WEIGHTS, self.index, flat)]), content)

    def room(self) -> tuple[Tensor, Tensor]:
        """Fresh memory for the content, as the engine fills it and as it is seen."""
        own = own_memory(self.shape.numel(), self.dtype)
        return own.view(torch.uint8), own.view(self.shape)

    def on_file(self) -> FileRun | None:
        """As for :class:`WeightSource`."""
        native = self.part.native
        return None if native is None else FileRun(native.geometry.id, WEIGHTS, self.part.offsets[self.index])

    def write(self, value: Tensor) -> None:
        """Replaces the content."""
        flat = value.to(self.dtype).contiguous().view(-1).view(torch.uint8)
        self.store.write_state(self.part, [(WEIGHTS, self.index, flat)])
