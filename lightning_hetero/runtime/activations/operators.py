"""Follows a block's operators: which outputs are saved, and which a recomputation can skip.

[Note: Spared operators]
A recomputation runs the block's forward again. If backward has all outputs of an operator, because
they were saved and are kept or swapped, the operator is not repeated: its outputs are taken from
there (LoHan eq. 7). Some operators are never spared: those that take no tensor, return a view or
write in place; casts, because autocast may have them in its cache or not; and those whose outputs
were changed in place before they were saved. Random operators leave the generators in the state
that forward left.

A recomputation finds operators by their order. If the order differs from forward's, as after a
cache was filled, nothing is spared from there on, so repeated results are always right. Writes that
ATen does not see, such as those of a Triton kernel, are repeated on top of the same outputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hetero.ir.plan import Saved
from lightning_hetero.runtime.activations import foreign
from lightning_hetero.runtime.activations.names import OperatorNames, ParameterAddresses, has_storage, leaves
from lightning_hetero.runtime.activations.saved import SavedTensor, TensorLayout
from lightning_hetero.untyped import Operator

_ATEN = torch.ops.aten
_OURS = frozenset({_ATEN.detach.default, _ATEN.alias.default})  # hooks call them too
_NEVER_SPARED = frozenset({_ATEN._to_copy.default})


@dataclass(frozen=True, slots=True)
class RandomState:
    """The generators of the CPU and of the device."""

    device: torch.device  # the device; the CPU has only its own generator
    cpu: Tensor  # state of the CPU's generator
    own: Tensor | None  # state of the device's; ``None`` for the CPU

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """The state of the generators now."""
        own = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return cls(device, torch.get_rng_state(), own)

    def restore(self) -> None:
        """Sets the generators to this state."""
        torch.set_rng_state(self.cpu)
        if self.own is not None:
            torch.get_device_module(self.device).set_rng_state(self.own, self.device)

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Continues from this state, and afterwards from where the generators were before."""
        before = RandomState.now(self.device)
        self.restore()
        try:
            yield
        finally:
            before.restore()


class OperatorMode(TorchDispatchMode):
    """Sees every operator while it is entered. Compiled code stays compiled."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code is one operator to us, or none."""
        return True


@dataclass(slots=True)
class Made:
    """A storage that an operator has made."""

    storage: weakref.ref[torch.UntypedStorage]  # to tell it from a later one at the same address
    operator: str
    saved: weakref.ref[SavedTensor] | None = None  # the first one in it whose bytes backward has without recomputation


@dataclass(slots=True)
class Ran:
    """One operator of a forward that may be spared."""

    result: object  # with :class:`Output` in place of tensors
    random: RandomState | None  # the generators after it, if it may have used them


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor that an operator has returned: its storage and how it lies there."""

    made: Made
    layout: TensorLayout

    def tensor(self) -> Tensor | None:
        """A new tensor over backward's bytes of an output; ``None`` if they are gone or changed."""
        saved = None if self.made.saved is None else self.made.saved()
        if saved is None or saved.is_changed() or not saved.covers(self.layout):
            return None
        found = saved.view()  # its storage may begin elsewhere than that of forward
        shift = (int(found.storage_offset()) - saved.layout.offset) * saved.layout.dtype.itemsize
        return self.layout.over(found.untyped_storage(), shift)


@dataclass(slots=True)
class ForwardRecord:
    """The operators of one forward in order, and those that a recomputation may skip."""

    order: list[Operator] = field(default_factory=list)
    spared: dict[int, Ran] = field(default_factory=dict)


class Watch(OperatorMode):
    """Active during a block's forward: names the operators and notes what they make.

    ``inside`` says whether the block itself runs, not a block in it. Operators that may be spared
    are noted in ``record``; without one nothing is recomputed.
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
        record: ForwardRecord | None,
    ) -> None:
        super().__init__()
        self._names, self._addresses, self._policy, self._inside = names, addresses, policy, inside
        self._device, self._device_type = device, device_type
        self._record = record
        self._made: dict[int, Made] = {}

    def of(self, storage: torch.UntypedStorage) -> Made | None:
        """The operator of the block that has made a storage, if any."""
        made = self._made.get(storage._cdata)
        return made if made is not None and made.storage() is storage else None

    def __torch_dispatch__(
        self, func: Operator, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        out = func(*args, **(kwargs or {})) if func.namespace == "aten" else foreign.run(func, args, kwargs or {})
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
                result = _replaced(
                    out, lambda leaf: Output(outputs[id(leaf)], TensorLayout.of(leaf)) if isinstance(leaf, Tensor) else leaf
                )
                self._record.spared[place] = Ran(result, RandomState.now(self._device) if _is_random(func) else None)
        return out

    def _is_new(self, leaf: Tensor, known: set[int]) -> bool:
        if not has_storage(leaf, self._device_type):
            return False
        storage = leaf.untyped_storage()
        return storage._cdata not in known and self.of(storage) is None

    def _may_spare(self, func: Operator, name: str) -> bool:
        return self._policy(name) is not Saved.RECOMPUTE and func not in _NEVER_SPARED and not func._schema.is_mutable


class Spare(OperatorMode):
    """Active while a forward is repeated: returns the outputs of operators that are spared."""

    def __init__(self, record: ForwardRecord, *, inside: Callable[[], bool]) -> None:
        super().__init__()
        self._record, self._inside, self._place, self._astray = record, inside, 0, False

    @staticmethod
    def _run(func: Operator, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        return func(*args, **kwargs) if func.namespace == "aten" else foreign.run(func, args, kwargs)

    def __torch_dispatch__(
        self, func: Operator, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if self._astray or func in _OURS or not self._inside():
            return self._run(func, args, kwargs or {})
        order = self._record.order
        while self._place < len(order) and order[self._place] is not func and order[self._place] in _NEVER_SPARED:
            self._place += 1  # autocast has this cast in its cache now
        if self._place >= len(order) or order[self._place] is not func:
            self._astray = func not in _NEVER_SPARED
            return self._run(func, args, kwargs or {})
        ran = self._record.spared.get(self._place)
        self._place += 1
        if ran is not None:
            tensors = {id(leaf): leaf.tensor() for leaf in leaves(ran.result) if isinstance(leaf, Output)}
            if all(tensor is not None for tensor in tensors.values()):
                if ran.random is not None:
                    ran.random.restore()
                return _replaced(ran.result, lambda leaf: tensors.get(id(leaf), leaf))
        return self._run(func, args, kwargs or {})


def _replaced(tree: object, change: Callable[[object], object]) -> object:
    if isinstance(tree, tuple | list):
        return type(tree)(_replaced(item, change) for item in tree)
    return change(tree)


def _is_random(func: Operator) -> bool:
    """Operators of other libraries do not say whether they are."""
    return torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten"
