"""Time and memory of a stage, and AutoHet's equations 1, 2 and 5.

[Note: What is counted]
Forward and backward of a micro-batch are three forwards' FLOP. Between stages the boundary goes
forward and its gradient comes back. With tensor parallelism of degree t a device holds and computes
1/t of the sharded share in a block's profile, and all of the rest. A ring all-reduce moves 2(t -
1)/t of the bytes. Without such a share in the profile, blocks are sharded as in Megatron-LM: all
weights and FLOP; 24/34 of the saved activations, because norms and dropout are not split
(Korthikanti et al. 2022, equation 2); a layer has four all-reduces of its input's size, two in
forward, two in backward (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import NamedTuple

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.model import BlockProfile, ModelProfile, Sharding, undivided
from lightning_hetero.parallel.planner.known_clusters import DeviceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPart:
    """One device's share of a layer, or of the modules before or after all layers.

    Attributes:
        flop: Forward and backward of one micro-batch, FLOP.
        fixed_bytes: Weights, gradients and optimizer state, bytes.
        gradient_bytes: Gradients, part of ``fixed_bytes``.
        activation_bytes: Activations that one micro-batch saves for its backward, bytes.
        sent_bytes: Bytes sent to the other devices of its stage, for one micro-batch.
    """

    flop: float
    fixed_bytes: float
    gradient_bytes: float
    activation_bytes: float
    sent_bytes: float

    def times(self, count: float) -> LayerPart:
        """A multiple of the share."""
        return LayerPart(**{f.name: count * getattr(self, f.name) for f in fields(self)})

    def plus(self, other: LayerPart, sign: int = 1) -> LayerPart:
        """The sum of both; with ``sign=-1`` the difference."""
        return LayerPart(**{f.name: getattr(self, f.name) + sign * getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model for pipelines: layers and two ends, as one device of a stage has them.

    Attributes:
        tensor_parallel: t, devices of one stage.
        layers: The repeated layers, in order.
        until: The sum of the first n layers, for each n from 0.
        uniform: Whether all layers are equal.
        first: The modules before them, on the first stage.
        last: The modules after them, on the last stage.
        boundary_bytes: Bytes that one micro-batch passes from each layer to the next.
        constant_bytes: Other memory of every device: context, and the peak of temporary memory of a
            block.
        tokens: Tokens of one micro-batch.
        model_flop: FLOP of one micro-batch through the whole model.
    """

    tensor_parallel: int
    layers: tuple[LayerPart, ...]
    until: tuple[LayerPart, ...]
    uniform: bool
    first: LayerPart
    last: LayerPart
    boundary_bytes: tuple[int, ...]
    constant_bytes: int
    tokens: int
    model_flop: float

    @classmethod
    def of(cls, model: ModelProfile, tensor_parallel: int = 1) -> Workload:
        """Reads a model's profile.

        Raises:
            ConfigError: It has no repeated layers.
        """
        model = undivided(model)
        repeated = [i for i, block in enumerate(model.blocks) if not block.pinned]
        if not repeated:
            raise ConfigError(
                f"model {model.name!r} has no repeated layers that a pipeline could be cut at; all blocks are pinned."
            )
        begin, end = repeated[0], repeated[-1] + 1
        layers = tuple(_part((block,), model, tensor_parallel, all_reduces=4) for block in model.blocks[begin:end])
        boundaries = tuple(b.boundary_bytes for b in model.blocks[begin:end])
        return cls(
            tensor_parallel=tensor_parallel,
            layers=layers,
            until=tuple(accumulate(layers, LayerPart.plus, initial=layers[0].times(0))),
            uniform=len(set(layers)) == 1 and len(set(boundaries)) == 1,
            first=_part(model.blocks[:begin], model, tensor_parallel),
            last=_part(model.blocks[end:], model, tensor_parallel),
            boundary_bytes=boundaries,
            constant_bytes=model.constant_device_bytes + max(b.transient_bytes for b in model.blocks),
            tokens=model.tokens,
            model_flop=3 * sum(b.forward_flop for b in model.blocks),
        )

    @property
    def num_layers(self) -> int:
        """Repeated layers."""
        return len(self.layers)

    @property
    def mean(self) -> LayerPart:
        """The average layer."""
        return self.layers[0] if self.uniform else self.until[-1].times(1 / self.num_layers)

    def run(self, begin: int, count: int) -> LayerPart:
        """The sum of ``count`` layers from layer ``begin`` on."""
        return self.layers[0].times(count) if self.uniform else self.until[begin + count].plus(self.until[begin], -1)


def _part(blocks: Sequence[BlockProfile], model: ModelProfile, t: int, *, all_reduces: int = 0) -> LayerPart:
    """One device's share of blocks; without traffic in the profile, with this many all-reduces."""

    def sum_of(key: str) -> float:
        return sum(float(getattr(b, key)) - float(getattr(s, key)) * (1 - 1 / t) for b, s in sharded)

    sharded = [(b, b.sharding or _as_megatron(b, all_reduces)) for b in blocks]
    trainable = sum_of("num_trainable_params")
    gradients = trainable * model.compute_itemsize
    return LayerPart(
        flop=3 * sum_of("forward_flop"),
        fixed_bytes=sum_of("num_params") * model.compute_itemsize + gradients + trainable * model.state_itemsize,
        gradient_bytes=gradients,
        activation_bytes=sum_of("activation_bytes") + sum(_cast_bytes(b, s, t) for b, s in sharded),
        sent_bytes=2 * (t - 1) / t * sum(s.traffic_bytes for _, s in sharded),
    )


