"""The loads that measure a machine: work of a training step, with its kernels and threads."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_hetero import _native
from lightning_hetero._native import Arena, Engine, Hyper, NativePart, PartGeometry, Segment, Store, Ticket
from lightning_hetero.clock import now_s
from lightning_hetero.lanes.backends import BACKENDS
from lightning_hetero.lanes.pinned import PageLocker
from lightning_hetero.profiling.timing import Load
from lightning_hetero.store.capacity import available_memory_bytes
from lightning_hetero.store.format.directory import StoreDirectory
from lightning_hetero.store.live.engine_options import EngineOptions
from lightning_hetero.units import KIB, MIB, round_up

_HYPER = Hyper(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=100.0)
_CHUNK_ELEMENTS = 256 * KIB  # of fp32 blocks, as in store/live/geometry.py
_IO_CHUNK_BYTES = 2 * MIB  # between a chunk of fp32 weights (1 MiB) and one of weights and moments (3 MiB)
_BLOCK_BYTES = 16 * MIB  # some milliseconds of a fast disk, and not many of a slow one
_PREPARE_S = 0.5  # seconds of writing files for one direction: a slow disk gets fewer of them
_MOST_BLOCKS = 8
_IN_FLIGHT = 2  # tasks in flight, so that the disk never waits for the next one


class Compute(Load):
    """Forward and backward of transformer blocks in turn.

    Units: FLOP of matrix products, three times those of forward.

    Weights come from memory, as a model's do: blocks that stayed in the caches would suffer more
    from an update beside them.

    Args:
        device: The device that computes.
        dtype: The dtype of weights and activations.
        hidden: Hidden size.
        tokens: Tokens of the batch.
        cache_bytes: Size of the device's caches; the blocks' weights together take twice as much,
            with at most eight blocks.
        most_bytes: Bound on weights and gradients of all blocks; there is at least one block.
            ``None``: no bound.
    """

    name = "compute"
    foreground = True

    def __init__(
        self,
        device: torch.device,
        *,
        dtype: torch.dtype,
        hidden: int,
        tokens: int,
        cache_bytes: int,
        most_bytes: int | None = None,
    ) -> None:
        sequence = min(tokens, 256)
        self.flop = 3.0 * (24 * tokens * hidden**2 + 4 * tokens * sequence * hidden)
        self._device = device
        shape = (tokens // sequence, sequence, hidden)
        block_bytes = 12 * hidden**2 * dtype.itemsize
        blocks = min(_MOST_BLOCKS, max(1, -(-2 * cache_bytes // block_bytes)))
        if most_bytes is not None:
            blocks = min(blocks, max(1, most_bytes // (2 * block_bytes)))  # each keeps its gradients
        with self._plain():
            layer = partial(
                torch.nn.TransformerEncoderLayer, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, device="meta"
            )
            made = (layer(hidden, hidden // 64, 4 * hidden, dtype=dtype) for _ in range(blocks))
            self._layers = deque(one.to_empty(device=device) for one in made)
            for param in (p for one in self._layers for p in one.parameters()):  # random numbers take longer than a round
                torch.linspace(-0.05, 0.05, param.numel(), out=param.data.view(-1))
            values = torch.linspace(-1, 1, tokens * hidden, device=device, dtype=torch.float32).to(dtype).view(shape)
            self._input = values.requires_grad_()
            self._gradient = torch.full(shape, 0.01, device=device, dtype=dtype)

    def step(self) -> float:
        """Forward and backward of the next block."""
        with self._plain():
            layer = self._layers[0]
            self._layers.rotate()
            layer.zero_grad(set_to_none=True)
            self._input.grad = None
            layer(self._input).backward(self._gradient)
        _synchronize(self._device)
        return self.flop

    @contextmanager
    def _plain(self) -> Iterator[None]:
        """Sets the modes for any caller: gradients on, no inference mode, no autocast."""
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(self._device.type, enabled=False):
            yield


class Update(Load):
    """Adam in the engine, state and fp32 weights in host memory; units: parameters.

    Args:
        num_params: Parameters of the block.
        threads: Threads that run the kernel.
    """

    name = "update"

    def __init__(self, num_params: int, threads: int) -> None:
        count = round_up(num_params, 16)
        self._undo = ExitStack()
        with ExitStack() as undo:
            weights = undo.enter_context(Arena(4 * count))
            _tensor(weights, count, torch.float32).fill_(0.01)
            # Gradients are torch's, in small pages: the kernel reads them more slowly than arrays
            # of huge pages.
            gradients = torch.full((count,), 0.01, dtype=torch.float32, device="cpu")
            geometry = PartGeometry(
                id=0,
                weight_dtype=_native.F32,
                num_elements=count,
                num_state=2,
                weights_on_disk_file=False,
                state_on_disk_file=False,
                chunk_elements=_CHUNK_ELEMENTS,
            )
            self._engine = undo.enter_context(_engine(update_threads=threads))
            self._block = undo.enter_context(NativePart(None, geometry, weights.address))
            undo.callback(self._engine.close)  # before its block
            self._segments = [Segment(offset=0, numel=count, grad=gradients.data_ptr(), grad_dtype=_native.F32, hyper=0)]
            self._undo = undo.pop_all()
        self._count, self._steps, self._gradients = count, 0, gradients

    def step(self) -> float:
        """One update of the whole block."""
        self._steps += 1
        ticket = self._engine.open_update(self._block, weights_resident=True)
        self._engine.arm_update(ticket, self._segments, [_HYPER], step=self._steps)
        ticket.wait()
        ticket.release()
        return float(self._count)

    def close(self) -> None:
        """Frees the block and its engine."""
        self._undo.close()


class MemoryTraffic(Load):
    """Moves the bytes of an update, almost without arithmetic, on all threads; units: bytes.

    Args:
        num_params: Parameters, 28 bytes each.
        threads: Threads that move them.
    """

    name = "memory"

    def __init__(self, num_params: int, threads: int) -> None:
        self._count, self._threads = num_params, threads
        # Starts differ by a few cache lines modulo a page: arrays with equal offsets collide in the
        # caches.
        self._arena = Arena(4 * (4 * num_params + 16 * KIB))
        self._addresses = [self._arena.address + i * (round_up(4 * num_params, 4096) + 17 * 64) for i in range(4)]

    def step(self) -> float:
        """Moves all of them once."""
        param, exp_avg, exp_avg_sq, grad = self._addresses
        _native.move_like_adam(
            param=param, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=grad, numel=self._count, threads=self._threads
        )
        return 28.0 * self._count

    def close(self) -> None:
        """Frees the arrays."""
        self._arena.close()


class Downcast(Load):
    """fp32 to bf16 on the CPU, torch's threads; units: elements."""

    name = "downcast"
    foreground = True

    def __init__(self, num_params: int) -> None:
        self._wide = torch.zeros(num_params, dtype=torch.float32, device="cpu")
        self._narrow = torch.zeros(num_params, dtype=torch.bfloat16, device="cpu")

    def step(self) -> float:
        """Casts all of them once."""
        self._narrow.copy_(self._wide)
        return float(self._wide.numel())


