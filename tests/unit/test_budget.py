"""What plans need of each tier, worked out by hand, and how the rest is shared out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.device_plans import RESIDENT

from lightning_hetero._native import PartGeometry
from lightning_hetero.errors import OutOfMemoryBudgetError, PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile, OperatorProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.lowering import CacheSizes, Needs, Purpose, cache_sizes, cache_sizes_in_budget, needs_of, needs_of_shape
from lightning_hetero.lowering.needs import total_bytes
from lightning_hetero.lowering.staging import least_staging, read_ahead
from lightning_hetero.store.live.engine_options import EngineOptions, staging_bytes
from lightning_hetero.store.live.geometry import chunk_bytes

MIB = 2**20
BIG = 10**15

ON_HOST = BlockPlan(name="*")
ON_DISK = BlockPlan(name="*", weights=Tier.DISK, state=Tier.DISK)
RENEWED = BlockPlan(name="*", weights=Tier.DEVICE)
VISITOR = BlockPlan(name="*", weights=Tier.DEVICE, update=UpdateLane.DEVICE)


def _block(name: str, **sizes: int) -> BlockProfile:
    """10 parameters: 20 bytes of weights and of gradients, 120 of state; saves 100 bytes, of which
    20 input and 50 mlp.
    """
    values = {"num_params": 10, "activation_bytes": 100, "boundary_bytes": 20, "transient_bytes": 7} | sizes
    return BlockProfile(
        name=name,
        num_trainable_params=values["num_params"],
        forward_s=1.0,
        backward_s=2.0,
        forward_flop=1.0,
        operators=(OperatorProfile(name="mlp", flop=0.5, bytes=50),),
        **values,
    )


def _model(num_blocks: int = 4, **sizes: int) -> ModelProfile:
    blocks = tuple(_block(f"b{i}", **sizes) for i in range(num_blocks))
    return ModelProfile(name="m", tokens=1, compute_itemsize=2, constant_device_bytes=1000, constant_host_bytes=2000, blocks=blocks)


def _machine(**values: object) -> HardwareProfile:
    rates = dict.fromkeys(
        (
            "device_flop_per_s",
            "link_h2d_bytes_per_s",
            "link_d2h_bytes_per_s",
            "disk_read_bytes_per_s",
            "disk_write_bytes_per_s",
            "host_dram_bytes_per_s",
            "cpu_update_params_per_s",
            "device_update_params_per_s",
            "cpu_downcast_params_per_s",
        ),
        1.0,
    )
    sizes = dict.fromkeys(("device_memory_bytes", "host_memory_bytes", "disk_capacity_bytes"), BIG)
    return HardwareProfile(**{"name": "box", "disk_duplex": False, **rates, **sizes, **values})  # type: ignore[arg-type]


def _plan(rule: BlockPlan, num_blocks: int = 4, **options: object) -> Plan:
    rows = tuple(replace(rule, name=f"b{i}") for i in range(num_blocks))
    return Plan(name="p", blocks=rows, **options)  # type: ignore[arg-type]


def _device(plan: Plan, updates: Updates = Updates.IN_BACKWARD) -> dict[Purpose, int]:
    return {k: v for k, v in needs_of(plan, _model(len(plan.blocks)), shared_memory=False, updates=updates).device.items() if v}


def _host(plan: Plan, updates: Updates = Updates.IN_BACKWARD) -> dict[Purpose, int]:
    return {k: v for k, v in needs_of(plan, _model(len(plan.blocks)), shared_memory=False, updates=updates).host.items() if v}


# ---- needs ---------------------------------------------------------------------------------------


def test_a_resident_plan_needs_everything_on_the_device() -> None:
    assert _device(_plan(RESIDENT)) == {
        Purpose.CONSTANT: 1000,
        Purpose.WEIGHTS: 4 * 20,
        Purpose.STATE: 4 * 120,
        Purpose.ACTIVATIONS: 4 * 100 + 7,
        Purpose.GRADIENTS: 20,  # each block is updated before the next one's backward
    }
    assert _host(_plan(RESIDENT)) == {Purpose.CONSTANT: 2000}


def test_gradients_pile_up_as_activations_go_if_updates_follow_backward() -> None:
    # At the last block 407 + 20, at the first 107 + 80: the sum is largest at the last.
    after = _device(_plan(RESIDENT), Updates.AFTER_VERDICT)
    assert (after[Purpose.ACTIVATIONS], after[Purpose.GRADIENTS]) == (407, 20)
    # With recomputation only inputs are kept: 100 + 7 + 3 · 20 at the last block, 100 + 7 at the
    # first, with all gradients.
    recomputed = _device(_plan(replace(RESIDENT, saved=Saved.RECOMPUTE)), Updates.AFTER_VERDICT)
    assert recomputed[Purpose.ACTIVATIONS] + recomputed[Purpose.GRADIENTS] == 4 * 20 + 80 + 7 + 20


def test_micro_batches_accumulate_gradients_of_all_blocks() -> None:
    assert _device(_plan(RESIDENT, micro_batches=2))[Purpose.GRADIENTS] == 4 * 20
    assert _host(_plan(RENEWED, micro_batches=2, gradient_depth=1))[Purpose.GRADIENTS] == 4 * 20


def test_updates_on_the_cpu_need_a_copy_of_the_weights_and_few_gradients() -> None:
    assert _device(_plan(RENEWED))[Purpose.GRADIENTS] == 2 * 20
    assert _host(_plan(RENEWED, gradient_depth=3)) == {
        Purpose.CONSTANT: 2000,
        Purpose.WEIGHTS: 4 * 20,
        Purpose.STATE: 4 * 120,
        Purpose.GRADIENTS: 3 * 20,
    }
    late = _plan(RENEWED, gradient_depth=3, update_order=UpdateOrder.AFTER_BACKWARD)
    assert _host(late)[Purpose.GRADIENTS] == 4 * 20


def test_swapped_activations_need_room_for_those_on_their_way() -> None:
    rule = replace(RESIDENT, saved=Saved.SWAP_HOST, operators={"mlp": Saved.SWAP_DISK})
    needs = needs_of(_plan(rule, prefetch_depth=1), _model(), shared_memory=False)
    assert needs.device[Purpose.ACTIVATIONS] == 4 * 20 + 2 * 80 + 7  # inputs stay; this block's and one more
    assert needs.host[Purpose.ACTIVATIONS] == 4 * 30 + 3 * 50
    assert needs.disk[Purpose.ACTIVATIONS] == 4 * 50


def test_state_that_comes_takes_the_place_of_activations() -> None:
    plan = _plan(VISITOR, update_order=UpdateOrder.AFTER_BACKWARD, priority=False)
    assert _device(plan)[Purpose.ACTIVATIONS] == 407  # more than two blocks' state
    small = _plan(replace(VISITOR, saved=Saved.SWAP_HOST, boundary=Saved.SWAP_HOST), update_order=UpdateOrder.AFTER_BACKWARD)
    apart = _device(replace(small, priority=False, prefetch_depth=1))
    assert apart[Purpose.MOVING] == 2 * 120
    assert Purpose.ACTIVATIONS not in apart
    overtaken = _device(replace(small, prefetch_depth=1))  # the next forward may run while state goes back
    assert overtaken[Purpose.MOVING] == 2 * 120
    assert overtaken[Purpose.ACTIVATIONS] == 207


def test_files_have_two_slots() -> None:
    needs = needs_of(_plan(ON_DISK), _model(), shared_memory=False)
    assert needs.disk == {Purpose.WEIGHTS: 2 * 4 * 20, Purpose.STATE: 2 * 4 * 120, Purpose.ACTIVATIONS: 0, Purpose.MIRRORS: 0}


def test_if_the_device_is_the_host_there_is_one_pool() -> None:
    needs = needs_of(_plan(ON_HOST, gradient_depth=2), _model(), shared_memory=True)
    assert needs.device == {}
    assert {k: v for k, v in needs.host.items() if v} == {
        Purpose.CONSTANT: 3000,
        Purpose.WEIGHTS: 4 * 20,
        Purpose.STATE: 4 * 120,
        Purpose.ACTIVATIONS: 407,
        Purpose.GRADIENTS: 20,  # while all activations are there, those of the last block
    }


# ---- rooms ---------------------------------------------------------------------------------------


def test_caches_get_the_remaining_memory_up_to_all_lower_weights() -> None:
    model, staging = _model(), least_staging(_model())
    plan = _plan(ON_DISK, prefetch_depth=1, gradient_depth=1)
    assert cache_sizes(plan, model, _machine()) == CacheSizes(
        host_cache_bytes=80, device_cache_bytes=80, staging_bytes=staging + 4 * 120
    )
    device = 1000 + 407 + 20  # at the last block: its gradients come on top, no others have left yet
    tight = cache_sizes(plan, model, _machine(device_memory_bytes=device + 20 + 20, host_memory_bytes=2000 + 20 + staging + 20 + 8))
    assert tight == CacheSizes(host_cache_bytes=20 + 6, device_cache_bytes=20, staging_bytes=staging + 2)


def test_a_plan_may_say_how_large_its_caches_are() -> None:
    plan = _plan(ON_DISK, device_cache_bytes=45, host_cache_bytes=50)
    got = cache_sizes(plan, _model(), _machine())
    assert (got.host_cache_bytes, got.device_cache_bytes) == (50, 45)
    least = cache_sizes(replace(plan, device_cache_bytes=0, host_cache_bytes=0), _model(), _machine())
    assert (least.host_cache_bytes, least.device_cache_bytes) == (20, 20)


def test_rooms_given_back_as_the_plans_wishes_are_the_same_rooms() -> None:
    model, staging = _model(), least_staging(_model())
    plan, machine = _plan(ON_DISK), _machine(host_memory_bytes=2000 + 80 + staging + 60)
    first = cache_sizes(plan, model, machine)
    again = replace(plan, host_cache_bytes=first.host_cache_bytes, device_cache_bytes=first.device_cache_bytes)
    assert cache_sizes(again, model, machine) == first


def test_shared_memory_has_no_device_cache() -> None:
    assert cache_sizes(_plan(ON_HOST), _model(), _machine(shared_memory=True)) == CacheSizes(
        host_cache_bytes=0, device_cache_bytes=None, staging_bytes=0
    )


@pytest.mark.parametrize(
    ("rule", "machine", "tier", "short", "words"),
    [
        (RESIDENT, {"device_memory_bytes": 1986}, "device", 1, "place state on 'host'"),
        (RESIDENT, {"device_memory_bytes": 1487}, "device", 500, "more device memory|a smaller batch"),
        (ON_HOST, {"device_memory_bytes": 1446}, "device", 21, "recompute or swap"),
        (RENEWED, {"host_memory_bytes": 2600}, "host", 40, "smaller gradient_depth"),
        (ON_DISK, {"disk_capacity_bytes": 1000}, "disk", 120, "place weights on 'host'"),
        (ON_DISK, {"disk_capacity_bytes": 0}, "disk", 1120, "add a disk, of which the machine has none"),
        (
            ON_HOST,
            {"host_memory_bytes": 1000, "shared_memory": True},
            "host",
            2987,
            "more host memory",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_by_tier_and_shortfall(
    rule: BlockPlan, machine: dict[str, object], tier: str, short: int, words: str
) -> None:
    with pytest.raises(PlanError, match=rf"plan 'p'.*'box'.*remedy: .*({words})") as caught:
        cache_sizes(_plan(rule), _model(), _machine(**machine))
    assert (caught.value.tier, caught.value.shortfall_bytes) == (tier, short)


def test_the_tightest_tier_is_named() -> None:
    with pytest.raises(PlanError) as caught:
        cache_sizes(_plan(RENEWED), _model(), _machine(device_memory_bytes=1000, host_memory_bytes=1000))
    assert caught.value.tier == "host"


# ---- the runtime's budget ------------------------------------------------------------------------


@pytest.mark.parametrize(("elements", "chunk"), [(2**30, 256 * 1024), (256 * 1024, 256 * 1024), (20_000, 20_480), (10, 4096)])
def test_the_least_staging_is_the_engines(elements: int, chunk: int) -> None:
    geometry = PartGeometry(
        id=0, weight_dtype=1, num_elements=2**30, num_state=3, weights_on_disk_file=True, state_on_disk_file=True,
        num_slots=2, chunk_elements=chunk,
    )  # fmt: skip
    engine = staging_bytes(EngineOptions(), max(64 * 1024, chunk_bytes(geometry)))
    assert least_staging(_model(num_params=elements)) == engine


def test_state_is_read_ahead_into_a_quarter_of_the_rest() -> None:
    assert read_ahead(400, 1000) == 100
    assert read_ahead(400, 10) == 10
    assert read_ahead(2**40, 2**40) == 512 * MIB


# ---- a budget instead of a machine ---------------------------------------------------------------


def _known(plan: Plan, *, profiled: bool = False) -> Needs:
    """What a session knows: sizes, and once a batch has been profiled activations."""
    shape = _model(len(plan.blocks)).shape()
    if not profiled:
        rows = (replace(b, activation_bytes=0, boundary_bytes=0, transient_bytes=0, operators=()) for b in shape.blocks)
        shape = replace(shape, blocks=tuple(rows))
    return needs_of_shape(plan, shape, shared_memory=True, updates=Updates.IN_BACKWARD, staging_bytes=100)


def _share(plan: Plan, host_memory: int, *, given: bool = False, profiled: bool = False) -> CacheSizes:
    return cache_sizes_in_budget(
        plan,
        _known(plan, profiled=profiled),
        host_memory=host_memory,
        given=given,
        profiled=profiled,
        less_on_disk=lambda: True,
        tied_to_device=False,
    )


def test_a_budget_is_shared_out_as_the_plan_says() -> None:
    plan = _plan(ON_DISK, gradient_depth=1)
    assert total_bytes(_known(plan).host) == 100 + 20
    room = _share(plan, 120 + 80 + 8)
    assert (room.host_cache_bytes, room.staging_bytes) == (71, 100 + 17)  # 17 of 68 read ahead
    assert _share(replace(plan, host_cache_bytes=40), BIG).host_cache_bytes == 40
    assert _share(replace(plan, host_cache_bytes=1), BIG).host_cache_bytes == 20


def test_a_budget_that_is_too_small_is_refused_with_a_table() -> None:
    plan = _plan(BlockPlan(name="*", weights=Tier.HOST, state=Tier.DISK), gradient_depth=2)
    with pytest.raises(OutOfMemoryBudgetError) as caught:
        _share(plan, 200, given=True)
    assert caught.value.needed_bytes == 4 * 20 + 2 * 20 + 100
    first, *table, last = str(caught.value).splitlines()
    assert first == "plan 'p' needs 220 B of host memory; host_memory allows 200 B, 20 B too little:"
    assert [row.split()[0] for row in table] == ["what", "weights", "staging", "gradients", "activations"]
    assert all(len(row) <= 110 for row in table)
    weights, staging, gradients, activations = table[1:]
    for row, words in (
        (weights, (" host ", "80 B", 'weights on "disk"')),
        (staging, (" host ", "100 B")),
        (gradients, (" host ", "40 B", "gradient_depth")),
        (activations, (" host ", "on top", "a smaller batch")),
    ):
        assert not [word for word in words if word not in row], row
    assert last.startswith("Raise host_memory")
    assert _share(plan, 220, given=True).staging_bytes == 100
    with pytest.raises(
        OutOfMemoryBudgetError,
        match=r"; 200 B are free beside a reserve .*, 20 B too little(?s:.*)unknown .* once a batch has run\nFree",
    ):
        _share(plan, 200)


def test_activations_count_once_a_batch_has_been_profiled() -> None:
    plan = _plan(ON_HOST)
    least = total_bytes(_known(plan).host)
    assert _share(plan, least).staging_bytes == 0
    with pytest.raises(OutOfMemoryBudgetError) as caught:
        _share(plan, least, profiled=True)
    # Most is needed as backward begins: all activations, and the gradients of one block instead of
    # all four.
    assert caught.value.needed_bytes == least + (4 * 100 + 7) - 3 * 20
    assert "activations" in str(caught.value)
    assert "unknown" not in str(caught.value)


def test_a_session_and_a_planner_count_the_same() -> None:
    """All but the constant part, and the staging that the engine says."""
    for rule in (ON_HOST, ON_DISK, RENEWED, VISITOR):
        for updates in Updates.IN_BACKWARD, Updates.AFTER_VERDICT:
            plan, model = _plan(rule), _model()
            planners = needs_of(plan, model, shared_memory=True, updates=updates)
            ours = needs_of_shape(plan, model.shape(), shared_memory=True, updates=updates, staging_bytes=least_staging(model))
            constant = planners.host[Purpose.CONSTANT]
            assert total_bytes(ours.host) == total_bytes(planners.host) - constant
            assert ours.host_caches == planners.host_caches


def test_updates_after_backward_need_all_gradients() -> None:
    plan = _plan(ON_HOST, gradient_depth=1, update_order=UpdateOrder.AFTER_BACKWARD)
    assert _known(plan).host[Purpose.GRADIENTS] == 4 * 20
