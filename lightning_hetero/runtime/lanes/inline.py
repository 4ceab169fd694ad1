"""Lanes where the device is the host: every op runs as it is submitted, in the calling thread."""

from __future__ import annotations

import torch

from lightning_hetero.ir.schedule import Lane
from lightning_hetero.runtime.lanes.memory import Arena
from lightning_hetero.runtime.lanes.queue import Lanes


class InlineLanes(Lanes):
    """Runs ops when they are submitted; nothing overlaps but what the native engine does.

    Args:
        memory_bytes: Memory that ops may take, as if the device had its own; 0 for the host.
        poison: Fill memory with NaN when it is taken and when it is given back (tests).
    """

    def __init__(self, *, memory_bytes: int = 0, poison: bool = False) -> None:
        host = torch.device("cpu")
        super().__init__(host, Arena(memory_bytes, host, poison=poison), poison=poison)

    def _has_queue(self, lane: Lane) -> bool:
        return False
