"""Where a model's weights are: on the host alone, or also on a device with memory of its own.

Parameters are ordinary tensors, or handles (``handles.offloaded_parameter``).

[Note: Memory that is being written to the disk]
The end of a step that is kept writes weights to the disk from their memory, while the next batch
runs. Reads are harmless meanwhile, but a change would reach the disk as a part of the last step. So
parameters stay handles while their memory is written out: outside their block's forward and
backward, code that uses them waits. Inside they are ordinary tensors. Some blocks change their own
weights in forward or backward (``max_norm`` of an embedding): once that is known, such a block
waits before it begins.
"""

# ruff: noqa: B027  # a device that is the host has nothing to do in these methods
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from lightning_hetero._native import READY, Ticket
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.handles.offloaded_parameter import OffloadedParameter, ParameterState, offload, restore
from lightning_hetero.ir.schedule import OpKind, Schedule
from lightning_hetero.lanes import Event
from lightning_hetero.lowering import DeviceRoom
from lightning_hetero.runtime.activations.autocast import WeightCasts
from lightning_hetero.runtime.context import RunContext
from lightning_hetero.runtime.device import DeviceWeights
from lightning_hetero.runtime.residency.host_weights import HostWeights
from lightning_hetero.runtime.tensor_sources import WeightSource
from lightning_hetero.store.live import moved_weights
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.store.live.geometry import versions
from lightning_hetero.store.live.mirrors import readers_of
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.store.raw_memory import set_data

__all__ = ["HostWeights", "Parameters", "Residency"]


