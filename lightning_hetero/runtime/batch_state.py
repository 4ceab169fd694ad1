"""The state that a batch changes before its update: random generators and buffers.

A batch that is repeated begins with it.
"""

from __future__ import annotations

import random
import sys
from functools import partial

import torch
from torch import Tensor, nn

from lightning_hetero.runtime.activations.random import RandomState


class Generators:
    """The random generators that a step may use: torch's, Python's, and NumPy's if it is loaded."""

    def __init__(self, device: torch.device) -> None:
        self._torch, self._python = RandomState.now(device), random.getstate()
        random_of_numpy = getattr(sys.modules.get("numpy"), "random", None)
        self._numpy = None if random_of_numpy is None else partial(random_of_numpy.set_state, random_of_numpy.get_state())

    def restore(self) -> None:
        """Sets them to this state."""
        self._torch.restore()
        random.setstate(self._python)
        if self._numpy is not None:
            self._numpy()


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
