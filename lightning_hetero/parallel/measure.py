"""Times of 1, 2, 4, 8, … layers on this device, for a cluster file's ``layer_times``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_hetero.clock import now_s
from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.cluster import LayerTimes

_WARM_UP = 2  # runs that allocate and choose algorithms


def layer_times(
    layers: Sequence[nn.Module],
    batch: torch.Tensor,
    *,
    call: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda layer, hidden: layer(hidden),
    tensor_parallel: int = 1,
    repetitions: int = 5,
) -> LayerTimes:
    """Measures forward and backward of one micro-batch through 1, 2, 4, 8, … consecutive layers.

    Any other number of layers is a sum of these (AutoHet, equation 5), so a planner needs only log2
    of them. Weights do not change; gradients are ``None`` afterwards.

    Args:
        layers: Equal layers on the device to measure, such as four or eight blocks of a
            transformer.
        batch: Hidden states of one micro-batch on that device, input and output of a layer.
        call: Calls one layer, if it has other inputs or outputs beside the hidden states.
        tensor_parallel: Devices that compute one layer together here; only recorded.
        repetitions: Number of timed runs; their median counts.

    Raises:
        ConfigError: There are no layers.
    """
    if not layers or repetitions < 1:
        raise ConfigError(f"{len(layers)} layers, {repetitions} repetitions; allowed: at least one of each.")
    seconds = []
    for power in range(len(layers).bit_length()):
        runs = [_run(layers[: 2**power], batch, call) for _ in range(_WARM_UP + repetitions)]
        seconds.append(statistics.median(runs[_WARM_UP:]))
    return LayerTimes(tensor_parallel=tensor_parallel, seconds=tuple(seconds))


def _run(layers: Sequence[nn.Module], batch: torch.Tensor, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> float:
    hidden = batch.detach().requires_grad_()
    _wait(batch.device)
    begin = now_s()
    for layer in layers:
        hidden = call(layer, hidden)
    torch.autograd.backward(hidden, torch.ones_like(hidden))
    _wait(batch.device)
    end = now_s()
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    return end - begin


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        module.synchronize(device)
