"""Lightning's callbacks that average weights, where several ranks hold them together.

Their hooks read and write all weights, and all ranks call the same hooks. So each hook runs within
``materialize``: there a rank sees whole weights and its own changes, and with the end of the hook
each rank's slice counts. All ranks have the same average, so these slices fit together.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING

import torch

from lightning_hetero.runtime.method_patches import Patches
from lightning_hetero.strategies.namespaces import callbacks_of, lightning_of
from lightning_hetero.untyped import Function, Value

if TYPE_CHECKING:
    import lightning.pytorch as pl

_HOOKS = (
    "on_load_checkpoint", "on_train_start", "on_train_epoch_start", "on_train_batch_end", "on_train_epoch_end",
    "on_validation_epoch_start", "on_validation_epoch_end", "on_train_end",
)  # fmt: skip


def averaging_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """The Trainer's callbacks that average weights."""
    kinds = lightning_of(trainer).module("callbacks")
    return [one for one in callbacks_of(trainer) if isinstance(one, kinds.WeightAveraging | kinds.StochasticWeightAveraging)]


def give_weights(trainer: pl.Trainer, materialized: Callable[[], AbstractContextManager[None]]) -> Patches:
    """Runs hooks of callbacks that average weights in a context, until the patches are restored.

    Args:
        trainer: The Trainer, whose fit begins.
        materialized: Makes the context, in which weights are whole.
    """
    patches, base = Patches(), lightning_of(trainer).module("callbacks").Callback
    for callback in averaging_of(trainer):
        for name in _HOOKS:
            if getattr(type(callback), name) is not getattr(base, name):
                patches.replace(callback, name, _within(materialized, getattr(callback, name)))
    return patches


def _within(materialized: Callable[[], AbstractContextManager[None]], hook: Function) -> Function:
    @wraps(hook)
    def run(*args: Value, **kwargs: Value) -> Value:
        with torch.inference_mode(False), torch.no_grad(), materialized():
            return hook(*args, **kwargs)

    return run
