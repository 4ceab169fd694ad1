"""Tiny steps whose times and bytes are worked out by hand: blocks with a forward of 1 s and a
backward of 2 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier, UpdateLane
from lightning_hetero.ir.schedule import NO_BLOCK, Anchor, Lane, Op, OpKind, Payload, Phase, Schedule, StepSignature, Updates
from lightning_hetero.sim import Simulation, simulate

MIB = 2**20


UPDATE_0, UPDATE_1 = ((OpKind.UPDATE, 0),), ((OpKind.UPDATE, 1),)


# Updates: 10 parameters a second on the CPU, 20 on the device. Links: 10 bytes a second each way.
# Memory never binds.
GPU = HardwareProfile(
    name="gpu", device_memory_bytes=1000, host_memory_bytes=1000, disk_capacity_bytes=1000, device_flop_per_s=1.0,
    link_h2d_bytes_per_s=10.0, link_d2h_bytes_per_s=10.0, disk_read_bytes_per_s=3.0 * MIB, disk_write_bytes_per_s=3.0 * MIB,
    disk_duplex=True, host_dram_bytes_per_s=1e15, cpu_update_params_per_s=10.0, device_update_params_per_s=20.0,
    cpu_downcast_params_per_s=0.0,
)  # fmt: skip


CPU = replace(GPU, name="cpu", shared_memory=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    staging_bytes: int = 0


def model_of(*params: int, itemsize: int = 4, **block: int) -> ModelProfile:
    sizes = {"activation_bytes": 0, "boundary_bytes": 0, "transient_bytes": 0} | block
    blocks = [
        BlockProfile(name=f"l{i}", num_params=n, num_trainable_params=n, forward_s=1.0, backward_s=2.0, forward_flop=1.0, **sizes)
        for i, n in enumerate(params)
    ]
    return ModelProfile(
        name="m", tokens=1, compute_itemsize=itemsize, constant_device_bytes=0, constant_host_bytes=0, blocks=tuple(blocks)
    )


def plan_of(*blocks: BlockPlan, priority: bool = True) -> Plan:
    return Plan(name="p", blocks=tuple(replace(b, name=f"l{i}") for i, b in enumerate(blocks)), priority=priority)


ON_HOST = BlockPlan(name="")


RESIDENT = BlockPlan(name="", weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE)


ON_DISK = BlockPlan(name="", weights=Tier.DISK, state=Tier.DISK)


def make_op(kind: OpKind, block: int, lane: Lane, at: int, payload: Payload = Payload.WEIGHTS, **rest: object) -> Op:
    return Op(id=0, kind=kind, block=block, lane=lane, at=at, payload=payload, **rest)  # type: ignore[arg-type]


def update_op(block: int, at: int, lane: Lane = Lane.CPU, **rest: object) -> Op:
    return make_op(OpKind.UPDATE, block, lane, at, Payload.STATE, **rest)


def schedule_of(
    num_blocks: int,
    ops: Sequence[Op] = (),
    *,
    waits: dict[str, dict[str, object]] | None = None,
    resident: frozenset[int] = frozenset(),
) -> Schedule:
    """A step over ``num_blocks`` blocks; ``waits`` gives anchors, by their text, their ``needs``
    and ``carried``.
    """
    order = range(num_blocks)
    rows = [(Phase.FORWARD, b) for b in order] + [(Phase.BACKWARD, b) for b in reversed(order)] + [(Phase.VERDICT, NO_BLOCK)]
    anchors = [Anchor(phase=phase, block=block) for phase, block in rows]
    return Schedule(
        signature=StepSignature(order=tuple(order), training=True, updates=Updates.IN_BACKWARD),
        anchors=tuple(replace(a, **(waits or {}).get(str(a), {})) for a in anchors),  # type: ignore[arg-type]
        ops=tuple(replace(op, id=i) for i, op in enumerate(ops)),
        resident_before=resident,
        resident_after=resident,
    )


def simulated(
    schedule: Schedule | Sequence[Schedule], plan: Plan, model: ModelProfile, hardware: HardwareProfile = GPU, *, staging: int = 0,
    **options: object,
) -> Simulation:  # fmt: skip
    schedules = [schedule] if isinstance(schedule, Schedule) else schedule
    return simulate(schedules, plan, model, hardware, sizes=Staging(staging_bytes=staging), keep_trace=True, **options)  # type: ignore[arg-type]


def spans_of(simulation: Simulation, step: int = 0) -> dict[str, tuple[float, float]]:
    """Spans of one step, by name, since the step began."""
    spans = [s for s in simulation.trace.spans if s.step == step]
    begin = min(s.start_s for s in spans if s.name.startswith("F "))
    return {s.name: (s.start_s - begin, s.end_s - begin) for s in spans}


HOST_STEP = schedule_of(
    2, [update_op(1, 3), update_op(0, 4)], waits={"F:0": {"carried": UPDATE_0}, "F:1": {"carried": UPDATE_1}}
)  # block 1's gradients are complete as B:0 begins, block 0's after it


def upload_schedule() -> Schedule:
    ops = [
        make_op(OpKind.UPLOAD, 0, Lane.H2D, 0, num_bytes=10),
        make_op(OpKind.UPLOAD, 1, Lane.H2D, 0, num_bytes=30),
        make_op(OpKind.RELEASE, 0, Lane.H2D, 1, num_bytes=10, after=(0,)),
        make_op(OpKind.RELEASE, 1, Lane.H2D, 2, num_bytes=30, after=(1, 2)),
    ]
    return schedule_of(2, ops, waits={"F:0": {"needs": (0,)}, "F:1": {"needs": (1,)}})


# fp32: 9 MiB in state and weights of 0.75 Mi parameters; 3 pieces of 3 MiB, a second each. Their
# update is 1 s a piece.
DISK_PARAMS = 3 * MIB // 4


DISK_STATE, DISK_WEIGHTS = 8 * DISK_PARAMS, 4 * DISK_PARAMS


def disk_step(*, open_at: int) -> Schedule:
    ops = [
        make_op(OpKind.FETCH, 0, Lane.DISK_READ, open_at, Payload.STATE, num_bytes=DISK_STATE, carried=((OpKind.STORE, 0),)),
        update_op(0, 2, after=(0,)),
        make_op(
            OpKind.STORE,
            0,
            Lane.DISK_WRITE,
            2,
            Payload.STATE,
            num_bytes=DISK_STATE,
            after=(1,),
            carried=((OpKind.COMMIT, NO_BLOCK),),
        ),
        make_op(OpKind.COMMIT, NO_BLOCK, Lane.DISK_WRITE, 2, Payload.NONE, after=(2,)),
    ]
    return schedule_of(1, ops, waits={"F:0": {"carried": UPDATE_0}})


def disk_model() -> tuple[ModelProfile, Plan]:
    # 16 bit: 12 bytes of state, 9 MiB.
    model = model_of(DISK_PARAMS, itemsize=2)
    return model, plan_of(replace(ON_DISK, weights=Tier.HOST))


FAST_CPU = replace(GPU, cpu_update_params_per_s=DISK_PARAMS / 3)
