"""Puts the runtime into a precision plugin while a fit lasts.

``Strategy.backward`` and ``Strategy.optimizer_step`` stay Lightning's own. Every backward and every
optimizer step passes through the precision plugin's methods of these names, so the runtime replaces
those.

With speculation the runtime also clips gradients by norm and divides them by the loss's scale. It
uses torch's own functions and gets the same bits, but does part of the work block by block during
backward; see the notes in ``runtime.speculation``. Plugins and scalers of other classes are not
replaced: then all updates follow the verdict.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch.optim import Optimizer

from lightning_hetero.runtime.executor import Executor
from lightning_hetero.runtime.method_patches import Patches
from lightning_hetero.strategies.namespaces import lightning_of
from lightning_hetero.untyped import Function

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins import Precision


def can_serve(precision: Precision, trainer: pl.Trainer) -> bool:
    """Whether clipping and scaling are Lightning's and torch's own, and the step follows."""
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


def compute_on(precision: Precision, device: torch.device, trainer: pl.Trainer) -> None:
    """Lets mixed precision cast on the device that computes, and scale losses there.

    Lightning chooses the device of its own GPU accelerator for every one that it does not know.
    """
    mixed = lightning_of(trainer).module("plugins.precision").MixedPrecision
    if not isinstance(precision, mixed) or precision.device == device.type:
        return
    precision.device, scaler = device.type, precision.scaler
    if type(scaler) is torch.amp.GradScaler:
        names = {"init_scale": "scale", **{n: n for n in ("growth_factor", "backoff_factor", "growth_interval")}}
        kept = {name: getattr(scaler, f"get_{get}")() for name, get in names.items() if scaler.is_enabled()}
        precision.scaler = torch.amp.GradScaler(device.type, **kept)


class Method(Protocol):
    """A method of a plugin, which takes any arguments."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Calls it."""


class _Around(partial[object]):
    """A plugin's method inside ours. A copy or pickle of it is the plugin's own method."""

    def __reduce__(self) -> tuple[object, ...]:
        inner = self.args[0]
        owner = getattr(inner, "__self__", None)
        return (getattr, (owner, inner.__name__)) if owner is not None else (partial, (inner,))


def around(plugin: Precision, name: str, ours: Function) -> Function:
    """A replacement of a plugin's method: ``ours``, whose first argument is that method."""
    return _Around(ours, getattr(plugin, name))


class PrecisionHooks:
    """Replaces methods of a precision plugin and its loss scaler until :meth:`close`.

    Args:
        backward: Replaces the plugin's method, as in :func:`around`; so does ``optimizer_step``.
        speculates: The executor, if it clips and unscales gradients instead of the plugin.
    """

    def __init__(
        self,
        plugin: Precision,
        *,
        backward: Function,
        optimizer_step: Function,
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
        """In the context plugin and scaler are restored, for gradients of another model."""
        self.close()
        try:
            yield
        finally:
            self._stand_in()

    def _clip(self, executor: Executor, optimizer: Optimizer, clip_val: float) -> None:
        executor.speculation.clip(self._plugin.main_params(optimizer), clip_val)

    def close(self) -> None:
        """Restores the plugin and the scaler."""
        self._patches.restore()
