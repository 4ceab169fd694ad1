"""Ops, tickets and random programs for tests of lanes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hetero._native import DONE, Ticket
from lightning_hetero.ir.schedule import Lane, Op, OpKind
from lightning_hetero.lanes import EngineLanes, EngineOp, Event, Lanes

MEMORY_BYTES = 1 << 20
PATIENCE_S = 60.0  # for what must happen; nothing here waits as long unless it fails
LANES = (Lane.H2D, Lane.D2H, Lane.CPU, Lane.DISK_READ, Lane.DISK_WRITE)


def op(number: int, lane: Lane, kind: OpKind = OpKind.UPLOAD) -> Op:
    return Op(id=number, kind=kind, block=0, lane=lane, at=0)


class FakeTicket:
    """A native task that goes as far as it is told."""

    def __init__(self) -> None:
        self.reached = 0
        self.error: Exception | None = None
        self._moved = threading.Condition()

    def move(self, reached: int, error: Exception | None = None) -> None:
        with self._moved:
            self.reached, self.error = reached, error
            self._moved.notify_all()

    def poll(self) -> int:
        if self.error is not None:
            raise self.error
        return self.reached

    def wait(self, what: int = DONE, timeout: float | None = None) -> None:
        with self._moved:
            if not self._moved.wait_for(lambda: self.poll() >= what, timeout):
                raise TimeoutError


def nothing() -> tuple[()]:
    return ()


def doing(work: Callable[[], object]) -> Callable[[], Iterable[Any]]:
    def run() -> tuple[()]:
        work()
        return ()

    return run


def raising(error: BaseException) -> Callable[[], Iterable[Any]]:
    def run() -> tuple[()]:
        raise error

    return run


def threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("lightning-hetero")}


class InlineLanes(EngineLanes):
    """Nothing overlaps but an op's own tickets: ops wait in the calling thread for those before."""

    def submit(self, op: Op, run: Callable[[], Iterable[Ticket]], after: Sequence[Event]) -> EngineOp:
        """Observes each op, those too that give the engine nothing to do."""
        end = super().submit(op, run, after)
        if self.observer is not None and not end.tickets:
            self.observer(end)
        return end

    def _tickets_of(self, events: Sequence[Event]) -> tuple[()]:
        for event in events:
            event.wait()
        return ()


