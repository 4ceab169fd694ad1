"""Operators of other libraries inside our dispatch modes compute as without them.

[Note: Operators of other libraries]
In a dispatch mode autocast is off. That changes nothing for an operator of ATen, which is below
autocast. But on the CPU, operators of bitsandbytes consist of operators of ATen, which autocast
would turn into 16-bit ones. The mode cannot see which autocast is around it. So a layer with such
operators notes it as its forward begins.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_hetero.untyped import Operator

_around: list[tuple[str, torch.dtype] | None] = []  # of the layers whose forward runs; ``None``: no autocast


def layer_begins(_: nn.Module, args: tuple[object, ...]) -> None:
    """A forward pre-hook of layers with such operators."""
    device = next((arg.device.type for arg in args if isinstance(arg, Tensor)), "cpu")
    _around.append((device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None)


def layer_ends(_: nn.Module, args: tuple[object, ...], output: object) -> None:
    """A forward hook of these layers, which is called after errors too."""
    _around.pop()


def run(func: Operator, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """Runs an operator that is not ATen's, in a dispatch mode."""
    if not _around or _around[-1] is None:
        return func(*args, **kwargs)
    device, dtype = _around[-1]
    with torch.autocast(device, dtype=dtype, cache_enabled=False):
        return func(*args, **kwargs)
