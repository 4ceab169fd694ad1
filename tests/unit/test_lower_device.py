from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from support.device_plans import RESIDENT
from support.effort import python_calls

from lightning_hetero.errors import ConfigError, OutOfMemoryBudgetError, ScheduleError
from lightning_hetero.ir.model import BlockShape, ModelShape, OperatorProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import Lane, Op, OpKind, Payload, Schedule, StepSignature, Updates
from lightning_hetero.lowering import CacheSizes, DeviceRoom, check, lower, steady, step_signatures

UNIT = 100  # bytes of one block's 16-bit weights
EVERYTHING = 10**9

ON_HOST = BlockPlan(name="*")
ON_DISK = BlockPlan(name="*", weights=Tier.DISK, state=Tier.DISK)
RENEWED = BlockPlan(name="*", weights=Tier.DEVICE)  # ZeRO-Offload: the CPU updates weights that live on the device
VISITOR = BlockPlan(name="*", weights=Tier.DEVICE, update=UpdateLane.DEVICE)  # state from the host, updated on the device
OPERATORS = (OperatorProfile(name="attn", flop=1.0, bytes=30), OperatorProfile(name="mlp", flop=1.0, bytes=50))


def _model(num_blocks: int, *, frozen: tuple[int, ...] = ()) -> ModelShape:
    """16-bit weights and gradients of ``UNIT`` bytes, state of six times that; saves 20 bytes of
    input, 30 and 50 of operators.
    """
    blocks = []
    for index in range(num_blocks):
        trainable = index not in frozen
        blocks.append(
            BlockShape(
                name=f"b{index}",
                num_params=UNIT // 2,
                num_trainable_params=UNIT // 2 * trainable,
                weight_bytes=UNIT,
                gradient_bytes=UNIT * trainable,
                state_bytes=6 * UNIT * trainable,
                activation_bytes=100,
                boundary_bytes=20,
                operators=OPERATORS,
            )
        )
    return ModelShape(name="m", blocks=tuple(blocks))


def _plan(*rules: BlockPlan, num_blocks: int = 0, **options: object) -> Plan:
    """One rule per block, or one for all."""
    rows = rules if len(rules) > 1 else rules * num_blocks
    blocks = tuple(replace(rule, name=f"b{i}") for i, rule in enumerate(rows))
    return Plan(name="p", blocks=blocks, **options)  # type: ignore[arg-type]


def _steps(
    plan: Plan,
    *signatures: StepSignature,
    model: ModelShape | None = None,
    host: int = EVERYTHING,
    device: int = EVERYTHING,
) -> list[Schedule]:
    """Steps that follow each other, checked."""
    model = model or _model(len(plan.blocks))
    resident, held = frozenset[int](), frozenset[int]()
    steps: list[Schedule] = []
    for signature in signatures or step_signatures(plan):
        room = DeviceRoom(resident=held, capacity_bytes=device)
        steps.append(lower(plan, model, signature, resident=resident, capacity_bytes=host, device=room))
        check(steps[-1], plan, model, capacity_bytes=host, device_capacity_bytes=device)
        resident, held = steps[-1].resident_after, steps[-1].device_after
    return steps


def _steady(plan: Plan, *, model: ModelShape | None = None, host: int = EVERYTHING, device: int = EVERYTHING) -> Schedule:
    model = model or _model(len(plan.blocks))
    schedule = steady(plan, model, sizes=CacheSizes(host_cache_bytes=host, device_cache_bytes=device, staging_bytes=0))[-1]
    check(schedule, plan, model, capacity_bytes=host, device_capacity_bytes=device)
    return schedule


def _signature(*order: int, updates: Updates = Updates.IN_BACKWARD) -> StepSignature:
    return StepSignature(order=order, training=True, updates=updates)


def _ops(schedule: Schedule, *kinds: OpKind) -> list[tuple[str, str]]:
    """Anchors and ops, as ``("B:1", "GRAD:2")``."""
    return [(str(schedule.anchors[op.at]), f"{op.kind.value}:{op.block}") for op in schedule.ops if op.kind in kinds]


