"""State that an optimizer gives parameters as it is made, such as ``torch.optim.Adagrad``.

[Note: Early state]
Such state has one value everywhere, and nothing reads it while its parameter is frozen. So while
optimizers are made, functions that fill a tensor like a frozen parameter return a handle that takes
no memory. When the parameter begins to train, an ordinary tensor takes its place. Records and blobs
leave early state out, because making the optimizer gives it again. Like a 16-bit parameter they
fill fp32 tensors, because the optimizer updates its fp32 master.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_hetero.handles.offloaded_parameter import materialize
from lightning_hetero.handles.offloaded_tensor import OffloadedTensor
from lightning_hetero.optim.adam import MASTERED
from lightning_hetero.untyped import Function, Options, Value, Values

_FILLS = (torch.zeros_like, torch.ones_like, torch.full_like)
_ELSEWHERE = {"device", "layout", "requires_grad"}  # the result of these is not like the parameter


class _Filled:
    """The source of a tensor with one value everywhere, until something writes to it."""

    name = "optimizer state of a frozen parameter"
    address = None

    def __init__(self, fill: Function) -> None:
        outcome: Tensor = fill(device="meta")
        self.shape, self.dtype, self.stride = outcome.shape, outcome.dtype, outcome.stride()
        self._fill = fill
        self._content: Tensor | None = None

    @property
    def is_written(self) -> bool:
        """Whether it has a content of its own."""
        return self._content is not None

    def read(self) -> Tensor:
        """A fresh tensor."""
        content: Tensor = self._fill(device="cpu") if self._content is None else self._content.clone()
        return content

    def write(self, value: Tensor) -> None:
        """From now on the content is a copy of ``value``."""
        self._content = self.read().copy_(value)


class _Fills(TorchFunctionMode):
    """Fills tensors like the masters of 16-bit parameters; like frozen ones it makes handles."""

    def __init__(self, frozen: Collection[int], sixteen_bit: Collection[int]) -> None:
        super().__init__()
        self._frozen, self._sixteen_bit = frozen, sixteen_bit

    def __torch_function__(self, func: Function, types: object, args: Values = (), kwargs: Options | None = None) -> Value:
        kwargs = kwargs or {}
        if func in _FILLS and args and id(args[0]) in self._sixteen_bit:
            kwargs = {"dtype": torch.float32, **kwargs}
        if func not in _FILLS or not args or id(args[0]) not in self._frozen or _ELSEWHERE & kwargs.keys():
            return func(*args, **kwargs)
        param = args[0]
        like = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
        source = _Filled(partial(func, like, *args[1:], **kwargs))
        return OffloadedTensor(source, stride=source.stride, device=param.device)


@contextmanager
def observed(module: nn.Module) -> Iterator[None]:
    """Optimizers are made in the context; see [Note: Early state]."""
    frozen = {id(p) for p in module.parameters() if not p.requires_grad}
    with _Fills(frozen, {id(p) for p in module.parameters() if p.dtype in MASTERED}):
        yield


def is_filled(value: object) -> bool:
    """Whether a tensor is a handle that has one value everywhere."""
    return isinstance(value, OffloadedTensor) and isinstance(value.source, _Filled) and not value.source.is_written


def is_early(state: Mapping[str, object]) -> bool:
    """Whether a parameter's state is as the optimizer was made with it, for a frozen parameter."""
    return any(map(is_filled, state.values()))


def fill(state: Options) -> None:
    """Makes ordinary tensors of early state: the parameter begins to train."""
    for key, value in state.items():
        if isinstance(value, OffloadedTensor) and isinstance(value.source, _Filled):
            state[key] = materialize(value)


def without_early(state_dict: Options, optimizer: Optimizer) -> tuple[Options, dict[Tensor, Options]]:
    """Splits early state off a state dict that the optimizer is about to load.

    Returns the rest, and the state of the parameters for which the state dict has the same values
    as the optimizer.
    """
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    rest, early = dict(state_dict["state"]), dict[Tensor, Options]()
    for number, param in zip(numbers, params, strict=False):  # the optimizer refuses other groups
        state = optimizer.state.get(param, {})
        if is_early(state) and number in rest and _are_equal(state, rest[number]):
            del rest[number]
            early[param] = state
    return {**state_dict, "state": rest}, early


def _are_equal(ours: Options, theirs: Options) -> bool:
    return ours.keys() == theirs.keys() and all(_is_equal(value, theirs[key]) for key, value in ours.items())


def _is_equal(one: Value, other: Value) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one.to(other.dtype), other)  # files may have 16 bits
    return bool(one == other)
