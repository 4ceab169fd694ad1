"""The work of an op: its kind and its amount, from the plan and the model's profile."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hetero.cost.rates import Rates, Work, cpu_update_bytes
from lightning_hetero.ir.activations import recomputed_share
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.ir.schedule import NO_BLOCK, Lane, Op, OpKind

_COPIES = {
    Lane.H2D: Work.H2D,
    Lane.D2H: Work.D2H,
    Lane.DISK_READ: Work.DISK_READ,
    Lane.DISK_WRITE: Work.DISK_WRITE,
}
_EXCHANGES = {Lane.NET: Work.COLLECTIVE, Lane.PEER: Work.PEER}
_FREE = (OpKind.RELEASE, OpKind.COMMIT)  # freed pages, and one small record: negligible work


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Some work.

    Attributes:
        work: Its kind.
        units: Its amount, in the kind's unit.
        num_bytes: Bytes that it moves, or state that it updates.
    """

    work: Work
    units: float
    num_bytes: int

    def alone_s(self, rates: Rates) -> float:
        """Seconds without other work."""
        return rates.alone_s(self.work, self.units)


def backward_s(block: BlockProfile, placed: BlockPlan) -> float:
    """Seconds of a block's backward under a plan, recomputation included."""
    return block.backward_s + recomputed_share(block, placed) * block.forward_s


def stored_bytes(block: BlockProfile, placed: BlockPlan, model: ModelProfile) -> int:
    """Bytes that one update writes to the block's file: all arrays in it."""
    weights = model.weight_bytes(block) if placed.weights is Tier.DISK else 0
    state = model.state_bytes(block) if placed.state is Tier.DISK else 0
    return weights + state


def update_amount(op: Op, model: ModelProfile, *, shared_memory: bool) -> Amount:
    """The work of an UPDATE.

    Args:
        op: The op.
        model: The model.
        shared_memory: As in the hardware's profile.
    """
    block = model.blocks[op.block]
    params = block.num_trainable_params
    on_cpu = op.lane is Lane.CPU
    return Amount(
        work=Work.CPU_UPDATE if on_cpu else Work.DEVICE_UPDATE,
        units=cpu_update_bytes(params) if on_cpu or shared_memory else float(params),
        num_bytes=model.state_bytes(block),
    )


def amount_of(op: Op, plan: Plan, model: ModelProfile, hardware: HardwareProfile) -> Amount | None:
    """The work of one op; ``None`` if its time is negligible.

    Of ``n`` devices each sends ``(n - 1) / n`` of the bytes that are reduced or gathered; a single
    device sends nothing. All of them meet before. The time of that counts as the bytes that could
    be sent meanwhile.

    Args:
        op: The op.
        plan: The resolved plan of the schedule.
        model: The model.
        hardware: The machine.

    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of
    workstations, 2009, section 3.
    """
    if op.kind is OpKind.AGREE:
        meeting = _meeting_bytes(op, hardware)
        return Amount(work=_EXCHANGES[op.lane], units=meeting, num_bytes=0) if meeting else None
    if op.kind in _FREE or op.block == NO_BLOCK:
        return None
    if op.kind is OpKind.UPDATE:
        return update_amount(op, model, shared_memory=hardware.shared_memory)
    block, placed = model.blocks[op.block], plan.blocks[op.block]
    num_bytes = stored_bytes(block, placed, model) if op.kind is OpKind.STORE else op.num_bytes
    if op.lane in _EXCHANGES:
        return Amount(work=_EXCHANGES[op.lane], units=_sent(op, num_bytes, hardware), num_bytes=num_bytes)
    return Amount(work=_COPIES[op.lane], units=num_bytes, num_bytes=num_bytes)


def _sent(op: Op, num_bytes: int, hardware: HardwareProfile) -> float:
    """What one device sends in a collective, its meeting included."""
    devices = max(hardware.world_size, hardware.ranks)
    stays = op.kind is OpKind.GATHER and op.lane is Lane.NET and hardware.gathers_in_place
    return (0.0 if stays else (devices - 1) / devices * num_bytes) + _meeting_bytes(op, hardware)


def _meeting_bytes(op: Op, hardware: HardwareProfile) -> float:
    """What could be sent while all devices meet."""
    return hardware.meeting_s * (hardware.peer_bytes_per_s if op.lane is Lane.PEER else hardware.collective_bytes_per_s)
