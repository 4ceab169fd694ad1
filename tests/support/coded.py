"""An optimizer whose state is as that of 8-bit optimizers: tensor subclasses, and tensors that are
not floating.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Coded(Tensor):
    """A tensor of codes and scales that looks like a floating one; others may be inside it in
    turn.
    """

    codes: Any
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Any, scale: Tensor, dtype: torch.dtype) -> Coded:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes: Any, scale: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, value: Tensor, *, nested: bool = False) -> Coded:
        scale = value.abs().amax().clamp_min(1e-8).reshape(1) / 127
        codes = (value / scale).round().to(torch.int8)
        inner: Any = cls(codes, torch.ones(2), torch.int8) if nested else codes
        return cls(inner, scale, value.dtype)

    def value(self) -> Tensor:
        codes = self.codes.codes if isinstance(self.codes, Coded) else self.codes
        return codes.float() * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Coded:
        return cls(inner["codes"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            first = args[0]
            kept = (lambda t: func(t)) if func is not torch.ops.aten._to_copy.default else (lambda t: t.clone())
            return cls(kept(first.codes), kept(first.scale), (kwargs or {}).get("dtype") or first.dtype)
        raise NotImplementedError(f"{func} of a {cls.__name__}")


class CodedDescent(torch.optim.Optimizer):
    """Momentum in codes, a mask of signs, and a count for every element."""

    hetero_blockwise = True
    nested = False

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(momentum=self.code(torch.zeros_like(p)), sign=torch.zeros(p.shape, dtype=torch.bool))
                    state.update(count=torch.zeros(p.shape, dtype=torch.int64), turn=torch.tensor(0.0))
                momentum = state["momentum"].value().lerp(p.grad, 0.2)
                state["count"] += state["sign"] != (momentum > 0)
                state["sign"].copy_(momentum > 0)
                state["momentum"] = self.code(momentum)
                state["turn"] += 1
                p.sub_(momentum / (1 + state["count"]), alpha=group["lr"])
        return loss

    def code(self, value: Tensor) -> Tensor:
        return Coded.of(value, nested=self.nested)


class NestedDescent(CodedDescent):
    """As the other, with a subclass in a subclass."""

    nested = True


class Opaque(Tensor):
    """A subclass that does not say what is in it."""


class OpaqueDescent(CodedDescent):
    """Its momentum is of a class that only it knows."""

    def code(self, value: Tensor) -> Any:
        found = value.clone().as_subclass(Opaque)
        found.value = lambda: value  # type: ignore[attr-defined]
        return found
