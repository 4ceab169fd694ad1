"""A plan's step in steady state: its time, its memory, its bottlenecks and its trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lightning_hetero.cost import LANES, Rates, Work
from lightning_hetero.ir.activations import saved_bytes
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan, Prediction, Tier
from lightning_hetero.ir.schedule import NO_BLOCK, Anchor, Lane, Op, OpKind, Phase, Schedule
from lightning_hetero.ir.stalls import with_reasons
from lightning_hetero.ir.trace import WAIT, Span, Trace
from lightning_hetero.lowering import lent_bytes, mirrored_bytes, num_slots, weight_file_bytes
from lightning_hetero.sim.compile import compile_step
from lightning_hetero.sim.event_loop import EventLoop, SimulatedStep, busy_s
from lightning_hetero.sim.links import SharedRates
from lightning_hetero.sim.program import Program, Role, Server
from lightning_hetero.sim.step_memory import StepMemory

_DISK = "disk"  # name of the bottleneck if reads and writes share one link
_WORKS = {lane: sum(1 << work for work in Work if LANES[work] is lane) for lane in Lane}


class HasStaging(Protocol):
    """The part of ``lowering.CacheSizes`` that the simulator needs."""

    @property
    def staging_bytes(self) -> int:
        """Host memory through which state on disk streams."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """One optimizer step of a plan in steady state.

    Attributes:
        prediction: Times, peaks and bottlenecks.
        trace: Every simulated step, on a clock that begins at 0; empty unless requested.
        busy: Lanes and the share of the iteration in which they work.
        waits: The ops that compute waits for (``"UPDATE"``, ``"FETCH"``,
            ``"SWAP_IN activations"``), seconds of one iteration.
        memory: Peaks of the step and, if requested, every change.
        iterations_s: Seconds of each simulated step.
        begin_s: When the first forward of the last one began, on the trace's clock.
        steady: Whether steps repeat.
    """

    prediction: Prediction
    trace: Trace
    busy: Mapping[str, float]
    waits: Mapping[str, float]
    memory: StepMemory
    iterations_s: tuple[float, ...]
    begin_s: float
    steady: bool


def simulate(
    schedules: Sequence[Schedule],
    plan: Plan,
    model: ModelProfile,
    hardware: HardwareProfile,
    *,
    sizes: HasStaging,
    steps: int = 4,
    keep_trace: bool = False,
) -> Simulation:
    """Simulates a plan.

    Args:
        schedules: The schedules of one optimizer step, in order: micro-batches that accumulate,
            then the one with updates. They have passed ``lowering.check``. They are repeated, so
            the first one must begin with the blocks that the last one leaves in memory.
        plan: The resolved plan of the schedules.
        model: The model's profile.
        hardware: The machine's profile.
        sizes: The memory that the plan leaves for staging.
        steps: The most steps to simulate; fewer if they repeat.
        keep_trace: Whether to keep spans and the timeline of memory, which take most of the time.

    Returns:
        The step that repeats, or the mean of the repeating steps; without repetition, the mean of
        all steps but the first.

    Raises:
        RateError: The plan needs work for which the hardware profile has no rate.
    """
    rates = Rates(hardware)
    program = compile_step(schedules, plan, model, rates, staging_bytes=sizes.staging_bytes)
    engine = EventLoop(program, SharedRates(rates), staging_bytes=sizes.staging_bytes, record=keep_trace)
    cycle = engine.run(max(1, steps))
    reported = engine.steps[-cycle:] if cycle else engine.steps[1:] or engine.steps
    return Simulation(
        prediction=_prediction(reported, plan, model, hardware),
        trace=_trace(engine, program, model) if keep_trace else Trace(spans=()),
        busy=_busy(reported),
        waits=_waits(reported, program),
        memory=_memory(reported, hardware),
        iterations_s=tuple(s.iteration_s for s in engine.steps),
        begin_s=engine.steps[-1].begin_s,
        steady=cycle > 0,
    )


def _prediction(steps: Sequence[SimulatedStep], plan: Plan, model: ModelProfile, hardware: HardwareProfile) -> Prediction:
    memory = _memory(steps, hardware)
    iteration_s = sum(step.iteration_s for step in steps) / len(steps) + _pinning_s(plan, model, hardware)
    forward_s = sum(step.forward_s for step in steps) / len(steps)
    return Prediction(
        iteration_s=iteration_s,
        forward_s=forward_s,
        backward_s=iteration_s - forward_s,
        device_peak_bytes=memory.device_peak_bytes,
        host_peak_bytes=memory.host_peak_bytes,
        disk_bytes=disk_bytes(plan, model, kept_every=model.kept_every, shared_memory=hardware.shared_memory),
        bottleneck={
            "forward": _bottleneck(steps, Phase.FORWARD, duplex=hardware.disk_duplex),
            "backward": _bottleneck(steps, Phase.BACKWARD, duplex=hardware.disk_duplex),
        },
    )


def _pinning_s(plan: Plan, model: ModelProfile, hardware: HardwareProfile) -> float:
    """Mean seconds of a step if every N-th step is kept.

    A kept step ends when all of it is on the disk.
    """
    if model.kept_every <= 1:
        return 0.0
    rows = list(zip(model.shape().blocks, plan.blocks, strict=True))
    mirrored = sum(mirrored_bytes(shape, placed) for shape, placed in rows)
    seconds = Rates(hardware).alone_s(Work.DISK_WRITE, mirrored)
    if not hardware.shared_memory:  # data passes through host memory, one block at a time
        seconds += Rates(hardware).alone_s(Work.D2H, sum(lent_bytes(shape, placed, hardware.ranks) for shape, placed in rows))
    return seconds / model.kept_every


def disk_bytes(plan: Plan, model: ModelProfile, *, kept_every: int = 0, shared_memory: bool = False) -> int:
    """Disk space of a resolved plan: all slots of state and weights there, and swapped activations.

    Args:
        plan: The plan.
        model: The model.
        kept_every: N if every N-th step is kept: data in memory then has slots too.
        shared_memory: The device is the host's own CPU.
    """
    total, slots = 0, num_slots(kept_every)
    for block, shape, placed in zip(model.blocks, model.shape().blocks, plan.blocks, strict=True):
        total += weight_file_bytes(shape, kept_every) * (kept_every > 0 or placed.weights is Tier.DISK)
        total += slots * shape.state_bytes * (kept_every > 0 or placed.state is Tier.DISK)
        total += saved_bytes(block, placed, shared_memory=shared_memory).to_disk
    return total


def _bottleneck(steps: Sequence[SimulatedStep], phase: Phase, *, duplex: bool) -> str:
    """The lane that is busy longest; compute wins a tie."""
    works = {lane.value: mask for lane, mask in _WORKS.items()}
    if not duplex:
        works[_DISK] = works.pop(Lane.DISK_READ) | works.pop(Lane.DISK_WRITE)
    return max(works, key=lambda lane: sum(busy_s(step.usage[phase], works[lane]) for step in steps))


def _busy(steps: Sequence[SimulatedStep]) -> dict[str, float]:
    usages = [usage for step in steps for usage in step.usage.values()]
    seconds = {lane.value: sum(busy_s(usage, works) for usage in usages) for lane, works in _WORKS.items()}
    total_s = sum(step.iteration_s for step in steps)
    return {lane: busy / total_s for lane, busy in seconds.items() if busy}


def _waits(steps: Sequence[SimulatedStep], program: Program) -> dict[str, float]:
    waits: dict[str, float] = {}
    for step in steps:
        for job, seconds in step.waits.items():
            source = program.jobs[job].source
            what = source.what if isinstance(source, Op) else "compute"
            waits[what] = waits.get(what, 0.0) + seconds / len(steps)
    return waits


def _memory(steps: Sequence[SimulatedStep], hardware: HardwareProfile) -> StepMemory:
    host, last = max(step.host_peak_bytes for step in steps), steps[-1]
    shared = hardware.shared_memory  # one pool, which is counted as the host's
    return StepMemory(
        device_peak_bytes=host if shared else max(step.device_peak_bytes for step in steps),
        host_peak_bytes=host,
        timeline=tuple((at - last.begin_s, host if shared else device, host) for at, device, host in last.timeline),
    )


# ---- the trace -----------------------------------------------------------------------------------


def _trace(engine: EventLoop, program: Program, model: ModelProfile) -> Trace:
    """Spans with the names and lanes that ``runtime.recorder`` gives them.

    The pieces of an op form one span.
    """
    spans: dict[tuple[int, int], Span] = {}
    waits: list[Span] = []
    jobs = program.jobs
    last = {job.group: index for index, job in enumerate(jobs)}
    edges = _Edges(program, model)
    for number in sorted(engine.ended):
        step, index = divmod(number, len(jobs))
        job, began, ended = jobs[index], engine.began[number], engine.ended[number]
        if isinstance(job.source, Op):
            if job.role in (Role.OPEN, Role.ARM) or number - index + last[job.group] not in engine.ended:
                continue
            op, key = job.source, (step, job.group)
            if key in spans:
                began, ended = min(began, spans[key].start_s), max(ended, spans[key].end_s)
            lane = Lane.COMPUTE if op.kind is OpKind.RELEASE else op.lane
            arrival = number - index + edges.arrival.get(job.group, program.last - len(jobs))
            spans[key] = Span(
                step=step, name=_title(op, model), lane=lane.value, start_s=began, end_s=ended, num_bytes=op.num_bytes,
                order=job.group, issued_s=min(began, engine.ended.get(arrival, 0.0)), after=edges.after.get(job.group, ()),
            )  # fmt: skip
        elif isinstance(job.source, Anchor) and job.source.phase is not Phase.VERDICT:
            spans[step, job.group] = _compute(step, _title(job.source, model), began, ended)
    for number, (arrived, cause) in engine.arrived.items():
        step, index = divmod(number, len(jobs))
        began = engine.began.get(number, engine.steps[-1].end_s)  # the simulation ends at the next step's first forward
        if arrived < began:
            name = f"{WAIT}{_title(jobs[index].source, model)}"
            waits.append(_compute(step, name, arrived, began, _title(jobs[cause].source, model)))
    return Trace(spans=with_reasons([*spans.values(), *waits]))


class _Edges:
    """The causes of ops, by their group.

    Attributes:
        arrival: The compute after which the op is issued; none for ops at the begin of a step.
        after: Names of the ops that it waits for.
    """

    def __init__(self, program: Program, model: ModelProfile) -> None:
        jobs = program.jobs
        self.arrival: dict[int, int] = {}
        self.after: dict[int, tuple[str, ...]] = {}
        for index, job in enumerate(jobs):
            for then in (*job.after, *job.next_step):
                group = jobs[then].group
                if group == job.group or not isinstance(jobs[then].source, Op):
                    continue
                if isinstance(job.source, Op):
                    self.after[group] = (*self.after.get(group, ()), _title(job.source, model))
                if job.server == Server.COMPUTE and then in job.after:
                    self.arrival.setdefault(group, index)


def _compute(step: int, name: str, start_s: float, end_s: float, waited_for: str = "") -> Span:
    return Span(step=step, name=name, lane=Lane.COMPUTE.value, start_s=start_s, end_s=end_s, waited_for=waited_for)


def _title(source: Op | Anchor | None, model: ModelProfile) -> str:
    """The kind and the block; the verdict, after which a step may wait for updates, is ``"V"``."""
    if source is None or (isinstance(source, Anchor) and source.phase is Phase.VERDICT):
        return Phase.VERDICT.value
    what = source.what if isinstance(source, Op) else source.phase.value
    return f"{what} {'' if source.block == NO_BLOCK else model.blocks[source.block].name}"
