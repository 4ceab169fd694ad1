"""The input of the small models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 16, 32)
