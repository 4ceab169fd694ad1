"""Random generators' states, so that a recomputation draws the numbers of its forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RandomState:
    """The generators of the CPU and of the device."""

    device: torch.device  # the device; the CPU has only its own generator
    cpu: Tensor  # state of the CPU's generator
    own: Tensor | None  # state of the device's; ``None`` for the CPU

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """The state of the generators now."""
        own = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return cls(device, torch.get_rng_state(), own)

    def restore(self) -> None:
        """Sets the generators to this state."""
        torch.set_rng_state(self.cpu)
        if self.own is not None:
            torch.get_device_module(self.device).set_rng_state(self.own, self.device)

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Continues from this state, and afterwards from where the generators were before."""
        before = RandomState.now(self.device)
        self.restore()
        try:
            yield
        finally:
            before.restore()
