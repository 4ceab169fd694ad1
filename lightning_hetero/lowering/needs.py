"""What a plan needs of each tier.

[Note: Needs]
The needs are the most bytes in memory at once, however ops overlap. The account walks the backward
of one micro-batch from the last block to the first. At block ``u`` a device with memory of its own
holds

- the constant part, and the weights and state that live there;
- *activations*: those that blocks up to ``u`` keep; those that ``u`` and the ``prefetch_depth``
  swapped blocks before it swap, which are on their way ([Note: Swaps]); those that ``u``
  recomputes, its transient bytes, and casts of its weights if these live below the device. Forward
  passes through the same sums upwards;
- *gradients for the CPU*: of ``DEVICE_GRADIENTS`` blocks, either ``u`` and the blocks whose
  gradients leave, or only the latter. A fetch for ``u`` may come before ``u`` has waited for them,
  and those of the first blocks may still leave while the next forward runs;
- *gradients for updates on the device*: of ``u`` or of the block before it if updates run during
  backward, else of all blocks from ``u`` on. Over several micro-batches: of all blocks;
- *state on its way*: of the ``DEVICE_STATES`` largest blocks whose state comes for an update on the
  device; of several ranks also the slices of gradients and weights. If updates follow backward and
  no forward overtakes them, state takes the place of activations, as in Deep Optimizer States;
- the cache: at least the largest block whose weights live below the device.

The host holds

- the constant part;
- the weights that live there, a copy of weights on the device that the CPU updates, and the state
  that lives there;
- the gradients of the ``gradient_depth`` largest blocks if updates run during backward, else of all
  blocks from ``u`` on;
- the activations that blocks up to ``u`` swap to the host, and those of ``2 * prefetch_depth + 1``
  blocks on their way to the disk;
- staging for state that streams from disk;
- if updates speculate, a copy of the weights of blocks with only their state on disk;
- the cache: at least the largest block whose weights live on disk.

Four cases need more or less. Ranks that share a model hold slices, and beside them what
``rank_needs`` says. The runtime does not stop at the backward of a pinned block, so the
gradients of pinned blocks come on top, on device and host. Ranks of a group average all gradients
after backward, through buckets on the device or the host. If the device is the host's own CPU, both
tiers are one pool and nothing is stored twice; gradients that an update after the verdict has used
then stay until the next backward, as in plain Lightning.

If the device is another processor in the host's memory, that memory holds the needs of both
together. What moves from one to the other frees nothing.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from lightning_hetero.ir.model import BlockShape, ModelProfile, ModelShape
from lightning_hetero.ir.plan import Plan, Tier
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.lowering.placed_blocks import PlacedBlock, gathers_on_devices, placements, speculates, updates_in_backward
from lightning_hetero.lowering.rank_needs import beside_devices_bytes, beside_slices_bytes, on_devices_bytes, whole_of
from lightning_hetero.lowering.staging import least_staging

DEVICE_GRADIENTS = 2
"""Blocks whose gradients for the CPU are on the device at a time: one computes, one leaves."""

DEVICE_STATES = 2
"""Blocks whose state from the host is on the device at a time: one is updated, one leaves.

Source: Deep Optimizer States, section 4.3.
"""


class Purpose(StrEnum):
    """What memory is for."""

    CONSTANT = "the constant part"
    WEIGHTS = "weights that live there"
    STATE = "optimizer state that lives there"
    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"
    MOVING = "state on its way"
    STAGING = "staging for what streams from disk"
    BUCKETS = "buckets in which ranks average gradients"
    SPARE = "copies of weights until the verdict"
    CACHE = "the cache for weights from below"
    READING = "weights that are quantized as they are read"
    RANKS = "whole weights and gradients of what ranks share, and room to exchange them"
    MIRRORS = "copies of what lives in memory, so that steps are kept"


Rows = Mapping[Purpose, int]


@dataclass(frozen=True, slots=True)
class Constant:
    """Bytes that no plan changes: process, buffers, inputs; or buckets for gradient averages."""

    device_bytes: int = 0
    host_bytes: int = 0


NOTHING = Constant()


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a plan needs of each tier at the moment when it needs most there; see [Note: Needs].

    Attributes:
        device: Bytes by purpose, the cache left out; empty where the device is the host's own CPU.
        host: The same for the host.
        disk: The same for the disk: all slots of all files and, where steps are kept, of what lives
            in memory; and activations.
        device_caches: Bytes of the weights of each block that lives below the device.
        host_caches: The same of each block that lives on disk.
        streamed_bytes: State that lives on disk.
    """

    device: Rows
    host: Rows
    disk: Rows
    device_caches: tuple[int, ...]
    host_caches: tuple[int, ...]
    streamed_bytes: int