class Program:
    """Ops at random on some buffers of host and device, with the edges that their uses of the
    buffers need.

    Args:
        lanes: Where it runs.
        seed: Of the program.
        edges: False leaves them out.
    """

    NUM_BUFFERS, NUM_ELEMENTS = 3, 256

    def __init__(self, lanes: Lanes, seed: int, *, edges: bool = True) -> None:
        self.lanes, self.edges = lanes, edges
        self.random = random.Random(seed)
        self.host = [self._filled(lanes.host_buffer(4 * self.NUM_ELEMENTS).view(torch.float32)) for _ in range(self.NUM_BUFFERS)]
        self.memory = [lanes.memory().take(4 * self.NUM_ELEMENTS, f"buffer {i}") for i in range(self.NUM_BUFFERS)]
        self.expected = {("host", i): t.clone() for i, t in enumerate(self.host)}
        for i in range(self.NUM_BUFFERS):
            lanes.copy(self.device(i), self.host[i])
            self.expected["device", i] = self.host[i].clone()
        self.wrote: dict[tuple[str, int], list[Event]] = {}
        self.read: dict[tuple[str, int], list[Event]] = {}

    def _filled(self, buffer: Tensor) -> Tensor:
        return buffer.copy_(torch.tensor([self.random.uniform(-1, 1) for _ in range(self.NUM_ELEMENTS)]))

    def device(self, i: int) -> Tensor:
        return self.memory[i].view(torch.float32)

    def run(self, num_ops: int) -> None:
        steps = (self.up, self.down, self.on_host, self.on_compute, self.renew)
        for number in range(num_ops):
            self.random.choice(steps)(number, *(self.random.randrange(self.NUM_BUFFERS) for _ in range(3)))

    def run_uploads_last(self, num_ops: int) -> None:
        """What uploads only edges would put into its place comes after everything else, whatever
        the machine is busy with.
        """
        gate = threading.Event()
        self.lanes.submit(op(num_ops, Lane.H2D), doing(lambda: gate.wait(PATIENCE_S)), [])
        self.run(num_ops)
        for lane in (Lane.D2H, Lane.CPU, Lane.COMPUTE):
            self.lanes.submit(op(num_ops + 1, lane), nothing, []).wait()
        gate.set()

    def up(self, number: int, i: int, j: int, _: int) -> None:
        run = doing(lambda: self.lanes.copy(self.device(i), self.host[j]))
        self._submit(op(number, Lane.H2D), run, [("host", j)], ("device", i))
        self.expected["device", i] = self.expected["host", j].clone()

    def renew(self, number: int, i: int, j: int, _: int) -> None:
        def move() -> None:
            self.lanes.memory().give(self.memory[i])
            self.memory[i] = self.lanes.memory().take(4 * self.NUM_ELEMENTS, "again")
            self.lanes.copy(self.device(i), self.host[j])

        lane = self.random.choice((Lane.H2D, Lane.D2H)) if self.edges else Lane.H2D
        if lane is Lane.H2D:
            self._submit(op(number, lane), doing(move), [("host", j)], ("device", i))
            self.expected["device", i] = self.expected["host", j].clone()
        else:  # leaves for the host, and its memory goes to whoever comes next

            def leave() -> None:
                self.lanes.copy(self.host[j], self.device(i))
                self.lanes.memory().give(self.memory[i])

            self._submit(op(number, lane), doing(leave), [("device", i)], ("host", j), also=("device", i))
            self.expected["host", j] = self.expected["device", i].clone()

            def back() -> None:
                self.memory[i] = self.lanes.memory().take(4 * self.NUM_ELEMENTS, "back")
                self.lanes.copy(self.device(i), self.host[j])

            self._submit(op(number, Lane.H2D), doing(back), [("host", j)], ("device", i))

    def down(self, number: int, i: int, j: int, _: int) -> None:
        run = doing(lambda: self.lanes.copy(self.host[i], self.device(j)))
        self._submit(op(number, Lane.D2H), run, [("device", j)], ("host", i))
        self.expected["host", i] = self.expected["device", j].clone()

    def on_host(self, number: int, i: int, j: int, k: int) -> None:
        def work() -> None:
            self.host[i].copy_(self.host[j] * 0.5 + self.host[k] * 0.25)

        self._submit(op(number, Lane.CPU), doing(work), [("host", j), ("host", k)], ("host", i))
        self.expected["host", i] = self.expected["host", j] * 0.5 + self.expected["host", k] * 0.25

    def on_compute(self, number: int, i: int, j: int, k: int) -> None:
        def work() -> None:
            self.device(i).copy_(self.device(j) * 0.5 + self.device(k) * 0.25)

        reads, writes = [("device", j), ("device", k)], ("device", i)
        if self.random.random() < 0.5:
            self._submit(op(number, Lane.COMPUTE), doing(work), reads, writes)
        else:
            self.lanes.compute_waits(self._before(reads, writes))
            work()
            self._note(reads, writes, self.lanes.mark())
        self.expected["device", i] = self.expected["device", j] * 0.5 + self.expected["device", k] * 0.25

    def _submit(
        self, op: Op, run: Any, reads: list[tuple[str, int]], writes: tuple[str, int], also: tuple[str, int] | None = None
    ) -> None:
        after = self._before(reads, writes) + ([] if also is None else self._before([], also))
        event = self.lanes.submit(op, run, after)
        self._note(reads, writes, event)
        if also is not None:
            self._note([], also, event)

    def _before(self, reads: list[tuple[str, int]], writes: tuple[str, int]) -> list[Event]:
        if not self.edges:
            return []
        before = [e for buffer in reads for e in self.wrote.get(buffer, [])]
        return before + self.wrote.get(writes, []) + self.read.get(writes, [])

    def _note(self, reads: list[tuple[str, int]], writes: tuple[str, int], event: Event) -> None:
        for buffer in reads:
            self.read.setdefault(buffer, []).append(event)
        self.wrote[writes], self.read[writes] = [event], []

    def equal(self) -> bool:
        """Whether every buffer holds what it would if the ops had run one after the other."""
        self.lanes.drain()
        results = {("host", i): t for i, t in enumerate(self.host)}
        for i in range(self.NUM_BUFFERS):
            results["device", i] = torch.empty(self.NUM_ELEMENTS)
            self.lanes.copy(results["device", i], self.device(i))
        return all(torch.equal(results[buffer], expected) for buffer, expected in self.expected.items())
