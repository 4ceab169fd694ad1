"""Frozen layers of bitsandbytes: their computations read the weights where these are now.

[Note: Quantized layers]
bitsandbytes keeps weights in places that autograd's hooks for saved tensors do not see. A 4-bit
multiplication keeps the packed weights on its node of the graph. An 8-bit layer keeps them as
``state.CB`` beside the parameter, for forward and backward. On a device, that memory may have other
weights by then, and on the host ``CB`` would be a second copy. So both are made to read the
parameter. DoRA puts another object in its place, which is taken out again. PEFT merges adapters by
replacing it too, which ``runtime.parameter_objects`` refuses. A 4-bit layer also keeps the layout
of its weights in evaluation mode. What else belongs to a quantized weight (scales, code books)
stays in memory with its layer, and budgets count it: it takes a few percent of the weight.
bitsandbytes is not imported; its layers are recognized by their attributes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.handles.offloaded_parameter import OffloadedParameter, materialize
from lightning_hetero.runtime.activations import foreign
from lightning_hetero.store.raw_memory import memory_of
from lightning_hetero.untyped import Function, Value

_NODE = "MatMul4BitBackward"
_MERGES = ("merge", "unmerge")  # of an adapter's layer
_PACKS_ANEW = "support_avx512bf16_for_cpu"


class Removable(Protocol):
    """A change of a layer."""

    def remove(self) -> None:
        """Undoes what it stands for."""


def follow(root: nn.Module) -> list[Removable]:
    """Lets quantized layers read their parameters, until the handles are removed."""
    handles: list[Removable] = []
    for _, module, weight in weights_of(root):
        if vars(weight).get("quant_state") is not None:
            handles += [module.register_forward_hook(partial(_free_node, weight)), _Layout(module)]
            handles += _in_their_autocast(module)
        elif hasattr(state := getattr(module, "state", None), "SCB") and not getattr(state, "has_fp16_weights", True):
            handles += [_LiveState(module, state), *_in_their_autocast(module)]
    for name, layer in root.named_modules():
        base = layer._modules.get("base_layer")  # of an adapter
        packed = None if base is None else base._parameters.get("weight")
        if base is not None and packed is not None and vars(packed).get("quant_state") is not None:
            handles += [layer.register_forward_hook(partial(_put_back, base, packed), always_call=True)]
            handles += [_Merging(layer, packed, name)]
    return handles


def _in_their_autocast(module: nn.Module) -> list[Removable]:
    """See [Note: Operators of other libraries]."""
    return [
        module.register_forward_pre_hook(foreign.layer_begins),
        module.register_forward_hook(foreign.layer_ends, always_call=True),
    ]


def quantize(root: nn.Module) -> None:
    """Lets layers in memory quantize their weights, as they do when plain Lightning moves a model.

    ``runtime.quantizing`` has those on the meta device.
    """
    for _, module, weight in weights_of(root):
        if not weight.is_meta and is_to_quantize(weight):
            module.to("cpu")


def weights_of(root: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """The names of all parameters called ``weight``, with their modules."""
    for prefix, module in root.named_modules():
        if (weight := module._parameters.get("weight")) is not None:
            yield f"{prefix}.weight" if prefix else "weight", module, weight


def is_to_quantize(weight: nn.Parameter) -> bool:
    """Whether a layer of bitsandbytes quantizes this weight when it is moved."""
    own = vars(weight)
    if "bnb_quantized" in own:
        return not own["bnb_quantized"] and weight.is_floating_point()
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


def _put_back(base: nn.Module, weight: nn.Parameter, *_: object) -> None:
    """DoRA gives its base layer another object with the memory that the weight has just now.

    Source: PEFT 0.21, ``dequantize_module_weight``.
    """
    found = base._parameters["weight"]
    if found is not None and found is not weight and found.data_ptr() == weight.data_ptr():
        base._parameters["weight"] = weight


class _Merging:
    """An adapter's layer that merges 4-bit weights only if they are in memory.

    PEFT recognizes them by their class, and away they have another one.
    """

    def __init__(self, layer: nn.Module, weight: nn.Parameter, name: str) -> None:
        self._attributes = vars(layer)
        for method in _MERGES:
            if hasattr(layer, method):
                self._attributes[method] = _Merge(layer, method, weight, name)

    def remove(self) -> None:
        """Its methods are its class's again."""
        for method in _MERGES:
            self._attributes.pop(method, None)


