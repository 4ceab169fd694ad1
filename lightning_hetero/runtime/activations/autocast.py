"""16-bit casts of weights that autocast makes: they are in memory only while their block is in use.

[Note: Casts of weights]
Under autocast an operator computes with a 16-bit cast of its fp32 weight, and autograd saves the
cast for backward. So a forward would leave the whole model in memory, in 16 bits. For a block whose
weights leave memory between uses, autograd saves a :class:`CastRef` instead. Backward makes the
cast again: the same weight and the same conversion give the same bits.

A cast keeps its memory if its weight has changed since, or is about to be updated: backward needs
the cast of the old weight, as in plain PyTorch. Lightning's autocast has no cache of casts. Where
user code has its own autocast with a cache, the casts in that cache stay in memory until the
outermost autocast context ends.

A dispatch mode sees the casts, because a frozen weight leaves no trace in the graph. On the host
only the saved tensors that are casts get a hook. Hooks on all saved tensors would switch off
autograd's check for changes in place, and would forbid ``torch.func`` inside the block.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor, nn

from lightning_hetero.errors import OffloadedAccessError
from lightning_hetero.runtime.activations import foreign
from lightning_hetero.runtime.activations.names import has_storage, leaves
from lightning_hetero.runtime.activations.operators import OperatorMode
from lightning_hetero.runtime.activations.saved import TensorLayout
from lightning_hetero.runtime.device.references import BoundWeights, WeightRef
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.store.raw_memory import tensor_at
from lightning_hetero.untyped import Operator

SMALL_BYTES = 4096
"""Smaller casts stay: following them costs more than they take."""

_CAST = torch.ops.aten._to_copy.default
_HALF = frozenset({torch.float16, torch.bfloat16})


@dataclass(eq=False, repr=False)
class WeightCasts:
    """The casts of one model's weights.

    Contract: :meth:`enter` and :meth:`leave` surround a forward of a block whose weights leave
    memory between uses. :meth:`drop` comes when a use of a block ends, before its weights leave.
    """

    device_type: str  # the type that tensors report where blocks compute
    # Says which weight a tensor lies in, for an owner that calls :meth:`reference` in hooks on all
    # saved tensors. ``None``: the weights are in host memory, and there are no such hooks.
    weights: Callable[[Tensor], WeightRef | None] | None = None
    blocks: dict[int, BlockCasts] = field(default_factory=dict)  # of each block that has any, by the block's index
    entered: list[tuple[Block, ExitStack]] = field(default_factory=list)  # forwards under way, and what ends each
    on_made: Callable[[torch.UntypedStorage], object] | None = None  # called with the storage of each cast
    on_saved: Callable[[torch.UntypedStorage], object] | None = None  # called with the storage of each that is saved
    _known: weakref.WeakValueDictionary[int, Cast] = field(default_factory=weakref.WeakValueDictionary)  # by storage

    def enter(self, block: Block) -> None:
        """A forward of the block begins under autocast; its weights are in place."""
        if not torch.is_grad_enabled() or _is_compiled(block.spec.module):
            return
        watch, ends = _Watch(self, self.weights or _on_host(block), saves=self.weights is None), ExitStack()
        ends.callback(watch.finish)
        ends.enter_context(watch)
        self.entered.append((block, ends))

    def leave(self, block: Block) -> None:
        """A forward of the block ends, maybe by an exception."""
        if self.entered and self.entered[-1][0] is block:
            self.entered.pop()[1].close()

    def close(self) -> None:
        """Ends the forwards that were left open."""
        while self.entered:
            self.entered.pop()[1].close()

    def note(self, source: WeightRef, tensor: Tensor) -> None:
        """A forward has cast a weight."""
        cast = Cast(self, source, tensor)
        self.blocks.setdefault(source.part.block.index, BlockCasts()).add(cast)
        self.made(cast, tensor.untyped_storage())

    def made(self, cast: Cast, storage: torch.UntypedStorage) -> None:
        """The cast has this storage."""
        self._known[storage._cdata] = cast
        if self.on_made is not None:
            self.on_made(storage)

    def cast_of(self, tensor: object) -> Cast | None:
        """The cast that a tensor lies in; ``None`` for other tensors."""
        if not self._known or not has_storage(tensor, self.device_type) or tensor.dtype not in _HALF:
            return None
        storage = tensor.untyped_storage()
        cast = self._known.get(storage._cdata)
        return cast if cast is not None and cast.is_in(storage) else None

    def reference(self, tensor: Tensor) -> CastRef | None:
        """Replaces a tensor in a cast, for autograd to save; ``None`` for other tensors."""
        cast = self.cast_of(tensor)
        if cast is None or tensor._version or tensor.is_conj() or tensor.is_neg():
            return None
        if self.on_saved is not None:
            self.on_saved(tensor.untyped_storage())
        return CastRef(cast, TensorLayout.of(tensor))

    def drop(self, block: Block) -> None:
        """A use of the block ends: frees the casts of its weights."""
        if self.blocks[block.index].drop():
            del self.blocks[block.index]

    def needed(self, block: Block, *, trained: bool) -> list[Cast]:
        """The casts that backward may need and that have no memory now.

        ``trained``: without those of frozen weights.
        """
        casts = self.blocks[block.index].alive() if block.index in self.blocks else []
        return [cast for cast in casts if not cast.stays and (cast.source.param.requires_grad or not trained)]


class BlockCasts:
    """The casts of one block's weights."""

    def __init__(self) -> None:
        self._filled: list[Cast] = []  # of the use that is under way
        self._alive: weakref.WeakSet[Cast] = weakref.WeakSet()

    def add(self, cast: Cast) -> None:
        """The cast has memory."""
        self._filled.append(cast)
        self._alive.add(cast)

    def alive(self) -> list[Cast]:
        """The casts that autograd has saved, and those of the use that is under way."""
        return list(self._alive)

    def drop(self) -> bool:
        """The use has ended; returns whether no cast is left."""
        while self._filled:
            self._filled.pop().drop()
        return not self._alive


