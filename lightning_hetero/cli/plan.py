"""``lightning-hetero plan``: one planner's plan, or all planners side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_hetero.cli import planning, reasons
from lightning_hetero.cli.head import logits
from lightning_hetero.cli.options import Request
from lightning_hetero.cli.output import console, count, pairs, plain, print_json, seconds, table, write_text
from lightning_hetero.cli.planning import Outcome
from lightning_hetero.cli.ranks import all_devices, together
from lightning_hetero.cli.remedies import with_remedies
from lightning_hetero.errors import PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan
from lightning_hetero.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

_WIDE = 130  # columns of the screen for a complete comparison
_NARROW = ("planner", "step", "x best", "device", "host", "disk")


def run(request: Request, *, planner: str, options: Iterable[str], out: Path | None, as_json: bool) -> None:
    """Plans, prints, and writes the plan, or the fastest of all planners' plans, to ``out``.

    Raises:
        ConfigError: The request is wrong.
        PlanError: The planner, or every one of them, finds no plan that fits.
    """
    chosen = planning.planners(planner)
    model, hardware = request.profiles()
    given = planning.parse_options(options)
    outcomes = planning.run(chosen, model, hardware, given)
    best = min(outcomes, key=lambda o: o.iteration_s)
    if best.plan is None:
        default = planning.planners(planning.DEFAULT)
        raise with_remedies(
            _refusal(outcomes), request, model, hardware, lambda other: planning.fits(chosen, other, hardware, given),
            another=None if planning.DEFAULT in chosen else planning.run(default, model, hardware, {})[0],
        )  # fmt: skip
    if out is not None:
        origin = request.origin(folder=out.absolute().parent)
        if given:
            origin[planning.OPTIONS] = json.dumps(given)
        write_text(out, replace(best.plan, origin=origin).to_json())
    if as_json:
        rows = [outcome.to_json() | _of_all(outcome.plan, model, hardware) for outcome in outcomes]
        print_json(rows if planner == planning.ALL else rows[0])
        return
    about = described_with_head(request, model, hardware) | together(best.plan, model, hardware)
    if best.plan.require_predicted().disk_bytes and planner != planning.ALL:
        about |= _wear(best.plan, request, model, hardware)
    _print(outcomes if planner == planning.ALL else [best], best.plan, model, about, out=out)


def _of_all(plan: Plan | None, model: ModelProfile, hardware: HardwareProfile) -> dict[str, Any]:
    found = None if plan is None else all_devices(plan, model, hardware)
    return {} if found is None else {"all_devices": found}


def _wear(plan: Plan, request: Request, model: ModelProfile, hardware: HardwareProfile) -> dict[str, str]:
    """A line on what the plan writes to the disk."""
    from lightning_hetero.planners.evaluation import simulation

    simulated = simulation(plan, planning.micro_batch(model, plan), hardware, keep_trace=True)
    wear = reasons.wear(simulated, request, hardware)
    return {} if wear is None else {"disk wear": str(wear)}


def _refusal(outcomes: Sequence[Outcome]) -> Exception:
    """The reason why there is no plan; of several, the one with the smallest shortage."""
    reasons = [outcome.error for outcome in outcomes if outcome.error is not None]
    if len(reasons) == 1:
        return reasons[0]
    closest = min(reasons, key=lambda e: getattr(e, "shortfall_bytes", 0) or float("inf"))
    return PlanError(
        f"none of {len(outcomes)} planners finds a plan that fits. The closest: {closest}",
        tier=getattr(closest, "tier", ""),
        shortfall_bytes=getattr(closest, "shortfall_bytes", 0),
    )


def _print(outcomes: Sequence[Outcome], best: Plan, model: ModelProfile, about: Mapping[str, str], *, out: Path | None) -> None:
    screen = console()
    screen.print(pairs("", about))
    if len(outcomes) == 1:
        screen.print(pairs(f"Plan of {best.name}", _details(best, outcomes[0].planning_s, model)))
    else:
        screen.print(comparison("Plans, fastest first", sorted(outcomes, key=lambda o: o.iteration_s), width=screen.width))
        print_refusals(outcomes)
    if out is not None:
        screen.print(f"Wrote {best.name}'s plan to {out}.", markup=False)


def describe(model: ModelProfile, hardware: HardwareProfile) -> dict[str, str]:
    """The model and the machine in two lines."""
    params, trained = model.num_params, sum(b.num_trainable_params for b in model.blocks)
    training = f", {count(trained)} trained" if trained < params else ""
    bits = 8 * model.compute_itemsize
    device, host = format_bytes(hardware.device_memory_bytes), format_bytes(hardware.host_memory_bytes)
    memory = f"{device} device memory, {host} host memory"
    if hardware.world_size > 1:
        memory = f"{device} of memory on each of {hardware.world_size} devices, {host} host memory for all"
    if hardware.unified_memory:
        memory = f"{host} of memory for device and host together, at most {device} of it for the device"
    disk = f"disk {format_bytes(hardware.disk_read_bytes_per_s)}/s" if hardware.disk_read_bytes_per_s else "no disk"
    size = f"{count(params)} parameters{training}, {len(model.blocks)} blocks, {bits} bit"
    return {
        "model": f"{model.name}: {size}, {model.tokens} tokens a step{' and device' * (hardware.world_size > 1)}",
        "machine": f"{hardware.name}: {memory}, {disk}",
    }


def described_with_head(request: Request, model: ModelProfile, hardware: HardwareProfile) -> dict[str, str]:
    """As :func:`describe`, and a line on the head if its logits dominate memory."""
    head = logits(request, model, hardware)
    return describe(model, hardware) | ({} if head is None else {"head": str(head)})


def _details(plan: Plan, planning_s: float, model: ModelProfile) -> dict[str, str]:
    rows = {}
    if plan.predicted is not None:
        p = plan.predicted
        rows = {
            "iteration": f"{seconds(p.iteration_s)}, {count(model.tokens / p.iteration_s, 'tokens/s')}",
            "forward": f"{seconds(p.forward_s)}, bound by {p.bound_by('forward')}",
            "backward": f"{seconds(p.backward_s)}, bound by {p.bound_by('backward')}",
            "device memory": format_bytes(p.device_peak_bytes),
            "host memory": format_bytes(p.host_peak_bytes),
            "disk space": format_bytes(p.disk_bytes),
        }
    rows["objective"] = "none" if plan.objective_s is None else f"{seconds(plan.objective_s)} by the planner's own formula"
    rows |= _decisions({name: value for name, value in plan.decisions.items() if name != "paper_optimum"})
    return rows | paper_optimum(plan) | {"planned in": seconds(planning_s)}


def paper_optimum(plan: Plan) -> dict[str, str]:
    """Two lines on the optimum of a paper's equations, if the plan is another one."""
    paper = plan.decisions.get("paper_optimum")
    if not isinstance(paper, Mapping) or not {"objective_s", "reason"} <= paper.keys():  # none, or a file that was written by hand
        return {}
    paper = dict(paper)
    objective_s, reason = paper.pop("objective_s"), str(paper.pop("reason"))
    this = "none" if plan.objective_s is None else seconds(plan.objective_s)
    decided = "; ".join(f"{name} {value}" for name, value in _decisions(paper).items())
    taken = f"{_decision('objective_s', objective_s)} by the planner's own formula (this plan: {this}): {decided}"
    return {"paper's optimum": taken, "not taken because": reason}


