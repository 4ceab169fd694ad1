"""What a loop may not do with gradients while updates run beside it, noticed.

[Note: Gradients of running updates]
With ``overlap="backward"`` the engine takes gradients during backward. Until ``step()`` the
parameters then hold a ``TakenGradient`` (``runtime.taken_gradients``), as during backward. With
``overlap="forward"`` gradients stay while updates read them. A loop that writes them in place in
the meantime changes the update, sometimes. Autograd counts such writes, so the next backward
notices them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_hetero.errors import UnsupportedError
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


class GradientsInUse:
    """Gradients that updates read while the loop goes on."""

    def __init__(self) -> None:
        self._read: list[tuple[str, nn.Parameter, weakref.ref[Tensor], int]] = []

    def stepped(self, params: Iterable[tuple[str, nn.Parameter]]) -> None:
        """A step has given these parameters' updates to the engine."""
        with torch._C.DisableTorchFunctionSubclass():  # for offloaded parameters these would be calls of Python
            self._read += [(name, p, weakref.ref(p.grad), p.grad._version) for name, p in params if p.grad is not None]

    def check(self, *, running: bool) -> None:
        """Before gradients are written again, by backward; ``running``: nothing has waited since.

        Raises:
            UnsupportedError: The loop has written one of them in place.
        """
        read, self._read = self._read, []
        if not running:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for name, param, before, version in read:
                grad = param.grad
                if grad is not None and grad is before() and grad._version != version:
                    raise UnsupportedError(
                        f'overlap="forward", and the gradient of {name!r} was written in place after optimizer.step(), while its '
                        f'update may have read it. Use optimizer.zero_grad(), or pass overlap="none".'
                    )
