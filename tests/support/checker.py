"""Checks that every use of memory by lanes, allocators, the engine and compute is ordered: see
``happens_before``.

What a stream is given is done at once, so results never depend on timing, and a wait that is
missing changes none of them. Instead, clocks follow what *would* order the uses on a device. A
stream comes after the host thread that gives it work, and after the events that it waits for. A
host thread comes after a stream only where it waits for an event, or for a result: ``item()``, a
copy that blocks. Threads come after each other by ops (submitted, returned), by buffers that go
through a pool, and by tickets. Locks order nothing: which thread comes first is chance.

Memory is the host's, the device's, or not known yet: tensors that torch makes are all in CPU memory
here. These are the device's once they meet device memory in an operator or a lane copies them from
there, and the host's likewise. Uses by an operator that has device memory happen on the current
stream, others on the thread. Torch's allocator reuses device memory in the order of compute's
stream: there, memory is as if written when it is allocated and when it is freed.

``prompt``: whether polling finds what has been given to streams and to the engine done. Then it
orders, too. Else polling finds only what something else has ordered, as if all else took for ever:
this finds more, but memory is not used again.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_hetero._native import NativePart, Ticket
from lightning_hetero.handles.offloaded_tensor import OffloadedTensor
from lightning_hetero.lanes.memory import ALIGNMENT_BYTES
from lightning_hetero.units import round_up
from support.happens_before import Actor, Clock, Memory, Use

HOST, DEVICE, UNKNOWN = "host", "device", "unknown"
_COPIES = {"aten::copy_", "aten::_foreach_copy_"}
_WAITING = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"}
_MAKING = ("aten::empty", "aten::new_empty")
_MOVING = {"aten::set_", "aten::resize_", "aten::_resize_output_"}  # they change what a tensor is over, and no memory


class UnorderedError(AssertionError):
    """Uses of memory that nothing orders."""


def nobody() -> Actor:
    """To collect clocks."""
    actor = Actor("nobody")
    actor.clock.clear()
    return actor


class _Region:
    """Memory of one kind, from ``start`` to ``end``."""

    def __init__(self, start: int, end: int, kind: str, made: Use | None, owner: Actor | None) -> None:
        self.start, self.end, self.kind = start, end, kind
        self.made = made  # its allocation, in the order of the stream whose allocator it comes from
        self.owner = owner  # that stream
        self.let_go: Clock = {}  # of those who held it while streams used it, and do not any more
        self.watch: object = None


class Checker:
    """Follows clocks and uses; :attr:`found` says which uses nothing orders."""

    cuda: Any  # what lanes take for ``torch.cuda``

    def __init__(self, *, prompt: bool) -> None:
        self.prompt = prompt
        self.found: dict[str, None] = {}
        self.uses = 0
        self.compute = Actor("compute's stream", is_stream=True)
        self.settled = nobody()  # ended ops that nobody waits for any more
        self.memory = Memory(self._conflict)
        self.lock = threading.RLock()
        self.tickets: weakref.WeakKeyDictionary[Ticket, tuple[Actor, Clock, Clock]] = weakref.WeakKeyDictionary()
        self.polled: weakref.WeakSet[Ticket] = weakref.WeakSet()  # of which polls found something
        self.after_open: weakref.WeakKeyDictionary[Ticket, tuple[bool, list[Clock]]] = weakref.WeakKeyDictionary()
        self.parts: weakref.WeakKeyDictionary[NativePart, tuple[Actor, tuple[int, int]]] = weakref.WeakKeyDictionary()
        self.given: dict[int, Clock] = {}  # by the address of what a pool has
        self.threads: weakref.WeakKeyDictionary[threading.Thread, Actor] = weakref.WeakKeyDictionary()
        self.returned: list[tuple[int, int, Clock]] = []  # what was given back to an arena without streams, and when
        self._regions: list[_Region] = []
        self._freed: deque[tuple[_Region, list[Clock]]] = deque()
        self._local = threading.local()

    def _conflict(self, earlier: Use, later: Use) -> None:
        self.found[f"nothing orders the {later} after the {earlier}"] = None

    def check(self) -> None:
        """Raises what was found."""
        with self.lock:
            self.forget_freed()
        if self.found:
            raise UnorderedError("\n".join([f"{len(self.found)} pairs of uses have no order:", *list(self.found)[:12]]))

    def check_threads(self) -> None:
        """The lanes are closed: nothing comes after what a thread of theirs still does."""
        for thread in [thread for thread in self.threads if thread.name.startswith("lightning-hetero") and thread.is_alive()]:
            self.found[f"nothing orders the end of the lanes after that of thread {thread.name!r}"] = None

    # ---- who -------------------------------------------------------------------------------------

    def host(self) -> Actor:
        """The calling thread."""
        actor: Actor | None = getattr(self._local, "actor", None)
        if actor is None:
            thread = threading.current_thread()
            actor = self._local.actor = self.threads[thread] = Actor(f"thread {thread.name!r}")
        return actor

    def stream(self) -> Actor:
        """The calling thread's current stream."""
        stream: Actor = getattr(self._local, "stream", self.compute)
        return stream

    @contextmanager
    def current(self, stream: Actor) -> Iterator[None]:
        """The stream is the calling thread's current one."""
        self._local.stream = stream
        try:
            yield
        finally:
            del self._local.stream

    def give_work(self, stream: Actor) -> None:
        """What the stream does next comes after what the calling thread has done."""
        stream.join(self.host().hand_on())

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Uses in this thread belong to an op."""
        outer = getattr(self._local, "doing", None)
        self._local.doing = what
        try:
            with self.recording():
                yield
        finally:
            self._local.doing = outer

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Torch's operators in this thread are recorded."""
        if getattr(self._local, "records", False):
            yield
            return
        self._local.records = True
        try:
            with _Recording(self):
                yield
        finally:
            self._local.records = False

    @contextmanager
    def only_looking(self) -> Iterator[None]:
        """What polls find here decides nothing."""
        outer, self._local.looks = getattr(self._local, "looks", False), True
        self._local.seen = nobody()
        try:
            yield
        finally:
            self._local.looks = outer
            del self._local.seen

    def learns(self, actor: Actor, clock: Clock) -> bool:
        """Whether a poll finds that the actor has come to its part of a clock."""
        host = self.host()
        if self.prompt:
            self._join_found(host, clock)
        return self.prompt or host.knows(clock, actor)

    def learns_all(self, clock: Clock) -> bool:
        """The same for all actors."""
        host = self.host()
        if self.prompt:
            self._join_found(host, clock)
        return self.prompt or all(host.clock.get(number, 0) >= time for number, time in clock.items())

    def _join_found(self, host: Actor, clock: Clock) -> None:
        """A poll has found this; one that only looks may still let memory go for it."""
        (self._local.seen if getattr(self._local, "looks", False) else host).join(clock)

    # ---- where -----------------------------------------------------------------------------------

    def region(self, start: int, end: int, kind: str, *, made: Use | None = None, owner: Actor | None = None) -> _Region:
        """Memory that begins now."""
        region = _Region(start, end, kind, made, owner)
        at = bisect_right(self._regions, start, key=lambda r: r.start)
        while at and self._regions[at - 1].end > start:  # it ended, and nobody said so
            at -= 1
        stop = at
        while stop < len(self._regions) and self._regions[stop].start < end:
            stop += 1
        self._regions[at:stop] = [region]
        self.memory.end(start, end, Use(self.host(), 0, "", writes=True), {}, matters=lambda use: False)
        return region

    def of_host(self, start: int, num_bytes: int, thing: object) -> None:
        """Host memory that torch has not made, and that ends with a thing."""
        with self.lock:
            self.forget_freed()
            self._watch(self.region(start, start + num_bytes, HOST), thing)

    def find(self, address: int) -> _Region | None:
        at = bisect_right(self._regions, address, key=lambda r: r.start) - 1
        return self._regions[at] if at >= 0 and address < self._regions[at].end else None

    def region_of(self, tensor: Tensor, kind: str = UNKNOWN) -> _Region:
        """The memory of a tensor that has some; it is of this kind if it has just been made."""
        with self.lock:
            found = self.find(tensor.data_ptr())
            if found is None:
                storage, owner = tensor.untyped_storage(), self.stream()
                made = Use(owner, owner.clock[owner.number], f"allocation for {self._name('torch')}", writes=True)
                start = storage.data_ptr()
                kind = DEVICE if kind == UNKNOWN and owner is not self.compute else kind  # a lane of a stream makes nothing else
                found = self.region(start, start + storage.nbytes(), kind, made=made, owner=owner)
                self._watch(found, storage)
            return found

    def _watch(self, region: _Region, thing: object) -> None:
        """The region ends with a storage, or with an object of the native library."""
        compute, freed = self.compute, self._freed

        def free(_: object) -> None:  # in any thread, at any time
            clocks = [dict(self.host().clock)]
            if region.kind != HOST:
                clocks.append(dict((region.owner or compute).clock))
            freed.append((region, clocks))

        region.watch = weakref.ref(thing, free)

    def forget_freed(self) -> None:
        while self._freed:
            region, clocks = self._freed.popleft()
            known = Actor("the end of its memory")
            for clock in (*clocks, region.let_go):
                known.join(clock)
            use = Use(known, 0, f"freeing it ({region.kind} memory)", writes=True)
            self.memory.end(region.start, region.end, use, known.clock, matters=lambda use: use.actor.is_stream)
            if region in self._regions:
                self._regions.remove(region)

    def is_of(self, kind: str, tensor: Tensor) -> None:
        """The tensor is in memory of this kind, as far as that was not known."""
        if not tensor.numel():
            return
        with self.lock:
            self.forget_freed()
            region = self.region_of(tensor, kind)
            if region.kind == UNKNOWN:
                region.kind = kind
                made = region.made
                if kind == DEVICE and made is not None and not made.is_before(self.clock_of_stream()):
                    self._conflict(made, Use(self.stream(), 0, self._name("its first use"), writes=True))

    def clock_of_stream(self) -> Clock:
        stream = self.stream()
        self.give_work(stream)
        return stream.clock

    def let_go(self, tensors: Iterable[Tensor]) -> None:
        """Somebody who knows what streams have done holds these no more."""
        clock = self.host().hand_on()
        if (seen := getattr(self._local, "seen", None)) is not None:
            seen.join(clock)
            clock = seen.clock
        with self.lock:
            self.forget_freed()
            for tensor in tensors:
                region = self.find(tensor.data_ptr()) if tensor.numel() else None
                if region is not None:
                    for number, time in clock.items():
                        region.let_go[number] = max(time, region.let_go.get(number, 0))

    # ---- uses ------------------------------------------------------------------------------------

    def _name(self, what: str) -> str:
        doing = getattr(self._local, "doing", None)
        return what if doing is None else f"{what} in {doing}"

    def use(self, actor: Actor, start: int, end: int, what: str, *, writes: bool) -> None:
        """The actor uses these bytes now; it has joined what comes before."""
        if end <= start:
            return
        with self.lock:
            self.forget_freed()
            self.uses += 1
            self.memory.use(start, end, Use(actor, actor.clock[actor.number], self._name(what), writes), actor.clock)

    def use_on_stream(self, memory: Tensor, what: str) -> None:
        """The allocator of the lanes' memory gives it out, or takes it back, in the current
        stream's order.
        """
        if memory.numel():
            stream = self.stream()
            self.give_work(stream)
            start = memory.data_ptr()
            self.use(stream, start, start + round_up(memory.nbytes, ALIGNMENT_BYTES), what, writes=True)

    def use_of_arena(self, memory: Tensor, what: str) -> None:
        """The same without streams: who takes memory comes after those who have given it back."""
        if memory.numel():
            host, start = self.host(), memory.data_ptr()
            end = start + round_up(memory.nbytes, ALIGNMENT_BYTES)
            with self.lock:
                for first, last, clock in self.returned:
                    if first < end and start < last:
                        host.join(clock)
                self.use(host, start, end, what, writes=True)
                self.returned.append((start, end, host.hand_on()))

    def ran(self, func: Any, name: str, uses: Sequence[tuple[Tensor, bool]], *, blocks: bool) -> None:
        """An operator of torch has run in this thread."""
        with self.lock:
            self.forget_freed()
            rows = [(tensor, writes, self.region_of(tensor)) for tensor, writes in uses]
            is_copy = name in _COPIES and torch._C._current_graph_task_id() < 0  # autograd copies between equals
            kinds = {region.kind for tensor, _, region in rows if tensor.ndim or region.kind == DEVICE}
            host, on_stream = self.host(), DEVICE in kinds
            if kinds >= {HOST, DEVICE} and not is_copy:
                # `.cpu()` of one element does nothing here; elsewhere it brings it, and waits.
                on_stream = any(tensor.numel() > 1 for tensor, _, region in rows if region.kind == DEVICE)
                if not on_stream:
                    host.join(self.compute.hand_on())
                    rows = [row for row in rows if row[2].kind == HOST]
            if not is_copy and kinds & {HOST, DEVICE}:
                for _, _, region in rows:
                    if region.kind == UNKNOWN:
                        region.kind = DEVICE if on_stream else HOST
            stream = self.stream()
            if on_stream:
                self.give_work(stream)
            for tensor, writes, region in rows:
                by_value = on_stream and not tensor.ndim and region.kind == HOST
                actor = stream if on_stream and not by_value else host
                start, end = _span(tensor)
                self.use(actor, start, end, f"{func}{tuple(tensor.shape)}", writes=writes)
            mixed = len({region.kind for _, _, region in rows}) > 1
            if on_stream and (name in _WAITING or (is_copy and blocks and mixed)):
                host.join(stream.hand_on())

    # ---- the engine ------------------------------------------------------------------------------

    def task(self, native: NativePart, after: Iterable[Clock]) -> Actor:
        """The engine's queue of a part takes a task, which waits for these."""
        actor, _ = self.parts[native]
        actor.join(self.host().hand_on())
        for clock in after:
            actor.join(clock)
        return actor

    def ends_of(self, after: Sequence[Ticket]) -> list[Clock]:
        return [self.tickets[ticket][2] for ticket in after if ticket in self.tickets]

    def use_part(self, native: NativePart, what: str, *, writes: bool) -> None:
        actor, (start, end) = self.parts[native]
        self.use(actor, start, end, what, writes=writes)


