"""Scripts as ``python SCRIPT`` runs them, in processes that have imported Lightning already: it takes longer than most scripts."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from functools import cache
from multiprocessing import forkserver
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["lightning.pytorch", "pytorch_lightning", "transformers", "lightning_hetero.strategies", "torch.distributed.pipelining"]
)
_LOCK = threading.Lock()


def start_server() -> None:
    """Starts the process that the others are forked from: with what is installed, not with what lies in the current directory.

    Threads that start scripts call it before they read the environment, which is another one for a moment.
    """
    with _LOCK:
        _ensure_running()


@cache
def _ensure_running() -> None:
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def run_script(
    script: Path, *arguments: str | Path, cwd: Path, env: Mapping[str, str] = os.environ, timeout_s: float = 900
) -> subprocess.CompletedProcess[str]:
    """Runs a script in a process of its own, with its folder first on the path."""
    argv = [str(script), *map(str, arguments)]
    start_server()
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        child = _CONTEXT.Process(target=_run, args=(argv, cwd, dict(env), out, err))
        child.start()
        child.join(timeout_s)
        if child.exitcode is None:
            child.kill()
            child.join()
            raise TimeoutError(f"{script} still runs after {timeout_s} s:\n{out.read_text()}\n{err.read_text()}")
        return subprocess.CompletedProcess(argv, child.exitcode, out.read_text(), err.read_text())


def _run(argv: list[str], cwd: Path, env: dict[str, str], out: Path, err: Path) -> None:
    for stream, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    try:
        runpy.run_path(argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
