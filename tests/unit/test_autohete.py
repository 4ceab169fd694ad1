"""AutoHete's formulas against hand-computed figures, its optimum against enumeration and HiGHS, and
the plan that comes of it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.effort import python_calls
from support.properties import examples

from lightning_hetero.errors import ConfigError, PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import Saved, Tier, UpdateLane
from lightning_hetero.lowering import cache_sizes
from lightning_hetero.planners import autohete
from lightning_hetero.planners.autohete import formulas, search
from lightning_hetero.planners.autohete.formulas import Costs, Counts, PerBlock
from lightning_hetero.units import GIB, MIB


def alike(blocks: int = 5, **changes: Any) -> Costs:
    """Blocks of 10 parameters, times in seconds: t_fp 1, t_bp 2, t_h2d 2.5, t_d2h 3, t_cpu 4, t_gpu
    0.5.
    """
    figures: dict[str, Any] = {
        "forward_s": 1.0,
        "backward_s": 2.0,
        "upload_s": 2.5,
        "download_s": 3.0,
        "cpu_update_s": 4.0,
        "device_update_s": 0.5,
        "weight_bytes": 20,
        "state_bytes": 120,
        "activation_bytes": 100,
        "boundary_bytes": 7,
    }
    totals: dict[str, Any] = {
        "constant_device_bytes": 3,
        "constant_host_bytes": 4,
        "device_memory_bytes": 10_000,
        "host_memory_bytes": 10_000,
        "least_offloaded": 0,
        "most_offloaded": blocks,
    }
    per_block = {key: PerBlock([changes.pop(key, value)] * blocks) for key, value in figures.items()}
    return Costs(**per_block, **(totals | changes))


def counts(c: int, p: int, o: int) -> Counts:
    return Counts(checkpoint=c, offload_params=p, offload_optimizer=o)


def machine(**changes: Any) -> HardwareProfile:
    figures: dict[str, Any] = {
        "name": "machine",
        "device_memory_bytes": 40 * GIB,
        "host_memory_bytes": 1024 * GIB,
        "disk_capacity_bytes": 0,
        "device_flop_per_s": 150e12,
        "link_h2d_bytes_per_s": 21e9,
        "link_d2h_bytes_per_s": 21e9,
        "disk_read_bytes_per_s": 0.0,
        "disk_write_bytes_per_s": 0.0,
        "disk_duplex": False,
        "host_dram_bytes_per_s": 200e9,
        "cpu_update_params_per_s": 3e9,
        "device_update_params_per_s": 40e9,
        "cpu_downcast_params_per_s": 10e9,
    }
    return HardwareProfile(**figures | changes)


def model(blocks: int = 8, *, params: int = 200 * MIB, activation_bytes: int = 2 * GIB, forward_s: float = 0.1) -> ModelProfile:
    rows = (
        BlockProfile(
            name=f"layers.{index}",
            num_params=params,
            num_trainable_params=params,
            forward_s=forward_s,
            backward_s=2 * forward_s,
            forward_flop=forward_s * 150e12,
            activation_bytes=activation_bytes,
            boundary_bytes=activation_bytes // 17,
            transient_bytes=activation_bytes // 17,
        )
        for index in range(blocks)
    )
    return ModelProfile(
        name="model", tokens=8192, compute_itemsize=2, constant_device_bytes=GIB, constant_host_bytes=GIB, blocks=tuple(rows)
    )


# ---- equations -----------------------------------------------------------------------------------


def test_device_memory_is_equation_1() -> None:
    expected = 7 * 3 + 100 * (5 - 3 + 1) + 20 * (5 - 2 + 1) + 120 * (5 - 4) + 3
    assert formulas.device_bytes(alike(), counts(3, 2, 4)) == expected


def test_host_memory_is_equation_2() -> None:
    assert formulas.host_bytes(alike(), 3) == 140 * 3 + 4


@pytest.mark.parametrize(("o", "seconds"), [(0, 5.0), (1, 5.0), (2, 2.5 * 2 + 1.0), (5, 2.5 * 5 + 1.0)])
def test_forward_is_equation_3(o: int, seconds: float) -> None:
    assert formulas.forward_s(alike(), o) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("c", "p", "o", "v"),
    [
        (3, 1, 5, 1),  # the paper's figure 2: c = 3, p = 1, o = 5
        (3, 5, 5, 3),
        (5, 2, 3, 2),
        (2, 2, 3, 0),  # checkpointed: blocks 1 and 2; offloaded: 3 and 4
        (3, 2, 3, 1),  # block 3 is in both
        (0, 3, 5, 0),
    ],
)
def test_blocks_in_both_sets_follow_from_all_three_counts(c: int, p: int, o: int, v: int) -> None:
    checkpointed, offloaded = set(range(c)), set(range(5 - o, 5 - o + p))
    assert v == len(checkpointed & offloaded)
    assert formulas.both(alike(), counts(c, p, o)) == v


def test_waiting_is_equation_4() -> None:
    k = alike(upload_s=3.5)  # 0.5 s longer than recomputation and backward, 1.5 s longer than backward
    assert formulas.sync_s(k, counts(3, 5, 5)) == pytest.approx(3 * 0.5 + 2 * 1.5)
    assert formulas.sync_s(alike(), counts(3, 5, 5)) == pytest.approx(2 * 0.5)  # recomputation hides it


@pytest.mark.parametrize(
    ("n", "seconds"),
    [
        (counts(2, 0, 0), 2 * 5 + 1 * 2 + 0.5 * 5),
        (counts(0, 4, 4), 2 + 3 + 4 * 4),  # the CPU; the device: 10 + 0.5 + 4 * 0.5
        (counts(5, 0, 1), 2 * 5 + 1 * 5 + 0.5 * 4),
    ],
)
def test_backward_is_equation_5(n: Counts, seconds: float) -> None:
    assert formulas.backward_s(alike(), n) == pytest.approx(seconds)


def test_blocks_that_differ_are_summed_over_the_right_ones() -> None:
    k = replace(
        alike(4),
        forward_s=PerBlock([1, 10, 100, 1000]),
        backward_s=PerBlock([2, 20, 200, 2000]),
        upload_s=PerBlock([3, 30, 300, 3000]),
        download_s=PerBlock([4, 40, 400, 4000]),
        cpu_update_s=PerBlock([5, 50, 500, 5000]),
        device_update_s=PerBlock([6, 60, 600, 6000]),
        weight_bytes=PerBlock([1, 10, 100, 1000]),
        state_bytes=PerBlock([2, 20, 200, 2000]),
        activation_bytes=PerBlock([9, 90, 900, 9000]),
        boundary_bytes=PerBlock([8, 80, 800, 8000]),
    )
    n = counts(2, 1, 3)  # checkpointed: 1, 2; on the CPU: 2, 3, 4; weights offloaded: 2
    assert formulas.device_bytes(k, n) == (88 + 9900 + 9000) + (1101 + 1000) + 2 + 3
    assert formulas.host_bytes(k, 3) == 1110 + 2220 + 4
    assert formulas.forward_s(k, 3) == pytest.approx(max(1111, 3330 + 1000))
    assert formulas.sync_s(k, n) == pytest.approx(30 - 10 - 20)
    assert formulas.sync_s(k, counts(1, 1, 3)) == pytest.approx(30 - 20)
    assert formulas.backward_s(k, n) == pytest.approx(max(2222 + 11 + 6 + 0, 2000 + 4000 + 5550))


def test_the_symbols_are_the_papers_for_16_bit_training() -> None:
    m, params = model(3), 200 * MIB
    k = formulas.costs(m, machine())
    assert (k.weight_bytes[0], k.state_bytes[0]) == (2 * params, 12 * params)
    assert k.upload_s[1] == pytest.approx(2 * params / 21e9)
    assert k.cpu_update_s[1] == pytest.approx(params / 3e9)
    assert k.device_update_s.sum(0, 3) == pytest.approx(3 * params / 40e9)


# ---- the optimum ---------------------------------------------------------------------------------


def enumerated(k: Costs) -> float | None:
    """The least time of all counts that fit."""
    every = (counts(c, p, o) for c, p, o in product(range(k.num_blocks + 1), repeat=3) if p <= o)
    fitting = [
        formulas.iteration_s(k, n)
        for n in every
        if formulas.device_bytes(k, n) <= k.device_memory_bytes
        and formulas.host_bytes(k, n.offload_optimizer) <= k.host_memory_bytes
        and k.least_offloaded <= n.offload_optimizer <= k.most_offloaded
    ]
    return min(fitting, default=None)


@st.composite
def problems(draw: st.DrawFn) -> Costs:
    """Random blocks. Sizes are whole, capacities halves: no sum comes so close to one that a
    solver's tolerance decides.
    """
    blocks = draw(st.integers(1, 6))
    same = draw(st.booleans())

    def column(low: float, high: float, *, whole: bool) -> PerBlock:
        one: st.SearchStrategy[float] = st.integers(int(low), int(high)) if whole else st.floats(low, high)
        return PerBlock([draw(one)] * blocks if same else [draw(one) for _ in range(blocks)])

    activations = column(1, 60, whole=True)
    weights, states = column(1, 10, whole=True), column(0, 60, whole=True)
    device = sum(activations.values) + sum(weights.values) + sum(states.values) + activations.largest + weights.largest
    return Costs(
        forward_s=column(0.1, 2, whole=False),
        backward_s=column(0.1, 4, whole=False),
        upload_s=column(0.1, 8, whole=False),
        download_s=column(0.1, 8, whole=False),
        cpu_update_s=column(0.1, 8, whole=False),
        device_update_s=column(0, 1, whole=False),
        weight_bytes=weights,
        state_bytes=states,
        activation_bytes=activations,
        boundary_bytes=PerBlock(draw(st.integers(0, int(a))) for a in activations.values),
        constant_device_bytes=0,
        constant_host_bytes=0,
        device_memory_bytes=int(device * draw(st.floats(0.2, 1.1))) + 0.5,  # type: ignore[arg-type]
        host_memory_bytes=draw(st.integers(0, 500)) + 0.5,  # type: ignore[arg-type]
        least_offloaded=draw(st.sampled_from([0, 0, 0, blocks])),
        most_offloaded=draw(st.sampled_from([blocks, blocks, blocks, 0])),
    )


def optimum(k: Costs, method: str) -> float | None:
    found = search.METHODS[method](k)
    if found is None:
        return None
    assert found.offload_params <= found.offload_optimizer <= k.num_blocks
    assert formulas.device_bytes(k, found) <= k.device_memory_bytes
    assert formulas.host_bytes(k, found.offload_optimizer) <= k.host_memory_bytes
    assert k.least_offloaded <= found.offload_optimizer <= k.most_offloaded
    return formulas.iteration_s(k, found)


@given(k=problems())
@examples(120)
def test_the_search_equals_enumeration(k: Costs) -> None:
    assert optimum(k, "exact") == enumerated(k)


@given(k=problems())
@examples(20)
def test_the_integer_programme_equals_enumeration(k: Costs) -> None:
    found, expected = optimum(k, "milp"), enumerated(k)
    assert (found is None) == (expected is None)
    if found is not None:
        assert found == pytest.approx(expected, rel=1e-6)


def test_nothing_is_offloaded_if_all_fits() -> None:
    assert search.exact(alike(device_update_s=0.0)) == counts(0, 0, 0)


def test_updates_that_the_cpu_hides_are_offloaded_even_if_all_fits() -> None:
    # Equation 5: one CPU update ends 9 s into a backward of 10 s, and spares the device half a
    # second.
    assert search.exact(alike()) == counts(0, 0, 1)


def test_a_hundred_blocks_are_planned_with_little_effort() -> None:
    m = model(100)
    k = formulas.costs(m, machine())
    found = search.exact(k)
    assert found is not None
    assert python_calls(lambda: search.exact(k)) + python_calls(lambda: search.prefetch_depth(k, found)) < 150_000
    milp = search.milp(k)
    assert milp is not None
    assert formulas.iteration_s(k, found) == pytest.approx(formulas.iteration_s(k, milp), rel=1e-6)


def test_weights_that_cost_nothing_to_offload_make_room_for_prefetches_if_any_are_offloaded() -> None:
    k = alike(upload_s=1.5)  # shorter than backward: no waiting
    assert search.relieved(k, counts(0, 2, 4)) == counts(0, 4, 4)
    assert search.relieved(k, counts(0, 0, 4)) == counts(0, 0, 4)
    slow = alike(upload_s=3.5, cpu_update_s=0.0, download_s=0.0)  # backward waits for every block
    assert search.relieved(slow, counts(0, 2, 4)) == counts(0, 2, 4)


# ---- prefetches ----------------------------------------------------------------------------------


def test_prefetches_start_earlier_as_backward_frees_memory() -> None:
    # Five blocks with activations of 30, weights of 20 offloaded from all.
    k = alike(activation_bytes=30, boundary_bytes=7, device_memory_bytes=10_000)
    n = counts(0, 5, 5)
    assert search.prefetch_leads(k, n) == (0, 1, 2, 3, 4)  # all with the beginning of backward
    assert search.prefetch_depth(k, n) == 4
    held = 150 + 30 + 3  # activations and slot and constants, as backward begins; then 30 less a block
    tight = replace(k, device_memory_bytes=held + 40)  # two blocks' weights
    # Steps 0 to 4 leave 40, 70, 100, 130, 160 for weights: 2, 3, 5, 6, 8 blocks.
    assert search.prefetch_leads(tight, n) == (0, 1, 1, 2, 2)
    assert search.prefetch_depth(tight, n) == 1


def test_only_the_prefetch_that_equation_1_makes_room_for_is_advanced_without_memory() -> None:
    n = counts(0, 3, 5)
    k = alike(activation_bytes=1, boundary_bytes=1)
    full = replace(k, device_memory_bytes=formulas.device_bytes(k, n))
    assert search.prefetch_leads(full, n) == (2, 1, 1)
    assert search.prefetch_depth(full, n) == 1


@given(k=problems())
def test_advanced_prefetches_fit_and_keep_their_order(k: Costs) -> None:
    n = search.exact(k)
    if n is None:
        return
    leads = search.prefetch_leads(k, n)
    last, first = k.num_blocks, k.num_blocks - n.offload_optimizer
    blocks = list(range(first + n.offload_params - 1, first - 1, -1))
    launches = [last - 1 - block - lead for block, lead in zip(blocks, leads, strict=True)]
    assert launches == sorted(launches)
    assert all(lead >= min(1, last - 1 - block) for block, lead in zip(blocks, leads, strict=True))
    kept = sum(w for i, w in enumerate(k.weight_bytes.values) if i not in blocks) + k.state_bytes.sum(0, first)
    stored = [
        b if i < n.checkpoint else a
        for i, (a, b) in enumerate(zip(k.activation_bytes.values, k.boundary_bytes.values, strict=True))
    ]
    for step in range(last):
        there = [i for i, at in zip(blocks, launches, strict=True) if at <= step <= last - 1 - i]
        one_ahead = [i for i in there if step >= last - 2 - i]
        held = kept + sum(stored[: last - step]) + k.activation_bytes.largest + sum(k.weight_bytes[i] for i in there)
        assert there == one_ahead or held <= k.device_memory_bytes


# ---- plans ---------------------------------------------------------------------------------------


def test_a_plan_places_blocks_by_insights_1_and_2() -> None:
    m, hardware = model(8, activation_bytes=4 * GIB), machine(device_memory_bytes=24 * GIB)
    plan = autohete.plan(m, hardware)
    c, p, o = (plan.decisions[key] for key in ("checkpoint", "offload_params", "offload_optimizer"))
    assert o > 0
    assert c > 0
    first = 8 - o
    for index, block in enumerate(plan.blocks):
        assert block.saved is (Saved.RECOMPUTE if index < c else Saved.KEEP)
        assert block.boundary is Saved.KEEP
        on_cpu = index >= first
        assert (block.state, block.update) == ((Tier.HOST, UpdateLane.CPU) if on_cpu else (Tier.DEVICE, UpdateLane.DEVICE))
        assert block.weights is (Tier.HOST if first <= index < first + p else Tier.DEVICE)
    assert plan.name == "autohete"
    assert plan.objective_s == pytest.approx(formulas.iteration_s(formulas.costs(m, hardware), counts(c, p, o)))
    assert plan.predicted is not None
    assert plan.predicted.device_peak_bytes <= hardware.device_memory_bytes
    assert plan.gradient_depth == o


def test_a_plan_leaves_room_for_one_block_to_come_while_another_is_in_use() -> None:
    m, hardware = model(8, activation_bytes=4 * GIB), machine(device_memory_bytes=24 * GIB)
    plan = autohete.plan(m, hardware)
    cache = cache_sizes(plan, m, hardware).device_cache_bytes
    assert cache is not None
    assert cache >= 2 * 2 * m.blocks[0].num_params


def test_all_stays_on_the_device_if_it_fits() -> None:
    plan = autohete.plan(model(4, params=MIB, activation_bytes=MIB), machine(cpu_update_params_per_s=1e6))
    assert plan.decisions == {"checkpoint": 0, "offload_params": 0, "offload_optimizer": 0}
    assert {(b.weights, b.state, b.update) for b in plan.blocks} == {(Tier.DEVICE, Tier.DEVICE, UpdateLane.DEVICE)}


@pytest.mark.parametrize("priority", [True, False])
def test_priority_can_be_switched_and_changes_nothing_else(priority: bool) -> None:
    plan = autohete.plan(model(8), machine(device_memory_bytes=24 * GIB), priority=priority)
    assert plan.priority is priority
    assert plan.decisions == autohete.plan(model(8), machine(device_memory_bytes=24 * GIB)).decisions


def test_activations_and_weights_stay_if_the_device_is_the_host() -> None:
    # One block's update costs the CPU threads as much as computing it: some updates run during
    # backward, and nothing moves.
    hardware = machine(shared_memory=True, device_update_params_per_s=3e9, link_h2d_bytes_per_s=0.0, link_d2h_bytes_per_s=0.0)
    plan = autohete.plan(model(8), hardware)
    assert plan.decisions["checkpoint"] == plan.decisions["offload_params"] == 0
    assert plan.decisions["offload_optimizer"] > 0
    assert {(b.saved, b.boundary, b.weights) for b in plan.blocks} == {(Saved.KEEP, Saved.KEEP, Tier.DEVICE)}
    k = formulas.costs(model(8), hardware)
    best = min(formulas.iteration_s(k, counts(0, 0, o)) for o in range(9))
    assert plan.objective_s == pytest.approx(best)


def test_the_optimum_of_the_equations_stands_beside_a_plan_that_is_another_with_the_reason() -> None:
    m, others = model(8), 0
    for size in range(8, 40):
        hardware = machine(device_memory_bytes=size * GIB // 4)
        k = formulas.costs(m, hardware)
        optimum = search.exact(k)
        try:
            plan = autohete.plan(m, hardware)
        except PlanError:
            continue
        assert optimum is not None
        assert plan.objective_s is not None
        paper = plan.decisions.get("paper_optimum")
        if plan.objective_s > formulas.iteration_s(k, optimum) * (1 + 1e-9):
            assert paper is not None, size
        if paper is not None:
            others += 1
            assert paper["objective_s"] == pytest.approx(formulas.iteration_s(k, optimum))
            assert paper["checkpoint"] == optimum.checkpoint
            assert "too little" in paper["reason"]
    assert others


def test_too_little_host_memory_names_tier_shortfall_and_remedy() -> None:
    m = model(8, params=400 * MIB)
    with pytest.raises(PlanError, match=r"no plan of autohete fits.*missing.*lohan") as caught:
        autohete.plan(m, machine(host_memory_bytes=4 * GIB, device_memory_bytes=24 * GIB))
    assert caught.value.tier == "host"
    k = formulas.costs(m, machine(device_memory_bytes=24 * GIB, host_memory_bytes=4 * GIB + caught.value.shortfall_bytes))
    assert search.exact(k) is not None
    assert search.exact(replace(k, host_memory_bytes=k.host_memory_bytes - 1)) is None


def test_too_little_device_memory_names_tier_and_shortfall() -> None:
    m = model(8, activation_bytes=20 * GIB)
    with pytest.raises(PlanError, match=r"no plan of autohete fits.*missing.*smaller batch") as caught:
        autohete.plan(m, machine(device_memory_bytes=24 * GIB))
    assert caught.value.tier == "device"
    k = formulas.costs(m, machine(device_memory_bytes=24 * GIB + caught.value.shortfall_bytes))
    assert search.exact(k) is not None
    assert search.exact(replace(k, device_memory_bytes=k.device_memory_bytes - 1)) is None


def test_a_machine_that_cannot_update_is_refused_by_its_rates() -> None:
    with pytest.raises(PlanError, match="cpu_update_params_per_s=0, device_update_params_per_s=0"):
        autohete.plan(model(2), machine(cpu_update_params_per_s=0.0, device_update_params_per_s=0.0))


def test_a_device_that_cannot_update_leaves_all_to_the_cpu() -> None:
    plan = autohete.plan(model(3), machine(device_update_params_per_s=0.0))
    assert plan.decisions["offload_optimizer"] == 3


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="allowed"):
        autohete.plan(model(2), machine(), method="guess")  # type: ignore[arg-type]
