"""Stores of many blocks: open files are counted before training, and the soft limit is raised to
what they take.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import Recipe, Shape, assert_same
from support.resuming import after, train

from lightning_hetero.errors import ConfigError
from lightning_hetero.store import file_limits
from lightning_hetero.strategies import HeteroOffloadStrategy

RECIPE = Recipe(steps=3, shape=Shape(layers=40, width=16))


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def limit() -> Iterator[tuple[int, int]]:
    """The soft limit is just above what is open now."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open() + 40, before[1]))
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("plan", ["disk", "host"])
@pytest.mark.parametrize("optimizer", [None, momentum], ids=["adamw", "sgd"])
def test_many_blocks_raise_the_soft_limit(
    tmp_path: Path, limit: tuple[int, int], plan: str, optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_limits, "_SPARE", 40)  # fewer than the files of the state that only SGD's own code knows
    recipe = Recipe(steps=3, shape=RECIPE.shape, **({} if optimizer is None else {"optimizer": optimizer}))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    plain = train(tmp_path, "auto", recipe)
    most = 0

    class Counts(HeteroOffloadStrategy):  # type: ignore[misc, valid-type]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal most
            most = max(most, num_open())
            return super().training_step(*args, **kwargs)

    train(tmp_path, Counts(plan, disk_path=tmp_path / "store"), recipe, stop=2)
    now = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft < most < now[0]
    assert now[1] == hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))  # a resume comes with the limit that it is given
    got = train(tmp_path, Counts(plan, disk_path=tmp_path / "store"), recipe, store=tmp_path / "store")
    assert_same(got, after(plain, 1))


def test_too_low_a_hard_limit_is_refused_by_name_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = num_open() + 150
    monkeypatch.setattr(resource, "getrlimit", lambda _: (few, few))
    with pytest.raises(ConfigError, match=rf"needs \d+ open files.*may have {few}.*ulimit -Hn \d+.*block_cls"):
        train(tmp_path, HeteroOffloadStrategy("disk", disk_path=tmp_path / "store"), RECIPE)
    assert not (tmp_path / "store").exists()