def needs_of(
    plan: Plan,
    model: ModelProfile,
    *,
    shared_memory: bool,
    updates: Updates = Updates.IN_BACKWARD,
    ranks: int = 1,
    gathers_in_place: bool = False,
) -> Needs:
    """Adds up what a resolved plan needs, as [Note: Needs] says.

    Args:
        plan: The resolved plan.
        model: The model.
        shared_memory: The device is the host's own CPU.
        updates: When updates may run: during backward, or only once all gradients are known.
        ranks: Ranks that share the model, of which ``model`` has the sizes of one's slices.
        gathers_in_place: They have whole weights in the same memory, where their slices are.
    """
    constant = Constant(model.constant_device_bytes, model.constant_host_bytes)
    staging = least_staging(model)
    return needs_of_shape(
        plan,
        model.shape(),
        shared_memory=shared_memory,
        updates=updates,
        staging_bytes=staging,
        constant=constant,
        ranks=ranks,
        gathers_in_place=gathers_in_place,
    )


def needs_of_shape(
    plan: Plan,
    model: ModelShape,
    *,
    shared_memory: bool,
    updates: Updates,
    staging_bytes: int,
    constant: Constant = NOTHING,
    buckets: Constant = NOTHING,
    ranks: int = 1,
    gathers_in_place: bool = False,
) -> Needs:
    """As :func:`needs_of`, before anything is profiled: unknown activations count as 0.

    Args:
        plan: The resolved plan.
        model: The blocks' sizes.
        shared_memory: The device is the host's own CPU.
        updates: When updates may run.
        staging_bytes: The least that the engine stages with, where something is on disk.
        constant: Memory that no plan changes.
        buckets: Memory in which ranks average gradients.
        ranks: Ranks that share the model, of which ``model`` has the sizes of one's slices.
        gathers_in_place: They have whole weights in the same memory, where their slices are.
    """
    placed = there = placements(plan, model, device=not shared_memory, ranks=ranks)
    if ranks > 1 and not shared_memory:  # devices have whole weights and gradients
        there = placements(plan, whole_of(model, ranks), device=True, ranks=ranks)
    slots = num_slots(model.kept_every)
    in_backward = updates_in_backward(plan, updates)
    last = plan.micro_batches > 1 or (shared_memory and updates not in (Updates.NONE, Updates.IN_BACKWARD))
    activations = list(_activations(plan, placed))
    visiting = sum(sorted((p.visiting_bytes for p in placed), reverse=True)[:DEVICE_STATES])
    early = visiting if in_backward or plan.priority else 0

    def moments(rows: Sequence[PlacedBlock]) -> Iterator[tuple[Rows, Rows]]:
        gradients = list(_gradients(plan, rows, in_backward=in_backward, last=last, shared=shared_memory))
        for each, waiting in zip(reversed(activations), gradients, strict=True):
            yield _moment(*each, *waiting, early, shared=shared_memory)
        yield _moment(0, 0, *(gradients[-1] if gradients else (0, 0)), visiting, buckets, shared=shared_memory)

    device, host = _held(there, constant, staging_bytes)[0], _held(placed, constant, staging_bytes)[1]
    beside = beside_slices_bytes if shared_memory else beside_devices_bytes
    host = summed(host, {Purpose.RANKS: beside(plan, model, ranks, in_place=gathers_in_place)})
    host = {**host, Purpose.SPARE: _spare_bytes(placed) if speculates(plan, updates) else 0}
    if gathers_on_devices(plan, ranks, shared_memory=shared_memory):
        device = {**device, Purpose.RANKS: on_devices_bytes(model, ranks, DEVICE_GRADIENTS)}
    if shared_memory:
        device, host = {}, summed(device, host)
    return Needs(
        device={**device, **_largest(d for d, _ in moments(there))},
        host={**host, **_largest(h for _, h in moments(placed))},
        disk={
            Purpose.WEIGHTS: sum(weight_file_bytes(p.shape, model.kept_every) for p in placed if p.on_disk),
            Purpose.STATE: sum(slots * p.shape.state_bytes for p in placed if p.plan.state is Tier.DISK),
            Purpose.ACTIVATIONS: sum(p.saved.to_disk for p in placed),
            Purpose.MIRRORS: mirror_file_bytes(plan, model),
        },
        device_caches=tuple(p.shape.weight_bytes for p in there if p.below_device),
        host_caches=tuple(p.shape.weight_bytes for p in placed if p.on_disk),
        streamed_bytes=sum(p.shape.state_bytes for p in placed if p.plan.state is Tier.DISK),
    )


def num_slots(kept_every: int) -> int:
    """Slots on disk of what changes: two, and a third one if only every N-th step is kept."""
    return 2 if kept_every <= 1 else 3


def weight_file_bytes(shape: BlockShape, kept_every: int) -> int:
    """Bytes of all slots of a block's weights.

    A block without a trained parameter has one slot, and what is read in place has none.
    """
    return (num_slots(kept_every) if shape.num_trainable_params else 1) * (shape.weight_bytes - shape.in_place_bytes)


def mirror_file_bytes(plan: Plan, model: ModelShape) -> int:
    """Space on disk for what a resolved plan keeps in memory, where steps are kept."""
    if not model.kept_every:
        return 0
    rows = list(zip(model.blocks, plan.blocks, strict=True))
    weights = sum(weight_file_bytes(b, model.kept_every) for b, p in rows if p.weights is not Tier.DISK)
    return weights + num_slots(model.kept_every) * sum(b.state_bytes for b, p in rows if p.state is not Tier.DISK)


