"""The reasons why a cluster cannot train a model: missing memory, the device, and remedies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from lightning_hetero.errors import PlanError
from lightning_hetero.parallel.planner.candidates import Setting
from lightning_hetero.parallel.planner.equations import StagePlace, mean_layer_bytes, most_layers, stage_bytes
from lightning_hetero.parallel.planner.mapping import stages_of
from lightning_hetero.units import format_bytes


def refuse(settings: Sequence[Setting], planner: str) -> NoReturn:
    """Raises the shortage of the pipeline of all devices that comes closest to holding the model.

    Args:
        settings: The settings that were tried.
        planner: The planner.

    Raises:
        PlanError: Always.
    """
    for setting in settings:
        deep = min(sum(setting.counts()), setting.work.num_layers)
        if deep > setting.micro_batches and not any(_missing(setting, d) for d in range(setting.micro_batches + 1, deep + 1)):
            raise PlanError(
                f"{setting.micro_batches} micro-batches a step; pipelines that hold the model have more stages, and 1F1B needs as "
                f"many micro-batches as stages. Raise --micro-batches to {deep}, or use devices with more memory."
            )
    short, setting, depth = min(
        ((_missing(s, d), s, d) for s in settings for d in range(1, _deepest(s) + 1)), key=lambda found: found[0]
    )
    work, t = setting.work, setting.tensor_parallel
    if not short:
        raise PlanError(
            f"planner {planner!r} has no plan for the cluster {setting.cluster.name!r} with {setting.micro_batches} micro-batches "
            "a step, though its memory holds the model: baselines use all devices in pipelines of equal depth, tensor "
            "parallelism has to divide every node, and a pipeline takes at least as many micro-batches as it has stages. "
            "Raise --micro-batches, change --tensor-parallel, or use the planner 'asymmetric'."
        )
    largest = max(setting.kinds.values(), key=lambda k: k.memory_bytes)
    tightest = min(setting.kinds.values(), key=lambda k: k.memory_bytes)
    one = mean_layer_bytes(work, StagePlace(stage=0, depth=1))
    held = most_layers(work, largest.memory_bytes, StagePlace(stage=depth, depth=depth + 2))  # a stage of a deeper pipeline
    more = f"add at least {t * -(-short // (held * one * t))} {largest.name}, " if held > 0 else ""
    if depth == work.num_layers:
        more = "tensor parallelism in larger nodes (a pipeline has no more stages than layers), "
    raise PlanError(
        f"the model does not fit the cluster {setting.cluster.name!r}: the best pipeline, with {depth} stages of {t} devices, "
        f"lacks {format_bytes(short)} ({short} bytes). One layer{'' if work.uniform else ', on average,'} takes "
        f"{format_bytes(one)} of a device; {tightest.name} has "
        f"{format_bytes(tightest.memory_bytes)}; context and temporary memory need {format_bytes(work.constant_bytes)}. "
        f"Remedy: {more}take a smaller micro-batch or a shorter sequence, or devices with more memory.",
        tier="device",
        shortfall_bytes=short,
    )


def _deepest(setting: Setting) -> int:
    return max(min(sum(setting.counts()), setting.work.num_layers, setting.micro_batches), 1)


def _missing(setting: Setting, depth: int) -> int:
    """Bytes of the layers that do not fit a pipeline of the devices with the most memory."""
    work, t = setting.work, setting.tensor_parallel
    kinds = list(setting.kinds.values())
    kind_of = sorted(stages_of(setting.counts()), key=lambda k: kinds[k].memory_bytes, reverse=True)[:depth]
    one = mean_layer_bytes(work, StagePlace(stage=0, depth=1))
    room = 0
    for s, kind in enumerate(kind_of):
        place = StagePlace(stage=s, depth=len(kind_of))
        lacking = stage_bytes(work, 0, place) - kinds[kind].memory_bytes
        held = most_layers(work, kinds[kind].memory_bytes, place)
        room += held if held >= 0 else -(-lacking // max(one, 1)) * -1
    return max(work.num_layers - room, 0) * one * t
