"""What several ranks that share a model do together: whole weights and gradients of a block.

[Note: Slices at run time]
A part has reserved memory for all of its weights on every rank, at addresses that stay. A rank has
pages for its own slice, in place. GATHER fills the others, and RELEASE gives their pages back. An
update writes the own slice, so from then on the others are old, whether their pages are there or
not (``Part.is_whole``).

Gradients of a block are whole until its backward has ended. REDUCE sums them over the ranks, and
from then on a rank has those of its slice, in memory of their own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.plan import Plan
from lightning_hetero.lanes.collectives import Collectives
from lightning_hetero.runtime.options import SessionOptions
from lightning_hetero.runtime.slice_gradients import SliceGradients
from lightning_hetero.runtime.slice_reads import SliceReads
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.store.raw_memory import tensor_at


class Slices:
    """One rank's side of the collectives.

    The thread that computes calls it, in the order of the schedule. What a method returns does the
    op: in the thread of lane ``net``, or at once where that lane is empty. Whether weights are
    whole (``Part.is_whole``) is what the ops that were submitted make true, as the schedule has it.

    Args:
        collectives: Those of the ranks that share the model.
        poison: Fill memory whose content does not count with NaN (tests).
    """

    def __init__(self, collectives: Collectives, *, poison: bool = False) -> None:
        self.collectives, self._poison = collectives, poison
        self.gradients, self.reads = SliceGradients(collectives), SliceReads(collectives)

    def gather(self, block: Block) -> Callable[[], None]:
        """GATHER: brings the slices of all other ranks into the block's memory."""
        parts, op = [part for part in block.parts if not part.is_whole], self.collectives.announce("GATHER", block.index)
        for part in parts:
            part.is_whole = True

        def run() -> None:
            self.collectives.met(op)
            for part in parts:
                whole = _bytes(part)
                if self._poison:
                    self._spoil(part)
                self.collectives.gather(whole, whole.view(part.own.ranks, -1)[part.own.rank])

        return run

    def release(self, block: Block) -> Callable[[], None]:
        """RELEASE: gives the memory of the other ranks' slices back."""
        for part in block.parts:
            part.is_whole = False

        def run() -> None:
            for part in block.parts:
                if self._poison:
                    self._spoil(part)
                    continue
                size = part.slice_elements * part.dtype.itemsize
                begin = part.own.rank * size
                part.arena.drop(0, begin)
                part.arena.drop(begin + size, (part.own.ranks - part.own.rank - 1) * size)

        return run

    def _spoil(self, part: Part) -> None:
        """Fills the slices of other ranks with NaN."""
        size = part.slice_elements * part.dtype.itemsize
        begin, whole = part.own.rank * size, _bytes(part)
        for outside in (whole[:begin], whole[begin + size :]):
            outside.view(part.dtype).fill_(torch.nan)

    def share(self, block: Block) -> None:
        """Gives all ranks the first rank's weights of a block."""
        for part in block.parts:
            self.collectives.broadcast(_bytes(part))


def slices_of(options: SessionOptions, blocks: Sequence[Block], plan: Plan) -> Slices | None:
    """What one of several ranks keeps; ``None`` if this process has all of the model.

    Raises:
        ConfigError: Another rank has other parameters, or another plan.
    """
    if options.collectives is None:
        return None
    layout = [(part.names, [tuple(p.shape) for p in part.params], part.num_elements) for b in blocks for part in b.parts]
    trained = [p.requires_grad for b in blocks for p in b.params()]
    rows = options.collectives.agree([zlib.crc32(repr(one).encode()) for one in (layout, trained, plan)])
    for name, *numbers in zip(("parameters", "trained parameters", "plan"), *rows, strict=True):
        if len(set(numbers)) > 1:
            raise ConfigError(
                f"rank {options.own.rank} of {options.own.ranks}: the ranks have other {name}. Build the same model on all."
            )
    return Slices(options.collectives, poison=options.poison)


def _bytes(part: Part) -> Tensor:
    return tensor_at(part.arena, part.arena.address, part.num_elements * part.dtype.itemsize, torch.uint8)
