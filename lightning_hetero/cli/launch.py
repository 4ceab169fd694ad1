"""``lightning-hetero launch``: the lines that start a cluster plan, one per node.

They are torchrun's, with the elastic settings under which a lost or a new node costs seconds: a rendezvous store that outlives
every node, because it runs outside of those that may vanish; after each restart a store of the workers' own (stale keys of a shared
one made restarts hang); a short last call; and frequent signs of life, since nobody may rejoin before a lost node counts as dead.
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
from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.cluster_plan import ClusterPlan
from lightning_hetero.parallel.pipeline.layout import NODE

ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
STEPS_VARIABLE = "LIGHTNING_HETERO_STEPS"  # read by parallel.elastic, which imports torch
RENDEZVOUS = {
    "is_host": "false",
    "last_call_timeout": 2,  # seconds that it waits for further nodes once it has the fewest that it needs
    "keep_alive_interval": 1,  # seconds from a node's sign of life to the next
    "keep_alive_max_attempt": 5,  # so many may be missing: a node is dead after 5 s, by default after 15
}
MAX_RESTARTS = 1000  # every change of membership counts as one

_STORE = (
    "import time; from torch.distributed import TCPStore; "
    "store = TCPStore({host!r}, {port}, is_master=True, wait_for_workers=False); time.sleep(1e9)"
)


STORE = "store"  # what --run names beside nodes


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
    """Prints the lines, or becomes the process of one of them.

    Raises:
        ConfigError: The file is not a cluster plan, ``rendezvous`` is no address, or no line has that ``name``.
    """
    plan = ClusterPlan.load(path)
    lines = launch_lines(plan, script, rendezvous=rendezvous, least_nodes=least_nodes, run_id=run_id, steps=steps)
    if name is not None:
        commands = {STORE: lines["store"]["command"]} | {node["node"]: node["command"] for node in lines["nodes"]}
        environment = {node["node"]: node["environment"] for node in lines["nodes"]}
        if name not in commands:
            raise ConfigError(f"--run {name!r}; allowed: {', '.join(commands)}.")
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
        plan: What is started; a node runs one process for each of its devices that work.
        script: The training script and its arguments.
        rendezvous: ``"host:port"`` of the store.
        least_nodes: Training goes on as long as there are so many.
        run_id: Tells runs on one store apart.
        steps: Where the strategy commits steps, if its own options do not say.

    Raises:
        ConfigError: ``rendezvous`` is no address, or there are fewer nodes.
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
