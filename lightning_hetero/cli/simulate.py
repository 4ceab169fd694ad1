"""``lightning-hetero simulate``: one step of a plan as numbers, Chrome trace and picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_hetero.cli.options import Request, load_plan
from lightning_hetero.cli.output import console, pairs, percent, print_json, seconds, table, write_text
from lightning_hetero.cli.plan import describe
from lightning_hetero.cli.planning import micro_batch
from lightning_hetero.cli.ranks import together
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.stalls import Stall, op_of_block, stalls
from lightning_hetero.lowering import fitted
from lightning_hetero.sim import Simulation
from lightning_hetero.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table


def run(path: Path, request: Request, *, trace: Path | None, timeline: Path | None, as_json: bool) -> None:
    """Simulates, prints, and writes ``trace`` and ``timeline``.

    Raises:
        ConfigError: The plan or the request is wrong.
        PlanError: The plan does not fit the machine.
    """
    from lightning_hetero.planners.evaluation import simulation as simulated
    from lightning_hetero.planners.one_rank import as_run

    plan, request = load_plan(path, request)
    model, machine = request.profiles()
    plan = plan.resolve(b.name for b in model.blocks)
    part, hardware = as_run(plan, micro_batch(model, plan), machine)
    plan = fitted(plan, part.shape(), device=hardware.copies_weights)
    simulation = simulated(plan, part, hardware, keep_trace=True)
    if trace is not None:
        write_text(trace, simulation.trace.to_chrome())
    if timeline is not None:
        from lightning_hetero.cli.timeline import draw

        draw(timeline, simulation, plan, model.name, hardware)
    if as_json:
        print_json(
            {
                "plan": plan.name,
                "predicted": simulation.prediction,
                "busy": simulation.busy,
                "waits_s": simulation.waits,
                "stalls": last_stalls(simulation),
                "memory": tiers(simulation, hardware),
                "iterations_s": simulation.iterations_s,
                "steady": simulation.steady,
                "trace": trace,
                "timeline": timeline,
            }
        )
        return
    predicted = replace(plan, predicted=simulation.prediction)
    _print(simulation, hardware, {"plan": plan.name, **describe(model, machine), **together(predicted, model, machine)})
    for name, written in (("trace", trace), ("timeline", timeline)):
        if written is not None:
            console().print(f"Wrote the {name} to {written}.", markup=False)


def _print(simulation: Simulation, hardware: HardwareProfile, head: dict[str, str]) -> None:
    screen, p = console(), simulation.prediction
    step = f"{seconds(p.iteration_s)}: forward {seconds(p.forward_s)}, backward {seconds(p.backward_s)}"
    screen.print(pairs("", head | {"step": step + ("" if simulation.steady else "; not steady yet")}))
    screen.print(lanes(simulation))
    if simulation.waits:
        screen.print(waits(simulation))
        screen.print(longest(simulation))
    rows = [
        (
            tier,
            format_bytes(use["peak_bytes"]),
            format_bytes(use["capacity_bytes"]),
            percent(use["peak_bytes"] / use["capacity_bytes"]),
        )
        for tier, use in tiers(simulation, hardware).items()
        if use["capacity_bytes"]
    ]
    screen.print(table("Memory", ("tier", "peak", "of", "used"), rows, right=("peak", "of", "used")))


def lanes(simulation: Simulation) -> Table:
    """The busy time of each lane."""
    total = simulation.prediction.iteration_s
    ranked = sorted(simulation.busy.items(), key=lambda item: -item[1])
    rows = [(lane, percent(share), seconds(share * total), "█" * round(40 * share)) for lane, share in ranked]
    return table("Lanes", ("lane", "busy", "time", ""), rows, right=("busy", "time"))


def waits(simulation: Simulation) -> Table:
    """The ops that compute waits for."""
    total = simulation.prediction.iteration_s
    ranked = sorted(simulation.waits.items(), key=lambda item: -item[1])
    rows = [(what, seconds(waited), percent(waited / total)) for what, waited in ranked]
    return table("Compute waits for", ("what", "time", "of the step"), rows, right=("time", "of the step"))


def last_stalls(simulation: Simulation) -> list[Stall]:
    """The waits from the last step's first forward to the next step, longest first."""
    return sorted((s for s in stalls(simulation.trace) if s.start_s >= simulation.begin_s), key=lambda s: -s.seconds)


def longest(simulation: Simulation, *, most: int = 6) -> Table:
    """The longest waits of a step, and the ops that compute waited for meanwhile."""
    rows = [
        (stall.at, seconds(stall.seconds), op_of_block(stall.waited_for), ", ".join(_parts(stall)))
        for stall in last_stalls(simulation)[:most]
    ]
    return table("Longest waits of a step", ("before", "time", "for", "meanwhile"), rows, right=("time",))


def _parts(stall: Stall) -> list[str]:
    """The kinds of ops during a wait, longest first."""
    totals: dict[str, float] = {}
    for name, waited in stall.chain:
        kind = name.rpartition(" ")[0] or name
        totals[kind] = totals.get(kind, 0.0) + waited
    ranked = sorted(totals.items(), key=lambda item: -item[1])
    return [f"{kind or 'other'} {seconds(waited)}" for kind, waited in ranked if waited >= 0.01 * stall.seconds]


def tiers(simulation: Simulation, hardware: HardwareProfile) -> dict[str, dict[str, int]]:
    """Peak and capacity of each tier, bytes. Of memory that both share the host has all."""
    from lightning_hetero.planners.evaluation import peaks

    found = peaks(simulation.prediction, hardware)
    rows = {tier: {"peak_bytes": peak, "capacity_bytes": capacity} for tier, peak, capacity in found}
    if hardware.shared_memory:
        del rows["device"]  # it is host memory
    return rows
