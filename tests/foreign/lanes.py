"""The foreign device in the place of ``torch.cuda``, for lanes and for the Trainer."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch

from foreign import NAME, native
from lightning_hetero.runtime.lanes.cuda_device import CudaDevice


class ForeignCuda:
    """What the lanes use of ``torch.cuda``."""

    def __init__(self) -> None:
        self._native = native()
        self.nvtx = SimpleNamespace(range_push=lambda name: None, range_pop=lambda: None, mark=lambda name: None)

    def Stream(self, device: torch.device) -> torch.Stream:
        return torch.Stream(device)

    def Event(self, *, enable_timing: bool = False, blocking: bool = False) -> torch.Event:
        return torch.Event(NAME, enable_timing=enable_timing, blocking=blocking)

    def current_stream(self, device: torch.device) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def stream(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        return stream

    def get_per_process_memory_fraction(self, device: torch.device) -> float:
        return 1.0

    def cudart(self) -> ForeignCuda:
        return self

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self._native.lock(address, num_bytes)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self._native.unlock(address)
        return 0


def standing_in(usable_bytes: int) -> Any:
    """What takes the place of ``CudaDevice.of``: the first foreign device, with so much memory for
    plans.
    """

    def of(device: torch.device, budget_bytes: int | None) -> CudaDevice:
        size = usable_bytes if budget_bytes is None else min(usable_bytes, budget_bytes)
        return CudaDevice(device=torch.device(NAME, 0), usable_bytes=size, cuda=ForeignCuda())

    return of
