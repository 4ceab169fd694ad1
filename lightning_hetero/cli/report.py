"""``lightning-hetero report``: a plan, a trace or a recorded run as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_hetero.cli.explain import Explanation, activations, binding, effect, explain, shortly, where
from lightning_hetero.cli.options import Request, load_plan
from lightning_hetero.cli.output import console, count, print_json, seconds, write_text
from lightning_hetero.cli.plan import describe
from lightning_hetero.cli.ranks import together
from lightning_hetero.errors import ConfigError
from lightning_hetero.ir import run_record
from lightning_hetero.ir.activations import saved_bytes
from lightning_hetero.ir.cluster_plan import is_cluster_plan
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier
from lightning_hetero.ir.run_record import RecordedTensor, RunRecord
from lightning_hetero.ir.trace import Trace
from lightning_hetero.profiling.wear import Drive, Wear
from lightning_hetero.report import PageContent, measured, page, predicted
from lightning_hetero.report.content import Curve, ShownBlock, Strip, WhatIf
from lightning_hetero.report.groups import groups
from lightning_hetero.report.steps import traffic

_HELPS = 0.05  # more tokens per second, from which on another machine or batch is called a remedy
# Changes by price, by how their texts end: planning anew and a larger batch are free.
_BY_PRICE = ("planned anew", "batch", "SSD", "host memory", "link")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """What was found at the path that the user named."""

    plan: Plan | None = None
    request: Request | None = None  # the plan's model and machine, if they are known
    trace: Trace | None = None
    record: RunRecord | None = None


def run(path: Path, request: Request, *, plan: Path | None, out: Path, as_json: bool) -> None:
    """Writes the page.

    Args:
        path: A plan file, a trace, or a folder that ``TraceOnDemand`` has written.
        request: The model and the machine, if the plan does not name them.
        plan: The plan of a trace that has none beside it.
        out: Where the page goes.
        as_json: Print what was written as JSON.

    Raises:
        ConfigError: The path is none of these, or a file cannot be read or written.
        PlanError: The plan does not fit the machine.
    """
    given = _given(path, request, plan)
    explanation = None if given.plan is None or given.request is None else explain(given.plan, given.request)
    report = _report(given, explanation, name=path.stem if path.is_file() else path.name)
    write_text(out, page(report))
    if as_json:
        print_json({"report": out, "sections": [strip.title for strip in report.strips]})
        return
    console().print(f"Wrote {out}. It is one file without links: open it in any browser.", markup=False)


def _given(path: Path, request: Request, plan: Path | None) -> _Given:
    if path.is_dir():
        record = path / run_record.FILE
        if not record.is_file():
            raise ConfigError(
                f"{str(path)!r} has no {run_record.FILE}; expected a folder that the callback TraceOnDemand has written, such as "
                f"trace-step-100. `inspect` shows stores and weights."
            )
        found, complete = _plan_of(path / run_record.PLAN if plan is None else plan, request)
        return _Given(plan=found, request=complete, trace=_trace(path / run_record.TRACE), record=RunRecord.load(record))
    if not path.is_file():
        raise ConfigError(f"{str(path)!r} does not exist. Give a plan file, a trace, or a folder that TraceOnDemand has written.")
    content = path.read_bytes()
    if is_cluster_plan(content):
        raise ConfigError(f"{str(path)!r} is a cluster plan, which has no page yet; `lightning-hetero explain {path}` shows it.")
    if b'"traceEvents"' in content:  # anywhere: other programs write their metadata first
        trace = _trace(path)
        if plan is None:
            return _Given(trace=trace)
        found, complete = _plan_of(plan, request)
        return _Given(plan=found, request=complete, trace=trace)
    if plan is not None:
        raise ConfigError(f"--plan is for a trace, and {str(path)!r} is none. Leave it out.")
    found, named = load_plan(path, request)
    return _Given(plan=found, request=named)


def _trace(path: Path) -> Trace:
    try:
        return Trace.from_chrome(path.read_text(encoding="utf-8"), source=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {str(path)!r} cannot be read: {error}.") from error


def _plan_of(path: Path, request: Request) -> tuple[Plan, Request | None]:
    """A recorded plan; without a request if neither it nor the options name the model."""
    plan = Plan.load(path)
    if not plan.origin and not request.given():
        return plan, None
    return load_plan(path, request)


def _report(given: _Given, e: Explanation | None, *, name: str) -> PageContent:
    record = given.record
    found = None if given.trace is None else measured(given.trace)
    strips: list[Strip] = [*([predicted(e.simulation)] if e is not None else []), *([found] if found is not None else [])]
    plan = e.plan if e is not None else given.plan
    facts = _facts(plan, e, strips, record)
    ranked = [] if e is None else _what_ifs(e)
    wear = _wear(record) or (str(e.wear) if e is not None and e.wear is not None else "")
    return PageContent(
        title=f"{name}: {'a run' if record is not None else 'a plan' if given.trace is None else 'a trace'}",
        facts=facts,
        summary="" if e is None else binding(e).splitlines()[0],
        blocks=() if plan is None else _blocks(plan, e, () if record is None else record.tensors),
        tiers={} if e is None else _tiers(e),
        strips=strips,
        curves=() if e is None else _curves(e),
        steps=() if record is None else record.steps,
        traffic=[row for strip in strips for row in traffic(strip)],
        wear=wear,
        what_ifs=ranked,
        remedy="" if e is None else _remedy(ranked),
        alternatives=() if e is None else [(a.block, a.change, effect(a, e.predicted.iteration_s)) for a in e.alternatives],
    )


def _facts(plan: Plan | None, e: Explanation | None, strips: Sequence[Strip], record: RunRecord | None) -> dict[str, str]:
    out = {} if plan is None else {"plan": plan.name}
    if e is not None:
        out |= describe(e.model, e.machine) | together(e.plan, e.model, e.machine)
        step_s = e.predicted.iteration_s
        out["predicted"] = f"{seconds(step_s)} a step, {count(e.model.tokens / step_s, 'tokens/s')}"
    if record is not None:
        times = [step.seconds for step in record.steps if step.seconds]
        mean_s = sum(times) / len(times) if times else 0.0
        speed = f", {count(record.tokens / mean_s, 'tokens/s')}" if record.tokens and mean_s else ""
        if mean_s:
            out["measured"] = f"{seconds(mean_s)} a step{speed}: {record.model}, {len(record.steps)} steps"
    elif strips and strips[-1].title != "predicted":
        out["measured"] = f"{seconds(strips[-1].seconds)} a step"
    return out


def _tiers(e: Explanation) -> dict[str, dict[str, int]]:
    """Bytes by tier. Where the device is the host, both are one."""
    found = where(e.plan, e.part, shared_memory=e.hardware.shared_memory)
    if e.hardware.shared_memory:
        for row in found.values():
            row[Tier.HOST] = row.pop(Tier.DEVICE, 0) + row.get(Tier.HOST, 0)
    return found


def _blocks(plan: Plan, e: Explanation | None, tensors: Sequence[RecordedTensor]) -> list[ShownBlock]:
    mine: dict[str, list[RecordedTensor]] = {}
    for tensor in tensors:
        mine.setdefault(tensor.block, []).append(tensor)
    if e is None:
        return [_measured_block(placed, mine.get(placed.name, [])) for placed in plan.blocks]
    words = {index: activations(group, e) for group in groups(plan) for index in group.indices}
    return [
        ShownBlock(
            placed=_on_host(placed) if e.hardware.shared_memory else placed,
            weight_bytes=shape.weight_bytes,
            state_bytes=shape.state_bytes,
            activations=words[index],
            mostly_in=_mostly_in(e, index),
            tensors=mine.get(placed.name, []),
        )
        for index, (placed, shape) in enumerate(zip(plan.blocks, e.part.shape().blocks, strict=True))
    ]


def _mostly_in(e: Explanation, index: int) -> str:
    """Where most of a block's activations are. What the CPU keeps is in host memory."""
    shared = e.hardware.shared_memory
    saved = saved_bytes(e.part.blocks[index], e.plan.blocks[index], shared_memory=shared)
    kept_in = Tier.HOST.value if shared else Tier.DEVICE.value
    sizes = [(saved.kept, kept_in), (saved.to_host, Tier.HOST.value), (saved.to_disk, Tier.DISK.value)]
    return max([*sizes, (saved.recomputed, "recomputed")], key=lambda row: row[0])[1]


