from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_hetero.errors import ConfigError, OutOfMemoryBudgetError, ScheduleError
from lightning_hetero.ir.model import BlockShape, ModelShape
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import NO_BLOCK, Lane, Op, OpKind, Payload, Phase, Schedule, StepSignature, Updates
from lightning_hetero.lowering import check, lower
from lightning_hetero.planners import disk, host, resident

MIB = 2**20


def _model(*sizes: int, frozen: tuple[int, ...] = (), pinned: tuple[int, ...] = ()) -> ModelShape:
    """Blocks with weights of that many MiB in fp32, and Adam state of twice that."""
    blocks = []
    for index, size in enumerate(sizes):
        params, trainable = size * MIB // 4, index not in frozen
        blocks.append(
            BlockShape(
                name=f"layers.{index}",
                num_params=params,
                num_trainable_params=params * trainable,
                weight_bytes=size * MIB,
                gradient_bytes=size * MIB * trainable,
                state_bytes=2 * size * MIB * trainable,
                pinned=index in pinned,
            )
        )
    return ModelShape(name="m", blocks=tuple(blocks))


def _signature(order: tuple[int, ...], updates: Updates = Updates.IN_BACKWARD) -> StepSignature:
    return StepSignature(order=order, training=True, updates=updates)


def _lower(
    plan: Plan, model: ModelShape, signature: StepSignature, *, capacity: int = 0, resident: frozenset[int] = frozenset()
) -> Schedule:
    schedule = lower(plan, model, signature, resident=resident, capacity_bytes=capacity * MIB)
    check(schedule, plan, model, capacity_bytes=capacity * MIB)
    return schedule


def _find(schedule: Schedule, kind: OpKind, block: int, payload: Payload | None = None) -> list[Op]:
    return [op for op in schedule.ops if op.kind is kind and op.block == block and payload in (None, op.payload)]


def test_resident_plan_updates_on_the_device_after_the_verdict_and_moves_nothing() -> None:
    model = _model(1, 1)
    schedule = _lower(resident(model), model, _signature((0, 1)))
    assert [(op.kind, op.block, op.lane) for op in schedule.ops] == [
        (OpKind.UPDATE, 0, Lane.COMPUTE),
        (OpKind.UPDATE, 1, Lane.COMPUTE),
    ]
    assert {schedule.anchors[op.at].phase for op in schedule.ops} == {Phase.VERDICT}


def test_host_plan_updates_each_block_as_soon_as_its_backward_has_ended() -> None:
    model = _model(1, 1, 1)
    schedule = _lower(host(model), model, _signature((0, 1, 2)))
    assert [(str(schedule.anchors[op.at]), op.kind, op.block) for op in schedule.ops] == [
        ("B:1", OpKind.UPDATE, 2),
        ("B:0", OpKind.UPDATE, 1),
        ("V", OpKind.UPDATE, 0),
    ]


def test_after_the_verdict_updates_run_in_forward_order() -> None:
    model = _model(1, 1, 1)
    schedule = _lower(host(model), model, _signature((2, 0, 1), Updates.AFTER_VERDICT))
    assert [op.block for op in schedule.ops] == [2, 0, 1]
    assert {str(schedule.anchors[op.at]) for op in schedule.ops} == {"V"}


def test_a_forward_waits_for_the_update_of_the_step_before() -> None:
    model = _model(1, 1, frozen=(1,))
    schedule = _lower(host(model), model, _signature((0, 1)))
    assert [a.carried for a in schedule.anchors[:2]] == [((OpKind.UPDATE, 0),), ()]


def test_accumulation_and_evaluation_have_no_updates() -> None:
    model = _model(1, 1)
    for signature in (_signature((0, 1), Updates.NONE), StepSignature(order=(0, 1), training=False)):
        schedule = _lower(disk(model), model, signature, capacity=2)
        assert {op.kind for op in schedule.ops} == {OpKind.FETCH}


