"""``lightning-hetero explain``: explains a plan, its binding resource and its alternatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_hetero.cli import planning, reasons
from lightning_hetero.cli.options import Request, load_plan
from lightning_hetero.cli.output import change, console, count, pairs, percent, print_json, seconds, table, working
from lightning_hetero.cli.plan import comparison, described_with_head, paper_optimum
from lightning_hetero.cli.planning import Outcome
from lightning_hetero.cli.ranks import TwoWays, exchange, together
from lightning_hetero.cli.simulate import lanes, last_stalls, longest, tiers, waits
from lightning_hetero.errors import ConfigError, PlanError
from lightning_hetero.ir.activations import saved_bytes
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan, Prediction, Tier
from lightning_hetero.lowering import mirrored_bytes
from lightning_hetero.profiling.wear import Wear
from lightning_hetero.report.groups import Group, groups
from lightning_hetero.sim import Simulation
from lightning_hetero.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from lightning_hetero.planners.forward_only import ForwardOnly

_FULL = 0.95  # of a tier's capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Everything that ``explain`` reports about a plan.

    Attributes:
        plan: The resolved plan, simulated again.
        model: The model, at the batch of a step.
        part: The model at the batch of one forward; the slices of one of several such devices.
        hardware: The machine; of several devices that hold the model together, one's share.
        machine: The whole machine.
        simulation: The plan's step.
        forward_only: Its passes without backward.
        exchange: Where its devices exchange weights and gradients; ``None``: there is one way.
        wear: What its steps write to the disk; ``None``: nothing.
        influences: The gain from each resource being faster.
        alternatives: The effect of another placement of one block.
        others: The other planners' plans, fastest first.
        planner: The planner of the what-ifs.
        what_ifs: Other models and machines, each with its best plan: a new one or this one.
    """

    plan: Plan
    model: ModelProfile
    part: ModelProfile
    hardware: HardwareProfile
    machine: HardwareProfile
    simulation: Simulation
    forward_only: ForwardOnly
    exchange: TwoWays | None
    wear: Wear | None
    influences: Sequence[reasons.Influence]
    alternatives: Sequence[reasons.Alternative]
    others: Sequence[Outcome]
    planner: str
    what_ifs: Sequence[tuple[reasons.Scenario, Outcome]]

    @property
    def predicted(self) -> Prediction:
        """The plan's step, as :func:`evaluated` predicts it."""
        return self.plan.require_predicted()

    @property
    def use(self) -> dict[str, dict[str, int]]:
        """Peak and capacity of each tier."""
        return tiers(self.simulation, self.hardware)


def run(path: Path, request: Request, *, as_json: bool) -> None:
    """Explains a plan file.

    Raises:
        ConfigError: The plan or the request is wrong.
        PlanError: The plan does not fit the machine.
    """
    plan, request = load_plan(path, request)
    explanation = explain(plan, request)
    if as_json:
        print_json(to_json(explanation))
    else:
        _print(explanation, described_with_head(request, explanation.model, explanation.machine))


def explain(plan: Plan, request: Request) -> Explanation:
    """Simulates the plan, changes of it, the other planners' plans, and plans for other machines.

    Raises:
        ConfigError: The request is wrong.
        PlanError: The plan does not fit the machine.
    """
    from lightning_hetero.planners.evaluation import evaluated, simulation
    from lightning_hetero.planners.forward_only import forward_only
    from lightning_hetero.planners.one_rank import as_run

    model, machine = request.profiles()
    plan = plan.resolve(b.name for b in model.blocks)
    part, hardware = as_run(plan, planning.micro_batch(model, plan), machine)
    planners = planning.planners(planning.ALL)
    planner = plan.name if plan.name in planners else planning.DEFAULT
    options = planning.stored_options(plan) if plan.name in planners else {}
    with working("simulating"):
        plan = evaluated(plan, part, hardware)
        simulated = simulation(plan, part, hardware, keep_trace=True)
        without_backward = forward_only(plan, part, hardware)
        influences = reasons.influences(plan, part, hardware)
        alternatives = reasons.alternatives(plan, part, hardware)
    with working("planning with the other planners"):
        rivals = {name: chosen for name, chosen in planners.items() if name != plan.name}
        others = planning.run(rivals, model, machine, {})
    anew = reasons.Scenario(change="as it is, planned anew", model=model, hardware=machine)
    chosen = {planner: planners[planner]}
    with working("planning for other machines"):
        what_ifs = [
            (scenario, best_of_both(scenario, plan, planning.run(chosen, scenario.model, scenario.hardware, options)[0]))
            for scenario in (anew, *reasons.scenarios(request, model, machine))
        ]
    return Explanation(
        plan=plan,
        model=model,
        part=part,
        hardware=hardware,
        machine=machine,
        simulation=simulated,
        forward_only=without_backward,
        exchange=exchange(plan, part, hardware),
        wear=reasons.wear(simulated, request, hardware),
        influences=influences,
        alternatives=alternatives,
        others=sorted(others, key=lambda o: o.iteration_s),
        planner=planner,
        what_ifs=what_ifs,
    )