class DiskTransfer(Load):
    """Streams blocks of plain bytes from or to files of a store, past the page cache; units: bytes.

    Reads and writes each have an engine: in one engine, writes would go before reads.

    Args:
        store: The store of both.
        directory: Its directory.
        blocks: Numbers of the files, and the disk of each.
        write: Whether to write, in place; otherwise it reads.
        options: Back end and queue, as in training.
    """

    def __init__(self, store: Store, blocks: Sequence[tuple[int, int]], *, write: bool, options: EngineOptions) -> None:
        self.name = "write" if write else "read"
        self._under_way: deque[Ticket] = deque()
        self._undo = ExitStack()
        with ExitStack() as undo:
            self._engine = _engine(
                io_backend=options.io_backend, io_threads=options.io_threads, queue_depth=options.queue_depth,
                num_disks=options.num_disks,
            )  # fmt: skip
            self._blocks = [_opaque(store, number, disk, undo) for number, disk in blocks]
            self._in_flight = _IN_FLIGHT * options.num_disks
            undo.callback(self._engine.close)  # runs before its blocks'
            self._undo = undo.pop_all()
        self._next = 0
        self._submit: Callable[[NativePart], Ticket] = self._store if write else self._engine.fetch
        begin_s = now_s()
        written = 0
        for block in self._blocks:  # the first write to a newly allocated file is slower than later ones
            if written >= self._in_flight and now_s() - begin_s > _PREPARE_S:
                break
            self._store(block).wait()
            written += 1
        self._blocks = self._blocks[:written]

    @property
    def backend(self) -> str:
        """The back end of transfers: ``"io_uring"`` or ``"pool"``."""
        return self._engine.io_backend

    def _store(self, block: NativePart) -> Ticket:
        return self._engine.store(block, [], weights_from_memory=True, step=0)

    def step(self) -> float:
        """Submits a block and waits for an earlier one."""
        while len(self._under_way) < self._in_flight:
            self._under_way.append(self._submit(self._blocks[self._next]))
            self._next = (self._next + 1) % len(self._blocks)
        self._finish()
        return float(_BLOCK_BYTES)

    def settle(self) -> None:
        """Waits for the tasks in flight."""
        while self._under_way:
            self._finish()

    def _finish(self) -> None:
        ticket = self._under_way.popleft()
        ticket.wait()
        ticket.release()

    def close(self) -> None:
        """Closes the files."""
        self._undo.close()