def _one(schedule: Schedule, kind: OpKind, block: int, payload: Payload | None = None, lane: Lane | None = None) -> Op:
    (op,) = [
        op
        for op in schedule.ops
        if op.kind is kind and op.block == block and payload in (None, op.payload) and lane in (None, op.lane)
    ]
    return op


# ---- weights -------------------------------------------------------------------------------------


def test_weights_on_the_host_go_up_ahead_of_their_use() -> None:
    schedule = _steady(_plan(ON_HOST, num_blocks=4, prefetch_depth=1), device=2 * UNIT)
    assert _ops(schedule, OpKind.UPLOAD)[:4] == [("F:0", "UPLOAD:0"), ("F:0", "UPLOAD:1"), ("F:1", "UPLOAD:2"), ("F:2", "UPLOAD:3")]
    assert all(anchor.needs for anchor in schedule.anchors[:-1])


def test_an_upload_waits_for_the_update_of_the_step_before() -> None:
    schedule = _steady(_plan(ON_HOST, num_blocks=2), model=_model(2, frozen=(1,)), device=UNIT)
    uploads = [op for op in schedule.ops if op.kind is OpKind.UPLOAD]
    assert uploads[0].carried == ((OpKind.UPDATE, 0),)
    assert uploads[1].carried == ()  # frozen


def test_disk_to_host_to_device_is_a_pipeline() -> None:
    schedule = _steady(_plan(ON_DISK, num_blocks=8, prefetch_depth=1), host=2 * UNIT, device=2 * UNIT)
    forward = [row for row in _ops(schedule, OpKind.FETCH, OpKind.UPLOAD) if row[0] in ("F:2", "F:3")]
    assert forward == [("F:2", "UPLOAD:3"), ("F:2", "FETCH:4"), ("F:3", "UPLOAD:4"), ("F:3", "FETCH:5")]
    fetch, upload = (next(op for op in schedule.ops if (op.kind, op.block) == (k, 3)) for k in (OpKind.FETCH, OpKind.UPLOAD))
    assert fetch.id in upload.after


def test_at_the_turn_the_device_keeps_weights_that_it_needs_again() -> None:
    schedule = _steady(_plan(ON_HOST, num_blocks=6, prefetch_depth=1), device=3 * UNIT)
    assert _ops(schedule, OpKind.UPLOAD)[6:] == [("B:3", "UPLOAD:2"), ("B:2", "UPLOAD:1"), ("B:1", "UPLOAD:0")]


def test_a_copy_that_an_update_outdates_leaves_the_device_at_once() -> None:
    schedule = _steady(_plan(ON_HOST, num_blocks=3))
    assert _ops(schedule, OpKind.RELEASE) == [("B:1", "RELEASE:2"), ("B:0", "RELEASE:1"), ("V", "RELEASE:0")]
    assert schedule.device_after == frozenset()


def test_accumulation_keeps_the_copies_and_sends_the_gradients_down() -> None:
    plan = _plan(ON_HOST, num_blocks=2, micro_batches=2)
    first, second = _steps(plan)
    assert _ops(first, OpKind.GRAD, OpKind.UPDATE) == [("B:0", "GRAD:1"), ("V", "GRAD:0")]
    assert first.device_after == {0, 1}
    assert not [op for op in second.ops if op.kind is OpKind.UPLOAD]
    assert (OpKind.GRAD, 1) in second.anchors[2].carried


def test_evaluation_moves_weights_and_nothing_else() -> None:
    plan = _plan(replace(ON_DISK, saved=Saved.SWAP_HOST), num_blocks=3)
    (schedule,) = _steps(plan, StepSignature(order=(0, 1, 2), training=False))
    assert {op.kind for op in schedule.ops} == {OpKind.FETCH, OpKind.UPLOAD}


