"""Host memory for weights that live on disk: fetching, releasing and evicting them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_hetero._native import DONE, Ticket
from lightning_hetero.errors import OutOfMemoryBudgetError
from lightning_hetero.ir.model import ModelShape
from lightning_hetero.ir.schedule import Lane, OpKind, Payload, urgency
from lightning_hetero.lanes.memory import POISON
from lightning_hetero.runtime.context import RunContext
from lightning_hetero.runtime.residency.fetch_buffers import FetchBuffers
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.units import format_bytes


class HostWeights:
    """Brings weights from the disk to host memory and gives their memory back."""

    def __init__(self, context: RunContext) -> None:
        run = context.run
        self._blocks, self._store, self._recorder = run.blocks, run.store, run.recorder
        self._updater, self._poison = run.updater, run.poison
        self._releases: list[Ticket] = []
        self._had_waited = False  # the updates of the last batch, whose gradients may still be there
        self._buffers = FetchBuffers(run.lanes.host_buffer)
        self._buffered: set[int] = set()  # blocks whose weights lie in buffers: [Note: Buffers of FETCH]
        self.leaves: Callable[[Block], object] = id  # called before a block's weights leave outside the schedule
        self.install(context)

    def install(self, context: RunContext) -> None:
        """Continues with another plan."""
        self.model: ModelShape = context.model
        self._sizes = context.placement.cache_bytes, context.placement.least_cache_bytes
        self.capacity_bytes = self._sizes[0]
        self._lowest_first = context.placement.plan.priority
        self._buffers.shrink(0)

    def begin_batch(self, *, waits: bool) -> bool:
        """A batch begins; ``waits``: its updates wait, so that the host has all gradients.

        Then the weights have less memory, and until the updates have used the gradients. Returns
        whether the weights that are in memory may be too many now.
        """
        before, self.capacity_bytes = self.capacity_bytes, self._sizes[waits or self._had_waited]
        self._had_waited = waits
        return self.capacity_bytes < before

    def fetch(self, block: Block, after: Sequence[Ticket]) -> list[Ticket]:
        """Brings weights that are not in memory or on their way, for a use outside the schedule."""
        return self._recorder.watch("FETCH", block.name, self.start_fetch(block, after), lane=Lane.DISK_READ)

    def start_fetch(self, block: Block, after: Sequence[Ticket]) -> list[Ticket]:
        """FETCH weights: the same, after these tickets."""
        if block.resident:
            return []
        block.resident = True
        waits = [*after, *self._releases]
        first = urgency(OpKind.FETCH, Payload.WEIGHTS, block.index, lowest_first=self._lowest_first)
        parts = [part for part in block.parts if part.native is not None]
        for part in parts if block.index in self._buffered else ():
            self._place(part, copies=False)
        return [self._store.fetch(part, priority=first, after=waits) for part in parts]

    def release(self, block: Block) -> list[Ticket]:
        """Gives back the memory of the block's weights unless it is in use; without an op."""
        tickets: list[Ticket] = []
        if not block.uses and block.weights_on_disk:
            self.leaves(block)
            tickets = self.give_back(block)
        return self._recorder.watch("RELEASE", block.name, tickets, lane=Lane.COMPUTE)

    def give_back(self, block: Block) -> list[Ticket]:
        """RELEASE weights: gives back the memory of the block's weights."""
        if not block.resident:
            return []
        self._updater.cancel_opened([block])
        block.resident = False
        first = urgency(OpKind.RELEASE, Payload.WEIGHTS, block.index, lowest_first=self._lowest_first)
        tickets: list[Ticket] = []
        for part in block.parts:
            if part.native is None:
                continue
            lent = part.lent
            tickets += self._store.release(part, priority=first)
            if lent is not None:
                self._give(lent)
            elif self._poison:
                _fill_with_nan(part, tickets)
        self._releases = [t for t in self._releases if not t.poll()] + tickets
        return tickets

    # ---- buffers ---------------------------------------------------------------------------------

    def buffer(self, block: Block) -> None:
        """From now on the block's weights lie in buffers while they are in host memory."""
        self._buffered.add(block.index)
        for part in block.parts if block.resident else ():
            if part.native is not None and part.lent is None:
                self._place(part, copies=True)
                part.arena.drop()

    def unbuffer(self, block: Block) -> None:
        """Undoes :meth:`buffer`: weights that are in host memory lie in the block's own."""
        self._buffered.discard(block.index)
        for part in block.parts:
            if (lent := part.lent) is not None:
                self._buffers.shrink(self.capacity_bytes - part.weight_bytes)
                self._store.place(part, None, copies=True)
                self._give(lent)
        if not self._buffered:
            self._buffers.shrink(0)

    def _place(self, part: Part, *, copies: bool) -> None:
        apart = (p for b in self.held() for p in b.parts if p.lent is None and p is not part and b is not part.block)
        most_bytes = self.capacity_bytes - sum(p.weight_bytes for p in apart)
        self._store.place(part, self._buffers.take(part.weight_bytes, most_bytes=most_bytes), copies=copies)

    def _give(self, memory: Tensor) -> None:
        if self._poison:
            memory.fill_(POISON)
        self._buffers.give(memory)
        self._buffers.shrink(self.capacity_bytes)

    # ---- what is in memory -----------------------------------------------------------------------

    def held(self) -> list[Block]:
        """The blocks on disk whose weights are in memory."""
        return [b for b in self._blocks if b.resident and b.weights_on_disk]

    def coming_bytes(self) -> int:
        """Bytes that forward may fetch, for which memory that malloc keeps is no room."""
        return max(0, self.capacity_bytes - sum(self.model.blocks[b.index].weight_bytes for b in self.held()))

    def fits(self, block: Block) -> bool:
        """Whether the block's weights fit beside those that are in memory."""
        sizes = self.model.blocks
        used = sum(sizes[b.index].weight_bytes for b in self._blocks if b.resident and b.weights_on_disk)
        return used + sizes[block.index].weight_bytes <= self.capacity_bytes

    def make_room(self, block: Block) -> list[Ticket]:
        """Evicts blocks to make room for one outside the schedule.

        The block used last goes first: in a cycle over the blocks it is needed last.

        Raises:
            OutOfMemoryBudgetError: Blocks in use leave too little.
        """
        need, n = self.model.blocks[block.index].weight_bytes, len(self._blocks)
        tickets: list[Ticket] = []
        resident = self.held()
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
                f"the plan's host_cache_bytes; let materialize() have fewer parameters at a time; or choose block_cls so that "
                f"blocks do not contain each other's uses."
            )
        return tickets

    def shrink(self) -> None:
        """Releases what exceeds the capacity; nothing is in use."""
        self.evict(sum(self.model.blocks[b.index].weight_bytes for b in self.held()) - self.capacity_bytes)
        self._buffers.shrink(self.capacity_bytes)

    def evict(self, num_bytes: int, *, spare: Block | None = None) -> None:
        """Releases weights on disk that are not in use, and waits; the last blocks go first."""
        tickets: list[Ticket] = []
        for victim in reversed(self.held()):
            if num_bytes > 0 and victim is not spare and not victim.uses:
                num_bytes -= self.model.blocks[victim.index].weight_bytes
                tickets += self.release(victim)
        for ticket in tickets:
            ticket.wait(DONE)

    def bring(self, *blocks: Block, force: bool = False) -> None:
        """Begins to bring weights into memory; ``force`` exceeds the budget."""
        for block in blocks:
            if not block.resident:
                self.fetch(block, [] if force else self.make_room(block))

    def bring_next(self, block: Block) -> None:
        """Begins to bring the weights of the next block, if there is room."""
        following = [b for b in self._blocks[block.index + 1 :] if b.weights_on_disk][:1]
        for b in following:
            if self.fits(b):
                self.fetch(b, [])


def _fill_with_nan(part: Part, released: Sequence[Ticket]) -> None:
    for ticket in released:
        ticket.wait()
    for i, param in enumerate(part.params):
        if param.is_floating_point():
            part.own_weights(i).fill_(float("nan"))
