"""Which parameters are ordinary tensors, and which are handles (``runtime.offloaded_parameter``).

[Note: Memory that is being written to the disk]
The end of a step that is kept writes weights to the disk from their memory, while the next batch
runs. Reads are harmless meanwhile, but a change would reach the disk as a part of the last step. So
parameters stay handles while their memory is written out: outside their block's forward and
backward, code that uses them waits. Inside they are ordinary tensors. Some blocks change their own
weights in forward or backward (``max_norm`` of an embedding): once that is known, such a block
waits before it begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import nn

from lightning_hetero.runtime.activations.autocast import WeightCasts
from lightning_hetero.runtime.offloaded_parameter import OffloadedParameter, ParameterState, offload, restore
from lightning_hetero.runtime.tensor_sources import DeviceCopies, WeightSource
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.store.live.geometry import versions
from lightning_hetero.store.live.mirrors import readers_of
from lightning_hetero.store.live.tier_store import TierStore


class Owner(Protocol):
    """Knows where weights are."""

    @property
    def copies(self) -> DeviceCopies | None:
        """The weights on a device with memory of its own; ``None`` if the device is the host."""

    def is_released(self, block: Block) -> bool:
        """Whether the block's parameters are handles while it is not in use."""

    def settle(self, part: Part) -> None:
        """Waits until the part's weights are final, for readers from outside the schedule.

        Discards a speculative update that has no verdict yet.
        """

    def provide(self, block: Block) -> None:
        """Brings weights to where the block computes, now."""

    def open(self, block: Block) -> None:
        """A use of the block begins: its parameters are ordinary tensors until :meth:`shut`."""

    def shut(self, block: Block) -> None:
        """A use of the block ends."""


class Access:
    """What the handle of one parameter knows (``runtime.offloaded_parameter.Record``)."""

    __slots__ = ("_index", "_parameters", "_part")

    def __init__(self, parameters: Parameters, part: Part, index: int) -> None:
        self._parameters, self._part, self._index = parameters, part, index

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self._part.names[self._index]

    @property
    def state(self) -> ParameterState:
        """Released if the weights live on a lower tier; else only an update can be pending."""
        return ParameterState.RELEASED if self._parameters.owner.is_released(self._part.block) else ParameterState.PENDING

    def wait(self) -> None:
        """Waits for a pending update; refuses weights that a closed store has lost."""
        if not self._part.block.resident:
            self._parameters.store.check_open(self._part, self.name)
        self._parameters.owner.settle(self._part)
        self._parameters.free(self._part)

    def source(self) -> WeightSource:
        """Where the weights are."""
        parameters, owner = self._parameters, self._parameters.owner
        return WeightSource(parameters.store, self._part, self._index, owner.settle, owner.copies, parameters.keep_casts)


class Parameters:
    """Makes parameters handles, and ordinary tensors again.

    Args:
        casts: 16-bit casts of weights that leave memory between uses.
    """

    def __init__(self, owner: Owner, blocks: Iterable[Block], store: TierStore, casts: WeightCasts) -> None:
        self.owner, self.store, self.casts = owner, store, casts
        self._access: dict[int, Access] = {}
        self._changing: set[int] = set()  # blocks whose forward or backward changes their weights
        for block in blocks:
            self.learn_parts(block)
            if any(map(_renorms, block.spec.module.modules())):
                self._changing.add(block.index)

    def learn_parts(self, block: Block) -> None:
        """The block's parts are new."""
        self._access |= {id(p): Access(self, part, i) for part in block.parts for i, p in enumerate(part.params)}

    def forget(self) -> None:
        """The model belongs to another run from now on."""
        self._access.clear()

    def open(self, block: Block) -> None:
        """A use of the block begins: its parameters are ordinary tensors until it ends."""
        if block.index in self._changing:
            for part in block.parts:
                self.free(part)
        block.uses += 1
        for param in block.params():
            if type(param) is OffloadedParameter:
                restore(param)
        if block.uses == 1:
            for part in block.parts:
                part.versions = versions(part)

    def changed(self, block: Block) -> list[Part]:
        """The parts whose weights the use that ends has changed."""
        changed = [part for part in block.parts if part.versions != versions(part)]
        if changed:
            self._changing.add(block.index)
        return changed

    def keep_casts(self, block: Block, *, trained: bool = False) -> None:
        """The block's weights will change: 16-bit casts that backward still needs stay in memory.

        ``trained``: only trained weights will change.
        """
        casts = self.casts.needed(block, trained=trained)
        if casts:
            self.owner.provide(block)
            self.owner.open(block)
            for cast in casts:
                cast.stay()
            self.owner.shut(block)

    def hide(self, block: Block) -> None:
        """Makes the block's parameters handles."""
        for param in block.params():
            if type(param) is nn.Parameter:
                offload(param, self._access[id(param)])

    def guard(self, block: Block) -> None:
        """Makes parameters handles whose memory is being written to the disk."""
        if not block.uses and any(readers_of(part) for part in block.parts):
            self.hide(block)

    def free(self, part: Part) -> None:
        """Waits until nothing reads the part's memory; then parameters in memory are ordinary."""
        for ticket in readers_of(part):
            ticket.wait()
        self.restore(part)

    def restore(self, part: Part) -> None:
        """Makes parameters that live in memory ordinary tensors again."""
        if not self.owner.is_released(part.block):
            for param in part.params:
                if type(param) is OffloadedParameter:
                    restore(param)


def _renorms(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
