"""A callback that sets layers free in the middle of training."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import BaseFinetuning


class Unfreezing(BaseFinetuning):
    """Trains the head first, a block from the second epoch on, the rest from the third."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.model.embed, pl_module.model.blocks])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.blocks[2], optimizer, lr=1e-3)
        if epoch == 2:
            self.unfreeze_and_add_param_group([pl_module.model.blocks[:2], pl_module.model.embed], optimizer, lr=5e-4)
