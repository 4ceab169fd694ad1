"""Blocks whose weights are not of the compute dtype: quantized ones, and fp32 adapters of a 16-bit
model.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.simulations import GPU, ON_DISK, ON_HOST, RESIDENT, model_of, plan_of

from lightning_hetero.cost.work import stored_bytes
from lightning_hetero.errors import ConfigError, PlanError
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import BlockPlan
from lightning_hetero.lowering.needs import Purpose, needs_of
from lightning_hetero.planners import PLANNERS
from lightning_hetero.planners.micro_batches import split

PLAIN = model_of(1000, 1000, 1000)
QUARTER = PLAIN.compute_itemsize * 1000 // 4
OWN = {"weight_bytes": QUARTER, "gradient_bytes": 4000, "state_bytes": 8000}
SMALL = replace(PLAIN, blocks=tuple(replace(b, **OWN) for b in PLAIN.blocks))
ROOMY = replace(GPU, device_memory_bytes=10**6, host_memory_bytes=10**9, disk_capacity_bytes=10**9)


def test_the_bytes_of_the_dtype_are_the_default() -> None:
    block, shape, itemsize = PLAIN.blocks[0], PLAIN.shape().blocks[0], PLAIN.compute_itemsize
    assert (PLAIN.weight_bytes(block), PLAIN.gradient_bytes(block)) == (1000 * itemsize, 1000 * itemsize)
    assert PLAIN.state_bytes(block) == 1000 * PLAIN.state_itemsize
    assert (shape.weight_bytes, shape.gradient_bytes, shape.state_bytes) == (
        1000 * itemsize,
        1000 * itemsize,
        1000 * PLAIN.state_itemsize,
    )


def test_a_profile_with_own_bytes_is_read_back_and_one_without_needs_no_such_keys() -> None:
    assert ModelProfile.from_json(SMALL.to_json()) == SMALL
    assert not any(key in PLAIN.to_json() for key in OWN)
    with pytest.raises(ConfigError, match="weight_bytes=-"):
        ModelProfile.from_json(SMALL.to_json().replace(f'"weight_bytes": {QUARTER}', '"weight_bytes": -1'))


@pytest.mark.parametrize("rule", [RESIDENT, ON_HOST])
def test_needs_are_of_the_own_bytes(rule: BlockPlan) -> None:
    plan = plan_of(rule, rule, rule)
    needs, before = (needs_of(plan, model, shared_memory=False) for model in (SMALL, PLAIN))
    own, plain = (n.device if rule == RESIDENT else n.host for n in (needs, before))
    assert own[Purpose.WEIGHTS] * 4 == plain[Purpose.WEIGHTS]
    assert own[Purpose.STATE] == plain[Purpose.STATE] == 3 * 8000


def test_a_store_of_a_block_has_its_own_bytes() -> None:
    assert stored_bytes(SMALL.blocks[0], ON_DISK, SMALL) == QUARTER + 8000
    assert stored_bytes(PLAIN.blocks[0], ON_DISK, PLAIN) == 4 * QUARTER + 8000


@pytest.mark.parametrize("name", sorted(set(PLANNERS) - {"disk", "lohan", "zero_infinity"}))
def test_every_planner_fits_what_fits_only_quantized(name: str) -> None:
    """Frozen layers of a quarter of their bytes: the machine holds them, not the plain ones."""
    layers = tuple(replace(b, num_trainable_params=0, weight_bytes=QUARTER) for b in PLAIN.blocks[1:])
    head = replace(PLAIN.blocks[0], pinned=True)
    model = replace(PLAIN, blocks=(head, *layers * 4))
    model = replace(model, blocks=tuple(replace(b, name=f"layers.{i}") for i, b in enumerate(model.blocks)))
    plain = replace(model, blocks=tuple(replace(b, weight_bytes=0) for b in model.blocks))
    memory = sum(map(model.weight_bytes, model.blocks)) + 30_000
    tight = replace(ROOMY, device_memory_bytes=memory, host_memory_bytes=memory, disk_capacity_bytes=0)
    plan = PLANNERS[name](model, tight)
    assert plan.require_predicted().device_peak_bytes <= memory
    if name == "resident":
        with pytest.raises(PlanError):
            PLANNERS[name](plain, tight)


def test_own_bytes_do_not_grow_with_the_batch() -> None:
    assert [(b.weight_bytes, b.state_bytes) for b in split(SMALL, 4).blocks] == [(QUARTER, 8000)] * 3


def test_micro_batches_have_whole_sequences() -> None:
    assert split(replace(PLAIN, batch=6), 3).batch == 2
    assert split(replace(PLAIN, batch=6), 4).batch == 0
