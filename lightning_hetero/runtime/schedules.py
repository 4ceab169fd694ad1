"""Which schedule a batch runs by: the plan's, for the order in which the last such batch used the blocks."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.schedule import Schedule, StepSignature, Updates
from lightning_hetero.lowering import DeviceRoom, lower

_KEPT = 64
_LONG_ORDER = 4  # steps that use blocks more often than this on average (token by token generation) get no schedule


class Schedules:
    """The schedules of one plan, as batches ask for them.

    Args:
        plan: The resolved plan.
        model: The blocks' sizes.
        capacity_bytes: Host bytes for weights that live on disk.
    """

    def __init__(self, plan: Plan, model: ModelShape, capacity_bytes: int) -> None:
        self._orders = dict.fromkeys((True, False), tuple(range(len(model.blocks))))
        self.adopt(plan, model, capacity_bytes)

    def adopt(self, plan: Plan, model: ModelShape, capacity_bytes: int) -> None:
        """Goes on with another plan; the orders that were seen stay."""
        self._plan, self._model, self._capacity_bytes = plan, model, capacity_bytes
        self._lowered: dict[tuple[StepSignature, frozenset[int], DeviceRoom | None], Schedule] = {}

    def learn(self, order: Sequence[int], *, training: bool) -> None:
        """The next batch of this kind is expected to use the blocks as this one did."""
        if order:
            self._orders[training] = tuple(order)

    def signature(self, updates: Updates, *, training: bool) -> StepSignature | None:
        """What is expected of a batch; ``None`` if that is too long to be foreseen."""
        order = self._orders[training]
        if len(order) > _LONG_ORDER * max(1, len(self._model.blocks)):
            return None
        return StepSignature(order=order, training=training, updates=updates)

    def lowered(self, signature: StepSignature, resident: frozenset[int], device: DeviceRoom | None) -> Schedule:
        """The schedule of such a batch.

        Args:
            signature: What is expected of the batch.
            resident: Blocks that live on disk and whose weights are in memory.
            device: What a device with memory of its own has room for and holds.
        """
        key = (signature, resident, device)
        if key not in self._lowered:
            if len(self._lowered) >= _KEPT:  # a model that skips layers at random has a new order every step
                self._lowered.clear()
            self._lowered[key] = lower(
                self._plan, self._model, signature, resident=resident, capacity_bytes=self._capacity_bytes, device=device
            )
        return self._lowered[key]
