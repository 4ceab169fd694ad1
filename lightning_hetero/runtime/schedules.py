"""Chooses the schedule of a batch: it expects the order of blocks of the last batch of its kind."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.schedule import Schedule, StepSignature, Updates
from lightning_hetero.lowering import DeviceRoom, lower

_KEPT = 64
# Steps that use blocks more often on average, as generation token by token, get no schedule.
_LONG_ORDER = 4


class Schedules:
    """The schedules of one plan."""

    def __init__(self, plan: Plan, model: ModelShape, capacity_bytes: int) -> None:
        self._orders = dict.fromkeys((True, False), tuple(range(len(model.blocks))))
        self.adopt(plan, model, capacity_bytes)

    def adopt(self, plan: Plan, model: ModelShape, capacity_bytes: int) -> None:
        """Changes to another plan. The orders that were seen stay."""
        self._plan, self._model, self._capacity_bytes = plan, model, capacity_bytes
        self._lowered: dict[tuple[StepSignature, frozenset[int], DeviceRoom | None], Schedule] = {}

    def learn(self, order: Sequence[int], *, training: bool) -> None:
        """Expects the next batch of this kind to use the blocks in this order."""
        if order:
            self._orders[training] = tuple(order)

    def signature(self, updates: Updates, *, training: bool) -> StepSignature | None:
        """The expected step; ``None`` if it is too long for a schedule."""
        order = self._orders[training]
        if len(order) > _LONG_ORDER * max(1, len(self._model.blocks)):
            return None
        return StepSignature(order=order, training=training, updates=updates)

    def lowered(self, signature: StepSignature, resident: frozenset[int], device: DeviceRoom | None) -> Schedule:
        """The schedule of a step."""
        key = (signature, resident, device)
        if key not in self._lowered:
            if len(self._lowered) >= _KEPT:  # a model that skips layers at random has a new order every step
                self._lowered.clear()
            self._lowered[key] = lower(
                self._plan, self._model, signature, resident=resident, capacity_bytes=self._capacity_bytes, device=device
            )
        return self._lowered[key]
