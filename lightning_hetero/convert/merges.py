"""Which adapters PEFT's ``merge_adapter()`` has merged into the layers of a model.

The base weights of a merged layer have its adapters in them, and the state of a model does not say
so: whoever loads it into layers that are not merged applies the adapters twice. So checkpoints and
the steps of a store say it, and loading one tells the layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict, TypeGuard

import torch
from torch import Tensor, nn

from lightning_hetero.errors import ConfigError
from lightning_hetero.store.format import value_shapes

KEY = "merged_adapters"  # of a checkpoint, and of a step's training state


class Merge(TypedDict):
    """What one layer knows.

    Attributes:
        adapters: The merged ones, in the order in which they were merged.
        norms: What ``unmerge_adapter()`` needs of DoRA's: norms of the weights before.
    """

    adapters: list[str]
    norms: dict[str, Tensor]


Merges = Mapping[str, Merge]  # by the layer's name

_SHAPE = value_shapes.DictOf(
    value_shapes.Fields({"adapters": value_shapes.ListOf(str), "norms": value_shapes.DictOf(torch.Tensor)})
)


def layers_of(root: nn.Module) -> dict[str, nn.Module]:
    """PEFT's layers that can be merged, by name."""
    return {name: module for name, module in root.named_modules() if isinstance(vars(module).get("merged_adapters"), list)}


def merges_of(layers: Mapping[str, nn.Module]) -> Merges:
    """What the layers know now; empty if nothing is merged."""
    if not any(vars(layer)["merged_adapters"] for layer in layers.values()):
        return {}
    return {name: _merge_of(layer) for name, layer in layers.items()}


def _merge_of(layer: nn.Module) -> Merge:
    norms = {key: value for key, value in _cache_of(layer).items() if isinstance(value, Tensor)}
    return {"adapters": list(vars(layer)["merged_adapters"]), "norms": norms}


def _cache_of(layer: nn.Module) -> dict[str, object]:
    """Where a layer of LoRA keeps norms; others have nothing like it."""
    found: dict[str, object] = getattr(layer, "_caches", {})
    return found


def read(found: object) -> Merges:
    """An entry of a file; nothing in it is trusted.

    Raises:
        ConfigError: It is not one that this package writes.
    """
    if not _is_table(found):
        what = value_shapes.fault(found, _SHAPE, KEY)
        raise ConfigError(f"an entry for adapters of PEFT is not of this package: {what}. Load what it has saved.")
    return found


def _is_table(found: object) -> TypeGuard[dict[str, Merge]]:
    return not value_shapes.fault(found, _SHAPE, KEY)


def tell(root: nn.Module, found: object, device: torch.device) -> None:
    """A model gets weights with these merges: its layers are told, those too that have none.

    Args:
        root: The model.
        found: The entry of what is loaded; see :func:`read`.
        device: Where the model computes.

    Raises:
        ConfigError: The model lacks a layer.
    """
    layers, merges = layers_of(root), read(found)
    missing = [name for name, merge in merges.items() if merge["adapters"] and name not in layers]
    if missing:
        raise ConfigError(
            f"adapters are merged into {missing[0]!r} where the weights come from, and this model has no such layer of PEFT. Load "
            f"them into the same model."
        )
    for name, layer in layers.items():
        merge = merges.get(name, Merge(adapters=[], norms={}))
        vars(layer)["merged_adapters"] = list(merge["adapters"])
        _cache_of(layer).update({key: value.to(device) for key, value in merge["norms"].items()})
