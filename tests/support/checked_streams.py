"""Streams that a checker follows: a backend as far as the lanes use it, and the product's threads,
buffers and tickets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetero._native import DONE, READY, Arena, Engine, InPlacePart, NativePart, Ticket
from lightning_hetero._native.library import DTYPE_BYTES
from lightning_hetero.ir.schedule import Lane
from lightning_hetero.lanes import EmulatedDevice, queue, streams
from lightning_hetero.lanes.base import passed_at
from lightning_hetero.lanes.memory import DeviceArena
from lightning_hetero.lanes.op import QueuedOp
from lightning_hetero.lanes.pinned import PageLocker
from lightning_hetero.lanes.streams import StreamLanes
from lightning_hetero.runtime.activations import block as activations
from lightning_hetero.runtime.device import setup
from lightning_hetero.runtime.pool import Lease, LeasePool, Pool
from support.checker import DEVICE, HOST, Checker, nobody
from support.happens_before import Actor, Clock
from support.streams import FakeCuda

# ---- streams and events --------------------------------------------------------------------------


class _Event:
    def __init__(self, checker: Checker) -> None:
        self._checker = checker
        self.actor, self.clock = checker.compute, Clock()

    def record(self, stream: _Stream) -> None:
        self._checker.give_work(stream.actor)
        self.actor, self.clock = stream.actor, stream.actor.hand_on()

    def query(self) -> bool:
        return self._checker.learns(self.actor, self.clock)

    def synchronize(self) -> None:
        self._checker.host().join(self.clock)

    def elapsed_time(self, other: _Event) -> float:
        for event in (self, other):
            if not event.clock or not self._checker.learns(event.actor, event.clock):
                self._checker.found["the time of an event is asked for, and nothing says that it has passed"] = None
        return 0.0


class _Stream:
    def __init__(self, checker: Checker, actor: Actor) -> None:
        self._checker, self.actor = checker, actor

    def wait_event(self, event: _Event) -> None:
        self._checker.give_work(self.actor)
        self.actor.join(event.clock)

    def synchronize(self) -> None:
        self._checker.host().join(self.actor.hand_on())


class CheckedCuda(FakeCuda):
    """Stands in for a backend: streams with clocks."""

    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self._checker = checker
        self._by_actor: dict[int, _Stream] = {}

    def event(self, *, timed: bool) -> Any:
        return _Event(self._checker)

    def new_stream(self, device: torch.device) -> Any:
        name = f"the stream of {('h2d', 'd2h')[len(self.streams) % 2]}"
        stream: Any = _Stream(self._checker, Actor(name, is_stream=True))
        self.streams.append(stream)
        self._by_actor[stream.actor.number] = stream
        return stream

    def close(self) -> None:
        """Streams have no threads."""

    def current_stream(self, device: torch.device) -> Any:
        actor = self._checker.stream()
        return self._by_actor.setdefault(actor.number, _Stream(self._checker, actor))

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        with self._checker.current(stream.actor):
            yield


# ---- the product's own threads, buffers and tickets ----------------------------------------------


class _Keep(list[Tensor]):
    """What an op keeps alive."""

    def __init__(self, tensors: Iterable[Tensor], checker: Checker) -> None:
        super().__init__(tensors)
        self._checker = checker

    def clear(self) -> None:
        self._checker.let_go(self)
        super().clear()


def _checked_op(checker: Checker) -> type[QueuedOp]:
    class CheckedOp(QueuedOp):
        """Who sees that it has returned comes after what its thread has done."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._kept = _Keep((), checker)
            super().__init__(*args, **kwargs)
            self._submitted, self._handed = checker.host().hand_on(), Clock()
            self._done_by, self._passed = checker.host(), nobody()  # who ran it; what its tickets have passed

        @property
        def keep(self) -> list[Tensor]:
            return self._kept

        @keep.setter
        def keep(self, tensors: list[Tensor]) -> None:
            if tensors is not self._kept:  # of those that are not ``is_cpu``, which here are none
                self._kept = _Keep((t for t in tensors if checker.region_of(t).kind != DEVICE), checker)

        def perform(self, work: Callable[[QueuedOp], Iterable[Ticket]]) -> None:
            self._done_by = host = checker.host()
            host.join(self._submitted)

            def checked(queued: QueuedOp) -> Iterable[Ticket]:
                try:
                    return tuple(work(queued))
                finally:
                    self._handed = host.hand_on()

            with checker.doing(f"{self.op.kind} {self.op.payload} of block {self.op.block}"):
                super().perform(checked)

        def handed(self) -> None:
            try:
                super().handed()
            finally:
                checker.host().join(self._handed)

        def passes(self, ticket: Ticket, what: int) -> None:
            super().passes(ticket, what)
            if ticket in checker.tickets:
                self._passed.join(checker.tickets[ticket][what])

        def issued(self) -> None:
            super().issued()
            checker.host().join(self._passed.clock)  # another thread may have waited for the tickets

        def done(self) -> bool:
            tickets, what = self._tickets, passed_at(self.op)
            if not super().done():
                return False
            for ticket in tickets if what else ():
                if ticket in checker.polled:  # it was asked how far it is
                    self._passed.join(checker.tickets[ticket][what])
            return checker.learns(self._done_by, self._handed) and checker.learns_all(self._passed.clock)

        def ended(self) -> bool:
            with checker.only_looking():
                found = super().ended()
            if found:  # nobody waits for it any more: `drain` leaves it out
                checker.settled.join(self._handed)
                checker.settled.join(self._passed.clock)
                if self.moment is not None and (self.error is None or checker.learns(self.moment.actor, self.moment.clock)):
                    checker.settled.join(self.moment.clock)
            return found

    return CheckedOp