def test_all_blocks_stay_in_memory_when_they_fit() -> None:
    model = _model(1, 1, 1)
    everything = frozenset({0, 1, 2})
    schedule = _lower(disk(model), model, _signature((0, 1, 2)), capacity=3, resident=everything)
    assert schedule.resident_after == everything
    assert not [op for op in schedule.ops if op.payload is Payload.WEIGHTS and op.kind in (OpKind.FETCH, OpKind.RELEASE)]


def test_eviction_keeps_the_blocks_that_are_used_again_first() -> None:
    model = _model(*[1] * 6)
    schedule = _lower(disk(model), model, _signature(tuple(range(6))), capacity=3)
    # At the turn 5, 4, 3 are in memory; at the end of the step those that the next forward needs
    # first.
    assert not [op for op in schedule.ops if op.kind is OpKind.FETCH and op.payload is Payload.WEIGHTS and op.at == 6]
    assert schedule.resident_after == {0, 1, 2}


def test_weights_are_fetched_ahead_of_their_use() -> None:
    model = _model(*[1] * 4)
    plan = replace(disk(model), prefetch_depth=2)
    schedule = _lower(plan, model, _signature(tuple(range(4))), capacity=3)
    issued_at = {op.block: op.at for op in reversed(schedule.ops) if op.kind is OpKind.FETCH and op.payload is Payload.WEIGHTS}
    assert issued_at == {0: 0, 1: 0, 2: 0, 3: 1}


def test_a_fetch_waits_for_all_memory_released_before_it() -> None:
    model = _model(1, 1, 2)
    schedule = _lower(disk(model), model, _signature((0, 1, 2), Updates.NONE), capacity=2)
    releases = [op for op in schedule.ops if op.kind is OpKind.RELEASE]
    (fetch,) = _find(schedule, OpKind.FETCH, 2, Payload.WEIGHTS)
    assert [op.block for op in releases[:2]] == [0, 1]
    assert releases[0].id in releases[1].after
    assert releases[1].id in fetch.after


def test_a_refused_prefetch_releases_nothing() -> None:
    model = _model(1, 3, 3)
    schedule = _lower(disk(model), model, _signature((0, 1, 2), Updates.NONE), capacity=4)
    # At F:1 block 2 would need 3 MiB; only block 0 (1 MiB) could go: nothing goes before F:2.
    assert next(op.at for op in schedule.ops if op.kind is OpKind.RELEASE) == 2


def test_state_of_a_block_whose_weights_could_be_evicted_is_not_opened() -> None:
    # Block 0 stays in memory from forward on; fetching block 1 for its backward must evict it
    # first.
    model = _model(1, 3, 2)
    schedule = _lower(disk(model), model, _signature((0, 1, 2)), capacity=3)
    (opened,) = _find(schedule, OpKind.FETCH, 0, Payload.STATE)
    released = _find(schedule, OpKind.RELEASE, 0)
    assert released
    assert all(op.id < opened.id for op in released)


def test_a_block_used_twice_is_updated_after_its_last_backward() -> None:
    model = _model(1, 1)
    schedule = _lower(disk(model), model, _signature((0, 1, 0)), capacity=1)
    assert [str(a) for a in schedule.anchors] == ["F:0", "F:1", "F:0", "B:0", "B:1", "B:0", "V"]
    assert [(op.block, str(schedule.anchors[op.at])) for op in schedule.ops if op.kind is OpKind.UPDATE] == [
        (1, "B:0"),
        (0, "V"),
    ]


def test_backward_waits_when_too_many_gradients_wait_for_their_update() -> None:
    model = _model(*[1] * 4)
    plan = replace(host(model), gradient_depth=2)
    schedule = _lower(plan, model, _signature(tuple(range(4))))
    waits = {str(a): [schedule.ops[i].block for i in a.needs] for a in schedule.anchors if a.needs}
    assert waits == {"B:1": [3], "B:0": [2]}


def test_frozen_blocks_are_fetched_and_never_written() -> None:
    model = _model(1, 1, frozen=(1,))
    schedule = _lower(disk(model), model, _signature((0, 1)), capacity=1)
    assert {op.kind for op in schedule.ops if op.block == 1} == {OpKind.FETCH, OpKind.RELEASE}
    assert [op.block for op in schedule.ops if op.kind is OpKind.STORE] == [0]


