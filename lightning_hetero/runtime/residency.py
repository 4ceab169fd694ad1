"""Where the weights of blocks are, and who may use them: fetched and released, in use or behind the door.

[Note: Memory that is being written to the disk]
The end of a step that is kept writes weights to the disk from where they lie, while the next batch runs. Reading them meanwhile is
no harm, but a change would reach the disk as a part of the step before. So parameters stay behind the door while their memory is
read, and whoever touches them outside their block's forward and backward waits. Inside they are ordinary tensors: a block that
changes its own weights there (``max_norm`` of an embedding) is waited for before it begins, once that is known.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_hetero._native import READY, Ticket
from lightning_hetero.errors import OutOfMemoryBudgetError
from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.schedule import Lane, OpKind, Payload, urgency
from lightning_hetero.runtime.door import OffloadedParameter, Residency, offload, restore
from lightning_hetero.runtime.recorder import Recorder
from lightning_hetero.runtime.sources import DeviceCopies, WeightSource
from lightning_hetero.runtime.updates import Updater
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.store.live.mirrors import readers_of
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.units import format_bytes


class Access:
    """What the door knows of one parameter (``runtime.door.Record``)."""

    __slots__ = ("_blocks", "_index", "_part")

    def __init__(self, blocks: ResidentBlocks, part: Part, index: int) -> None:
        self._blocks, self._part, self._index = blocks, part, index

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self._part.names[self._index]

    @property
    def state(self) -> Residency:
        """Released where the weights live on a lower tier, whether cached or not; else only an update can be pending."""
        return Residency.RELEASED if self._blocks.is_released(self._part.block) else Residency.PENDING

    def wait(self) -> None:
        """Waits for a pending update; refuses what a closed store has left without content."""
        if not self._part.block.resident:
            self._blocks.store.check_open(self._part, self.name)
        self._blocks.settle(self._part)
        self._blocks.free(self._part)

    def source(self) -> WeightSource:
        """Where the weights are."""
        return WeightSource(self._blocks.store, self._part, self._index, self._blocks.settle, self._blocks.copies)


class ResidentBlocks:
    """The blocks of one model, of which host memory may hold only some at a time.

    Args:
        blocks: The model's blocks, bound to memory, with resolved plans.
        plan: The resolved plan.
        model: The blocks' sizes.
        store: The tiers.
        updater: Runs the updates of one part.
        capacity_bytes: Host bytes for weights that live on disk.
        recorder: Records spans; may be off.
        poison: Fill released memory with NaN instead of only dropping it (tests).

    Attributes:
        copies: What a device with memory of its own holds of the weights; ``None`` where the device is the host.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        *,
        plan: Plan,
        model: ModelShape,
        store: TierStore,
        updater: Updater,
        capacity_bytes: int,
        recorder: Recorder,
        poison: bool = False,
    ) -> None:
        self.blocks = list(blocks)
        self.plan, self.model, self.store, self.updater = plan, model, store, updater
        self.capacity_bytes = capacity_bytes
        self.recorder = recorder
        self.copies: DeviceCopies | None = None
        self._poison = poison
        self._access: dict[int, Access] = {}
        for block in blocks:
            self.learn_parts(block)
        self._held: set[int] = set()
        self._changing = {b.index for b in blocks if any(map(_renorms, b.spec.module.modules()))}
        self._releases: list[Ticket] = []

    def learn_parts(self, block: Block) -> None:
        """The block's parts are new."""
        self._access |= {id(p): Access(self, part, i) for part in block.parts for i, p in enumerate(part.params)}

    # ---- use --------------------------------------------------------------------------------------------------------------

    def open(self, block: Block) -> None:
        """A use of the block begins: its parameters are ordinary ones until :meth:`shut`."""
        if block.index in self._changing:
            for part in block.parts:
                self.free(part)
        block.uses += 1
        for param in block.params():
            if type(param) is OffloadedParameter:
                restore(param)
        if block.uses == 1:
            for part in block.parts:
                part.versions = sum(p._version for p in part.params)

    def is_away(self, block: Block) -> bool:
        """Whether the block's weights live on a lower tier than where it computes."""
        return block.weights_on_disk

    def is_released(self, block: Block) -> bool:
        """Whether the block's weights are behind the door while it is not in use."""
        return self.is_away(block)

    def is_on_host(self, block: Block) -> bool:
        """Whether the host has memory for the block's weights, as far as it has memory for any that are not fetched."""
        return True

    def shut(self, block: Block) -> None:
        """A use of the block ends."""
        block.uses = max(0, block.uses - 1)
        if block.uses:
            return
        changed = [part for part in block.parts if part.versions != sum(p._version for p in part.params)]
        if changed:
            self._changing.add(block.index)
        if block.weights_on_disk:
            for part in changed:
                part.dirty = True
            self.hide(block)
        else:
            self.guard(block)

    def guard(self, block: Block) -> None:
        """Puts the door before weights in memory that are being written to the disk."""
        if not block.uses and any(readers_of(part) for part in block.parts):
            self.hide(block)

    def free(self, part: Part) -> None:
        """Waits until nothing reads the part's weight memory any more; parameters that live in memory become ordinary again."""
        for ticket in readers_of(part):
            ticket.wait()
        self._restore(part)

    def hold(self, block: Block) -> None:
        """Keeps the block open for the rest of the batch: a graph that no anchor announces holds its weights.

        Such are a graph of gradients (``create_graph=True``), and one that was built with :meth:`Session.materialized` weights.
        """
        if block.index not in self._held:
            self._held.add(block.index)
            self.open(block)

    def hide(self, block: Block) -> None:
        """Puts the door before the block's parameters."""
        for param in block.params():
            if type(param) is nn.Parameter:
                offload(param, self._access[id(param)])

    # ---- to and fro --------------------------------------------------------------------------------------------------------

    def _fetch(self, block: Block, after: Sequence[Ticket]) -> list[Ticket]:
        return self.recorder.watch("FETCH", block.name, self._start_fetch(block, after), lane=Lane.DISK_READ)

    def _start_fetch(self, block: Block, after: Sequence[Ticket]) -> list[Ticket]:
        if block.resident:
            return []
        block.resident = True
        waits = [*after, *self._releases]
        first = urgency(OpKind.FETCH, Payload.WEIGHTS, block.index, lowest_first=self.plan.priority)
        return [self.store.fetch(p, priority=first, after=waits) for p in block.parts if p.native is not None]

    def release(self, block: Block) -> list[Ticket]:
        """Gives the block's weight memory back, unless it is in use."""
        tickets = [] if block.uses or not block.weights_on_disk else self._give_back(block)
        return self.recorder.watch("RELEASE", block.name, tickets, lane=Lane.COMPUTE)

    def _give_back(self, block: Block) -> list[Ticket]:
        if not block.resident:
            return []
        self.updater.cancel_opened([block])
        block.resident = False
        first = urgency(OpKind.RELEASE, Payload.WEIGHTS, block.index, lowest_first=self.plan.priority)
        tickets = [self.store.release(p, priority=first) for p in block.parts if p.native is not None]
        if self._poison:
            self._fill_with_nan(block, tickets)
        self._releases = [t for t in self._releases if not t.poll()] + tickets
        return tickets

    def _fill_with_nan(self, block: Block, released: Sequence[Ticket]) -> None:
        for ticket in released:
            ticket.wait()
        for part in block.parts:
            for i, param in enumerate(part.params):
                if param.is_floating_point():
                    part.memory(i).fill_(float("nan"))

    def _make_room(self, block: Block) -> list[Ticket]:
        """Evicts for a block that the schedule did not foresee: in a cycle over the blocks, the one used last comes again last."""
        need, n = self.model.blocks[block.index].weight_bytes, len(self.blocks)
        tickets: list[Ticket] = []
        resident = [b for b in self.blocks if b.resident and b.weights_on_disk]
        used = sum(self.model.blocks[b.index].weight_bytes for b in resident)
        for victim in sorted((b for b in resident if not b.uses), key=lambda b: (b.index - block.index) % n, reverse=True):
            if used + need <= self.capacity_bytes:
                break
            tickets += self.release(victim)
            used -= self.model.blocks[victim.index].weight_bytes
        if used + need > self.capacity_bytes:
            raise OutOfMemoryBudgetError(
                f"block {block.name!r} needs {format_bytes(need)} of host memory, but blocks in use at the same time hold "
                f"{format_bytes(used)} of the {format_bytes(self.capacity_bytes)} for weights on disk. Raise host_memory, or "
                f"choose block_cls so that blocks do not contain each other's uses."
            )
        return tickets

    def _prefetch_next(self, block: Block) -> None:
        following = [b for b in self.blocks[block.index + 1 :] if b.weights_on_disk][:1]
        for b in following:
            if self._fits(b):
                self._fetch(b, [])

    def _fits(self, block: Block) -> bool:
        """Whether the block's weights fit beside those that are in memory."""
        sizes = self.model.blocks
        used = sum(sizes[b.index].weight_bytes for b in self.blocks if b.resident and b.weights_on_disk)
        return used + sizes[block.index].weight_bytes <= self.capacity_bytes

    def bring(self, *blocks: Block, force: bool = False) -> None:
        """Weights into memory, now, and all at the same time; ``force`` goes beyond the budget."""
        for block in blocks:
            if not block.resident:
                self._fetch(block, [] if force else self._make_room(block))
        for part in [part for block in blocks for part in block.parts]:
            self.settle(part)

    def provide(self, block: Block) -> None:
        """Weights to where the block computes, now."""
        self.bring(block)

    def settle(self, part: Part) -> None:
        """Waits until the part's weights are final; parameters that live in memory become ordinary again.

        Before the verdict on an update that was tried, they are what they were before it, which is taken back.
        """
        self.store.revoke(part)
        if part.last_write is not None:
            part.last_write.wait(READY)
            part.last_write = None
        if not readers_of(part):
            self._restore(part)

    def _restore(self, part: Part) -> None:
        if not self.is_released(part.block):
            for param in part.params:
                if type(param) is OffloadedParameter:
                    restore(param)


def _renorms(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
