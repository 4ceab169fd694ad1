"""How long this rank computes, without its waiting for other ranks."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_SETTLING = 2  # batches after a change of shapes that allocate, choose algorithms, and are not counted


class Stopwatch:
    """Times forward and backward of training batches, from the start of a step to the last gradient that was computed here.

    Gradients are reduced behind that moment, so that a slow rank does not make the others look slow. On CUDA devices, events are
    recorded and read later; nothing waits for the device before :meth:`seconds_per_sample`.

    Args:
        device: Where training computes.
        window: Batches whose median is taken.
    """

    def __init__(self, device: torch.device, window: int) -> None:
        self._events = device.type == "cuda"
        self._spans: deque[tuple[Any, Any, int]] = deque(maxlen=window)
        self._begin: Any = None
        self._end: Any = None
        self._settling = _SETTLING
        self._handles: list[Any] = []

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Takes the gradients of these parameters for the end of a backward."""
        trained: list[Any] = [p for p in parameters if p.requires_grad]
        self._handles = [p.register_post_accumulate_grad_hook(self._note) for p in trained]

    def stop_watching(self) -> None:
        """Takes its hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def start(self) -> None:
        """A training batch begins."""
        self._end = None
        self._begin = self._now()

    def stop(self, samples: int) -> None:
        """Its backward has ended."""
        if self._begin is None or self._end is None:
            return
        if self._settling:
            self._settling -= 1
        else:
            self._spans.append((self._begin, self._end, samples))
        self._begin = None

    def reset(self) -> None:
        """Forgets what was measured: batches have another size now."""
        self._spans.clear()
        self._settling = _SETTLING

    def seconds_per_sample(self) -> float | None:
        """The median of the latest batches; ``None`` before the window is full."""
        if len(self._spans) < (self._spans.maxlen or 1):
            return None
        return statistics.median(max(self._seconds(begin, end), 1e-9) / samples for begin, end, samples in self._spans)

    def _note(self, _: torch.Tensor) -> None:
        self._end = self._now(self._end)

    def _now(self, event: Any = None) -> Any:
        if not self._events:
            return time.monotonic()
        make: Any = torch.cuda.Event
        event = make(enable_timing=True) if event is None else event
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        if not self._events:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