def _check_lanes(checker: Checker, patch: pytest.MonkeyPatch) -> None:
    begin, copy, join, lock = StreamLanes.__init__, StreamLanes.copies, queue.Queue.join, PageLocker.buffer
    drain = queue.QueuedLanes.drain
    take, give, reserve = DeviceArena.take, DeviceArena.give, streams._StreamArena.__init__

    def begins(lanes: StreamLanes, *args: Any, **kwargs: Any) -> None:
        begin(lanes, *args, **kwargs)
        for memory in (*lanes._staging.values(), lanes._scratch):
            checker.is_of(DEVICE, memory)

    def copies(lanes: StreamLanes, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        current = lanes._current()
        if current is not None and current.op.lane in lanes._streams:
            up = current.op.lane is Lane.H2D
            for target, source in zip(targets, sources, strict=True):
                checker.is_of(HOST, source if up else target)
                checker.is_of(DEVICE, target if up else source)
        copy(lanes, targets, sources)

    def locked(locker: PageLocker, num_bytes: int) -> Tensor:
        memory = lock(locker, num_bytes)
        checker.is_of(HOST, memory)
        return memory

    def joins(one: queue.Queue, timeout_s: float) -> bool:
        ended = join(one, timeout_s)
        if ended and one._thread in checker.threads:
            checker.host().join(checker.threads[one._thread].clock)
        return ended

    def drains(lanes: queue.QueuedLanes) -> None:
        try:
            drain(lanes)
        finally:
            checker.host().join(checker.settled.clock)

    def reserves(arena: Any, *args: Any, **kwargs: Any) -> None:
        reserve(arena, *args, **kwargs)
        checker.use_on_stream(arena._buffer, "reserving memory for ops")
        checker.is_of(DEVICE, arena._buffer)

    def takes(arena: DeviceArena, num_bytes: int, what: str) -> Tensor:
        memory = take(arena, num_bytes, what)
        uses(arena)(memory, f"taking memory for {what}")
        return memory

    def gives(arena: DeviceArena, memory: Tensor) -> None:
        uses(arena)(memory, "giving memory back")
        give(arena, memory)

    def uses(arena: DeviceArena) -> Callable[[Tensor, str], None]:
        return checker.use_on_stream if isinstance(arena, streams._StreamArena) else checker.use_of_arena

    patch.setattr(queue, "QueuedOp", _checked_op(checker))
    patch.setattr(PageLocker, "buffer", locked)
    patch.setattr(queue.Queue, "join", joins)
    patch.setattr(StreamLanes, "__init__", begins)
    patch.setattr(StreamLanes, "copies", copies)
    patch.setattr(queue.QueuedLanes, "drain", drains)
    patch.setattr(streams._StreamArena, "__init__", reserves)
    patch.setattr(DeviceArena, "take", takes)
    patch.setattr(DeviceArena, "give", gives)


def _check_pools(checker: Checker, patch: pytest.MonkeyPatch) -> None:
    take, give, lend, end = Pool.take, Pool.give, LeasePool.lend, Lease.__del__

    def key(thing: Any) -> int:
        return thing.data_ptr() if isinstance(thing, Tensor) else id(thing)

    def comes(thing: Any) -> None:
        if isinstance(thing, Tensor):
            checker.is_of(HOST, thing)
        checker.host().join(checker.given.pop(key(thing), {}))

    def takes(pool: Pool[Any], num_bytes: int) -> Any:
        thing = take(pool, num_bytes)
        comes(thing)
        return thing

    def gives(pool: Pool[Any], num_bytes: int, thing: Any) -> None:
        checker.given[key(thing)] = checker.host().hand_on()
        give(pool, num_bytes, thing)

    def lends(pool: LeasePool[Any], num_bytes: int) -> Lease[Any]:
        lease = lend(pool, num_bytes)
        comes(lease.value)
        return lease

    def ends(lease: Lease[Any]) -> None:
        checker.given[key(lease.value)] = checker.host().hand_on()
        end(lease)

    patch.setattr(Pool, "take", takes)
    patch.setattr(Pool, "give", gives)
    patch.setattr(LeasePool, "lend", lends)
    patch.setattr(Lease, "__del__", ends)


def _check_engine(checker: Checker, patch: pytest.MonkeyPatch) -> None:
    real = {name: getattr(Engine, name) for name in ("fetch", "release", "open_update", "arm_update", "store", "read", "discard")}
    wait, poll, opens, binds, drops = Ticket.wait, Ticket.poll, NativePart.__init__, NativePart.bind, Arena.drop
    maps, drops_state, opens_in_place = Arena.__init__, NativePart.drop_state, InPlacePart.__init__

    def ends(ticket: Ticket, actor: Actor) -> Ticket:
        clock = actor.hand_on()
        checker.tickets[ticket] = actor, clock, clock
        return ticket

    def simple(name: str, *, writes: bool) -> None:
        def call(engine: Engine, native: NativePart, *args: Any, **options: Any) -> Ticket:
            actor = checker.task(native, checker.ends_of(options.get("after", ())))
            checker.use_part(native, name, writes=writes)
            return ends(real[name](engine, native, *args, **options), actor)

        patch.setattr(Engine, name, call)

    for name in ("fetch", "release", "discard"):
        simple(name, writes=True)

    def stores(engine: Engine, native: NativePart, patches: Any, *, weights_from_memory: bool, **options: Any) -> Ticket:
        actor = checker.task(native, checker.ends_of(options.get("after", ())))
        if weights_from_memory:
            checker.use_part(native, "store", writes=False)
        _use_patches(actor, native, patches, "store", writes=False)
        return ends(real["store"](engine, native, patches, weights_from_memory=weights_from_memory, **options), actor)

    def reads(engine: Engine, native: NativePart, patches: Any, **options: Any) -> Ticket:
        actor = checker.task(native, checker.ends_of(options.get("after", ())))
        _use_patches(actor, native, patches, "read", writes=True)
        return ends(real["read"](engine, native, patches, **options), actor)

    def _use_patches(actor: Actor, native: NativePart, patches: Any, what: str, *, writes: bool) -> None:
        for one in patches:
            width = DTYPE_BYTES[native.geometry.array_dtype(one.array)]
            checker.use(actor, one.data, one.data + width * one.numel, what, writes=writes)

    def opens_update(engine: Engine, native: NativePart, *, weights_resident: bool, **options: Any) -> Ticket:
        ticket = real["open_update"](engine, native, weights_resident=weights_resident, **options)
        checker.after_open[ticket] = weights_resident, checker.ends_of(options.get("after", ()))
        return ticket

    def arms(engine: Engine, ticket: Ticket, segments: Any, *args: Any, **options: Any) -> None:
        native, (resident, after) = ticket.block, checker.after_open[ticket]
        assert native is not None
        actor = checker.task(native, after)
        for one in segments:
            width = DTYPE_BYTES[one.grad_dtype]
            checker.use(actor, one.grad, one.grad + width * one.numel, "update, of a gradient", writes=False)
        if resident:
            checker.use_part(native, "update, of weights", writes=True)
        for array in range(native.geometry.num_state):
            address = native.state_address(array)
            if address is not None:
                checker.use(actor, address, address + 4 * native.geometry.num_elements, "update, of state", writes=True)
        ready = actor.hand_on()
        if resident and native.geometry.weights_on_disk_file:
            checker.use_part(native, "update, of weights for the disk", writes=False)
        checker.tickets[ticket] = actor, ready, actor.hand_on()
        real["arm_update"](engine, ticket, segments, *args, **options)

    def waits(ticket: Ticket, what: int = DONE, timeout: float | None = None) -> None:
        wait(ticket, what, timeout)
        if ticket in checker.tickets:
            checker.host().join(checker.tickets[ticket][what])

    def polls(ticket: Ticket) -> int:
        reached = poll(ticket)
        if ticket not in checker.tickets:
            return reached
        actor, *clocks = checker.tickets[ticket]
        known = [what for what in (READY, DONE) if what <= reached and checker.learns(actor, clocks[what - 1])]
        if known:
            checker.polled.add(ticket)
        return max(known, default=0)

    def mapped(arena: Arena, num_bytes: int) -> None:
        maps(arena, num_bytes)
        checker.of_host(arena.address, num_bytes, arena)

    def dropped(arena: Arena, offset: int = 0, num_bytes: int | None = None) -> None:
        start = arena.address + offset
        length = arena.num_bytes - offset if num_bytes is None else num_bytes
        checker.use(checker.host(), start, start + length, "giving pages back", writes=True)
        drops(arena, offset, num_bytes)

    def dropped_state(native: NativePart, array: int) -> None:
        address = native.state_address(array)
        if address is not None:
            checker.use(checker.host(), address, address + 4 * native.geometry.num_elements, "giving pages back", writes=True)
        drops_state(native, array)

    def note(native: NativePart, address: int) -> None:
        geometry = native.geometry
        span = address, address + DTYPE_BYTES[geometry.weight_dtype] * geometry.num_elements
        known = checker.parts.get(native)
        checker.parts[native] = Actor(f"the engine's queue of part {geometry.id}") if known is None else known[0], span

    def opened(native: NativePart, store: Any, geometry: Any, address: int, **options: Any) -> None:
        opens(native, store, geometry, address, **options)
        note(native, address)
        for array in range(geometry.num_state):
            state = native.state_address(array)
            if state is not None:
                checker.of_host(state, 4 * geometry.num_elements, native)

    def opened_in_place(native: InPlacePart, geometry: Any, address: int, **options: Any) -> None:
        opens_in_place(native, geometry, address, **options)
        note(native, address)

    def bound(native: NativePart, address: int, **options: Any) -> None:
        binds(native, address, **options)
        note(native, address)

    calls = {"store": stores, "read": reads, "open_update": opens_update, "arm_update": arms}
    for name, call in calls.items():
        patch.setattr(Engine, name, call)
    patch.setattr(Ticket, "wait", waits)
    patch.setattr(Ticket, "poll", polls)
    patch.setattr(Arena, "__init__", mapped)
    patch.setattr(Arena, "drop", dropped)
    patch.setattr(NativePart, "__init__", opened)
    patch.setattr(InPlacePart, "__init__", opened_in_place)
    patch.setattr(NativePart, "bind", bound)
    patch.setattr(NativePart, "drop_state", dropped_state)


@contextmanager
def checking(*, prompt: bool = False) -> Iterator[Checker]:
    """Inside, lanes over ``checker.cuda`` are checked. Raises what was found, whatever else was
    raised.
    """
    checker = Checker(prompt=prompt)
    checker.cuda = CheckedCuda(checker)
    with pytest.MonkeyPatch.context() as patch:
        _check_lanes(checker, patch)
        _check_pools(checker, patch)
        _check_engine(checker, patch)
        try:
            with checker.recording():
                yield checker
        finally:
            checker.check_threads()
            checker.check()


@contextmanager
def checked_devices(*, prompt: bool = False) -> Iterator[Checker]:
    """Inside, the lanes of emulated devices are those of a device with streams, and checked."""
    with checking(prompt=prompt) as checker, pytest.MonkeyPatch.context() as patch:

        def make(device: EmulatedDevice, *, poison: bool) -> StreamLanes:
            return StreamLanes("cpu", backend=checker.cuda, memory_bytes=device.memory_bytes, staging_bytes=2**16, poison=poison)

        patch.setattr(setup, "EmulatedLanes", make)
        patch.setattr(activations, "SMALL_BYTES", 64)  # the models are small, and what they save shall leave
        yield checker
