"""When the Trainer and its hooks allow updates: during backward, or after all gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_hetero.optim.combined import members
from lightning_hetero.runtime.options import StepRules
from lightning_hetero.strategies.namespaces import callbacks_of, lightning_of
from lightning_hetero.strategies.precision import can_serve

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins import Precision

_CLIPPED = "gradients are clipped by their global norm"
_SCALED = "the loss is scaled"

# These hooks see or change gradients. If one is overridden, it must find all gradients, as in plain
# Lightning.
_MODULE_HOOKS = (
    "configure_gradient_clipping",
    "on_before_optimizer_step",
    "on_after_backward",
    "backward",
    "on_before_zero_grad",
    "optimizer_zero_grad",
)
_CALLBACK_HOOKS = ("on_before_optimizer_step", "on_after_backward", "on_before_zero_grad")


def step_rules(trainer: pl.Trainer, module: pl.LightningModule, precision: Precision) -> StepRules:
    """The rules for one ``fit``."""
    lightning = lightning_of(trainer)
    schedule = lightning.module("callbacks").GradientAccumulationScheduler
    accumulates = trainer.accumulate_grad_batches > 1 or any(isinstance(c, schedule) for c in callbacks_of(trainer))
    by_hand = "" if module.automatic_optimization else "optimization is manual"
    combined = [type(o).__name__ for o in trainer.optimizers if members(o) != [o]]
    if by_hand or combined:  # user code runs between optimizer steps
        why = by_hand or f"{combined[0]} runs other optimizers"
        return StepRules(deferred=why, accumulates=True, keep_gradients=True, waits=True, norms=True)
    algorithm = str(getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm))
    reason = _reason(trainer, module, precision)
    limit = float(trainer.gradient_clip_val or 0)
    by_value, by_norm = limit != 0 and algorithm == "value", limit != 0 and algorithm != "value"
    if not reason and by_norm:
        reason = _CLIPPED
    clip = limit if by_value and not reason else None
    scaled = getattr(precision, "scaler", None) is not None
    # Scaled gradients are clipped by value once they are divided. An update before that would take
    # gradients that are not clipped.
    speculates = (by_norm or scaled) and not by_value and reason in (_CLIPPED, _SCALED) and can_serve(precision, trainer)
    norms = by_norm or lightning.is_overridden("configure_gradient_clipping", module)
    return StepRules(
        deferred=reason, accumulates=accumulates, keep_gradients=bool(reason), clip_value=clip, norms=norms, speculates=speculates
    )


def _reason(trainer: pl.Trainer, module: pl.LightningModule, precision: Precision) -> str:
    is_overridden = lightning_of(trainer).is_overridden
    for hook in _MODULE_HOOKS:
        if is_overridden(hook, module):
            return f"{type(module).__name__}.{hook} is overridden"
    for callback in callbacks_of(trainer):
        for hook in _CALLBACK_HOOKS:
            if is_overridden(hook, callback):
                return f"callback {type(callback).__name__} overrides {hook}"
    for optimizer in trainer.optimizers:
        if optimizer._optimizer_step_post_hooks:
            return f"{type(optimizer).__name__} has hooks that run after its step"
    return "" if getattr(precision, "scaler", None) is None else _SCALED
