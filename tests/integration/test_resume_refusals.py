"""Stores that cannot be resumed from are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import Recipe, Shape
from support.resuming import RECIPE, offload, train

from lightning_hetero.errors import CheckpointMissingError, ConfigError, StoreCorruptError
from lightning_hetero.strategies import HeteroOffloadStrategy


def test_without_a_step_there_is_nothing_to_resume(tmp_path: Path) -> None:
    train(tmp_path, offload("disk", tmp_path / "store"), RECIPE, stop=0)
    with pytest.raises(ConfigError, match="no step has been committed yet"):
        train(tmp_path, offload("disk", tmp_path / "store"), RECIPE, store=tmp_path / "store")


def test_a_ckpt_path_that_does_not_exist_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "run1").mkdir()
    with pytest.raises(CheckpointMissingError, match=r"run2\. Did you mean '.*run1'\? Allowed: a"):
        train(tmp_path, offload("disk", tmp_path / "store"), RECIPE, store=tmp_path / "run2")
    with pytest.raises(CheckpointMissingError, match=r"no/where\. Allowed: a checkpoint file, or a store"):
        train(tmp_path, offload("disk", tmp_path / "store"), RECIPE, store=tmp_path / "no" / "where")


@pytest.mark.parametrize("size", [None, 0, "zeros"])
def test_a_process_that_died_before_its_first_record_has_left_nothing_to_resume(tmp_path: Path, size: Any) -> None:
    train(tmp_path, offload("disk", tmp_path / "store"), RECIPE, stop=0)  # its one record stands for no step
    ring = tmp_path / "store" / "COMMIT"
    length = ring.stat().st_size
    ring.unlink() if size is None else ring.write_bytes(bytes(length if size else 0))
    with pytest.raises(ConfigError, match="no step has been committed yet"):
        train(tmp_path, offload("disk", tmp_path / "store"), RECIPE, store=tmp_path / "store")


def test_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "store"
    train(tmp_path, offload("disk", store), RECIPE, stop=1)

    def refused(match: str, **options: Any) -> None:
        recipe = Recipe(**{**vars(RECIPE), **options})
        with pytest.raises(ConfigError, match=match):
            train(tmp_path, offload("disk", store), recipe, store=store)

    refused("changed model", shape=Shape(layers=2, dropout=0.1))
    refused("grouped in another way", shape=Shape(layers=3, dropout=0.1, half_frozen=True))
    refused("groups of", groups=False)
    refused("the store's torch.optim.AdamW", optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), schedule="")
    with pytest.raises(ConfigError, match="would not keep its steps"):
        train(tmp_path, offload("disk", store, durability="none"), RECIPE, store=store)


def test_a_fit_from_a_store_needs_a_disk_path(tmp_path: Path) -> None:
    store = tmp_path / "store"
    train(tmp_path, offload("disk", store), RECIPE, stop=1)
    with pytest.raises(ConfigError, match="this run has none of its own"):
        train(tmp_path, HeteroOffloadStrategy(plan="disk"), RECIPE, store=store)
    train(tmp_path, offload("disk", tmp_path / "other"), RECIPE, stop=1)
    with pytest.raises(ConfigError, match="holds step 1 of an earlier run"):
        train(tmp_path, offload("disk", tmp_path / "other"), RECIPE, store=store)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "is an empty directory. Allowed: a checkpoint file, a store"),
        (["b", "a"], "is a directory with a, b. Allowed: "),
        ([".metadata"], "a distributed checkpoint: the strategy that has saved it loads it"),
    ],
)
@pytest.mark.parametrize("plan", ["disk", "resident"])
def test_a_directory_that_is_no_store_is_refused(tmp_path: Path, plan: str, names: list[str], said: str) -> None:
    (tmp_path / "store").mkdir()
    for name in names:
        (tmp_path / "store" / name).touch()
    with pytest.raises(ConfigError, match=said):
        train(tmp_path, offload(plan, tmp_path / "other"), RECIPE, store=tmp_path / "store")


def test_the_log_says_which_steps_are_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Coupled(torch.optim.SGD):
        """Not known to update its parameters independently."""

    recipe = Recipe(steps=1, optimizer=lambda groups: Coupled(groups, lr=0.1))
    train(tmp_path, offload("host", tmp_path / "store"), recipe)
    assert "Steps are not kept: optimizer Coupled" in caplog.text


@pytest.mark.parametrize("plan", ["disk", "host"])
def test_a_flipped_bit_is_named_when_it_is_resumed(tmp_path: Path, plan: str) -> None:
    store = tmp_path / "store"
    train(tmp_path, offload(plan, store), RECIPE, stop=3)
    for path in store.glob("block-*"):
        with open(path, "r+b") as file:
            file.seek(4096)  # behind the head
            byte = file.read(1)
            file.seek(4096)
            file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(StoreCorruptError, match=r"block-\d+\.[ab] at offset \d+: block \d+, chunk \d+: the .*digest differs"):
        train(tmp_path, offload(plan, store), RECIPE, store=store)
