"""What is refused where several ranks share the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.simulations import ON_DISK, ON_HOST, RESIDENT, model_of, plan_of

from lightning_hetero.errors import ConfigError, OutOfMemoryBudgetError
from lightning_hetero.ir.plan import BlockPlan, Gather, Plan, Saved, Tier
from lightning_hetero.ir.schedule import Lane, OpKind, Payload, Schedule, StepSignature, Updates
from lightning_hetero.lowering import DeviceRoom, lower

STEP = StepSignature(order=(0, 1), training=True, updates=Updates.IN_BACKWARD)
SLICE = model_of(20, 20).slice_of(2).shape()  # 40 bytes of weights each; both slices are 80


def lowered(plan: Plan, *, ranks: int = 2, whole_bytes: int = 160, shared_memory: bool = True) -> Schedule:
    room = DeviceRoom(capacity_bytes=whole_bytes, ranks=ranks, shared_memory=shared_memory)
    return lower(plan, SLICE, STEP, resident=frozenset(), capacity_bytes=80, device=room)


def test_ranks_update_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match="block 'l0' has update='device'; the devices of 2 ranks are the host's own CPU"):
        lowered(plan_of(replace(RESIDENT, state=Tier.HOST), ON_HOST))


def test_whole_weights_have_to_fit() -> None:
    lowered(plan_of(ON_DISK, ON_DISK), whole_bytes=80)
    with pytest.raises(OutOfMemoryBudgetError, match="block 'l0' needs 80 B of host memory on each of 2 ranks"):
        lowered(plan_of(ON_DISK, ON_DISK), whole_bytes=79)


def test_activations_stay_where_devices_are_the_hosts_own_cpu() -> None:
    with pytest.raises(ConfigError, match="saved='swap_host'"):
        lowered(plan_of(replace(ON_HOST, saved=Saved.SWAP_HOST), ON_HOST))


def test_batches_are_not_split_there() -> None:
    with pytest.raises(ConfigError, match="micro_batches=2"):
        lowered(replace(plan_of(ON_HOST, ON_HOST), micro_batches=2))


def test_gradients_of_two_batches_that_accumulate_do_not_meet_on_the_host() -> None:
    """Those of a pinned block stay on each rank meanwhile, so no REDUCE of it stands for others."""
    model = replace(SLICE, blocks=(SLICE.blocks[0], replace(SLICE.blocks[1], pinned=True)))
    plan = plan_of(ON_HOST, replace(ON_HOST, weights=Tier.DEVICE))
    room = DeviceRoom(capacity_bytes=160, ranks=2)
    schedule = lower(plan, model, replace(STEP, updates=Updates.NONE), resident=frozenset(), capacity_bytes=80, device=room)
    (grad,) = [op for op in schedule.ops if op.kind is OpKind.GRAD]
    assert grad.block == 0
    assert (OpKind.REDUCE, 0) in grad.carried


def test_one_rank_has_no_collectives() -> None:
    kinds = {op.kind for op in lowered(plan_of(ON_DISK, BlockPlan(name="")), ranks=1, shared_memory=False).ops}
    assert not kinds & {OpKind.GATHER, OpKind.REDUCE, OpKind.AGREE}


def test_devices_exchange_slices_where_the_plan_says_so() -> None:
    plan = replace(plan_of(ON_DISK, ON_HOST), gather=Gather.DEVICE)
    room = DeviceRoom(capacity_bytes=160, ranks=2, gathers_in_place=True)
    schedule = lower(plan, SLICE, STEP, resident=frozenset(), capacity_bytes=80, device=room)
    moves = {op.kind: (op.lane, op.num_bytes) for op in schedule.ops if op.block == 0 and op.payload is not Payload.STATE}
    assert moves[OpKind.UPLOAD] == (Lane.H2D, 40)
    assert moves[OpKind.GATHER] == (Lane.PEER, 80)
    assert moves[OpKind.REDUCE] == (Lane.PEER, 80)
    assert moves[OpKind.GRAD] == (Lane.D2H, 40)
    assert not list(schedule.lane(Lane.NET)), "all collectives have one order"


def test_ranks_without_memory_in_common_or_devices_of_their_own_gather_on_the_host() -> None:
    plan = replace(plan_of(ON_HOST, ON_HOST), gather=Gather.DEVICE)
    with pytest.raises(ConfigError, match=r"has gather='device'; the devices of 2 ranks are the host's own CPU.*Allowed: 'host'"):
        lowered(plan)
    with pytest.raises(ConfigError, match=r"has gather='device'; 2 ranks do not have the same memory.*Allowed: 'host'"):
        lowered(plan, shared_memory=False)
    assert lowered(plan, ranks=1, shared_memory=False), "one rank has nothing to exchange"
