"""Makes room for gradients before they come, also for gradients that autograd adds up.

[Note: Sums of gradients]
A parameter that is used more than once, such as an embedding that is also the head, has several
gradients, which autograd adds up: in place, if nothing else refers to the memory of the first one.
The gradient of ``F.linear``'s weight is a view, whose base refers to it. Then three of them would
exist for a moment: both gradients and the sum. So such a gradient is detached from its base as it
is made, and two exist. The bits are the same. The budget counts one. So cached weights are released
before the last backward of a block that is not pinned, if the other one would exceed the budget.
They are fetched again as for a smaller cache.
Source: PyTorch, torch/csrc/autograd/input_buffer.cpp.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_hetero.errors import OutOfMemoryBudgetError
from lightning_hetero.runtime.context import Run
from lightning_hetero.runtime.process_memory import WORTH_IT
from lightning_hetero.runtime.residency import HostWeights
from lightning_hetero.store.live.blocks import Block
from lightning_hetero.units import MIB, format_bytes

_UNSEEN_BYTES = 1 * MIB
"""With gradients on a device, so many come until the host's memory is looked at again: that takes
microseconds."""


class GradientRoom:
    """Keeps the process within its budget during forward and backward."""

    def __init__(self, run: Run, weights: HostWeights) -> None:
        self._blocks, self._heap, self._weights = run.blocks, run.heap, weights
        self._holds_activations = run.side is None  # the host's memory does
        self._copies = 1 if run.slices is None else run.slices.collectives.shards  # a rank has a slice, and makes the whole
        self._any_time = {b.index for b in run.blocks if b.spec.pinned and b.rest is None}
        self._sized, self._coming = weights.model, dict[int, int]()  # a model, and the gradients that come with its blocks
        self._unseen_bytes = 0  # gradients since the process's memory was looked at
        self._sum_bytes: int | None = None  # the largest gradient of a pinned block that is a sum; None: not known yet

    def forward_begins(self) -> None:
        """Checks the budget as a batch begins."""
        self._unseen_bytes = _UNSEEN_BYTES
        self._heap.forward_begins(self._weights.coming_bytes())

    def backward_begins(self, loss: Tensor | None) -> None:
        """A backward begins: large gradients that it is going to add up are added in place."""
        self._heap.backward_begins()
        if loss is None or (self._sum_bytes is not None and self._sum_bytes < WORTH_IT):  # it is looked at once
            return
        sums = sums_of(loss, (p for b in self._blocks if b.spec.pinned for p in b.params()))
        self._sum_bytes = max((p.nbytes for p in sums), default=0)
        add_in_place(node for param, nodes in sums.items() if param.nbytes >= WORTH_IT for node in nodes)

    def make_room(self, block: Block) -> None:
        """The backward of a block begins: gives free memory back if its gradients may not fit."""
        coming_bytes = self._gradients_coming(block)
        self._unseen_bytes += coming_bytes
        if self._holds_activations or self._unseen_bytes >= _UNSEEN_BYTES:
            self._unseen_bytes = 0
            self._heap.check(coming_bytes)
        if self._holds_activations:
            self._refuse(self._heap.missing(coming_bytes), "backward", block)

    def reaches(self, block: Block) -> None:
        """The forward of a block begins.

        Raises:
            OutOfMemoryBudgetError: Free memory ends before the kernel has to kill the process.
        """
        if self._holds_activations:
            self._refuse(self._heap.missing(in_forward=True), "forward", block)

    def _refuse(self, missing_bytes: int, phase: str, block: Block) -> None:
        if missing_bytes:
            raise OutOfMemoryBudgetError(
                f"host memory ends in {phase}, at block {block.name!r}: {format_bytes(missing_bytes)} too little is free for the "
                f"next block. Without host_memory the plan takes what was free beside a reserve before the first batch "
                f"({format_bytes(self._weights.capacity_bytes)} of it to cache weights from disk), and this batch needs more than "
                f"the reserve. Set a smaller host_memory, use a smaller batch, or free memory."
            )

    def give_way(self, block: Block) -> None:
        """The backward begins after which only pinned blocks follow: [Note: Sums of gradients]."""
        summed = self._sum_bytes or 0
        if summed < WORTH_IT or not self._holds_activations:
            return
        coming_bytes = self._gradients_coming(block) + summed
        if self._copies == 1:
            self._weights.evict(min(summed, self._heap.lacking(coming_bytes)), spare=block)
        else:  # no rank decides alone what is cached, and the needs of ranks count sums
            self._heap.check(coming_bytes)

    def _gradients_coming(self, block: Block) -> int:
        """Bytes of gradients until the next block; those of pinned blocks come at any time."""
        model = self._weights.model
        if model is not self._sized:
            self._sized, self._coming = model, {}
        coming = self._coming.get(block.index)
        if coming is None:
            here = [block] if block.trained is None else [block, block.trained]
            rows = self._any_time.union(b.index for b in here)
            coming = self._coming[block.index] = self._copies * sum(model.blocks[index].gradient_bytes for index in rows)
        return coming


def sums_of(loss: Tensor, params: Iterable[nn.Parameter]) -> dict[nn.Parameter, Sequence[Node]]:
    """The parameters of which backward adds up several gradients, and the nodes that make them."""
    found = gradients_added(loss)
    return {param: nodes for param in params if len(nodes := found.get(id(param), ())) > 1}


def add_in_place(nodes: Iterable[Node]) -> None:
    """Has autograd add up in place what these nodes make."""
    for node in nodes:
        node.register_hook(_detached)


def _detached(made: Sequence[Tensor | None], _: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
    """The gradients that a node has made, without the tensors of which they are views."""
    if torch.is_grad_enabled():  # with create_graph=True they have a graph, and are not added in place
        return None
    return tuple(None if grad is None else grad.detach() for grad in made)


def gradients_added(loss: Tensor) -> Mapping[int, Sequence[Node]]:
    """The nodes that make each parameter's gradients in backward, by the parameter's ``id``."""
    found: defaultdict[int, list[Node]] = defaultdict(list)
    waiting = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(waiting)  # it keeps nodes alive: a node without a reference is a new Python object each time
    while waiting:
        for node, _ in (maker := waiting.pop()).next_functions:
            if (variable := getattr(node, "variable", None)) is not None:
                found[id(variable)].append(maker)
            elif node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return found
