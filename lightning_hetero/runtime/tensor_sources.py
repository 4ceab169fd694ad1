"""The sources of offloaded tensors: weights, native state and state blobs, on any tier.

[Note: Reads under way]
A read can begin now and be waited for later, so that the disk serves several at the same time. It
gives the content of the moment when it began.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hetero._native import U8, InPlacePart
from lightning_hetero.errors import OffloadedAccessError
from lightning_hetero.handles.offloaded_tensor import OffloadedTensor, with_strides
from lightning_hetero.optim.adam import MASTER
from lightning_hetero.runtime.device.weights import DeviceWeights
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.store.live.geometry import WEIGHTS, versions, weights_on_file
from lightning_hetero.store.live.mirrors import writes_of
from lightning_hetero.store.live.moved_weights import stay_put, weights_now
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.store.raw_memory import own_memory, tensor_at


@dataclass(frozen=True, slots=True)
class FileRun:
    """The place in a native part's files of what this rank has of a tensor.

    It has the content once all writes are committed.
    """

    number: int  # of the files
    array: int  # -1 the weights, 0.. a state array
    first: int  # first element in the part's flat order


@dataclass(frozen=True, slots=True)
class _Source(ABC):
    """A tensor in the tiers."""

    store: TierStore
    part: Part
    index: int  # its position in the part

    @abstractmethod
    def room(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Fresh memory for the content: flat for the engine, and in the tensor's shape."""

    @abstractmethod
    def begin(self) -> Callable[[], Tensor]:
        """Begins to :meth:`read`; see [Note: Reads under way]."""

    def read(self) -> Tensor:
        """A fresh tensor with the current content."""
        return self.begin()()

    def _begin_on_disk(self, array: int, dtype: torch.dtype) -> Callable[[], Tensor]:
        flat, content = self.room(dtype)
        ticket = self.store.begin_read(self.part, [(array, self.index, flat)])

        def wait() -> Tensor:
            ticket.wait()
            return content

        return wait


class _OfParameter(_Source):
    """A tensor with the shape of a parameter of the part."""

    __slots__ = ()

    def _spread(self, name: str) -> OffloadedAccessError:
        return OffloadedAccessError(
            f"{name!r} is spread over {self.part.own.ranks} ranks. Weights can be used in their own block's forward, and "
            f"within `with strategy.materialize(...)`, which all ranks have to enter; after the fit they are whole."
        )

    def _read_spread(self, name: str, array: int) -> Tensor:
        """What several ranks have slices of, in the parameter's shape."""
        return self.part.shaped(self.index, self._read_runs(name, array, [(0, self.shape.numel())]))

    def _read_runs(self, name: str, array: int, runs: Sequence[tuple[int, int]]) -> Tensor:
        """Runs of what several ranks have slices of, joined.

        Raises:
            OffloadedAccessError: The other ranks do not send theirs now.
        """
        if self.store.read_spread is None:
            raise self._spread(name)
        return self.store.read_spread(self.part, array, self.index, runs)

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape."""
        return self.part.params[self.index].shape

    def room(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Fresh memory for the content: flat for the engine, and in the parameter's shape."""
        flat = own_memory(self.part.params[self.index].numel(), dtype)
        return flat, self.part.shaped(self.index, flat)


