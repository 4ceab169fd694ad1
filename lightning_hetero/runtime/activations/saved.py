"""What autograd holds in place of a tensor that a forward saved."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_hetero.errors import HeteroError
from lightning_hetero.lanes.memory import ALIGNMENT_BYTES, POISON


class ChangedInPlaceError(HeteroError):
    """A tensor that backward needs was changed in place after forward saved it."""


class Packed(Protocol):
    """What a pack hook leaves with autograd."""

    def view(self) -> Tensor:
        """The saved tensor, on the device: the unpack hook gives it to autograd."""


class TensorLayout(NamedTuple):
    """How a tensor lies in its storage: dtype, shape, strides and offset in elements."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLayout:
        """The layout of an ordinary dense tensor."""
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def over(self, storage: torch.UntypedStorage, shift_bytes: int = 0) -> Tensor:
        """A tensor of this layout in another storage, shifted, with its own version counter."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset + shift_bytes // self.dtype.itemsize, self.size, self.stride)

    def span(self) -> tuple[int, int]:
        """The first byte in the storage, and the one after the last."""
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True)) if 0 not in self.size else -1
        return self.offset * self.dtype.itemsize, (self.offset + last + 1) * self.dtype.itemsize


class StayingTensor:
    """A saved tensor that nothing moves, drops or shares: as if autograd had kept it itself."""

    __slots__ = ("_name", "_number", "_tensor", "_version")

    def __init__(self, name: str, number: int, tensor: Tensor) -> None:
        self._name, self._number = name, number  # as for :class:`SavedTensor`
        self._tensor, self._version = tensor, tensor._version

    def view(self) -> Tensor:
        """The saved tensor; raises as :meth:`SavedTensor.view` does."""
        if self._tensor._version != self._version:
            raise _changed(self._name, self._number, self._tensor.size(), self._tensor.dtype)
        return self._tensor


def _changed(name: str, number: int, size: torch.Size, dtype: torch.dtype) -> ChangedInPlaceError:
    return ChangedInPlaceError(
        f"{name} saved a tensor {tuple(size)} {dtype} for backward (its number {number}) that was changed by an in-place operation "
        f"afterwards. Use the out-of-place operation, or clone the tensor before."
    )


class SavedTensor:
    """One saved tensor, wherever its bytes are. Autograd holds it."""

    __slots__ = ("__weakref__", "_layout", "changed", "home", "made_by", "name", "number", "recompute", "tensor", "version")

    def __init__(
        self,
        recompute: Callable[[], None] | None,
        name: str,
        number: int,
        tensor: Tensor,
        *,
        dropped: bool,
        home: SavedStorage | None = None,
    ) -> None:
        self.recompute = recompute  # of the forward that saved it; ``None`` for an argument of a forward
        self.name = name  # of that forward or argument, for errors
        self.number = number  # its place among the tensors that the forward has saved
        self._layout = TensorLayout.of(tensor) if dropped or home is not None else tensor  # one that stays has its own
        self.home = home  # its storage, if that may leave the device
        self.tensor = None if dropped else tensor  # ``None`` while it is away
        self.version = tensor._version  # the version counter of ``tensor`` when it was saved
        # The autograd node that made it, to tell whether a recomputation met the same tensor; empty
        # for leaves.
        self.made_by = maker_of(tensor) if dropped else ""
        self.changed = False  # it was changed in place before it could leave
        if home is not None:
            home.tensors.append(weakref.ref(self))

    @property
    def layout(self) -> TensorLayout:
        """How it lies in its storage."""
        return TensorLayout.of(self._layout) if isinstance(self._layout, Tensor) else self._layout

    def view(self) -> Tensor:
        """The saved tensor, on the device: brought back or computed again if necessary.

        Raises:
            ChangedInPlaceError: It was changed since, as autograd itself would raise.
        """
        if self.tensor is None and not self.changed:
            if self.home is not None:
                self.fill(self.home.returned(self.layout))
            elif self.recompute is not None:
                self.recompute()
        if self.tensor is None or self.is_changed():
            raise _changed(self.name, self.number, self.layout.size, self.layout.dtype)
        return self.tensor

    def fill(self, tensor: Tensor) -> None:
        """It is on the device again."""
        self.tensor, self.version = tensor, tensor._version

    def leave(self) -> None:
        """Its bytes are elsewhere: releases those on the device, unless they were changed."""
        self.changed |= self.is_changed()
        self.tensor = None

    def covers(self, layout: TensorLayout) -> bool:
        """Whether a tensor of this layout lies within the bytes that were moved with this one."""
        if self.home is None or self.home.swap is None:
            return True
        (begin, end), (first, last) = self.home.moved, layout.span()
        return begin <= first and last <= end

    def is_changed(self) -> bool:
        """Whether it was changed in place since it was saved."""
        return self.changed or (self.tensor is not None and self.tensor._version != self.version)


def maker_of(tensor: Tensor) -> str:
    """The name of the autograd node that made a tensor; empty for leaves and compiled code."""
    return "" if tensor.grad_fn is None else tensor.grad_fn.name()


class Returning(Protocol):
    """A swap, as the storages that it moves see it."""

    def memory(self) -> torch.UntypedStorage:
        """The device memory that holds everything again."""


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class SavedStorage:
    """A storage that may leave the device after forward: one for all tensors that lie in it.

    The tensors hold it; it holds what they need to come back.
    """

    storage: weakref.ref[torch.UntypedStorage]
    owner: object | None = None  # a key of the use whose swap moves it; ``None``: it stays
    shared: bool = False  # several uses have saved it. It stays, because the later ones need it first
    to_disk: bool = False
    tensors: list[weakref.ref[SavedTensor]] = field(default_factory=list)  # that lie in it
    swap: Returning | None = None  # that moved it
    shift_bytes: int = 0  # where its first byte is in the swap's device memory
    moved: tuple[int, int] = (0, 0)  # the bytes of it that the swap moved: the first, and the one after the last
    raw: Tensor | None = None  # these bytes on the device, on their way out

    def is_for(self, storage: torch.UntypedStorage) -> bool:
        """Whether it describes this very storage, not an earlier one at the same address."""
        return self.storage() is storage

    def alive(self) -> list[SavedTensor]:
        """The tensors that somebody still needs."""
        return [tensor for tensor in (ref() for ref in self.tensors) if tensor is not None]

    def span(self) -> tuple[int, int]:
        """The first byte of the device tensors, rounded down to whole alignments, and the end."""
        spans = [tensor.layout.span() for tensor in self.alive() if tensor.tensor is not None]
        if not spans:
            return 0, 0
        first = min(begin for begin, _ in spans)
        return first - first % ALIGNMENT_BYTES, max(end for _, end in spans)

    def stay(self, other: Tensor) -> None:
        """The storage stays on the device, because another use has saved it too, by ``other``."""
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
        # If nobody else uses the storage, only its Python object and `raw` refer to it.
        if poison and raw is not None and torch._C._storage_Use_Count(raw.untyped_storage()._cdata) <= 2:
            raw.fill_(POISON)

    def returned(self, layout: TensorLayout) -> Tensor:
        """A tensor of it in the memory that the swap brought back; compute waits for that."""
        if self.swap is None:
            raise HeteroError("a saved tensor has left the device without a swap; this is a bug.")
        return layout.over(self.swap.memory(), self.shift_bytes)
