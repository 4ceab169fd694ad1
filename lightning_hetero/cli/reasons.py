"""Reasons for a plan: costs of changes, the binding resource, gains from other machines or batches.

Every answer is a simulation of the changed plan, model or machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_hetero.cli.options import Request
from lightning_hetero.errors import ConfigError, PlanError, RateError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Saved, Tier, UpdateLane
from lightning_hetero.ir.schedule import Lane
from lightning_hetero.lowering import fitted
from lightning_hetero.profiling.wear import Drive, Wear, drives_under, together
from lightning_hetero.report.groups import groups
from lightning_hetero.sim import Simulation
from lightning_hetero.units import GIB

MORE_HOST_BYTES = 32 * GIB
FASTER = 1.1  # factor by which a resource is faster when its influence is computed
_UP = {Tier.DISK: Tier.HOST, Tier.HOST: Tier.DEVICE}
_DRIVE = "nvme-gen4"  # the drive of "+1 SSD" on a machine without one
_MOST_GROUPS = 8  # beyond these, reasons repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another placement of one block.

    Attributes:
        block: The block.
        change: The change.
        iteration_s: Predicted seconds of one step; ``None`` if the changed plan does not fit.
        tier: The tier that is then too small.
        shortfall_bytes: The bytes that are missing there.
    """

    block: str
    change: str
    iteration_s: float | None = None
    tier: str = ""
    shortfall_bytes: int = 0


def alternatives(plan: Plan, model: ModelProfile, hardware: HardwareProfile) -> list[Alternative]:
    """Simulates another placement of one block of each group.

    Leaves out changes that no plan may make.
    """
    from lightning_hetero.planners.evaluation import evaluated

    out, shape, on_device = [], model.shape(), hardware.copies_weights
    plan = fitted(plan, shape, device=on_device)
    for group in sorted(groups(plan), key=lambda g: -len(g.indices))[:_MOST_GROUPS]:
        index = group.indices[0]
        for change, values in _changes(group.placed, shared=hardware.shared_memory):
            block = plan.blocks[index].name
            try:
                placed = replace(plan.blocks[index], **values)
                changed = replace(plan, blocks=(*plan.blocks[:index], placed, *plan.blocks[index + 1 :]))
                if fitted(changed, shape, device=on_device) == plan:
                    continue  # the block is pinned
                step_s = evaluated(changed, model, hardware).require_predicted().iteration_s
            except RateError:
                continue  # the machine cannot do that work
            except PlanError as error:
                found = Alternative(block=block, change=change, tier=error.tier, shortfall_bytes=error.shortfall_bytes)
            except ConfigError:
                continue  # the plan format forbids it
            else:
                found = Alternative(block=block, change=change, iteration_s=step_s)
            out.append(found)
    return out


