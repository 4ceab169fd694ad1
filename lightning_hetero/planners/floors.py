"""What a given plan takes at least, in a thousandth of the time that simulating it takes."""

from __future__ import annotations

import numpy as np

from lightning_hetero.ir.model import BlockProfile
from lightning_hetero.ir.plan import BlockPlan, Plan
from lightning_hetero.planners.bounds import Room, Use, Vector, uses
from lightning_hetero.planners.relaxation import Relaxation


class Floors:
    """The bounds of [Note: Bound] in :mod:`.bounds`, of one plan each.

    Args:
        relaxation: The model, the machine and the rows.
    """

    def __init__(self, relaxation: Relaxation) -> None:
        self._relaxation = relaxation
        kinds: dict[object, int] = {}
        self._kinds = [kinds.setdefault(_kind(block), len(kinds)) for block in relaxation.model.blocks]
        self._uses: dict[object, Vector] = {}

    def seconds(self, plan: Plan) -> float:
        """No step of a fitted plan is shorter, whatever it gives its caches.

        Args:
            plan: Its number of micro-batches is the relaxation's.
        """
        h = self._relaxation.hardware
        taken = np.array([self._taken(*row) for row in zip(self._kinds, self._relaxation.model.blocks, plan.blocks, strict=True)])
        total = taken.sum(axis=0)
        left = np.zeros(len(Room))
        device = max(0.0, h.device_memory_bytes - total[Use.DEVICE_HELD])
        left[[Room.PASSED_CPU, Room.PASSED_DEVICE]] = np.minimum(device, total[[Use.PASSED_CPU, Use.PASSED_DEVICE]])
        left[Room.PASSED_DISK] = min(max(0.0, h.host_memory_bytes - total[Use.HOST_HELD]), total[Use.PASSED_DISK])
        left[Room.WAITING] = h.host_memory_bytes if plan.priority else 0.0  # else the next forward waits for all updates
        return self._relaxation.matrices.largest(taken, left)

    def _taken(self, kind: int, block: BlockProfile, rule: BlockPlan) -> Vector:
        operators = tuple(sorted(rule.operators.items())) if rule.operators else ()
        key = (kind, rule.weights, rule.state, rule.update, rule.saved, rule.boundary, operators)
        found = self._uses.get(key)
        if found is None:
            r = self._relaxation
            found = self._uses[key] = uses(block, rule, r.model, r.hardware, r.micro_batches)
        return found


def _kind(block: BlockProfile) -> object:
    """All that decides what a block takes."""
    sizes = (block.num_params, block.num_trainable_params, block.activation_bytes, block.boundary_bytes, block.operators)
    return (*sizes, block.pinned, block.forward_s, block.backward_s, block.forward_flop)
