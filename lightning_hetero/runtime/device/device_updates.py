"""Updates on a device with memory of its own, by torch's fused Adam and AdamW, and their state.

[Note: Bits of device updates]
Source of the rule: torch.optim.Adam/AdamW(fused=True). With 16-bit weights it acts on fp32 masters
(``optim/reference.py``). On tensors in CPU memory the results have the bits of the native kernels,
also for gradients with a factor. On an accelerator torch has another kernel, which contracts other
products. A first step from equal weights gives moments within two units in the last place, and
weights within one of the weight and four of its step, ``lr`` times Adam's update. A weight that
nearly equals its step cancels it, and may differ by many of its own units
(``tests/gpu/test_device_updates.py``). Over several steps such differences can grow.

[Note: State on the device]
State of tier DEVICE stays on the device. State of tier HOST is in the engine's memory between
steps: SWAP_IN takes device memory and copies the state there, SWAP_OUT writes it back and frees
that memory (Deep Optimizer States, section 4.3: prefetch and flush on lanes of their own, beside
the update). In both cases all arrays of a part are one run on the device, with the layout of the
native part.

[Note: Slices on the device]
Each of several ranks updates its slice. Its copy of whole weights is not in the update: it comes
from the host, and is released and renewed as if the CPU had made the update. So SWAP_IN takes
memory for the slices of weights and gradients and copies them there, the UPDATE works in that
memory, and SWAP_OUT copies the weights back and frees it. State is the slice's. Slices cut
parameters at multiples of 16 elements, so the bits are those of whole tensors on CPU memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hetero import _native
from lightning_hetero._native import Hyper, Ticket
from lightning_hetero.errors import HeteroError
from lightning_hetero.lanes.base import Event
from lightning_hetero.lanes.contract import Lanes
from lightning_hetero.optim import adam
from lightning_hetero.runtime.device.weights import DeviceWeights
from lightning_hetero.store.live.blocks import Block, Part
from lightning_hetero.store.live.geometry import own_versions, versions
from lightning_hetero.store.live.mirrors import STATE, spans, writes_of
from lightning_hetero.store.live.tier_store import TierStore
from lightning_hetero.store.raw_memory import tensor_at
from lightning_hetero.untyped import Function

Row = tuple[int, Hyper, Tensor]  # position in the part, its numbers, its gradient on the device
_Runs = list[list[Tensor]]  # of the masters, or the weights, and of the two moments: flat, for each parameter

# fp32 copies of gradients have at most this many elements: a multiple of 16, so that torch's vector
# loop and its scalar tail get the same elements as in one call.
_CHUNK_ELEMENTS = 1 << 24


@dataclass(slots=True)
class _State:
    memory: Tensor  # one run of bytes
    arrays: list[Tensor]  # the fp32 arrays in it, flat, with the layout of the native part
    runs: list[Sequence[Tensor]]  # the parameters' runs in each array
    kept: bool  # it stays there


@dataclass(slots=True)
class _Slices:
    """See [Note: Slices on the device]."""

    memory: Tensor
    weights: Tensor  # flat
    runs: Sequence[Tensor]  # of the parameters in it
    grads: Sequence[Tensor]  # of the updated ones, in their order


class DeviceUpdates:
    """Updates parts on the device and keeps, or borrows, their state."""

    def __init__(self, lanes: Lanes, weights: DeviceWeights, store: TierStore) -> None:
        self._lanes, self._weights, self._store = lanes, weights, store
        self._states: dict[Part, _State] = {}
        self._slices: dict[Part, _Slices] = {}
        self._returning: dict[Part, Event] = {}  # the last SWAP_OUT of borrowed state
        self._count: tuple[float, Tensor] | None = None  # of steps, and on the device

    # ---- a session's begin and end ---------------------------------------------------------------

    def keep(self, part: Part) -> None:
        """Moves the part's state to the device to stay; the system gets the engine's pages back."""
        self._store.barrier(part)
        self._bring(part, self._take(part, kept=True))
        part.state_home = self
        self.drop(part)

    def borrow(self, part: Part) -> None:
        """The part's state stays on the host, and the device updates it."""
        self._store.barrier(part)
        self._lanes.page_lock(_host_run(part))
        part.state_home = self

    def withdraw(self, part: Part) -> None:
        """Undoes :meth:`keep` and :meth:`borrow`. Nothing of the part is under way."""
        self._wait(part)
        self._give_back(part)
        self._lanes.page_unlock(_host_run(part))
        part.state_home = None

    @torch.no_grad()
    def lend(self, part: Part) -> bool:
        """Copies state that lives on the device to the engine's memory; returns whether it did.

        Nothing of the part is under way. :meth:`drop` gives the memory back.
        """
        state = self._states.get(part)
        if state is None or part.state_home is not self:
            return False
        if len(state.arrays) > len(adam.MOMENTS) and part.master_versions != versions(part):  # as before the next update
            state.arrays[0].copy_(self._newest(part))
            part.master_versions = own_versions(part)
        for host, array in zip(_host(part), state.arrays, strict=True):
            self._lanes.copy(host, array)
        return state.kept

    def drop(self, part: Part) -> None:
        """Gives the engine's pages for the part's state back to the system."""
        for ticket in writes_of(part):
            ticket.wait()
        for array in range(part.require_native().geometry.num_state):
            part.require_native().drop_state(array)

    # ---- ops -------------------------------------------------------------------------------------

    def swap_in(self, block: Block) -> list[Ticket]:
        """SWAP_IN state (run on ``h2d``): copies the block's state to new device memory."""
        for part in self._borrowers(block):
            if part not in self._states:  # else it is here since a step that ended without updates
                self._bring(part, self._take(part, kept=False))
        return []

    def swap_out(self, block: Block) -> list[Ticket]:
        """SWAP_OUT state (run on ``d2h``, after a mark behind the UPDATE): writes it back."""
        for part in self._borrowers(block):
            self._give_back(part)
        return []

    def lift(self, part: Part, indices: Sequence[int], grads: Sequence[Tensor]) -> None:
        """SWAP_IN gradients (run on ``h2d``, after REDUCE): copies slices of them and of weights.

        Args:
            part: The part.
            indices: The positions of the parameters that are updated.
            grads: What the rank has of their gradients, flat.
        """
        num_bytes = 2 * part.slice_elements * part.dtype.itemsize
        memory = self._lanes.memory().take(num_bytes, f"slices of {part.block.name}")
        weights, flat = memory.view(part.dtype).view(2, -1).unbind()
        runs = part.own_runs(flat)
        there = [runs[index] for index in indices]
        self._slices[part] = _Slices(memory, weights, part.own_runs(weights), there)
        self._lanes.copies([weights, *there], [part.slice_run, *grads])

    def put_down(self, block: Block) -> list[Ticket]:
        """SWAP_OUT weights of ranks (run on ``d2h``, after a mark behind the UPDATE)."""
        for part in block.parts:
            if (slices := self._slices.pop(part, None)) is not None:
                for ticket in writes_of(part):  # they read host memory
                    ticket.wait()
                self._lanes.copy(part.slice_run, slices.weights)
                self._lanes.memory().give(slices.memory)
        return []

    def give_back(self) -> None:
        """Writes all borrowed state back, after a step without updates. The lanes are drained."""
        for part in [part for part, state in self._states.items() if not state.kept]:
            self._give_back(part)

    def _give_back(self, part: Part) -> None:
        state = self._states.pop(part, None)
        if state is not None:
            for host, array in zip(_host(part), state.arrays, strict=True):
                self._lanes.copy(host, array)
            self._lanes.memory().give(state.memory)

    def returning(self, block: Block, event: Event) -> None:
        """The block's SWAP_OUT: readers of its state wait for it."""
        for part in self._borrowers(block):
            self._returning[part] = event

    def update_slices(self, part: Part, numbers: Sequence[tuple[int, Hyper]], *, scale: float) -> None:
        """UPDATE of what :meth:`lift` has brought; other ranks update the rest."""
        slices = self._slices[part]
        rows = [(*row, grad) for row, grad in zip(numbers, slices.grads, strict=True) if grad.numel()]
        self._update(part, rows, slices.weights, slices.runs, scale)
        torch.autograd.graph.increment_version([part.params[i] for i, _ in numbers])
        part.versions, part.master_versions = versions(part), own_versions(part)
        self._weights.outdate(part)

    def update(self, part: Part, rows: Sequence[Row], *, scale: float = 1.0) -> None:
        """UPDATE (in the thread that computes, after SWAP_IN and UPLOAD): updates a part.

        Autograd is off. Gradients are in their parameter's memory order; ``scale`` multiplies them
        in fp32 first.

        Raises:
            HeteroError: The part's state is not on the device.
        """
        self._update(part, rows, self._weights.flat(part), self._weights.runs(part), scale)
        # Autograd raises if a graph still needs the old weights.
        torch.autograd.graph.increment_version([part.params[i] for i, _, _ in rows])
        part.master_versions = own_versions(part)
        self._weights.updated(part, part.master_versions)

    def _update(self, part: Part, rows: Sequence[Row], flat: Tensor, weights: Sequence[Tensor], scale: float) -> None:
        if part not in self._states:
            raise HeteroError(f"the state of {part.block.name!r} is not on {self._lanes.device}; SWAP_IN comes before the UPDATE.")
        state = self._states[part]
        arrays = [weights, *state.runs] if len(state.runs) == len(adam.MOMENTS) else state.runs  # master and moments
        if arrays[0] is not weights and part.master_versions != versions(part):  # user code wrote weights: they are the master
            state.arrays[0].copy_(flat)
        for hyper, same in _by_numbers(rows):
            runs = [[array[i] for i, _, _ in same] for array in arrays]
            grads = [grad if grad.stride() == (1,) else grad.as_strided((grad.numel(),), (1,)) for _, _, grad in same]
            for pieces in _chunks(runs, grads, whole=scale == 1.0):
                self._step(hyper, *pieces, scale)
        if rows and arrays[0] is not weights:  # rounds to nearest even
            torch._foreach_copy_([weights[i] for i, _, _ in rows], [arrays[0][i] for i, _, _ in rows])
        part.stepped, part.fresh = True, False

    def _step(self, hyper: Hyper, runs: _Runs, grads: list[Tensor], scale: float) -> None:
        grads = [grad if grad.dtype is torch.float32 else grad.float() for grad in grads]
        if scale != 1.0:
            grads = list(torch._foreach_mul(grads, scale))
        fused: Function = torch._fused_adamw_ if hyper.flags & _native.ADAMW else torch._fused_adam_
        if self._count is None or self._count[0] != hyper.step:
            self._count = hyper.step, torch.full((), hyper.step, dtype=torch.float32, device=self._lanes.device)  # needs no copy
        fused(
            runs[0], grads, runs[1], runs[2], [], [self._count[1]] * len(grads), lr=hyper.lr, beta1=hyper.beta1, beta2=hyper.beta2,
            weight_decay=hyper.weight_decay, eps=hyper.eps, amsgrad=False, maximize=bool(hyper.flags & _native.MAXIMIZE),
        )  # fmt: skip

    # ---- readers and writers of the state (``StateHome``) ----------------------------------------

    def read(self, part: Part, array: int, index: int) -> Tensor:
        """A fresh flat fp32 CPU tensor with the part's own piece of a parameter in an array."""
        self._wait(part)
        run = self._run(part, array, index)
        if adam.state_names(part.dtype)[array] == adam.MASTER and part.master_versions != versions(part):  # as in update
            run = part.own_runs(self._newest(part))[index]
        return torch.empty(run.shape, dtype=torch.float32).copy_(run)

    def write(self, part: Part, runs: Sequence[tuple[int, int, Tensor]]) -> None:
        """Overwrites runs ``(array, index, flat fp32 values)``."""
        self._wait(part)
        for array, index, values in runs:
            self._run(part, array, index).copy_(part.own_piece(index, values)[1])
        part.stepped, part.fresh = True, False

    def _take(self, part: Part, *, kept: bool) -> _State:
        if part in self._states:
            raise HeteroError(
                f"the state of {part.block.name!r} is on {self._lanes.device} already; SWAP_OUT comes before SWAP_IN."
            )
        count, length = part.require_native().geometry.num_state, part.slice_elements
        memory = self._lanes.memory().take(4 * count * length, f"optimizer state of {part.block.name}")
        arrays = list(memory.view(torch.float32).view(count, length).unbind())
        state = self._states[part] = _State(memory, arrays, [part.own_runs(array) for array in arrays], kept)
        return state

    def _bring(self, part: Part, state: _State) -> None:
        for array, host in zip(state.arrays, _host(part), strict=True):
            self._lanes.copy(array, host)

    def _borrowers(self, block: Block) -> Iterator[Part]:
        """The block's parts whose state comes and goes."""
        for part in block.parts:
            state = self._states.get(part)  # once, because a SWAP_OUT under way may remove it
            if part.state_home is self and (state is None or not state.kept):
                yield part

    def _run(self, part: Part, array: int, index: int) -> Tensor:
        state = self._states.get(part)
        flat = _host(part)[array] if state is None else state.arrays[array]
        return part.own_runs(flat)[index]

    def _newest(self, part: Part) -> Tensor:
        """The newest weights as one run with the layout of the native part."""
        return self._weights.newest_flat(part) if part.own.ranks == 1 else part.slice_run

    def _wait(self, part: Part) -> None:
        event = self._returning.pop(part, None)
        if event is not None:
            event.wait()