def test_a_block_that_the_host_need_not_hold_any_more_goes_first() -> None:
    # Room for two on the host: once 1 is on the device, its copy on the host goes before that of 3,
    # which is yet to go up.
    schedule = _steady(_plan(ON_DISK, num_blocks=4, prefetch_depth=1), host=2 * UNIT)
    fetched = [op.block for op in schedule.ops if op.kind is OpKind.FETCH and op.payload is Payload.WEIGHTS]
    assert len(fetched) == 3


# ---- weights that live on the device -------------------------------------------------------------


def test_without_priority_new_weights_go_up_as_soon_as_they_are_made() -> None:
    plan = _plan(RENEWED, num_blocks=2, update_order=UpdateOrder.AFTER_BACKWARD, priority=False)
    schedule = _steady(plan)
    assert _ops(schedule, OpKind.UPDATE, OpKind.UPLOAD) == [("V", s) for s in ("UPDATE:0", "UPLOAD:0", "UPDATE:1", "UPLOAD:1")]
    assert _one(schedule, OpKind.UPDATE, 1).id in _one(schedule, OpKind.UPLOAD, 1).after
    assert schedule.anchors[1].carried == ((OpKind.UPLOAD, 1),)


def test_with_priority_forward_sends_for_new_weights_in_its_own_order() -> None:
    schedule = _steady(_plan(RENEWED, num_blocks=3))
    assert _ops(schedule, OpKind.UPLOAD) == [("F:0", f"UPLOAD:{i}") for i in range(3)]
    assert [op.carried for op in schedule.ops[:3]] == [((OpKind.UPDATE, i),) for i in range(3)]
    assert [len(anchor.needs) for anchor in schedule.anchors[:3]] == [1, 1, 1]


def test_new_weights_go_up_during_backward_once_their_update_is_known_to_be_over() -> None:
    schedule = _steady(_plan(RENEWED, num_blocks=6, gradient_depth=1))
    grads = {op.block: op for op in schedule.ops if op.kind is OpKind.GRAD}
    eager = [op for op in schedule.ops if op.kind is OpKind.UPLOAD and op.at > 6]
    assert [op.block for op in eager] == [5, 4, 3]
    for op in eager:  # the anchor waits for a GRAD that waits for the UPDATE: the lane is not held up
        update = _one(schedule, OpKind.UPDATE, op.block).id
        assert any(update in grads[schedule.ops[need].block].after for need in schedule.anchors[op.at].needs)


# ---- gradients and updates -----------------------------------------------------------------------


def test_a_blocks_gradients_go_down_and_its_update_follows() -> None:
    schedule = _steady(_plan(ON_HOST, num_blocks=2))
    assert _ops(schedule, OpKind.GRAD, OpKind.UPDATE) == [
        ("B:0", "GRAD:1"),
        ("B:0", "UPDATE:1"),
        ("V", "GRAD:0"),
        ("V", "UPDATE:0"),
    ]
    assert _one(schedule, OpKind.GRAD, 1).id in _one(schedule, OpKind.UPDATE, 1).after


def test_backward_waits_for_the_gradients_whose_place_on_the_device_it_needs() -> None:
    schedule = _steady(_plan(RENEWED, num_blocks=4))
    grads = {op.id: op.block for op in schedule.ops if op.kind is OpKind.GRAD}
    waits = {str(a): [grads[i] for i in a.needs if i in grads] for a in schedule.anchors if a.block >= 0}
    assert {k: v for k, v in waits.items() if v} == {"B:1": [3], "B:0": [2]}


def test_gradients_wait_for_a_place_on_the_host() -> None:
    schedule = _steady(_plan(RENEWED, num_blocks=4, gradient_depth=2))
    updates = {op.id: op.block for op in schedule.ops if op.kind is OpKind.UPDATE}
    waits = {op.block: [updates[i] for i in op.after if i in updates] for op in schedule.ops if op.kind is OpKind.GRAD}
    assert waits == {3: [], 2: [], 1: [3], 0: [2]}


