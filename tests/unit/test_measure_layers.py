"""Times of layers by powers of two, on a clock that layers turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.cluster import LayerTimes
from lightning_hetero.parallel import measure


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Turns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, clock: Clock, seconds: float) -> torch.Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        clock.now += seconds
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.clock.now += 2 * ctx.seconds
        return gradients[0], None, None


class Layer(nn.Module):
    """Takes a second forward and two backward; ten times that in its first runs."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.runs = clock, 0
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        seconds = 10.0 if self.runs <= 2 else 1.0
        return Turns.apply(hidden * self.weight, self.clock, seconds)  # type: ignore[no-any-return]


@pytest.mark.parametrize("num_layers", [1, 2, 5, 8])
def test_powers_of_two_are_measured_and_nothing_is_left(num_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(measure, "now_s", clock)
    layers = [Layer(clock) for _ in range(num_layers)]
    batch = torch.ones(3, 2)
    found = measure.layer_times(layers, batch, tensor_parallel=2, repetitions=3)
    powers = [n for n in (1, 2, 4, 8) if n <= num_layers]
    assert found == LayerTimes(tensor_parallel=2, seconds=tuple(3.0 * n for n in powers))
    assert all(p.grad is None and torch.equal(p, torch.ones(2)) for layer in layers for p in layer.parameters())
    assert not batch.requires_grad


def test_layers_may_take_and_give_more() -> None:
    class Pair(nn.Linear):
        def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> Any:  # type: ignore[override]
            return super().forward(hidden) * mask, "attention"

    mask = torch.ones(2)
    found = measure.layer_times([Pair(2, 2), Pair(2, 2)], torch.ones(1, 2), call=lambda layer, h: layer(h, mask)[0])
    assert len(found.seconds) == 2
    assert all(s > 0 for s in found.seconds)


def test_no_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 layers, 5 repetitions"):
        measure.layer_times([], torch.ones(1))
