"""Weights whose memory code holds, as ``detach`` or ``data`` gives it in a forward.

Reading such memory asks nobody. So after ``optimizer.step()`` it has the new weights, although
other updates still run. If the weights leave it, it is something else later, and a warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from lightning_hetero.ir.plan import Tier
from lightning_hetero.runtime.residency import Residency
from lightning_hetero.store.live.blocks import Block, Part

log = logging.getLogger(__name__)


class WeightsInCode:
    """Those of one model.

    Args:
        residency: Where the weights are.
        on_device: They compute on a device with memory of its own.
    """

    def __init__(self, residency: Residency, *, on_device: bool) -> None:
        self._residency, self._on_device = residency, on_device
        self._named: set[str] = set()  # weights that a warning has named

    def settle(self, blocks: Sequence[Block]) -> None:
        """Waits for updates of those that stay in their memory; warns of those that leave it."""
        for part, name in self._held(blocks):
            tier = part.block.plan.weights
            leaves = tier is not Tier.DEVICE if self._on_device else tier is Tier.DISK
            if not leaves and not self._on_device:  # the device reads behind its own updates
                self._residency.settle(part)
            if leaves and name not in self._named:
                self._named.add(name)
                log.warning(
                    "Code holds the memory of %r, as detach() or data gives it in a forward. These weights live on tier %r, so the "
                    "memory has other content later. Take it anew where it is read, or a copy, or keep the block where it computes "
                    "by another plan.", name, tier.value,
                )  # fmt: skip

    def _held(self, blocks: Sequence[Block]) -> list[tuple[Part, str]]:
        """The parts whose memory code holds, each with its first such parameter."""
        mine = 3 if self._on_device else 1  # a device's memory has two tensors of ours
        uses, held = torch._C._storage_Use_Count, list[tuple[Part, str]]()
        with torch._C.DisableTorchFunctionSubclass():  # handles would answer in Python
            for block in blocks:
                for part in block.parts:
                    for name, param in zip(part.names, part.params, strict=True):
                        if uses(param.untyped_storage()._cdata) > mine + 1:  # the storage that asks
                            held.append((part, name))
                            break
        return held
