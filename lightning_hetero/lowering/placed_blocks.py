"""What the plan means for a block's ops: computed once for lowering, checker and cache sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_hetero.ir.activations import SavedBytes, saved_bytes
from lightning_hetero.ir.model import BlockShape, ModelShape
from lightning_hetero.ir.plan import BlockPlan, Gather, Plan, Saved, Tier, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import StepSignature, Updates


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedBlock:
    """One block under one plan on one kind of machine.

    Attributes:
        shape: Its sizes.
        plan: Its rule.
        has_device: The device has memory of its own.
        trainable: It has gradients and updates.
        on_disk: Its weights live on disk: a FETCH brings them to the host.
        below_device: Its weights live below a device with memory of its own: an UPLOAD brings them
            there.
        stored: Its UPDATE is followed by a STORE.
        on_cpu: The CPU updates it.
        through_host: Its gradients go to the host, and its new weights come from there: the CPU
            updates it, or each of several ranks updates a slice, wherever that is.
        renewed: Its weights live on such a device, and the new ones come from the host: by an
            UPLOAD.
        state_moves: Such a device updates it and its state lives on the host: it comes up before
            the UPDATE and goes back after.
        slices_move: Such a device updates a slice of it: the slices of gradients and weights come
            up before the UPDATE.
        weights_return: Such a device updates it, and the new weights go to the host.
        visiting_bytes: Device memory that the update needs while it lasts, for what comes up.
        revocable: An update of it can be taken back: the CPU makes it, and the old state stays on
            disk.
        mirrored_bytes: What of it lives in memory and is written to the disk in every step; see
            [Note: Mirrors] in ``ir.schedule``.
        lent_bytes: What of that lives on a device with memory of its own alone, and passes through
            host memory.
        saved: What becomes of what its forward saves; all of it is kept where the device is the
            host.
    """

    shape: BlockShape
    plan: BlockPlan
    has_device: bool
    trainable: bool
    on_disk: bool
    below_device: bool
    stored: bool
    on_cpu: bool
    through_host: bool
    renewed: bool
    state_moves: bool
    slices_move: bool
    weights_return: bool
    visiting_bytes: int
    revocable: bool
    mirrored_bytes: int
    lent_bytes: int
    saved: SavedBytes

    @property
    def swapped_bytes(self) -> int:
        """Activations that leave the device after forward, wherever they go."""
        return self.saved.to_host + self.saved.to_disk

    @property
    def swaps(self) -> bool:
        """Whether activations leave the device after forward; if unmeasured, whether any may."""
        return self.swaps_to_disk or (bool(self.saved.to_host) if self.shape.activation_bytes else self._lets(Saved.SWAP_HOST))

    @property
    def swaps_to_disk(self) -> bool:
        """The same of those that go to the disk."""
        return bool(self.saved.to_disk) if self.shape.activation_bytes else self._lets(Saved.SWAP_DISK)

    def _lets(self, policy: Saved) -> bool:
        return self.has_device and policy in (self.plan.saved, self.plan.boundary, *self.plan.operators.values())


def fitted(plan: Plan, model: ModelShape, *, device: bool) -> Plan:
    """The plan with one rule per block, as it runs on one kind of machine.

    Such a block is used outside the repeated ones, without an anchor at which its weights or what
    it saves could be waited for. On a device with memory of its own all of that stays there; where
    the device is the host, its weights stay in host memory.

    Args:
        plan: The plan.
        model: The blocks' sizes.
        device: The device has memory of its own.

    Raises:
        ConfigError: The plan does not fit the model.
    """
    plan = plan.resolve(b.name for b in model.blocks)
    rows = tuple(_staying(p, device) if b.pinned else p for b, p in zip(model.blocks, plan.blocks, strict=True))
    return plan if rows == plan.blocks else replace(plan, blocks=rows)


def _staying(plan: BlockPlan, device: bool) -> BlockPlan:
    if device:
        return replace(plan, weights=Tier.DEVICE, saved=Saved.KEEP, boundary=Saved.KEEP, operators={})
    return replace(plan, weights=Tier.HOST) if plan.weights is Tier.DISK else plan


def placements(plan: Plan, model: ModelShape, *, device: bool, ranks: int = 1) -> tuple[PlacedBlock, ...]:
    """Reads a resolved plan.

    Args:
        plan: ``plan.blocks[i]`` places ``model.blocks[i]``.
        model: The blocks' sizes.
        device: The device has memory of its own.
        ranks: Ranks that share the model, of which ``model`` has the sizes of one's slices.
    """
    rows = zip(model.blocks, plan.blocks, strict=True)
    return tuple(_placement(shape, rule, device, ranks, model.kept_every == 1) for shape, rule in rows)


def _placement(shape: BlockShape, plan: BlockPlan, device: bool, ranks: int, kept: bool) -> PlacedBlock:
    trainable = shape.num_trainable_params > 0
    on_cpu = trainable and plan.update is UpdateLane.CPU
    on_device = device and trainable and not on_cpu
    through_host = on_cpu or (trainable and ranks > 1)
    state_moves, slices_move = on_device and plan.state is Tier.HOST, on_device and through_host
    return PlacedBlock(
        shape=shape,
        plan=plan,
        has_device=device,
        trainable=trainable,
        on_disk=plan.weights is Tier.DISK,
        below_device=device and plan.weights is not Tier.DEVICE,
        stored=trainable and Tier.DISK in (plan.weights, plan.state),
        on_cpu=on_cpu,
        through_host=through_host,
        renewed=device and through_host and plan.weights is Tier.DEVICE,
        state_moves=state_moves,
        slices_move=slices_move,
        weights_return=on_device and (slices_move or plan.weights is Tier.HOST),
        visiting_bytes=state_moves * shape.state_bytes + slices_move * (shape.gradient_bytes + shape.weight_bytes),
        revocable=on_cpu and plan.state is Tier.DISK,
        mirrored_bytes=mirrored_bytes(shape, plan) if kept else 0,
        lent_bytes=lent_bytes(shape, plan, ranks) if kept and on_device else 0,
        saved=saved_bytes(shape, plan, shared_memory=not device) if keeps_less(plan) or shape.cast_bytes else _kept(shape),
    )


def mirrored_bytes(shape: BlockShape, plan: BlockPlan) -> int:
    """Bytes in memory that a kept step writes to the disk: state, and the weights that change."""
    return _kept_weights(shape, plan.weights is not Tier.DISK) + (0 if plan.state is Tier.DISK else shape.state_bytes)


def lent_bytes(shape: BlockShape, plan: BlockPlan, ranks: int = 1) -> int:
    """Mirrored bytes that only the device has: weights and state of a block that it updates.

    The host has the weights that several ``ranks`` share.
    """
    if plan.update is UpdateLane.CPU:
        return 0
    return _kept_weights(shape, ranks == 1 and plan.weights is Tier.DEVICE) + (
        shape.state_bytes if plan.state is Tier.DEVICE else 0
    )


def _kept_weights(shape: BlockShape, there: bool) -> int:
    return shape.weight_bytes * shape.num_trainable_params // max(1, shape.num_params) if there else 0


def keeps_less(plan: BlockPlan) -> bool:
    """Whether anything that the block's forward saves does not just stay on the device."""
    return any(policy is not Saved.KEEP for policy in (plan.saved, plan.boundary, *plan.operators.values()))