def best_of_both(scenario: reasons.Scenario, plan: Plan, found: Outcome) -> Outcome:
    """The planner's plan for a scenario, or the current plan if it is faster there.

    A search need not find the current plan again.
    """
    from lightning_hetero.planners.evaluation import evaluated

    try:
        kept = evaluated(plan, planning.micro_batch(scenario.model, plan), scenario.hardware)
    except (PlanError, ConfigError):  # it does not fit, or the machine cannot do it
        return found
    return min(Outcome(planner=plan.name, plan=kept, kept=True), found, key=lambda outcome: outcome.iteration_s)


def to_json(e: Explanation) -> dict[str, Any]:
    """The explanation as ``--json`` prints it."""
    return {
        "planner": e.plan.name,
        "objective_s": e.plan.objective_s,
        "decisions": e.plan.decisions,
        "predicted": e.predicted,
        "forward_only": e.forward_only,
        "exchange": e.exchange,
        "wear": e.wear,
        "placement": [_placement(group, e.plan, e.part) for group in groups(e.plan)],
        "where": where(e.plan, e.part, shared_memory=e.hardware.shared_memory),
        "frozen": frozen(e.plan, e.part),
        "tiers": e.use,
        "lanes": e.simulation.busy,
        "waits_s": e.simulation.waits,
        "stalls": last_stalls(e.simulation),
        "binding": {"influences": e.influences, "full_tiers": full(e.use)},
        "alternatives": e.alternatives,
        "runner_ups": [outcome.to_json() for outcome in e.others],
        "what_if_planner": e.planner,
        "what_ifs": [
            {"change": s.change, "tokens": s.model.tokens, "kept": outcome.kept, **outcome.to_json()} for s, outcome in e.what_ifs
        ],
    }


def _print(e: Explanation, about: Mapping[str, str]) -> None:
    screen, p = console(), e.predicted
    step = f"{seconds(p.iteration_s)}: forward {seconds(p.forward_s)}, backward {seconds(p.backward_s)}"
    step_of = together(e.plan, e.model, e.machine)
    step_of |= {} if e.exchange is None else {"exchange": str(e.exchange)}
    passes = {"no backward": _passes(e)}
    worn = {} if e.wear is None else {"disk wear": str(e.wear)}
    screen.print(pairs("", {"plan": e.plan.name, **about, "step": step, **step_of, **passes, **worn, **paper_optimum(e.plan)}))
    screen.print(_placements(e))
    screen.print(_where(e))
    if rows := frozen(e.plan, e.part):
        screen.print(_frozen(rows))
    screen.print(_alternatives(e.alternatives, p.iteration_s))
    screen.print(lanes(e.simulation))
    if e.simulation.waits:
        screen.print(waits(e.simulation))
        screen.print(longest(e.simulation, most=3))
    screen.print(binding(e), markup=False)
    this = Outcome(planner=e.plan.name, plan=e.plan)
    ranked = sorted([this, *e.others], key=lambda o: o.iteration_s)
    screen.print(comparison("\nThis plan and the other planners'", ranked, width=screen.width, this=this))
    for outcome in e.others:
        if outcome.error is not None:
            screen.print(f"No plan by {outcome.planner}: {shortly(outcome.error)}", markup=False)
    screen.print()
    screen.print(_what_ifs(e.what_ifs, e.plan, e.model, e.planner))