class _Recording(TorchDispatchMode):
    """Tells the checker what torch's operators read and write."""

    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self._checker = checker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, OffloadedTensor) for kind in types):
            return NotImplemented  # what it does with its memory comes here, too
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        if schema.name in _MOVING or (schema.returns and all(r.alias_info and not r.alias_info.is_write for r in schema.returns)):
            return result  # a view
        uses: list[tuple[Tensor, bool]] = []
        for number, argument in enumerate(schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            if isinstance(value, (Tensor, list, tuple)):
                writes = bool(argument.alias_info and argument.alias_info.is_write)
                uses += [(t, writes) for t in tree_leaves(value) if _has_memory(t)]
        known = {tensor.data_ptr() for tensor, _ in uses}
        made = [t for t in tree_leaves(result) if _has_memory(t) and t.data_ptr() not in known]
        if schema.name.startswith(_MAKING):
            with self._checker.lock:
                self._checker.forget_freed()
                like = uses[0][0] if uses and kwargs.get("device") is None else None
                kind = UNKNOWN if like is None else self._checker.region_of(like).kind
                for tensor in made:
                    self._checker.region_of(tensor, kind)
            return result
        uses += [(tensor, True) for tensor in made]
        if uses:
            at = next((n for n, a in enumerate(schema.arguments) if a.name == "non_blocking"), len(args))
            blocks = not (args[at] if at < len(args) else kwargs.get("non_blocking", False))
            self._checker.ran(func, schema.name, uses, blocks=blocks)
        return result


def _has_memory(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or not tensor.numel() or tensor.device.type != "cpu":
        return False
    try:
        return bool(tensor.data_ptr())
    except RuntimeError:  # wrappers, fake tensors
        return False


def _span(tensor: Tensor) -> tuple[int, int]:
    last = sum((n - 1) * abs(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize
