"""The clusters and models of ``plan-cluster`` and ``explain``, and how their plans are printed."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_hetero.cli.options import Request
from lightning_hetero.cli.output import count, pairs, percent, seconds, table
from lightning_hetero.errors import ConfigError
from lightning_hetero.ir.cluster import Cluster
from lightning_hetero.ir.cluster_plan import ClusterPlan, RunnerUp
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest:
    """One model on one cluster, as the options give it.

    Attributes:
        cluster: A cluster file, the name of a known cluster, or a line such as
            ``"4xa100-80+2xh800"``.
        micro_batches: Micro-batches of one step, of all groups together.
        model: The options of the model.
        tensor_parallel: Degrees to try; empty: all possible ones.
    """

    cluster: str
    micro_batches: int
    model: Request
    tensor_parallel: tuple[int, ...] = ()

    @classmethod
    def from_origin(cls, plan: ClusterPlan, *, folder: Path, source: str) -> ClusterRequest:
        """Reads the request that :meth:`origin` wrote into a plan file in ``folder``.

        Raises:
            ConfigError: Something is missing or of the wrong type.
        """
        origin = dict(plan.origin)
        file, name, batches = origin.pop("cluster_file", None), origin.pop("cluster", None), origin.pop("micro_batches", None)
        degrees = str(origin.pop("tensor_parallel", ""))
        if not isinstance(batches, int) or not isinstance(file or name, str):
            raise ConfigError(f"{source} does not name its cluster and number of micro-batches; plan again with --out.")
        if not all(t.isdecimal() for t in degrees.split()):
            raise ConfigError(f"{source}: tensor_parallel={degrees!r} in its origin; allowed: degrees such as '1 2'.")
        return cls(
            cluster=str(folder / str(file)) if file is not None else str(name),
            micro_batches=batches,
            model=Request.from_origin(origin, folder=folder),
            tensor_parallel=tuple(map(int, degrees.split())),
        )

    def origin(self, *, folder: Path) -> dict[str, str | int]:
        """The request as stored in a plan file in ``folder``."""
        is_file = Path(self.cluster).is_file()
        place = {"cluster_file": os.path.relpath(self.cluster, folder)} if is_file else {"cluster": self.cluster}
        degrees = {"tensor_parallel": " ".join(map(str, self.tensor_parallel))} if self.tensor_parallel else {}
        return {**place, "micro_batches": self.micro_batches, **degrees, **self.model.origin(folder=folder)}

    def load(self) -> tuple[ModelProfile, Cluster]:
        """The model and the cluster.

        Raises:
            ConfigError: A file cannot be read, or a name is unknown.
        """
        from lightning_hetero.parallel.planner import cluster, load_cluster

        path = Path(self.cluster)
        found = load_cluster(path) if path.is_file() or path.suffix in (".json", ".yaml", ".yml") else cluster(self.cluster)
        return self.model.model_alone(), found


def describe(model: ModelProfile, cluster: Cluster, micro_batches: int) -> dict[str, str]:
    """The model and the cluster in three lines."""
    nodes = ", ".join(f"{n.name} {n.count}x {n.device}" for n in cluster.nodes)
    bits = 8 * model.compute_itemsize
    return {
        "model": f"{model.name}: {count(model.num_params)} parameters, {len(model.blocks)} blocks, {bits} bit",
        "step": f"{micro_batches} micro-batches of {model.tokens} tokens",
        "cluster": f"{cluster.name}: {nodes}; {format_bytes(cluster.network_bytes_per_s)}/s between nodes",
    }


def print_plan(screen: Console, plan: ClusterPlan, cluster: Cluster) -> None:
    """Prints the time of a step, and the pipelines."""
    screen.print(pairs(f"Plan of {plan.name}", summary(plan, cluster)))
    screen.print(pipelines(plan))


def summary(plan: ClusterPlan, cluster: Cluster) -> dict[str, str]:
    """A step in numbers, with its cost if the cluster file has all prices."""
    from lightning_hetero.parallel.planner.step_time import step_s

    devices = Counter({n.name: n.count for n in cluster.nodes})
    idle = ", ".join(f"{k} on {node}" for node, k in plan.idle.items()) or "none"
    rows = {
        "step": f"{seconds(plan.iteration_s)}, {count(plan.tokens / plan.iteration_s, 'tokens/s')}",
        "played through": f"{seconds(step_s(plan))}, as 1F1B overlaps",
        "synchronisation": f"{seconds(plan.sync_s)}, {percent(plan.sync_s / plan.iteration_s)} of the step",
        "utilisation": f"{percent(plan.utilisation)} of the cluster's FLOP/s",
        "tensor parallelism": str(plan.tensor_parallel),
        "devices": f"{plan.world_size} of {devices.total()} at work, idle: {idle}",
    }
    prices = {d.name: d.price_per_hour for d in cluster.devices if d.price_per_hour is not None}
    if all(stage.device in prices for group in plan.groups for stage in group.stages):
        hourly = plan.tensor_parallel * sum(prices[s.device] for g in plan.groups for s in g.stages)
        rows["price"] = f"{hourly:.2f} an hour, {hourly * plan.iteration_s / 3600 / plan.tokens * 1e9:.2f} for 1e9 tokens"
    return rows


def pipelines(plan: ClusterPlan) -> Table:
    """Stages by group; equal groups once, with their number."""
    rows, t = [], plan.tensor_parallel
    for group, times in Counter(plan.groups).items():
        for index, stage in enumerate(group.stages):
            nodes = {g.stages[index].node for g in plan.groups if g == group}
            rows.append(
                (
                    "" if index else f"{times} x" if times > 1 else "1",
                    "" if index else str(group.micro_batches),
                    "" if index else seconds(group.seconds),
                    f"{t}x {stage.device}" if t > 1 else stage.device,
                    ", ".join(sorted(nodes)),
                    str(stage.layers),
                    seconds(stage.micro_batch_s),
                    percent(group.micro_batches * stage.micro_batch_s / plan.iteration_s),
                    format_bytes(stage.memory_bytes),
                )
            )
    columns = ("groups", "batches", "takes", "stage", "node", "layers", "each", "busy", "memory")
    return table("Pipelines", columns, rows, right=("batches", "takes", "layers", "each", "busy", "memory"))


def rivals(title: str, plans: list[RunnerUp], reference_s: float) -> Table:
    """Other plans beside one."""
    from lightning_hetero.cli.output import change

    rows = [
        (r.name, str(r.tensor_parallel), seconds(r.iteration_s), change(r.iteration_s, reference_s), "; ".join(r.groups))
        for r in plans
    ]
    return table(title, ("planner", "tensor", "step", "against this", "groups"), rows, right=("tensor", "step", "against this"))


def to_json(plan: ClusterPlan) -> dict[str, Any]:
    """A plan as ``--json`` prints it."""
    from lightning_hetero.parallel.planner.step_time import step_s

    bare = replace(plan, origin={})
    return {f.name: getattr(bare, f.name) for f in fields(bare) if f.name != "origin"} | {
        "schedule_s": step_s(plan),
        "micro_batches": plan.micro_batches,
        "world_size": plan.world_size,
    }
