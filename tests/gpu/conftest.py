"""For all tests here: kernels repeat themselves, and what small models save leaves the GPU all the
same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from lightning_hetero.runtime.activations import block as activations

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it as the process's context is made


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(activations, "SMALL_BYTES", 64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