@dataclass(frozen=True, slots=True)
class WeightSource(_OfParameter):
    """The weights of one parameter.

    [Note: Which copy counts]
    Updates write weights to host memory, or to disk while the weights are not in memory. Reads go
    to the same place. A device with memory of its own holds copies. A copy is newer only if an
    update on the device or user code has changed it there and it has not been brought back. Writes
    go to the host and tell the device.
    """

    settle: Callable[[Part], None]  # waits until no update of the part is under way
    device: DeviceWeights | None = None  # ``None`` if the device is the host
    changes: Callable[[Block], None] | None = None  # called with the block before its weights are written

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.part.names[self.index]

    @property
    def dtype(self) -> torch.dtype:
        """The parameter's dtype."""
        return self.part.dtype

    @property
    def address(self) -> int:
        """The parameter's fixed address. Its pages are empty while the weights are away."""
        return self.part.fixed_address(self.index)

    def begin(self) -> Callable[[], Tensor]:
        """Begins to :meth:`read`; see [Note: Reads under way]."""
        if not self.part.is_whole:
            content = self._read_spread(self.name, WEIGHTS)
            return lambda: content
        self.settle(self.part)
        newest = None if self.device is None else self.device.newest(self.part, self.index)
        if newest is not None:
            return lambda: newest
        if self.part.block.resident:
            content = self.room(self.dtype)[1].copy_(self.part.memory(self.index))
            return lambda: content
        self.store.check_open(self.part, self.name)
        return self._begin_on_disk(WEIGHTS, self.dtype)

    def sample(self, firsts: Sequence[int], length: int) -> Tensor:
        """Runs of ``length`` elements of the memory order, joined; the rest is not read."""
        if not self.part.is_whole:
            return self._read_runs(self.name, WEIGHTS, [(first, length) for first in firsts])
        self.settle(self.part)
        whole = None if self.device is None else self.device.newest(self.part, self.index)
        if whole is None and self.part.block.resident:
            whole = weights_now(self.part, self.index)
        if whole is not None:
            flat = whole.as_strided((whole.numel(),), (1,))
            return torch.cat([flat[first : first + length] for first in firsts])
        self.store.check_open(self.part, self.name)
        out = own_memory(length * len(firsts), self.dtype)
        begin = self.part.offsets[self.index]
        runs = [(WEIGHTS, begin + first, out[i * length : (i + 1) * length]) for i, first in enumerate(firsts)]
        self.store.begin_read_at(self.part, runs).wait()
        return out

    def on_file(self) -> FileRun | None:
        """The run of a file that has the current content, while no update is under way."""
        native = self.part.native
        if native is None or not weights_on_file(self.part) or self.part.block.uses or self.part.dirty or self.part.patches:
            return None
        if isinstance(native, InPlacePart):
            return None
        if self.device is not None and self.device.newest(self.part, self.index) is not None:
            return None
        unit = self.dtype.itemsize if native.geometry.weight_dtype == U8 else 1
        return FileRun(native.geometry.id, WEIGHTS, self.part.pieces[self.index][0] * unit)

    def write(self, value: Tensor) -> None:
        """Replaces the content."""
        if self.part.own.ranks > 1 and not self.store.all_write:
            raise self._spread(self.name)
        if self.changes is not None:
            self.changes(self.part.block)
        self.part.rewritten = True
        self.settle(self.part)
        if self.store.all_write:
            self.part.is_whole = False
        else:
            stay_put(self.part, self.index)
        if self.part.block.resident:
            if self.part.block.weights_on_disk:
                self.store.barrier(self.part)  # the write of the last update may still read this memory
            for ticket in writes_of(self.part):
                ticket.wait()  # and so may the write of a mirror
            own = self.part.own_piece(self.index, self.part.flat(self.index, value, self.dtype))[1]
            self.part.own_weights(self.index).copy_(own)
            self.part.dirty = self.part.block.weights_on_disk
            self.part.master_versions = self.part.mirrored_versions = -1  # no version counter has seen this write
            self.store.on_patched(value)
        else:
            self.store.check_open(self.part, self.name)
            self.store.patch(self.part, self.index, self.part.flat(self.index, value, self.dtype))
        if self.device is not None:
            self.device.written(self.part, self.index)


