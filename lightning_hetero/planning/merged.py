"""What ranks have measured, merged so that a plan made from it suits all of them.

Of sizes and seconds the largest counts, of rates and memory the smallest. Ranks differ in their
batches, and in what else runs where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BackwardOperator, BlockProfile, ModelProfile, OperatorProfile

_SIZES_AND_SECONDS = ("forward_s", "backward_s", "forward_flop", "boundary_bytes", "transient_bytes", "cast_bytes")
_OF_BACKWARD = ("gap_peak_bytes", "before_bytes", "peak_bytes", "after_bytes", "freed_bytes")
_SAME = ("world_size", "ranks", "gathers_in_place", "gathers_on_devices", "shared_memory", "unified_memory")
_NO_RATES = (*_SAME, "name", "contention", "source", "disk_duplex", "meeting_s")


def merged_models(profiles: Sequence[ModelProfile]) -> ModelProfile:
    """The profile of one model that several ranks have measured, each with its own batches.

    Raises:
        ConfigError: They are of different models; names the first difference.
    """
    first = profiles[0]
    for rank, other in enumerate(profiles):
        _same(rank, _stored(first), _stored(other))
    blocks = [_merged_blocks([p.blocks[i] for p in profiles]) for i in range(len(first.blocks))]
    most = {key: max(getattr(p, key) for p in profiles) for key in ("tokens", "constant_device_bytes", "constant_host_bytes")}
    return replace(first, blocks=tuple(blocks), **most)


def _stored(model: ModelProfile) -> list[tuple[str, object]]:
    """What ranks have in common."""
    rows: list[tuple[str, object]] = [("the number of blocks", len(model.blocks)), ("compute_itemsize", model.compute_itemsize)]
    for shape in model.shape().blocks:
        sizes = (shape.num_params, shape.weight_bytes, shape.gradient_bytes, shape.state_bytes, shape.pinned)
        rows.append((f"block {shape.name!r}", (shape.name, *sizes)))
    return rows


def _same(rank: int, ours: Sequence[tuple[str, object]], theirs: Sequence[tuple[str, object]]) -> None:
    for (what, mine), (_, other) in zip(ours, theirs, strict=False):
        if mine != other:
            raise ConfigError(f"rank 0 and rank {rank} have measured different things: {what} is {mine!r} and {other!r}.")


def _merged_blocks(blocks: Sequence[BlockProfile]) -> BlockProfile:
    most = {key: max(getattr(b, key) for b in blocks) for key in _SIZES_AND_SECONDS}
    operators = _merged_operators([b.operators for b in blocks])
    # A profile's operators and input are parts of what its block saves.
    saved = max(*(b.activation_bytes for b in blocks), most["boundary_bytes"], sum(o.bytes for o in operators))
    return replace(
        blocks[0], operators=operators, backward=_merged_backward([b.backward for b in blocks]), activation_bytes=saved, **most
    )


def _merged_operators(found: Sequence[Sequence[OperatorProfile]]) -> tuple[OperatorProfile, ...]:
    merged: dict[str, OperatorProfile] = {}
    for one in (o for operators in found for o in operators):
        known = merged.get(one.name, one)
        merged[one.name] = replace(one, flop=max(one.flop, known.flop), bytes=max(one.bytes, known.bytes))
    return tuple(merged.values())


def _merged_backward(found: Sequence[Sequence[BackwardOperator]]) -> tuple[BackwardOperator, ...]:
    """Step by step where ranks ran the same operators; else those of the highest peak."""
    if len({tuple(o.name for o in operators) for operators in found}) > 1:
        return tuple(max(found, key=lambda operators: max((o.peak_bytes for o in operators), default=0)))
    return tuple(
        replace(row[0], **{key: max(getattr(o, key) for o in row) for key in _OF_BACKWARD}) for row in zip(*found, strict=True)
    )


def merged_machines(profiles: Sequence[HardwareProfile]) -> HardwareProfile:
    """The shares that several ranks have of a machine, as one share that each of them has.

    Raises:
        ConfigError: They are of different kinds of machines; names the first difference.
    """
    first = profiles[0]
    for rank, other in enumerate(profiles):
        _same(rank, *([(key, getattr(p, key)) for key in _SAME] for p in (first, other)))
    least, source = {}, dict(first.source)
    for key in (f.name for f in fields(HardwareProfile) if f.name not in _NO_RATES):
        rank = min(range(len(profiles)), key=lambda r: getattr(profiles[r], key))
        least[key] = getattr(profiles[rank], key)
        if key in profiles[rank].source:
            source[key] = profiles[rank].source[key]
    pairs = {pair: max(p.contention.get(pair, 1.0) for p in profiles) for p in profiles for pair in p.contention}
    return replace(
        first,
        disk_duplex=all(p.disk_duplex for p in profiles),
        meeting_s=max(p.meeting_s for p in profiles),
        contention=pairs,
        source=source,
        **least,
    )
