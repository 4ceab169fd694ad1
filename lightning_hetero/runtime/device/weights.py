"""Device memory of weights: where copies are, and which one is the newest.

[Note: Copies of weights]
A part's weights have a fixed place in host memory (``Part.memory``), where updates on the CPU write
them. On the device they are one run of memory with the same layout, permanently or from UPLOAD to
RELEASE. ``param.data`` is a view of that run while the block is open. Afterwards it still points
there, although the memory may be reused. The parameter is a handle then, which keeps readers away.

Usually both places agree. The device has newer weights (*changed*) after an update on the device,
and after user code wrote to an open parameter, as version counters show. The host has newer ones
(the copy is *outdated*) after an update on the CPU, and after a write through a handle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import dlpack

from lightning_hetero._native import Ticket
from lightning_hetero.errors import HeteroError, OffloadedAccessError
from lightning_hetero.lanes.contract import Lanes
from lightning_hetero.runtime.device.references import BoundWeights, absent
from lightning_hetero.store.live.blocks import Block, Moved, Part
from lightning_hetero.store.live.geometry import own_versions, versions
from lightning_hetero.store.live.mirrors import writes_of
from lightning_hetero.store.live.moved_weights import bring_back
from lightning_hetero.store.raw_memory import set_data

_KEPT_PLACES = 4  # of each part: a step that is like the last one gets the same memory again


class _Place(NamedTuple):
    """A run of device memory as a part lies in it."""

    flat: Tensor  # as one run of the part's dtype
    runs: Sequence[Tensor]  # the parameters, flat
    views: list[Tensor]  # the parameters, each with its own storage, as ``torch.save`` needs
    addresses: list[int]  # of these


@dataclass(slots=True)
class _Copy:
    memory: Tensor  # the run, as bytes
    flat: Tensor
    runs: Sequence[Tensor]
    views: list[Tensor]  # the parameters as they lie there
    addresses: list[int]  # of these
    kept: bool  # it stays there
    versions: int  # the parameters' version counters when host and device agreed last
    newer: bool = False  # an update on the device has changed it, or there is no other copy
    outdated: bool = False  # the host has newer weights
    written: bool = False  # they were written through a handle, outside any schedule
    bound: bool = False  # the parameters are views of it


class DeviceWeights:
    """The weights of one model on a device with memory of its own."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._copies: dict[Part, _Copy] = {}
        self._places: dict[Part, dict[int, _Place]] = {}  # where it was lately, by address; until it leaves the device
        self._bound = BoundWeights(lanes.device, self.bytes_from)
        self.reference = self._bound.reference  # what autograd saves for a tensor in open weights

    # ---- a session's begin and end ---------------------------------------------------------------

    def prepare(self, block: Block) -> None:
        """The block's weights live below the device: :meth:`bind` gives its parameters content."""
        memory = self._lanes.memory()
        for part in block.parts:
            if not block.weights_on_disk:
                self._lanes.page_lock(part.run)
            run = memory.take(_num_bytes(part), f"weights of {block.name}")
            _assign_all(part, self._place(part, run).views)
            memory.give(run)

    def bind_resident(self, block: Block, *, host_copy: bool) -> None:
        """Moves the block's weights from host memory to the device, to stay.

        With ``host_copy`` updates on the CPU write the host's copy; else its pages are given back.
        """
        for part in block.parts:
            copy = self._take(part, kept=True)
            copy.newer = not host_copy
            self._lanes.copy(copy.flat, part.run)
            self._bind(part, copy)
            if host_copy:
                self._lanes.page_lock(part.run)
            else:
                for ticket in writes_of(part):
                    ticket.wait()
                part.arena.drop()

    def withdraw(self, block: Block) -> None:
        """Undoes :meth:`prepare` and :meth:`bind_resident`: parameters are views of host memory.

        It has the newest weights. Nothing of the block is under way. Weights on disk stay there.
        """
        for part in block.parts:
            self._reclaim(part)
            if (copy := self._newer(part)) is not None:
                self._lanes.copy(part.run, copy.flat)
                self._agree(copy, own_versions(part))
            self._unbind(part)
            self._free(part)
            self._places.pop(part, None)
            self._lanes.page_unlock(part.run)  # its next plan may give the pages back
            _assign_all(part, [part.memory(i) for i in range(len(part.params))])

    # ---- ops -------------------------------------------------------------------------------------

    def upload(self, block: Block) -> list[Ticket]:
        """UPLOAD weights (run on ``h2d``, after their FETCH or UPDATE): copies them to the device.

        Weights that are there already are renewed in their place; for others memory is taken.
        """
        for part in block.parts:
            if self._newer(part) is not None:
                continue  # user code has written to the device's weights since the update
            copy = self._copies.get(part) or self._take(part, kept=False)
            seen = own_versions(part)
            self._lanes.copy(copy.flat, part.run)
            self._agree(copy, seen)
        return []

    def upload_slice(self, block: Block) -> list[Ticket]:
        """UPLOAD weights where devices exchange: copies this rank's slice to its place there."""
        for part in block.parts:
            copy = self._copies.get(part) or self._take(part, kept=False)
            self._lanes.copy(_own(part, copy.flat), part.slice_run)
        return []

    def gather(self, block: Block, exchange: Callable[[Tensor, Tensor], None]) -> None:
        """GATHER (run on ``peer``, after UPLOAD): the devices give each other their slices.

        ``exchange`` makes the whole from the slices of all of them.
        """
        self._lanes.catch_up()  # exchanges through the host read the memory at once
        for part in block.parts:
            copy, seen = self._copies[part], own_versions(part)
            exchange(copy.flat, _own(part, copy.flat))
            self._agree(copy, seen)
        self._lanes.catch_up()

    def free(self, block: Block) -> list[Ticket]:
        """RELEASE weights (run on ``h2d``, after a mark behind the last use): frees the memory."""
        for part in block.parts:
            self._free(part)
        return []

    def download(self, block: Block) -> list[Ticket]:
        """SWAP_OUT weights (run on ``d2h``, after a mark behind the UPDATE): copies to the host.

        Before a RELEASE or an update on the CPU, it copies changes of user code: :meth:`changed`.
        """
        for part in block.parts:
            seen = own_versions(part)
            if self.lend(part):
                self._agree(self._copies[part], seen)
                part.dirty |= block.weights_on_disk
        return []

    def keep_own(self, block: Block) -> None:
        """Code has changed the weights: copies the slices that this rank owns to the host."""
        for part in block.parts:
            if (copy := self._newer(part)) is not None:
                self._lanes.copy(part.slice_run, _own(part, copy.flat))
                part.master_versions = -1  # no version counter has seen this write
                part.dirty |= block.weights_on_disk

    def lend(self, part: Part) -> bool:
        """Copies the part to host memory if the device's weights are newer; returns whether."""
        if (copy := self._newer(part)) is None:
            return False
        for ticket in writes_of(part):  # they read host memory
            ticket.wait()
        self._lanes.copy(part.run, copy.flat)
        return True

    # ---- between ops -----------------------------------------------------------------------------

    def holds(self, block: Block) -> bool:
        """Whether the block's weights are on the device, or on their way."""
        return all([part in self._copies for part in block.parts])  # noqa: C419  # one call, not one each

    def bind(self, block: Block) -> None:
        """Makes the parameters views of the block's device memory; compute has waited for it.

        Raises:
            OffloadedAccessError: The weights are not on the device.
        """
        for part in block.parts:
            copy = self._copies.get(part)
            if copy is None:
                raise OffloadedAccessError(
                    f"the weights of {block.name!r} are not on {self._lanes.device}: the block was used without an UPLOAD before "
                    f"it. Read them inside their own block's forward, or within `with strategy.materialize(...)`."
                )
            if copy.written:  # since the UPLOAD; the next UPLOAD brings the results of an UPDATE
                if not block.resident:
                    raise HeteroError(f"{block.name!r} got new weights on disk; they are fetched before the block is bound.")
                self._lanes.copy(copy.flat, part.run)
                self._agree(copy, own_versions(part))
            self._bind(part, copy)

    def unbind(self, block: Block) -> None:
        """After :meth:`changed`: the parameters' memory may be reused until the next :meth:`bind`.

        Until then they are handles.
        """
        for part in block.parts:
            copy = self._copies.get(part)
            if copy is not None and not copy.kept:
                self._unbind(part)

    def is_outdated(self, block: Block) -> bool:
        """Whether the host has newer weights than the device's copy."""
        return any(copy.outdated for copy in self._copies_of(block))

    def is_written(self, block: Block) -> bool:
        """Whether the host has newer weights that were written through a handle."""
        return any(copy.written for copy in self._copies_of(block))

    def written_blocks(self) -> list[Block]:
        """The blocks of which that is so."""
        return list({part.block.index: part.block for part, copy in list(self._copies.items()) if copy.written}.values())

    def changed(self, block: Block) -> bool:
        """Whether the device has newer weights than the host.

        If so, :meth:`download` comes before a RELEASE and before an update on the CPU. Weights that
        were moved with ``param.data = ...`` are copied back into the device memory first.
        """
        self.reclaim(block)
        return any([self._newer(part) is not None for part in block.parts])  # noqa: C419  # as in :meth:`holds`

    def reclaim(self, block: Block) -> None:
        """Copies weights that were moved with ``param.data = ...`` back into the device memory."""
        for part in block.parts:
            self._reclaim(part)

    def is_user_written(self, block: Block) -> bool:
        """After :meth:`changed`: whether user code has changed the device's weights."""
        copies = ((part, self._copies.get(part)) for part in block.parts)
        return any(copy is not None and not copy.outdated and copy.versions != versions(part) for part, copy in copies)

    def outdate(self, part: Part) -> None:
        """An update on the CPU has the part: the device's weights are old."""
        copy = self._copies.get(part)
        if copy is not None:
            copy.outdated, copy.newer, copy.versions = True, False, own_versions(part)

    def updated(self, part: Part, seen: int) -> None:
        """Compute has an update on the device: the device has newer weights than the host.

        ``seen``: the part's version counters (``own_versions``) after it.
        """
        copy = self._copies[part]
        copy.newer, copy.outdated, copy.versions = True, False, seen

    def flat(self, part: Part) -> Tensor:
        """The part's device memory as one run of its dtype; raises as :meth:`runs` does."""
        return self._present(part).flat

    def runs(self, part: Part) -> Sequence[Tensor]:
        """The parameters in the part's device memory, each flat.

        Raises:
            OffloadedAccessError: The weights are not on the device.
        """
        return self._present(part).runs

    def _present(self, part: Part) -> _Copy:
        copy = self._copies.get(part)
        if copy is None:
            raise OffloadedAccessError(absent(part, 0, self._lanes.device))
        return copy

    # ---- handles (``runtime.tensor_sources``) ---------------------------------------------------

    def newest(self, part: Part, index: int) -> Tensor | None:
        """A fresh CPU tensor with a parameter's weights if the device's are newer; or ``None``."""
        if (copy := self._newer(part)) is None:
            return None
        return torch.empty_strided(copy.views[index].shape, copy.views[index].stride(), dtype=part.dtype).copy_(copy.views[index])

    def written(self, part: Part, index: int) -> None:
        """The host has new weights of a parameter: renews kept weights, outdates other copies."""
        copy = self._copies.get(part)
        if copy is None:
            return
        if copy.kept:
            self._lanes.copy(copy.views[index], part.memory(index))
        else:
            copy.outdated = copy.written = True

    def newest_flat(self, part: Part) -> Tensor:
        """The part's newest weights as one run of its dtype, on the device or on the host."""
        copy = self._copies.get(part)
        return part.run if copy is None or copy.outdated else copy.flat

    def bytes_from(self, part: Part, index: int) -> Tensor:
        """The bytes from a parameter's first one on, in the bound device memory.

        Raises:
            OffloadedAccessError: The weights are not on the device.
        """
        copy = self._copies.get(part)
        if copy is None or not copy.bound:
            raise OffloadedAccessError(absent(part, index, self._lanes.device))
        return copy.memory[part.offsets[index] * part.dtype.itemsize :]

    def _copies_of(self, block: Block) -> list[_Copy]:
        """The block's copies now; a RELEASE under way may remove them at any moment."""
        return [copy for copy in map(self._copies.get, block.parts) if copy is not None]

    def _take(self, part: Part, *, kept: bool) -> _Copy:
        memory = self._lanes.memory().take(_num_bytes(part), f"weights of {part.block.name}")
        copy = self._copies[part] = _Copy(memory, *self._place(part, memory), kept, own_versions(part))
        return copy

    def _place(self, part: Part, memory: Tensor) -> _Place:
        places, address = self._places.setdefault(part, {}), memory.data_ptr()
        place = places.get(address)
        if place is None:
            if len(places) == _KEPT_PLACES:
                places.clear()
            flat = memory.view(part.dtype)
            with torch.inference_mode(False):  # a block that is bound during validation is trained later
                runs = [dlpack.from_dlpack(torch._C._to_dlpack(run)) for run in part.runs(flat)]
                views = [part.shaped(i, run) for i, run in enumerate(runs)]
                place = places[address] = _Place(flat, runs, views, [view.data_ptr() for view in views])
        return place

    def _free(self, part: Part) -> None:
        copy = self._copies.pop(part, None)
        if copy is not None:
            self._lanes.memory().give(copy.memory)

    def _bind(self, part: Part, copy: _Copy) -> None:
        if not copy.bound:
            _assign(part, copy)
            self._bound.add(part, copy.memory, copy.views)
            copy.bound = True

    def _unbind(self, part: Part) -> None:
        copy = self._copies.get(part)
        if copy is not None and copy.bound:
            self._bound.remove(part)
            copy.bound = False

    def _reclaim(self, part: Part) -> None:
        copy = self._copies.get(part)
        if copy is None or not copy.bound:
            return
        with torch._C.DisableTorchFunctionSubclass():  # code may also move them without ``data``
            if [param.data_ptr() for param in part.params] != copy.addresses:
                for index, (param, view) in enumerate(zip(part.params, copy.views, strict=True)):
                    if param.data_ptr() != view.data_ptr() and index not in part.moved and param.numel():
                        part.moved[index] = Moved(view, param._version)
        if part.moved:
            bring_back(part)

    def _newer(self, part: Part) -> _Copy | None:
        """The device's copy if it is newer than the host's."""
        copy = self._copies.get(part)
        return copy if copy is not None and (copy.newer or (not copy.outdated and copy.versions != versions(part))) else None

    def _agree(self, copy: _Copy, seen: int) -> None:
        copy.newer, copy.outdated, copy.written, copy.versions = False, False, False, seen


def _num_bytes(part: Part) -> int:
    return part.num_elements * part.dtype.itemsize


def _own(part: Part, flat: Tensor) -> Tensor:
    """This rank's elements in a flat tensor with the part's layout."""
    first = part.own.rank * part.slice_elements
    return flat[first : first + part.slice_elements]


def _assign(part: Part, copy: _Copy) -> None:
    """Makes the parameters views of a copy, unless they still are: often it is where it was."""
    with torch._C.DisableTorchFunctionSubclass():  # a handle would not allow it
        for param, view, address in zip(part.params, copy.views, copy.addresses, strict=True):
            if param.data_ptr() != address:
                set_data(param, view)


def _assign_all(part: Part, views: Iterable[Tensor]) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        for param, view in zip(part.params, views, strict=True):
            set_data(param, view)
