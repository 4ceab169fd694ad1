"""What metrics in a module have counted, so that a batch that begins again counts once."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor, nn

_BOOKS = ("_update_count", "_computed", "_forward_cache", "_cache", "_is_synced", "_to_sync", "_should_unsync", "_enable_grad")


class MetricStates:
    """Copies of the states of all metrics (``torchmetrics.Metric``) in a module, which are no buffers.

    Args:
        root: The module; metrics that it gets later are not known.
    """

    def __init__(self, root: nn.Module) -> None:
        metric: Any = importlib.import_module("torchmetrics").Metric
        self._metrics = [module for module in root.modules() if isinstance(module, metric)]
        self._before: list[tuple[Any, dict[str, Any]]] = []

    def remember(self) -> None:
        """A step begins."""
        self._before = [
            (metric, {name: _copy(vars(metric)[name]) for name in (*metric._defaults, *_BOOKS) if name in vars(metric)})
            for metric in self._metrics
        ]

    def restore(self) -> None:
        """Sets the states to what they were."""
        for metric, states in self._before:
            vars(metric).update({name: _copy(value) for name, value in states.items()})


def _copy(value: Any) -> Any:
    """Metrics change tensors in place, and append to lists."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value