def _on_host(placed: BlockPlan) -> BlockPlan:
    """A rule for a device that is the host, with the host's name."""
    weights, state = (Tier.HOST if tier is Tier.DEVICE else tier for tier in (placed.weights, placed.state))
    return replace(placed, weights=weights, state=state)


def _measured_block(placed: BlockPlan, tensors: Sequence[RecordedTensor]) -> ShownBlock:
    """A block of which only the parameters are known."""
    return ShownBlock(placed=placed, weight_bytes=sum(t.num_bytes for t in tensors) if tensors else None, tensors=tensors)


def _curves(e: Explanation) -> list[Curve]:
    timeline = e.simulation.memory.timeline
    columns = {
        Tier.DEVICE.value: [(at, device) for at, device, _ in timeline],
        Tier.HOST.value: [(at, host) for at, _, host in timeline],
    }
    return [
        Curve(
            tier=tier,
            points=columns[tier],
            capacity_bytes=use["capacity_bytes"],
            peak_bytes=use["peak_bytes"],
        )
        for tier, use in e.use.items()
        if tier in columns
    ]


def _wear(record: RunRecord | None) -> str:
    """What the recorded steps wrote, and how long the drive lasts."""
    if record is None or len(record.steps) < 2:
        return ""
    first, last = record.steps[0], record.steps[-1]
    steps = record.steps[1:]
    written, took_s = (last.written_bytes - first.written_bytes) / len(steps), sum(s.seconds for s in steps) / len(steps)
    if not written or not took_s:
        return ""
    drive = Drive(name=record.drive, rated_bytes=record.rated_bytes, written_bytes=record.worn_bytes, source=record.rated_by)
    return str(Wear(step_bytes=written, step_s=took_s, drive=drive if record.drive else None))


def _what_ifs(e: Explanation) -> list[WhatIf]:
    """The what-ifs, cheapest first."""
    before = e.model.tokens / e.predicted.iteration_s
    found = []
    for scenario, outcome in e.what_ifs:
        if outcome.error is not None:
            found.append(WhatIf(change=scenario.change, remark=shortly(outcome.error)))
            continue
        speed = scenario.model.tokens / outcome.iteration_s
        found.append(
            WhatIf(
                change=scenario.change,
                step_s=outcome.iteration_s,
                tokens_per_s=speed,
                gain=speed / before - 1,
                remark="with this plan" if outcome.kept else "with another plan",
            )
        )
    return sorted(found, key=lambda one: _price(one.change))


def _price(change: str) -> int:
    return next((rank for rank, words in enumerate(_BY_PRICE) if change.endswith(words)), len(_BY_PRICE))


def _remedy(found: Sequence[WhatIf]) -> str:
    """The cheapest what-if that helps."""
    helpful = next((one for one in found if one.gain is not None and one.gain >= _HELPS), None)
    if helpful is None or helpful.gain is None:
        return "Nothing tried here is worth its price: no change gives 5 % more tokens per second."
    return f"The cheapest remedy: {helpful.change}, {100 * helpful.gain:.0f} % more tokens per second."
