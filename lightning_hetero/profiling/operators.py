"""Records one training batch, operator by operator: seconds, FLOP, memory, saved outputs.

[Note: Nothing is unhookable]
A dispatch mode sees every ATen operator of the batch below autograd, for any caller. Between two
operators there is a gap: Python, and autograd that frees used tensors. Its seconds and its change
of memory are recorded with the next operator. Memory that an operator allocates and frees inside
its kernel is not seen.

[Note: Saved by liveness]
Forward saves the storages that it has made and that still exist when backward begins: storages are
watched until they are freed. So no saved-tensors hook is needed (``torch.func`` refuses to run
under one), and storages that user code keeps count too. Operators of the batch do not make
parameters, so parameters never count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_hetero.runtime.activations import foreign
from lightning_hetero.runtime.activations.autocast import is_half_cast
from lightning_hetero.runtime.activations.names import ParameterAddresses, has_storage, leaves
from lightning_hetero.runtime.device import DeviceWeights
from lightning_hetero.store.live.blocks import Block

_ATEN = torch.ops.aten
# The registry has only the attention kernels of accelerators; those of the CPU begin with the same
# arguments.
_SAME_FLOP = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _ATEN._scaled_dot_product_flash_attention_backward,
}
_QUERY_AT = {_ATEN._scaled_dot_product_flash_attention: 0, _ATEN._scaled_dot_product_flash_attention_backward: 1}


@dataclass(slots=True)
class RecordedStorage:
    """A storage that an operator has made.

    Attributes:
        operator: Number of the operator.
        num_bytes: Its size.
        gradient: Whether it has become a parameter's gradient.
        aside: Whether the runtime moves it or has made it for itself: it is then no working memory
            of compute.
        cast: Whether it is a 16-bit cast of a weight.
    """

    operator: int
    num_bytes: int
    gradient: bool = False
    aside: bool = False
    cast: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOperator:
    """One run of an operator.

    Attributes:
        name: ATen's name, such as ``"addmm"``.
        param: Name of the first parameter that it took, in the block's terms; empty if none.
        start_s: When it began, on the recorder's clock.
        end_s: When it ended.
        flop: FLOP, 0 for operators without a formula in torch.
        events: The number of storages that had been made or freed before it.
        made: Numbers of the storages that it made.
    """

    name: str
    param: str
    start_s: float
    end_s: float
    flop: float
    events: int
    made: tuple[int, ...]


class Addresses(ParameterAddresses):
    """Finds the parameter at an address; parameters have fixed addresses.

    Args:
        blocks: Blocks bound to memory.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__(
            (inner_name(name, block.module_name), param)
            for block in blocks
            for part in block.parts
            for name, param in zip(part.names, part.params, strict=True)
        )


class BoundAddresses:
    """Finds the parameter at an address, for blocks whose memory changes.

    Args:
        weights: The weights on a device.
    """

    def __init__(self, weights: DeviceWeights) -> None:
        self._weights = weights

    def first(self, tensors: Iterable[Tensor]) -> str:
        """The name of the parameter that has the first such tensor; empty if there is none."""
        found = next(filter(None, map(self._weights.reference, tensors)), None)
        return "" if found is None else inner_name(found.part.names[found.index], found.part.block.module_name)


def inner_name(name: str, module: str) -> str:
    """A parameter's name inside its module: ``"attn.weight"`` for ``"layers.3.attn.weight"``."""
    return name.removeprefix(f"{module}.")


