"""Lets the runtime clip gradients and divide them by the loss's scale in the precision plugin's place, while a fit lasts.

Both are done with torch's own functions and to the same bits, only that a part of it is done block by block during backward; see
the notes in ``runtime.speculation``. Plugins and scalers of another make are left alone: then all updates follow the verdict.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_hetero.runtime.executor import Executor


def can_serve(precision: Any, trainer: Any, namespace: str) -> bool:
    """Whether clipping and scaling are Lightning's and torch's own, and nobody looks at gradients between them and the step."""
    plugins = importlib.import_module(f"{namespace}.plugins.precision")
    known = (plugins.Precision, plugins.MixedPrecision)
    own = all(
        any(getattr(type(precision), name) is getattr(plugin, name) for plugin in known)
        for name in ("clip_gradients", "clip_grad_by_norm", "main_params", "optimizer_step")
    )
    module = importlib.import_module(namespace).LightningModule
    clips_itself = type(trainer.lightning_module).clip_gradients is not module.clip_gradients
    scaler = getattr(precision, "scaler", None)
    plain = scaler is None or type(scaler) is torch.amp.GradScaler
    return own and plain and not clips_itself and not any(o._optimizer_step_pre_hooks for o in trainer.optimizers)


class Verdicts:
    """Stands in for a precision plugin's clipping and a scaler's dividing until :meth:`close`.

    Args:
        precision: The plugin.
        executor: The runtime under way.
    """

    def __init__(self, precision: Any, executor: Callable[[], Executor]) -> None:
        self._precision, self._executor = precision, executor
        self._scaler: Any = getattr(precision, "scaler", None)
        if self._scaler is not None:
            speculation = executor().speculation
            speculation.scaler, speculation.unscale = self._scaler, self._scaler._unscale_grads_
        self._stand_in()

    def _stand_in(self) -> None:
        self._precision.clip_grad_by_norm = self._clip
        if self._scaler is not None:
            self._scaler._unscale_grads_ = self._unscale

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, plugin and scaler work as their makers meant them to: on gradients that are not the runtime's."""
        self.close()
        try:
            yield
        finally:
            self._stand_in()

    def _clip(self, optimizer: Any, clip_val: float) -> None:
        self._executor().clip(self._precision.main_params(optimizer), clip_val)

    def _unscale(self, optimizer: Any, inverse: Any, found_inf: Any, allow_fp16: bool) -> Any:
        return self._executor().speculation.unscale_rest(optimizer, inverse, found_inf, allow_fp16)

    def close(self) -> None:
        """The plugin and the scaler are as they were."""
        vars(self._precision).pop("clip_grad_by_norm", None)
        if self._scaler is not None:
            vars(self._scaler).pop("_unscale_grads_", None)