def test_commit_follows_every_store_and_stores_follow_the_commit_before() -> None:
    model = _model(1, 1, 1)
    schedule = _lower(disk(model), model, _signature((0, 1, 2)), capacity=2)
    stores = [op for op in schedule.ops if op.kind is OpKind.STORE]
    assert schedule.ops[-1].kind is OpKind.COMMIT
    assert schedule.ops[-1].after == tuple(op.id for op in stores)
    assert all((OpKind.COMMIT, NO_BLOCK) in op.carried for op in stores)


def test_state_on_disk_without_weights_on_disk_stores_both() -> None:
    model = _model(1)
    plan = Plan(name="m", blocks=(BlockPlan(name="layers.0", state=Tier.DISK),))
    (store,) = _find(_lower(plan, model, _signature((0,))), OpKind.STORE, 0)
    assert store.num_bytes == 3 * MIB


def test_a_block_larger_than_the_budget_is_refused_by_name() -> None:
    model = _model(1, 4)
    with pytest.raises(OutOfMemoryBudgetError, match=r"block 'layers\.1' needs 4\.0 MiB.*2\.0 MiB.*host_memory"):
        lower(disk(model), model, _signature((0, 1)), resident=frozenset(), capacity_bytes=2 * MIB)


def test_weights_that_must_stay_in_memory_are_refused_on_disk() -> None:
    model = _model(1, pinned=(0,))
    plan = Plan(name="mine", blocks=(BlockPlan(name="layers.0", weights=Tier.DISK),))
    with pytest.raises(ConfigError, match=r"plan 'mine'.*block 'layers\.0' on 'disk'"):
        lower(plan, model, _signature((0,)), resident=frozenset(), capacity_bytes=MIB)


def test_a_schedule_error_names_rule_op_and_block_and_shows_the_ops_around() -> None:
    model = _model(1, 1)
    plan = disk(model)
    schedule = _lower(plan, model, _signature((0, 1)), capacity=2)
    store = next(op for op in schedule.ops if op.kind is OpKind.STORE)
    broken = replace(schedule, ops=tuple(replace(op, after=()) if op is store else op for op in schedule.ops))
    with pytest.raises(ScheduleError, match=rf"rule 'order': op {store.id} STORE block 1 \('layers\.1'\)") as caught:
        check(broken, plan, model, capacity_bytes=2 * MIB)
    assert f"    {store.id - 1} UPDATE:1" in str(caught.value)


def test_check_refuses_an_update_on_the_wrong_lane() -> None:
    model = _model(1)
    schedule = _lower(host(model), model, _signature((0,)))
    plan = Plan(name="m", blocks=(BlockPlan(name="layers.0", update=UpdateLane.DEVICE),))
    with pytest.raises(ScheduleError, match="lane 'cpu', the plan says 'compute'"):
        check(schedule, plan, model, capacity_bytes=0)


def test_updates_after_backward_run_in_forward_order_and_read_nothing_ahead() -> None:
    model = _model(1, 1, 1)
    plan = replace(disk(model), update_order=UpdateOrder.AFTER_BACKWARD)
    schedule = _lower(plan, model, _signature((0, 1, 2)), capacity=3)
    at_verdict = [(op.kind, op.block) for op in schedule.ops if str(schedule.anchors[op.at]) == "V"]
    one = [OpKind.FETCH, OpKind.UPDATE, OpKind.STORE]
    assert at_verdict == [(kind, block) for block in range(3) for kind in one] + [(OpKind.COMMIT, NO_BLOCK)]
    assert not [op for op in schedule.ops if op.payload is Payload.STATE and str(schedule.anchors[op.at]) != "V"]


def test_naive_updates_read_once_the_block_before_is_written() -> None:
    model = _model(1, 1, 1)
    plan = replace(disk(model), update_order=UpdateOrder.NAIVE)
    schedule = _lower(plan, model, _signature((0, 1, 2)), capacity=3)
    stores = {op.block: op.id for op in schedule.ops if op.kind is OpKind.STORE}
    reads = {op.block: op for op in schedule.ops if op.kind is OpKind.FETCH and op.payload is Payload.STATE}
    assert stores[2] in reads[1].after
    assert stores[1] in reads[0].after
    assert [str(schedule.anchors[reads[b].at]) for b in (2, 1, 0)] == ["B:1", "B:0", "V"]


