"""How much something does: the same on every machine, unlike the time that it takes."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def python_calls(work: Callable[[], object]) -> int:
    """How many Python functions are called. CPython calls some two million a second here."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before, collects = sys.getprofile(), gc.isenabled()
    gc.collect()
    gc.disable()  # what other tests have left is finalized by Python functions, too
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return count


def remember_entry_points() -> None:
    """Every Trainer reads the entry points of all installed packages, and nothing is installed
    meanwhile: they are read once.

    Called before Lightning is imported.
    """
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)


SIMULATIONS = 24  # of one search; by default it takes up to 300, and most of them confirm what the first ones found


def limit_search() -> None:
    """The planner's search takes a fixed number of simulations, however long they take: plans are
    the same on every machine.
    """
    from lightning_hetero.planners import holistic

    assert holistic.plan.__kwdefaults__ is not None
    holistic.plan.__kwdefaults__ |= {"seconds": math.inf, "evaluations": SIMULATIONS}
