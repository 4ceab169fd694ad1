"""Schedules as text, reviewed in diffs. Rewrite them with ``pytest tests/golden
--update-golden``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_hetero.ir.model import BlockShape, ModelShape, OperatorProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import Schedule, StepSignature, Updates
from lightning_hetero.lowering import CacheSizes, DeviceRoom, check, fitted, lower, steady
from lightning_hetero.planners import disk, host, resident

HERE = Path(__file__).parent


def _block(name: str, num_params: int, *, trainable: bool = True, pinned: bool = False) -> BlockShape:
    """fp32 weights and gradients, two fp32 state arrays."""
    trained = num_params if trainable else 0
    return BlockShape(
        name=name,
        num_params=num_params,
        num_trainable_params=trained,
        weight_bytes=4 * num_params,
        gradient_bytes=4 * trained,
        state_bytes=8 * trained,
        pinned=pinned,
    )


# Embedding and head (pinned), four layers; two layers' weights fit in memory.
MODEL = ModelShape(name="gpt", blocks=(_block("rest", 1000, pinned=True), *(_block(f"layers.{i}", 100) for i in range(4))))
STEP = StepSignature(order=(0, 1, 2, 3, 4), training=True, updates=Updates.IN_BACKWARD)
CAPACITY_BYTES = 2 * 400


def _mixed(model: ModelShape) -> Plan:
    """One rule of every kind."""
    return Plan(
        name="mixed",
        blocks=(
            BlockPlan(name="rest", weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE),
            BlockPlan(name="layers.0"),
            BlockPlan(name="layers.1", state=Tier.DISK),
            BlockPlan(name="layers.*", weights=Tier.DISK, state=Tier.DISK),
        ),
        prefetch_depth=1,
        gradient_depth=1,
    ).resolve([b.name for b in model.blocks])


@pytest.mark.parametrize(
    ("name", "planner", "signature"),
    [
        ("resident", resident, STEP),
        ("host", host, STEP),
        ("disk", disk, STEP),
        ("disk_after_verdict", disk, replace(STEP, updates=Updates.AFTER_VERDICT)),
        ("disk_speculative", disk, replace(STEP, updates=Updates.SPECULATIVE)),
        ("disk_redone", disk, replace(STEP, updates=Updates.REDONE)),
        ("disk_evaluation", disk, StepSignature(order=STEP.order, training=False)),
        ("mixed", _mixed, STEP),
    ],
)
def test_schedule_is_the_reviewed_one(
    name: str, planner: Callable[[ModelShape], Plan], signature: StepSignature, pytestconfig: pytest.Config
) -> None:
    plan = planner(MODEL)
    first = lower(plan, MODEL, signature, resident=frozenset(), capacity_bytes=CAPACITY_BYTES)
    second = lower(plan, MODEL, signature, resident=first.resident_after, capacity_bytes=CAPACITY_BYTES)
    check(second, plan, MODEL, capacity_bytes=CAPACITY_BYTES)
    _compare(name, second, pytestconfig)


def _compare(name: str, schedule: Schedule, pytestconfig: pytest.Config) -> None:
    golden = HERE / f"{name}.txt"
    if pytestconfig.getoption("--update-golden"):
        golden.write_text(schedule.to_text(), encoding="utf-8")
    assert schedule.to_text() == golden.read_text(encoding="utf-8"), f"{golden.name} differs; --update-golden rewrites it"


# ---- ranks that share the model ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "planner", "signature"),
    [
        ("ranks_host", host, STEP),
        ("ranks_disk", disk, STEP),
        ("ranks_disk_speculative", disk, replace(STEP, updates=Updates.SPECULATIVE)),
        ("ranks_disk_redone", disk, replace(STEP, updates=Updates.REDONE)),
        ("ranks_disk_evaluation", disk, StepSignature(order=STEP.order, training=False)),
    ],
)
def test_schedule_of_two_ranks_is_the_reviewed_one(
    name: str, planner: Callable[[ModelShape], Plan], signature: StepSignature, pytestconfig: pytest.Config
) -> None:
    """One of two ranks that share the model: each has half of all sizes, and three whole layers fit
    in memory.
    """
    model = replace(MODEL, blocks=tuple(replace(_block(b.name, b.num_params // 2), pinned=b.pinned) for b in MODEL.blocks))
    plan = fitted(planner(model), model, device=True)
    slices, whole = 2 * 200, 3 * 400
    resident, held = frozenset[int](), frozenset[int]()
    for _ in range(2):
        room = DeviceRoom(resident=held, capacity_bytes=whole, ranks=2, shared_memory=True)
        schedule = lower(plan, model, signature, resident=resident, capacity_bytes=slices, device=room)
        resident, held = schedule.resident_after, schedule.device_after
    check(schedule, plan, model, capacity_bytes=slices, device_capacity_bytes=whole)
    _compare(name, schedule, pytestconfig)


@pytest.mark.parametrize(("name", "rule"), [("ranks_devices", {}), ("ranks_devices_updates", {"update": UpdateLane.DEVICE})])
def test_schedule_of_two_ranks_on_devices_is_the_reviewed_one(
    name: str, rule: dict[str, UpdateLane], pytestconfig: pytest.Config
) -> None:
    """Devices have memory of their own: whole weights and gradients cross their links. If these
    update, slices of state, gradients and weights cross them too.
    """
    model = replace(MODEL, blocks=tuple(replace(_block(b.name, b.num_params // 2), pinned=b.pinned) for b in MODEL.blocks))
    plan, held = fitted(host(model), model, device=True), frozenset[int]()
    plan = replace(plan, blocks=tuple(replace(row, **rule) for row in plan.blocks))
    for _ in range(2):
        room = DeviceRoom(resident=held, capacity_bytes=3 * 400, ranks=2)
        schedule = lower(plan, model, STEP, resident=frozenset(), capacity_bytes=0, device=room)
        held = schedule.device_after
    check(schedule, plan, model, capacity_bytes=0, device_capacity_bytes=3 * 400)
    _compare(name, schedule, pytestconfig)


# ---- a device with memory of its own -------------------------------------------------------------


def _layer(name: str, num_params: int, *, pinned: bool = False) -> BlockShape:
    """16-bit weights and gradients, fp32 master and moments; 20 bytes of input, two operators of 30
    and 50 saved bytes.
    """
    return BlockShape(
        name=name,
        num_params=num_params,
        num_trainable_params=num_params,
        weight_bytes=2 * num_params,
        gradient_bytes=2 * num_params,
        state_bytes=12 * num_params,
        pinned=pinned,
        activation_bytes=100,
        boundary_bytes=20,
        operators=(OperatorProfile(name="attn", flop=1.0, bytes=30), OperatorProfile(name="mlp", flop=1.0, bytes=50)),
    )


LAYERS = ModelShape(name="gpt", blocks=(_layer("rest", 1000, pinned=True), *(_layer(f"layers.{i}", 100) for i in range(4))))


def _lohan() -> Plan:
    """All model states on disk, updates during backward; inputs wait on the host, one operator's
    output on disk (LoHan).
    """
    layer = BlockPlan(
        name="*",
        weights=Tier.DISK,
        state=Tier.DISK,
        saved=Saved.RECOMPUTE,
        boundary=Saved.SWAP_HOST,
        operators={"mlp": Saved.SWAP_DISK},
    )
    return Plan(name="lohan", blocks=(BlockPlan(name="rest", state=Tier.DISK), layer), prefetch_depth=1, gradient_depth=2)


def _zero_offload() -> Plan:
    """Weights on the device, state on the host, all updates on the CPU once backward has ended
    (ZeRO-Offload).
    """
    rows = (BlockPlan(name="*", weights=Tier.DEVICE, saved=Saved.RECOMPUTE),)
    return Plan(name="zero_offload", blocks=rows, update_order=UpdateOrder.AFTER_BACKWARD, priority=False)


def _deep_optimizer_states() -> Plan:
    """Every second block's state comes to the device for its update, the last one's lives there
    (stride 2).
    """
    cpu = BlockPlan(name="*", weights=Tier.DEVICE)
    visitor = replace(cpu, update=UpdateLane.DEVICE)
    rows = (
        replace(visitor, name="layers.0"),
        replace(visitor, name="layers.2"),
        replace(visitor, name="layers.3", state=Tier.DEVICE),
        cpu,
    )
    return Plan(name="deep_optimizer_states", blocks=rows, update_order=UpdateOrder.AFTER_BACKWARD, priority=False)


@pytest.mark.parametrize(
    ("name", "planner", "updates"),
    [
        ("lohan", _lohan, Updates.IN_BACKWARD),
        ("lohan_redone", _lohan, Updates.REDONE),
        ("zero_offload", _zero_offload, Updates.IN_BACKWARD),
        ("deep_optimizer_states", _deep_optimizer_states, Updates.IN_BACKWARD),
    ],
)
def test_schedule_for_a_device_is_the_reviewed_one(
    name: str, planner: Callable[[], Plan], updates: Updates, pytestconfig: pytest.Config
) -> None:
    plan = planner().resolve(b.name for b in LAYERS.blocks)
    sizes = CacheSizes(host_cache_bytes=2 * 200, device_cache_bytes=2000 + 2 * 200, staging_bytes=0)
    (schedule,) = steady(plan, LAYERS, [replace(STEP, updates=updates)], sizes=sizes)
    check(schedule, plan, LAYERS, capacity_bytes=sizes.host_cache_bytes, device_capacity_bytes=sizes.device_cache_bytes)
    _compare(f"device_{name}", schedule, pytestconfig)


# ---- blocks that are frozen but for adapters -----------------------------------------------------


def _adapted(rest: BlockShape, block: BlockShape) -> ModelShape:
    """Three frozen blocks, in each of which a twenty-fifth of the parameters trains beside them."""
    rows = [_frozen(rest)]
    for i in range(3):
        sizes = {key: getattr(block, key) // 25 for key in ("num_params", "weight_bytes", "gradient_bytes", "state_bytes")}
        trained = BlockShape(name=f"layers.{i}:trained", num_trainable_params=sizes["num_params"], pinned=True, **sizes)
        rows += [trained, replace(_frozen(block), name=f"layers.{i}")]
    return ModelShape(name="adapters", blocks=tuple(rows))


def _frozen(block: BlockShape) -> BlockShape:
    return replace(block, num_trainable_params=0, gradient_bytes=0, state_bytes=0)


ADAPTERS_STEP = replace(STEP, order=tuple(range(7)))


@pytest.mark.parametrize(("name", "updates"), [("adapters", Updates.IN_BACKWARD), ("adapters_speculative", Updates.SPECULATIVE)])
def test_adapters_stay_while_the_frozen_rest_streams(name: str, updates: Updates, pytestconfig: pytest.Config) -> None:
    model = _adapted(_block("rest", 1000, pinned=True), _block("", 100))
    sizes = CacheSizes(host_cache_bytes=CAPACITY_BYTES, device_cache_bytes=None, staging_bytes=0)
    plan = disk(model)
    (schedule,) = steady(plan, model, [replace(ADAPTERS_STEP, updates=updates)], sizes=sizes)
    check(schedule, plan, model, capacity_bytes=CAPACITY_BYTES)
    _compare(name, schedule, pytestconfig)


@pytest.mark.parametrize(("name", "planner"), [("device_adapters", host), ("device_adapters_resident", resident)])
def test_adapters_stay_on_a_device_while_the_frozen_rest_streams(
    name: str, planner: Callable[[ModelShape], Plan], pytestconfig: pytest.Config
) -> None:
    """The CPU updates them, or the device where they live with their state."""
    model = _adapted(_layer("rest", 1000, pinned=True), _layer("", 100))
    found = planner(model)
    rows = (row if b.pinned else replace(row, weights=Tier.HOST) for b, row in zip(model.blocks, found.blocks, strict=True))
    plan = fitted(replace(found, blocks=tuple(rows)), model, device=True)
    sizes = CacheSizes(host_cache_bytes=0, device_cache_bytes=2 * 200, staging_bytes=0)
    (schedule,) = steady(plan, model, [ADAPTERS_STEP], sizes=sizes)
    check(schedule, plan, model, capacity_bytes=0, device_capacity_bytes=sizes.device_cache_bytes)
    _compare(name, schedule, pytestconfig)
