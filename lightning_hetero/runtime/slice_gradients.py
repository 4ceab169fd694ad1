"""Gradients of which a rank has a slice, from REDUCE to the update.

Code between backward and the update finds a handle as ``param.grad``
(``runtime.device.host_gradient``). Norms are those of the whole gradient: each rank sums the
squares of its slice in float64, and the sums are added in the order of the ranks, so all ranks have
the same bits. Clipping, scaling and zeroing work on the slices.

[Note: Missing gradients]
A rank whose batch has not used a parameter has no gradient of it, and counts as zeros if another
rank has one. A parameter that no rank has used keeps none, so it is not updated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, KeysView, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_hetero._native import Ticket
from lightning_hetero.errors import OffloadedAccessError, UnsupportedError
from lightning_hetero.lanes.collectives import Collectives
from lightning_hetero.runtime.device.gradients import check_dense, grads_of
from lightning_hetero.runtime.device.host_gradient import HostGradient
from lightning_hetero.store.live.blocks import Block, Part


@dataclass(eq=False, slots=True)
class SliceGradient:
    """One parameter's gradient: of the elements that this rank owns, if any."""

    part: Part
    index: int  # the parameter's position in it
    run: Tensor  # flat, in the parameter's memory order
    exposed: bool = False  # ``param.grad`` has shown it since the last backward
    norm: float = -1.0  # of the whole gradient; negative if it is not known

    @property
    def param(self) -> nn.Parameter:
        """The parameter."""
        return self.part.params[self.index]


class SliceSource:
    """A held gradient as a handle reads and writes it (``handles.offloaded_tensor.Source``)."""

    address = None

    def __init__(self, held: SliceGradient, gradients: SliceGradients) -> None:
        self.held, self._gradients = held, gradients
        self.name = f"{held.part.names[held.index]}.grad"
        self.shape, self.dtype = held.param.shape, held.run.dtype

    def live(self) -> Tensor:
        """This rank's elements."""
        return self.held.run

    def norm(self, order: float) -> Tensor:
        """The norm of the whole gradient; all ranks call this."""
        if order != 2.0:
            raise UnsupportedError(
                f"the norm of order {order} of {self.name!r}, which several ranks share. Allowed: 2, or clipping by value."
            )
        return torch.tensor(self._gradients.norm_of(self.held), dtype=self.dtype)

    def read(self) -> Tensor:
        """Refuses: no rank has it.

        Raises:
            OffloadedAccessError: Always.
        """
        raise OffloadedAccessError(
            f"{self.name!r} is spread over {self.held.part.own.ranks} ranks, so its values cannot be read. Its norm can."
        )

    def changed(self) -> None:
        """The content has changed."""
        self.held.norm = -1.0

    def anywhere(self, found: Tensor) -> Tensor:
        """The largest number that any rank has found; all ranks call this."""
        return self._gradients.largest(found)

    def write(self, value: Tensor) -> None:
        """Refuses, as :meth:`read`."""
        self.read()


