"""What a training batch needs to be run again from a clean state: random generators, and buffers that forward changes."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.runtime.activations.random import RandomState


class Generators:
    """The state of all generators that a training step may use: torch's of CPU and device, Python's, and NumPy's if it is loaded.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._torch, self._python = RandomState.now(device), random.getstate()
        numpy: Any = sys.modules.get("numpy")
        self._numpy = None if numpy is None else (numpy, numpy.random.get_state())

    def restore(self) -> None:
        """Sets them to this state."""
        self._torch.restore()
        random.setstate(self._python)
        if self._numpy is not None:
            self._numpy[0].random.set_state(self._numpy[1])


class ChangingBuffers:
    """Copies of the buffers that forward changes, such as running statistics, as they were before a batch.

    Which ones change is learned from their version counters: after the first batch only those are copied.

    Args:
        root: The model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._changing: set[str] | None = None  # None: not known yet
        self._before: dict[str, tuple[Tensor, int, Tensor | None]] = {}  # the buffer, its version, its content

    def remember(self) -> None:
        """A batch begins; what the one before has changed is known now."""
        self._learn()
        known = self._changing
        self._before = {
            name: (buffer, buffer._version, buffer.detach().clone() if known is None or name in known else None)
            for name, buffer in self._root.named_buffers()
        }

    def restore(self) -> bool:
        """Sets the buffers to what they were; false if one has changed that never did before, or was replaced."""
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

    def _learn(self) -> None:
        if self._before:
            now = dict(self._root.named_buffers())
            changed = {n for n, (b, version, _) in self._before.items() if now.get(n) is not b or b._version != version}
            self._changing = changed | (self._changing or set())
