"""Room for gradients before they come, also for those that autograd adds up.

[Note: Sums of gradients]
A parameter that is used more than once, as an embedding that is also the head, has several gradients, which autograd adds up. While
it does, up to three are there: what has been added before, what is new, and the sum (it adds in place only where nothing else
refers to the storage). The budget counts one. So before the backward of the last block, which those of pinned blocks follow,
cached weights go where the others would exceed the budget; they are fetched again as for a smaller cache.
Source: PyTorch, torch/csrc/autograd/input_buffer.cpp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_hetero._native import DONE, Ticket
from lightning_hetero.runtime.heap import WORTH_IT, Heap
from lightning_hetero.runtime.ops import EngineOps
from lightning_hetero.store.live.blocks import Block


class RoomForGradients(EngineOps):
    """Keeps the process within its budget during backward.

    Args:
        blocks: As for :class:`EngineOps`.
        heap: Gives free memory back when the process exceeds its budget.
        **common: As for :class:`EngineOps`.
    """

    def __init__(self, blocks: Sequence[Block], *, heap: Heap, **common: Any) -> None:
        super().__init__(blocks, **common)
        self.heap = heap
        self._sum_bytes: int | None = None  # the largest gradient of a pinned block that is a sum; None: not known yet

    def learn_sums(self, loss: Tensor) -> None:
        """Looks, once, at what a backward is going to add up."""
        if self._sum_bytes is None and self.capacity_bytes:
            self._sum_bytes = largest_sum(loss, (p for b in self.blocks if b.spec.pinned for p in b.params()))

    def weights_coming(self) -> int:
        """What forward may fetch: the cache is filled again, and finds no room in what malloc has kept of gradients."""
        return max(0, self.capacity_bytes - sum(self.model.blocks[b.index].weight_bytes for b in self._cached()))

    def _cached(self) -> list[Block]:
        return [b for b in self.blocks if b.resident and b.weights_on_disk]

    def make_room(self, block: Block) -> None:
        """The backward of a block begins: free memory that it may not find goes back first."""
        self.heap.check(self._gradients_coming(block))

    def give_way(self, block: Block) -> None:
        """The backward of the last block but for pinned ones begins; see [Note: Sums of gradients]."""
        summed = self._sum_bytes or 0
        if summed >= WORTH_IT:
            self._evict(min(2 * summed, self.heap.lacking(self._gradients_coming(block) + summed)), spare=block)

    def _gradients_coming(self, block: Block) -> int:
        """What backward may allocate for gradients until it reaches the next block; those of pinned blocks come at any time."""
        return sum(b.gradient_bytes for i, b in enumerate(self.model.blocks) if b.pinned or i == block.index)

    def _evict(self, num_bytes: int, *, spare: Block) -> None:
        """Gives weights back that live on disk and are not in use, those first that the next forward needs last."""
        tickets: list[Ticket] = []
        for victim in reversed(self._cached()):
            if num_bytes > 0 and victim is not spare and not victim.uses:
                num_bytes -= self.model.blocks[victim.index].weight_bytes
                tickets += self.release(victim)
        for ticket in tickets:
            ticket.wait(DONE)


def largest_sum(loss: Tensor, params: Iterable[nn.Parameter]) -> int:
    """Bytes of the largest gradient of these parameters that the backward from ``loss`` adds up; 0 if it adds up none."""
    counts = gradients_added(loss)
    return max((p.numel() * p.element_size() for p in params if counts[id(p)] > 1), default=0)


def gradients_added(loss: Tensor) -> Counter[int]:
    """How many gradients the backward from a tensor adds up for each parameter, by its ``id``."""
    found: Counter[int] = Counter()
    waiting: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(waiting)  # and kept alive: a node that nobody holds is a new Python object each time
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if (variable := getattr(node, "variable", None)) is not None:
                found[id(variable)] += 1
            elif node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return found
