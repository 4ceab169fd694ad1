"""Shared code of benchmarks: temporary files, a log that stays, and processes of their own."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

PRELOADED = ("lightning.pytorch", "lightning_hetero.strategies")
FORKS = False  # whether processes are forks of the benchmark itself, as tests have it: they need not import anything

_LOCK = threading.Lock()


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A directory that is removed in the end, also after an error, Ctrl-C or SIGTERM."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    try:
        with tempfile.TemporaryDirectory(dir=parent, prefix="hetero-benchmark-") as directory:
            yield Path(directory)
    finally:
        signal.signal(signal.SIGTERM, before)


def free_port() -> int:
    """A free port that the system does not give to other programs before it is listened on."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest = int(given.read_text().split()[0]) if given.exists() else 32768
    while True:
        with socket.socket() as probe, suppress(OSError):
            found = random.SystemRandom().randrange(lowest // 2, lowest)
            probe.bind(("127.0.0.1", found))
            return found


def fork_server(modules: tuple[str, ...] = PRELOADED) -> Any:
    """The context of processes forked from a server that has imported the modules already.

    The first call starts it, with what is installed, not with what lies in the current directory;
    the environment is another one for that moment, so threads call this before they read it.
    """
    with _LOCK:
        _start_server(modules)
    return multiprocessing.get_context("forkserver")


@cache
def _start_server(modules: tuple[str, ...]) -> None:
    with mock.patch.dict(os.environ, PYTHONSAFEPATH="1"):
        forkserver.set_forkserver_preload(list(modules))
        forkserver.ensure_running()


def process_context() -> Any:
    """The context of the processes that a benchmark starts, one after the other or side by side."""
    return multiprocessing.get_context("fork") if FORKS else fork_server()


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=process_context()) as process:
        return process.submit(function, *arguments).result()


def first_word(function: Callable[..., object], *arguments: Any) -> Any:
    """Runs a function in a process of its own, returns its first message, and ends the process.

    Args:
        function: Its first argument is the connection to send through.
        arguments: The others.
    """
    context = process_context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=function, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"a process ended with exit code {process.exitcode}; see its output above") from None
    finally:
        process.kill()
        process.join()
        ours.close()


class Log:
    """What has been measured, kept as it comes.

    Args:
        path: A file; what it has of the same settings counts. ``None``: nothing is kept.
        settings: What measurements depend on.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self._path, self._settings = path, json.loads(json.dumps(settings))
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        rows = [row for row in map(json.loads, lines) if row["settings"] == self._settings]
        self.results: dict[tuple[str, str], Any] = {(row["model"], row["what"]): row["result"] for row in rows}

    def add(self, model: str, what: str, result: Any) -> None:
        """Something that has been measured of a model."""
        self.results[model, what] = result
        if self._path is not None:
            row = {"settings": self._settings, "model": model, "what": what, "result": result}
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
