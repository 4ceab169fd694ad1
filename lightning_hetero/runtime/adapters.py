"""Sets adapters of PEFT that were made on the meta device.

See [Note: Adapters on the meta device] in ``runtime.initialize``. PEFT is not imported: its layers
are recognized by their attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from lightning_hetero.untyped import Function, Value

Setters = dict[int, list[Callable[[], object]]]


def adapter_setters(root: nn.Module) -> tuple[dict[int, str], Setters]:
    """By the module's ``id``: why an adapter cannot be set, and the functions that set one."""
    refused: dict[int, str] = {}
    setters: Setters = {}

    def visit(module: nn.Module, configs: Mapping[str, object]) -> None:
        known = getattr(module, "peft_config", None)
        configs = known if isinstance(known, Mapping) else configs
        for key, child in module.named_children():
            if "base_layer" in module._modules and key != "base_layer":
                for adapter, inner in _by_adapter(child):
                    why, found = _setter(module, key, adapter, configs)
                    for part in inner.modules():
                        setters[id(part)] = found
                        if why:
                            refused[id(part)] = why
            else:
                visit(child, configs)

    visit(root, {})
    return refused, setters


def _by_adapter(container: nn.Module) -> list[tuple[str, nn.Module]]:
    """Each adapter's module in a container of a layer. A ``ParameterDict`` is the module of all."""
    if isinstance(container, nn.ModuleDict):
        return list(container.items())
    return [(name, container) for name in container._parameters]


def _setter(layer: nn.Module, key: str, adapter: str, configs: Mapping[str, object]) -> tuple[str, list[Callable[[], object]]]:
    kind, how = type(layer).__name__, getattr(configs.get(adapter), "init_lora_weights", None)
    reset: Function | None = getattr(layer, "reset_lora_parameters", None)
    if reset is None:
        return f"adapter {adapter!r} is of {kind}, whose start is not known here", []
    if how is not True and how != "gaussian":
        return f"adapter {adapter!r} has init_lora_weights={how!r}, which needs the base weights in memory", []
    if key == "lora_magnitude_vector":
        return "", [partial(_set_magnitudes, layer, adapter)]
    if key not in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"):
        return f"adapter {adapter!r} has {key} in {kind}, whose start is not known here", []
    return "", [partial(reset, adapter, how)]


@torch.no_grad()
def _set_magnitudes(layer: Value, adapter: str) -> None:
    """DoRA's magnitudes are the norms of the base weights, to which LoRA adds nothing yet.

    Source: PEFT, ``DoraLinearLayer.update_layer``.
    """
    vector, base = layer.lora_magnitude_vector[adapter], layer.get_base_layer()
    vector.weight.copy_(vector.get_weight_norm(base.weight, torch.zeros_like(base.weight), layer.scaling[adapter]))
