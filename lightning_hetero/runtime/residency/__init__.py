"""Where a model's weights are: on the host alone, or also on a device with memory of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from lightning_hetero.ir.schedule import OpKind, Schedule
from lightning_hetero.lowering import DeviceRoom
from lightning_hetero.runtime.activations.autocast import WeightCasts
from lightning_hetero.runtime.context import RunContext
from lightning_hetero.runtime.lanes import Event, Ticket
from lightning_hetero.runtime.residency.host_weights import HostWeights
from lightning_hetero.runtime.residency.parameters import Owner, Parameters
from lightning_hetero.store.live.blocks import Block

__all__ = ["HostWeights", "Parameters", "Residency"]


class Residency(Owner):
    """The places of one model's weights. Only the thread that computes calls it.

    Methods that only a device with memory of its own needs do nothing here.
    """

    def __init__(self, context: RunContext, casts: WeightCasts) -> None:
        self._blocks, self._store = context.run.blocks, context.run.store
        self.casts = casts  # 16-bit casts of weights that leave memory between uses
        self.parameters = Parameters(self, self._blocks, self._store, casts)
        self.weights = HostWeights(context)  # host memory for weights on disk
        self.renewed: set[int] = set()  # blocks that an op outside the schedule has updated since their last use

    # ---- places ----------------------------------------------------------------------------------

    @abstractmethod
    def is_away(self, block: Block) -> bool:
        """Whether the block's weights live on a lower tier than where it computes."""

    @abstractmethod
    def is_on_host(self, block: Block) -> bool:
        """Whether the block has host memory that is not for fetched weights only."""

    # ---- a batch ---------------------------------------------------------------------------------

    @abstractmethod
    def held(self, last: Schedule | None) -> tuple[frozenset[int], DeviceRoom | None]:
        """The weights in memory as a batch begins.

        Args:
            last: The schedule of the last batch if all of its ops were submitted.

        Returns:
            Blocks on disk whose weights are in memory, and room and content of a device with memory
            of its own.
        """

    def room_before(self, schedule: Schedule) -> DeviceRoom | None:
        """Room and content of a device with memory of its own as the schedule began."""
        return None

    @abstractmethod
    def begin_batch(self, *, training: bool, whole: bool) -> None:
        """A batch begins; ``whole``: the last one submitted all ops, so edges lead to them all."""

    def end_batch(self) -> None:
        """A batch ends: until the next one nothing computes with the weights."""

    @abstractmethod
    def unforeseen(self, block: Block) -> bool:
        """Brings weights for a use outside the schedule; returns whether that still holds."""

    @abstractmethod
    def ensure(self, block: Block) -> None:
        """Brings the block's weights if an op had no room for them, or no op could renew them."""

    # ---- use -------------------------------------------------------------------------------------

    @abstractmethod
    def before_update(self, block: Block) -> None:
        """Brings weights that user code has changed to where the block's update reads them."""

    @abstractmethod
    def at_hand(self, block: Block) -> AbstractContextManager[None]:
        """A context in which an optimizer's own code may update the block."""

    @abstractmethod
    def bring(self, *blocks: Block, force: bool = False) -> None:
        """Brings weights into host memory, now, all at once; ``force`` exceeds the budget."""

    def release(self, block: Block) -> None:
        """Gives the block's host memory back, unless it is in use; without an op."""
        self.weights.release(block)

    # ---- begin and end ---------------------------------------------------------------------------

    def install(self, context: RunContext) -> None:
        """Continues with another plan; blocks on host and disk are where it wants them."""
        self.weights.install(context)

    def move_in(self) -> None:
        """Moves to the device the blocks that live there; others are in host memory or on disk.

        Raises:
            DeviceMemoryError: The device is too small for it.
        """

    def enter(self) -> None:
        """Gives blocks without a place on the device one."""

    def leave(self, block: Block) -> None:
        """Brings a block back from a device to host and disk; nothing of it is under way."""

    def set_aside(self, num_bytes: int) -> None:
        """Reserves another amount of device memory; if it differs, everything leaves the device.

        Raises:
            OutOfMemoryBudgetError: The device has less free.
        """

    def wait_for_record(self, latest: Callable[[OpKind, int], Event | None], *, whole: bool) -> None:
        """Between two batches: waits for the weights and state that the record of a step names.

        The engine itself writes a record after everything of its own that the record names.

        ``latest`` returns the latest op of a kind and block. ``whole``: the step is kept.
        """

    def lends(self, block: Block) -> bool:
        """Between two batches: whether only a device has the block's newest weights or state."""
        return False

    def lend(self, block: Block) -> list[Ticket]:
        """MIRROR on ``d2h``: copies these to host memory, until :meth:`take_back`."""
        return []

    def take_back(self, block: Block, tickets: Sequence[Ticket]) -> None:
        """Frees the host memory of :meth:`lend` once ``tickets`` have written it to disk."""
