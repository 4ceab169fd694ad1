"""What ``tests/gpu`` runs on: a GPU, or with ``GPU_TESTS_ON=foreign`` the tests' own device.

The second one tries the tests where there is no GPU.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from foreign import NAME, lacking, native
from foreign.lanes import ForeignBackend

from lightning_hetero import HeteroOffloadStrategy
from lightning_hetero.lanes.backends import BACKENDS
from support.cuda import stand_in
from support.trainings import Plain

DEVICE = os.environ.get("GPU_TESTS_ON", "cuda")
_NO_GPU = "" if torch.cuda.is_available() else "needs a CUDA or ROCm GPU"
_NO_DEVICE = lacking() if DEVICE == NAME else _NO_GPU
only_on_a_gpu = pytest.mark.skipif(bool(_NO_GPU), reason=_NO_GPU)
needs_a_device = pytest.mark.skipif(bool(_NO_DEVICE), reason=_NO_DEVICE)

if DEVICE == NAME and not _NO_DEVICE:
    native()
    BACKENDS[NAME] = ForeignBackend(NAME)

TRAINER: dict[str, Any] = {"accelerator": stand_in(NAME) if DEVICE == NAME else "cuda", "devices": 1}


def plain() -> Any:
    """Plain Lightning's strategy there."""
    return Plain(device=torch.device(NAME, 0)) if DEVICE == NAME else "auto"


def ours(plan: Any, **options: Any) -> HeteroOffloadStrategy:
    """Our strategy there; the tests' own device does not say how much memory is free."""
    memory = {"device_memory": "64MiB"} if DEVICE == NAME else {}
    return HeteroOffloadStrategy(plan, **memory | options)
