"""Gradients of which a rank has a slice, from REDUCE to the update.

Code between backward and the update finds a handle as ``param.grad``
(``runtime.device.host_gradient``). Norms are those of the whole gradient: each rank sums the
squares of its slice in float64, and the sums are added in the order of the ranks, so all ranks have
the same bits. Clipping, scaling and zeroing work on the slices.

[Note: Missing gradients]
A rank whose batch has not used a parameter has no gradient of it, and counts as zeros if another
rank has one. A parameter that no rank has used keeps none, so it is not updated.

[Note: REDUCE on its lane]
The thread that computes takes a block's gradients out of the parameters as it submits REDUCE. The
lane sums them. If backward may still change the gradients on any rank (they are *early*), the op
does nothing, on all ranks, and each keeps what it has taken. The first REDUCE after backward makes
up for that. So before an update looks at gradients it waits for the block's REDUCE: from then on
all ranks know the same (:meth:`SliceGradients.are_complete`).

[Note: Sums on devices]
Where devices exchange (``Plan.gather``), REDUCE takes gradients from the parameters as above, sums
them in device memory, and leaves the slice of the sum there. The GRAD that follows it takes the
slice to the host, and adds it to what earlier batches have left. A REDUCE after backward may be one
of many blocks, so it has no GRAD: it brings each piece of the sum to the host itself.

The memory for this is taken when a plan comes into force (:meth:`SliceGradients.move_in`), so
whatever else the device holds, there is room. By the schedule slices of two blocks at most wait
for their GRAD.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_hetero._native import Ticket
from lightning_hetero.errors import HeteroError, OffloadedAccessError, UnsupportedError
from lightning_hetero.lanes.base import Event
from lightning_hetero.lanes.collectives import Collectives
from lightning_hetero.lanes.contract import Lanes
from lightning_hetero.lowering.rank_needs import EXCHANGE_BYTES
from lightning_hetero.runtime.device import DeviceSide
from lightning_hetero.runtime.device.gradients import Claim, check_dense
from lightning_hetero.runtime.device.host_gradient import HostGradient
from lightning_hetero.runtime.sum_rooms import SumRooms, piece_elements, place_bytes
from lightning_hetero.runtime.taken_gradients import TakenGradient
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.store.raw_memory import own_memory
from lightning_hetero.units import round_up


@dataclass(eq=False, slots=True)
class SliceGradient:
    """One parameter's gradient: of the elements that this rank owns, if any."""

    part: Part
    index: int  # the parameter's position in it
    exposed: bool = False  # ``param.grad`` has shown it since the last backward
    norm: float = -1.0  # of the whole gradient; negative if it is not known
    _run: Tensor | None = None  # ``None`` until the first sum has come

    @property
    def param(self) -> nn.Parameter:
        """The parameter."""
        return self.part.params[self.index]

    @property
    def run(self) -> Tensor:
        """Its elements once a sum has come to the host: flat, in the parameter's memory order.

        Raises:
            HeteroError: None has.
        """
        if self._run is None:
            raise HeteroError(f"the gradient of {self.part.names[self.index]!r} was read before its REDUCE had ended.")
        return self._run

    def add(self, run: Tensor) -> None:
        """Another batch's mean has come."""
        self._run = run if self._run is None else self._run.add_(run)
        self.norm = -1.0


_Gradients = dict[int, tuple[SliceGradient, Tensor]]  # with the whole ones of one batch, by the parameter's ``id``


@dataclass(eq=False, slots=True)
class _Taken:
    """A block's whole gradients of one batch, as REDUCE has taken them."""

    held: list[SliceGradient]
    whole: list[Tensor] | Claim  # those that leave a device are in host memory once their GRAD has ended

    def __len__(self) -> int:
        return len(self.held)

    def gradients(self) -> _Gradients:
        """They themselves, which belong to the caller from now on, until :meth:`let_go`."""
        if isinstance(self.whole, list):
            whole, self.whole = self.whole, []
        else:
            runs = zip(self.held, self.whole.gradients([held.param for held in self.held]), strict=True)
            whole = [held.part.shaped(held.index, run) for held, run in runs if run is not None]
        return {id(held.param): (held, grad) for held, grad in zip(self.held, whole, strict=True)}

    def let_go(self) -> None:
        """They have been summed."""
        if not isinstance(self.whole, list):
            self.whole.used(None)