@dataclass(frozen=True, slots=True)
class StateSource(_OfParameter):
    """One fp32 state array of one parameter, on any tier."""

    array: int
    key: str
    settle: Callable[[str], None]  # waits until the store has the updates from a device; with a name: before a write of that
    address = None  # state has none of its own

    @property
    def name(self) -> str:
        """The parameter's name and the key of the state."""
        return f"{self.part.names[self.index]}.{self.key}"

    @property
    def dtype(self) -> torch.dtype:
        """All state arrays are fp32."""
        return torch.float32

    def begin(self) -> Callable[[], Tensor]:
        """Begins to :meth:`read`; see [Note: Reads under way]."""
        self.store.check_open(self.part, self.name)
        self.settle("")
        if self.part.own.ranks > 1:
            spread = self._read_spread(self.name, self.array)
            return lambda: spread
        if self.part.state_home is not None:
            newest = self.part.shaped(self.index, self.part.state_home.read(self.part, self.array, self.index))
            return lambda: newest
        if self._is_outdated:
            content = self.room(torch.float32)[1].copy_(weights_now(self.part, self.index))
            return lambda: content
        return self._begin_on_disk(self.array, torch.float32)

    def on_file(self) -> FileRun | None:
        """See :meth:`WeightSource.on_file`."""
        native = self.part.native
        return FileRun(native.geometry.id, self.array, self.part.pieces[self.index][0]) if native and self.is_in_file else None

    @property
    def _is_outdated(self) -> bool:
        """Whether this is a master, and the 16-bit weights, its next value, were written since."""
        return self.key == MASTER and self.part.block.resident and self.part.master_versions != versions(self.part)

    def write(self, value: Tensor) -> None:
        """Replaces the content."""
        self.store.check_open(self.part, self.name)
        self.settle(f"state {self.name!r}")
        write_state(self.store, self.part, [(self.array, self.index, self.part.flat(self.index, value, torch.float32))])

    @property
    def is_in_file(self) -> bool:
        """Whether a read of it goes to the disk."""
        native = self.part.native
        in_file = native is not None and native.geometry.state_on_disk_file
        return in_file and self.part.state_home is None and not self._is_outdated

    def take(self) -> Tensor:
        """The content as a tensor that outlives the store; no copy if it is in memory."""
        native = self.part.native
        away = native is None or self.part.on_disk or self.part.state_home is not None or self._is_outdated
        address = None if away or native is None else native.state_address(self.array)
        if address is None:
            return self.read()
        start = address + 4 * self.part.offsets[self.index]
        return self.part.shaped(self.index, tensor_at(native, start, self.part.params[self.index].numel(), torch.float32))

    def take_piece(self) -> Tensor:
        """What this rank has of the content, flat, as a tensor that outlives the store."""
        if self.part.state_home is not None:
            return self.part.state_home.read(self.part, self.array, self.index)
        self.store.refresh_master(self.part)
        native, (start, length) = self.part.require_native(), self.part.pieces[self.index]
        if self.part.on_disk:  # the engine's memory goes with the files
            return self.store.read_piece(self.part, self.array, self.index)
        begin = native.state_memory(self.array) + 4 * start
        return tensor_at(native, begin, length, torch.float32) if length else torch.empty(0)


def take_all(tensors: Sequence[OffloadedTensor]) -> list[Tensor]:
    """Reads handles of optimizer state, as ordinary tensors that outlive the store.

    All files are read at the same time, and every chunk once, even if several tensors lie in it.
    """
    found: list[Tensor] = []
    runs: dict[tuple[TierStore, Part], list[tuple[int, int, Tensor]]] = {}
    for tensor in tensors:
        source = tensor.source
        if isinstance(source, BlobSource) or (isinstance(source, StateSource) and source.is_in_file):
            source.store.check_open(source.part, source.name)
            array = source.array if isinstance(source, StateSource) else WEIGHTS
            flat, content = source.room(source.dtype)
            runs.setdefault((source.store, source.part), []).append((array, source.index, flat))
            found.append(content)
        else:
            found.append(source.take() if isinstance(source, StateSource) else tensor.clone())
    for ticket in [store.begin_read(part, of_part) for (store, part), of_part in runs.items()]:
        ticket.wait()
    return [with_strides(content, tensor.stride()) for content, tensor in zip(found, tensors, strict=True)]


def write_state(store: TierStore, part: Part, runs: Sequence[tuple[int, int, Tensor]]) -> None:
    """Overwrites runs of a part's state arrays, on any tier.

    Each has the number of the array, the parameter's position in the part, and flat fp32 values in
    the parameter's memory order.
    """
    if part.state_home is None:
        store.write_state(part, runs)
    else:
        part.state_home.write(part, runs)


@dataclass(frozen=True, slots=True)
class BlobSource(_Source):
    """One tensor of a state blob on disk."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    address = None  # a blob has none of its own

    def begin(self) -> Callable[[], Tensor]:
        """Begins to :meth:`read`; see [Note: Reads under way]."""
        self.store.check_open(self.part, self.name)
        return self._begin_on_disk(WEIGHTS, self.dtype)

    def room(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Fresh memory for the content: bytes for the engine, and in the tensor's shape."""
        own = own_memory(self.shape.numel(), dtype)
        return own.view(torch.uint8), own.view(self.shape)

    def on_file(self) -> FileRun | None:
        """See :meth:`WeightSource.on_file`."""
        native = self.part.native
        return None if native is None else FileRun(native.geometry.id, WEIGHTS, self.part.offsets[self.index])

    def write(self, value: Tensor) -> None:
        """Replaces the content."""
        flat = value.to(self.dtype).contiguous().view(-1).view(torch.uint8)
        self.store.write_state(self.part, [(WEIGHTS, self.index, flat)])
