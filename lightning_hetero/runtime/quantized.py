"""Frozen layers of bitsandbytes: their computations read the weights where these are now.

[Note: Quantized layers]
bitsandbytes keeps weights in places that autograd's hooks for saved tensors do not see. A 4-bit
multiplication keeps the packed weights on its node of the graph. An 8-bit layer keeps them as
``state.CB`` beside the parameter, for forward and backward. On a device, that memory may have other
weights by then, and on the host ``CB`` would be a second copy. So both are made to read the
parameter. What else belongs to a quantized weight (scales, code books) stays in memory with its
layer: it takes a few percent of the weight. bitsandbytes is not imported; its layers are recognized
by their attributes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.runtime.activations import foreign
from lightning_hetero.runtime.offloaded_parameter import materialize
from lightning_hetero.store.raw_memory import memory_of
from lightning_hetero.untyped import Function, Value

_NODE = "MatMul4BitBackward"


class Handle(Protocol):
    """A change of a layer."""

    def remove(self) -> None:
        """Undoes what it stands for."""


def follow(root: nn.Module) -> list[Handle]:
    """Lets quantized layers read their parameters, until the handles are removed."""
    handles: list[Handle] = []
    for _, module, weight in _weights(root):
        if vars(weight).get("quant_state") is not None:
            handles.append(module.register_forward_hook(partial(_free_node, weight)))
            handles += _in_their_autocast(module)
        elif hasattr(state := getattr(module, "state", None), "SCB") and not getattr(state, "has_fp16_weights", True):
            handles += [_LiveState(weight, state), *_in_their_autocast(module)]
    return handles


def _in_their_autocast(module: nn.Module) -> list[Handle]:
    """See [Note: Operators of other libraries]."""
    return [
        module.register_forward_pre_hook(foreign.layer_begins),
        module.register_forward_hook(foreign.layer_ends, always_call=True),
    ]


def quantize(root: nn.Module) -> None:
    """Lets layers quantize their weights, as they do when plain Lightning moves a model.

    Raises:
        UnsupportedError: A layer is on the meta device.
    """
    for name, module, weight in _weights(root):
        if not _is_to_quantize(weight):
            continue
        if weight.is_meta:
            raise UnsupportedError(
                f"the {type(module).__name__} {name!r} is on the meta device, and quantizing needs its values. Build the model in "
                f"memory, or without quantization."
            )
        module.to("cpu")


def _weights(root: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """The modules with a ``weight``, each with its name and that."""
    for name, module in root.named_modules():
        if (weight := module._parameters.get("weight")) is not None:
            yield name, module, weight


def _is_to_quantize(weight: nn.Parameter) -> bool:
    own = vars(weight)
    if "bnb_quantized" in own:
        return not own["bnb_quantized"]
    return "SCB" in own and not own.get("has_fp16_weights", True) and weight.dtype != torch.int8


class _Weights:
    """In place of the tensors ``(None, weights)`` on a node: reads the parameter when unpacked."""

    def __init__(self, weight: nn.Parameter) -> None:
        self._weight = weight

    def __iter__(self) -> Iterator[Tensor | None]:
        yield None
        yield self._weight.data.view(-1, 1)


def _free_node(weight: nn.Parameter, module: nn.Module, args: tuple[object, ...], output: Tensor) -> None:
    node: Value = output.grad_fn
    while node is not None and not type(node).__name__.startswith(_NODE):
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None  # conversions of the output
    if node is not None:
        node.tensors = _Weights(weight)


class _LiveState:
    """An 8-bit layer's state whose ``CB`` is the parameter's memory."""

    def __init__(self, weight: nn.Parameter, state: Value) -> None:
        self._weight, self._state, self._class = weight, state, type(state)

        def read(_: object) -> Tensor:
            return weight.data

        def ignore(_: object, value: Tensor | None) -> None:
            """Layers set what they have read."""

        def reduce(state: Value, _: object) -> tuple[Function, tuple[object, ...]]:
            rest = {name: value for name, value in vars(state).items() if name != "CB"}
            return _rebuilt, (self._class, rest, materialize(weight).detach())

        names = {"CB": property(read, ignore), "__reduce_ex__": reduce}
        if vars(weight).get("CB") is not None:
            weight.__dict__["CB"] = weight.data  # the original memory is free now
        state.__dict__.pop("CB", None)
        state.__class__ = type(self._class.__name__, (self._class,), names)

    def remove(self) -> None:
        """``CB`` is an ordinary attribute again."""
        self._state.__class__ = self._class
        if vars(self._weight).get("CB") is None:
            self._state.CB = self._weight.data


def _rebuilt(kind: type, rest: dict[str, object], weights: Tensor) -> object:
    state: Value = kind()
    state.__dict__.update(rest, CB=weights)
    return state


def digests(root: nn.Module) -> dict[str, str]:
    """By a quantized weight's name, a digest of what belongs to it: scales and code books.

    The weight alone does not say its values: a matrix of twice the values may have the same codes.
    """
    found = {}
    for prefix, module, weight in _weights(root):
        tensors = _tensors_of(vars(weight).get("quant_state"))
        scales = (getattr(owner, "SCB", None) for owner in (weight, getattr(module, "state", None)))
        tensors += [value for value in scales if isinstance(value, Tensor)]
        if tensors:
            content = hashlib.sha256()
            for value in tensors:
                held = value.detach().cpu().contiguous()  # a copy lives as long as its name
                content.update(str(value.dtype).encode() + memory_of(held))
            found[f"{prefix}.weight" if prefix else "weight"] = content.hexdigest()
    return found


def _tensors_of(state: object) -> list[Tensor]:
    """The tensors of a quantization state, and of the one that quantizes its scales."""
    values = list(vars(state).values()) if hasattr(state, "absmax") else []
    own = [value for value in values if isinstance(value, Tensor)]
    return own + [tensor for value in values for tensor in _tensors_of(value)]


def keys_of(names: Collection[str]) -> set[str]:
    """The keys of 8-bit layers' states that belong to their weights, given their names."""
    stems = [name.removesuffix("weight") for name in names if name.endswith("weight")]
    return {f"{stem}{key}" for stem in stems for key in ("SCB", "weight_format")}


def to_device(root: nn.Module, device: torch.device) -> None:
    """Moves what belongs to quantized weights, but not the weights."""
    for _, module, weight in _weights(root):
        if (state := vars(weight).get("quant_state")) is not None:
            state.to(device)
        for owner in (weight, getattr(module, "state", None)):
            if isinstance(scales := getattr(owner, "SCB", None), Tensor):
                setattr(owner, "SCB", scales.to(device))  # noqa: B010
