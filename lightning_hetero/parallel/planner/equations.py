"""What a stage takes in time and memory, and AutoHet's equations 1, 2 and 5.

[Note: What is counted]
Forward and backward of a micro-batch are three forwards' FLOP. With tensor parallelism of degree t a layer needs 1/t of them, and
four all-reduces of its input's size: two in forward, two in backward (Shoeybi et al. 2019, section 3). A ring moves 2(t - 1)/t of
the bytes. Weights, gradients and optimizer state shrink to 1/t, saved activations to (10 + 24/t)/34 (Korthikanti et al. 2022,
equation 2): norms and dropout are not split. Between stages the boundary goes forward and its gradient comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.parallel.planner.clusters import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One layer, or what precedes or follows all layers.

    Attributes:
        flop: Forward and backward of one micro-batch, FLOP.
        fixed_bytes: Weights, gradients and optimizer state, bytes.
        gradient_bytes: Of these, gradients.
        activation_bytes: Saved by one micro-batch for its backward, bytes.
    """

    flop: float
    fixed_bytes: int
    gradient_bytes: int
    activation_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model as pipelines see it: equal layers, and two ends.

    Attributes:
        num_layers: Repeated layers.
        layer: One of them; where they differ, the mean FLOP and the largest bytes.
        first: What precedes them, on the first stage.
        last: What follows them, on the last stage.
        boundary_bytes: What one micro-batch hands from stage to stage, bytes.
        constant_bytes: What every device needs besides: context, and the most that one block needs while it computes.
        tokens: Tokens of one micro-batch.
    """

    num_layers: int
    layer: Part
    first: Part
    last: Part
    boundary_bytes: int
    constant_bytes: int
    tokens: int

    @classmethod
    def of(cls, model: ModelProfile) -> Workload:
        """Reads a model's profile.

        Raises:
            ConfigError: It has no repeated layers.
        """
        repeated = [i for i, block in enumerate(model.blocks) if not block.pinned]
        if not repeated:
            raise ConfigError(
                f"model {model.name!r} has no repeated layers that a pipeline could be cut at; all blocks are pinned."
            )
        begin, end = repeated[0], repeated[-1] + 1
        layers = [_part((block,), model) for block in model.blocks[begin:end]]
        return cls(
            num_layers=end - begin,
            layer=Part(
                flop=sum(p.flop for p in layers) / len(layers),
                fixed_bytes=max(p.fixed_bytes for p in layers),
                gradient_bytes=max(p.gradient_bytes for p in layers),
                activation_bytes=max(p.activation_bytes for p in layers),
            ),
            first=_part(model.blocks[:begin], model),
            last=_part(model.blocks[end:], model),
            boundary_bytes=max(b.boundary_bytes for b in model.blocks[begin:end]),
            constant_bytes=model.constant_device_bytes + max(b.transient_bytes for b in model.blocks),
            tokens=model.tokens,
        )

    @property
    def flop(self) -> float:
        """Of one micro-batch through the whole model."""
        return self.num_layers * self.layer.flop + self.first.flop + self.last.flop


def _part(blocks: Sequence[BlockProfile], model: ModelProfile) -> Part:
    trainable = sum(b.num_trainable_params for b in blocks)
    gradients = trainable * model.compute_itemsize
    weights = sum(b.num_params for b in blocks) * model.compute_itemsize
    return Part(
        flop=3 * sum(b.forward_flop for b in blocks),
        fixed_bytes=weights + gradients + trainable * model.state_itemsize,
        gradient_bytes=gradients,
        activation_bytes=sum(b.activation_bytes for b in blocks),
    )


class Place(NamedTuple):
    """Where a stage stands in its pipeline.

    Attributes:
        stage: s, from 0.
        depth: S.
    """

    stage: int
    depth: int

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations the stage holds at once under 1F1B: earlier stages hold more."""
        return self.depth - self.stage

    @property
    def is_first(self) -> bool:
        """It holds what precedes the layers."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """It holds what follows them."""
        return self.stage == self.depth - 1


def layers_s(work: Workload, kind: Kind, tensor_parallel: int, num_layers: int) -> float:
    """Seconds of one micro-batch through some layers: measured ones if there are any, else FLOP and tensor parallel traffic.

    ``T(n) = sum_k b_k T(2^k)``, ``n = sum_k b_k 2^k``; the longest measured run counts as often as it fits. Source: equation 5.
    """
    measured = kind.layer_times.get(tensor_parallel)
    if measured is None:
        t = tensor_parallel
        traffic = 4 * 2 * (t - 1) / t * work.boundary_bytes / kind.peer_bytes_per_s
        return num_layers * (work.layer.flop / (t * kind.flop_per_s) + traffic)
    seconds, left = 0.0, num_layers
    for power in range(len(measured) - 1, -1, -1):
        times, left = divmod(left, 2**power)
        seconds += times * measured[power]
    return seconds


def stage_s(work: Workload, kind: Kind, tensor_parallel: int, num_layers: int, place: Place, link_bytes_per_s: float) -> float:
    """t[s, j]: seconds of forward and backward of one micro-batch on a stage, traffic with the next stage included.

    Args:
        work: The model.
        kind: The stage's devices.
        tensor_parallel: How many of them compute together.
        num_layers: Its layers.
        place: Where it stands.
        link_bytes_per_s: To the next stage.
    """
    ends = work.first.flop * place.is_first + work.last.flop * place.is_last
    handed = 0.0 if place.is_last else 2 * work.boundary_bytes / link_bytes_per_s
    return layers_s(work, kind, tensor_parallel, num_layers) + ends / (tensor_parallel * kind.flop_per_s) + handed


def stage_bytes(work: Workload, tensor_parallel: int, num_layers: int, place: Place) -> int:
    """Peak memory of one device of a stage: ``l_s (fixed + act in_flight_s)`` and the ends. Source: equation 4c."""
    t = tensor_parallel
    parts = [(work.layer, num_layers)] + [(work.first, 1)] * place.is_first + [(work.last, 1)] * place.is_last
    fixed = sum(count * part.fixed_bytes for part, count in parts) / t
    saved = sum(count * part.activation_bytes for part, count in parts) * (10 + 24 / t) / 34
    return int(work.constant_bytes + fixed + place.in_flight * saved)


def most_layers(work: Workload, memory_bytes: int, tensor_parallel: int, place: Place) -> int:
    """The most layers that a stage's memory holds (equation 4c); -1 if not even its ends fit."""
    empty = stage_bytes(work, tensor_parallel, 0, place)
    if empty > memory_bytes:
        return -1
    fits = int((memory_bytes - empty) // max(stage_bytes(work, tensor_parallel, 1, place) - empty, 1))
    return min(fits, work.num_layers)


def pipeline_s(stages_s: Sequence[float], micro_batches: int) -> float:
    """Seconds of one group's part of a step under 1F1B: ``sum_s t[s] + (K - 1) max_s t[s]``. Source: equation 1."""
    return sum(stages_s) + (micro_batches - 1) * max(stages_s)


def bubble(stages: int, micro_batches: float) -> float:
    """The share of a pipeline's time in which its stages wait: ``(S - 1) / (K + S - 1)``. Source: equation 2, inferred form."""
    return (stages - 1) / (micro_batches + stages - 1)


def effective_power(power: float, stages: int, micro_batches: float) -> float:
    """``G_j = (1 - bubble_j) sum_i x[i, j] g_i``. Source: equation 2."""
    return (1 - bubble(stages, micro_batches)) * power
