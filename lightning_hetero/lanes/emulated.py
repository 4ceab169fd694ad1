"""A device made of CPU memory: its own arena, and copy lanes of set bandwidth and latency.

[Note: Emulated time]
A copy really happens, and then the lane sleeps until the op has taken the link's time: latency plus
bytes over bandwidth, from the start of the op. A lane that wakes a little late starts its next op
where the last one should have ended, so lateness does not add up. Compute runs at the host's speed.
At each mark and wait the calling thread sleeps until compute has taken ``compute_slowdown`` times
as long. Updates take their time as copies do. With a set rate, updates on the CPU run one after the
other, as the schedule issues them.

[Note: Hazards]
Under poison a copy behaves as the slowest and the fastest transfer at once. It reads its source as
it starts, its target is NaN until it ends, and elements that change meanwhile arrive as NaN. So a
copy that starts before its source is complete, a reader that does not wait for it, and memory that
is reused too early all show as wrong results.
"""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, fields

import torch
from torch import Tensor

from lightning_hetero._native import READY, Ticket
from lightning_hetero.clock import now_s
from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.schedule import Lane, OpKind
from lightning_hetero.lanes.base import All, Event, Moment
from lightning_hetero.lanes.contract import host_memory, host_moment
from lightning_hetero.lanes.memory import DeviceArena
from lightning_hetero.lanes.network import EmulatedNetwork
from lightning_hetero.lanes.op import DELAY_S, QueuedOp
from lightning_hetero.lanes.queue import QueuedLanes
from lightning_hetero.units import parse_bytes

_LATE_S = 1e-3  # a lane that is later than this has not overslept: the machine is too slow for the link


@dataclass(frozen=True, slots=True)
class EmulatedDevice:
    """A device with memory of its own, made of CPU memory.

    An example is ``EmulatedDevice("64MiB", h2d_bytes_per_s=12e9)``.

    Attributes:
        memory: Its size, such as ``"64MiB"``, or bytes.
        h2d_bytes_per_s: Bandwidth of copies to the device; ``None``: the speed of memory.
        d2h_bytes_per_s: Bandwidth of copies from the device.
        latency_s: Time that every op of a copy lane takes in addition.
        compute_slowdown: Time of compute as a multiple of the host's; at least 1.
        cpu_update_bytes_per_s: Most bytes of optimizer state in memory that the CPU updates in a
            second.
        device_update_bytes_per_s: The same for updates on the device.
        disk_bytes_per_s: Most bytes that each disk reads in a second, and writes at the same time.
        net_bytes_per_s: Most bytes that one of several ranks sends to the others in a second.
        net_latency_s: Time that every collective takes in addition.
        peer_bytes_per_s: Most bytes that one of several devices sends to the others in a second,
            where they exchange weights and gradients themselves.
        peer_latency_s: Time that every such exchange takes in addition.
        unified: Its memory is part of ``host_memory``, as on machines whose processors share it.
        seed: Delays every op at random before it starts, by the same time in every run; ``None``:
            no delays.

    Raises:
        ConfigError: A value is out of range.
    """

    memory: str | int
    _: KW_ONLY
    h2d_bytes_per_s: float | None = None
    d2h_bytes_per_s: float | None = None
    latency_s: float = 0.0
    compute_slowdown: float = 1.0
    cpu_update_bytes_per_s: float | None = None
    device_update_bytes_per_s: float | None = None
    disk_bytes_per_s: float | None = None
    net_bytes_per_s: float | None = None
    net_latency_s: float = 0.0
    peer_bytes_per_s: float | None = None
    peer_latency_s: float = 0.0
    unified: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        _ = self.memory_bytes, self.network, self.peer_links
        for name in [field.name for field in fields(self) if field.name.endswith("_bytes_per_s")]:
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise ConfigError(f"{name}={rate!r}; allowed: a positive number of bytes per second, or None for no limit.")
        if not self.latency_s >= 0:
            raise ConfigError(f"latency_s={self.latency_s!r}; allowed: seconds, at least 0.")
        if not self.compute_slowdown >= 1:
            raise ConfigError(f"compute_slowdown={self.compute_slowdown!r}; allowed: at least 1, which is the host's own speed.")

    @property
    def device(self) -> torch.device:
        """The host, whose memory it is made of."""
        return torch.device("cpu")

    @property
    def network(self) -> EmulatedNetwork | None:
        """The network among several ranks; ``None`` if its speed is that of the machine."""
        return _network(self.net_bytes_per_s, self.net_latency_s)

    @property
    def peer_links(self) -> EmulatedNetwork | None:
        """The links between several devices; ``None`` if their speed is that of the machine."""
        return _network(self.peer_bytes_per_s, self.peer_latency_s)

    @property
    def is_unified(self) -> bool:
        """Whether its memory counts as the host's."""
        return self.unified

    @property
    def apart_bytes(self) -> int:
        """Plans have all of its memory."""
        return 0

    def held_bytes(self) -> int:
        """Nothing beside the process's own memory, of which it is made."""
        return 0

    @property
    def partitioned(self) -> bool:
        """No: what forward saves and what ops take share its memory."""
        return False

    @property
    def memory_bytes(self) -> int:
        """Its size in bytes."""
        size = parse_bytes(self.memory, name="EmulatedDevice.memory")
        if size is None:
            raise ConfigError('EmulatedDevice.memory=None; allowed: a size such as "64MiB", or bytes.')
        return size


