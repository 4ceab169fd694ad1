"""Gradients on their way down, updates, and what updates need and leave behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from lightning_hetero.ir.plan import Plan, Tier, UpdateLane, UpdateOrder
from lightning_hetero.ir.schedule import NO_BLOCK, Lane, OpKind, Payload, StepSignature, Updates
from lightning_hetero.lowering.activation_moves import ActivationMoves
from lightning_hetero.lowering.chains import Carried, Issue, earlier_arrivals
from lightning_hetero.lowering.needs import DEVICE_GRADIENTS, DEVICE_STATES
from lightning_hetero.lowering.placed_blocks import PlacedBlock, speculates, updates_in_backward, waits_for_step
from lightning_hetero.lowering.weight_cache import Uses
from lightning_hetero.lowering.weight_moves import WeightMoves


class UpdateMoves:
    """Issues the updates of one training step.

    Args:
        plan: The resolved plan.
        signature: The step.
        placed: The blocks.
        issue: Issues ops.
        uses: When weights are used.
        weights: Where they are.
        activations: Where those are; ``None`` where the device is the host.
        ranks: Ranks that share the model.
        shared_memory: The devices of several ranks are the host's own CPU.
        on_devices: Devices reduce gradients themselves; what leaves them is a slice of the sum.
    """

    def __init__(
        self,
        plan: Plan,
        signature: StepSignature,
        placed: Sequence[PlacedBlock],
        issue: Issue,
        uses: Uses,
        weights: WeightMoves,
        activations: ActivationMoves | None,
        ranks: int = 1,
        *,
        shared_memory: bool = False,
        on_devices: bool = False,
    ) -> None:
        self._ranks, self._on_devices = ranks, on_devices
        self._exchange = Lane.PEER if on_devices else Lane.NET
        leaves, reduces = [(OpKind.GRAD, Lane.D2H)] * (not shared_memory), [(OpKind.REDUCE, self._exchange)] * (ranks > 1)
        self._hops = [*reduces, *leaves] if on_devices else [*leaves, *reduces]  # of gradients on their way to the update
        self._agreed: int | None = None  # the AGREE that all ranks have the last record
        self._verdict: tuple[int, ...] = ()  # the AGREE that makes the verdict one
        self._plan, self._signature, self._placed, self._issue = plan, signature, placed, issue
        self._uses, self._weights, self._activations = uses, weights, activations
        self._in_backward = updates_in_backward(plan, signature.updates)
        self._speculates = speculates(plan, signature.updates)
        stops = (i for i, b in enumerate(uses.anchors) if b is not None and not placed[b].shape.pinned)
        self._last_stop = max(stops, default=-1)  # the last one before the verdict
        self._ahead = 0  # all backwards before this anchor are under way
        self._moving: deque[int] = deque()  # blocks whose state waits for device memory
        self._opened: set[int] = set()  # blocks whose state has been sent for
        self._updated: dict[int, int] = {}  # block -> UPDATE, in the order of issue
        self._grads: list[tuple[int, int, int | None]] = []  # their first hop, the block, the block that they replace
        self._arrived: list[int] = []  # their second hop, if there are two
        self._down: list[int] = []  # SWAP_OUTs of state
        self._num_up = 0  # SWAP_INs of state
        self._returned: list[int] = []  # SWAP_OUTs of weights
        self._behind: tuple[int, ...] = ()  # ends of the update before (naive order)
        self._stores: list[int] = []

    def backward_ended(self, index: int, block: int) -> None:
        """Anchor ``index`` begins after a backward of ``block``; its last one completes gradients.

        Where no anchor that the runtime stops at comes before the verdict, there is nothing to
        speculate with.
        """
        placed = self._placed[block]
        if self._uses.last[block] >= index or not placed.trainable:
            return
        if self._signature.updates is not Updates.NONE:
            self._weights.outdate(block)
        if self._activations is not None and placed.through_host and not waits_for_step(placed, self._signature, self._ranks):
            self._grad(index, block)
        if self._ranks == 1:
            self._update_early(index, block)

    def _update_early(self, index: int, block: int) -> None:
        """Issues the block's update before the verdict, if it may run then."""
        if self._may_update(self._placed[block]) and not (self._speculates and index > self._last_stop):
            self._update(index, block)

    def _may_update(self, placed: PlacedBlock) -> bool:
        """Whether the block's update may follow its backward."""
        if self._speculates:
            return placed.revocable
        return self._in_backward and (self._activations is not None or placed.on_cpu)

    def backward_begins(self, index: int) -> Iterator[int]:
        """Fetches state of coming updates. Yields ops whose memory the new gradients take over.

        On several ranks these are REDUCEs, after which all ranks know whether backward may still
        change the gradients on any of them. So the update is issued then.
        """
        if (self._in_backward or self._speculates) and self._plan.update_order is UpdateOrder.OVERLAPPED:
            self._open_ahead(index)
        depth = self._plan.gradient_depth
        if self._activations is None:
            if self._speculates:
                return  # gradients stay until the verdict, however far updates are
            latest = reversed(self._updated.values())  # the oldest gradients must be used up
            yield from islice(latest, depth - 1, depth)
        elif len(self._grads) >= DEVICE_GRADIENTS:
            grad, block, _ = self._grads[-DEVICE_GRADIENTS]
            # A GRAD follows the update whose gradients it replaces, and a REDUCE on devices a GRAD.
            place = DEVICE_GRADIENTS * (2 if self._on_devices else 1)
            if len(self._grads) >= place and (over := self._grads[-place][2]) is not None:
                self._renew(over)
            if self._ranks > 1 and block not in self._updated:
                self._update_early(index, block)
            yield grad

    def verdict(self, index: int) -> None:
        """Issues the updates that are left, in forward order, mirrors, and the COMMIT.

        Updates on the device of state from the host alternate with the others as Deep Optimizer
        States' Algorithm 1 has them: the way up of the next one and the way down of the one before
        overlap with the CPU's updates.
        """
        if self._signature.updates is Updates.NONE:
            return
        if self._ranks > 1 and self._signature.updates is not Updates.IN_BACKWARD:
            self._verdict = (self._agree(),)
        again = self._speculates and self._signature.updates is Updates.REDONE
        for _, block, _ in self._grads if self._ranks > 1 else ():  # those that have waited for their REDUCE
            if block not in self._updated:
                self._update_early(index, block)
        if not self._plan.priority and not again:
            for block in self._updated:
                self._renew(block)
        blocks = dict.fromkeys(self._signature.order)
        left = [b for b in blocks if self._placed[b].trainable and (again or b not in self._updated)]
        self._moving = deque(b for b in left if self._placed[b].state_moves)
        for block in left:
            self._open_moving()
            if block in self._updated:
                self._weights.restore(block)
                self._opened.remove(block)
            self._update(index, block)
            if not self._plan.priority:
                self._renew(block)
        before: tuple[int, ...] = ()  # one block at a time passes through the host
        for block in sorted(self._updated):
            before = self._mirror(block, before)
        if self._stores:
            self._issue(OpKind.COMMIT, NO_BLOCK, Lane.DISK_WRITE, after=(*self._stores, *self._verdict))

    def _renew(self, block: int) -> None:
        """Uploads new weights once, when that delays nothing."""
        device = self._weights.device
        if device is not None and self._placed[block].renewed and block not in device.held:
            self._weights.renew(device, block)

    def _grad(self, index: int, block: int) -> None:
        depth, size = self._plan.gradient_depth, self._placed[block].shape.gradient_bytes
        over = self._grads[-depth][1] if self._in_backward and len(self._grads) >= depth else None
        if over is not None and over not in self._updated:
            self._update(index, over)
        replaced = () if over is None else (self._updated[over],)
        (kind, lane), *rest = self._hops
        after, carried = replaced, tuple[Carried, ...]()
        if rest:  # few gradients wait between the hops: whole ones on the host, or slices on the device
            few, last_hop = DEVICE_GRADIENTS if self._on_devices else depth, rest[0][0]
            if self._on_devices or over is None:  # else the update has had them
                after = (self._arrived[-few],) if len(self._arrived) >= few else ()
            earlier = earlier_arrivals(self._placed, self._signature.order, few, len(self._grads), last_hop=last_hop)
            carried = tuple(dict.fromkeys(earlier))
        left = self._issue(kind, block, lane, Payload.GRADIENTS, size * self._ranks, after=after, carried=carried)
        self._grads.append((left, block, over))
        for later, there in rest:
            slices, behind = (1, replaced) if self._on_devices else (self._ranks, ())
            self._arrived.append(self._issue(later, block, there, Payload.GRADIENTS, size * slices, after=behind))

    def _update(self, index: int, block: int) -> None:
        shape, placed = self._placed[block].shape, self._placed[block]
        if placed.weights_return and not placed.through_host:
            self._weights.need(index, block)
        behind = self._behind if placed.on_cpu else ()
        if block not in self._opened and (placed.plan.state is Tier.DISK or placed.state_moves):
            self._open(block, after=behind)
        lane = Lane.COMPUTE if placed.plan.update is UpdateLane.DEVICE else Lane.CPU
        agreed, recorded = self._after_commit() if placed.stored else ((), ())
        carried = self._mirrored(block)
        behind += self._verdict
        if placed.slices_move:
            self._lift(block, behind)
        behind += agreed if placed.on_cpu else ()  # the engine begins to write as it updates
        last = self._issue(OpKind.UPDATE, block, lane, Payload.STATE, shape.state_bytes, after=behind, carried=carried)
        self._updated[block] = last
        if placed.weights_return:
            last = self._issue(OpKind.SWAP_OUT, block, Lane.D2H, Payload.WEIGHTS, shape.weight_bytes)
            self._returned.append(last)
        if placed.state_moves:
            last = self._issue(OpKind.SWAP_OUT, block, Lane.D2H, Payload.STATE, shape.state_bytes)
            self._down.append(last)
        if placed.stored:
            with_state = placed.plan.state is Tier.DISK
            payload = Payload.STATE if with_state else Payload.WEIGHTS
            size = shape.weight_bytes + (shape.state_bytes if with_state else 0)
            last = self._issue(OpKind.STORE, block, Lane.DISK_WRITE, payload, size, after=agreed, carried=recorded)
            self._stores.append(last)
        if self._plan.update_order is UpdateOrder.NAIVE and placed.on_cpu:
            self._behind = (last,)

    def _lift(self, block: int, behind: tuple[int, ...]) -> None:
        """Brings the slices of gradients and weights to the device, in place of others there."""
        over = self._returned[-DEVICE_STATES:][:1] if len(self._returned) >= DEVICE_STATES else []
        shape = self._placed[block].shape
        size = shape.gradient_bytes + shape.weight_bytes
        self._issue(OpKind.SWAP_IN, block, Lane.H2D, Payload.GRADIENTS, size, after=(*behind, *over))

    def _mirror(self, block: int, before: tuple[int, ...]) -> tuple[int, ...]:
        """Mirrors the block's arrays in memory. Returns the ops that the next mirror waits for."""
        placed = self._placed[block]
        if not placed.mirrored_bytes:
            return before
        payload = Payload.WEIGHTS if placed.plan.state is Tier.DISK else Payload.STATE
        size, (after, carried) = placed.mirrored_bytes, self._after_commit()
        if placed.lent_bytes:
            self._issue(OpKind.MIRROR, block, Lane.D2H, payload, placed.lent_bytes, after=before)
        last = self._issue(OpKind.MIRROR, block, Lane.DISK_WRITE, payload, size, after=after, carried=carried)
        self._stores.append(last)
        return (last,) if placed.lent_bytes else before

    def _after_commit(self) -> tuple[tuple[int, ...], tuple[Carried, ...]]:
        """Edges of what writes over the step before the last: the last one has its record.

        On several ranks all of them have it.
        """
        if self._ranks == 1:
            return (), ((OpKind.COMMIT, NO_BLOCK),)
        return ((self._agree() if self._agreed is None else self._agreed),), ()

    def _agree(self) -> int:
        carried = ((OpKind.COMMIT, NO_BLOCK),) if self._agreed is None else ()
        number = self._issue(OpKind.AGREE, NO_BLOCK, self._exchange, carried=carried)
        self._agreed = number if self._agreed is None else self._agreed
        return number

    def _mirrored(self, block: int) -> tuple[Carried, ...]:
        """Carried edges of the block's update: MIRRORs that still read the memory it changes."""
        return ((OpKind.MIRROR, block),) if self._placed[block].mirrored_bytes else ()

    def _open_ahead(self, index: int) -> None:
        """State of the blocks whose backward comes next may be on its way already.

        Blocks open in the order of their last use, up to the first one whose weights or activations
        have yet to be sent for: the disk reads in order, and state that waits for staging must not
        hold up what backward needs to use that staging up. An opened block keeps its weights until
        it is used, so only memory that no use needs before may be kept.
        """
        self._open_moving()
        self._ahead = max(self._ahead, index)
        while (block := self._uses.anchors[self._ahead]) is not None and self._is_under_way(self._ahead, block):
            placed = self._placed[block]
            if self._uses.last[block] == self._ahead and placed.trainable and self._may_update(placed):
                if placed.plan.state is Tier.DISK:
                    self._open(block)
                elif placed.state_moves:
                    self._moving.append(block)
                    self._open_moving()
            self._ahead += 1

    def _open_moving(self) -> None:
        """State comes from the host as room for it on the device becomes free."""
        while self._moving and self._num_up - len(self._down) < DEVICE_STATES:
            if (block := self._moving.popleft()) not in self._opened:
                self._open(block)

    def _is_under_way(self, ahead: int, block: int) -> bool:
        placed, device = self._placed[block], self._weights.device
        if device is None or self._activations is None:
            return not placed.on_disk or block in self._weights.host.held
        use = len(self._uses.anchors) - 2 - ahead  # the last anchor is the verdict
        return (not placed.below_device or block in device.held) and self._activations.on_the_way(use)

    def _open(self, block: int, *, after: tuple[int, ...] = ()) -> None:
        """Fetches the block's state: from disk, or from the host in place of other state."""
        size = self._placed[block].shape.state_bytes
        if self._placed[block].state_moves:
            over = self._down[self._num_up - DEVICE_STATES :][:1] if self._num_up >= DEVICE_STATES else []
            self._issue(OpKind.SWAP_IN, block, Lane.H2D, Payload.STATE, size, after=(*after, *over))
            self._num_up += 1
        else:
            carried = self._mirrored(block)
            self._issue(OpKind.FETCH, block, Lane.DISK_READ, Payload.STATE, size, after=after, carried=carried)
        self._opened.add(block)
