"""Tensor parallelism of a stage by torch, with the module's styles or for pairs of Linears."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.parallel.pipeline.layers import Layers
from lightning_hetero.parallel.pipeline.linear_pairs import linear_pairs


def styles_of(layers: Layers, index: int) -> dict[str, ParallelStyle]:
    """The styles of a layer: the module's, otherwise its pairs of Linears."""
    hook: Any = getattr(layers.module, "tensor_parallel", None)
    layer = layers.modules[index]
    return dict(linear_pairs(layer) if hook is None else hook(layer))


def sharded_modules(layer: nn.Module, styles: Mapping[str, ParallelStyle]) -> dict[nn.Module, ParallelStyle]:
    """The modules of a layer that torch's own styles divide; user styles do not count."""
    found: dict[nn.Module, ParallelStyle] = {}
    for pattern, style in styles.items():
        if isinstance(style, ColwiseParallel | RowwiseParallel):
            atoms = pattern.split(".") if pattern else []
            for name, module in layer.named_modules():
                path = name.split(".") if name else []
                if len(path) == len(atoms) and all(fnmatch(a, b) for a, b in zip(path, atoms, strict=True)):
                    found[module] = style
    return found


def sharded_parameters(module: nn.Module, style: ParallelStyle) -> dict[Tensor, int]:
    """Parameters of a Linear or an Embedding that a style divides, and along which dimension."""
    columns = isinstance(style, ColwiseParallel)
    if isinstance(module, nn.Embedding):
        return {module.weight: 1 if columns else 0}
    if isinstance(module, nn.Linear):
        found: dict[Tensor, int] = {module.weight: 0 if columns else 1}
        if columns and module.bias is not None:  # row-wise keeps it whole
            found[module.bias] = 0
        return found
    return {}


def most_ways(layers: Layers) -> int:
    """The greatest common divisor of all sharded sizes; 1 if sharding is refused."""
    sizes, tied = [], {id(p) for name, p in layers.module.named_parameters() if name in layers.tied}
    repeated = layers.repeated()
    for index, layer in enumerate(layers.modules):
        styles = styles_of(layers, index)
        if not styles and index in repeated:
            return 1
        for module, style in sharded_modules(layer, styles).items():
            for parameter, dim in sharded_parameters(module, style).items():
                if id(parameter) in tied:
                    return 1
                sizes.append(parameter.shape[dim])
    return math.gcd(*sizes) or 1


def parallelize(layers: Layers, own: range, mesh: DeviceMesh) -> None:
    """Shards layers over the ranks of a stage; all of them call it.

    Raises:
        ConfigError: A repeated layer has no module that can be sharded.
        UnsupportedError: A parameter that several layers use would be sharded.
    """
    repeated = layers.repeated()
    before = {name: id(p) for name, p in layers.module.named_parameters()}
    for index in own:
        layer = layers.modules[index]
        styles = styles_of(layers, index)
        if not styles and index in repeated:
            raise ConfigError(
                f"layer {layers.names[index]!r} ({type(layer).__name__}) has no pair of Linears that widens and narrows. Define "
                "tensor_parallel(layer), which gives torch's styles by the names of its modules, or plan with --tensor-parallel 1."
            )
        parallelize_module(layer, mesh, styles)
    for name, parameter in layers.module.named_parameters():
        if name in layers.tied and before[name] != id(parameter):
            raise UnsupportedError(
                f"parameter {name!r} is used by several layers and cannot be sharded; leave it out of the styles."
            )


def same_random_numbers(group: Any, device: torch.device) -> None:
    """Gives the ranks of a stage the first one's random state, for equal whole computations."""
    module: Any = None if device.type == "cpu" else torch.get_device_module(device)
    states: list[Any] = [torch.get_rng_state(), None if module is None else module.get_rng_state(device)]
    dist.broadcast_object_list(states, group=group, group_src=0, device=device)
    torch.set_rng_state(states[0])
    if module is not None:
        module.set_rng_state(states[1], device)
