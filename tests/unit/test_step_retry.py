"""Buffers that a step which begins again finds as it first did."""

from __future__ import annotations

import torch
from torch import nn

from lightning_hetero.strategies.step_retry import _State


class Counting(nn.Module):
    """Replaces a buffer in each forward."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps = self.steps + 1
        return x


def buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.named_buffers()}


def test_running_statistics_whose_version_counters_do_not_count_are_restored() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False))
    state = _State(module)
    for _ in range(2):
        state.remember()
        module(torch.randn(4, 3))
    before = buffers(module)
    state.remember()
    module(torch.randn(4, 3))
    assert not torch.equal(module[0].running_mean, before["0.running_mean"])
    assert state.restore()
    torch.testing.assert_close(buffers(module), before, rtol=0, atol=0)


def test_a_buffer_that_changes_for_the_first_time_is_refused_and_then_known() -> None:
    module = Counting()
    state = _State(module)
    state.remember()  # the first batch, which changes nothing
    state.remember()
    module(torch.ones(1))
    assert not state.restore()
    state.remember()
    module(torch.ones(1))
    assert state.restore()
    assert float(module.steps) == 1