def test_the_device_updates_its_own_state_between_two_backwards() -> None:
    schedule = _steady(_plan(RESIDENT, num_blocks=2))
    assert [(str(schedule.anchors[op.at]), str(op)) for op in schedule.ops] == [
        ("B:0", "0 UPDATE:1 state compute bytes=600 at=3"),
        ("V", "1 UPDATE:0 state compute bytes=600 at=4"),
    ]
    after = _steps(_plan(RESIDENT, num_blocks=2), _signature(0, 1, updates=Updates.AFTER_VERDICT))[0]
    assert _ops(after, OpKind.UPDATE) == [("V", "UPDATE:0"), ("V", "UPDATE:1")]


def test_state_from_the_host_comes_and_goes_two_blocks_at_a_time() -> None:
    plan = _plan(VISITOR, num_blocks=4, update_order=UpdateOrder.AFTER_BACKWARD)
    schedule = _steady(plan)
    assert [s for _, s in _ops(schedule, OpKind.SWAP_IN, OpKind.UPDATE, OpKind.SWAP_OUT)] == [
        "SWAP_IN:0",
        "SWAP_IN:1",
        "UPDATE:0",
        "SWAP_OUT:0",
        "SWAP_IN:2",
        "UPDATE:1",
        "SWAP_OUT:1",
        "SWAP_IN:3",
        "UPDATE:2",
        "SWAP_OUT:2",
        "UPDATE:3",
        "SWAP_OUT:3",
    ]
    assert _one(schedule, OpKind.SWAP_OUT, 0).id in _one(schedule, OpKind.SWAP_IN, 2).after
    assert _one(schedule, OpKind.SWAP_IN, 0).carried == ((OpKind.SWAP_OUT, 0),)


def test_device_and_cpu_updates_alternate_in_forward_order() -> None:
    """Deep Optimizer States, Algorithm 1 with k = 2: odd subgroups on the device, their state comes
    while the CPU updates.
    """
    plan = _plan(RENEWED, VISITOR, RENEWED, VISITOR, update_order=UpdateOrder.AFTER_BACKWARD, priority=False)
    schedule = _steady(plan)
    assert [(op.block, op.lane) for op in schedule.ops if op.kind is OpKind.UPDATE] == [
        (0, Lane.CPU),
        (1, Lane.COMPUTE),
        (2, Lane.CPU),
        (3, Lane.COMPUTE),
    ]
    assert _one(schedule, OpKind.SWAP_IN, 1).id < _one(schedule, OpKind.UPDATE, 0).id
    assert not [op for op in schedule.ops if op.kind is OpKind.GRAD and op.block in (1, 3)]  # they stay on the device


def test_state_comes_during_backward_if_updates_do() -> None:
    schedule = _steady(_plan(VISITOR, num_blocks=3))
    assert [row for row in _ops(schedule, OpKind.SWAP_IN, OpKind.UPDATE) if row[0] != "V"] == [
        ("B:2", "SWAP_IN:2"),
        ("B:2", "SWAP_IN:1"),
        ("B:1", "UPDATE:2"),
        ("B:1", "SWAP_IN:0"),
        ("B:0", "UPDATE:1"),
    ]


def test_weights_on_the_host_that_the_device_updates_go_back() -> None:
    plan = _plan(replace(VISITOR, weights=Tier.HOST), num_blocks=2)
    schedule = _steady(plan, device=UNIT)
    back = _one(schedule, OpKind.SWAP_OUT, 1, Payload.WEIGHTS)
    assert (back.lane, back.num_bytes) == (Lane.D2H, UNIT)
    assert _one(schedule, OpKind.UPDATE, 1).id in back.after
    assert _one(schedule, OpKind.SWAP_OUT, 1, Payload.STATE).id == back.id + 1
    assert next(op for op in schedule.ops if op.kind is OpKind.UPLOAD and op.block == 1).carried == ((OpKind.SWAP_OUT, 1),)


