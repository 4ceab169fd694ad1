"""What would make a model fit a machine, as a person would try it: each remedy has been planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning_hetero.cli.head import logits
from lightning_hetero.cli.options import Request
from lightning_hetero.cli.planning import Outcome
from lightning_hetero.errors import ConfigError, PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile

Fits = Callable[[ModelProfile], bool]

_SHORTEST = 128  # tokens: nobody trains on much shorter sequences
_ADAPTERS, _QUANTIZED = "r=16,targets=all-linear", "nf4-double"


def with_remedies(
    refusal: Exception, request: Request, model: ModelProfile, hardware: HardwareProfile, fits: Fits, *, another: Outcome | None
) -> Exception:
    """A refusal with more remedies, from those that keep the model to those that change it.

    Args:
        refusal: Why there is no plan.
        request: What was asked for.
        model: Its model.
        hardware: Its machine.
        fits: Whether there is a plan for another model.
        another: What the default planner finds, if another planner was asked.
    """
    if not isinstance(refusal, PlanError):
        return refusal
    found = [
        str(refusal),
        _another_planner(another),
        _head(request, model, hardware, fits),
        _smaller_batch(request, hardware, fits),
        _shorter_sequence(request, hardware, fits),
        _fewer_trained(request, hardware, fits),
    ]
    return PlanError(" ".join(filter(None, found)), tier=refusal.tier, shortfall_bytes=refusal.shortfall_bytes)


def _another_planner(found: Outcome | None) -> str:
    """A planner asked by name may leave a tier unused, so that more of it would not help."""
    if found is None:
        return ""
    if found.error is None:
        return f"Another planner: --planner {found.planner} fits."
    return (
        f"Planner {found.planner!r} finds none either; it needs {str(found.error).partition('Cheapest remedy: ')[2] or found.error}"
    )


def _head(request: Request, model: ModelProfile, hardware: HardwareProfile, fits: Fits) -> str:
    head = logits(request, model, hardware)
    return "" if head is None else f"The head: {head}{', and it fits' if fits(head.model) else ''}."


def _smaller_batch(request: Request, hardware: HardwareProfile, fits: Fits) -> str:
    """The largest batch that fits; the whole one does not."""
    enough, too_many = 0, request.batch or 1
    if too_many == 1:
        return ""
    while too_many - enough > 1:
        batch = (enough + too_many) // 2
        if fits(replace(request, batch=batch).model(hardware)):
            enough = batch
        else:
            too_many = batch
    return f"A smaller batch: --batch {enough} fits." if enough else "No smaller batch fits, not even --batch 1."


def _shorter_sequence(request: Request, hardware: HardwareProfile, fits: Fits) -> str:
    """The longest of half the sequence, a quarter and so on that fits with the whole batch."""
    if request.sequence is None:
        return ""
    length = request.sequence // 2
    while length >= _SHORTEST:
        if fits(replace(request, sequence=length).model(hardware)):
            return f"A shorter sequence: --sequence {length} fits."
        length //= 2
    return ""


def _fewer_trained(request: Request, hardware: HardwareProfile, fits: Fits) -> str:
    """Adapters instead of all weights, or quantized weights below them; of Hugging Face models."""
    if request.model_config is None or request.quantize is not None:
        return ""
    lora = request.lora or _ADAPTERS
    tries = [("Adapters", f"--lora {lora}", replace(request, lora=lora))] if request.lora is None else []
    quantized = replace(request, lora=lora, quantize=_QUANTIZED)
    flags = f"--quantize {_QUANTIZED}" if request.lora else f"--lora {lora} --quantize {_QUANTIZED}"
    tries.append(("Quantized frozen weights", flags, quantized))
    for what, flags, other in tries:
        try:
            if fits(other.model(hardware)):
                return f"{what}: {flags} fits."
        except ConfigError:  # an architecture that has no such layers
            continue
    return ""
