"""The further invariants of a device with memory of its own; ``check`` says what they are."""

from __future__ import annotations

from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.schedule import NO_BLOCK, Anchor, Lane, Op, OpKind, Payload, Phase, Schedule, Updates
from lightning_hetero.lowering.check_host import HostCheck
from lightning_hetero.lowering.check_swaps import SwapCheck
from lightning_hetero.lowering.lower import last_gradients
from lightning_hetero.lowering.needs import DEVICE_GRADIENTS, DEVICE_STATES
from lightning_hetero.lowering.placement import updates_in_backward
from lightning_hetero.units import format_bytes


class DeviceCheck(HostCheck):
    """Follows weights, gradients and state up to the device and down again."""

    has_device = True

    def __init__(self, schedule: Schedule, plan: Plan, model: ModelShape, capacity_bytes: int, device_capacity_bytes: int) -> None:
        super().__init__(schedule, plan, model, capacity_bytes)
        self.device_capacity_bytes = device_capacity_bytes
        self.held = set(schedule.device_before)
        self.held_bytes = sum(self.placed[b].shape.weight_bytes for b in self.held if self.placed[b].below_device)
        self.uploaded: dict[int, int] = {}  # block -> the UPLOAD that brought its weights
        self.released_there = 0  # bit set of all RELEASEs of device memory so far
        self.grads: dict[int, int] = {}  # block -> its GRAD
        self.state_up: dict[int, int] = {}  # block -> SWAP_IN of its state
        self.state_down: dict[int, int] = {}  # block -> SWAP_OUT of its state
        self.returned: set[int] = set()  # blocks whose weights have gone back to the host
        self.lent: list[Op] = []  # MIRRORs on d2h, in place of each the one that writes it to the disk, once there is
        self.swaps = SwapCheck(self)

    def check_begin(self) -> None:
        """The device may hold what it is said to hold."""
        super().check_begin()
        for block in self.held:
            if not (self.placed[block].below_device or self.placed[block].renewed):
                self.fail("resident", None, block, "is in device_before, but its weights do not come to the device from below")
        self.check_room(None, NO_BLOCK)

    def check_end(self) -> None:
        """Nothing is missing on the way down."""
        super().check_end()
        for block in dict.fromkeys(self.schedule.signature.order):
            placed = self.placed[block]
            if self.schedule.signature.training and placed.on_cpu and block not in self.grads:
                self.fail("gradients", None, block, "is updated by the CPU, and its gradients stay on the device")
            if block in self.updated and placed.state_moves and block not in self.state_down:
                self.fail("order", self.schedule.ops[self.updated[block]], block, "is updated, and its state stays on the device")
            if block in self.updated and placed.weights_return and block not in self.returned:
                self.fail("order", self.schedule.ops[self.updated[block]], block, "is updated, and its weights do not go back")
        if self.held != self.schedule.device_after:
            got, said = sorted(self.held), sorted(self.schedule.device_after)
            self.fail("resident", None, NO_BLOCK, f"the step ends with blocks {got} on the device, device_after says {said}")
        self.swaps.check_end()

    # ---- ops ----------------------------------------------------------------------------------------------------------------

    def check_op(self, op: Op, anchor: Anchor) -> None:
        """One op, at the anchor that issues it."""
        match op.kind, op.payload, op.lane:
            case OpKind.UPLOAD, Payload.WEIGHTS, Lane.H2D:
                self.check_upload(op)
            case OpKind.RELEASE, Payload.WEIGHTS, Lane.H2D:
                self.check_device_release(op, anchor)
            case OpKind.GRAD, Payload.GRADIENTS, Lane.D2H:
                self.check_grad(op)
            case OpKind.SWAP_IN, Payload.STATE, Lane.H2D:
                self.check_state_up(op)
            case OpKind.SWAP_OUT, Payload.STATE, Lane.D2H:
                self.check_goes_back(op, moves=self.placed[op.block].state_moves and op.block not in self.state_down)
                self.state_down[op.block] = op.id
            case OpKind.SWAP_OUT, Payload.WEIGHTS, Lane.D2H:
                self.check_goes_back(op, moves=self.placed[op.block].weights_return and op.block not in self.returned)
                self.returned.add(op.block)
            case OpKind.MIRROR, Payload.WEIGHTS | Payload.STATE, Lane.D2H:
                self.check_lent(op)
            case OpKind.SWAP_OUT | OpKind.SWAP_IN, Payload.ACTIVATIONS, _:
                self.swaps.check_op(op)
            case _:
                super().check_op(op, anchor)
        self.check_bytes(op)

    def check_bytes(self, op: Op) -> None:
        """An op moves all of its payload, no more: the simulator's times and the memory that it counts rest on that."""
        if op.block == NO_BLOCK or op.payload is Payload.ACTIVATIONS or op.kind is OpKind.MIRROR:
            return  # a MIRROR moves what it finds in memory, which `check_mirror` and `check_lent` know
        shape = self.placed[op.block].shape
        sizes = {Payload.WEIGHTS: shape.weight_bytes, Payload.STATE: shape.state_bytes, Payload.GRADIENTS: shape.gradient_bytes}
        size = sizes[op.payload] + (shape.weight_bytes if op.kind is OpKind.STORE and op.payload is Payload.STATE else 0)
        if op.num_bytes != size:
            self.fail("order", op, op.block, f"moves {op.num_bytes} bytes of {op.payload.value}; there are {size}")

    def check_unused(self, op: Op, anchor: Anchor) -> None:
        """The device computes with a copy of its own: what the host gives back has been uploaded, which chains see to."""

    def check_upload(self, op: Op) -> None:
        """Weights come to the device."""
        placed = self.placed[op.block]
        if op.block in self.held or not (placed.below_device or placed.renewed):
            self.fail("resident", op, op.block, "uploads weights that the device holds, or that no one else makes")
        if placed.on_disk and op.block not in self.resident:
            self.fail("resident", op, op.block, "uploads weights that are not in host memory")
        if self.schedule.signature.updates is not Updates.NONE and placed.renewed and self.is_outdated(op):
            self.fail("order", op, op.block, "uploads weights that the coming UPDATE outdates, after their last use")
        if op.block in self.speculated and (not self.after_verdict(op) or self.may_redo(op)):
            self.fail("resident", op, op.block, "uploads weights on which there is no verdict yet, or that it has discarded")
        if placed.below_device and self.released_there & ~self.behind[op.id]:
            self.fail("capacity", op, op.block, "does not wait for every RELEASE before it, whose memory it takes over")
        self.held.add(op.block)
        self.held_bytes += placed.shape.weight_bytes if placed.below_device else 0
        self.uploaded[op.block] = op.id
        self.check_room(op, op.block)

    def is_outdated(self, op: Op) -> bool:
        """Whether the block's last use is over and its update is still to come."""
        return op.block not in self.updated and op.at > self.last_use.get(op.block, -1)

    def check_room(self, op: Op | None, block: int) -> None:
        """Copies of weights from below fit the device's memory."""
        if self.held_bytes > self.device_capacity_bytes:
            need, room = format_bytes(self.held_bytes), format_bytes(self.device_capacity_bytes)
            self.fail("capacity", op, block, f"brings weights that live below the device to {need} there; allowed: {room}")

    def check_device_release(self, op: Op, anchor: Anchor) -> None:
        """Device memory is given back."""
        if op.block not in self.held or not self.placed[op.block].below_device:
            self.fail("resident", op, op.block, "releases weights that are not on the device, or that live there")
        if op.block == anchor.block:
            self.fail("resident", op, op.block, f"releases weights that {anchor} uses")
        self.held.remove(op.block)
        self.held_bytes -= self.placed[op.block].shape.weight_bytes
        self.uploaded.pop(op.block, None)
        self.released_there |= 1 << op.id

    def check_grad(self, op: Op) -> None:
        """Gradients go to the host."""
        if not self.placed[op.block].on_cpu or op.block in self.grads:
            self.fail("gradients", op, op.block, "is not updated by the CPU, or its gradients have gone to the host before")
        if op.at <= self.last_use.get(op.block, len(self.schedule.anchors)):
            self.fail("gradients", op, op.block, f"copies gradients at anchor {op.at}, before the last backward has ended")
        if updates_in_backward(self.plan, self.schedule.signature.updates):
            over = list(self.grads)[-self.plan.gradient_depth] if len(self.grads) >= self.plan.gradient_depth else None
            if over is not None and not self.behind[op.id] >> self.updated.get(over, op.id + 1) & 1:
                got = f"does not wait for the UPDATE of block {over}, whose place in host memory it takes"
                self.fail("gradients", op, op.block, got)
        self.grads[op.block] = op.id
        self.using.append(op.id)

    def check_update(self, op: Op) -> None:
        """An update has its gradients, its weights and its state where it runs."""
        super().check_update(op)
        placed = self.placed[op.block]
        if placed.on_cpu:
            if op.block not in self.grads or not self.behind[op.id] >> self.grads[op.block] & 1:
                self.fail("order", op, op.block, "does not wait for its GRAD")
            if placed.below_device and op.block in self.held:
                self.fail("resident", op, op.block, "is updated by the CPU while the device holds a copy, which is outdated then")
            self.held.discard(op.block)
            self.uploaded.pop(op.block, None)
        elif placed.below_device and op.block not in self.held:
            self.fail("resident", op, op.block, "is updated on the device, which does not hold its weights")
        if placed.state_moves and op.block not in self.state_up:
            self.fail("order", op, op.block, "is updated on the device, and its state has not come there")

    def must_follow_verdict(self, block: int) -> bool:
        """Such a device may update a block between two backwards."""
        if self.speculates:
            return super().must_follow_verdict(block)
        return not updates_in_backward(self.plan, self.schedule.signature.updates)

    def check_state_up(self, op: Op) -> None:
        """State comes to the device, in place of what has gone back."""
        if not self.placed[op.block].state_moves or op.block in self.state_up:
            self.fail("order", op, op.block, "brings state to the device that is not updated there, lives there, or comes twice")
        over = list(self.state_up)[-DEVICE_STATES] if len(self.state_up) >= DEVICE_STATES else None
        if over is not None and not self.behind[op.id] >> self.state_down.get(over, op.id + 1) & 1:
            self.fail("capacity", op, op.block, f"does not wait for the SWAP_OUT of block {over}'s state, whose place it takes")
        self.state_up[op.block] = op.id

    def check_mirror(self, op: Op) -> None:
        """What an update has made in memory goes to the disk, if the device has it alone by way of the host."""
        super().check_mirror(op)
        lent = self.lent[-1] if self.lent else None
        if self.placed[op.block].lent_bytes and (lent is None or lent.block != op.block):
            self.fail("order", op, op.block, "writes what only the device has, and no MIRROR on lane 'd2h' has brought that")
        if lent is not None and lent.block == op.block:
            self.lent[-1] = op

    def check_lent(self, op: Op) -> None:
        """What only the device has comes to the host, in place of what the block before had there."""
        placed = self.placed[op.block]
        if not placed.lent_bytes or op.num_bytes != placed.lent_bytes or op.block not in self.updated:
            got = f"brings {op.num_bytes} B to the host, of which the device has {placed.lent_bytes} B alone after its UPDATE"
            self.fail("order", op, op.block, got)
        if self.lent and (self.lent[-1].lane is Lane.D2H or not self.behind[op.id] >> self.lent[-1].id & 1):
            self.fail(
                "capacity", op, op.block, f"does not wait for the MIRROR of block {self.lent[-1].block}, whose place it takes"
            )
        self.lent.append(op)

    def check_goes_back(self, op: Op, *, moves: bool) -> None:
        """What the device has updated goes to the host, where it lives."""
        if not moves or op.block not in self.updated:
            self.fail(
                "order", op, op.block, f"takes {op.payload.value} to the host that the device has not updated, or that live there"
            )

    # ---- anchors ------------------------------------------------------------------------------------------------------------

    def check_anchor(self, index: int, anchor: Anchor) -> None:
        """What a forward or backward needs is on the device."""
        block, placed = anchor.block, self.placed[anchor.block]
        if placed.below_device or placed.renewed:
            self.check_present(index, anchor, self.held, self.uploaded)
        if anchor.phase is Phase.FORWARD and placed.trainable and block not in self.uploaded:
            kind = OpKind.UPLOAD if placed.renewed else OpKind.UPDATE
            if not (placed.below_device and placed.on_cpu) and (kind, block) not in anchor.carried:
                self.fail("order", None, block, f"anchor {index} ({anchor}) does not wait for the {kind.value} of the step before")
        if anchor.phase is Phase.BACKWARD:
            missing = [e for e in last_gradients(self.placed, self.schedule.anchors, index) if e not in anchor.carried]
            if missing:
                got = f"anchor {index} ({anchor}) does not wait for the GRAD of block {missing[0][1]} of the step before"
                self.fail("gradients", None, block, got)
            self.check_waiting(index, anchor, DEVICE_GRADIENTS, "blocks' gradients leave the device")
        if self.schedule.signature.training:
            self.swaps.check_anchor(index, anchor)