def disk_loads(
    directory: StoreDirectory, num_bytes: int, options: EngineOptions, undo: ExitStack
) -> tuple[DiskTransfer, DiskTransfer]:
    """Reads and writes of files in a directory.

    Args:
        directory: A private directory that lasts as long as the loads.
        num_bytes: Bytes of the files to read, and of the files to write.
        options: Back end and queue, as in training.
        undo: Gets the callbacks that close everything.

    Raises:
        UnsupportedError: The file system refuses direct transfers.
        StoreError: A transfer failed.
    """
    count = _count(num_bytes, options.num_disks)
    store = undo.enter_context(
        Store(
            directory.path,
            further=directory.places[1:],
            uuid=directory.uuid,
            create=True,
            direct_io=options.direct_io,
            durability=0,
            verify_digests=False,
            num_blocks=2 * count,
            user_bytes=0,
        )
    )
    read, written = ([(number, directory.disk_of(number, _BLOCK_BYTES)) for number in range(i, i + count)] for i in (0, count))
    reads = undo.enter_context(DiskTransfer(store, read, write=False, options=options))
    return reads, undo.enter_context(DiskTransfer(store, written, write=True, options=options))


def _count(num_bytes: int, num_disks: int) -> int:
    """Files of one direction."""
    return max(_IN_FLIGHT * num_disks, num_bytes // _BLOCK_BYTES)


def compute_bytes(*, dtype: torch.dtype, hidden: int, tokens: int) -> int:
    """Memory of :class:`Compute` with one block: weights, activations, and gradients of both."""
    return (2 * 12 * hidden**2 + 48 * tokens * hidden) * dtype.itemsize


def engine_bytes(num_disks: int = 1) -> int:
    """Staging memory of a load's engine."""
    return 3 * num_disks * _staged()


def disk_memory_bytes(num_disks: int = 1) -> int:
    """The least memory of :func:`disk_loads`: blocks and engines of both directions."""
    return 2 * (_count(0, num_disks) * _BLOCK_BYTES + engine_bytes(num_disks))


def disk_bytes(num_bytes: int, num_disks: int = 1) -> int:
    """Bytes of files that :func:`disk_loads` makes: both directions, each file with its head."""
    return 2 * _count(num_bytes, num_disks) * (_BLOCK_BYTES + MIB)


class Copy(Load):
    """Copies between the host and a device on a stream of its own; units: bytes.

    The host's memory is what training gets: page-locked, if the machine allows it.

    Args:
        device: The device.
        to_device: Whether to copy to the device; otherwise to the host.
        num_bytes: Bytes of one copy.
    """

    def __init__(self, device: torch.device, *, to_device: bool, num_bytes: int) -> None:
        self.name = "h2d" if to_device else "d2h"
        apart = device.type != "cpu"
        there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        if apart:
            host = PageLocker(BACKENDS[device.type], there[:1].zero_, available_memory_bytes).buffer(num_bytes).zero_()
        else:
            host = torch.zeros(num_bytes, dtype=torch.uint8)
        self._source, self._target = (host, there) if to_device else (there, host)
        self._stream = torch.Stream(device) if apart else None

    def step(self) -> float:
        """One complete copy."""
        with self._stream if self._stream is not None else nullcontext():
            self._target.copy_(self._source, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return float(self._target.numel())


class DeviceUpdate(Load):
    """torch's fused AdamW on a device, fp32; units: parameters."""

    name = "device_update"
    foreground = True

    def __init__(self, device: torch.device, num_params: int) -> None:
        self._param = torch.zeros(num_params, device=device, dtype=torch.float32, requires_grad=True)
        self._param.grad = torch.full_like(self._param, 0.01)
        self._optimizer = torch.optim.AdamW([self._param], fused=True)
        self._device = device

    def step(self) -> float:
        """One step of the optimizer."""
        self._optimizer.step()
        _synchronize(self._device)
        return float(self._param.numel())


def _engine(num_disks: int = 1, **options: Any) -> Engine:
    return Engine(staging_bytes=engine_bytes(num_disks), chunk_bytes_max=_staged(), num_disks=num_disks, **options)


def _staged() -> int:
    """Bytes of the largest staged chunk of any load."""
    return max(_IO_CHUNK_BYTES, 12 * _CHUNK_ELEMENTS) + 16 * KIB


def _opaque(store: Store, number: int, disk: int, undo: ExitStack) -> NativePart:
    arena = undo.enter_context(Arena(_BLOCK_BYTES))
    _tensor(arena, _BLOCK_BYTES, torch.uint8).fill_(number % 251 + 1)
    geometry = PartGeometry(
        id=number,
        weight_dtype=_native.U8,
        num_elements=_BLOCK_BYTES,
        num_state=0,
        weights_on_disk_file=True,
        state_on_disk_file=False,
        num_slots=1,
        chunk_elements=_IO_CHUNK_BYTES,
    )
    return undo.enter_context(NativePart(store, geometry, arena.address, disk=disk))


def _tensor(arena: Arena, count: int, dtype: torch.dtype) -> Tensor:
    memory = (ctypes.c_char * arena.num_bytes).from_address(arena.address)
    return torch.frombuffer(memory, dtype=dtype, count=count)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
