from __future__ import annotations

from dataclasses import replace

import pytest
from support.machines import ROOMY

from lightning_hetero.errors import PlanError
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import Plan, Saved, Tier, UpdateLane, UpdateOrder
from lightning_hetero.planners import BASELINES, PLANNERS
from lightning_hetero.planners.baselines import full_recompute, variants, zero_infinity, zero_offload

MB = 10**6


def _block(name: str, *, pinned: bool = False, trainable: bool = True) -> BlockProfile:
    return BlockProfile(
        name=name,
        num_params=10 * MB,
        num_trainable_params=10 * MB if trainable else 0,
        forward_s=0.01,
        backward_s=0.02,
        forward_flop=1e9,
        activation_bytes=100 * MB,
        boundary_bytes=10 * MB,
        transient_bytes=5 * MB,
        pinned=pinned,
    )


# 16 bit: 20 MB of weights, 20 MB of gradients and 120 MB of state a block.
MODEL = ModelProfile(
    name="m",
    tokens=8,
    compute_itemsize=2,
    constant_device_bytes=0,
    constant_host_bytes=0,
    blocks=(_block("embedding", pinned=True), *(_block(f"layers.{i}") for i in range(4))),
)
CPU = replace(ROOMY, name="cpu", shared_memory=True, link_h2d_bytes_per_s=0.0, link_d2h_bytes_per_s=0.0)


def _everywhere(plan: Plan) -> set[tuple[Tier, Tier, UpdateLane, Saved, Saved]]:
    return {(b.weights, b.state, b.update, b.saved, b.boundary) for b in plan.blocks}


def test_all_baselines_are_planners_by_name() -> None:
    assert set(BASELINES) == {"resident", "host", "disk", "full_recompute", "zero_offload", "zero_infinity"}
    assert BASELINES.keys() <= PLANNERS.keys()


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_a_baseline_that_fits_is_simulated_with_its_decisions(name: str) -> None:
    plan = BASELINES[name](MODEL, ROOMY)
    assert plan.name == name
    assert plan.predicted is not None
    assert plan.objective_s == plan.predicted.iteration_s >= sum(b.forward_s + b.backward_s for b in MODEL.blocks)
    first = next(b for b in plan.blocks if MODEL.blocks[0].name != b.name)
    assert plan.decisions == {
        "weights": first.weights.value,
        "state": first.state.value,
        "update": first.update.value,
        "activations": first.saved.value,
        "inputs": first.boundary.value,
        "update_order": plan.update_order.value,
        "priority": plan.priority,
    }


def test_zero_offload_updates_on_the_cpu_once_backward_has_ended() -> None:
    plan = zero_offload(MODEL.shape())
    assert _everywhere(plan) == {(Tier.DEVICE, Tier.HOST, UpdateLane.CPU, Saved.KEEP, Saved.KEEP)}
    assert plan.update_order is UpdateOrder.AFTER_BACKWARD
    assert not plan.priority


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_zero_infinity_keeps_nothing_but_inputs_and_those_on_the_host(tier: Tier) -> None:
    plan = zero_infinity(MODEL.shape(), tier)
    layers = replace(plan, blocks=plan.blocks[1:])
    assert _everywhere(layers) == {(tier, tier, UpdateLane.CPU, Saved.RECOMPUTE, Saved.SWAP_HOST)}
    assert plan.blocks[0].weights is Tier.HOST  # pinned
    assert plan.update_order is UpdateOrder.AFTER_BACKWARD


def test_full_recompute_is_resident_but_for_activations() -> None:
    expected = (Tier.DEVICE, Tier.DEVICE, UpdateLane.DEVICE, Saved.RECOMPUTE, Saved.KEEP)
    assert _everywhere(full_recompute(MODEL.shape())) == {expected}


def test_full_recompute_repeats_the_forward_of_all_blocks_that_are_not_pinned() -> None:
    kept, repeated = (BASELINES[name](MODEL, ROOMY).objective_s for name in ("resident", "full_recompute"))
    assert kept is not None
    assert repeated == pytest.approx(kept + sum(b.forward_s for b in MODEL.blocks if not b.pinned))


@pytest.mark.parametrize("name", ["host", "disk", "zero_offload"])
def test_activations_stay_as_long_as_they_fit_and_are_recomputed_then(name: str) -> None:
    assert BASELINES[name](MODEL, ROOMY).decisions["activations"] == "keep"
    tight = replace(ROOMY, device_memory_bytes=450 * MB)  # 500 MB are saved, 50 MB of them inputs; 100 MB of weights
    assert BASELINES[name](MODEL, tight).decisions["activations"] == "recompute"


def test_zero_infinity_prefers_the_host_and_takes_the_disk_where_it_must() -> None:
    assert BASELINES["zero_infinity"](MODEL, ROOMY).decisions["state"] == "host"
    tight = replace(ROOMY, host_memory_bytes=600 * MB)  # 700 MB of weights and state
    assert BASELINES["zero_infinity"](MODEL, tight).decisions["state"] == "disk"


@pytest.mark.parametrize(
    ("name", "tier", "changes"),
    [
        ("resident", "device", {"device_memory_bytes": 600 * MB}),
        ("full_recompute", "device", {"device_memory_bytes": 600 * MB}),
        ("host", "host", {"host_memory_bytes": 600 * MB}),
        ("disk", "disk", {"disk_capacity_bytes": 600 * MB}),
        ("zero_offload", "device", {"device_memory_bytes": 150 * MB}),
        ("zero_infinity", "disk", {"host_memory_bytes": 500 * MB, "disk_capacity_bytes": 10 * MB}),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_tier_and_shortfall(name: str, tier: str, changes: dict[str, int]) -> None:
    machine = replace(ROOMY, **changes)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"Cheapest remedy|To make it fit") as refused:
        BASELINES[name](MODEL, machine)
    assert refused.value.tier == tier
    key = {"device": "device_memory_bytes", "host": "host_memory_bytes", "disk": "disk_capacity_bytes"}[tier]
    enough = replace(machine, **{key: getattr(machine, key) + refused.value.shortfall_bytes})
    assert BASELINES[name](MODEL, enough).predicted is not None


@pytest.mark.parametrize("name", sorted(set(BASELINES) - {"full_recompute"}))
def test_if_the_device_is_the_host_activations_stay(name: str) -> None:
    plan = BASELINES[name](MODEL, CPU)
    assert {(b.saved, b.boundary) for b in plan.blocks} == {(Saved.KEEP, Saved.KEEP)}
    assert plan.micro_batches == 1


def test_if_the_device_is_the_host_nothing_can_be_recomputed() -> None:
    with pytest.raises(PlanError, match="'resident', 'host' or 'disk'"):
        BASELINES["full_recompute"](MODEL, CPU)


def test_variants_are_resolved_plans_of_the_baseline() -> None:
    names = [b.name for b in MODEL.blocks]
    for name in BASELINES:
        for machine in (CPU, replace(CPU, shared_memory=False), replace(CPU, ranks=2)):
            for plan in variants(name, MODEL.shape(), machine):
                assert plan.name == name
                assert plan.resolve(names) == plan


def test_frozen_blocks_have_no_state_to_place_on_disk() -> None:
    frozen = replace(MODEL, blocks=(*MODEL.blocks[:-1], _block("layers.3", trainable=False)))
    plan = BASELINES["disk"](frozen, ROOMY)
    assert plan.blocks[-1].state is Tier.HOST
    assert plan.blocks[-2].state is Tier.DISK
