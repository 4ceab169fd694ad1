"""Gradients that updates have taken during backward: code that uses them is told.

Code that clips, scales or adds to gradients, in a hook or in a loop, would otherwise find none and
go on without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import NoReturn, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_hetero.errors import UnsupportedError
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
        f"the gradient of {name!r} is used before optimizer.step(): its update has begun during backward. In a loop pass "
        f'overlap="forward", where it may read, clip, scale and accumulate gradients; in Lightning\'s Trainer override '
        f"on_after_backward or on_before_optimizer_step, so that updates wait, and use gradients there."
    )


class TakenGradients:
    """The placeholders of one model."""

    def __init__(self) -> None:
        self._known: dict[int, TakenGradient] = {}
        self._placed: list[nn.Parameter] = []

    def place(self, params: Iterable[tuple[str, nn.Parameter]], taken: Set[int]) -> None:
        """Marks the parameters that backward has updated."""
        with torch._C.DisableTorchFunctionSubclass():  # for offloaded parameters these would be calls of Python
            for name, param in params:
                key = id(param)
                if key in taken and param.grad is None:
                    if (placeholder := self._known.get(key)) is None:
                        placeholder = self._known[key] = TakenGradient(param, name)
                    param.grad = placeholder
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