def _changes(block: BlockPlan, *, shared: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes of one block, as text and as values: tier, update lane, activations."""
    for key, tier in (("weights", block.weights), ("state", block.state)):
        up = _UP.get(tier)
        if up is None or (shared and up is Tier.DEVICE):  # on shared memory the device is the host
            continue
        lane = {"update": UpdateLane.DEVICE} if key == "state" and up is Tier.DEVICE else {}
        yield f"{key} on {up.value}", {key: up} | lane
    if block.state is Tier.HOST:
        other = UpdateLane.CPU if block.update is UpdateLane.DEVICE else UpdateLane.DEVICE
        yield f"update on {other.value}", {"update": other}
    for saved in (Saved.KEEP, Saved.RECOMPUTE):
        if not shared and (block.saved is not saved or block.operators):
            yield f"activations: {saved.value} all", {"saved": saved, "operators": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Influence:
    """The gain of a step from one faster resource.

    Attributes:
        resource: The resource that is :data:`FASTER`.
        saved_share: The share of the step's time that this saves.
    """

    resource: str
    saved_share: float


def influences(plan: Plan, model: ModelProfile, hardware: HardwareProfile) -> list[Influence]:
    """Simulates the plan with each resource a tenth faster; the most influential first."""
    from lightning_hetero.planners.evaluation import simulation

    before = simulation(plan, model, hardware).prediction.iteration_s
    found = []
    for resource, (faster_model, faster_hardware) in _faster(model, hardware).items():
        after = simulation(plan, faster_model, faster_hardware).prediction.iteration_s
        found.append(Influence(resource=resource, saved_share=1 - after / before))
    return sorted(found, key=lambda i: -i.saved_share)


def _faster(model: ModelProfile, hardware: HardwareProfile) -> dict[str, tuple[ModelProfile, HardwareProfile]]:
    def scaled(*keys: str) -> tuple[ModelProfile, HardwareProfile]:
        return model, replace(hardware, **{key: getattr(hardware, key) * FASTER for key in keys})

    quicker = replace(
        model,
        blocks=tuple(replace(b, forward_s=b.forward_s / FASTER, backward_s=b.backward_s / FASTER) for b in model.blocks),
    )
    device = replace(hardware, device_update_params_per_s=hardware.device_update_params_per_s * FASTER)
    out = {"compute": (quicker, device)}
    if not hardware.shared_memory:
        out["link host → device"] = scaled("link_h2d_bytes_per_s")
        out["link device → host"] = scaled("link_d2h_bytes_per_s")
    if hardware.disk_read_bytes_per_s:
        out["disk"] = scaled("disk_read_bytes_per_s", "disk_write_bytes_per_s")
    out["host memory bandwidth"] = scaled("host_dram_bytes_per_s")
    out["CPU updates"] = scaled("cpu_update_params_per_s", "cpu_downcast_params_per_s")
    if hardware.world_size > 1 or hardware.ranks > 1:
        out["collectives"] = scaled("collective_bytes_per_s", "peer_bytes_per_s")
    return out


def wear(simulation: Simulation, request: Request, hardware: HardwareProfile) -> Wear | None:
    """What a simulated step writes to the disk, and how long the drives last; ``None``: nothing.

    Args:
        simulation: The step, with its trace.
        request: Names the drives, if the machine is made of known parts.
        hardware: The machine.
    """
    steps: dict[int, int] = {}
    for span in simulation.trace.spans:
        if span.lane == Lane.DISK_WRITE:
            steps[span.step] = steps.get(span.step, 0) + span.num_bytes
    written = max(steps.values(), default=0)  # the simulation ends before all writes of its last step
    if not written:
        return None
    return Wear(step_bytes=written, step_s=simulation.prediction.iteration_s, drive=_drives(request, hardware))


def _drives(request: Request, hardware: HardwareProfile) -> Drive | None:
    """The drives of a machine of known parts, or those of this one."""
    from lightning_hetero.profiling import presets

    if request.hardware_profile is not None or not hardware.disk_capacity_bytes:
        return None
    paper = {**presets.PAPER_MACHINES, **presets.BOXES}.get(request.machine or "")
    spec = request.disk or (paper.disk if paper is not None else None)
    if spec is None:
        return together(drives_under(Path())) if request.device is None and paper is None else None
    disk = presets.disk(spec)
    return Drive(name=disk.name, rated_bytes=disk.rated_bytes.value, source=disk.rated_bytes.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Another model or machine to plan for.

    Attributes:
        change: The change.
        model: The changed model.
        hardware: The changed machine.
    """

    change: str
    model: ModelProfile
    hardware: HardwareProfile


def scenarios(request: Request, model: ModelProfile, hardware: HardwareProfile) -> Sequence[Scenario]:
    """What-if changes: more host memory, one more drive, twice the batch, a faster link."""
    more = hardware.host_memory_bytes + MORE_HOST_BYTES
    device = more if hardware.shared_memory else hardware.device_memory_bytes
    device += MORE_HOST_BYTES if hardware.unified_memory else 0
    found = [
        Scenario(
            change="+32 GiB host memory",
            model=model,
            hardware=replace(hardware, host_memory_bytes=more, device_memory_bytes=device),
        )
    ]
    found.append(Scenario(change="+1 SSD", model=model, hardware=with_one_more_drive(request, hardware)))
    found.append(Scenario(change="2x batch", model=_twice_the_batch(request, model, hardware), hardware=hardware))
    if not hardware.shared_memory:
        links = ("link_h2d_bytes_per_s", "link_d2h_bytes_per_s")
        faster = replace(hardware, **{key: 2 * getattr(hardware, key) for key in links})
        found.append(Scenario(change="2x link", model=model, hardware=faster))
    return found


def with_one_more_drive(request: Request, hardware: HardwareProfile) -> HardwareProfile:
    """The machine with one more drive of its kind, or with one good drive if it has none.

    A hardware profile does not say how many drives it was measured with: it counts as one.
    """
    from lightning_hetero.profiling import presets

    if request.hardware_profile is None and (request.device is not None or request.machine is not None):
        paper = {**presets.PAPER_MACHINES, **presets.BOXES}.get(request.machine or "")
        spec = request.disk or (paper.disk if paper is not None else None)
        name, drives = _split(presets.disk(spec).name) if spec is not None else (_DRIVE, 0)
        return replace(request, disk=f"{name}x{drives + 1}").hardware()
    if not hardware.disk_read_bytes_per_s:
        drive = presets.disk(_DRIVE)
        return replace(
            hardware,
            disk_read_bytes_per_s=drive.read_bytes_per_s.value,
            disk_write_bytes_per_s=drive.write_bytes_per_s.value,
            disk_capacity_bytes=int(drive.capacity_bytes.value),
        )
    return replace(
        hardware,
        disk_read_bytes_per_s=2 * hardware.disk_read_bytes_per_s,
        disk_write_bytes_per_s=2 * hardware.disk_write_bytes_per_s,
        disk_capacity_bytes=2 * hardware.disk_capacity_bytes,
    )


def _split(name: str) -> tuple[str, int]:
    """``("p5510", 12)`` of ``"p5510x12"``."""
    match = re.fullmatch(r"(.+)x(\d+)", name)
    return (match.group(1), int(match.group(2))) if match else (name, 1)


def _twice_the_batch(request: Request, model: ModelProfile, hardware: HardwareProfile) -> ModelProfile:
    if request.model_profile is None and request.batch is not None:
        return replace(request, batch=2 * request.batch).model(hardware)
    return scaled_batch(model, 2)


def scaled_batch(model: ModelProfile, factor: int) -> ModelProfile:
    """The model with a larger batch: tokens, times and activations grow.

    Weights and constants do not.
    """
    blocks = tuple(
        replace(
            b,
            forward_s=b.forward_s * factor,
            backward_s=b.backward_s * factor,
            forward_flop=b.forward_flop * factor,
            activation_bytes=b.activation_bytes * factor,
            boundary_bytes=b.boundary_bytes * factor,
            transient_bytes=b.transient_bytes * factor,
            operators=tuple(replace(o, flop=o.flop * factor, bytes=o.bytes * factor) for o in b.operators),
            backward=tuple(o.scaled(factor) for o in b.backward),
        )
        for b in model.blocks
    )
    return replace(model, tokens=model.tokens * factor, blocks=blocks, batch=model.batch * factor)