def total_bytes(rows: Rows) -> int:
    """All purposes together."""
    return sum(rows.values())


def _largest(moments: Iterable[Rows]) -> Rows:
    return max(moments, key=total_bytes)


def summed(a: Rows, b: Rows) -> Rows:
    """Both, purpose by purpose."""
    return {purpose: a.get(purpose, 0) + b.get(purpose, 0) for purpose in (*a, *b)}


def _held(placed: Sequence[PlacedBlock], constant: Constant, staging_bytes: int) -> tuple[Rows, Rows]:
    """What is in memory all the time, on the device and on the host."""
    device = {
        Purpose.CONSTANT: constant.device_bytes,
        Purpose.WEIGHTS: sum(p.shape.weight_bytes for p in placed if p.plan.weights is Tier.DEVICE),
        Purpose.STATE: sum(p.shape.state_bytes for p in placed if p.plan.state is Tier.DEVICE),
    }
    on_disk = any(Tier.DISK in (p.plan.weights, p.plan.state) for p in placed)
    host = {
        Purpose.CONSTANT: constant.host_bytes,
        Purpose.WEIGHTS: sum(p.shape.weight_bytes for p in placed if p.plan.weights is Tier.HOST or p.renewed),
        Purpose.STATE: sum(p.shape.state_bytes for p in placed if p.plan.state is Tier.HOST),
        Purpose.STAGING: staging_bytes if on_disk else 0,
    }
    return device, host


def _spare_bytes(placed: Sequence[PlacedBlock]) -> int:
    """Old weights of updates that may be taken back, where no file has them."""
    return sum(p.shape.weight_bytes for p in placed if p.revocable and not p.on_disk)


def _moment(
    on_device: int, on_host: int, stay: int, down: int, state: int, buckets: Constant = NOTHING, *, shared: bool
) -> tuple[Rows, Rows]:
    """Bytes that come and go at one moment: activations, gradients, buckets, device state."""
    device = {
        Purpose.ACTIVATIONS: on_device, Purpose.GRADIENTS: stay, Purpose.MOVING: state, Purpose.BUCKETS: buckets.device_bytes
    }  # fmt: skip
    host = {Purpose.ACTIVATIONS: on_host, Purpose.GRADIENTS: down, Purpose.BUCKETS: buckets.host_bytes}
    return ({}, summed(device, host)) if shared else (device, host)


def _activations(plan: Plan, placed: Sequence[PlacedBlock]) -> Iterator[tuple[int, int]]:
    """Activations while each block computes, on the device and on the host."""
    depth, kept, to_host = plan.prefetch_depth, 0, 0
    swapped: list[int] = []
    to_disk: list[int] = []
    for row in placed:
        kept += row.saved.kept
        to_host += row.saved.to_host
        others = swapped[-depth:]
        if row.swapped_bytes:
            swapped.append(row.swapped_bytes)
        if row.saved.to_disk:
            to_disk.append(row.saved.to_disk)
        here = row.swapped_bytes + row.saved.recomputed + row.saved.in_use + row.shape.transient_bytes
        yield kept + sum(others) + here, to_host + sum(to_disk[-2 * depth - 1 :])


def _gradients(
    plan: Plan, placed: Sequence[PlacedBlock], *, in_backward: bool, last: bool, shared: bool
) -> Iterator[tuple[int, int]]:
    """Gradient bytes on device and host during each block's backward, last block first.

    Args:
        plan: The plan.
        placed: The blocks.
        in_backward: Updates use them up as they come.
        last: They last from one backward to the next.
        shared: The device is the host's own CPU.
    """
    sizes = [(p.shape.gradient_bytes * p.through_host, p.shape.gradient_bytes * (not p.through_host)) for p in reversed(placed)]
    for_cpu = [size for size, _ in sizes] if last else []
    for_device = [size for _, size in sizes] if last else []
    leaving = sum([size for size, _ in sizes if size][-DEVICE_GRADIENTS:])
    passing: list[int] = []
    unseen: list[int] = []  # of pinned blocks since the last other one
    before: list[int] = []  # of the last other block, and of pinned ones since
    for row, (cpu, own) in zip(reversed(placed), sizes, strict=True):
        if not last:
            unseen.append(cpu)
            for_device.append(own)
            if not row.shape.pinned:
                for size in unseen:
                    insort(for_cpu, size)
                unseen = []
        all_wait = last or not in_backward
        down = sum(for_cpu if all_wait else for_cpu[-plan.gradient_depth :]) + sum(unseen)
        if shared:  # one memory; a device update follows the verdict
            yield sum(for_device), down
        else:
            beside = max(cpu + sum(passing[-DEVICE_GRADIENTS + 1 :]), sum(passing[-DEVICE_GRADIENTS:]))
            passing += [cpu] if cpu else []
            # What comes for a backward may come before its last update has run.
            updated = sum(before) + own if row.shape.pinned else max(own, sum(before))
            yield max(beside, leaving) + (sum(for_device) if all_wait else updated), down
            before = [*before, own] if row.shape.pinned else [own]