def _decisions(decisions: Mapping[str, Any]) -> dict[str, str]:
    return {name.removesuffix("_s").replace("_", " "): _decision(name, value) for name, value in decisions.items()}


def _decision(name: str, value: Any) -> str:
    if isinstance(value, list | tuple):
        shown = ", ".join(map(str, value[:6]))
        return f"{shown}, … ({len(value)})" if len(value) > 6 else shown or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {number}" for key, number in value.items()) or "none"
    if value is None:
        return "none"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if name.endswith("_bytes"):
            return format_bytes(value)
        if name.endswith("_s"):
            return seconds(value)
        return f"{value:.3g}" if isinstance(value, float) else f"{value:,}"
    return str(plain(value))


def comparison(title: str, outcomes: Sequence[Outcome], *, width: int, this: Outcome | None = None) -> Table:
    """A table of plans side by side. It highlights ``this``, or else the first one.

    Args:
        title: The title.
        outcomes: The plans, in the order of the rows.
        width: Columns of the screen; on a narrow one phases, objectives and planning times are left
            out.
        this: The plan to highlight.
    """
    fastest = min(o.iteration_s for o in outcomes)
    columns = (
        "planner",
        "step",
        "x best",
        "forward",
        "backward",
        "device",
        "host",
        "disk",
        "objective",
        "planned in",
    )
    rows = []
    for outcome in outcomes:
        took = seconds(outcome.planning_s) if outcome.planning_s else ""
        if outcome.plan is None or outcome.plan.predicted is None:
            rows.append((outcome.planner, "no plan", *[""] * 7, took))
            continue
        p = outcome.plan.predicted
        rows.append(
            (
                outcome.planner,
                seconds(p.iteration_s),
                f"{p.iteration_s / fastest:.2f}",
                f"{seconds(p.forward_s)} {p.bottleneck.get('forward', '')}",
                f"{seconds(p.backward_s)} {p.bottleneck.get('backward', '')}",
                format_bytes(p.device_peak_bytes),
                format_bytes(p.host_peak_bytes),
                format_bytes(p.disk_bytes),
                "" if outcome.plan.objective_s is None else seconds(outcome.plan.objective_s),
                took,
            )
        )
    wide = width >= _WIDE
    if wide:
        title += " (each phase with the resource that bounds it)"
    shown = [index for index, name in enumerate(columns) if wide or name in _NARROW]
    return table(
        title,
        [columns[index] for index in shown],
        [[row[index] for index in shown] for row in rows],
        right=("step", "x best", *columns[5:]),
        best=0 if this is None else [outcome.planner for outcome in outcomes].index(this.planner),
    )


def print_refusals(outcomes: Sequence[Outcome]) -> None:
    """Why some planners have no plan."""
    screen = console()
    for outcome in outcomes:
        if outcome.error is not None:
            screen.print(f"No plan by {outcome.planner}: {outcome.error}", markup=False)
