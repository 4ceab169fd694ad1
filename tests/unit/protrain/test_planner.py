"""ProTrain's search and the plan that it makes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.effort import python_calls
from support.properties import examples
from support.protrain import KEEP, RECOMPUTE, SWAP, block_of, hardware_of, model_of, space_with

from lightning_hetero.errors import ConfigError, PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import Plan, Tier, UpdateLane
from lightning_hetero.planners import protrain
from lightning_hetero.planners.protrain.formulas import (
    best_chunk_params,
    pack,
)
from lightning_hetero.planners.protrain.planner import space_of
from lightning_hetero.planners.protrain.search import search
from lightning_hetero.planners.protrain.search_space import Configuration, Space

GIB = 2**30


# ---- the search (3.1.2) --------------------------------------------------------------------------


def _configurations(space: Space) -> Iterator[Configuration]:
    """All of them, from smallest to largest."""
    for swap in range(space.most_swaps + 1):
        for checkpoint in range(len(space.layers) - swap + 1):
            for p in space.persistent_counts():
                for buffers in range(space.least_buffers(p), space.most_buffers(p) + 1):
                    yield Configuration(persistent_chunks=p, chunk_buffers=buffers, swap_blocks=swap, checkpoint_blocks=checkpoint)


def _brute_force(space: Space) -> Configuration | None:
    best, best_s = None, math.inf
    for config in _configurations(space):
        if space.fits(config) and space.swaps_return_in_time(config) and (seconds := space.iteration_s(config)) < best_s:
            best, best_s = config, seconds
    return best


_BLOCKS = st.builds(
    block_of,
    num_params=st.integers(1, 8).map(lambda n: 8 * n),
    num_trainable_params=st.integers(0, 8),
    forward_s=st.integers(0, 8).map(float),
    backward_s=st.integers(0, 16).map(float),
    activation_bytes=st.integers(2, 64),
    boundary_bytes=st.integers(0, 2),
    transient_bytes=st.integers(0, 16),
    pinned=st.sampled_from([False, False, False, True]),
)


# Powers of two: sums are exact in any order, so equal times are equal.
_RATES = st.sampled_from([1.0, 2.0, 4.0, 16.0, 64.0])


_HARDWARE = st.builds(
    hardware_of,
    device_memory_bytes=st.integers(100, 4000),
    host_memory_bytes=st.integers(500, 8000),
    link_h2d_bytes_per_s=_RATES,
    link_d2h_bytes_per_s=_RATES,
    host_dram_bytes_per_s=st.sampled_from([4.0, 64.0, 1024.0]),
    cpu_update_params_per_s=st.sampled_from([0.0, 1.0, 4.0, 64.0]),
    device_update_params_per_s=st.sampled_from([0.0, 4.0, 64.0]),
    collective_bytes_per_s=_RATES,
    world_size=st.sampled_from([1, 1, 2, 4]),
    shared_memory=st.sampled_from([False, False, False, True]),
)


@examples(120)
@given(st.lists(_BLOCKS, min_size=1, max_size=6), _HARDWARE)
def test_the_pruned_search_equals_brute_force(blocks: list[BlockProfile], hardware: HardwareProfile) -> None:
    model = model_of(*blocks)
    space = space_with(model, hardware, best_chunk_params([b.num_params for b in blocks], interval=8, span=64))
    assert search(space) == _brute_force(space)


def test_a_swap_that_could_not_return_in_time_is_not_allowed() -> None:
    model = model_of(*[block_of(activation_bytes=16, backward_s=4.0)] * 3)
    config = Configuration(persistent_chunks=0, chunk_buffers=3, swap_blocks=1, checkpoint_blocks=0)
    # Chunks 2 and 3 compute 8 s of backward without uploads; 16 bytes come back in 2 s, or in 16 s.
    assert space_with(model, hardware_of(), 8).swaps_return_in_time(config)
    assert not space_with(model, hardware_of(link_h2d_bytes_per_s=1.0), 8).swaps_return_in_time(config)
    # With no buffer, uploads take 2 s of each.
    busy = space_with(model, hardware_of(link_h2d_bytes_per_s=2.0), 8)
    assert busy.swaps_return_in_time(config)
    assert not busy.swaps_return_in_time(replace(config, chunk_buffers=0))


# ---- the planner ---------------------------------------------------------------------------------


def _gpt(layers: int = 24, hidden: int = 4096, *, batch: int = 4, flop_per_s: float = 60e12) -> ModelProfile:
    tokens = batch * 1024
    params = 12 * hidden * hidden
    embedding = 50304 * hidden

    def block(name: str, num_params: int, activations: float, pinned: bool) -> BlockProfile:
        flop = 2.0 * num_params * tokens
        return BlockProfile(
            name=name,
            num_params=num_params,
            num_trainable_params=num_params,
            forward_s=flop / flop_per_s,
            backward_s=2 * flop / flop_per_s,
            forward_flop=flop,
            activation_bytes=int(activations * tokens * hidden),
            boundary_bytes=2 * tokens * hidden,
            transient_bytes=4 * tokens * hidden,
            pinned=pinned,
        )

    body = [block(f"layers.{i}", params, 34, False) for i in range(layers)]
    return ModelProfile(
        name=f"gpt-{layers}x{hidden}",
        tokens=tokens,
        compute_itemsize=2,
        constant_device_bytes=GIB,
        constant_host_bytes=GIB,
        blocks=(block("embed", embedding, 2, True), *body),
    )


def _gpu(**changes: object) -> HardwareProfile:
    fields: dict[str, object] = {
        "name": "gpu",
        "device_memory_bytes": 24 * GIB,
        "host_memory_bytes": 384 * GIB,
        "device_flop_per_s": 60e12,
        "link_h2d_bytes_per_s": 12e9,
        "link_d2h_bytes_per_s": 12e9,
        "host_dram_bytes_per_s": 120e9,
        "cpu_update_params_per_s": 1e9,
        "device_update_params_per_s": 30e9,
        "cpu_downcast_params_per_s": 8e9,
    }
    return hardware_of(**(fields | changes))


def _decided(plan: Plan) -> dict[str, int]:
    return dict(plan.decisions)


def test_the_plan_follows_its_decisions() -> None:
    model = _gpt()
    plan = protrain.plan(model, _gpu())
    decided = _decided(plan)
    keys = ["chunk_params", "persistent_chunks", "chunk_buffers", "swap_blocks", "swap_interval", "checkpoint_blocks"]
    assert list(decided) == keys
    chunks = pack([b.num_params for b in model.blocks], decided["chunk_params"])
    persistent = {b for chunk in chunks[: decided["persistent_chunks"]] for b in chunk}
    assert 0 < len(persistent) < len(model.blocks)
    for index, placed in enumerate(plan.blocks):
        home, lane = (Tier.DEVICE, UpdateLane.DEVICE) if index in persistent else (Tier.HOST, UpdateLane.CPU)
        assert (placed.weights, placed.state, placed.update) == (home, home, lane)
    kinds = [b.saved for b in plan.blocks]
    assert (kinds.count(SWAP), kinds.count(RECOMPUTE)) == (decided["swap_blocks"], decided["checkpoint_blocks"])
    assert kinds.count(RECOMPUTE) > 0
    assert plan.blocks[0].saved is KEEP  # pinned: not a transformer block
    assert plan.device_cache_bytes == decided["chunk_buffers"] * decided["chunk_params"] * 2
    assert plan.objective_s is not None
    assert plan.predicted is not None
    assert plan.predicted.device_peak_bytes <= 24 * GIB


def test_the_objective_is_equation_2_at_the_decisions() -> None:
    model, hardware = _gpt(layers=8), _gpu()
    plan = protrain.plan(model, hardware)
    decided = _decided(plan)
    space = space_with(model, hardware, decided["chunk_params"])
    config = Configuration(**{k: decided[k] for k in Configuration.__dataclass_fields__})
    assert plan.objective_s == space.iteration_s(config)


def test_the_optimum_of_the_estimators_stands_beside_a_plan_that_is_another_with_the_reason() -> None:
    model, others = _gpt(), 0
    sizes = [43.5, 44, 45, 46.5, 47]
    for size in sizes:
        hardware = _gpu(device_memory_bytes=int(size * GIB))
        plan, space = protrain.plan(model, hardware), space_of(model, hardware)
        optimum = search(space)
        assert optimum is not None
        assert plan.objective_s is not None
        paper = plan.decisions.get("paper_optimum")
        if plan.objective_s > space.iteration_s(optimum) * (1 + 1e-9):
            others += 1
            assert paper is not None, size
            assert paper["objective_s"] == space.iteration_s(optimum)
            assert {k: paper[k] for k in Configuration.__dataclass_fields__} == asdict(optimum)
            assert "too little" in paper["reason"]
        else:
            assert paper is None
    assert 0 < others < len(sizes)


def test_with_less_memory_more_is_offloaded_or_recomputed() -> None:
    model = _gpt()
    steps = [protrain.plan(model, _gpu(device_memory_bytes=size * GIB)).objective_s for size in (16, 24, 48, 160)]
    assert all(s is not None for s in steps)
    assert steps == sorted(steps, reverse=True)  # type: ignore[type-var]
    assert steps[0] != steps[-1]


def test_a_plan_for_shared_memory_keeps_activations_and_says_so() -> None:
    hardware = _gpu(shared_memory=True, link_h2d_bytes_per_s=0.0, link_d2h_bytes_per_s=0.0, device_update_params_per_s=1e9)
    plan = protrain.plan(_gpt(layers=8), hardware)
    decided = _decided(plan)
    assert {b.saved for b in plan.blocks} == {b.boundary for b in plan.blocks} == {KEEP}
    assert [decided[k] for k in ("chunk_buffers", "swap_blocks", "swap_interval", "checkpoint_blocks")] == [0, 0, 0, 0]
    assert plan.micro_batches == 1
    assert plan.objective_s


@pytest.mark.parametrize(("tier", "gib"), [("device", 2), ("host", 8)])
def test_a_plan_that_does_not_fit_is_refused_with_tier_shortfall_and_remedy(tier: str, gib: int) -> None:
    model, key = _gpt(), f"{tier}_memory_bytes"
    with pytest.raises(PlanError, match=rf"the {tier} needs at least .* missing\. Cheapest remedy: ") as caught:
        protrain.plan(model, _gpu(**{key: gib * GIB}))
    assert caught.value.tier == tier
    # By the estimators that much more suffices, and a byte less does not.
    hardware = _gpu(**{key: gib * GIB + caught.value.shortfall_bytes})
    params = best_chunk_params([b.num_params for b in model.blocks])
    assert search(space_with(model, hardware, params)) is not None
    less = replace(hardware, **{key: getattr(hardware, key) - 1})
    assert search(space_with(model, less, params)) is None


def test_several_devices_need_a_rate_for_collectives() -> None:
    with pytest.raises(ConfigError, match="collective_bytes_per_s"):
        protrain.plan(_gpt(), _gpu(world_size=4))


def test_the_fragmentation_factor_leaves_room_and_is_at_least_one() -> None:
    roomy, tight = (protrain.plan(_gpt(), _gpu(), fragmentation=f) for f in (1.0, 1.25))
    assert roomy.objective_s is not None
    assert tight.objective_s is not None
    assert tight.objective_s > roomy.objective_s
    with pytest.raises(ConfigError, match="fragmentation"):
        protrain.plan(_gpt(), _gpu(), fragmentation=0.5)


def test_a_hundred_blocks_are_planned_with_little_effort() -> None:
    model, hardware = _gpt(layers=100, hidden=2048, batch=16), _gpu()
    assert python_calls(lambda: protrain.plan(model, hardware)) < 500_000
