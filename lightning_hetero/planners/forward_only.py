"""Predicts what runs without backward: a batch of a validation, and a token of a generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.schedule import OpKind, Payload, Schedule, StepSignature
from lightning_hetero.lowering import cache_sizes, fitted, steady
from lightning_hetero.planners.one_rank import as_run
from lightning_hetero.sim import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOnly:
    """One pass over the model without backward in steady state, during a fit under this plan.

    Attributes:
        read_bytes: Weights that come from disk.
        uploaded_bytes: Weights that a device with memory of its own gets.
        batch_s: Seconds of a validation batch that is as large as a batch of a forward in training.
        token_s: Seconds of a generated token at the least: those in which its weights come.
    """

    read_bytes: int
    uploaded_bytes: int
    batch_s: float
    token_s: float


def forward_only(plan: Plan, model: ModelProfile, hardware: HardwareProfile) -> ForwardOnly:
    """Simulates passes without backward, with the memory that a plan leaves during a fit.

    Args:
        plan: The plan; patterns are resolved.
        model: The model's profile.
        hardware: The machine's profile.

    Raises:
        PlanError: A tier is too small for the plan.
        ConfigError: The plan does not fit the model.
    """
    plan = plan.resolve(b.name for b in model.blocks)
    model, hardware = as_run(plan, model, hardware)
    plan = fitted(plan, model.shape(), device=hardware.copies_weights)
    space = cache_sizes(plan, model, hardware)
    signature = StepSignature(order=tuple(range(len(plan.blocks))), training=False)
    schedules = steady(plan, model.shape(), [signature], sizes=space)
    instant = replace(model, blocks=tuple(replace(b, forward_s=0.0, forward_flop=0.0) for b in model.blocks))
    batch_s, token_s = (simulate(schedules, plan, one, hardware, sizes=space).prediction.iteration_s for one in (model, instant))
    return ForwardOnly(
        read_bytes=_moved(schedules, OpKind.FETCH),
        uploaded_bytes=_moved(schedules, OpKind.UPLOAD),
        batch_s=batch_s,
        token_s=token_s,
    )


def _moved(schedules: Sequence[Schedule], kind: OpKind) -> int:
    return sum(op.num_bytes for s in schedules for op in s.ops if op.kind is kind and op.payload is Payload.WEIGHTS)