def test_check_refuses_a_naive_update_that_does_not_wait() -> None:
    model = _model(1, 1)
    plan = replace(disk(model), update_order=UpdateOrder.NAIVE)
    schedule = _lower(plan, model, _signature((0, 1)), capacity=2)
    overlapped = _lower(disk(model), model, _signature((0, 1)), capacity=2)
    assert schedule != overlapped
    with pytest.raises(ScheduleError, match=r"rule 'update'.*block 1's update"):
        check(overlapped, plan, model, capacity_bytes=2 * MIB)


def test_without_priority_the_first_forward_waits_for_all_of_the_last_step() -> None:
    model = _model(1, 1, frozen=(1,))
    plan = replace(disk(model), priority=False)
    schedule = _lower(plan, model, _signature((1, 0)), capacity=2, resident=frozenset({0, 1}))
    assert schedule.anchors[0].carried == ((OpKind.UPDATE, 0), (OpKind.STORE, 0))
    assert schedule.anchors[1].carried == ((OpKind.UPDATE, 0),)
    with pytest.raises(ScheduleError, match="without priority"):
        check(_lower(disk(model), model, _signature((1, 0)), capacity=2), plan, model, capacity_bytes=2 * MIB)


@pytest.mark.parametrize(
    ("rule", "knob"),
    [
        (BlockPlan(name="layers.0", saved=Saved.RECOMPUTE), "saved='recompute'"),
        (BlockPlan(name="layers.0", boundary=Saved.SWAP_HOST), "boundary='swap_host'"),
        (BlockPlan(name="layers.0", operators={"mlp": Saved.SWAP_DISK}), r"operators\['mlp'\]='swap_disk'"),
    ],
)
def test_activations_that_do_not_stay_are_refused_if_the_device_is_the_host(rule: BlockPlan, knob: str) -> None:
    with pytest.raises(ConfigError, match=rf"plan 'm': block 'layers\.0' has {knob}.*own CPU"):
        _lower(Plan(name="m", blocks=(rule,)), _model(1), _signature((0,)))


def test_split_batches_are_refused_if_the_device_is_the_host() -> None:
    plan = Plan(name="m", blocks=(BlockPlan(name="layers.0"),), micro_batches=2)
    with pytest.raises(ConfigError, match=r"micro_batches=2.*accumulate_grad_batches"):
        _lower(plan, _model(1), _signature((0,)))


def _verdicts(*, capacity: int) -> list[list[str]]:
    """What is issued at the verdict that keeps, and at the one that discards, of three blocks of
    which one cannot be taken back.
    """
    model = _model(1, 1, 1)
    rows = list(disk(model).blocks)
    rows[1] = replace(rows[1], weights=Tier.HOST, state=Tier.HOST)
    plan = replace(disk(model), blocks=tuple(rows))
    steps = [_lower(plan, model, _signature((0, 1, 2), u), capacity=capacity) for u in (Updates.SPECULATIVE, Updates.REDONE)]
    early = [[(op.kind, op.block, str(s.anchors[op.at])) for op in s.ops if op.kind is OpKind.UPDATE] for s in steps]
    assert all((OpKind.UPDATE, 2, "B:1") in ops for ops in early)
    return [[f"{op.kind.value} {op.block} {op.payload.value}" for op in s.ops if op.at == 6] for s in steps]


def test_a_keeping_verdict_issues_the_remaining_updates() -> None:
    kept, _ = _verdicts(capacity=3)
    assert kept == ["UPDATE 0 state", "STORE 0 state", "UPDATE 1 state", "COMMIT -1 -"]


def test_a_verdict_that_discards_issues_all_updates_in_forward_order() -> None:
    _, redone = _verdicts(capacity=3)
    again = ["FETCH 2 weights", "FETCH 2 state", "UPDATE 2 state", "STORE 2 state"]
    assert redone == ["UPDATE 0 state", "STORE 0 state", "UPDATE 1 state", *again, "COMMIT -1 -"]


