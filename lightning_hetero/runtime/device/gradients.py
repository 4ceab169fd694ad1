"""Gradients that leave a device for host memory, where updates on the CPU take them.

[Note: Gradients on the host]
GRAD takes ``param.grad`` of a block. From then on the gradient lies in host memory of the lanes, in
one buffer per part, in its own dtype and in the parameter's memory order. The gradients of the next
micro-batch are added there, in the same order and with the same rounding as autograd would add them
on the device. An update gives the memory of its gradients back once it is READY, and the next block
takes it, so no step allocates any.

Between backward and the update, code that reads gradients (clipping, a loss scaler, a callback)
finds a :class:`HostGradient` as ``param.grad``. torch's own functions for all gradients run on it
without bringing gradients back to the device, and give the same bits: the device computed the norms
as the gradients left, by the function that ``clip_grad_norm_`` uses. The host computes the norm of
gradients that were added up or changed there. On an accelerator its last bits can differ from those
of the device's reduction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, KeysView, Sequence
from functools import partial
from itertools import chain
from threading import Lock

import torch
from torch import Tensor, nn

from lightning_hetero._native import READY, Ticket
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.lanes.base import Event
from lightning_hetero.lanes.contract import Lanes
from lightning_hetero.runtime.device.host_gradient import Buffer, GradientSource, Held, HostGradient, run_of
from lightning_hetero.runtime.pool import Pool
from lightning_hetero.runtime.taken_gradients import TakenGradient
from lightning_hetero.store.live.blocks import Block, Part, RunLayout

_AWAY = (HostGradient, TakenGradient)  # in place of gradients that are not on the device
_Arrivals = list[tuple[Held, Tensor]]  # of one part and dtype, with gradients on the device in their parameter's order


class HostGradients:
    """The gradients of one model in host memory."""

    def __init__(self, lanes: Lanes, *, norm_type: float | None = None) -> None:
        self.norm_type = norm_type  # order of the norms that the device computes as gradients leave it, if any
        self.pool = Pool(lanes.host_buffer)
        self._lanes = lanes
        self._held: dict[int, Held] = {}  # by the parameter's id
        self._buffers: dict[tuple[Part, torch.dtype], Buffer] = {}
        self._leaving: list[Buffer] = []  # of updates that were not READY when last polled
        self._sent: dict[int, Event] = {}  # by the block's index: its last GRAD
        self._hooked: set[int] = set()  # blocks, by index, whose sums hooks see in the backward under way
        self._waited = False  # updates of the last batch waited for all gradients
        self._lock = Lock()

    def begin_batch(self, *, waits: bool) -> None:
        """A batch begins; ``waits``: its updates wait, so that it needs memory for all gradients.

        A batch that does not gives up the memory of one that did: the budget has it for weights.
        """
        if self._waited and not waits:
            self.pool.renew()
        self._waited = waits

    # ---- GRAD ------------------------------------------------------------------------------------

    def take(self, block: Block, *, shown: bool = False) -> Callable[[], list[Ticket]]:
        """GRAD: takes the gradients of the block's backward, and leaves ``param.grad = None``.

        The op of its run waits for a mark, and for the update whose memory it takes.

        ``shown``: no update follows in this backward, whose hooks may use them as ``param.grad``.
        """
        arrivals: list[_Arrivals] = []
        for part in block.parts:
            grads = grads_of(part)
            of_part: defaultdict[torch.dtype, list[tuple[int, Tensor]]] = defaultdict(list)
            with torch._C.DisableTorchFunctionSubclass():  # handles would answer in Python
                for index, (param, grad) in enumerate(zip(part.params, grads, strict=True)):
                    if grad is None or type(grad) in _AWAY:  # a backward outside the schedule has added to it there
                        continue
                    if grad.layout is not torch.strided:
                        check_dense(part.names[index], grad)
                    if grad.numel():  # without elements it stays where clipping counts it
                        param.grad = None
                        if (held := self._held.get(id(param))) is not None and held.exposed:  # a hook has replaced it
                            self._drop(held)
                        of_part[grad.dtype].append((index, grad))
            arrivals += [self._take_part(part, rows) for rows in of_part.values()]
        for held, _ in chain.from_iterable(arrivals) if shown else ():
            self._show(held)
        return partial(self._receive, arrivals)

    def sent(self, block: Block, event: Event) -> None:
        """The block's GRAD, or the update that reads its gradients; other readers wait for it."""
        self._sent[block.index] = event

    def _take_part(self, part: Part, rows: list[tuple[int, Tensor]]) -> _Arrivals:
        norms: Sequence[Tensor | None] = [None] * len(rows)
        # Norms are taken before the copy, because another memory order may add in another order.
        if self.norm_type is not None:
            with torch.no_grad():
                norms = torch._foreach_norm([grad for _, grad in rows], self.norm_type)
        arrivals = []
        for (index, grad), norm in zip(rows, norms, strict=True):
            param = part.params[index]
            held = self._held.get(id(param))
            if held is not None:
                held.norm = None
            else:
                known = None if norm is None or self.norm_type is None else (self.norm_type, norm)
                held = self._held[id(param)] = Held(part, index, param, grad.dtype, known)
            layout = part.layouts[index]
            if grad.stride() != layout.stride:  # which is rare
                grad = _arranged(layout, grad)
            arrivals.append((held, grad))
        return arrivals

    def _receive(self, arrivals: list[_Arrivals]) -> list[Ticket]:
        self._collect()
        for rows in arrivals:
            part, dtype = rows[0][0].part, rows[0][1].dtype
            rows = [(held, grad.as_strided((grad.numel(),), (1,))) for held, grad in rows]
            more = [(held.buffer, held.index, grad) for held, grad in rows if held.buffer is not None]
            new = [(held, grad) for held, grad in rows if held.buffer is None]
            if new:
                buffer = self._buffer(part, dtype, len(new))
                runs = part.runs(buffer.memory.view(dtype))
                for held, _ in new:
                    held.buffer = buffer
                self._lanes.copies([runs[held.index] for held, _ in new], [grad for _, grad in new])
            if more:
                self._add(part, dtype, more)
        arrivals.clear()  # the copies keep the gradients on the device now
        return []

    def _buffer(self, part: Part, dtype: torch.dtype, holds: int) -> Buffer:
        """The buffer of the part's gradients, for some more of them."""
        with self._lock:
            buffer = self._buffers.get((part, dtype))
            if buffer is None:
                buffer = self._buffers[part, dtype] = Buffer(self.pool.take(part.num_elements * dtype.itemsize))
            buffer.holds += holds
        return buffer

    def _add(self, part: Part, dtype: torch.dtype, rows: list[tuple[Buffer, int, Tensor]]) -> None:
        """Adds another micro-batch's gradients, through one more buffer."""
        num_bytes = part.num_elements * dtype.itemsize
        passing = self.pool.take(num_bytes)
        runs = part.runs(passing.view(dtype))
        values = [runs[index] for _, index, _ in rows]
        self._lanes.copies(values, [grad for _, _, grad in rows])
        self._lanes.catch_up()  # the host adds
        for value, (buffer, index, _) in zip(values, rows, strict=True):
            run_of(part, index, buffer.memory.view(dtype)).add_(value)
        self.pool.give(num_bytes, passing)

    # ---- the update ------------------------------------------------------------------------------

    def ids(self) -> KeysView[int]:
        """The parameters whose gradient has left the device, or is leaving, by ``id``."""
        return self._held.keys()

    def are_left(self, block: Block) -> bool:
        """Whether the block has gradients on the device that GRAD would take."""
        for grad in chain.from_iterable(map(grads_of, block.parts)):
            if grad is not None and type(grad) not in _AWAY and grad.numel():
                return True
        return False

    def claim(self, params: Iterable[nn.Parameter], *, keep: bool = False) -> Claim:
        """An update is issued for these gradients, which belong to it even before GRAD has ended.

        ``keep``: they can be read after the update too, until they are dropped.
        """
        held = [h for p in params if (h := self._held.get(id(p))) is not None]
        with torch._C.DisableTorchFunctionSubclass():
            for one in held:
                one.claimed = keep
                if not keep:
                    del self._held[id(one.param)]
                    if type(one.param.grad) is HostGradient:
                        one.param.grad = None
        return Claim(self, held)

    def _used(self, held: Iterable[Held], ticket: Ticket | None) -> None:
        with self._lock:
            for one in held:
                keeps, one.claimed = one.claimed and not one.dropped, False
                if one.buffer is not None and ticket is not None and ticket not in one.buffer.readers:
                    one.buffer.readers.append(ticket)
                if one.buffer is not None and not keeps:
                    self._release(one, one.buffer)
        self._collect()

    def _give_up(self, held: Iterable[Held]) -> None:
        for one in held:
            with self._lock:
                was_claimed, one.claimed = one.claimed, False
                if was_claimed and one.dropped and one.buffer is not None:
                    self._release(one, one.buffer)

    def _release(self, held: Held, buffer: Buffer) -> None:
        buffer.holds -= 1
        if not buffer.holds:
            del self._buffers[held.part, held.dtype]
            self._leaving.append(buffer)

    def _drop(self, held: Held) -> None:
        """Forgets one gradient. An update that has claimed it keeps its memory."""
        if held.buffer is None and not held.claimed:
            self.wait(held.part.block)
        del self._held[id(held.param)]
        with self._lock:
            held.dropped = True
            if not held.claimed and held.buffer is not None:
                self._release(held, held.buffer)
        self._collect()

    def _collect(self) -> None:
        """Gives memory back that no update reads any more."""
        with self._lock:
            for buffer in self._leaving:
                buffer.readers = [ticket for ticket in buffer.readers if ticket.poll() < READY]
            free = [b for b in self._leaving if not b.readers]
            self._leaving = [b for b in self._leaving if b.readers]
        for buffer in free:
            self.pool.give(buffer.memory.numel(), buffer.memory)

    # ---- readers outside the schedule ------------------------------------------------------------

    def expose(self) -> None:
        """After backward or a verdict: ``param.grad`` shows the gradients on the host."""
        for held in list(self._held.values()):  # updates on the CPU may take some meanwhile
            with torch._C.DisableTorchFunctionSubclass():
                is_none = held.param.grad is None
            if is_none and held.exposed:  # a hook has dropped it in backward
                self._drop(held)
            elif is_none:
                self._show(held)

    def _show(self, held: Held) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            param = held.param
            param.grad = HostGradient(GradientSource(held, self.wait), stride=param.stride(), device=param.device)
            held.exposed = True

    def begin_backward(self, blocks: Iterable[Block]) -> None:
        """Before a backward adds to gradients: see :meth:`conceal`.

        Hooks of parameters and of modules see sums in PyTorch. So sums of blocks with hooks go back
        to the device before the block's backward.
        """
        self.conceal()
        self._hooked = {block.index for block in blocks if self._held and _has_hooks(block)}
        for block in blocks:
            if block.spec.pinned:  # its backward has no anchor
                self.give_back(block)

    @torch.no_grad()
    def give_back(self, block: Block) -> None:
        """The block's backward begins: if it has hooks, its sums become gradients on the device."""
        if block.index not in self._hooked:
            return
        self._hooked.discard(block.index)
        for held in [self._held[id(p)] for p in block.params() if id(p) in self._held]:
            self.wait(block)
            with torch._C.DisableTorchFunctionSubclass():
                param = held.param
                total = torch.empty_strided(param.shape, param.stride(), dtype=held.dtype, device=param.device)
                total.copy_(held.value())
                param.grad = total if param.grad is None else total.add_(param.grad)
            self._drop(held)

    @torch.no_grad()
    def conceal(self) -> None:
        """Before a backward and before the updates of a verdict: undoes :meth:`expose`.

        A gradient that was dropped meanwhile (``zero_grad``) is dropped here too; one that was
        replaced is copied.
        """
        for held in [h for h in list(self._held.values()) if h.exposed]:
            held.exposed = False
            with torch._C.DisableTorchFunctionSubclass():
                grad, held.param.grad = held.param.grad, None
            if grad is None:
                self._drop(held)
            elif type(grad) is not HostGradient:
                check_dense(held.part.names[held.index], grad)
                self.wait(held.part.block)
                self._lanes.copy(held.value(), grad)
                held.norm = None

    def arriving(self, block: Block) -> tuple[Event, ...]:
        """The events that :meth:`wait` waits for."""
        event = self._sent.get(block.index)
        return () if event is None else (event,)

    def wait(self, block: Block) -> None:
        """Waits until the block's gradients are in host memory, and no update is reading them."""
        for event in self.arriving(block):
            event.wait()

    def drop(self) -> None:
        """Forgets all gradients of a step that was given up. The lanes are drained."""
        self._held.clear()
        with self._lock:
            self._leaving += self._buffers.values()
            self._buffers.clear()
        self._sent.clear()
        self._collect()

    def close(self, blocks: Iterable[Block]) -> None:
        """Ends the run: kept gradients, which lie in memory of the lanes, go with it."""
        for block in blocks:
            for param in block.params():
                if type(param.grad) is HostGradient:
                    param.grad = None
        self.drop()
        self.pool.close()


