"""Scripts as several ranks on this machine, over the loopback device."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scratch import free_port

from support.scripts import run_script, start_server

SCRIPT = Path(__file__).with_name("train.py")


def train(scenario: str, *arguments: str | Path, cwd: Path, world: int, **options: Any) -> list[str]:
    """Runs a scenario of :mod:`support.training` on as many ranks, with ``cwd`` as its folder;
    options as for :func:`start`.
    """
    return start(SCRIPT, scenario, cwd, *arguments, cwd=cwd, world=world, **options)


def start(
    script: Path, *arguments: str | Path, cwd: Path, world: int, nodes: Sequence[str] = (), killed: int | None = None
) -> list[str]:
    """Runs a script on as many ranks: the output of each. Fails with that of the first one that
    does, but for one to be killed.

    With ``nodes``, each rank's, as torchrun starts them, however many a node has.
    """
    start_server()
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0", "GLOO_SOCKET_IFNAME": "lo"}

    def run(rank: int) -> str:
        env = {**os.environ, **address, "WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        if nodes:
            local, names = nodes[:rank].count(nodes[rank]), list(dict.fromkeys(nodes))
            env |= {
                "LIGHTNING_HETERO_NODE": nodes[rank],
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(nodes.count(nodes[rank])),
            }
            env |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": str(names.index(nodes[rank]))}
        done = run_script(script, *arguments, cwd=cwd, env=env, timeout_s=800)
        expected = -signal.SIGKILL if rank == killed else 0
        assert done.returncode == expected, f"rank {rank} of {world}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))
