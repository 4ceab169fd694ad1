"""Whether devices read whole weights from the host, or exchange slices among themselves.

Every planner plans for both, and the faster plan counts. A plan that is best where each device
reads whole weights over its own link is not best where that link carries a slice, so it is not
enough to price one plan twice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning_hetero.errors import PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Gather, Plan

Planner = Callable[..., Plan]


def gathering(plan: Plan, hardware: HardwareProfile) -> Plan:
    """The plan as a rank of such a machine runs it: its devices may exchange themselves."""
    return replace(plan, gather=Gather.DEVICE) if hardware.gathers_on_devices and hardware.ranks > 1 else plan


def either_way(planner: Planner) -> Planner:
    """The planner, which takes the faster of both ways where several devices have them."""

    def plan(model: ModelProfile, hardware: HardwareProfile, **options: Any) -> Plan:
        if hardware.gathers_on_devices or not hardware.may_gather_on_devices:
            return planner(model, hardware, **options)
        found, refusal = list[Plan](), None
        try:
            found.append(planner(model, hardware, **options))
        except PlanError as error:
            refusal = error
        with suppress(PlanError):
            found.append(planner(model, replace(hardware, gathers_on_devices=True), **options))
        if not found and refusal is not None:
            raise refusal
        return min(found, key=lambda one: one.require_predicted().iteration_s)

    return plan