def _host(part: Part) -> list[Tensor]:
    """The state arrays in the engine's memory, flat."""
    native, flats = part.require_native(), []
    for array in range(native.geometry.num_state):
        flats.append(tensor_at(native, native.state_memory(array), part.slice_elements, torch.float32))
    return flats


def _host_run(part: Part) -> Tensor:
    """The whole pages in which the engine has the state arrays."""
    address, num_bytes = spans(part)[STATE]
    return tensor_at(part.require_native(), address, num_bytes, torch.uint8)


def _by_numbers(rows: Sequence[Row]) -> Iterable[tuple[Hyper, Sequence[Row]]]:
    """The rows with the same hyper-parameters, together."""
    if not rows:  # other ranks have all of these parameters
        return ()
    first = rows[0][1]
    if all([hyper is first for _, hyper, _ in rows]):  # as in nearly all parts  # noqa: C419  # one call, not one each
        return [(first, rows)]
    by_numbers: dict[Hyper, list[Row]] = {}
    for row in rows:
        by_numbers.setdefault(row[1], []).append(row)
    return by_numbers.items()


def _chunks(runs: _Runs, grads: list[Tensor], *, whole: bool) -> Iterator[tuple[_Runs, list[Tensor]]]:
    """The runs and gradients of each call: fp32 gradients whole, others in chunks."""
    if whole and all([grad.dtype is torch.float32 for grad in grads]):  # noqa: C419  # as above
        yield runs, grads
        return
    cut: tuple[_Runs, list[Tensor]] = ([[] for _ in runs], [])
    left = _CHUNK_ELEMENTS
    for *row, grad in zip(*runs, grads, strict=True):
        stays = whole and grad.dtype is torch.float32
        for at in range(0, grad.numel(), grad.numel() if stays else _CHUNK_ELEMENTS):
            piece = grad if stays else grad[at : at + _CHUNK_ELEMENTS]
            if not stays and piece.numel() > left:
                yield cut
                cut, left = ([[] for _ in runs], []), _CHUNK_ELEMENTS
            for pieces, run in zip(cut[0], row, strict=True):
                pieces.append(run[at : at + piece.numel()])
            cut[1].append(piece)
            left -= 0 if stays else piece.numel()
    if cut[1]:
        yield cut
