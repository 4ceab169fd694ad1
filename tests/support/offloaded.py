"""Offloaded tensors and parameters whose source counts what is read and written."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class CountingSource:
    """Content in an ordinary tensor; counts transfers and checks the contract of ``write``."""

    def __init__(self, content: Tensor, name: str = "weight") -> None:
        self.content = content.detach().clone()
        self.name = name
        self.shape = content.shape
        self.dtype = content.dtype
        self.address: int | None = None
        self.reads = 0
        self.writes = 0

    def read(self) -> Tensor:
        self.reads += 1
        return self.content.clone()

    def write(self, value: Tensor) -> None:
        assert type(value) is Tensor or type(value) is nn.Parameter
        assert (value.shape, value.dtype, value.device.type) == (self.shape, self.dtype, "cpu")
        self.writes += 1
        self.content = value.detach().clone()


def matrix() -> Tensor:
    return torch.arange(12.0).view(3, 4) + 1