def _kept(shape: BlockShape) -> SavedBytes:
    return SavedBytes(kept=shape.activation_bytes, to_host=0, to_disk=0, recomputed=0, in_use=0)


def updates_in_backward(plan: Plan, updates: Updates) -> bool:
    """Whether each update follows its own backward; else all updates follow the verdict.

    Args:
        plan: The plan, which may want them after backward.
        updates: When they may run.
    """
    return updates is Updates.IN_BACKWARD and plan.update_order is not UpdateOrder.AFTER_BACKWARD


def gathers_on_devices(plan: Plan, ranks: int, *, shared_memory: bool) -> bool:
    """Whether devices exchange weights and gradients themselves; one has nothing to exchange.

    Args:
        plan: The plan, which may want that.
        ranks: Ranks that share the model.
        shared_memory: Their devices are the host's own CPU.
    """
    return plan.gather is Gather.DEVICE and ranks > 1 and not shared_memory


def waits_for_step(placed: PlacedBlock, signature: StepSignature, ranks: int) -> bool:
    """Whether gradients stay on each of several ranks, and are reduced in a later batch.

    In batches that only accumulate, those of blocks that are used outside repeated ones do. They
    are whole on every rank at the peak anyway. Which blocks these are follows from the model, so
    the sum does not depend on the plan.

    Args:
        placed: The block.
        signature: The step.
        ranks: Ranks that share the model.
    """
    return ranks > 1 and placed.shape.pinned and signature.updates is Updates.NONE


def speculates(plan: Plan, updates: Updates) -> bool:
    """Whether updates that can be taken back follow their own backward, the others the verdict.

    Args:
        plan: The plan; updates that it wants after backward, or one by one, do not speculate.
        updates: When they may run.
    """
    return updates in (Updates.SPECULATIVE, Updates.REDONE) and plan.update_order is UpdateOrder.OVERLAPPED
