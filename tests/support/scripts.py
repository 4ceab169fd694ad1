"""Scripts as ``python SCRIPT`` runs them, in processes that have imported Lightning already: it
takes longer than most scripts.
"""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import scratch

from support.effort import limit_search

PRELOADED = (
    *scratch.PRELOADED,
    "lightning_hetero.strategies.hetero_offload",  # which a script would import only when it makes the strategy
    "pytorch_lightning",
    "lightning_hetero.planners.holistic",
    "transformers",
    "peft",  # a second, and a dozen scripts train adapters
    "torch.distributed.pipelining",
    "lightning_hetero.parallel.elastic",  # and what several ranks import: each of them would
    "lightning_hetero.parallel.strategies.hetero_parallel_fsdp",
    "lightning_hetero.parallel.strategies.local_first",
    "hypothesis",  # by helpers, and by tests that are their own scripts
    "pytest",
)
start_server = partial(scratch.fork_server, PRELOADED)


def run_script(
    script: Path, *arguments: str | Path, cwd: Path, env: Mapping[str, str] = os.environ, timeout_s: float = 900
) -> subprocess.CompletedProcess[str]:
    """Runs a script in a process of its own, with its folder first on the path."""
    argv = [str(script), *map(str, arguments)]
    context = start_server()
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        child = context.Process(target=_run, args=(argv, cwd, dict(env), out, err))
        child.start()
        child.join(timeout_s)
        if child.exitcode is None:
            child.kill()
            child.join()
            raise TimeoutError(f"{script} still runs after {timeout_s} s:\n{out.read_text()}\n{err.read_text()}")
        return subprocess.CompletedProcess(argv, child.exitcode, out.read_text(), err.read_text())


def output_of(script: Path, *arguments: str | Path, cwd: Path, **options: Any) -> str:
    """What a script prints; the test fails with the end of that if the script does. Options are
    those of :func:`run_script`.
    """
    done = run_script(script, *arguments, cwd=cwd, **options)
    assert done.returncode == 0, f"{done.args} failed:\n{done.stdout[-3000:]}\n{done.stderr[-12000:]}"
    return done.stdout


def result_of(output: str) -> Any:
    """The JSON that a script has printed last."""
    return json.loads(output.splitlines()[-1])


def _run(argv: list[str], cwd: Path, env: dict[str, str], out: Path, err: Path) -> None:
    gc.freeze()  # what the server has imported stays: a collection would look at it, and so copy its pages
    for stream, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.environ.clear()
    os.environ.update(env)
    multiprocessing.set_start_method(None, force=True)  # of what it starts: the platform's, not that of this process
    scratch.FORKS = True
    limit_search()
    os.chdir(cwd)
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    try:
        runpy.run_path(argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