def test_weights_that_are_not_in_memory_go_from_file_to_file_again() -> None:
    _, redone = _verdicts(capacity=1)
    assert redone[3:] == ["FETCH 2 state", "UPDATE 2 state", "STORE 2 state", "COMMIT -1 -"]


def _speculating(updates: Updates) -> tuple[Plan, ModelShape, Schedule]:
    model = _model(1, 1)
    return disk(model), model, _lower(disk(model), model, _signature((0, 1), updates), capacity=2)


def test_discarded_updates_are_repeated() -> None:
    plan, model, kept = _speculating(Updates.SPECULATIVE)
    broken = replace(kept, signature=replace(kept.signature, updates=Updates.REDONE))
    with pytest.raises(ScheduleError, match=r"rule 'update'.*block 1 .*discarded by the verdict and not updated again"):
        check(broken, plan, model, capacity_bytes=2 * MIB)


def test_kept_updates_are_not_repeated() -> None:
    plan, model, redone = _speculating(Updates.REDONE)
    broken = replace(redone, signature=replace(redone.signature, updates=Updates.SPECULATIVE))
    with pytest.raises(ScheduleError, match=r"rule 'resident'.*block 1 .*or are in memory"):
        check(broken, plan, model, capacity_bytes=2 * MIB)


def test_an_update_that_is_done_again_finds_the_old_weights() -> None:
    plan, model, redone = _speculating(Updates.REDONE)
    moved = [op for op in redone.ops if op.at == 4 and op.payload is Payload.WEIGHTS and op.kind is not OpKind.STORE]
    assert [op.kind for op in moved] == [OpKind.FETCH]
    last = next(op for op in redone.ops if op.kind is OpKind.STORE and op.block == 1)
    ops: list[Op] = []
    for op in redone.ops:
        if op not in moved:
            after = {last.id if i in {m.id for m in moved} else i - sum(m.id < i for m in moved) for i in op.after}
            ops.append(replace(op, id=len(ops), after=tuple(sorted(after))))
    with pytest.raises(ScheduleError, match=r"rule 'resident'.*block 1 .*those that were discarded"):
        check(replace(redone, ops=tuple(ops)), plan, model, capacity_bytes=2 * MIB)


def test_a_block_that_cannot_be_discarded_waits_for_the_verdict() -> None:
    model = _model(1, 1)
    schedule = _lower(host(model), model, _signature((0, 1), Updates.SPECULATIVE))
    assert {str(schedule.anchors[op.at]) for op in schedule.ops} == {"V"}
    early = replace(schedule, ops=tuple(replace(op, at=3) for op in schedule.ops if op.block == 1))
    early = replace(early, ops=(replace(early.ops[0], id=0),))
    with pytest.raises(ScheduleError, match="before the verdict"):
        check(early, host(model), model, capacity_bytes=0)


def test_weights_whose_update_is_open_are_not_released() -> None:
    model = _model(1, 1, 1)
    schedule = _lower(disk(model), model, _signature((0, 1, 2)), capacity=3)
    opened = next(op for op in schedule.ops if op.payload is Payload.STATE and schedule.anchors[op.at].block != op.block)
    assert (opened.kind, opened.block, str(schedule.anchors[opened.at])) == (OpKind.FETCH, 1, "B:2")
    new = opened.id + 1
    release = replace(opened, id=new, kind=OpKind.RELEASE, payload=Payload.WEIGHTS, num_bytes=MIB, after=(opened.id,))
    later = [replace(op, id=op.id + 1, after=tuple(i + (i >= new) for i in op.after)) for op in schedule.ops if op.id >= new]
    anchors = [replace(a, needs=tuple(i + (i >= new) for i in a.needs)) for a in schedule.anchors]
    broken = replace(schedule, ops=(*schedule.ops[:new], release, *later), anchors=tuple(anchors))
    with pytest.raises(ScheduleError, match=r"rule 'resident'.*block 1 .*releases weights whose update is open"):
        check(broken, disk(model), model, capacity_bytes=3 * MIB)