def test_after_the_verdict_weights_come_back_to_the_device_for_their_update() -> None:
    plan = _plan(replace(RESIDENT, weights=Tier.HOST), num_blocks=3)
    (schedule,) = _steps(plan, _signature(0, 1, 2, updates=Updates.AFTER_VERDICT), device=UNIT)
    assert [s for a, s in _ops(schedule, OpKind.UPLOAD, OpKind.UPDATE) if a == "V"] == [
        "UPDATE:0",
        "UPLOAD:1",
        "UPDATE:1",
        "UPLOAD:2",
        "UPDATE:2",
    ]


def test_state_on_disk_is_read_ahead_of_the_gradients() -> None:
    schedule = _steady(_plan(replace(RENEWED, state=Tier.DISK), num_blocks=2))
    assert _ops(schedule, OpKind.FETCH) == [("B:1", "FETCH:1"), ("B:1", "FETCH:0")]
    assert _one(schedule, OpKind.UPDATE, 1).id in _one(schedule, OpKind.STORE, 1).after


# ---- activations ---------------------------------------------------------------------------------


def test_swapped_activations_leave_after_forward_and_are_back_before_backward() -> None:
    plan = _plan(replace(RESIDENT, saved=Saved.SWAP_HOST), num_blocks=4, prefetch_depth=1)
    schedule = _steady(plan)
    swaps = _ops(schedule, OpKind.SWAP_OUT, OpKind.SWAP_IN)
    assert swaps == [
        ("F:1", "SWAP_OUT:0"),
        ("F:2", "SWAP_OUT:1"),
        ("F:3", "SWAP_OUT:2"),
        ("B:3", "SWAP_OUT:3"),
        ("B:3", "SWAP_IN:3"),
        ("B:3", "SWAP_IN:2"),
        ("B:2", "SWAP_IN:1"),
        ("B:1", "SWAP_IN:0"),
    ]
    back = {op.block: op.id for op in schedule.ops if op.kind is OpKind.SWAP_IN}
    assert [back[b] in schedule.anchors[7 - b].needs for b in range(4)] == [True] * 4
    assert {op.num_bytes for op in schedule.ops if op.payload is Payload.ACTIVATIONS} == {80}  # all but the input, which stays


def test_forward_waits_for_activations_that_left_longest_ago() -> None:
    plan = _plan(replace(RESIDENT, saved=Saved.SWAP_HOST), num_blocks=5, prefetch_depth=2)
    schedule = _steady(plan)
    out = {op.block: op.id for op in schedule.ops if op.kind is OpKind.SWAP_OUT}
    assert [anchor.needs for anchor in schedule.anchors[:5]] == [(), (), (), (out[0],), (out[1],)]


def test_activations_on_disk_take_two_hops_each_way() -> None:
    rule = replace(RESIDENT, saved=Saved.SWAP_HOST, operators={"mlp": Saved.SWAP_DISK})
    schedule = _steady(_plan(rule, num_blocks=2))
    hops = [op for op in schedule.ops if op.block == 0 and op.payload is Payload.ACTIVATIONS]
    assert [(op.kind, op.lane, op.num_bytes) for op in hops] == [
        (OpKind.SWAP_OUT, Lane.D2H, 80),
        (OpKind.SWAP_OUT, Lane.DISK_WRITE, 50),
        (OpKind.SWAP_IN, Lane.DISK_READ, 50),
        (OpKind.SWAP_IN, Lane.H2D, 80),
    ]
    assert all(before.id in after.after for before, after in pairwise(hops))


def test_host_memory_on_the_way_to_the_disk_is_taken_over() -> None:
    schedule = _steady(_plan(replace(RESIDENT, saved=Saved.SWAP_DISK), num_blocks=5, prefetch_depth=1))
    third = _one(schedule, OpKind.SWAP_OUT, 2, lane=Lane.D2H)
    assert third.after == (_one(schedule, OpKind.SWAP_OUT, 0, lane=Lane.DISK_WRITE).id,)


def test_recomputed_activations_need_no_op() -> None:
    schedule = _steady(_plan(replace(RESIDENT, saved=Saved.RECOMPUTE), num_blocks=3))
    assert {op.kind for op in schedule.ops} == {OpKind.UPDATE}


