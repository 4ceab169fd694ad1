"""What a loop may not do with gradients while updates run beside it, noticed.

[Note: Gradients of running updates]
With ``overlap="backward"`` the engine takes gradients during backward. Until ``step()`` the
parameters then hold a :class:`TakenGradient`, which raises when an operator needs its values: code
that clips, scales or adds to gradients would otherwise find none and go on without them. With
``overlap="forward"`` gradients stay while updates read them. A loop that writes them in place in
the meantime changes the update, sometimes. Autograd counts such writes, so the next backward
notices them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NoReturn, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.handles.offloaded_tensor import contents_of
from lightning_hetero.runtime.device.host_gradient import HostGradient
from lightning_hetero.untyped import Value


class TakenGradient(Tensor):
    """In place of a gradient that an update has taken: the same shape, without values."""

    of: str  # the parameter's name

    @staticmethod
    def __new__(cls, param: nn.Parameter, name: str) -> Self:
        """Makes the one of ``param``, whose qualified name is ``name``."""
        self: Self = Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device, requires_grad=False
        )
        self.of = name
        return self

    # `Value` because torch's stubs declare neither as a class method.
    __torch_function__: Value = torch._C._disabled_torch_function_impl  # operators are seen one level below
    __torch_dispatch__: Value = classmethod(lambda cls, *call: _refuse(call))

    def _describe(self) -> str:
        return f"TakenGradient({tuple(self.shape)}, {self.dtype}, {self.of!r})"

    __repr__: Value = _describe  # mypy accepts no override of torch's signature


def _refuse(call: tuple[Value, ...]) -> NoReturn:
    name = next((one.of for one in tree_leaves(call[2:]) if isinstance(one, TakenGradient)), "a parameter")
    raise UnsupportedError(
        f'overlap="backward", and the gradient of {name!r} is used before optimizer.step(): its update has begun during backward. '
        f'Pass overlap="forward", where the loop may read, clip, scale and accumulate gradients.'
    )


class TakenGradients:
    """The placeholders of one model."""

    def __init__(self) -> None:
        self._known: dict[int, TakenGradient] = {}
        self._placed: list[nn.Parameter] = []

    def place(self, params: Iterable[tuple[str, nn.Parameter]], taken: frozenset[int]) -> None:
        """A backward has ended: marks the parameters that it has updated."""
        with torch._C.DisableTorchFunctionSubclass():  # for offloaded parameters these would be calls of Python
            for name, param in params:
                if id(param) in taken and param.grad is None:
                    if id(param) not in self._known:
                        self._known[id(param)] = TakenGradient(param, name)
                    param.grad = self._known[id(param)]
                    self._placed.append(param)

    def clear(self) -> list[str]:
        """Parameters have no gradients again. Returns the names of those whose gradient was set."""
        placed, self._placed, changed = self._placed, [], []
        with torch._C.DisableTorchFunctionSubclass():
            for param in placed:
                if type(param.grad) is TakenGradient:
                    param.grad = None
                else:
                    changed.append(self._known[id(param)].of)
        return changed


def taken_gradients(params: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
    """The run ends: takes gradients of a device from their parameters, as tensors of the CPU."""
    found = []
    with torch._C.DisableTorchFunctionSubclass():  # for offloaded parameters these would be calls of Python
        for param in params:
            if isinstance(param.grad, HostGradient):
                found.append((param, contents_of(param.grad)))
            elif param.grad is not None and param.grad.device.type != "cpu":
                found.append((param, param.grad.cpu()))
        for param, _ in found:
            param.grad = None
    return found


class GradientsInUse:
    """Gradients that updates read while the loop goes on."""

    def __init__(self) -> None:
        self._read: list[tuple[str, nn.Parameter, weakref.ref[Tensor], int]] = []

    def stepped(self, params: Iterable[tuple[str, nn.Parameter]]) -> None:
        """A step has given these parameters' updates to the engine."""
        with torch._C.DisableTorchFunctionSubclass():  # for offloaded parameters these would be calls of Python
            self._read += [(name, p, weakref.ref(p.grad), p.grad._version) for name, p in params if p.grad is not None]

    def check(self, *, running: bool) -> None:
        """Before gradients are written again, by backward; ``running``: nothing has waited since.

        Raises:
            UnsupportedError: The loop has written one of them in place.
        """
        read, self._read = self._read, []
        if not running:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for name, param, before, version in read:
                grad = param.grad
                if grad is not None and grad is before() and grad._version != version:
                    raise UnsupportedError(
                        f'overlap="forward", and the gradient of {name!r} was written in place after optimizer.step(), while its '
                        f'update may have read it. Use optimizer.zero_grad(), or pass overlap="none".'
                    )