class Residency(ABC):
    """The places of one model's weights. Only the thread that computes calls it.

    Where the host and a device with memory of its own differ, a method is abstract, or does here
    what the host needs.
    """

    def __init__(self, context: RunContext, casts: WeightCasts) -> None:
        self._context = context
        self._blocks, self._store = context.run.blocks, context.run.store
        self.casts = casts  # 16-bit casts of weights that leave memory between uses
        self.parameters = Parameters(self, self._blocks, self._store, casts)
        self.weights = HostWeights(context)  # host memory for weights on disk
        self.renewed: set[int] = set()  # blocks that an op outside the schedule has updated since their last use

    # ---- places ----------------------------------------------------------------------------------

    copies: DeviceWeights | None = None  # the weights on a device with memory of its own

    @abstractmethod
    def is_away(self, block: Block) -> bool:
        """Whether the block's weights live on a lower tier than where it computes."""

    @abstractmethod
    def is_released(self, block: Block) -> bool:
        """Whether the block's parameters are handles while it is not in use."""

    def is_on_host(self, block: Block) -> bool:
        """Whether the block has host memory that is not for fetched weights only."""
        return True

    # ---- a batch ---------------------------------------------------------------------------------

    @abstractmethod
    def held(self, last: Schedule | None) -> tuple[frozenset[int], DeviceRoom | None]:
        """The weights in memory as a batch begins: of blocks on disk, and on a device of its own.

        ``last`` is the schedule of the last batch if all of its ops were submitted.
        """

    @abstractmethod
    def begin_batch(self, *, training: bool, whole: bool) -> None:
        """A batch begins; ``whole``: the last one submitted all ops, so edges lead to them all."""

    def end_batch(self) -> None:
        """A batch ends: until the next one nothing computes with the weights."""

    def is_stale(self, block: Block) -> bool:
        """Whether the weights that the schedule has brought are not those that count now."""
        return False

    @abstractmethod
    def unforeseen(self, block: Block) -> bool:
        """Brings weights for a use outside the schedule; returns whether that still holds."""

    @abstractmethod
    def ensure(self, block: Block) -> None:
        """Brings the block's weights if an op had no room for them, or no op could renew them."""

    # ---- use -------------------------------------------------------------------------------------

    @abstractmethod
    def open(self, block: Block) -> None:
        """A use of the block begins: its parameters are ordinary tensors until :meth:`shut`."""

    @abstractmethod
    def shut(self, block: Block) -> None:
        """A use of the block ends."""

    @abstractmethod
    def provide(self, block: Block) -> None:
        """Brings weights to where the block computes, now."""

    def settle(self, part: Part) -> None:
        """Waits until the part's weights are final; parameters in memory become ordinary again.

        For readers from outside the schedule only, because edges order the schedule's own ops.
        Discards a speculative update that has no verdict yet.
        """
        self._await_write(part)
        if not readers_of(part):
            self.parameters.restore(part)

    def _await_write(self, part: Part) -> None:
        self._store.revoke(part)
        if part.last_write is not None:
            part.last_write.wait(READY)
            part.last_write = None

    @abstractmethod
    def at_hand(self, block: Block) -> AbstractContextManager[None]:
        """An optimizer's own code may update the block in the context."""

    def changes(self, blocks: Sequence[Block]) -> AbstractContextManager[None]:
        """Code may change weights of these blocks in the context, outside their own use."""
        return nullcontext()

    def bring(self, *blocks: Block, force: bool = False) -> None:
        """Brings weights into host memory, now, all at once; ``force`` exceeds the budget."""
        self.weights.bring(*blocks, force=force)
        for part in [part for block in blocks for part in block.parts]:
            self.settle(part)

    def assign(self, part: Part, index: int, value: Tensor) -> None:
        """Code sets ``data`` of a parameter; see [Note: Moved weights]."""
        param = part.params[index]
        if type(param) is OffloadedParameter:
            set_data(param, value)
        else:
            on_device = self.copies is not None
            stays = not on_device and not self.is_away(part.block)
            moved_weights.assign(part, index, value, stays=stays, is_saved=on_device)

    def before_update(self, block: Block) -> None:
        """Brings weights that user code has changed to where the block's update reads them."""

    # ---- begin and end ---------------------------------------------------------------------------

    def install(self, context: RunContext) -> None:
        """Continues with another plan; blocks on host and disk are where it wants them."""
        self._context = context
        self.weights.install(context)

    def move_in(self) -> None:
        """Moves to the device the blocks that live there; others are in host memory or on disk."""

    def enter(self) -> None:
        """Gives blocks without a place on the device one."""

    def leave(self, block: Block) -> None:
        """Brings a block back from a device to host and disk; nothing of it is under way."""

    def set_aside(self, num_bytes: int) -> None:
        """Reserves another amount of device memory; if it differs, everything leaves the device."""

    def wait_for_record(self, latest: Mapping[tuple[OpKind, int], Event], *, whole: bool) -> None:
        """Between two batches: waits for the weights and state that the record of a step names.

        The engine itself writes a record after everything of its own that the record names.

        ``latest`` has the latest op of each kind and block. ``whole``: the step is kept.
        """

    def lends(self, block: Block) -> bool:
        """Between two batches: whether only a device has the block's newest weights or state."""
        return False

    def lend(self, block: Block) -> list[Ticket]:
        """MIRROR on ``d2h``: copies these to host memory, until :meth:`take_back`."""
        return []

    def take_back(self, block: Block, tickets: Sequence[Ticket]) -> None:
        """Frees the host memory of :meth:`lend` once ``tickets`` have written it to disk."""


class Access:
    """What the handle of one parameter knows (``handles.offloaded_parameter.Record``)."""

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
    """Makes parameters handles, and ordinary tensors again."""

    def __init__(self, owner: Residency, blocks: Iterable[Block], store: TierStore, casts: WeightCasts) -> None:
        self.owner, self.store, self.casts = owner, store, casts
        self._access: dict[int, Access] = {}
        self._changing: set[int] = set()  # blocks whose forward or backward changes their weights
        self._hidden: set[int] = set()  # blocks that may have handles
        for block in blocks:
            self._hidden.add(block.index)
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
        if block.index in self._hidden:
            self._hidden.remove(block.index)
            restore(block.params())

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
        self._hidden.add(block.index)
        offload(block.params(), self._access)

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
            restore(part.params)


def changed_while_shared(block: Block) -> UnsupportedError:
    """The error for a block whose weights code has changed where several ranks have them."""
    part = block.parts[0]
    return UnsupportedError(
        f"code has changed weights of block {block.name!r}, such as {part.names[0]!r}, which {part.own.ranks} ranks have in "
        f"the same memory. Change them between batches, within `with strategy.materialize(...)`, which all ranks enter. Or assign "
        f"new ones to `data` of trained parameters in training_step, on all ranks."
    )


def _renorms(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