def _passes(e: Explanation) -> str:
    found = e.forward_only
    coming = {"from disk": found.read_bytes, "to the device": found.uploaded_bytes}
    moves = ", ".join(f"{format_bytes(size)} {way}" for way, size in coming.items() if size) or "nothing"
    return f"batch {seconds(found.batch_s)}; each pass brings {moves}, so a generated token takes at least {seconds(found.token_s)}"


def where(plan: Plan, model: ModelProfile, *, shared_memory: bool) -> dict[str, dict[str, int]]:
    """Bytes of weights, optimizer state and saved activations, by where they live.

    On shared memory the device is the host.

    If steps are kept, also the bytes in memory that a kept step writes to the disk (``mirrors``).
    """
    out = {what: {tier.value: 0 for tier in Tier} for what in ("weights", "state", "activations")}
    out["activations"]["recomputed"] = 0
    for block, shape, placed in zip(model.blocks, model.shape().blocks, plan.blocks, strict=True):
        out["weights"][placed.weights.value] += shape.weight_bytes
        out["state"][placed.state.value] += shape.state_bytes
        saved = saved_bytes(block, placed, shared_memory=shared_memory)
        for key, value in (
            ("device", saved.kept),
            ("host", saved.to_host),
            ("disk", saved.to_disk),
            ("recomputed", saved.recomputed),
        ):
            out["activations"][key] += value
    if model.kept_every:
        rows = zip(model.shape().blocks, plan.blocks, strict=True)
        out["mirrors"] = {Tier.DISK.value: sum(mirrored_bytes(shape, placed) for shape, placed in rows)}
    return out


def frozen(plan: Plan, model: ModelProfile) -> list[dict[str, Any]]:
    """The frozen weights, by the slots that they have in the store, and why.

    In memory they have slots only if steps are kept.
    """
    sizes: dict[tuple[int, str], int] = {}
    for block, placed in zip(model.blocks, plan.blocks, strict=True):
        rest = 0 if block.num_trainable_params else model.weight_bytes(block) - block.in_place_bytes
        stored = model.kept_every > 0 or placed.weights is Tier.DISK
        why = (block.copied or _UNKNOWN) if stored else _IN_MEMORY
        for slots, reason, size in ((0, _IN_PLACE, block.in_place_bytes), (int(stored), why, rest)):
            if size:
                sizes[slots, reason] = sizes.get((slots, reason), 0) + size
    return [{"slots": slots, "bytes": size, "why": why} for (slots, why), size in sorted(sizes.items())]


_IN_PLACE = "read in place from safetensors files"
_IN_MEMORY = "they stay in memory"
_UNKNOWN = "nothing says that safetensors files have them as they are"


def full(use: dict[str, dict[str, int]]) -> list[str]:
    """Tiers whose peak is close to their capacity."""
    return [tier for tier, row in use.items() if row["capacity_bytes"] and row["peak_bytes"] >= _FULL * row["capacity_bytes"]]


def _placement(group: Group, plan: Plan, model: ModelProfile) -> dict[str, Any]:
    placed = group.placed
    return {
        "blocks": [plan.blocks[index].name for index in group.indices],
        "num_params": sum(model.blocks[index].num_params for index in group.indices),
        "weights": placed.weights,
        "state": placed.state,
        "update": placed.update,
        "saved": placed.saved,
        "boundary": placed.boundary,
        "operators": placed.operators,
    }


def _placements(e: Explanation) -> Table:
    rows = [
        (
            group.names(e.plan),
            str(len(group.indices)),
            count(sum(e.part.blocks[index].num_params for index in group.indices)),
            group.placed.weights.value,
            group.placed.state.value,
            group.placed.update.value,
            activations(group, e),
        )
        for group in groups(e.plan)
    ]
    columns = ("blocks", "count", "parameters", "weights", "state", "update", "activations")
    return table("What is where", columns, rows, right=("count", "parameters"))


