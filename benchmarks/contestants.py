"""Processes that take turns: each holds one configuration and trains a few steps on request.

[Note: Turns]
Configurations are compared within seconds of each other, because machines drift by more than the
measured differences. So all of them stay alive, each in a process of its own (its own memory,
threads and, for DeepSpeed, global state), and one trains while the others sleep. A turn is one step
that does not count, which fills the pipeline, then the timed ones, each from
``on_train_batch_start`` to the next: it contains the tail of the previous update, not of its own. A
turn ends when nothing is in flight any more.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import sys
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self
from unittest import mock

from scratch import process_context


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one turn gave.

    Attributes:
        seconds: Of every timed step.
        num_bytes: Bytes that were read and written from the first step's start to the end, per
            step.
    """

    seconds: list[float]
    num_bytes: float = 0.0


@dataclass(slots=True)
class Baton:
    """The contestant's end: :meth:`step_begins` blocks between turns.

    Args:
        connection: To the referee.
        drain: Waits until nothing is under way.
        num_bytes: Bytes moved so far.

    Attributes:
        order: What the referee has said to this turn.
    """

    connection: Connection
    drain: Callable[[], object] = lambda: None
    num_bytes: Callable[[], int] = lambda: 0
    order: Any = None
    _begins: list[float] = field(default_factory=list)
    _left: int = 0
    _before: int = 0

    def step_begins(self) -> bool:
        """Called at the start of every step; False ends the run."""
        now = time.perf_counter()
        if self._left:
            self._left -= 1
            self._begins.append(now)
            return True
        if self._begins:
            self._report(now)
        else:
            self.connection.send(None)  # ready
        steps, self.order = self.connection.recv()
        if not steps:
            return False
        self._before = self.num_bytes()
        self._left = steps
        self._begins = [time.perf_counter()]
        return True

    @property
    def position(self) -> int:
        """The number of the turn's step that has just begun; 0 is the one that does not count."""
        return len(self._begins) - 1

    def _report(self, now: float) -> None:
        self.drain()
        moved = (self.num_bytes() - self._before) / len(self._begins)
        times = [*self._begins[1:], now]
        self.connection.send(Turn(seconds=[b - a for a, b in pairwise(times)], num_bytes=moved))


def settle(strategy: Any) -> None:
    """Waits until nothing of a strategy of this library is under way."""
    for part in (part for block in strategy.session.blocks for part in block.parts):
        strategy.session.store.barrier(part)
    strategy.session.store.files.wait_for_commit()  # the bytes of a step include its record and what that names


def interval(values: list[float]) -> list[float]:
    """A confidence interval of at least 95 % for the median, by the sign test."""
    ordered, n = sorted(values), len(values)
    tails = (sum(math.comb(n, j) for j in range(k + 1)) / 2**n for k in range(n))  # at most k of n fall below the median
    left_out = max(0, sum(tail <= 0.025 for tail in tails) - 1)
    return [ordered[left_out], ordered[n - 1 - left_out]]


def unpacked(wheel: Path, directory: Path) -> Path:
    """A directory from which the build in ``wheel`` can be imported.

    A directory is taken as it is.
    """
    if wheel.is_dir():
        return wheel
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


@contextmanager
def _first_on_path(build: Path | None, environment: Mapping[str, str]) -> Iterator[None]:
    """Inside, a spawned process gets these variables and a path that begins with ``build``."""
    path = [] if build is None else [str(build.resolve())]
    with mock.patch.object(sys, "path", path + sys.path), mock.patch.dict(os.environ, environment):
        yield


class ProcessFailedError(RuntimeError):
    """A contestant's process has ended before it should; the message says with what."""


class Contestant:
    """The referee's end: one process.

    Args:
        target: What the process runs: ``target(baton, *arguments)``; its result comes out of
            :meth:`finish`.
        arguments: Of ``target``; pickled.
        build: A directory with another build of the package, or with others, which the process
            imports.
        environment: Variables of the process. With these, as with ``build``, it is not forked: the
            C library reads some as it starts.
        waits: Until it is ready. Otherwise :meth:`wait_until_ready` does.
    """

    def __init__(
        self,
        target: Callable[..., object],
        *arguments: object,
        build: Path | None = None,
        environment: Mapping[str, str] | None = None,
        waits: bool = True,
    ) -> None:
        context = process_context() if build is None and environment is None else multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, target, arguments), daemon=False)
        with _first_on_path(build, environment or {}):
            self._process.start()
        theirs.close()
        if waits:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Waits until the process is about to train."""
        self._receive()

    def turn(self, steps: int, order: object = None) -> Turn:
        """Trains ``steps`` timed steps; ``order`` is told to the process."""
        self._connection.send((steps, order))
        turn = self._receive()
        assert isinstance(turn, Turn)
        return turn

    def finish(self) -> dict[str, Any]:
        """Ends the process in order: what its target returned, and ``peak_rss_bytes``."""
        self._connection.send((0, None))
        result = self._receive()
        self._process.join()
        assert isinstance(result, dict)
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # it has ended
            self._connection.send((0, None))  # a fork has this end too, so that closing it would not end its wait
        self._connection.close()
        self._process.join(timeout=60)
        self.kill()

    def kill(self) -> None:
        """Ends the process at once, if it has not ended."""
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self) -> object:
        try:
            received = self._connection.recv()
        except EOFError:
            self._process.join()
            raise ProcessFailedError(f"a process ended with exit code {self._process.exitcode}; see its output above") from None
        if isinstance(received, ProcessFailedError):
            raise received
        return received


def _run(connection: Connection, target: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    try:
        result = target(Baton(connection), *arguments)
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        peak = int(found[1]) * 1024 if found else 0
        connection.send({**(result or {}), "peak_rss_bytes": peak})
    except (EOFError, BrokenPipeError):  # the referee has given up; its error is the one to read
        return
    except Exception as error:
        connection.send(ProcessFailedError("".join(traceback.format_exception_only(error)).strip().splitlines()[-1]))
        raise
