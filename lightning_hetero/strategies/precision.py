"""Puts the runtime into a precision plugin while a fit lasts.

``Strategy.backward`` and ``Strategy.optimizer_step`` stay Lightning's own. What they call of the precision plugin is the innermost
place that every backward and every optimizer step comes through, so the runtime stands there.

With speculation the runtime also clips gradients by norm and divides them by the loss's scale. Both are done with torch's own
functions and to the same bits, but in part block by block during backward; see the notes in ``runtime.speculation``. Plugins and
scalers of another make are left alone: then all updates follow the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from lightning_hetero.runtime.executor import Executor
from lightning_hetero.strategies.namespaces import lightning_of
from lightning_hetero.strategies.patches import Patches

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins import Precision


def can_serve(precision: Precision, trainer: pl.Trainer) -> bool:
    """Whether clipping and scaling are Lightning's and torch's own, and nothing looks at gradients between them and the step."""
    lightning = lightning_of(trainer)
    plugins = lightning.module("plugins.precision")
    known = (plugins.Precision, plugins.MixedPrecision)
    own = all(
        any(getattr(type(precision), name) is getattr(plugin, name) for plugin in known)
        for name in ("clip_gradients", "clip_grad_by_norm", "main_params", "optimizer_step")
    )
    clips_itself = type(trainer.lightning_module).clip_gradients is not lightning.module().LightningModule.clip_gradients
    scaler = getattr(precision, "scaler", None)
    plain = scaler is None or type(scaler) is torch.amp.GradScaler
    return own and plain and not clips_itself and not any(o._optimizer_step_pre_hooks for o in trainer.optimizers)


class _Around(partial[object]):
    """A method of a plugin with ours around it. Copied or pickled with the plugin, it is the plugin's own method again."""

    def __reduce__(self) -> tuple[object, ...]:
        inner = self.args[0]
        owner = getattr(inner, "__self__", None)
        return (getattr, (owner, inner.__name__)) if owner is not None else (partial, (inner,))


def around(plugin: Precision, name: str, ours: Callable[..., object]) -> Callable[..., object]:
    """What stands in the place of a plugin's method: ``ours``, which gets the method in front of its arguments."""
    return _Around(ours, getattr(plugin, name))


class PrecisionHooks:
    """What of a precision plugin, and of its loss scaler, stands replaced until :meth:`close`.

    Args:
        plugin: The precision plugin.
        backward: Called as the plugin's ``backward``, with that in front of its arguments.
        optimizer_step: The same for ``optimizer_step``.
        speculates: The runtime under way, if it clips and divides gradients in the plugin's place.
    """

    def __init__(
        self,
        plugin: Precision,
        *,
        backward: Callable[..., object],
        optimizer_step: Callable[..., object],
        speculates: Executor | None,
    ) -> None:
        self._plugin, self._executor = plugin, speculates
        self._around = {"backward": backward, "optimizer_step": optimizer_step}
        self._scaler: torch.amp.GradScaler | None = None
        if speculates is not None:
            self._scaler = getattr(plugin, "scaler", None)
            if self._scaler is not None:
                speculates.speculation.follow(self._scaler)
        self._patches = Patches()
        self._stand_in()

    def _stand_in(self) -> None:
        for name, ours in self._around.items():
            self._patches.replace(self._plugin, name, around(self._plugin, name, ours))
        if self._executor is not None:
            self._patches.replace(self._plugin, "clip_grad_by_norm", partial(self._clip, self._executor))
        if self._executor is not None and self._scaler is not None:
            self._patches.replace(self._scaler, "_unscale_grads_", self._executor.speculation.unscale_rest)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, plugin and scaler work as they were made, on gradients that are not the runtime's."""
        self.close()
        try:
            yield
        finally:
            self._stand_in()

    def _clip(self, executor: Executor, optimizer: Optimizer, clip_val: float) -> None:
        executor.clip(self._plugin.main_params(optimizer), clip_val)

    def close(self) -> None:
        """The plugin and the scaler are as they were."""
        self._patches.restore()
