"""What autograd holds in place of a tensor that a forward saved."""

from __future__ import annotations

import weakref
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_hetero.errors import HeteroError

POISON = 0xFF  # bytes that are NaN in every floating dtype


class ChangedInPlaceError(HeteroError):
    """A tensor that backward needs was changed in place after forward saved it."""


class Packed(Protocol):
    """What a pack hook leaves with autograd."""

    def view(self) -> Tensor:
        """The saved tensor, on the device: what the unpack hook gives to autograd."""


class Saver(Protocol):
    """Who has saved a tensor."""

    @property
    def name(self) -> str:
        """Its name, for errors."""

    def recompute(self) -> None:
        """Brings back the tensors that it has dropped."""


class Layout(NamedTuple):
    """How a tensor lies in its storage: dtype, shape, strides and offset in elements."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """The layout of an ordinary dense tensor."""
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def over(self, storage: torch.UntypedStorage, shift_bytes: int = 0) -> Tensor:
        """A tensor of this layout in another storage, shifted, with its own version counter."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset + shift_bytes // self.dtype.itemsize, self.size, self.stride)

    def span(self) -> tuple[int, int]:
        """First byte in the storage, and the one after the last."""
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True)) if 0 not in self.size else -1
        return self.offset * self.dtype.itemsize, (self.offset + last + 1) * self.dtype.itemsize


class SavedTensor:
    """One saved tensor, wherever its bytes are. Autograd holds it.

    Attributes:
        use: The forward that saved it.
        number: Its place among what that forward has saved.
        layout: How it lies in its storage.
        made_by: The autograd node that made it, to tell whether a recomputation met the same
            tensor; empty for leaves.
        tensor: It, while it is on the device; ``None`` while it is away.
        version: The version counter of ``tensor`` when it was saved.
        home: Its storage, where that may leave.
        changed: It was changed in place before it could leave.
    """

    __slots__ = ("__weakref__", "changed", "home", "layout", "made_by", "number", "tensor", "use", "version")

    def __init__(self, use: Saver, number: int, tensor: Tensor, *, held: bool, home: SavedStorage | None = None) -> None:
        self.use, self.number, self.layout, self.home = use, number, Layout.of(tensor), home
        self.tensor = tensor if held else None
        self.version = tensor._version
        self.made_by = "" if held else maker_of(tensor)
        self.changed = False
        if home is not None:
            home.tensors.append(weakref.ref(self))

    def view(self) -> Tensor:
        """The saved tensor, on the device: brought back or computed again where it has to be.

        Raises:
            ChangedInPlaceError: It is not what was saved any more.
        """
        if self.tensor is None and not self.changed:
            if self.home is not None:
                self.fill(self.home.returned(self.layout))
            else:
                self.use.recompute()
        self.check()
        assert self.tensor is not None, "recomputed"
        return self.tensor

    def fill(self, tensor: Tensor) -> None:
        """It is on the device again."""
        self.tensor, self.version = tensor, tensor._version

    def leave(self) -> None:
        """Its bytes are elsewhere: lets go of them here, unless they are others than were saved."""
        self.changed |= self.is_changed()
        self.tensor = None

    def covers(self, layout: Layout) -> bool:
        """Whether a tensor of this layout lies within the bytes that were moved with this one."""
        if self.home is None or self.home.swap is None:
            return True
        (begin, end), (first, last) = self.home.moved, layout.span()
        return begin <= first and last <= end

    def shift_bytes(self) -> int:
        """The offset of its storage's first byte in the storage of :meth:`view`'s tensor."""
        assert self.tensor is not None, "viewed"
        return (int(self.tensor.storage_offset()) - self.layout.offset) * self.layout.dtype.itemsize

    def is_changed(self) -> bool:
        """Whether it is not what was saved any more."""
        return self.changed or (self.tensor is not None and self.tensor._version != self.version)

    def check(self) -> None:
        """Refuses what was changed, as autograd does."""
        if self.is_changed():
            shape = tuple(self.layout.size)
            raise ChangedInPlaceError(
                f"{self.use.name} saved a tensor {shape} {self.layout.dtype} for backward (its number {self.number}) that was "
                f"changed by an in-place operation afterwards. Use the out-of-place operation, or clone the tensor before."
            )


def maker_of(tensor: Tensor) -> str:
    """The name of the autograd node that made a tensor; empty for leaves and compiled code."""
    return "" if tensor.grad_fn is None else tensor.grad_fn.name()


class Returning(Protocol):
    """A swap, for the storages that it has taken along."""

    def memory(self) -> torch.UntypedStorage:
        """The device memory that holds everything again."""


class SavedStorage:
    """A storage that may leave the device after forward: one for all tensors that lie in it.

    The tensors hold it; it holds what they need to come back.

    Attributes:
        owner: The use whose swap takes it along; ``None``: it stays.
        shared: Several uses have saved it, so it stays: the later ones need it before the owner's
            turn comes.
        to_disk: It goes to the disk.
        tensors: The saved tensors in it.
        swap: The swap that took it along.
        shift_bytes: Where in the swap's device memory its first byte is.
        moved: The bytes of it that the swap took along: the first, and the one after the last.
        raw: These bytes on the device, on their way out.
    """

    __slots__ = ("__weakref__", "_storage", "moved", "owner", "raw", "shared", "shift_bytes", "swap", "tensors", "to_disk")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = weakref.ref(storage)
        self.owner: object | None = None
        self.shared = False
        self.to_disk = False
        self.tensors: list[weakref.ref[SavedTensor]] = []
        self.swap: Returning | None = None
        self.shift_bytes = 0
        self.moved = (0, 0)
        self.raw: Tensor | None = None

    def is_for(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is this very storage, not a later one at the same address."""
        return self._storage() is storage

    def alive(self) -> list[SavedTensor]:
        """The tensors that somebody still needs."""
        return [tensor for tensor in (ref() for ref in self.tensors) if tensor is not None]

    def span(self) -> tuple[int, int]:
        """The first byte of the device tensors, a multiple of 64, and the one after the last."""
        spans = [tensor.layout.span() for tensor in self.alive() if tensor.tensor is not None]
        return (min(begin for begin, _ in spans) // 64 * 64, max(end for _, end in spans)) if spans else (0, 0)

    def stay(self, other: Tensor) -> None:
        """The storage stays on the device, because another use has saved it too.

        Args:
            other: The tensor that the other use saved.
        """
        self.owner, self.shared = None, True
        for tensor in self.alive():
            layout = tensor.layout
            if tensor.tensor is None and (layout.dtype, tensor.version) == (other.dtype, other._version) and not tensor.changed:
                tensor.fill(other.detach().as_strided(layout.size, layout.stride, layout.offset))

    def leave(self, *, poison: bool) -> None:
        """Releases the bytes here: the swap has them. Poison reveals a copy that still runs."""
        raw, self.raw = self.raw, None
        for tensor in self.alive():
            tensor.leave()
        # Nobody but us: the storage's Python object and `raw` are all that refer to it.
        if poison and raw is not None and torch._C._storage_Use_Count(raw.untyped_storage()._cdata) <= 2:
            raw.fill_(POISON)

    def returned(self, layout: Layout) -> Tensor:
        """A tensor of it in the memory that the swap brought back; compute comes after that."""
        assert self.swap is not None, "left"
        return layout.over(self.swap.memory(), self.shift_bytes)
