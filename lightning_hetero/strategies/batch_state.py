"""What a batch changes before its update, besides random generators and buffers: metrics."""

from __future__ import annotations

from torch import Tensor, nn

# Attributes of a metric that are not its states:
_BOOKS = ("_update_count", "_computed", "_forward_cache", "_cache", "_is_synced", "_to_sync", "_should_unsync", "_enable_grad")


class MetricStates:
    """Copies of the states of all metrics in a module. They are not buffers."""

    def __init__(self, root: nn.Module) -> None:
        from torchmetrics import Metric

        self._metrics = [module for module in root.modules() if isinstance(module, Metric)]
        self._before: list[tuple[nn.Module, dict[str, object]]] = []

    def remember(self) -> None:
        """A step begins."""
        self._before = [
            (metric, {name: _copy(vars(metric)[name]) for name in (*metric._defaults, *_BOOKS) if name in vars(metric)})
            for metric in self._metrics
        ]

    def restore(self) -> None:
        """Restores the states."""
        for metric, states in self._before:
            vars(metric).update({name: _copy(value) for name, value in states.items()})


def _copy(value: object) -> object:
    """Metrics change tensors in place, and append to lists."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value
