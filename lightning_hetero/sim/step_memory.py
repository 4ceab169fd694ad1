"""Occupancy of the tiers: the memory that each job of a step takes and frees.

The count has:

* the model's constant bytes;
* weights and state by their tier, and staging;
* weights that are fetched or uploaded, until they are released;
* gradients from a block's backward until its update, or until the verdict on that update;
* saved activations from a block's forward until its backward, except swapped or recomputed ones;
* transient bytes, and casts of weights from a lower tier, while a block computes.

[Note: Devices] in ``ir.schedule`` says which tier holds data during a transfer.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hetero.ir.activations import saved_bytes
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan, Tier, UpdateLane
from lightning_hetero.ir.schedule import Lane, Op, OpKind, Payload, Phase, Schedule
from lightning_hetero.lowering.placed_blocks import gathers_on_devices

Effect = tuple[int, int]  # bytes on the device, bytes on the host


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Memory over one step.

    Attributes:
        device_peak_bytes: Peak of device memory.
        host_peak_bytes: The same for host memory. On shared memory there is one pool, and both
            report it.
        timeline: Seconds since the step began, bytes on the device, bytes on the host, at each
            change; empty unless asked for.
    """

    device_peak_bytes: int
    host_peak_bytes: int
    timeline: tuple[tuple[float, int, int], ...] = ()


