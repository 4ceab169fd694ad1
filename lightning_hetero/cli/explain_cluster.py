"""``lightning-hetero explain`` for a cluster plan.

It shows the binding stage, other planners' plans, and the gain from more hardware.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_hetero.cli.clusters import ClusterRequest, describe, print_plan, rivals, to_json
from lightning_hetero.cli.output import change, console, count, pairs, percent, print_json, seconds, table, working
from lightning_hetero.errors import PlanError
from lightning_hetero.ir.cluster import Cluster, Node
from lightning_hetero.ir.cluster_plan import ClusterPlan
from lightning_hetero.ir.model import ModelProfile


def run(path: Path, *, as_json: bool) -> None:
    """Explains a cluster plan's file.

    Raises:
        ConfigError: It is not a cluster plan, or does not name its model and cluster.
    """
    from lightning_hetero.parallel.planner import PLANNERS, plan

    given = ClusterPlan.load(path)
    request = ClusterRequest.from_origin(given, folder=path.absolute().parent, source=str(path))
    model, cluster = request.load()
    with working("planning with the other planners"):
        others = []
        for name in PLANNERS:
            with suppress(PlanError):  # a baseline need not find one
                degrees = request.tensor_parallel or None
                found = plan(model, cluster, micro_batches=request.micro_batches, planner=name, tensor_parallel=degrees)
                others.append(replace(found.in_short(), name=name))
    with working("planning for other clusters"):
        what_ifs = list(_what_ifs(model, cluster, request))
    if as_json:
        print_json(
            {
                **to_json(given),
                "binding": binding(given),
                "planners": others,
                "what_ifs": [{"change": text, "iteration_s": s, "tokens_per_s": rate} for text, s, rate in what_ifs],
            }
        )
        return
    screen = console()
    screen.print(pairs("", describe(model, cluster, request.micro_batches)))
    print_plan(screen, given, cluster)
    screen.print(pairs("What binds", _binding_texts(binding(given))))
    screen.print(rivals("The planners", sorted(others, key=lambda r: r.iteration_s), given.iteration_s))
    if given.runner_ups:
        screen.print(rivals("Runner-ups", list(given.runner_ups), given.iteration_s))
    rows = [
        (text, "no plan", "", "")
        if s is None or rate is None
        else (text, seconds(s), count(rate, "tokens/s"), change(rate, given.tokens / given.iteration_s))
        for text, s, rate in what_ifs
    ]
    screen.print(table("What if", ("cluster", "step", "speed", "change"), rows, right=("step", "speed", "change")))


def binding(plan: ClusterPlan) -> dict[str, Any]:
    """The slowest group and its slowest stage, and the parts of the rest of the step."""
    group = max(range(len(plan.groups)), key=lambda j: plan.groups[j].seconds)
    slow = plan.groups[group]
    stage = max(range(len(slow.stages)), key=lambda s: slow.stages[s].micro_batch_s)
    busy = slow.micro_batches * slow.stages[stage].micro_batch_s
    return {
        "group": group,
        "stage": stage,
        "device": slow.stages[stage].device,
        "node": slow.stages[stage].node,
        "busy_s": busy,
        "bubble_s": slow.seconds - busy,
        "sync_s": plan.sync_s,
        "iteration_s": plan.iteration_s,
    }


def _binding_texts(b: dict[str, Any]) -> dict[str, str]:
    whole = b["iteration_s"]
    return {
        "slowest stage": f"stage {b['stage'] + 1} of group {b['group'] + 1}: {b['device']} on {b['node']}",
        "it computes": f"{seconds(b['busy_s'])}, {percent(b['busy_s'] / whole)} of the step",
        "pipeline fills, drains": f"{seconds(b['bubble_s'])}, {percent(b['bubble_s'] / whole)}",
        "synchronisation": f"{seconds(b['sync_s'])}, {percent(b['sync_s'] / whole)}",
    }


def _what_ifs(model: ModelProfile, cluster: Cluster, request: ClusterRequest) -> Iterator[tuple[str, float | None, float | None]]:
    """Plans other clusters: the change, seconds per step, tokens per second.

    ``None`` without a plan.
    """
    from lightning_hetero.parallel.planner import plan

    for text, other, batches in _scenarios(cluster, request.micro_batches):
        largest = max(node.count for node in other.nodes)
        degrees = [t for t in request.tensor_parallel if t <= largest]
        if request.tensor_parallel and not degrees:
            yield text, None, None
            continue
        try:
            found = plan(model, other, micro_batches=batches, tensor_parallel=degrees or None)
            yield text, found.iteration_s, found.tokens / found.iteration_s
        except PlanError:
            yield text, None, None


def _scenarios(cluster: Cluster, micro_batches: int) -> Iterator[tuple[str, Cluster, int]]:
    for node in cluster.nodes:
        rest = tuple(n for n in cluster.nodes if n != node)
        if rest:
            left = {n.device for n in rest}
            kept = tuple(d for d in cluster.devices if d.name in left)
            yield f"without {node.name} ({node.count}x {node.device})", replace(cluster, nodes=rest, devices=kept), micro_batches
    largest = {node.device: max(n.count for n in cluster.nodes if n.device == node.device) for node in cluster.nodes}
    for device, size in largest.items():
        more = Node(name=f"one more {device}", device=device, count=size)
        yield f"+1 node of {size}x {device}", replace(cluster, nodes=(*cluster.nodes, more)), micro_batches
    yield "2x network", replace(cluster, network_bytes_per_s=2 * cluster.network_bytes_per_s), micro_batches
    yield "2x micro-batches", cluster, 2 * micro_batches
