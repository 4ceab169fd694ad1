"""Random numbers that are kept with a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hetero.strategies.data import random_state, set_random_state


def test_the_generators_of_any_accelerator_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = [torch.Generator().manual_seed(index) for index in range(2)]

    def restore(state: Any, index: int) -> None:
        generators[index].set_state(state)

    module = SimpleNamespace(get_rng_state=lambda index: generators[index].get_state(), set_rng_state=restore)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(generators))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    before = random_state()
    drawn = [torch.rand(3, generator=generator) for generator in generators]
    set_random_state(before)
    assert all(torch.equal(torch.rand(3, generator=g), numbers) for g, numbers in zip(generators, drawn, strict=True))
