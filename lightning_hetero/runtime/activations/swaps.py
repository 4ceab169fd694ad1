"""The hops of one use's activations: to host memory, to the disk, and back.

[Note: Hops]
Each hop moves a use's activations together: from their storages into one host buffer, tensor beside
tensor, and back into one run of device memory by one copy. Storages lie at multiples of 512 bytes,
as where torch's allocator had them, because libraries choose a kernel by the alignment of its
arguments. Storages that go to the disk have a host buffer and a file of their own. Host buffers and
files are lent out again from step to step ([Note: Sizes that vary] in ``runtime.pool``).

Compute's thread submits the hops. Each takes its host buffers as it starts, when earlier hops have
released theirs. Compute's thread also allocates the device memory for the way back, so that the
allocator of a device with streams knows one stream.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock

import torch
from torch import Tensor

from lightning_hetero._native import Ticket
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.ir.schedule import Lane, Op, OpKind, Payload
from lightning_hetero.lanes.base import Event, OpEvent
from lightning_hetero.lanes.contract import Lanes
from lightning_hetero.lanes.memory import ALIGNMENT_BYTES, POISON
from lightning_hetero.runtime.activations.files import SwapFile, SwapFiles
from lightning_hetero.runtime.activations.saved import SavedStorage
from lightning_hetero.runtime.pool import Lease, LeasePool
from lightning_hetero.units import round_up

_PAGE = 4096


class Swapper:
    """What all swaps of a model share.

    ``made`` is called with the storage of device memory for the way back.
    """

    def __init__(
        self,
        lanes: Lanes,
        files: SwapFiles | None,
        *,
        poison: bool,
        made: Callable[[torch.UntypedStorage], object],
    ) -> None:
        self.lanes, self.poison, self.made = lanes, poison, made
        self.buffers = LeasePool(self._buffer)
        self.files = LeasePool(_no_files if files is None else files.make, lambda file: file.close(), larger=False)
        self._leaving: list[weakref.ref[Swap]] = []
        self._afterwards: deque[tuple[Event, Callable[[], object]]] = deque()
        self._lock = Lock()

    def afterwards(self, event: Event, action: Callable[[], object]) -> None:
        """Calls a small function soon after an event, in any thread."""
        with self._lock:
            self._afterwards.append((event, action))

    def call_due(self) -> None:
        """Calls the functions of :meth:`afterwards` whose events have passed. Thread-safe."""
        if not self._afterwards:  # as at nearly all anchors
            return
        with self._lock:
            rows = [(_passed(event), event, action) for event, action in self._afterwards]
            self._afterwards = deque((event, action) for passed, event, action in rows if not passed)
        for passed, _, action in rows:
            if passed:
                action()

    def leaving(self, swap: Swap) -> None:
        """A swap is on its way out."""
        self._leaving.append(weakref.ref(swap))

    def sweep(self, waited: Sequence[Event] = ()) -> None:
        """Releases memory of storages that have left the device; compute ``waited`` for some."""
        self.call_due()
        if not self._leaving:
            return
        still = []
        for ref in self._leaving:
            swap = ref()
            if swap is not None and not swap.left(waited):
                still.append(ref)
        self._leaving = still

    def trim(self) -> None:
        """A batch has ended: ends buffers and files that are no longer of use."""
        self.call_due()
        self.buffers.trim()
        self.files.trim()

    def close(self) -> None:
        """Ends all buffers and files that are free; the lanes are at rest."""
        self.call_due()
        self.buffers.close()
        self.files.close()

    def lend(self, num_bytes: int) -> Lease[Tensor]:
        """Host memory for a hop, in the thread of its lane."""
        if not num_bytes:
            return _NOTHING
        self.call_due()  # memory of earlier hops may be free now
        lease = self.buffers.lend(num_bytes)
        if self.poison:
            lease.value.fill_(POISON)
        return lease

    def _buffer(self, num_bytes: int) -> Tensor:
        """Host memory of whole pages: transfers to the disk need them."""
        buffer = self.lanes.host_buffer(num_bytes)
        if buffer.data_ptr() % _PAGE:
            buffer = self.lanes.host_buffer(num_bytes + _PAGE)
            buffer = buffer[-buffer.data_ptr() % _PAGE :][:num_bytes]
        return buffer


class Swap:
    """The activations of one use on their way; see [Note: Hops].

    It begins with SWAP_OUT on ``d2h``, which copies the storages to host memory. They hold it, and
    so do transfers that are under way. Compute's thread calls it.
    """

    def __init__(self, swapper: Swapper, block: int, storages: Sequence[SavedStorage], op: Op, after: Sequence[Event]) -> None:
        self._swapper, self._lanes, self._block = swapper, swapper.lanes, block
        self._storages = [weakref.ref(storage) for storage in storages]
        self._host = _NOTHING  # host memory of what stays on the host
        self._outgoing = _NOTHING  # host memory of what goes to the disk
        self._incoming = _NOTHING  # the same on its way back
        self._file: Lease[SwapFile] | None = None
        self._memory: Tensor | None = None  # device memory for the way back
        self._has_left = self._waited = False
        to_host, self._host_bytes = self._pack(to_disk=False)
        to_disk, self._disk_bytes = self._pack(to_disk=True)

        def run(held: list[object]) -> tuple[Ticket, ...]:
            self._host, self._outgoing = swapper.lend(self._host_bytes), swapper.lend(self._disk_bytes)
            held += [self._host, self._outgoing]
            for lease, rows in ((self._host, to_host), (self._outgoing, to_disk)):
                for raw, at in rows:
                    self._lanes.copy(lease.value[at : at + raw.numel()], raw)
                rows.clear()
            return ()

        self.out = self._submit(op, self.num_bytes, run, [*after, self._lanes.mark()])
        self._hops: dict[Lane, OpEvent] = {Lane.D2H: self.out}
        swapper.leaving(self)

    def left(self, waited: Sequence[Event] = ()) -> bool:
        """Releases device memory once the copy to the host has ended; returns whether it has."""
        if self._has_left or Lane.DISK_READ in self._hops or Lane.H2D in self._hops:
            return True
        if self.out not in waited and not _passed(self.out):
            return False
        self._has_left = True
        for storage in self._alive():
            if storage.swap is self and storage.owner is not None:
                storage.leave(poison=self._swapper.poison)
        return True

    def write(self, op: Op, after: Sequence[Event]) -> OpEvent:
        """SWAP_OUT on ``disk_write``: writes to the disk what goes there."""

        def run(held: list[object]) -> tuple[Ticket, ...]:
            outgoing = self._outgoing
            if outgoing is _NOTHING:
                return ()
            self._file = file = self._swapper.files.lend(self._disk_bytes)
            held += [outgoing, file]
            return (file.value.write(outgoing.value),)

        event = self._submit(op, self._disk_bytes, run, [*after, self.out], self._forget_outgoing)
        self._hops[Lane.DISK_WRITE] = event
        return event

    def read(self, op: Op, after: Sequence[Event]) -> OpEvent:
        """SWAP_IN on ``disk_read``: reads back to host memory what went to the disk."""
        needed = self._is_missed  # else it is still on the device, and stays there

        def run(held: list[object]) -> tuple[Ticket, ...]:
            file = self._file
            if not needed or file is None:
                return ()
            self._incoming = incoming = self._swapper.lend(self._disk_bytes)
            held += [incoming, file]
            return (file.value.read(incoming.value),)

        event = self._submit(op, self._disk_bytes if needed else 0, run, [*after, self._hops[Lane.DISK_WRITE]])
        self._hops[Lane.DISK_READ] = event
        return event

    def bring(self, op: Op, after: Sequence[Event]) -> OpEvent:
        """SWAP_IN on ``h2d``: everything comes back to the device, unless it never left."""
        if Lane.H2D in self._hops:
            return self._hops[Lane.H2D]
        if self._is_missed:
            if Lane.DISK_WRITE in self._hops and Lane.DISK_READ not in self._hops:
                self.read(self._demand(Lane.DISK_READ, self._disk_bytes), ())
            self._memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._lanes.device)
            self._swapper.made(self._memory.untyped_storage())
            self._lanes.allocated(self._memory.untyped_storage())
            if self._swapper.poison:
                self._memory.fill_(POISON)
        memory, split = self._memory, self._host_bytes

        def run(held: list[object]) -> tuple[Ticket, ...]:
            if memory is None:
                return ()
            staged = self._outgoing if self._incoming is _NOTHING else self._incoming
            held += [self._host, staged, memory]
            if split:
                self._lanes.copy(memory[:split], self._host.value[:split])
            if self._disk_bytes:
                self._lanes.copy(memory[split:], staged.value[: self._disk_bytes])
            return ()

        before = [*after, *self._hops.values(), self._lanes.mark()]
        event = self._submit(op, 0 if memory is None else self.num_bytes, run, before, self._forget_host)
        self._hops[Lane.H2D] = event
        return event

    def memory(self) -> torch.UntypedStorage:
        """The device memory with everything, brought back if necessary. Compute waits for it."""
        if Lane.H2D not in self._hops:
            self.bring(self._demand(Lane.H2D, self.num_bytes), ())
        assert self._memory is not None, "only a storage that has left asks for it"
        if not self._waited:
            self._lanes.compute_waits([self._hops[Lane.H2D]])
            self._waited = True
        return self._memory.untyped_storage()

    @property
    def num_bytes(self) -> int:
        """Bytes that move between device and host."""
        return self._host_bytes + self._disk_bytes

    @property
    def _is_missed(self) -> bool:
        """It has left, and somebody still needs it."""
        return self._has_left and bool(self._alive())

    def _alive(self) -> list[SavedStorage]:
        return [storage for storage in (ref() for ref in self._storages) if storage is not None]

    def _pack(self, *, to_disk: bool) -> tuple[list[tuple[Tensor, int]], int]:
        """Packs storages into one buffer: their device bytes, their places in it, and its size."""
        rows: list[tuple[Tensor, int]] = []
        at = 0
        for storage in self._alive():
            begin, end = storage.span()
            if storage.to_disk is not to_disk or begin == end:
                continue
            whole = next(tensor.tensor for tensor in storage.alive() if tensor.tensor is not None).untyped_storage()
            raw = torch.empty(0, dtype=torch.uint8, device=whole.device).set_(whole, begin, (end - begin,), (1,))
            storage.swap, storage.raw, storage.moved = self, raw, (begin, end)
            # On the device, bytes from the disk come back behind the others.
            storage.shift_bytes = at - begin + (self._host_bytes if to_disk else 0)
            rows.append((raw, at))
            at = round_up(at + end - begin, ALIGNMENT_BYTES)
        return rows, at

    def _submit(
        self,
        op: Op,
        num_bytes: int,
        run: Callable[[list[object]], tuple[Ticket, ...]],
        after: Sequence[Event],
        then: Callable[[], object] = lambda: None,
    ) -> OpEvent:
        """Submits a hop with the bytes that it moves.

        Leases that ``run`` puts on its list end no earlier than the hop.
        """
        held: list[object] = [self]

        def over() -> None:
            held.clear()
            then()

        event = self._lanes.submit(replace(op, num_bytes=num_bytes), lambda: run(held), after)
        self._swapper.afterwards(event, over)
        return event

    def _forget_outgoing(self) -> None:
        if self._file is not None:
            self._outgoing = _NOTHING

    def _forget_host(self) -> None:
        self._host = self._outgoing = self._incoming = _NOTHING
        self._file = None

    def _demand(self, lane: Lane, num_bytes: int) -> Op:
        """An op outside the schedule: backward needs the bytes earlier than expected."""
        return Op(id=-1, kind=OpKind.SWAP_IN, block=self._block, lane=lane, at=-1, payload=Payload.ACTIVATIONS, num_bytes=num_bytes)


_NOTHING: Lease[Tensor] = LeasePool(lambda num_bytes: torch.empty(0, dtype=torch.uint8)).lend(0)  # no host memory


def _passed(event: Event) -> bool:
    """Whether an event has passed, or never will."""
    try:
        return event.done()
    except Exception:
        return True  # code that waits for the event gets the error


def _no_files(num_bytes: int) -> SwapFile:
    raise UnsupportedError(
        f"{num_bytes} bytes of activations go to the disk, but there is no directory for them. Give disk_path, or swap them to "
        f"the host."
    )
