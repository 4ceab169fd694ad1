"""A model cut into runs of equal blocks, which the relaxed programme treats as one.

[Note: Segments]
Blocks of one kind that follow each other form segments. A segment's variables are shares of its
blocks: of each placement (tiers of weights and state, lane of the update), of each policy for each
operator's output, of each policy for the blocks' inputs. What a share takes is linear in it
(:func:`.bounds.uses`), so are the bounds of time (:mod:`.bounds`) and those of memory.

Trained parts of frozen blocks would cut every run of equal blocks into single ones. So the
programme has them behind the blocks whose parts they are (:func:`arranged`). They have nothing but
updates, and a late block's update is in fewer windows of [Note: Bound] than an early one's, so what
was a lower bound of every plan still is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np

from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import TRAINED

_MOST_CUTS = 2  # from each end of a run of equal blocks
_MOST_PLACES = 12  # at which a model is cut in two; each adds about thirty rows


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRun:
    """Blocks of one kind that follow each other; see [Note: Segments].

    Attributes:
        start: The place of its first block among the :func:`arranged` ones.
        stop: The place behind its last.
        block: A block of mean times.
        least: A block of the least forward and transient bytes: what any of them needs at least.
    """

    start: int
    stop: int
    block: BlockProfile
    least: BlockProfile

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def kind(self) -> tuple[object, ...]:
        """What blocks have in common that are equal."""
        return _kind(self.block)


def arranged(model: ModelProfile) -> tuple[int, ...]:
    """The model's blocks in the order of the programme.

    Trained parts of frozen blocks come before the next other block that is pinned.
    """
    order: list[int] = []
    parts: list[int] = []
    for index, block in enumerate(model.blocks):
        if block.name.endswith(TRAINED):
            parts.append(index)
        else:
            order += [*parts, index] if block.pinned else [index]
            parts = [] if block.pinned else parts
    return (*order, *parts)


def segments(model: ModelProfile) -> tuple[BlockRun, ...]:
    """Cuts a model into segments of equal blocks, shorter ones towards both ends of the model.

    The next step needs the first blocks' updates first, and backward the last blocks' activations:
    there the windows of [Note: Bound] are narrow.
    """
    found: list[BlockRun] = []
    blocks = [model.blocks[index] for index in arranged(model)]
    for _, run in groupby(enumerate(blocks), key=lambda pair: _kind(pair[1])):
        indices = [index for index, _ in run]
        found += [_segment(blocks, indices[a:b]) for a, b in pairwise(_cuts(len(indices)))]
    return tuple(found)


def _cuts(count: int) -> list[int]:
    """0, 1, 3, 7, and so on from both ends of a run."""
    ends = {0, count}
    for power in range(1, _MOST_CUTS + 1):
        step = 2**power - 1
        if 2 * step < count:
            ends |= {step, count - step}
    return sorted(ends)


def _kind(block: BlockProfile) -> tuple[object, ...]:
    """Everything that decides what a block takes, except measured figures, which always differ."""
    stored = (block.num_params, block.num_trainable_params, block.weight_bytes, block.gradient_bytes, block.state_bytes)
    sizes = (*stored, block.in_place_bytes, block.activation_bytes, block.boundary_bytes, block.cast_bytes)
    return (*sizes, block.pinned, *((o.name, o.bytes) for o in block.operators))


def _segment(blocks: Sequence[BlockProfile], indices: Sequence[int]) -> BlockRun:
    chosen = [blocks[i] for i in indices]
    first, count = chosen[0], len(chosen)
    mean = replace(first, forward_s=sum(b.forward_s for b in chosen) / count, backward_s=sum(b.backward_s for b in chosen) / count)
    least = replace(first, forward_s=min(b.forward_s for b in chosen), transient_bytes=min(b.transient_bytes for b in chosen))
    return BlockRun(start=indices[0], stop=indices[-1] + 1, block=mean, least=least)


def places(found: Sequence[BlockRun]) -> tuple[int, ...]:
    """The segments before which a model is cut; if there are many, a selection.

    The selection has those at both ends and others at equal shares of compute.

    At the ends the windows of [Note: Bound] are narrow.
    """
    if len(found) <= _MOST_PLACES:
        return tuple(range(len(found)))
    seconds = np.cumsum([len(s) * (s.block.forward_s + s.block.backward_s) for s in found])
    ends = (0, 1, len(found) - 2, len(found) - 1)
    shares = np.linspace(0.0, seconds[-1], _MOST_PLACES - len(ends) + 2)[1:-1]
    return tuple(sorted({*ends, *np.searchsorted(seconds, shares).tolist()}))
