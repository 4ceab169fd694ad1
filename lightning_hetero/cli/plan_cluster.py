"""``lightning-hetero plan-cluster``: plans pipelines for a cluster of different devices."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from lightning_hetero.cli.clusters import ClusterRequest, describe, print_plan, rivals, to_json
from lightning_hetero.cli.output import console, pairs, print_json, seconds, working, write_text
from lightning_hetero.cli.planning import ALL, described
from lightning_hetero.errors import ConfigError, PlanError, did_you_mean
from lightning_hetero.ir.cluster_plan import ClusterPlan


def run(request: ClusterRequest, *, planner: str, out: Path | None, as_json: bool) -> None:
    """Plans, prints, and writes the plan, or the fastest of all planners' plans, to ``out``.

    Raises:
        ConfigError: The request is wrong.
        PlanError: The model does not fit the cluster.
    """
    from lightning_hetero.parallel.planner import PLANNERS, plan

    if planner not in (*PLANNERS, ALL):
        hint = did_you_mean(planner, [*PLANNERS, ALL])
        raise ConfigError(f"--planner {planner!r}; allowed: {', '.join(PLANNERS)}, {ALL}.{hint}")
    model, cluster = request.load()
    plans: dict[str, ClusterPlan] = {}
    failures: dict[str, PlanError] = {}
    begin = time.perf_counter()
    with working("planning"):
        for name in PLANNERS if planner == ALL else (planner,):
            try:
                degrees = request.tensor_parallel or None
                plans[name] = plan(model, cluster, micro_batches=request.micro_batches, planner=name, tensor_parallel=degrees)
            except PlanError as error:
                failures[name] = error
    took = time.perf_counter() - begin
    if not plans:
        raise next(iter(failures.values()))
    ranked = sorted(plans.items(), key=lambda item: item[1].iteration_s)
    best = ranked[0][1]
    if out is not None:
        write_text(out, replace(best, origin=request.origin(folder=out.absolute().parent)).to_json())
    if as_json:
        rows = [{"planner": name, **to_json(p)} for name, p in plans.items()]
        rows += [{"planner": name, **described(error)} for name, error in failures.items()]
        print_json(rows if planner == ALL else rows[0])
        return
    screen = console()
    screen.print(pairs("", describe(model, cluster, request.micro_batches)))
    print_plan(screen, best, cluster)
    if planner == ALL:
        screen.print(rivals("Planners", [replace(p.in_short(), name=name) for name, p in ranked], best.iteration_s))
        for name, reason in failures.items():
            screen.print(f"No plan by {name}: {reason}", markup=False)
    elif best.runner_ups:
        screen.print(rivals("Runner-ups", list(best.runner_ups), best.iteration_s))
    screen.print(f"Planned in {seconds(took)}.", markup=False)
    if out is not None:
        screen.print(f"Wrote the plan to {out}.", markup=False)
