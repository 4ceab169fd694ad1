"""Ranks of one stage compute its layers together: torch's tensor parallelism, by the module's styles or for pairs of Linears."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from lightning_hetero.errors import ConfigError, UnsupportedError
from lightning_hetero.parallel.pipeline.layers import Layers


def linear_pairs(layer: nn.Module) -> dict[str, ParallelStyle]:
    """Styles for Linears that widen, and the one behind them that narrows again: what feed-forward blocks are made of.

    What is between them stays a DTensor, so whatever is computed there is right; torch raises where it cannot. Source: Shoeybi et
    al. 2019, section 3.
    """
    styles: dict[str, ParallelStyle] = {}
    for prefix, parent in layer.named_modules():
        linears = [(name, child) for name, child in parent.named_children() if isinstance(child, nn.Linear)]
        wide: list[tuple[str, nn.Linear]] = []
        for (name, child), (after, narrow) in pairwise(linears):
            if child.out_features <= child.in_features:
                wide = []
                continue
            wide.append((name, child))
            if narrow.in_features == child.out_features > narrow.out_features:
                found = [n for n, w in wide if (w.in_features, w.out_features) == (child.in_features, child.out_features)]
                styles |= {_join(prefix, n): ColwiseParallel(use_local_output=False) for n in found}
                styles[_join(prefix, after)] = RowwiseParallel()
    return styles


def parallelize(layers: Layers, own: range, mesh: DeviceMesh) -> None:
    """Shards layers over the ranks of a stage. All of them have to ask.

    Raises:
        ConfigError: A repeated layer has nothing that is known to be shardable.
        UnsupportedError: A parameter that several layers use would be sharded.
    """
    hook: Any = getattr(layers.module, "tensor_parallel", None)
    repeated = layers.repeated()
    before = {name: id(p) for name, p in layers.module.named_parameters()}
    for index in own:
        layer = layers.modules[index]
        styles: Mapping[str, ParallelStyle] = linear_pairs(layer) if hook is None else hook(layer)
        if not styles and index in repeated:
            raise ConfigError(
                f"layer {layers.names[index]!r} ({type(layer).__name__}) has no pair of Linears that widens and narrows. Define "
                "tensor_parallel(layer), which gives torch's styles by the names of its modules, or plan with --tensor-parallel 1."
            )
        parallelize_module(layer, mesh, dict(styles))
    for name, parameter in layers.module.named_parameters():
        if name in layers.tied and before[name] != id(parameter):
            raise UnsupportedError(
                f"parameter {name!r} is used by several layers and cannot be sharded; leave it out of the styles."
            )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
