"""Training on a device with streams orders every use of memory, whatever the timing."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.broken_waits import LISTED, Break
from support.checker import UnorderedError
from support.models import assert_same
from support.ordered_runs import ON_HOST, RUNS, WITHOUT_STREAMS, everything, training, training_without_streams


@pytest.mark.parametrize("prompt", [False, True], ids=["polls find nothing", "polls find all"])
@pytest.mark.parametrize("name", RUNS)
def test_training_orders_all_uses(name: str, prompt: bool, tmp_path: Path) -> None:
    got, checker = training(name, tmp_path, prompt=prompt)
    assert checker.uses > 900
    assert_same(got, RUNS[name].trained_by("auto", tmp_path))


@pytest.mark.parametrize("name", WITHOUT_STREAMS)
def test_training_without_streams_orders_all_uses(name: str, tmp_path: Path) -> None:
    got, checker = training_without_streams(name, tmp_path)
    assert checker.uses > 900
    assert_same(got, (RUNS | ON_HOST)[name].trained_by("auto", tmp_path))


@pytest.mark.parametrize("broken", LISTED, ids=lambda one: one.name)
def test_a_broken_wait_is_found(broken: Break, tmp_path: Path) -> None:
    with broken.made(), pytest.raises(UnorderedError):
        everything(tmp_path)