def activations(group: Group, e: Explanation) -> str:
    """The treatment of the activations that the group's blocks save, as shares of their bytes."""
    shared = e.hardware.shared_memory
    found = [saved_bytes(e.part.blocks[i], e.plan.blocks[i], shared_memory=shared) for i in group.indices]
    policies = {
        "keep": sum(s.kept for s in found),
        "recompute": sum(s.recomputed for s in found),
        "to host": sum(s.to_host for s in found),
        "to disk": sum(s.to_disk for s in found),
    }
    total = sum(policies.values())
    shares = {name: round(100 * size / total) for name, size in policies.items() if size}
    return ", ".join(f"{name} {share} %" if share < 100 else name for name, share in shares.items() if share) or "none"


def _where(e: Explanation) -> Table:
    columns = ("device", "host", "disk", "recomputed")
    use, found = e.use, where(e.plan, e.part, shared_memory=e.hardware.shared_memory)
    rows = [(what, *(format_bytes(row[c]) if row.get(c) else "" for c in columns)) for what, row in found.items()]
    for key, label in (("peak_bytes", "peak of a step"), ("capacity_bytes", "capacity")):
        rows.append((label, *(format_bytes(use[c][key]) if c in use else "" for c in columns)))
    both = ". Device and host have one memory: of the host are peak and capacity of both" if e.hardware.unified_memory else ""
    return table(f"Bytes by tier{both}", ("", *columns), rows, right=columns)


def _frozen(rows: Sequence[dict[str, Any]]) -> Table:
    found = [(format_bytes(row["bytes"]), str(row["slots"]), row["why"]) for row in rows]
    return table("Frozen weights in the store", ("bytes", "slots", "why"), found, right=("bytes", "slots"))


def _alternatives(found: Sequence[reasons.Alternative], iteration_s: float) -> Table:
    rows = [(a.block, a.change, effect(a, iteration_s)) for a in found]
    return table("Why not otherwise: the step after a change of one block", ("block", "change", "step"), rows)


def effect(one: reasons.Alternative, iteration_s: float) -> str:
    """What another placement of a block does to a step of ``iteration_s`` seconds."""
    if one.iteration_s is None:
        return f"does not fit: {format_bytes(one.shortfall_bytes)} of {one.tier} memory missing"
    return change(one.iteration_s, iteration_s)


def binding(e: Explanation) -> str:
    """What bounds the step, and which tiers are full."""
    first, use = e.influences[0], e.use
    lines = [f"Binding: {first.resource}. A tenth faster, it shortens the step by {percent(first.saved_share)}."]
    rest = [f"{i.resource} {percent(i.saved_share)}" for i in e.influences[1:] if i.saved_share > 0.0005]
    lines.append(f"The same for the others: {', '.join(rest)}." if rest else "No other resource shortens it.")
    for tier in full(use):
        lines.append(f"Full: {tier}, {format_bytes(use[tier]['peak_bytes'])} of {format_bytes(use[tier]['capacity_bytes'])}.")
    return "\n".join(lines)


def shortly(error: Exception) -> str:
    """Why there is no plan, in few words."""
    if isinstance(error, PlanError) and error.tier:
        return f"{format_bytes(error.shortfall_bytes)} of {error.tier} memory missing."
    return str(error)


def _what_ifs(found: Sequence[tuple[reasons.Scenario, Outcome]], plan: Plan, model: ModelProfile, planner: str) -> Table:
    before = plan.require_predicted().iteration_s / model.tokens
    rows = []
    for scenario, outcome in found:
        if outcome.error is not None:
            rows.append((scenario.change, "none", "", "", shortly(outcome.error)))
            continue
        per_token = outcome.iteration_s / scenario.model.tokens
        what = "this one" if outcome.kept else "another"
        gain = change(before, per_token)
        rows.append((scenario.change, what, seconds(outcome.iteration_s), count(1 / per_token, "tokens/s"), gain))
    columns = ("change", "plan", "step", "throughput", "against this plan")
    return table(f"What if (planned by {planner})", columns, rows, right=columns[2:4])
