"""One gradient in host memory, and the tensor that represents it as ``param.grad``.

See [Note: Gradients on the host] in ``gradients``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_hetero._native import Ticket
from lightning_hetero.errors import HeteroError
from lightning_hetero.handles.offloaded_tensor import OffloadedTensor, Source
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.untyped import Operator, Options, Value, Values


@dataclass(eq=False, slots=True)
class Buffer:
    """One part's gradients of one dtype."""

    memory: Tensor
    holds: int = 0  # their number
    readers: list[Ticket] = field(default_factory=list)  # updates that may still read them


@dataclass(eq=False, slots=True)
class Held:
    """One parameter's gradient."""

    part: Part
    index: int  # the parameter's position in it
    param: nn.Parameter
    dtype: torch.dtype
    # Its order and its norm, computed on the device; ``None`` once the gradient changes.
    norm: tuple[float, Tensor] | None = None
    buffer: Buffer | None = None  # ``None`` until the gradient arrives
    exposed: bool = False  # ``param.grad`` has shown it since the last backward
    claimed: bool = False  # an update that keeps it has been issued, but does not have it yet
    dropped: bool = False  # it was dropped meanwhile, so that its memory belongs to that update

    def arrived(self) -> Buffer:
        """The buffer that has the gradient once its GRAD has ended.

        Raises:
            HeteroError: It has not.
        """
        if self.buffer is None:
            raise HeteroError(f"the gradient of {self.part.names[self.index]!r} was read before its GRAD had ended.")
        return self.buffer

    def value(self) -> Tensor:
        """The gradient in host memory."""
        return self.part.shaped(self.index, run_of(self.part, self.index, self.arrived().memory.view(self.dtype)))


class Gradient(Source, Protocol):
    """A gradient in host memory, or the elements of it that this process has."""

    def live(self) -> Tensor:
        """The memory itself; clipping and loss scaling change it in place."""

    def norm(self, order: float) -> Tensor:
        """The norm of the whole gradient."""

    def changed(self) -> None:
        """The content has changed."""

    def anywhere(self, found: Tensor) -> Tensor:
        """What any process has found in its gradients, where each has found a number."""


class GradientSource:
    """A held gradient as a handle reads and writes it (``handles.offloaded_tensor.Source``)."""

    address = None  # it may not have arrived yet

    def __init__(self, held: Held, wait: Callable[[Block], None]) -> None:
        self.held, self._wait = held, wait
        self.name = f"{held.part.names[held.index]}.grad"
        self.shape, self.dtype = held.param.shape, held.dtype

    def live(self) -> Tensor:
        """The host memory itself, once the gradient is there."""
        self._wait(self.held.part.block)
        return self.held.value()

    def norm(self, order: float) -> Tensor:
        """The norm that the device computed, or that of the gradient in host memory."""
        if (known := self.held.norm) is not None and known[0] == order:
            return known[1].clone()
        norm: Tensor = torch.linalg.vector_norm(self.live(), order)
        return norm.to(self.held.param.device)

    def read(self) -> Tensor:
        """A fresh tensor with the gradient."""
        return torch.empty_strided(self.shape, self.held.param.stride(), dtype=self.dtype).copy_(self.live())

    def write(self, value: Tensor) -> None:
        """Replaces the gradient."""
        self.live().copy_(value)
        self.changed()

    def changed(self) -> None:
        """The content has changed."""
        self.held.norm = None

    def anywhere(self, found: Tensor) -> Tensor:
        """What was found: this process has all of the gradients."""
        return found


class HostGradient(OffloadedTensor):
    """``param.grad`` while the gradient is in host memory; see [Note: Gradients on the host].

    It reports the parameter's device. Clipping and loss scaling run in host memory; other operators
    see a copy on the device.
    """

    source: Gradient

    @classmethod
    def _act(cls, func: Operator, types: Sequence[type], args: Values = (), kwargs: Options | None = None) -> Value:
        aten = torch.ops.aten
        first: Value = args[0] if args else None
        some = list(first) if isinstance(first, (list, tuple)) else [first]
        plain = not kwargs and not any(isinstance(a, OffloadedTensor) for a in args[1:])
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            return _unscale(*args)
        if plain and all(isinstance(g, HostGradient) for g in some):
            if func is aten.linalg_vector_norm.default and len(args) <= 2:
                return _norm(*args)
            if func is aten._foreach_norm.Scalar:
                return [_norm(gradient, *args[1:]) for gradient in some]
            if func in _host_functions():
                lives = [gradient.source.live() for gradient in some]
                for gradient in some:
                    gradient.source.changed()
                others = [a.cpu() if isinstance(a, Tensor) else a for a in args[1:]]
                if first is not some[0]:
                    return func(lives, *others)
                func(lives[0], *others)
                return first
        return OffloadedTensor.__torch_dispatch__(func, types, args, kwargs)

    __torch_dispatch__: Value = _act


@cache
def _host_functions() -> frozenset[Operator]:
    """In-place functions of clipping, averaging and ``zero_grad``, for one and for many."""
    aten = torch.ops.aten
    of_one = [aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar, aten.zero_.default, aten.clamp_.default]
    of_many = [aten._foreach_mul_.Tensor, aten._foreach_mul_.Scalar, aten._foreach_div_.Tensor, aten._foreach_div_.Scalar]
    of_many += [aten._foreach_clamp_min_.Scalar, aten._foreach_clamp_max_.Scalar, aten._foreach_zero_.default]
    return frozenset(of_one + of_many)


def _norm(gradient: HostGradient, order: float = 2.0) -> Tensor:
    return gradient.source.norm(float(order))


def _unscale(gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """``GradScaler``'s pass: scales gradients, and sets ``found_inf`` if one is not finite."""
    here = [g.source for g in gradients if isinstance(g, HostGradient)]
    others = [g for g in gradients if not isinstance(g, HostGradient)]
    if others:
        torch._amp_foreach_non_finite_check_and_unscale_(others, found_inf, inverse_scale)
    found, inverse = torch.zeros_like(found_inf, device="cpu"), inverse_scale.cpu()
    torch._amp_foreach_non_finite_check_and_unscale_([source.live() for source in here], found, inverse)
    found = here[0].anywhere(found)
    found_inf.copy_(torch.maximum(found_inf, found.to(found_inf.device)))
    if float(inverse) != 1.0:
        for source in here:
            source.changed()


def run_of(part: Part, index: int, flat: Tensor) -> Tensor:
    """Parameter ``index``'s run of a flat tensor with the part's layout."""
    start = part.offsets[index]
    return flat[start : start + part.layouts[index].numel]