@dataclass(frozen=True, slots=True)
class _Merge:
    """Its ``merge`` or ``unmerge``. Copies and pickles of the layer have the class's method."""

    layer: nn.Module
    method: str
    weight: nn.Parameter
    name: str

    def __call__(self, *args: object, **options: object) -> object:
        if isinstance(self.weight, OffloadedParameter):
            raise UnsupportedError(
                f"{self.method} of {self.name!r} replaces its 4-bit weights, which are not in memory. Merge after the fit, within "
                f"`with strategy.materialize(module)`, or with `lightning-hetero export --merge`."
            )
        plain: Function = getattr(type(self.layer), self.method)
        return plain(self.layer, *args, **options)

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (self.layer, self.method)


class _Layout:
    """A 4-bit layer that keeps the layout of its packed weights.

    On a CPU with AVX512-BF16 a forward in evaluation mode would pack them anew, for products that
    have no backward. Source: bitsandbytes 0.50, ``Linear4bit.forward``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._attributes = vars(module)
        self._before = self._attributes.get(_PACKS_ANEW)
        self._attributes[_PACKS_ANEW] = False

    def remove(self) -> None:
        """The layer may do so again."""
        self._attributes[_PACKS_ANEW] = self._before


class _LiveState:
    """An 8-bit layer's state whose ``CB`` is the memory of the weight that the layer has."""

    def __init__(self, module: nn.Module, state: Value) -> None:
        held: Value = module._parameters
        self._held, self._state, self._class = held, state, type(state)

        def read(_: object) -> Tensor:
            weights: Tensor = held["weight"].data
            return weights

        def ignore(_: object, value: Tensor | None) -> None:
            """Layers set what they have read."""

        def reduce(state: Value, _: object) -> tuple[Function, tuple[object, ...]]:
            rest = {name: value for name, value in vars(state).items() if name != "CB"}
            return _rebuilt, (self._class, rest, materialize(held["weight"]).detach())

        names = {"CB": property(read, ignore), "__reduce_ex__": reduce}
        own = vars(held["weight"])
        if own.get("CB") is not None:
            own["CB"] = held["weight"].data  # the original memory is free now
        state.__dict__.pop("CB", None)
        state.__class__ = type(self._class.__name__, (self._class,), names)

    def remove(self) -> None:
        """``CB`` is an ordinary attribute again."""
        self._state.__class__ = self._class
        if vars(self._held["weight"]).get("CB") is None:
            self._state.CB = self._held["weight"].data


def _rebuilt(kind: type, rest: dict[str, object], weights: Tensor) -> object:
    state: Value = kind()
    state.__dict__.update(rest, CB=weights)
    return state


def digests(root: nn.Module) -> dict[str, str]:
    """By a quantized weight's name, a digest of what belongs to it: scales and code books.

    The weight alone does not say its values: a matrix of twice the values may have the same codes.
    """
    return {name: digest_of(module) for name, module, _ in weights_of(root) if _scales(module)}


def digest_of(module: nn.Module) -> str:
    """The digest of what belongs to a layer's weights."""
    content = hashlib.sha256()
    for value in _scales(module):
        held = value.detach().cpu().contiguous()  # a copy lives as long as its name
        content.update(str(value.dtype).encode() + memory_of(held))
    return content.hexdigest()


def check_scales(found: Mapping[str, str], kept: Mapping[str, str]) -> None:
    """Refuses scales that a store's weights do not belong to.

    Args:
        found: Their digests, by the names of weights.
        kept: Those in the store.

    Raises:
        ConfigError: Names the first weight with others, or without any.
    """
    if other := [name for name in kept if found.get(name) != kept[name]]:
        raise ConfigError(
            f"the scales of the quantized weight {other[0]!r} are not those that the store's weights belong to. The store does "
            f"not have them, because quantizing the same weights gives them again. Resume with the base model that training "
            f"began with."
        )


def scale_bytes(root: nn.Module) -> int:
    """Bytes of what belongs to quantized weights: it stays in memory under every plan."""
    return sum({id(value): value.nbytes for module in root.modules() for value in _scales(module)}.values())


def _scales(module: nn.Module) -> list[Tensor]:
    """What belongs to the weights of a layer; nothing if they are not quantized."""
    weight = module._parameters.get("weight")
    if weight is None:
        return []
    scales = (getattr(owner, "SCB", None) for owner in (weight, getattr(module, "state", None)))
    return _tensors_of(vars(weight).get("quant_state")) + [value for value in scales if isinstance(value, Tensor)]


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
    for _, module, weight in weights_of(root):
        if (state := vars(weight).get("quant_state")) is not None:
            state.to(device)
        for owner in (weight, getattr(module, "state", None)):
            if isinstance(scales := getattr(owner, "SCB", None), Tensor):
                setattr(owner, "SCB", scales.to(device))  # noqa: B010