@dataclass(eq=False, slots=True)
class _Sum:
    """A part's slice of a sum in device memory, from REDUCE to GRAD."""

    part: Part
    run: Tensor  # the slice, flat
    held: list[SliceGradient]


@dataclass(eq=False, slots=True)
class _Sums:
    """Those of a block."""

    memory: Tensor | None = None  # a place of the rooms; ``None`` where REDUCE has left nothing
    parts: list[_Sum] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Backward:
    """One backward: the lane works on it while the next one may have begun."""

    trained: Sequence[Block]  # in the order of the model
    has_ended: bool = False
    submitted: set[int] = field(default_factory=set)  # blocks whose REDUCE was
    left_compute: set[int] = field(default_factory=set)  # blocks whose gradients were taken
    lacks: bool = False  # this rank has no gradient of some parameters that train
    taken: dict[int, _Taken] = field(default_factory=dict)  # by block, until the lane sums them
    early: list[Block] = field(default_factory=list)  # the lane has left these for the end, on all ranks
    reduced: set[int] = field(default_factory=set)  # blocks whose gradients the lane has summed

    def take(self, block: Block, gradients: _Taken) -> None:
        """The block's gradients belong to the lane from now on."""
        self.left_compute.add(block.index)
        self.lacks |= len(gradients) < len(_trained(block))
        self.taken[block.index] = gradients