def test_uses_of_one_block_swap_by_themselves() -> None:
    plan = _plan(replace(RESIDENT, saved=Saved.SWAP_HOST), num_blocks=2)
    (schedule,) = _steps(plan, _signature(0, 1, 0))
    assert [s for _, s in _ops(schedule, OpKind.SWAP_OUT)] == ["SWAP_OUT:0", "SWAP_OUT:1", "SWAP_OUT:0"]
    out = [op.id for op in schedule.ops if op.kind is OpKind.SWAP_OUT]
    back = [op for op in schedule.ops if op.kind is OpKind.SWAP_IN and op.block == 0]
    assert [out.index(op.after[0]) for op in back] == [2, 0]


# ---- refusals, and the whole ---------------------------------------------------------------------


def test_a_block_larger_than_the_devices_room_is_refused_by_name() -> None:
    with pytest.raises(OutOfMemoryBudgetError, match=r"block 'b0' needs 100 B of device memory.*50 B.*device_memory"):
        _steps(_plan(ON_HOST, num_blocks=1), device=50)


def test_state_on_the_device_is_not_for_the_cpu() -> None:
    with pytest.raises(ConfigError, match=r"block 'b0' has state='device' with update='cpu'.*update='device'"):
        _steps(_plan(replace(RENEWED, state=Tier.DEVICE), num_blocks=1))


def test_a_schedule_for_a_device_is_refused_without_one() -> None:
    plan = _plan(ON_HOST, num_blocks=2)
    schedule = _steady(plan)
    with pytest.raises(ScheduleError, match="does not run: UPLOAD weights on lane 'h2d'"):
        check(schedule, plan, _model(2), capacity_bytes=EVERYTHING)


def test_an_upload_before_its_update_is_refused() -> None:
    plan = _plan(RENEWED, num_blocks=2, update_order=UpdateOrder.AFTER_BACKWARD, priority=False)
    schedule = _steady(plan)
    update, upload = _one(schedule, OpKind.UPDATE, 0), _one(schedule, OpKind.UPLOAD, 0)
    ops = list(schedule.ops)
    ops[update.id], ops[upload.id] = replace(upload, id=update.id, after=()), replace(update, id=upload.id)
    with pytest.raises(ScheduleError, match=r"rule '\w+': op \d+ UPLOAD block 0"):
        check(replace(schedule, ops=tuple(ops)), plan, _model(2), capacity_bytes=0, device_capacity_bytes=0)


def test_micro_batches_come_before_the_step_that_updates() -> None:
    plan = _plan(ON_HOST, num_blocks=2, micro_batches=3)
    assert [s.updates for s in step_signatures(plan)] == [Updates.NONE, Updates.NONE, Updates.IN_BACKWARD]
    sizes = CacheSizes(host_cache_bytes=0, device_cache_bytes=UNIT, staging_bytes=0)
    schedules = steady(plan, _model(2), sizes=sizes)
    assert [s.signature.updates for s in schedules] == [Updates.NONE, Updates.NONE, Updates.IN_BACKWARD]
    assert schedules[0].device_before == schedules[-1].device_after


LOWERED = [ON_HOST, ON_DISK, RENEWED, RESIDENT, VISITOR, replace(ON_DISK, saved=Saved.SWAP_DISK)]


@pytest.mark.parametrize("rule", LOWERED, ids=range(6))
def test_four_times_as_many_blocks_take_four_times_as_long_to_lower_and_to_check(rule: BlockPlan) -> None:
    def calls(num_blocks: int) -> int:
        plan, model, memory = _plan(rule, num_blocks=num_blocks), _model(num_blocks), num_blocks // 3 * UNIT
        return python_calls(lambda: _steps(plan, model=model, host=memory, device=memory))

    hundred = calls(100)
    assert hundred < 70_000  # some 40 ms; counted, since machines are as fast as they like
    assert calls(400) < 4.1 * hundred
