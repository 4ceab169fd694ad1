"""Profiles that ranks have measured, merged: what suits all of them."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.profiles import machines, models

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.planning.merged import merged_machines, merged_models

LARGEST = ("forward_s", "backward_s", "forward_flop", "activation_bytes", "boundary_bytes", "transient_bytes", "cast_bytes")
LEAST = [f.name for f in fields(HardwareProfile) if f.name.endswith(("_per_s", "memory_bytes", "capacity_bytes"))]


def _measured(model: ModelProfile, factors: list[float]) -> ModelProfile:
    """The same model in other batches: each figure of compute is another multiple."""
    blocks = []
    for index, block in enumerate(model.blocks):
        by = factors[index % len(factors)]
        values = {key: type(getattr(block, key))(getattr(block, key) * by) for key in LARGEST}
        operators = tuple(replace(o, flop=o.flop * by, bytes=int(o.bytes * by)) for o in block.operators)
        blocks.append(replace(block, operators=operators, **values))
    return replace(model, blocks=tuple(blocks), tokens=max(1, int(model.tokens * factors[0])))


FACTORS = st.lists(st.floats(0.25, 4.0), min_size=1, max_size=5)


@given(models(), FACTORS, FACTORS)
def test_no_rank_needs_more_than_the_merged_model(model: ModelProfile, ours: list[float], theirs: list[float]) -> None:
    profiles = [_measured(model, ours), _measured(model, theirs)]
    merged = merged_models(profiles)
    for one in profiles:
        assert merged.tokens >= one.tokens
        for block, mine in zip(merged.blocks, one.blocks, strict=True):
            assert all(getattr(block, key) >= getattr(mine, key) for key in LARGEST)
            sizes = {o.name: o for o in block.operators}
            assert all(sizes[o.name].bytes >= o.bytes and sizes[o.name].flop >= o.flop for o in mine.operators)
    assert ModelProfile.from_json(merged.to_json()) == merged, "it is a profile like any other"
    assert all(_is_whole(block) for block in merged.blocks)


def _is_whole(block: BlockProfile) -> bool:
    return block.activation_bytes >= max(block.boundary_bytes, sum(o.bytes for o in block.operators))


@given(models(), FACTORS, FACTORS)
def test_the_order_of_ranks_and_repetitions_do_not_matter(model: ModelProfile, ours: list[float], theirs: list[float]) -> None:
    a, b = _measured(model, ours), _measured(model, theirs)
    assert merged_models([a, b]) == merged_models([b, a]) == merged_models([a, b, a])
    once = merged_models([a, b])
    assert merged_models([once, once]) == once


@given(models())
def test_ranks_of_other_models_are_refused_by_the_first_difference(model: ModelProfile) -> None:
    block = model.blocks[0]
    other = replace(model, blocks=(replace(block, num_params=block.num_params + 1, weight_bytes=1), *model.blocks[1:]))
    with pytest.raises(ConfigError, match="rank 0 and rank 1 have measured different things: block"):
        merged_models([model, other])


@given(machines(), st.floats(0.25, 1.0), st.floats(0.25, 1.0))
def test_of_machines_the_slowest_and_smallest_counts(machine: HardwareProfile, ours: float, theirs: float) -> None:
    def rank(factor: float) -> HardwareProfile:
        values = {key: type(getattr(machine, key))(getattr(machine, key) * factor) for key in LEAST}
        return replace(machine, meeting_s=factor, contention={"compute|net": 1 + factor}, **values)

    a, b = rank(ours), rank(theirs)
    merged = merged_machines([a, b])
    assert all(getattr(merged, key) == min(getattr(a, key), getattr(b, key)) for key in LEAST)
    assert merged.meeting_s == max(ours, theirs)
    assert merged.contention == {"compute|net": 1 + max(ours, theirs)}
    assert replace(merged_machines([b, a]), source={}) == replace(merged, source={})


@given(machines())
def test_shares_of_other_machines_are_refused(machine: HardwareProfile) -> None:
    with pytest.raises(ConfigError, match="ranks is 2 and 3"):
        merged_machines([replace(machine, world_size=1, ranks=2), replace(machine, world_size=1, ranks=3)])