class Cast:
    """One cast of a weight, or of a view of one. Autograd's saved tensors hold it."""

    __slots__ = ("__weakref__", "_casts", "_held", "_layout", "_num_bytes", "_storage", "source", "stays")

    def __init__(self, casts: WeightCasts, source: WeightRef, tensor: Tensor) -> None:
        self.source, self.stays = source, False
        self._casts, self._layout = casts, TensorLayout.of(tensor)
        self._held: torch.UntypedStorage | None = tensor.untyped_storage()  # in use
        self._storage = weakref.ref(self._held)
        self._num_bytes = self._held.nbytes()

    def is_in(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is in this very storage, not in an earlier one at the same address."""
        return self._storage() is storage

    def content(self) -> torch.UntypedStorage:
        """Its storage, made again if it was dropped.

        Raises:
            OffloadedAccessError: The weight is not in memory.
            RuntimeError: The weight was changed in place since.
        """
        if self._held is None:
            self._held = self._storage() or self._made_again()
            self._casts.blocks.setdefault(self.source.part.block.index, BlockCasts()).add(self)
        return self._held

    def _made_again(self) -> torch.UntypedStorage:
        weight = self.source.view()
        storage = torch.empty(self._num_bytes, dtype=torch.uint8, device=weight.device).untyped_storage()
        with torch.no_grad():
            self._layout.over(storage).copy_(weight)
        self._storage = weakref.ref(storage)
        self._casts.made(self, storage)
        return storage

    def drop(self) -> None:
        """Gives its memory back, unless the weight has changed since."""
        self.stays |= self.source.param._version != self.source.version
        if not self.stays:
            self._held = None

    def stay(self) -> None:
        """It keeps its memory from now on; raises as :meth:`content`."""
        self.content()
        self.stays = True


@dataclass(frozen=True, slots=True)
class CastRef:
    """Stands for a cast among autograd's saved tensors."""

    cast: Cast
    layout: TensorLayout  # how the saved tensor lies in its storage

    def view(self) -> Tensor:
        """The saved tensor; raises as :meth:`Cast.content`."""
        return self.layout.over(self.cast.content())


class _Watch(OperatorMode):
    """Active during a block's forward: sees casts of its weights, and operators that use them.

    ``saves``: it replaces casts that operators have saved, unless hooks of the user handle these.
    """

    supports_higher_order_operators = True

    def __init__(self, casts: WeightCasts, weights: Callable[[Tensor], WeightRef | None], *, saves: bool) -> None:
        super().__init__()
        self._casts, self._weights, self._saves = casts, weights, saves
        self._last: object = None  # the result of the last operator, if that took a cast

    def __torch_dispatch__(
        self, func: Operator, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if self._last is not None:
            self.finish()
        made = func(*args, **(kwargs or {})) if func.namespace == "aten" else foreign.run(func, args, kwargs or {})
        if func is _CAST:
            weight = args[0]
            if isinstance(weight, Tensor) and isinstance(made, Tensor) and is_half_cast(weight, made):
                source = self._weights(weight)
                if source is not None and source.part.block.uses:
                    self._casts.note(source, made)
        elif self._saves and not is_followed() and any(self._casts.cast_of(arg) is not None for arg in args):
            self._last = made
        return made

    def finish(self) -> None:
        """Replaces the casts that the last operator's node, now in the graph, has saved."""
        last, self._last = self._last, None
        node = next((leaf.grad_fn for leaf in leaves(last) if isinstance(leaf, Tensor)), None)
        for saved, raw in () if node is None else _saved_by(type(node)):
            tensor = getattr(node, saved)
            ref = self._casts.reference(tensor) if isinstance(tensor, Tensor) else None
            if ref is not None:
                getattr(node, raw).register_hooks(partial(_in_place_of, ref), _view)


def is_followed() -> bool:
    """Whether hooks handle saved tensors, such as those of activation checkpointing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@cache
def _saved_by(node_type: type) -> tuple[tuple[str, str], ...]:
    """The names of an autograd node's saved tensors, and of the objects that save them.

    Nodes of ``torch.autograd.Function`` have none: their saved tensors belong to user code.

    Source: PyTorch, docs/source/notes/autograd.rst, "Hooks for saved tensors".
    """
    known = set(dir(node_type))
    raw = [name for name in known if name.startswith("_raw_saved_")]
    return tuple((saved, name) for name in sorted(raw) if (saved := name.removeprefix("_raw")) in known)


def is_half_cast(weight: Tensor, made: Tensor) -> bool:
    """Whether one tensor is a large 16-bit cast of the other on the same device."""
    if type(weight) not in (Tensor, nn.Parameter) or type(made) is not Tensor:
        return False
    plain = made.layout is weight.layout is torch.strided and made.device == weight.device
    return plain and made.dtype in _HALF and weight.dtype not in _HALF and made.nbytes >= SMALL_BYTES


def _is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` runs the module: its casts are part of the compiled code."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def _on_host(block: Block) -> Callable[[Tensor], WeightRef | None]:
    """Finds the weights of a block in host memory, where they have a fixed address."""
    weights = BoundWeights(torch.device("cpu"), _host_bytes)
    for part in block.parts:
        weights.add(part, tensor_at(part.arena, part.arena.address, part.num_elements * part.dtype.itemsize, torch.uint8))
    return weights.reference


def _host_bytes(part: Part, index: int) -> Tensor:
    """The bytes from a parameter's first one on, while its block is in use."""
    if not part.block.uses or not part.block.resident:
        raise OffloadedAccessError(
            f"the weights of {part.names[index]!r} are on disk, and backward needs them while their block is closed. Return all "
            f"tensors that reach the loss from the block's forward, or use the graph within `with strategy.materialize(...)`."
        )
    first = part.offsets[index] * part.dtype.itemsize
    return tensor_at(part.arena, part.arena.address + first, part.num_elements * part.dtype.itemsize - first, torch.uint8)


def _in_place_of(ref: CastRef, saved: Tensor) -> CastRef:
    return ref


def _view(ref: CastRef) -> Tensor:
    return ref.view()
