"""Anchors of a parked model: between fits, code that needs no gradients runs by the plan."""

from __future__ import annotations

import torch

from lightning_hetero.runtime.anchors import Inputs, Watcher
from lightning_hetero.runtime.executor import Executor
from lightning_hetero.store.live.blocks import Block


class ParkedAnchors:
    """Gives anchors to the executor of a parked model.

    It does not where gradients are enabled, because nothing brings weights for backward: then the
    block's parameters stay handles, which refuse to lose a gradient. It does not either once
    another Trainer has moved the block's parameters to memory of its own.
    """

    watcher: Watcher | None = None

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._open: list[bool] = []  # whether the forwards under way have had their anchor

    def forward_begins(self, block: Block, inputs: Inputs) -> None:
        """The forward of a block begins."""
        parts = [*block.parts, *(() if block.trained is None else block.trained.parts)]
        follows = not torch.is_grad_enabled() and all(part.has_its_params() for part in parts)
        self._open.append(False)
        if follows:
            self._executor.forward_begins(block, inputs)
            self._open[-1] = True

    def forward_ends(self, block: Block, output: object) -> None:
        """It has ended, maybe by an exception."""
        if self._open and self._open.pop():
            self._executor.forward_ends(block, output)

    def backward_begins(self, block: Block) -> None:
        """A backward has no anchor: weights in it are copies that handles have read."""
