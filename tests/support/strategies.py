"""Strategies to compare with plain Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_hetero.errors import OutOfMemoryBudgetError
from lightning_hetero.strategies import HeteroOffloadStrategy
from support.models import Outcome, assert_same

Train = Callable[[Any], Any]  # trains from one seed under the given strategy


def make_strategy(kind: str, train: Train) -> Any:
    """``"auto"``, a built-in plan, or ``"tight"``: plan ``disk`` with so little memory that weights come and go at every block."""
    if kind == "auto":
        return "auto"
    if kind == "tight":
        return HeteroOffloadStrategy(plan="disk", host_memory=least_memory(train))
    return HeteroOffloadStrategy(plan=kind)


def least_memory(train: Train, plan: Any = "disk") -> int:
    """The least budget that the plan accepts, as its refusal says."""
    with pytest.raises(OutOfMemoryBudgetError) as refusal:
        train(HeteroOffloadStrategy(plan=plan, host_memory=1))
    return int(refusal.value.needed_bytes)


def assert_same_as_plain(kind: str, train: Callable[[Any], Outcome]) -> None:
    """Trains under plain Lightning and under the strategy; nothing may differ by a bit."""
    expected = train("auto")
    assert_same(train(make_strategy(kind, train)), expected)