class OperatorRecorder(TorchDispatchMode):
    """Records the operators that run while it is active; changes none of them.

    Args:
        addresses: The addresses of the parameters.
        clock: The clock that times blocks, seconds.
        device_type: Type of the device that computes; storages elsewhere do not count.
        kept: Addresses of weights whose casts stay until backward, as other activations do.

    Attributes:
        ran: The operators, in order.
        made: The storages that they have made, in order.
        events: Numbers of storages that were made (``n``) and freed (``~n``), in order.
    """

    def __init__(
        self,
        addresses: Addresses | BoundAddresses,
        clock: Callable[[], float],
        *,
        device_type: str = "cpu",
        kept: Collection[int] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._addresses, self._clock, self._device_type = addresses, clock, device_type
        self.ran: list[RecordedOperator] = []
        self.made: list[RecordedStorage] = []
        self.events: list[int] = []
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}  # a storage's identity -> its number

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled: it counts as one operator, or none."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator and records it."""
        kwargs = kwargs or {}
        events, start = len(self.events), self._clock()
        out: Any = func(*args, **kwargs) if func.namespace == "aten" else foreign.run(func, args, kwargs)
        end = self._clock()
        tensors = [leaf for leaf in leaves((args, kwargs)) if self._has_storage(leaf)]
        given = {leaf.untyped_storage()._cdata for leaf in tensors}
        number = len(self.ran)
        made = tuple(self._note(leaf, number) for leaf in leaves(out) if isinstance(leaf, Tensor) and self._is_new(leaf, given))
        packet, param = func._overloadpacket, self._addresses.first(tensors)
        if made and param and packet is _ATEN._to_copy:
            self.made[made[0]].cast = is_half_cast(args[0], out) and args[0].data_ptr() not in self._kept
        self.ran.append(
            RecordedOperator(
                name=packet.__name__,
                param=param,
                start_s=start,
                end_s=end,
                flop=_flop(packet, args, kwargs, out),
                events=events,
                made=made,
            )
        )
        return out

    def number_of(self, tensor: object) -> int | None:
        """The number of a tensor's storage, if an operator has made it."""
        if not self._has_storage(tensor):
            return None
        known = self._alive.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[0]

    def alive(self) -> frozenset[int]:
        """Numbers of the storages that exist now, without the runtime's own."""
        return frozenset(number for number, _ in self._alive.values() if not self.made[number].aside)

    def is_gradient(self, param: nn.Parameter) -> None:
        """Autograd has accumulated a gradient: its storage is no longer working memory."""
        number = self.number_of(param.grad)
        if number is not None:
            self.made[number].gradient = True

    def set_aside(self, storage: torch.UntypedStorage) -> int | None:
        """The runtime moves a storage, or has made it for itself.

        Returns its number, if an operator has made it.
        """
        known = self._alive.get(storage._cdata)
        if known is None:
            return None
        self.made[known[0]].aside = True
        return known[0]

    def forget(self) -> None:
        """Drops the storages and keeps the record."""
        self._alive.clear()

    def _has_storage(self, leaf: object) -> TypeGuard[Tensor]:
        return has_storage(leaf, self._device_type)

    def _is_new(self, leaf: object, given: set[int]) -> bool:
        if not self._has_storage(leaf):
            return False
        identity = leaf.untyped_storage()._cdata
        return identity not in self._alive and identity not in given

    def _note(self, tensor: Tensor, operator: int) -> int:
        storage, number = tensor.untyped_storage(), len(self.made)
        identity = storage._cdata

        def freed(_: object) -> None:
            if self._alive.pop(identity, None) is not None:
                self.events.append(~number)

        self._alive[identity] = number, weakref.ref(storage, freed)
        self.made.append(RecordedStorage(operator, storage.nbytes()))
        self.events.append(number)
        return number


def live_bytes(
    recorder: OperatorRecorder,
    *,
    only: frozenset[int] | None = None,
    without: frozenset[int] = frozenset(),
    everything: bool = False,
) -> list[int]:
    """Bytes of storages before the first event and after each.

    Args:
        recorder: The recorder.
        only: Count only these storages.
        without: Do not count these.
        everything: Count parameters' gradients and the runtime's storages too.
    """
    totals = [0]
    for event in recorder.events:
        number = event if event >= 0 else ~event
        made = recorder.made[number]
        other = (made.gradient or made.aside or number in without) and not everything
        size = 0 if other or (only is not None and number not in only) else made.num_bytes
        totals.append(totals[-1] + (size if event >= 0 else -size))
    return totals


def storages_in(recorder: OperatorRecorder, tree: Any) -> Iterator[int]:
    """Numbers of the storages in a tree of arguments that operators have made."""
    for leaf in tree_leaves(tree):
        number = recorder.number_of(leaf)
        if number is not None:
            yield number


def _flop(packet: Any, args: Any, kwargs: Any, out: Any) -> float:
    packet = _SAME_FLOP.get(packet, packet)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0.0
    if (at := _QUERY_AT.get(packet)) is not None:  # torch 2.11 needs equal numbers of heads for queries, keys and values
        query, *shared = args[at : at + 3]
        full = (t[:, :1].expand(-1, query.shape[1], -1, -1) for t in shared)
        args = (*args[: at + 1], *full, *args[at + 3 :])
    return float(formula(*args, **kwargs, out_val=out))
