"""Planners: from the profiles of a model and of a machine to a plan."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_hetero.ir.plan import Plan
from lightning_hetero.planners.baselines import BASELINES, BUILTIN_PLANS, disk, host, resident
from lightning_hetero.planners.gathering import either_way

_SEARCHING = ("lohan", "autohete", "protrain", "deep_optimizer_states", "holistic")


def _plan(name: str, *profiles: Any, **options: Any) -> Plan:
    plan: Plan = importlib.import_module(f"{__name__}.{name}").plan(*profiles, **options)
    return plan


# Each takes (ModelProfile, HardwareProfile, **options). Modules that search are imported when they
# are asked.
_ONE_WAY: dict[str, Callable[..., Plan]] = {**BASELINES, **{name: partial(_plan, name) for name in _SEARCHING}}
PLANNERS: dict[str, Callable[..., Plan]] = {name: either_way(planner) for name, planner in _ONE_WAY.items()}

__all__ = ["BASELINES", "BUILTIN_PLANS", "PLANNERS", "disk", "host", "resident"]
