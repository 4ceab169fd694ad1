"""Tensor parallelism for pairs of Linears: one widens, and the next narrows."""

from __future__ import annotations

from itertools import pairwise

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel


def linear_pairs(layer: nn.Module) -> dict[str, ParallelStyle]:
    """Styles for Linears that widen and the next one that narrows, as in feed-forward blocks.

    Values between them are DTensors, so any operator there is correct; torch raises for unsupported
    ones. Source: Shoeybi et al. 2019, section 3.
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


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
