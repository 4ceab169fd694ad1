"""16-bit casts of weights in profiles, needs and simulated steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.simulations import GPU, ON_DISK, ON_HOST, RESIDENT, model_of, plan_of

from lightning_hetero.errors import ConfigError, PlanError
from lightning_hetero.ir.activations import saved_bytes
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier
from lightning_hetero.lowering.needs import Purpose, needs_of
from lightning_hetero.planners.evaluation import evaluated, simulation
from lightning_hetero.planners.holistic import plan as holistic
from lightning_hetero.planners.holistic.relaxation import Relaxation
from lightning_hetero.planners.micro_batches import split

SIZES = {"activation_bytes": 100, "boundary_bytes": 10, "transient_bytes": 7}
MODEL = model_of(100, 100, 100, cast_bytes=200, **SIZES)
LAST = 3 * 100 + 7
ROOMY = replace(GPU, device_memory_bytes=10**6, host_memory_bytes=10**9, disk_capacity_bytes=10**9)


@pytest.mark.parametrize(
    ("rule", "shared_memory", "kept", "recomputed", "swapped", "in_use"),
    [
        (ON_HOST, False, 100, 0, 0, 200),
        (ON_DISK, False, 100, 0, 0, 200),
        (RESIDENT, False, 300, 0, 0, 0),
        (ON_HOST, True, 300, 0, 0, 0),
        (ON_DISK, True, 100, 0, 0, 200),
        (replace(ON_HOST, saved=Saved.RECOMPUTE), False, 10, 90, 0, 200),
        (replace(RESIDENT, saved=Saved.RECOMPUTE), False, 10, 290, 0, 0),
        (replace(ON_HOST, saved=Saved.SWAP_HOST), False, 10, 0, 90, 200),
        (replace(RESIDENT, saved=Saved.SWAP_HOST), False, 10, 0, 290, 0),
    ],
)
def test_casts_leave_with_the_weights_and_follow_the_policy_where_these_stay(
    rule: BlockPlan, shared_memory: bool, kept: int, recomputed: int, swapped: int, in_use: int
) -> None:
    for block in (MODEL.blocks[0], MODEL.shape().blocks[0]):
        found = saved_bytes(block, rule, shared_memory=shared_memory)
        assert (found.kept, found.recomputed, found.to_host, found.to_disk, found.in_use) == (kept, recomputed, swapped, 0, in_use)


@pytest.mark.parametrize("rule", [ON_HOST, ON_DISK])
def test_casts_of_weights_that_leave_count_once(rule: BlockPlan) -> None:
    plan = plan_of(rule, rule, rule)
    assert needs_of(plan, MODEL, shared_memory=False).device[Purpose.ACTIVATIONS] == LAST + 200


def test_casts_of_weights_that_stay_count_for_each_block() -> None:
    plan = plan_of(RESIDENT, ON_HOST, RESIDENT)
    assert needs_of(plan, MODEL, shared_memory=False).device[Purpose.ACTIVATIONS] == LAST + 200 + 200
    plan = replace(plan_of(ON_HOST, ON_DISK, ON_DISK), gradient_depth=1)
    assert needs_of(plan, MODEL, shared_memory=True).host[Purpose.ACTIVATIONS] == LAST + 200 + 200


@pytest.mark.parametrize("rule", [ON_HOST, RESIDENT, replace(RESIDENT, saved=Saved.RECOMPUTE), ON_DISK])
def test_a_simulated_step_has_no_more_in_memory_than_the_needs_say(rule: BlockPlan) -> None:
    plan = replace(plan_of(rule, rule, rule), device_cache_bytes=400)
    without = replace(MODEL, blocks=tuple(replace(b, cast_bytes=0) for b in MODEL.blocks))
    peaks = [simulation(plan, model, ROOMY).prediction.device_peak_bytes for model in (MODEL, without)]
    needs = needs_of(plan, MODEL, shared_memory=False)
    assert peaks[0] <= sum(needs.device.values()) + sum(needs.device_caches)
    stays, dropped = rule.weights is Tier.DEVICE, rule.saved is Saved.RECOMPUTE
    assert peaks[0] - peaks[1] == (600 if stays and not dropped else 200)


def test_a_profile_with_casts_is_read_back_and_one_without_needs_no_such_key() -> None:
    assert ModelProfile.from_json(MODEL.to_json()) == MODEL
    older = replace(MODEL, blocks=tuple(replace(b, cast_bytes=0) for b in MODEL.blocks))
    assert "cast_bytes" not in older.to_json()
    assert ModelProfile.from_json(older.to_json()) == older
    with pytest.raises(ConfigError, match="cast_bytes=-200"):
        ModelProfile.from_json(MODEL.to_json().replace('"cast_bytes": 200', '"cast_bytes": -200'))


def test_casts_do_not_grow_with_the_batch() -> None:
    assert [b.cast_bytes for b in split(MODEL, 4).blocks] == [200, 200, 200]
    assert split(MODEL, 4).blocks[0].activation_bytes == 25


def kept_on_host(memory: int) -> Plan:
    """Weights on the host, and everything kept that forward saves."""
    plan = replace(plan_of(ON_HOST, ON_HOST, ON_HOST), device_cache_bytes=400)
    return evaluated(plan, MODEL, replace(ROOMY, device_memory_bytes=memory))


def test_the_search_keeps_what_fits_because_casts_leave() -> None:
    """All casts together would not fit."""
    needs = needs_of(kept_on_host(10**6), MODEL, shared_memory=False)
    memory = sum(needs.device.values()) + 400
    best = kept_on_host(memory)
    with pytest.raises(PlanError):
        kept_on_host(memory - 1)
    found = holistic(MODEL, replace(ROOMY, device_memory_bytes=memory), prefer_resident=0.0)
    assert found.require_predicted().iteration_s <= best.require_predicted().iteration_s
    assert found.require_predicted().device_peak_bytes <= memory


@pytest.mark.parametrize("memory", [1600, 1900, 2600, 6000])
def test_no_plan_is_faster_than_the_bound(memory: int) -> None:
    hardware = replace(ROOMY, device_memory_bytes=memory)
    bound_s = Relaxation(MODEL, hardware).bound_s()
    rules = [replace(rule, saved=saved) for rule in (ON_HOST, RESIDENT) for saved in (Saved.KEEP, Saved.RECOMPUTE, Saved.SWAP_HOST)]
    steps = []
    for plan in (plan_of(a, b, c) for a in rules for b in rules for c in rules):
        try:
            steps.append(evaluated(plan, MODEL, hardware).require_predicted().iteration_s)
        except PlanError:
            continue
    assert steps
    assert bound_s is not None
    assert bound_s <= min(steps) * (1 + 1e-9)