class SliceGradients:
    """The gradients of one rank. Only the thread that computes calls it."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._held: dict[int, SliceGradient] = {}  # by the parameter's ``id``
        self._reduced: set[int] = set()  # blocks whose gradients are complete in the backward under way
        self._buffers: dict[str, Tensor] = {}  # for what is sent and received, as large as the largest part

    # ---- backward --------------------------------------------------------------------------------

    def begin_backward(self, blocks: Iterable[Block]) -> None:
        """Before a backward: see :meth:`conceal`. Hooks of parameters see one batch's gradients."""
        self.conceal()
        self._reduced.clear()

    def reduce(self, block: Block, *, early: bool) -> None:
        """REDUCE: the block's gradients become a slice of their mean over the ranks.

        They are added to what earlier batches have left. If backward may still change them on any
        rank (``early``), nothing happens on all of them.
        """
        trained = [(part, i) for part in block.parts for i, p in enumerate(part.params) if p.requires_grad]
        present = [part.params[i].grad is not None for part, i in trained]
        is_early, some_lack = self._collectives.meet("REDUCE", block.index, early, not all(present))
        if is_early:
            return
        self._reduced.add(block.index)
        if not trained:
            return
        if some_lack:
            rows = self._collectives.agree(present)
            present = [any(row[i] for row in rows) for i in range(len(present))]
        for part in block.parts:
            here = [i for (owner, i), there in zip(trained, present, strict=True) if owner is part and there]
            if here:
                self._reduce(part, here)

    def are_complete(self, block: Block) -> bool:
        """Whether backward changes the block's gradients no more, on any rank."""
        return block.index in self._reduced

    def reduce_rest(self, blocks: Sequence[Block]) -> None:
        """Backward has ended: reduces all blocks that have whole gradients on any rank."""
        rows = self._collectives.agree([_has_whole(block) for block in blocks])
        for block, *left in zip(blocks, *rows, strict=True):
            if any(left):
                self.reduce(block, early=False)

    @torch.no_grad()
    def _reduce(self, part: Part, indices: Sequence[int]) -> None:
        whole, received = (self._buffer(name, part) for name in ("sent", "received"))
        whole.zero_()
        runs = part.runs(whole)
        for index, grad in enumerate(grads_of(part)):
            if index in indices and grad is not None:
                check_dense(part.names[index], grad)
                part.shaped(index, runs[index]).copy_(grad)
        own = torch.empty(part.slice_elements, dtype=part.dtype)
        self._collectives.reduce(own, whole, received, divisor=part.own.ranks)
        for index in indices:
            param, (start, length) = part.params[index], part.pieces[index]
            run = own[start : start + length] if length else own[:0]
            param.grad = None
            held = self._held.get(id(param))
            if held is None:
                self._held[id(param)] = SliceGradient(part, index, run)
            else:
                held.run.add_(run)
                held.norm = -1.0

    def _buffer(self, name: str, part: Part) -> Tensor:
        num_bytes = part.num_elements * part.dtype.itemsize
        if name not in self._buffers or self._buffers[name].nbytes < num_bytes:
            self._buffers[name] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffers[name][:num_bytes].view(part.dtype)

    # ---- between backward and the update ---------------------------------------------------------

    def expose(self) -> None:
        """After backward or a verdict: ``param.grad`` shows the gradients."""
        for held in self._held.values():
            with torch._C.DisableTorchFunctionSubclass():
                param = held.param
                if param.grad is None:
                    param.grad = HostGradient(SliceSource(held, self), stride=param.stride())
                    held.exposed = True

    def conceal(self) -> None:
        """Before a backward and before the updates of a verdict: undoes :meth:`expose`.

        A gradient that was dropped meanwhile (``zero_grad``) is dropped here too.

        Raises:
            UnsupportedError: Code has replaced one.
        """
        for key, held in list(self._held.items()):
            if not held.exposed:
                continue
            held.exposed = False
            with torch._C.DisableTorchFunctionSubclass():
                grad, held.param.grad = held.param.grad, None
            if grad is None:
                del self._held[key]
            elif type(grad) is not HostGradient:
                raise UnsupportedError(
                    f"{held.part.names[held.index]!r} got another gradient after backward; it is spread over "
                    f"{held.part.own.ranks} ranks. Change it in place, or in a hook of the parameter."
                )

    def norm_of(self, held: SliceGradient) -> float:
        """The norm of a whole gradient; that of all gradients is made at once."""
        if held.norm < 0:
            stale = [one for one in self._held.values() if one.norm < 0]
            rows = self._collectives.agree([float(one.run.double().square().sum()) for one in stale])
            for one, *squares in zip(stale, *rows, strict=True):
                one.norm = math.sqrt(sum(squares))
        return held.norm

    def largest(self, found: Tensor) -> Tensor:
        """The largest number of those that the ranks have."""
        return torch.full_like(found, max(number for (number,) in self._collectives.agree([float(found)])))

    # ---- the update ------------------------------------------------------------------------------

    def ids(self) -> KeysView[int]:
        """The parameters that have a reduced gradient, by ``id``."""
        return self._held.keys()

    def claim(self, params: Iterable[nn.Parameter], *, keep: bool = False) -> SliceClaim:
        """An update is issued for these gradients; ``keep``: they can be read after it, too."""
        found = {}
        for param in params:
            held = self._held[id(param)] if keep else self._held.pop(id(param))
            found[id(param)] = held.run
        return SliceClaim(found)

    def drop(self) -> None:
        """Forgets all gradients of a step that was given up."""
        self.conceal()
        self._held.clear()


class SliceClaim:
    """Gradients that belong to one update."""

    def __init__(self, runs: dict[int, Tensor]) -> None:
        self._runs = runs

    def gradients(self, params: Iterable[nn.Parameter]) -> list[Tensor | None]:
        """The elements that this rank owns, in their parameters' memory order."""
        return [self._runs[id(param)] for param in params]

    def used(self, ticket: Ticket | None) -> None:
        """The update has the gradients; the engine keeps them until it is READY."""

    def give_up(self) -> None:
        """The update will not come; the gradients go with this object."""


def _has_whole(block: Block) -> bool:
    """Whether backward has left gradients that no REDUCE has taken."""
    with torch._C.DisableTorchFunctionSubclass():
        return any(p.grad is not None and type(p.grad) is not HostGradient for p in block.params())