class Claim:
    """Gradients that belong to one update. Thread-safe."""

    def __init__(self, gradients: HostGradients, held: Sequence[Held]) -> None:
        self._gradients, self._held = gradients, {id(h.param): h for h in held}

    def __contains__(self, param: object) -> bool:
        return id(param) in self._held

    def gradients(self, params: Iterable[nn.Parameter]) -> list[Tensor | None]:
        """The gradients in host memory once GRAD has ended: flat, in their parameters' order.

        ``None`` for parameters whose gradient does not belong to the update.
        """
        found: list[Tensor | None] = []
        runs: dict[Buffer, Sequence[Tensor]] = {}
        for param in params:
            held = self._held.get(id(param))
            if held is None:
                found.append(None)
                continue
            buffer = held.arrived()
            if buffer not in runs:
                runs[buffer] = held.part.runs(buffer.memory.view(held.dtype))
            found.append(runs[buffer][held.index])
        return found

    def used(self, ticket: Ticket | None) -> None:
        """The update has the gradients: their memory is free once ``ticket``, if any, is READY."""
        self._gradients._used(self._held.values(), ticket)

    def give_up(self) -> None:
        """The update will not come, unless it has; kept gradients stay until they are dropped."""
        self._gradients._give_up(self._held.values())


def check_dense(name: str, grad: Tensor) -> None:
    """Refuses a gradient that is not dense.

    Raises:
        UnsupportedError: It is sparse.
    """
    if grad.layout is not torch.strided:
        raise UnsupportedError(
            f"the gradient of {name!r} is {grad.layout}; only dense gradients can be updated out of core. Build the layer with "
            f"sparse=False."
        )


def grads_of(part: Part) -> list[Tensor | None]:
    """The gradients of a part's parameters; for handles without a call of Python each."""
    with torch._C.DisableTorchFunctionSubclass():
        return [param.grad for param in part.params]


@torch.no_grad()
def _arranged(layout: RunLayout, grad: Tensor) -> Tensor:
    """A gradient in the parameter's memory order."""
    return torch.empty_strided(layout.shape, layout.stride, dtype=grad.dtype, device=grad.device).copy_(grad)


def _has_hooks(block: Block) -> bool:
    """Whether code sees the block's gradients in backward, beside the runtime's own hook."""
    if any(module._backward_hooks or module._backward_pre_hooks for module in block.spec.module.modules()):
        return True
    with torch._C.DisableTorchFunctionSubclass():
        return any(p._backward_hooks or len(p._post_accumulate_grad_hooks or ()) > 1 for p in block.params())
