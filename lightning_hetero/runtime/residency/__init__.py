"""Where a model's weights are, and who may use them: on the host alone, or on a device with memory of its own too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from lightning_hetero.ir.schedule import OpKind, Schedule
from lightning_hetero.lowering import DeviceRoom
from lightning_hetero.runtime.activations.autocast import WeightCasts
from lightning_hetero.runtime.context import RunContext
from lightning_hetero.runtime.lanes import Event, Ticket
from lightning_hetero.runtime.residency.doors import Doors
from lightning_hetero.runtime.residency.host_weights import HostWeights
from lightning_hetero.runtime.tensor_sources import DeviceCopies
from lightning_hetero.store.live.blocks import Block, Part

__all__ = ["Doors", "HostWeights", "Residency"]


class Residency(Protocol):
    """The places of one model's weights. One thread computes, and it alone calls.

    Attributes:
        doors: Which parameters are behind the door.
        weights: Host memory for weights on disk.
        renewed: Blocks that an op outside the schedule has updated since their last use.
        casts: 16-bit casts of weights that leave memory between uses.
    """

    casts: WeightCasts
    doors: Doors
    weights: HostWeights
    renewed: set[int]

    @property
    def copies(self) -> DeviceCopies | None:
        """What a device with memory of its own holds of the weights; ``None`` where the device is the host."""

    # ---- places -------------------------------------------------------------------------------------------------------------

    def is_away(self, block: Block) -> bool:
        """Whether the block's weights live on a lower tier than where it computes."""

    def is_released(self, block: Block) -> bool:
        """Whether the block's weights are behind the door while it is not in use."""

    def is_on_host(self, block: Block) -> bool:
        """Whether the host has memory for the block's weights, as far as it has memory for any that are not fetched."""

    # ---- a batch ------------------------------------------------------------------------------------------------------------

    def held(self, last: Schedule | None) -> tuple[frozenset[int], DeviceRoom | None]:
        """What a batch begins with.

        Args:
            last: The schedule of the batch before if all of its ops were submitted.

        Returns:
            Blocks on disk whose weights are in memory, and what a device with memory of its own has room for and holds.
        """

    def room_before(self, schedule: Schedule) -> DeviceRoom | None:
        """What a device with memory of its own had room for and held as the schedule began."""

    def begin_batch(self, *, training: bool, whole: bool) -> None:
        """A batch begins; ``whole``: the one before submitted all ops of its schedule, so that edges lead to all that it did."""

    def end_batch(self) -> None:
        """A batch is over: until the next one nothing computes with the weights."""

    def unforeseen(self, block: Block) -> bool:
        """Brings the block's weights for a use that the schedule does not have; returns whether the rest of it still holds."""

    def ensure(self, block: Block) -> None:
        """Brings the block's weights where an op of the schedule has found no room for them, or no op could renew them."""

    # ---- use ----------------------------------------------------------------------------------------------------------------

    def open(self, block: Block) -> None:
        """A use of the block begins: its parameters are ordinary tensors where it computes, until :meth:`shut`."""

    def shut(self, block: Block) -> None:
        """A use of the block ends."""

    def at_hand(self, block: Block) -> AbstractContextManager[None]:
        """Inside, Python code may compute with the block's weights, gradients and state: an update by an optimizer's own code."""

    def provide(self, block: Block) -> None:
        """Brings weights to where the block computes, now."""

    def bring(self, *blocks: Block, force: bool = False) -> None:
        """Brings weights into host memory, now, and all at the same time; ``force`` goes beyond the budget."""

    def release(self, block: Block) -> None:
        """Gives the block's host memory back, unless it is in use; without an op."""

    def settle(self, part: Part) -> None:
        """Waits until the part's weights are final, for readers from outside the schedule.

        Before the verdict on an update that was tried, they are what they were before it, which is taken back.
        """

    # ---- begin and end ------------------------------------------------------------------------------------------------------

    def install(self, context: RunContext) -> None:
        """Goes on with another plan; blocks on host and disk are where it wants them."""

    def move_in(self) -> None:
        """What lives on the device goes there; other blocks are in host memory, or on disk.

        Raises:
            DeviceMemoryError: The device is too small for it.
        """

    def enter(self) -> None:
        """Blocks that have no place on the device get one."""

    def leave(self, block: Block) -> None:
        """Brings a block back to host and disk, while nothing of it is under way: its place on a device is given up."""

    def set_aside(self, num_bytes: int) -> None:
        """Another plan needs other memory of the device: everything leaves it, while the executor rests.

        Raises:
            OutOfMemoryBudgetError: The device has not so much free.
        """

    def wait_for_record(self, latest: Callable[[OpKind, int], Event | None], *, whole: bool) -> None:
        """Between two batches: waits for what the record of a step names.

        Args:
            latest: The latest op of a kind and block.
            whole: The step is kept.
        """

    def lends(self, block: Block) -> bool:
        """Between two batches: whether a device has weights or state of the block that the host has not."""

    def lend(self, block: Block) -> list[Ticket]:
        """MIRROR on ``d2h``: host memory gets what the device has alone, until :meth:`take_back`."""

    def take_back(self, block: Block, tickets: Sequence[Ticket]) -> None:
        """What was lent is on the disk once ``tickets`` are done; then its host memory goes back to the system."""