def _cast_bytes(block: BlockProfile, sharding: Sharding, t: int) -> float:
    """One device's share of the casts of a block's weights."""
    return block.cast_bytes * (1 - (1 - 1 / t) * sharding.num_params / max(1, block.num_params))


def _as_megatron(block: BlockProfile, all_reduces: int) -> Sharding:
    return Sharding(
        num_params=block.num_params,
        num_trainable_params=block.num_trainable_params,
        forward_flop=block.forward_flop,
        activation_bytes=block.activation_bytes * 24 // 34,
        traffic_bytes=all_reduces * block.boundary_bytes,
    )


class StagePlace(NamedTuple):
    """The position of a stage in its pipeline.

    Attributes:
        stage: s, from 0.
        depth: S.
    """

    stage: int
    depth: int

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations the stage holds under 1F1B; earlier stages hold more."""
        return self.depth - self.stage

    @property
    def is_first(self) -> bool:
        """Whether it has the modules before the layers."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the modules after the layers."""
        return self.stage == self.depth - 1


def layers_s(work: Workload, kind: DeviceKind, num_layers: int, begin: int = 0) -> float:
    """Seconds of one micro-batch through some layers: measured, or from FLOP and traffic.

    ``T(n) = sum_k b_k T(2^k)``, ``n = sum_k b_k 2^k``; the longest measured run counts as often as
    it fits. Source: equation 5. If layers differ, these seconds are divided by FLOP [assumed: the
    paper's layers are equal].

    Args:
        work: The model.
        kind: The stage's devices.
        num_layers: The number of layers.
        begin: The first layer.
    """
    measured = kind.layer_times.get(work.tensor_parallel)
    if measured is None:
        return num_layers * _part_s(work.layers[0], kind) if work.uniform else _part_s(work.run(begin, num_layers), kind)
    seconds, left = 0.0, num_layers
    for power in range(len(measured) - 1, -1, -1):
        times, left = divmod(left, 2**power)
        seconds += times * measured[power]
    if work.uniform or not num_layers or not work.mean.flop:
        return seconds
    return seconds * work.run(begin, num_layers).flop / (num_layers * work.mean.flop)


def _part_s(part: LayerPart, kind: DeviceKind) -> float:
    return part.flop / kind.flop_per_s + part.sent_bytes / kind.peer_bytes_per_s


def besides_s(work: Workload, kind: DeviceKind, place: StagePlace, link_bytes_per_s: float, last: int = 0) -> float:
    """The rest of t[s, j] beside :func:`layers_s`: the model's ends, and traffic to the next stage.

    Args:
        work: The model.
        kind: The stage's devices.
        place: Its position.
        link_bytes_per_s: Bandwidth to the next stage.
        last: The stage's last layer.
    """
    ends = _part_s(work.first, kind) * place.is_first + _part_s(work.last, kind) * place.is_last
    handed = 0.0 if place.is_last else 2 * work.boundary_bytes[last] / link_bytes_per_s
    return ends + handed


def stage_bytes(work: Workload, num_layers: int, place: StagePlace, begin: int = 0) -> int:
    """Peak memory of one device of a stage: ``l_s (fixed + act in_flight_s)`` and the ends.

    Source: equation 4c.

    Args:
        work: The model.
        num_layers: Layers of the stage.
        place: Its position.
        begin: Its first layer.
    """
    return _bytes_with(work, work.run(begin, num_layers), place)


def _bytes_with(work: Workload, layers: LayerPart, place: StagePlace) -> int:
    parts = [layers] + [work.first] * place.is_first + [work.last] * place.is_last
    fixed = sum(part.fixed_bytes for part in parts)
    saved = sum(part.activation_bytes for part in parts)
    return int(work.constant_bytes + fixed + place.in_flight * saved)


def mean_layer_bytes(work: Workload, place: StagePlace) -> int:
    """Memory of one more layer of average size on a stage."""
    return _bytes_with(work, work.mean, place) - stage_bytes(work, 0, place)


def most_layers(work: Workload, memory_bytes: int, place: StagePlace, begin: int | None = None) -> int:
    """The most layers that a stage's memory holds (equation 4c); -1 if not even its ends fit.

    Args:
        work: The model.
        memory_bytes: Memory of one device.
        place: The stage's position.
        begin: Its first layer; ``None``: layers of average size.
    """
    empty = stage_bytes(work, 0, place)
    if empty > memory_bytes:
        return -1
    if begin is not None and not work.uniform:
        counts = range(work.num_layers - begin + 1)
        return bisect_right(counts, memory_bytes, key=lambda n: stage_bytes(work, n, place, begin)) - 1
    return min(int((memory_bytes - empty) // max(mean_layer_bytes(work, place), 1)), work.num_layers)


def pipeline_s(stages_s: Sequence[float], micro_batches: int) -> float:
    """Seconds of one group's part of a step under 1F1B: ``sum_s t[s] + (K - 1) max_s t[s]``.

    Source: equation 1.
    """
    return sum(stages_s) + (micro_batches - 1) * max(stages_s)


def bubble(stages: int, micro_batches: float) -> float:
    """The share of a pipeline's time in which its stages wait: ``(S - 1) / (K + S - 1)``.

    Source: equation 2, inferred form.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def effective_power(power: float, stages: int, micro_batches: float) -> float:
    """``G_j = (1 - bubble_j) sum_i x[i, j] g_i``. Source: equation 2."""
    return (1 - bubble(stages, micro_batches)) * power
