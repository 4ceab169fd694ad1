"""A backend as far as the lanes use it, on the CPU: streams are threads that do in-place ops later,
in order.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from lightning_hetero.lanes.backends import BACKENDS, Backend

_PATIENCE_S = 60.0
_LATER = {torch.Tensor.copy_, torch.Tensor.fill_}
_NEW = {torch.empty_like}
_empty = torch.empty  # tests watch torch's


class _Moment:
    def __init__(self) -> None:
        self.passed = threading.Event()
        self.at_s = 0.0

    def arrive(self) -> None:
        self.at_s = time.monotonic()
        self.passed.set()

    def await_(self) -> None:
        assert self.passed.wait(_PATIENCE_S), "a stream waits for a moment that never comes"


class Event:
    def __init__(self, *, timed: bool) -> None:
        self.timed = timed
        self.moment = _Moment()
        self.moment.arrive()  # an event that was never recorded has passed

    def record(self, stream: Any) -> None:
        self.moment = _Moment()
        stream.do(self.moment.arrive)

    def query(self) -> bool:
        return self.moment.passed.is_set()

    def synchronize(self) -> None:
        self.moment.await_()

    def elapsed_time(self, other: Event) -> float:
        assert all(event.timed and event.query() for event in (self, other))
        return (other.moment.at_s - self.moment.at_s) * 1e3


class HostStream:
    """Compute's: what it is given it has done."""

    def do(self, work: Callable[[], object]) -> None:
        work()

    def wait_event(self, event: Event) -> None:
        event.moment.await_()


class Stream(HostStream):
    """Does what it is given in a thread, late by random times."""

    def __init__(self, seed: int | None) -> None:
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.own: list[Tensor] = []
        self.errors: list[BaseException] = []
        self._random = None if seed is None else random.Random(seed)
        threading.Thread(target=self._loop, daemon=True).start()

    def do(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def wait_event(self, event: Event) -> None:
        self.do(event.moment.await_)

    def synchronize(self) -> None:
        event = Event(timed=False)
        event.record(self)
        event.synchronize()

    def end(self) -> None:
        self._work.put(None)

    def _loop(self) -> None:
        while True:
            work = self._work.get()
            if work is None:
                return
            if self._random is not None:
                time.sleep(self._random.choice((0, 0, 1e-3)))
            try:
                work()
            except BaseException as error:
                self.errors.append(error)
            del work


class LateCompute(Stream):
    """Compute's, where some of what it is given it does late; the host does the rest, and waits
    where compute waits.
    """

    def wait_event(self, event: Event) -> None:
        event.moment.await_()


class _Borrowed:
    """A tensor whose memory the stream uses later without keeping it alive, as a GPU does."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._dtype = tensor.dtype

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        assert storage is not None, "memory was freed before the stream has used it"
        return _empty(0, dtype=self._dtype).set_(storage, *self._layout)


class _Deferred(TorchFunctionMode):
    """In-place ops go to the stream; views are made at once, and new memory, which is the stream's
    own.
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _LATER:
            result = func(*args, **(kwargs or {}))
            if func in _NEW:
                self._stream.own.append(result)
            return result
        later = [_Borrowed(a) if isinstance(a, Tensor) else a for a in args]
        self._stream.do(lambda: func(*(a.tensor() if isinstance(a, _Borrowed) else a for a in later)))
        return args[0]


class FakeCuda(Backend):
    """Stands in for a row of the table of backends.

    Args:
        kind: Its name.
        seed: Streams are late by random times.
        refuse: Registration of host memory fails with this code; ``None``: there is no call for it.
    """

    Event = Event

    def __init__(self, kind: str = "cuda", *, seed: int | None = None, refuse: int | None = 0) -> None:
        super().__init__(kind)
        self.unified = False  # its memory is the host's own
        self.profiler = BACKENDS[kind].profiler if kind in BACKENDS else ""
        self.streams: list[Stream] = []
        self.registered: dict[int, int] = {}
        self.ranges: list[str] = []
        self._seed, self._refuse = seed, refuse
        self._compute: HostStream = HostStream()
        self._local = threading.local()

    def event(self, *, timed: bool) -> Any:
        return self.Event(timed=timed)

    def new_stream(self, device: torch.device) -> Any:
        seed = None if self._seed is None else self._seed + len(self.streams)
        self.streams.append(Stream(seed))
        return self.streams[-1]

    def compute_is_late(self) -> LateCompute:
        """From now on compute has a stream that may be behind."""
        self._compute = late = LateCompute(None)
        self.streams.append(late)
        return late

    def current_stream(self, device: torch.device) -> Any:
        return getattr(self._local, "stream", self._compute)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self._local.stream = stream
        try:
            with _Deferred(stream):
                yield
        finally:
            del self._local.stream

    def close(self) -> None:
        for stream in self.streams:
            stream.end()
            assert not stream.errors, stream.errors

    def is_unified(self, device: torch.device) -> bool:
        return self.unified

    def page_lock(self, address: int, num_bytes: int) -> int | None:
        if self._refuse == 0:
            self.registered[address] = num_bytes
        return self._refuse

    def page_unlock(self, address: int) -> None:
        del self.registered[address]

    def range_begins(self, name: str) -> None:
        self.ranges.append(name)

    def range_ends(self) -> None:
        self.ranges.append("pop")

    def mark(self, name: str) -> None:
        self.ranges.append(f"mark {name}")
