"""Samples tell whether a recomputation made what forward had made."""

from __future__ import annotations

import pytest
import torch
from support.activations import RECOMPUTE, Net, driving, rule
from torch import Tensor

from lightning_hetero.runtime.activations.recompute import RecomputationError
from lightning_hetero.runtime.activations.samples import COUNT, differ, sample

TENSORS = {
    "rows": torch.randn(8, 1024),
    "transposed": torch.randn(64, 40).t(),
    "a part": torch.randn(32, 96).chunk(3, dim=-1)[1],
    "expanded": torch.randn(5, 1, 7).expand(5, 300, 7),
    "mask": torch.rand(40, 40) > 0.5,
    "whole numbers": torch.arange(5000),
    "half": torch.randn(4096).bfloat16(),
    "complex": torch.randn(4096, dtype=torch.complex64),
    "few": torch.randn(3),
    "none": torch.randn(0, 4),
}


@pytest.mark.parametrize("name", TENSORS)
def test_samples_are_values_of_the_tensor_at_the_same_places(name: str) -> None:
    tensor = TENSORS[name]
    found = sample(tensor)
    assert min(tensor.numel(), COUNT // 2) <= found.numel() <= COUNT or name == "expanded"
    assert set(found.tolist()) <= set(tensor.flatten().tolist())
    assert differ(sample(tensor), found) is False
    other = ~found if tensor.dtype is torch.bool else found + 1
    assert differ(other, found) is bool(tensor.numel())


def test_samples_visit_all_columns_of_a_matrix() -> None:
    numbers = torch.arange(128 * 4096).view(128, 4096)
    assert (sample(numbers) % 4096).unique().numel() == COUNT


def test_values_that_are_no_numbers_are_the_same_again() -> None:
    broken = torch.full((4096,), torch.nan)
    assert differ(sample(broken), sample(broken.clone())) is False
    assert differ(sample(broken), sample(torch.zeros(4096))) is True


def test_a_part_that_is_unfilled_does_not_count() -> None:
    one, other = torch.randn(4096), torch.randn(4096)
    other[1024:] = one[1024:]
    assert differ(sample(one), sample(other)) is False


def test_other_values_on_a_device_are_known_when_the_next_batch_but_one_begins(x: Tensor) -> None:
    net = Net(layers=1)
    with driving(net.blocks(), rule(RECOMPUTE)) as driver:
        driver.begin()
        driver.activations.compared("block 'a'", torch.tensor(False))
        driver.activations.compared("block 'b'", torch.tensor(True))
        driver.step(lambda: net(x).square().sum())
        with pytest.raises(RecomputationError, match="block 'b' was recomputed and did something else"):
            driver.step(lambda: net(x).square().sum())
        driver.activations.compared("block 'c'", torch.tensor(True))
        with pytest.raises(RecomputationError, match="block 'c'"):
            driver.activations.close()
