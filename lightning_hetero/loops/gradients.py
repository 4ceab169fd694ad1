"""Gradients of a device as the context of a loop ends."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_hetero.handles.offloaded_tensor import contents_of
from lightning_hetero.runtime.device.host_gradient import HostGradient


def taken_gradients(params: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
    """The run ends: takes gradients of a device from their parameters, as tensors of the CPU."""
    found = []
    with torch._C.DisableTorchFunctionSubclass():  # for offloaded parameters these would be calls of Python
        for param in params:
            if isinstance(param.grad, HostGradient):
                found.append((param, contents_of(param.grad)))
            elif param.grad is not None and param.grad.device.type != "cpu":
                found.append((param, param.grad.cpu()))
        for param, _ in found:
            param.grad = None
    return found
