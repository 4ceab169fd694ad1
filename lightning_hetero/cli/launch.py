"""``lightning-hetero launch``: the commands that start a cluster plan, one per node.

They call torchrun with elastic settings under which a lost or a new node costs only seconds:

* The rendezvous store outlives every node: it runs on a machine that does not vanish.
* After each restart the workers get a store of their own; stale keys of a shared one made restarts
  hang.
* The last call of a rendezvous is short.
* Signs of life are frequent, because nodes can rejoin only after a lost node counts as dead.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from lightning_hetero.cli.output import print_json
from lightning_hetero.errors import ConfigError, did_you_mean
from lightning_hetero.ir.cluster_plan import ClusterPlan
from lightning_hetero.parallel.pipeline.layout import NODE

ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
STEPS_VARIABLE = "LIGHTNING_HETERO_STEPS"  # read by parallel.elastic, which imports torch
RENDEZVOUS = {
    "is_host": "false",
    "last_call_timeout": 2,  # seconds to wait for further nodes once it has the minimum
    "keep_alive_interval": 1,  # seconds between two signs of life of a node
    "keep_alive_max_attempt": 5,  # number that may be missing: a node is dead after 5 s; torchrun's default is 15 s
}
MAX_RESTARTS = 1000  # every change of membership counts as one

_STORE = (
    "import time; from torch.distributed import TCPStore; "
    "store = TCPStore({host!r}, {port}, is_master=True, wait_for_workers=False); time.sleep(1e9)"
)


STORE = "store"  # --run takes it like a node's name


def run(
    path: Path,
    script: Sequence[str],
    *,
    rendezvous: str,
    least_nodes: int,
    run_id: str,
    steps: str | None,
    name: str | None,
    as_json: bool,
) -> None:
    """Prints the commands, or replaces this process by one of them.

    Raises:
        ConfigError: The file is not a cluster plan, ``rendezvous`` is no address, or no node has
            that ``name``.
    """
    plan = ClusterPlan.load(path)
    lines = launch_lines(plan, script, rendezvous=rendezvous, least_nodes=least_nodes, run_id=run_id, steps=steps)
    if name is not None:
        commands = {STORE: lines["store"]["command"]} | {node["node"]: node["command"] for node in lines["nodes"]}
        environment = {node["node"]: node["environment"] for node in lines["nodes"]}
        if name not in commands:
            raise ConfigError(f"--run {name!r}; allowed: {', '.join(commands)}.{did_you_mean(name, commands)}")
        os.execvpe(commands[name][0], commands[name], {**os.environ, **lines["environment"], **environment.get(name, {})})
    if as_json:
        print_json(lines)
        return
    typer.echo(f"# The rendezvous store, on {rendezvous.rpartition(':')[0]}: a machine that is not preempted")
    typer.echo(shlex.join(lines["store"]["command"]))
    prefix = " ".join(f"{key}={shlex.quote(value)}" for key, value in lines["environment"].items())
    for node in lines["nodes"]:
        own = " ".join(f"{key}={shlex.quote(value)}" for key, value in node["environment"].items())
        typer.echo(f"\n# On {node['node']}\n{prefix} {own} {shlex.join(node['command'])}")


def launch_lines(
    plan: ClusterPlan, script: Sequence[str], *, rendezvous: str, least_nodes: int, run_id: str, steps: str | None = None
) -> dict[str, Any]:
    """The commands, as lists of arguments.

    Args:
        plan: The cluster plan; a node runs one process for each of its devices that the plan uses.
        script: The training script and its arguments.
        rendezvous: ``"host:port"`` of the store.
        least_nodes: The least number of nodes with which training continues.
        run_id: Distinguishes several runs that use one store.
        steps: Where the strategy commits steps, unless its own options say it.

    Raises:
        ConfigError: ``rendezvous`` is no address, or the plan has fewer nodes.
    """
    match = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^\s:]+):([0-9]{1,5})", rendezvous)
    if match is None or not 0 < int(match.group(2)) < 65536:
        raise ConfigError(f"--rendezvous {rendezvous!r}; allowed: host:port, such as head:29400.")
    processes = Counter(stage.node for group in plan.groups for stage in group.stages)
    if not 1 <= least_nodes <= len(processes):
        raise ConfigError(f"--least-nodes {least_nodes}; allowed: 1 to {len(processes)}, the plan's nodes.")
    elastic = [
        f"--nnodes={least_nodes}:{len(processes)}",
        f"--max-restarts={MAX_RESTARTS}",
        "--monitor-interval=0.5",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={rendezvous}",
        f"--rdzv-id={run_id}",
        "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in RENDEZVOUS.items()),
    ]
    return {
        "environment": ENVIRONMENT | ({} if steps is None else {STEPS_VARIABLE: steps}),
        "store": {"command": ["python", "-c", _STORE.format(host="0.0.0.0", port=int(match.group(2)))]},
        "nodes": [
            {
                "node": node,
                "environment": {NODE: node},
                "command": ["torchrun", f"--nproc-per-node={plan.tensor_parallel * n}", *elastic, *script],
            }
            for node, n in processes.items()
        ],
    }
