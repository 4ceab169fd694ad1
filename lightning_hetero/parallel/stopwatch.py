"""This rank's compute time per sample, without waits for other ranks."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lightning_hetero.clock import now_s
from lightning_hetero.lanes.backends import BACKENDS

_SETTLING = 2  # batches after a change of shapes allocate and choose algorithms; not counted


class Stopwatch:
    """Times the compute of training batches on this rank.

    The end of a span is chosen once, so that waits for other ranks are left out. On
    devices with streams, events are recorded and read later; nothing waits for the device before
    :meth:`seconds_per_sample`.

    Args:
        device: The device that computes.
        window: Number of batches for the median.
    """

    def __init__(self, device: torch.device, window: int) -> None:
        self._backend = BACKENDS.get(device.type)
        self._window: deque[tuple[list[tuple[Any, Any]], int]] = deque(maxlen=window)
        self._spans: list[tuple[Any, Any]] = []  # of the current batch
        self._begin: Any = None
        self._end: Any = None
        self._training = False
        self._settling = _SETTLING
        self._handles: list[Any] = []

    def watch_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """One span per batch, from its start to the last of these gradients.

        Their reduction comes after it.
        """
        trained: list[Any] = [p for p in parameters if p.requires_grad]
        self._handles = [p.register_post_accumulate_grad_hook(self._gradient) for p in trained]

    def watch_forward(self, modules: Iterable[nn.Module]) -> None:
        """A span per forward of these modules. Hooks that gather weights run before the span."""
        for module in modules:
            self._handles.append(module.register_forward_pre_hook(self._forward_begins))
            self._handles.append(module.register_forward_hook(self._forward_ends))

    def stop_watching(self) -> None:
        """Removes its hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def start(self) -> None:
        """A training batch begins."""
        self._spans, self._end, self._training = [], None, True
        self._begin = self._now()

    def stop(self, samples: int) -> None:
        """Its backward has ended."""
        if self._end is not None:
            self._spans.append((self._begin, self._end))
        if self._training and self._spans:
            if self._settling:
                self._settling -= 1
            else:
                self._window.append((self._spans, samples))
        self._training = False

    def reset(self) -> None:
        """Forgets the measurements, because the batch size has changed."""
        self._window.clear()
        self._settling = _SETTLING

    def seconds_per_sample(self) -> float | None:
        """The median of the latest batches; ``None`` before the window is full."""
        if len(self._window) < (self._window.maxlen or 1):
            return None
        return statistics.median(
            max(sum(self._seconds(begin, end) for begin, end in spans), 1e-9) / samples for spans, samples in self._window
        )

    def _gradient(self, _: torch.Tensor) -> None:
        self._end = self._now(self._end)

    def _forward_begins(self, *_: Any) -> None:
        self._begin = self._now()

    def _forward_ends(self, *_: Any) -> None:
        if self._training:
            self._spans.append((self._begin, self._now()))

    def _now(self, event: Any = None) -> Any:
        if self._backend is None:
            return now_s()
        event = self._backend.event(timed=True) if event is None else event
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        if self._backend is None:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
