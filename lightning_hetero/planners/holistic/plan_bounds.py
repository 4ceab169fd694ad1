"""Lower bounds of one plan's step, about a thousand times faster than simulating it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.ir.model import BlockProfile
from lightning_hetero.ir.plan import BlockPlan, Plan
from lightning_hetero.planners.holistic.bounds import Quantity, SpareMemory, Vector, uses
from lightning_hetero.planners.holistic.relaxation import Relaxation


class PlanBounds:
    """The bounds of [Note: Bound] in :mod:`.bounds`, of one plan each.

    Args:
        relaxation: The model, the machine and the rows.

    Attributes:
        kinds: For each block a number that equal blocks share.
        micro_batches: Those of the relaxation.
    """

    def __init__(self, relaxation: Relaxation) -> None:
        self._relaxation = relaxation
        self.micro_batches = relaxation.micro_batches
        kinds: dict[object, int] = {}
        self.kinds = tuple(kinds.setdefault(_kind(block), len(kinds)) for block in relaxation.model.blocks)
        self._uses: dict[object, Vector] = {}

    def seconds(self, plan: Plan) -> float:
        """No step of a fitted plan is shorter, whatever it gives its caches.

        Args:
            plan: Its number of micro-batches is the relaxation's.
        """
        return float(self.of(self.taken(plan)[None], priority=plan.priority)[0])

    def taken(self, plan: Plan) -> Vector:
        """What each block takes under a fitted plan: blocks x :class:`Quantity`."""
        return np.array([self.taken_of(index, rule) for index, rule in enumerate(plan.blocks)])

    def taken_of(self, index: int, rule: BlockPlan) -> Vector:
        """What one block takes under a rule, by :class:`Quantity`."""
        operators = tuple(sorted(rule.operators.items())) if rule.operators else ()
        key = (self.kinds[index], rule.weights, rule.state, rule.update, rule.saved, rule.boundary, operators)
        found = self._uses.get(key)
        if found is None:
            r = self._relaxation
            found = self._uses[key] = uses(r.model.blocks[index], rule, r.model, r.hardware, r.micro_batches)
        return found

    def of(self, taken: Vector, *, priority: bool) -> Vector:
        """The bounds of many plans at once, seconds.

        Args:
            taken: Plans x blocks x :class:`Quantity`.
            priority: As in :class:`Plan`.
        """
        h, total = self._relaxation.hardware, taken.sum(axis=1)
        left = np.zeros((len(taken), len(SpareMemory)))
        device = np.maximum(0.0, h.device_memory_bytes - total[:, Quantity.DEVICE_HELD])
        for room, use in ((SpareMemory.PASSED_CPU, Quantity.PASSED_CPU), (SpareMemory.PASSED_DEVICE, Quantity.PASSED_DEVICE)):
            left[:, room] = np.minimum(device, total[:, use])
        host = np.maximum(0.0, h.host_memory_bytes - total[:, Quantity.HOST_HELD])
        left[:, SpareMemory.GATHERED] = np.minimum(host, total[:, Quantity.GATHERED])
        left[:, SpareMemory.PASSED_DISK] = np.minimum(host, total[:, Quantity.PASSED_DISK])
        left[:, SpareMemory.WAITING] = h.host_memory_bytes if priority else 0.0  # else: none wait
        return self._relaxation.matrices.largest(taken, left)

    def may_fit(self, taken: Vector) -> NDArray[np.bool_]:
        """Which of many plans have room for weights, state and activations alone.

        Args:
            taken: Plans x blocks x :class:`Quantity`.
        """
        h, m, total = self._relaxation.hardware, self._relaxation.model, taken.sum(axis=1)
        device = total[:, Quantity.DEVICE_HELD] + total[:, Quantity.DEVICE_SAVED] + m.constant_device_bytes
        host = total[:, Quantity.HOST_HELD] + total[:, Quantity.HOST_SAVED] + m.constant_host_bytes
        disk = total[:, Quantity.DISK_HELD]
        if h.shared_memory:
            device, host = np.zeros(len(taken)), device + host
        elif h.unified_memory:
            host = device + host
        sizes = ((device, h.device_memory_bytes), (host, h.host_memory_bytes), (disk, h.disk_capacity_bytes))
        found: NDArray[np.bool_] = np.logical_and.reduce([size <= most for size, most in sizes])
        return found


def _kind(block: BlockProfile) -> object:
    """All that decides what a block takes."""
    stored = (block.num_params, block.num_trainable_params, block.weight_bytes, block.gradient_bytes, block.state_bytes)
    sizes = (*stored, block.in_place_bytes, block.activation_bytes, block.boundary_bytes, block.cast_bytes)
    return (*sizes, block.operators, block.pinned, block.forward_s, block.backward_s, block.forward_flop)