class Occupancy:
    """Computes the memory that the jobs of one step take and free, in schedule order.

    Args:
        plan: The resolved plan.
        model: The model.
        shared_memory: Device and host are one pool, which counts as host memory.
        staging_bytes: Host memory through which state on disk streams.
        ranks: Ranks that share the model, of which ``model`` is one's slice; whole weights and
            gradients take memory too. On devices with memory of their own, whole weights pass
            through host memory that the ranks share, or only slices do (``Plan.gather``).
        keeps_gradients: Gradients stay after the updates until the next backward, as in plain
            Lightning; the runtime does this if updates follow the verdict.
    """

    def __init__(
        self,
        plan: Plan,
        model: ModelProfile,
        *,
        shared_memory: bool,
        staging_bytes: int,
        ranks: int = 1,
        keeps_gradients: bool = False,
    ) -> None:
        self._ranks, self._on_devices = ranks, gathers_on_devices(plan, ranks, shared_memory=shared_memory)
        self._plan, self._model, self._shared = plan, model, shared_memory
        self._shapes = model.shape().blocks
        self._staging_bytes = staging_bytes
        self._kept_bytes = sum(s.gradient_bytes for s in self._shapes) if keeps_gradients else 0
        self._keeps_gradients = keeps_gradients
        self._on_device: set[int] = set()  # blocks with gradients there
        self._on_host: set[int] = set()
        self._tried: set[int] = set()  # blocks whose gradients stay until the verdict

    def constant(self, schedule: Schedule) -> Effect:
        """Memory in use before the first job of the first schedule."""
        device, host = self._model.constant_device_bytes, self._model.constant_host_bytes + self._staging_bytes
        for index, (shape, placed) in enumerate(zip(self._shapes, self._plan.blocks, strict=True)):
            weights = shape.weight_bytes
            if placed.weights is Tier.DEVICE:
                device += weights * max(1, schedule.copies)
            elif index in schedule.device_before:
                device += weights * schedule.copies
            # Updates by the CPU, or of ranks, write the weights in host memory, for any tier.
            updated = shape.num_trainable_params > 0 and (placed.update is UpdateLane.CPU or self._ranks > 1)
            copied = placed.weights is Tier.DEVICE and updated and not self._shared
            host += weights if placed.weights is Tier.HOST or index in schedule.resident_before or copied else 0
            device += shape.state_bytes if placed.state is Tier.DEVICE else 0
            host += shape.state_bytes if placed.state is Tier.HOST else 0
        return self._pooled(device + self._kept_bytes, host)

    def anchor(self, phase: Phase, index: int, *, training: bool) -> tuple[Effect, Effect]:
        """The memory that the compute of one anchor takes and frees."""
        block, shape, placed = self._model.blocks[index], self._shapes[index], self._plan.blocks[index]
        saved = saved_bytes(block, placed, shared_memory=self._shared)
        given = block.activation_bytes + block.cast_bytes + block.transient_bytes
        dropped = saved.recomputed + saved.in_use + block.transient_bytes
        if phase is Phase.FORWARD:
            return self._pooled(given, 0), self._pooled(-dropped if training else -given, 0)
        taken = dropped - self._kept_bytes
        self._kept_bytes = 0
        if index not in self._on_device:
            self._on_device.add(index)
            taken += shape.gradient_bytes * self._ranks
        return self._pooled(taken, 0), self._pooled(-given, 0)

    def op(self, op: Op, *, tried: bool = False) -> tuple[Effect | None, Effect | None]:
        """The memory that one op takes and frees, or ``None``.

        ``tried``: an UPDATE before the verdict.
        """
        size, placed = op.num_bytes, self._plan.blocks[op.block] if op.block >= 0 else None
        match op.kind, op.payload, op.lane:
            case OpKind.FETCH, Payload.WEIGHTS, _:
                return self._pooled(0, size), None
            case OpKind.RELEASE, _, Lane.H2D | Lane.NET:
                return None, self._pooled(-size, 0)
            case OpKind.RELEASE, _, _:
                return None, self._pooled(0, -size)
            case OpKind.GATHER, _, _ if not self._shared:
                return None, None  # the ranks of a host share its memory
            case ((OpKind.UPLOAD | OpKind.GATHER), _, _) if placed is not None and placed.weights is not Tier.DEVICE:
                return self._pooled(size * (self._ranks if self._on_devices else 1), 0), None
            case OpKind.REDUCE, _, Lane.PEER:
                self._on_device.discard(op.block)
                return (size // self._ranks, 0), (-size, 0)
            case OpKind.GRAD, _, _ if self._on_devices:
                taken, _ = self._gradients(op.block)
                return taken, (-size, 0)
            case OpKind.GRAD, _, _ if self._ranks > 1:
                self._on_device.discard(op.block)
                return (0, size), (-size, 0)
            case OpKind.REDUCE, _, _ if self._ranks > 1 and not self._shared:
                taken, _ = self._gradients(op.block)
                return taken, (0, -size)
            case OpKind.GRAD, _, _:
                return self._gradients(op.block)
            case OpKind.REDUCE, _, _ if self._ranks > 1:
                return self._gradients(op.block)
            case OpKind.UPDATE, _, _ if tried:
                self._tried.add(op.block)
            case OpKind.UPDATE, _, _:
                return None, self._updated(op.block)
            case (OpKind.SWAP_OUT, Payload.ACTIVATIONS, Lane.D2H):
                return self._pooled(0, size), self._pooled(-size, 0)
            case (OpKind.SWAP_OUT, Payload.ACTIVATIONS, Lane.DISK_WRITE):
                return None, self._pooled(0, -size)
            case (OpKind.SWAP_IN, Payload.ACTIVATIONS, Lane.DISK_READ):
                return self._pooled(0, size), None
            case (OpKind.SWAP_IN, Payload.ACTIVATIONS, Lane.H2D):
                return self._pooled(size, 0), self._pooled(0, -size)
            case (OpKind.SWAP_IN, Payload.STATE | Payload.GRADIENTS, _):
                return self._pooled(size, 0), None
            case (OpKind.SWAP_OUT, Payload.WEIGHTS, _) if self._ranks > 1:  # with it go slices of gradients
                return None, (-size - self._shapes[op.block].gradient_bytes, 0)
            case (OpKind.SWAP_OUT, Payload.STATE, _):
                return None, self._pooled(-size, 0)
        return None, None

    def verdict(self, *, keeps: bool) -> Effect | None:
        """The memory that the verdict on speculative updates frees.

        Discarded ones keep their gradients for the repetition.
        """
        tried, self._tried = self._tried, set()
        effects = [self._updated(block) for block in tried] if keeps else []
        return (sum(device for device, _ in effects), sum(host for _, host in effects)) if effects else None

    def end(self) -> Effect | None:
        """Frees gradients that no update has used before the next step, unless they are kept."""
        if self._keeps_gradients or not (self._on_device or self._on_host):
            return None
        device = sum(self._shapes[b].gradient_bytes * self._ranks for b in self._on_device)
        host = sum(self._shapes[b].gradient_bytes for b in self._on_host)
        return self._pooled(-device, -host)

    def _gradients(self, block: int) -> tuple[Effect, Effect]:
        """A copy to the host, or a slice of a sum; those of later micro-batches are added to it."""
        size = self._shapes[block].gradient_bytes
        taken = 0 if block in self._on_host else size
        given = size * self._ranks if block in self._on_device else 0
        self._on_host.add(block)
        self._on_device.discard(block)
        return self._pooled(0, taken), self._pooled(-given, 0)

    def _updated(self, block: int) -> Effect:
        if self._keeps_gradients:
            return 0, 0
        size = self._shapes[block].gradient_bytes
        device, host = size * self._ranks * (block in self._on_device), size * (block in self._on_host)
        self._on_device.discard(block)
        self._on_host.discard(block)
        return self._pooled(-device, -host)

    def _pooled(self, device: int, host: int) -> Effect:
        return (0, device + host) if self._shared else (device, host)
