"""Follows a block's operators: which outputs are saved, and which a recomputation can skip.

[Note: Spared operators]
A recomputation runs the block's forward again. An operator whose outputs backward has anyway,
because all of them were saved and are kept or swapped, is not repeated: its outputs are taken from
there (LoHan eq. 7). Never spared are operators that repeat nothing (no tensor comes in, or a view
goes out), that write in place, and casts, which autocast may or may not have in its cache; nor
outputs that were changed in place before they were saved. Random operators leave the generators as
they left them in forward.

Operators are found again by their order. Where it differs from forward's, as after a cache was
filled, nothing is spared from there on: whatever Python does, what is repeated is right. What
writes to memory behind ATen's back, as a Triton kernel does, is repeated by Python, on top of the
same outputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hetero.ir.plan import Saved
from lightning_hetero.runtime.activations.names import OperatorNames, ParameterAddresses, has_storage, leaves
from lightning_hetero.runtime.activations.random import RandomState
from lightning_hetero.runtime.activations.saved import Layout, SavedTensor

_ATEN = torch.ops.aten
_OURS = frozenset({_ATEN.detach.default, _ATEN.alias.default})  # hooks call them too
_NEVER_SPARED = frozenset({_ATEN._to_copy.default})


@dataclass(slots=True)
class Made:
    """A storage that an operator has made.

    Attributes:
        storage: It, to tell it from a later one at the same address.
        operator: The operator's name.
        saved: The first saved tensor in it whose bytes backward has without recomputation.
    """

    storage: weakref.ref[torch.UntypedStorage]
    operator: str
    saved: weakref.ref[SavedTensor] | None = None


@dataclass(slots=True)
class Ran:
    """One operator of a forward that may be spared.

    Attributes:
        result: Its result, with :class:`Output` in place of tensors.
        random: The state of the generators after it, if it may have used them.
    """

    result: Any
    random: RandomState | None


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor that an operator has returned: its storage and how it lies there."""

    made: Made
    layout: Layout

    def tensor(self) -> Tensor | None:
        """A new tensor over backward's bytes of an output; ``None`` if they are gone or changed."""
        saved = None if self.made.saved is None else self.made.saved()
        if saved is None or saved.is_changed() or not saved.covers(self.layout):
            return None
        return self.layout.over(saved.view().untyped_storage(), saved.shift_bytes())


@dataclass(slots=True)
class Record:
    """The operators of one forward in order, and those that a recomputation may skip."""

    order: list[Any] = field(default_factory=list)
    spared: dict[int, Ran] = field(default_factory=dict)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Active during a block's forward: names the operators and notes what they make.

    Args:
        names: Names the block's operators.
        addresses: Where the block's parameters are.
        policy: What becomes of what an operator saves, by its name.
        device: The device of activations.
        device_type: The type that tensors there say.
        inside: Whether the block itself runs, not a block in it.
        record: Where operators that may be spared are noted; ``None``: nothing is recomputed.
    """

    def __init__(
        self,
        *,
        names: OperatorNames,
        addresses: ParameterAddresses,
        policy: Callable[[str], Saved],
        device: torch.device,
        device_type: str,
        inside: Callable[[], bool],
        record: Record | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._addresses, self._policy, self._inside = names, addresses, policy, inside
        self._device, self._device_type = device, device_type
        self._record = record
        self._made: dict[int, Made] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled: it is one operator to us, or none."""
        return True

    def of(self, storage: torch.UntypedStorage) -> Made | None:
        """The operator that has made a storage, if it is one of the block."""
        made = self._made.get(storage._cdata)
        return made if made is not None and made.storage() is storage else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Runs one operator and notes it."""
        out = func(*args, **(kwargs or {}))
        if func in _OURS or not self._inside():
            return out
        given = [leaf for leaf in leaves((args, kwargs)) if has_storage(leaf, self._device_type)]
        known = {leaf.untyped_storage()._cdata for leaf in given}
        results = [leaf for leaf in leaves(out) if isinstance(leaf, Tensor)]
        fresh = [leaf for leaf in results if self._is_new(leaf, known)]
        name = self._names.name(func._overloadpacket.__name__, self._addresses.first(given), made=bool(fresh))
        outputs = {}
        for leaf in fresh:
            storage = leaf.untyped_storage()
            outputs[id(leaf)] = self._made[storage._cdata] = Made(weakref.ref(storage), name)
        if self._record is not None:
            place = len(self._record.order)
            self._record.order.append(func)
            if fresh and len(fresh) == len(results) and given and self._may_spare(func, name):
                result = _replaced(out, lambda leaf: Output(outputs[id(leaf)], Layout.of(leaf)) if id(leaf) in outputs else leaf)
                self._record.spared[place] = Ran(result, RandomState.now(self._device) if _is_random(func) else None)
        return out

    def _is_new(self, leaf: Tensor, known: set[int]) -> bool:
        if not has_storage(leaf, self._device_type):
            return False
        storage = leaf.untyped_storage()
        return storage._cdata not in known and self.of(storage) is None

    def _may_spare(self, func: Any, name: str) -> bool:
        return self._policy(name) is not Saved.RECOMPUTE and func not in _NEVER_SPARED and not func._schema.is_mutable


class Spare(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Active while a block's forward is repeated: gives the outputs of operators that are spared.

    Args:
        record: The forward's operators.
        inside: Whether the block itself runs, not a block in it.
    """

    def __init__(self, record: Record, *, inside: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record, self._inside, self._place, self._astray = record, inside, 0, False
        self.num_spared = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As :class:`Watch`."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Runs one operator, or gives what it has given before."""
        if self._astray or func in _OURS or not self._inside():
            return func(*args, **(kwargs or {}))
        order = self._record.order
        casts = self._place < len(order) and order[self._place] in _NEVER_SPARED
        while casts and order[self._place] is not func:  # autocast has a cached one now
            self._place += 1
            casts = self._place < len(order) and order[self._place] in _NEVER_SPARED
        if self._place >= len(order) or order[self._place] is not func:
            self._astray = func not in _NEVER_SPARED
            return func(*args, **(kwargs or {}))
        ran = self._record.spared.get(self._place)
        self._place += 1
        if ran is not None:
            tensors = [(leaf, leaf.tensor()) for leaf in leaves(ran.result) if isinstance(leaf, Output)]
            if all(tensor is not None for _, tensor in tensors):
                self.num_spared += 1
                if ran.random is not None:
                    ran.random.restore()
                by_leaf = {id(leaf): tensor for leaf, tensor in tensors}
                return _replaced(ran.result, lambda leaf: by_leaf.get(id(leaf), leaf))
        return func(*args, **(kwargs or {}))


def _replaced(tree: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, tuple | list):
        return type(tree)(_replaced(item, change) for item in tree)
    return change(tree)


def _is_random(func: Any) -> bool:
    """Operators of other libraries do not say whether they are."""
    return torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten"