class SliceSource:
    """A held gradient as a handle reads and writes it (``handles.offloaded_tensor.Source``)."""

    address = None

    def __init__(self, held: SliceGradient, gradients: SliceGradients) -> None:
        self.held, self._gradients = held, gradients
        self.name = f"{held.part.names[held.index]}.grad"
        self.shape, self.dtype = held.param.shape, held.part.dtype

    def live(self) -> Tensor:
        """This rank's elements."""
        return self._gradients.run_of(self.held)

    def norm(self, order: float) -> Tensor:
        """The norm of the whole gradient; all ranks call this."""
        if order != 2.0:
            raise UnsupportedError(
                f"the norm of order {order} of {self.name!r}, which several ranks share. Allowed: 2, or clipping by value."
            )
        return torch.tensor(self._gradients.norm_of(self.held), dtype=self.dtype, device=self.held.param.device)

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
    """The gradients of one rank. The thread that computes calls it; the lane adds sums.

    ``side``: a device with memory of its own, whose gradients come to the host before REDUCE or,
    where devices exchange, after it.
    """

    on_devices = False  # see [Note: Sums on devices]

    def __init__(self, collectives: Collectives, side: DeviceSide | None = None) -> None:
        self._collectives, self._leaving = collectives, None if side is None else side.gradients
        self._lanes = None if side is None else side.lanes
        self._sums: dict[int, _Sums] = {}  # by block, from the submission of REDUCE to that of GRAD
        self._arriving: dict[int, Event] = {}  # by block: its last GRAD
        self._rooms: SumRooms | None = None  # if devices exchange
        self._held: dict[int, SliceGradient] = {}  # by the parameter's ``id``
        self._backward = _Backward(())  # the last one
        self._buffers: dict[str, Tensor] = {}  # for what is sent and received

    # ---- device memory ---------------------------------------------------------------------------

    def move_in(self, blocks: Iterable[Block]) -> None:
        """A plan comes into force, at rest: takes the device memory that sums need.

        Raises:
            DeviceMemoryError: It is not free.
        """
        self.move_out()
        if self.on_devices and self._lanes is not None:
            self._rooms = SumRooms(self._lanes, self._collectives.ranks, blocks)

    def move_out(self) -> None:
        """Gives back what :meth:`move_in` has taken, at rest."""
        if self._rooms is not None:
            self._rooms.give_back()
            self._rooms = None

    # ---- backward --------------------------------------------------------------------------------

    def begin_backward(self, blocks: Iterable[Block]) -> None:
        """Before a backward: see :meth:`conceal`. Hooks of parameters see one batch's gradients."""
        self.conceal()
        self._backward = _Backward([block for block in blocks if _trained(block)])

    def reduce(self, block: Block, *, early: bool) -> Callable[[], None]:
        """REDUCE: the block's gradients become a slice of their mean over the ranks.

        They are added to what earlier batches have left. If backward may still change them on any
        rank (``early``), nothing happens on all of them. Returns what the lane does.
        """
        backward, is_late = self._backward, self._backward.has_ended
        backward.submitted.add(block.index)
        sums = self._sums[block.index] = _Sums()
        if not early and block.index not in backward.left_compute:
            backward.take(block, self._take(block))
        has = len(backward.taken.get(block.index, ()))
        op = self._collectives.announce("REDUCE", block.index, early, has < len(_trained(block)), has > 0)

        def run() -> None:
            is_early, some_lack, some_have = self._collectives.met(op)
            while is_late and backward.early:
                self._reduce(backward, backward.early.pop(0), None, some_lack=True)
            if is_early:
                backward.early.append(block)
            elif some_have and block.index not in backward.reduced:
                self._reduce(backward, block, None if is_late else sums, some_lack=some_lack)

        return run

    def are_complete(self, block: Block) -> bool:
        """Whether backward changes the block's gradients no more, on any rank.

        All ranks know the same once the block's REDUCE has ended.
        """
        return block.index in self._backward.reduced

    def left(self, among: Collection[Block]) -> list[Block]:
        """Backward has ended: the blocks that need a REDUCE, the same ones on all ranks.

        Gradients of blocks that are not ``among`` them stay where they are.
        """
        backward = self._backward
        blocks = [block for block in backward.trained if block in among]
        if backward.has_ended or not blocks:
            return []
        backward.has_ended = True
        for block in blocks:
            if block.index not in backward.left_compute:
                backward.take(block, self._take(block))
        # One at least, because only the lane knows which were early on other ranks.
        return [block for block in reversed(blocks) if block.index not in backward.submitted] or blocks[:1]

    def _take(self, block: Block) -> _Taken:
        """The block's gradients, which leave their parameters."""
        if self._leaving is not None and not self.on_devices:
            ids = self._leaving.ids()
            found = [self._hold(part, index) for part, index in _trained(block) if id(part.params[index]) in ids]
            return _Taken(found, self._leaving.claim([held.param for held in found]))
        taken = _Taken([], whole := list[Tensor]())
        for part, index in _trained(block):
            param, name = part.params[index], part.names[index]
            with torch._C.DisableTorchFunctionSubclass():
                grad = param.grad
                if grad is None or isinstance(grad, HostGradient | TakenGradient):
                    continue
                check_dense(name, grad)
                param.grad = None
            taken.held.append(self._hold(part, index))
            whole.append(grad)
        return taken

    def _hold(self, part: Part, index: int) -> SliceGradient:
        held = self._held.setdefault(id(part.params[index]), SliceGradient(part, index))
        held.exposed = False
        return held

    @torch.no_grad()
    def _reduce(self, backward: _Backward, block: Block, sums: _Sums | None, *, some_lack: bool) -> None:
        """Sums a block's gradients, in the lane's thread; ``sums``: for a GRAD, if one follows."""
        trained, taken = _trained(block), backward.taken.pop(block.index, _Taken([], []))
        gradients = taken.gradients()
        present = [id(part.params[index]) in gradients for part, index in trained]
        if some_lack:
            rows = self._collectives.agree(present)
            present = [any(row[i] for row in rows) for i in range(len(present))]
        for part in block.parts:
            here = [index for (owner, index), there in zip(trained, present, strict=True) if owner is part and there]
            if here and self._rooms is not None and self._lanes is not None:
                self._reduce_there(part, here, gradients, sums, self._rooms, self._lanes)
            elif here:
                self._reduce_part(part, here, gradients)
        taken.let_go()
        backward.reduced.add(block.index)

    def _flats(self, part: Part, indices: Sequence[int], gradients: _Gradients, summed: list[SliceGradient]) -> dict[int, Tensor]:
        """A part's whole gradients, flat and by position; ``summed`` gets those of its slices."""
        flats = dict[int, Tensor]()
        device = self._lanes.device if self.on_devices and self._lanes is not None else torch.device("cpu")
        for index in indices:
            key = id(part.params[index])
            if key in gradients:
                held, grad = gradients.pop(key)
                flats[index] = part.flat(index, grad, part.dtype, device=device)
            else:
                held = self._held.setdefault(key, SliceGradient(part, index))
            summed.append(held)
        return flats

    def _reduce_part(self, part: Part, indices: Sequence[int], gradients: _Gradients) -> None:
        flats = self._flats(part, indices, gradients, summed := list[SliceGradient]())
        ranks, nodes = self._collectives.ranks, self._collectives.nodes
        own = own_memory(round_up(part.slice_elements, nodes), part.dtype)
        most = EXCHANGE_BYTES // (ranks * part.dtype.itemsize)
        for start in range(0, own.numel(), most * nodes):
            length = min(most, (own.numel() - start) // nodes)
            sent, received = (self._buffer(name, length * ranks, part.dtype) for name in ("sent", "received"))
            for rank, row in enumerate(sent.view(ranks, length)):
                node, shard = divmod(rank, part.own.ranks)
                _fill(row, part, flats, shard * part.slice_elements + start + node * length)
            self._collectives.reduce(own[start : start + length * nodes], sent, received, divisor=ranks)
        _add(part, own, summed)

    def _reduce_there(
        self, part: Part, indices: Sequence[int], gradients: _Gradients, sums: _Sums | None, rooms: SumRooms, lanes: Lanes
    ) -> None:
        """Sums gradients in device memory, in the order and with the rounding of the host.

        ``sums`` gets the slice, which stays there for a GRAD; without them it goes to the host.
        """
        ranks, most = self._collectives.ranks, piece_elements(part, self._collectives.ranks)
        lanes.catch_up()  # what exchanges through the host does not follow the stream
        flats = self._flats(part, indices, gradients, summed := list[SliceGradient]())
        own = own_memory(part.slice_elements, part.dtype) if sums is None else _next_slice(part, sums, rooms)
        for start in range(0, own.numel(), most):
            length = min(most, own.numel() - start)
            sent, received = rooms.exchanging(length * ranks, part.dtype)
            for rank, row in enumerate(sent.view(ranks, length)):
                _fill(row, part, flats, rank * part.slice_elements + start)
            lanes.catch_up()
            here = own[start : start + length]
            there = here if sums is not None else sent[:length]  # which has been sent
            self._collectives.reduce_on_devices(there, sent, received, rooms.total, divisor=ranks)
            if sums is None:
                here.copy_(there)
                lanes.catch_up()
        lanes.catch_up()  # the gradients go with this call
        if sums is None:
            _add(part, own, summed)
        else:
            sums.parts.append(_Sum(part, own, summed))

    def bring(self, block: Block) -> Callable[[], list[Ticket]]:
        """GRAD: what the REDUCE of the block has left on the device comes to the host."""
        sums = self._sums.pop(block.index, _Sums())

        def run() -> list[Ticket]:
            if self._rooms is not None and self._lanes is not None and sums.memory is not None:
                for found in sums.parts:
                    self._land(found, self._rooms.landing, self._lanes)
                self._rooms.give(sums.memory)
            return []

        return run

    @torch.no_grad()
    def _land(self, found: _Sum, landing: Tensor, lanes: Lanes) -> None:
        own, most = own_memory(found.run.numel(), found.part.dtype), landing.nbytes // found.part.dtype.itemsize
        for start in range(0, own.numel(), most):
            piece = found.run[start : start + most]
            landed = landing[: piece.nbytes].view(found.part.dtype)
            lanes.copy(landed, piece)
            lanes.catch_up()
            own[start : start + most].copy_(landed)
            lanes.catch_up()  # copies within a lane are its stream's
        _add(found.part, own, found.held)

    def sent(self, block: Block, event: Event) -> None:
        """The block's GRAD, of what devices have summed."""
        self._arriving[block.index] = event

    def arriving(self, *blocks: Block) -> list[Event]:
        """The GRADs that bring what these blocks have of gradients."""
        return [self._arriving[block.index] for block in blocks if block.index in self._arriving]

    def settle(self) -> None:
        """Waits until all gradients that have been submitted are sums on the host."""
        self._collectives.settle()
        for event in self._arriving.values():
            event.wait()
        self._arriving.clear()

    def _buffer(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        num_bytes = numel * dtype.itemsize
        if name not in self._buffers or self._buffers[name].nbytes < num_bytes:
            self._buffers[name] = own_memory(num_bytes, torch.uint8)
        return self._buffers[name][:num_bytes].view(dtype)

    # ---- between backward and the update ---------------------------------------------------------

    def expose(self) -> None:
        """After backward or a verdict: ``param.grad`` shows the gradients."""
        if self._backward.lacks:  # other ranks may have gradients that this one has not
            self.settle()
        for held in self._held.values():
            with torch._C.DisableTorchFunctionSubclass():
                param = held.param
                if param.grad is None:
                    param.grad = HostGradient(SliceSource(held, self), stride=param.stride(), device=param.device)
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

    def run_of(self, held: SliceGradient) -> Tensor:
        """This rank's elements of a gradient, once the lane has summed them."""
        self.settle()
        return held.run

    def norm_of(self, held: SliceGradient) -> float:
        """The norm of a whole gradient; that of all gradients is made at once."""
        self.settle()
        if held.norm < 0:
            known = (self._held.get(id(part.params[i])) for block in self._backward.trained for part, i in _trained(block))
            stale = [one for one in known if one is not None and one.norm < 0]  # in one order on all ranks
            rows = self._collectives.agree([float(self.run_of(one).double().square().sum()) for one in stale])
            rows = rows[: self._collectives.shards]  # every node has the same
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
            found[id(param)] = self._held[id(param)] if keep else self._held.pop(id(param))
        return SliceClaim(found)

    def drop(self) -> None:
        """Forgets all gradients of a step that was given up."""
        self.conceal()
        self._held.clear()
        self._sums.clear()
        if self._rooms is not None:  # an error came before some GRADs
            self._rooms.clear()
        if self._leaving is not None:
            self._leaving.drop()


class SliceClaim:
    """Gradients that belong to one update."""

    def __init__(self, held: Mapping[int, SliceGradient]) -> None:
        self._held = held

    def gradients(self, params: Iterable[nn.Parameter]) -> list[Tensor | None]:
        """The elements that this rank owns, in their parameters' memory order; they have come."""
        return [self._held[id(param)].run for param in params]

    def used(self, ticket: Ticket | None) -> None:
        """The update has the gradients; the engine keeps them until it is READY."""

    def give_up(self) -> None:
        """The update will not come; the gradients go with this object."""


def _fill(row: Tensor, part: Part, flats: Mapping[int, Tensor], first: int) -> None:
    """Fills memory with what gradients have from element ``first`` of their part on, else zeros."""
    row.zero_()
    for index, flat in flats.items():
        offset = part.offsets[index]
        begin, end = max(offset, first), min(offset + flat.numel(), first + row.numel())
        if begin < end:
            row[begin - first : end - first].copy_(flat[begin - offset : end - offset])


def _next_slice(part: Part, sums: _Sums, rooms: SumRooms) -> Tensor:
    """Memory for the part's slice, behind those that the block has there."""
    if sums.memory is None:
        sums.memory = rooms.place()
    first = sum(place_bytes(one.part) for one in sums.parts)
    return sums.memory[first : first + part.slice_elements * part.dtype.itemsize].view(part.dtype)


def _add(part: Part, own: Tensor, summed: Iterable[SliceGradient]) -> None:
    """A part's slice of a sum has come to the host."""
    for held in summed:
        start, length = part.pieces[held.index]
        held.add(own[start : start + length] if length else own[:0])


def _trained(block: Block) -> list[tuple[Part, int]]:
    """The parameters that train, by part and position."""
    return [(part, index) for part in block.parts for index, param in enumerate(part.params) if param.requires_grad]