def _network(bytes_per_s: float | None, latency_s: float) -> EmulatedNetwork | None:
    return None if bytes_per_s is None and not latency_s else EmulatedNetwork(bytes_per_s=bytes_per_s, latency_s=latency_s)


class EmulatedLanes(QueuedLanes):
    """Lanes of an emulated device; see [Note: Emulated time] and, for poison, [Note: Hazards]."""

    def __init__(self, emulated: EmulatedDevice, *, poison: bool = False) -> None:
        host = torch.device("cpu")
        self._arena = DeviceArena(emulated.memory_bytes, host, poison=poison)
        super().__init__(host, self._arena, poison=poison)
        self.counts = True
        self._allocated: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._seed = emulated.seed
        self._compute = _SlowCompute(emulated.compute_slowdown)
        rates = {Lane.H2D: emulated.h2d_bytes_per_s, Lane.D2H: emulated.d2h_bytes_per_s}
        sleep = self._failures.closing.wait  # ends as the lanes close
        self._links = {lane: _Link(rate, emulated.latency_s, sleep) for lane, rate in rates.items()}
        rates = {Lane.CPU: emulated.cpu_update_bytes_per_s, Lane.COMPUTE: emulated.device_update_bytes_per_s}
        self._updates = {lane: _Link(rate, 0.0, sleep) for lane, rate in rates.items() if rate is not None}

    def mark(self) -> Event:
        """Where compute is, once it has taken its time."""
        self._compute.pause()
        self._compute.resume()
        return All(())

    def now(self, name: str = "") -> Moment:
        """The moment that compute has come to, once it has taken its time."""
        self._compute.pause()
        self._compute.resume()
        return host_moment()

    def compute_waits(self, events: Sequence[Event]) -> None:
        """Compute takes its time, and waits."""
        self._compute.pause()
        for event in events:
            event.wait()
        self._compute.resume()

    def drain(self) -> None:
        """Waits for all that was submitted; compute is at rest."""
        self._compute.pause()
        super().drain()

    def _work(self, queued: QueuedOp) -> Iterable[Ticket]:
        op = queued.op
        link, on_compute = self._links.get(op.lane), op.lane is Lane.COMPUTE
        update = self._updates.get(op.lane) if op.kind is OpKind.UPDATE else None
        if on_compute:
            self._compute.pause()
        at_once = all(event.done() for event in queued.after)
        for event in () if at_once else queued.after:
            event.wait()
        if self._seed is not None:
            at_once = False
            self._failures.closing.wait(random.Random(f"{self._seed} {queued.number}").uniform(0, DELAY_S))
        if on_compute:
            self._compute.resume()
        if link is not None:
            queued.started_s = link.begin(queued.submitted_s if at_once else None)
        if update is not None:
            queued.started_s = update.begin(queued.submitted_s if at_once else None)
        tickets = self._run(queued)
        if update is not None:
            for ticket in tickets:
                queued.passes(ticket, READY)
            update.end()
            update.carry(op.num_bytes)
        if link is not None:
            link.end()
        return tickets

    def allocated(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage of torch, which is in host memory, against the device's memory."""
        key, size = storage._cdata, storage.nbytes()
        if key in self._allocated:
            return
        self._arena.reserve(size, "what forward saves")

        def freed(_: object) -> None:
            if self._allocated.pop(key, None) is not None:
                self._arena.unreserve(size)

        self._allocated[key] = weakref.ref(storage, freed)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Moves and converts, in the time that the lane's link takes; the device converts."""
        op = self._current()
        link = None if op is None else self._links.get(op.op.lane)
        with torch.no_grad():
            if op is None or link is None:
                target.copy_(source)
                return
            num_bytes = source.nbytes if op.op.lane is Lane.H2D else target.nbytes
            if not self._poison:
                target.copy_(source)
                return link.carry(num_bytes)
            seen = source.clone()
            _spoil(target)
            link.carry(num_bytes)
            changed = (source != seen) & ((source == source) | (seen == seen))  # both NaN: the same
            target.copy_(seen)
            _spoil(target, changed)

    def copies(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copies many tensors by one call, as :meth:`copy` does."""
        op = self._current()
        link = None if op is None else self._links.get(op.op.lane)
        if op is None or link is None or self._poison or op.op.kind is OpKind.UPLOAD:
            for target, source in zip(targets, sources, strict=True):
                self.copy(target, source)
            return
        torch._foreach_copy_(list(targets), list(sources))
        link.carry(sum(tensor.nbytes for tensor in (sources if op.op.lane is Lane.H2D else targets)))

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Host memory of this size."""
        return host_memory(num_bytes, poison=self._poison)

    def peak_bytes(self) -> int:
        """The most that ops have taken, and that forward has saved beside it, at any time."""
        return self._arena.peak_bytes


class _Link:
    """The time that the ops of one lane take; ``latency_s`` is added to that of moved bytes."""

    def __init__(self, bytes_per_s: float | None, latency_s: float, sleep: Callable[[float], object]) -> None:
        self._s_per_byte = 0.0 if bytes_per_s is None else 1 / bytes_per_s
        self._latency_s, self._sleep = latency_s, sleep
        self._used = False  # the op has moved bytes
        self._free_s = 0.0  # where the op is, on the link's clock

    def begin(self, queued_s: float | None) -> float:
        """An op starts: now, or as the last one ended, if it waited only for that."""
        now = now_s()
        follows = queued_s is not None and queued_s <= self._free_s and now - self._free_s < _LATE_S
        self._free_s = self._free_s if follows else now
        self._used = False
        return self._free_s

    def carry(self, num_bytes: int) -> None:
        """The op moves bytes, at the link's bandwidth; returns as they arrive."""
        self._free_s += num_bytes * self._s_per_byte + (0.0 if self._used else self._latency_s)
        self._used = True
        rest = self._free_s - now_s()
        if rest > 0:
            self._sleep(rest)

    def end(self) -> None:
        """The op has ended; its work beside the link took its time, too."""
        now = now_s()
        if now - self._free_s >= _LATE_S:
            self._free_s = now


class _SlowCompute:
    """Makes the calling thread's compute take ``factor`` times as long.

    Time in which the process used no processor is not compute: a data loader that waits, a prompt.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._since: tuple[float, float] | None = None

    def pause(self) -> None:
        """Compute pauses: it has run since it last resumed."""
        if self._since is not None:
            wall, busy = now_s() - self._since[0], time.process_time() - self._since[1]
            time.sleep((self._factor - 1) * min(wall, busy))
            self._since = None

    def resume(self) -> None:
        if self._factor > 1:
            self._since = now_s(), time.process_time()


def _spoil(memory: Tensor, where: Tensor | None = None) -> None:
    """Makes elements NaN; integers get ``0xFF`` in every byte."""
    dtype = memory.dtype
    if dtype.is_floating_point or dtype.is_complex:
        nothing: float | int | bool = float("nan")
    else:
        nothing = True if dtype is torch.bool else 255 if dtype is torch.uint8 else -1
    if where is None:
        memory.fill_(nothing)
    else:
        memory.masked_fill_(where, nothing)
