"""Plan → schedule: one fixed lowering, pure and deterministic.

It walks the anchors of a step and asks three questions at each: which weights have to be where
(``weight_moves.py``), which activations (``activation_moves.py``), and which gradients and updates
follow (``update_moves.py``). See [Note: Residency] in ``weight_cache.py`` for what is evicted,
[Note: Chains] in ``chains.py`` for the order of ops, [Note: Swaps] in ``activation_moves.py``, and
[Note: Devices] in ``ir.schedule``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NoReturn

from lightning_hetero.errors import ConfigError, OutOfMemoryBudgetError
from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Gather, Plan, Saved, Tier
from lightning_hetero.ir.schedule import NO_BLOCK, Anchor, OpKind, Phase, Schedule, StepSignature, Updates
from lightning_hetero.lowering.activation_moves import ActivationMoves
from lightning_hetero.lowering.cache_sizes import DeviceRoom
from lightning_hetero.lowering.chains import Carried, Issue
from lightning_hetero.lowering.needs import DEVICE_GRADIENTS
from lightning_hetero.lowering.placed_blocks import PlacedBlock, gathers_on_devices, keeps_less, placements, updates_in_backward
from lightning_hetero.lowering.update_moves import UpdateMoves
from lightning_hetero.lowering.weight_cache import WINDOW, Cache, Uses, staying
from lightning_hetero.lowering.weight_moves import WeightMoves
from lightning_hetero.units import format_bytes


def lower(
    plan: Plan,
    model: ModelShape,
    signature: StepSignature,
    *,
    resident: frozenset[int],
    capacity_bytes: int,
    device: DeviceRoom | None = None,
) -> Schedule:
    """Lowers a resolved plan to the schedule of one step.

    Args:
        plan: A resolved plan: ``plan.blocks[i]`` places ``model.blocks[i]``.
        model: The blocks' sizes.
        signature: The step.
        resident: Blocks with weights on disk whose weights are in host memory as the step begins.
        capacity_bytes: Host bytes for weights that live on disk.
        device: What the device's own memory has room for; ``None``: the device is the host's own
            CPU. Where several ranks share the model, what there is for whole weights, on the device
            or on the host; then ``model`` has the sizes of one rank's slices
            (``ModelProfile.slice_of``).

    Raises:
        ConfigError: A block whose weights must stay in memory has them on disk; the plan asks for
            what only devices with memory of their own can do; it has the CPU update state that
            lives on such a device; or ranks that have no memory in common exchange on devices.
        OutOfMemoryBudgetError: A block with weights below a tier does not fit the tier's capacity.
    """
    placed = placements(plan, model, device=device is not None, ranks=1 if device is None else device.ranks)
    _check_plan(plan, placed, capacity_bytes, device)
    return _Lowering(plan, signature, placed, resident, capacity_bytes, device).run()


def expected_anchors(signature: StepSignature) -> list[Anchor]:
    """The anchors of a step: forwards; in training also backwards in reverse, and the verdict."""
    anchors = [Anchor(phase=Phase.FORWARD, block=b) for b in signature.order]
    if signature.training:
        anchors += [Anchor(phase=Phase.BACKWARD, block=b) for b in reversed(signature.order)]
        anchors.append(Anchor(phase=Phase.VERDICT, block=NO_BLOCK))
    return anchors


def last_step(placed: Sequence[PlacedBlock], order: Sequence[int], *, arrival: OpKind = OpKind.UPLOAD) -> Iterator[Carried]:
    """The last ops of all updates of a step, for a forward that waits for all (no priority).

    ``arrival``: the kind of op that brings weights to where they compute.
    """
    for block in dict.fromkeys(order):
        row = placed[block]
        if row.trainable:
            yield OpKind.UPDATE, block
        if row.stored:
            yield OpKind.STORE, block
        if row.renewed:
            yield arrival, block
        if row.state_moves or row.weights_return:
            yield OpKind.SWAP_OUT, block


def last_kept(placed: Sequence[PlacedBlock], order: Sequence[int]) -> Iterator[Carried]:
    """Carried edges of the first forward if steps are kept: MIRRORs of device updates."""
    for block in dict.fromkeys(order):
        row = placed[block]
        if row.has_device and row.trainable and not row.on_cpu and row.mirrored_bytes:
            yield OpKind.MIRROR, block


def last_gradients(
    placed: Sequence[PlacedBlock], anchors: Sequence[Anchor], index: int, *, departure: OpKind = OpKind.GRAD
) -> Iterator[Carried]:
    """The GRADs of an earlier step that a backward waits for, on a device with memory of its own.

    ``departure``: the kind of op that takes gradients from where they were computed; on several
    ranks whose devices are the host's own CPU, or reduce gradients themselves, that is REDUCE.

    After a micro-batch that accumulates, no UPDATE stands between them: the block's own, whose
    place its gradients take; and before the first backward those that were the last to leave the
    device.
    """
    block = anchors[index].block
    if placed[block].through_host:
        yield departure, block
    if anchors[index - 1].phase is Phase.FORWARD:
        first = [b for b in dict.fromkeys(a.block for a in anchors[:index]) if placed[b].through_host and b != block]
        yield from ((departure, b) for b in first[:DEVICE_GRADIENTS])


class _Lowering:
    def __init__(
        self,
        plan: Plan,
        signature: StepSignature,
        placed: Sequence[PlacedBlock],
        resident: frozenset[int],
        capacity_bytes: int,
        device: DeviceRoom | None,
    ) -> None:
        self._plan, self._signature, self._placed, self._resident, self._room = plan, signature, placed, resident, device
        self._ranks = ranks = 1 if device is None else device.ranks
        on_host = device is not None and device.shared_memory
        on_devices = device is not None and gathers_on_devices(plan, ranks, shared_memory=on_host)
        exchanges = on_host or on_devices  # where weights are used and gradients are made
        self._arrival = OpKind.GATHER if exchanges else OpKind.UPLOAD
        self._departure = OpKind.REDUCE if exchanges else OpKind.GRAD
        self._anchors = expected_anchors(signature)
        forward_only = not signature.training  # and the next step is expected to be the same
        anchors = [None if a.phase is Phase.VERDICT else a.block for a in self._anchors]
        if forward_only and device is None:  # FETCHes for the next step may come in this one
            anchors *= 2
        uses = Uses(anchors, signature.order)
        if signature.updates is not Updates.NONE and not updates_in_backward(plan, signature.updates):
            for block in dict.fromkeys(signature.order):
                if placed[block].weights_return and not placed[block].through_host:
                    uses.add(len(self._anchors) - 1, block)
        self._issue = Issue(placed, device=device is not None)
        higher = frozenset[int]()  # blocks that stay on the device
        self._device: Cache | None = None
        self._activations: ActivationMoves | None = None
        if device is not None:
            sizes = [p.shape.weight_bytes * device.copies if p.below_device else 0 for p in placed]
            higher = staying(signature.order, sizes, device.capacity_bytes) if forward_only else higher
            self._device = Cache(sizes, capacity_bytes=device.capacity_bytes, held=device.resident, uses=uses, stays=higher)
            self._activations = ActivationMoves(placed, self._issue, signature.order, depth=plan.prefetch_depth)
        sizes = [p.shape.weight_bytes for p in placed]
        below = [p.shape.weight_bytes if p.on_disk and b not in higher else 0 for b, p in enumerate(placed)]
        stays = staying(signature.order, below, capacity_bytes) if forward_only else frozenset[int]()
        self._host = Cache(sizes, capacity_bytes=capacity_bytes, held=resident, uses=uses, stays=stays)
        self._weights = WeightMoves(
            placed, self._issue, uses, host=self._host, device=self._device,
            depth=WINDOW if forward_only else plan.prefetch_depth, absent=forward_only, ranks=ranks, shared_memory=on_host,
            gathers_in_place=device is not None and device.gathers_in_place, on_devices=on_devices,
        )  # fmt: skip
        self._updates = UpdateMoves(
            plan, signature, placed, self._issue, uses, self._weights, self._activations, ranks, shared_memory=on_host,
            on_devices=on_devices,
        )  # fmt: skip

    def run(self) -> Schedule:
        anchors = [self._begin(index, anchor) for index, anchor in enumerate(self._anchors)]
        if order := self._signature.order:
            last = () if self._plan.priority else last_step(self._placed, order, arrival=self._arrival)
            edges = dict.fromkeys((*anchors[0].carried, *last, *last_kept(self._placed, order)))
            anchors[0] = replace(anchors[0], carried=tuple(edges))
        return Schedule(
            signature=self._signature,
            anchors=tuple(anchors),
            ops=tuple(self._issue.ops),
            resident_before=self._resident,
            resident_after=frozenset(self._host.held),
            device_before=frozenset() if self._room is None else self._room.resident,
            device_after=frozenset() if self._device is None else frozenset(self._device.held),
            ranks=self._ranks,
            shared_memory=self._room is not None and self._room.shared_memory,
            gathers_in_place=self._room is not None and self._room.gathers_in_place,
        )

    def _begin(self, index: int, anchor: Anchor) -> Anchor:
        """Issues everything that one anchor issues; returns the anchor with what it waits for."""
        self._issue.at = index
        if index:
            self._end(index, self._anchors[index - 1])
        if anchor.phase is Phase.VERDICT:
            self._updates.verdict(index)
            return anchor
        needs = [self._weights.need(index, anchor.block)]
        carried = self._pending(anchor) if needs == [None] else ()
        if anchor.phase is Phase.BACKWARD and self._activations is not None:
            carried = tuple(last_gradients(self._placed, self._anchors, index, departure=self._departure))
        swaps = self._activations if self._signature.training else None
        use = index if anchor.phase is Phase.FORWARD else len(self._anchors) - 2 - index
        if swaps is not None and anchor.phase is Phase.BACKWARD:
            needs.append(swaps.need(use))
        self._weights.prefetch(index, anchor.block)
        if swaps is not None:
            if anchor.phase is Phase.BACKWARD:
                swaps.prefetch(use)
            elif use == len(self._signature.order) - 1:
                swaps.prefetch(use + 1)
            needs += swaps.space() if anchor.phase is Phase.FORWARD else ()
        if anchor.phase is Phase.BACKWARD:
            needs += self._updates.backward_begins(index)
        return replace(anchor, needs=tuple(dict.fromkeys(n for n in needs if n is not None)), carried=carried)

    def _end(self, index: int, anchor: Anchor) -> None:
        """The anchor before ``index`` has ended."""
        if anchor.phase is Phase.BACKWARD:
            self._updates.backward_ended(index, anchor.block)
        elif self._activations is not None and self._signature.training:
            self._activations.forward_ended(index - 1)

    def _pending(self, anchor: Anchor) -> tuple[Carried, ...]:
        """Weights that are in place may still be waiting for their update of the step before."""
        placed = self._placed[anchor.block]
        if anchor.phase is not Phase.FORWARD or not placed.trainable:
            return ()
        if placed.renewed:
            return ((self._arrival, anchor.block),)
        # A copy that an update outside the device's copy has outdated is not in place: the next
        # UPLOAD waits for that update.
        return () if placed.below_device and placed.through_host else ((OpKind.UPDATE, anchor.block),)


def _check_plan(plan: Plan, placed: Sequence[PlacedBlock], capacity_bytes: int, device: DeviceRoom | None) -> None:
    on_host, ranks = device is None or device.shared_memory, 1 if device is None else device.ranks
    if on_host and plan.micro_batches > 1:
        raise ConfigError(
            f"plan {plan.name!r}: micro_batches={plan.micro_batches}; where the device is the host's own CPU a batch is not split. "
            f"Allowed: 1. Use the Trainer's accumulate_grad_batches."
        )
    if ranks > 1 and plan.gather is Gather.DEVICE and device is not None:
        _check_gather(plan, device)
    for row in placed:
        name, size = row.shape.name, row.shape.weight_bytes
        if row.on_disk and row.shape.pinned:
            raise ConfigError(
                f"plan {plan.name!r} places the weights of block {name!r} on 'disk'; they are used outside a repeated "
                f"block, so they must stay in memory. Allowed: 'device', 'host'. Put a rule for this block before the one that "
                f"matches it."
            )
        if on_host and keeps_less(row.plan):
            _refuse_swaps(plan, row)
        if ranks > 1 and on_host and row.trainable and not row.on_cpu:
            raise ConfigError(
                f"plan {plan.name!r}: block {name!r} has update='device'; the devices of {ranks} ranks are the host's own CPU. "
                f"Allowed: 'cpu'."
            )
        if device is not None and row.on_cpu and row.plan.state is Tier.DEVICE:
            raise ConfigError(
                f"plan {plan.name!r}: block {name!r} has state='device' with update='cpu'; the CPU updates what is in host memory. "
                f"Allowed with state='device': update='device'. Or place its state on 'host' or 'disk'."
            )
        if row.on_disk and size > capacity_bytes:
            raise OutOfMemoryBudgetError(
                f"block {name!r} needs {format_bytes(size)} of host memory for its weights; "
                f"{format_bytes(capacity_bytes)} are left for weights that live on disk. Raise host_memory, or choose smaller "
                f"blocks with block_cls."
            )
        if device is not None and row.below_device and size * device.copies > device.capacity_bytes:
            raise OutOfMemoryBudgetError(
                f"block {name!r} needs {format_bytes(size * ranks)} of device memory for its weights; "
                f"{format_bytes(device.capacity_bytes)} are left for weights that live below the device. Raise device_memory, keep "
                f"less of other blocks on the device, or choose smaller blocks with block_cls."
                if not device.shared_memory
                else f"block {name!r} needs {format_bytes(size * ranks)} of host memory on each of {ranks} ranks for its whole "
                f"weights; {format_bytes(device.capacity_bytes)} are left for them. Raise host_memory, or choose smaller blocks "
                f"with block_cls."
            )


def _check_gather(plan: Plan, device: DeviceRoom) -> None:
    if device.shared_memory:
        raise ConfigError(
            f"plan {plan.name!r} has gather='device'; the devices of {device.ranks} ranks are the host's own CPU, so nothing is "
            f"exchanged between them. Allowed: 'host'."
        )
    if not device.gathers_in_place:
        raise ConfigError(
            f"plan {plan.name!r} has gather='device'; {device.ranks} ranks do not have the same memory for weights (the log says "
            f"why). Allowed: 'host'."
        )


def _refuse_swaps(plan: Plan, placed: PlacedBlock) -> NoReturn:
    rule = placed.plan
    knobs = {"saved": rule.saved, "boundary": rule.boundary} | {f"operators[{k!r}]": v for k, v in rule.operators.items()}
    knob, value = next((k, v) for k, v in knobs.items() if v is not Saved.KEEP)
    raise ConfigError(
        f"plan {plan.name!r}: block {rule.name!r} has {knob}={value.value!r}; where the device is the host's own CPU, activations "
        f"stay in memory. Allowed: 'keep'. Give the block saved='keep', or use a machine whose device has memory of its own."
    )
