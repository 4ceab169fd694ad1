"""What a batch changes before its update, besides random generators: buffers and metrics."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Attributes of a metric that are not its states:
_BOOKS = ("_update_count", "_computed", "_forward_cache", "_cache", "_is_synced", "_to_sync", "_should_unsync", "_enable_grad")


class ChangingBuffers:
    """Copies of buffers that forward changes, such as running statistics, from before a batch.

    Version counters show which buffers change. After the first batch only those are copied.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._changing: set[str] | None = None  # None: not known yet
        self._before: dict[str, tuple[Tensor, int, Tensor | None]] = {}  # the buffer, its version, its content

    def remember(self) -> None:
        """A batch begins. Now it is known which buffers the last batch has changed."""
        if self._before:
            now = dict(self._root.named_buffers())
            changed = {n for n, (b, version, _) in self._before.items() if now.get(n) is not b or b._version != version}
            self._changing = changed | (self._changing or set())
        known = self._changing
        self._before = {
            name: (buffer, buffer._version, buffer.detach().clone() if known is None or name in known else None)
            for name, buffer in self._root.named_buffers()
        }

    def restore(self) -> bool:
        """Restores the buffers; false if one was replaced, or changed for the first time."""
        now = dict(self._root.named_buffers())
        for name, (buffer, version, content) in self._before.items():
            same = now.get(name) is buffer
            if content is None and (not same or buffer._version != version):
                return False
            if content is not None:
                target = now.get(name)
                if target is None or target.shape != content.shape:
                    return False
                with torch.no_grad():
                    target.copy_(content)
        return now.keys() == self._before.keys()


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
