"""What several devices that hold one model together have, all of them and each."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from lightning_hetero.cli.output import count, seconds
from lightning_hetero.errors import PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Gather, Plan
from lightning_hetero.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AllDevices:
    """All devices of a machine under one plan.

    Attributes:
        devices: How many there are.
        ranks: How many hold the model together; 1: each has a whole copy, because the plan has
            something that ranks which share a model do not have, such as updates on the device.
        tokens_per_s: What they train together.
        host_peak_bytes: Peak of host memory of all together; with whole copies of one.
        disk_bytes: The same for disk space.
        weight_bytes: Weights of which one of them is the owner.
        state_bytes: The same for optimizer state.
    """

    devices: int
    ranks: int
    tokens_per_s: float
    host_peak_bytes: int
    disk_bytes: int
    weight_bytes: int
    state_bytes: int


def all_devices(plan: Plan, model: ModelProfile, hardware: HardwareProfile) -> AllDevices | None:
    """All devices together; ``None`` if there is one.

    Args:
        plan: The resolved plan, with the prediction for one of them.
        model: The whole model, at the batch of one device's step.
        hardware: The whole machine.
    """
    from lightning_hetero.planners.one_rank import as_run

    if hardware.world_size == 1:
        return None
    ranks, p = as_run(plan, model, hardware)[1].ranks, plan.require_predicted()
    shapes = model.slice_of(ranks).shape().blocks
    return AllDevices(
        devices=hardware.world_size,
        ranks=ranks,
        tokens_per_s=hardware.world_size * model.tokens / p.iteration_s,
        host_peak_bytes=ranks * p.host_peak_bytes,
        disk_bytes=ranks * p.disk_bytes,
        weight_bytes=sum(b.weight_bytes for b in shapes),
        state_bytes=sum(b.state_bytes for b in shapes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoWays:
    """Where devices exchange weights and gradients, if there are two ways.

    Attributes:
        gather: What the plan says.
        iteration_s: Its step.
        other_s: The same placements the other way; ``None``: they do not fit then.
    """

    gather: Gather
    iteration_s: float
    other_s: float | None

    def __str__(self) -> str:
        ways = {
            Gather.HOST: "in host memory, from which each device copies whole weights",
            Gather.DEVICE: "over the links between devices, each of which copies its slice from and to the host",
        }
        other = "does not fit" if self.other_s is None else f"takes {seconds(self.other_s)} a step"
        return f"{ways[self.gather]}; with these placements the other way {other}"


def exchange(plan: Plan, model: ModelProfile, hardware: HardwareProfile) -> TwoWays | None:
    """Where devices exchange, and why; ``None``: there is one way. Arguments as to simulate."""
    from lightning_hetero.planners.evaluation import simulation

    if not hardware.may_gather_on_devices:
        return None
    other_s, other = None, Gather.HOST if plan.gather is Gather.DEVICE else Gather.DEVICE
    with suppress(PlanError):
        other_s = simulation(replace(plan, gather=other), model, hardware).prediction.iteration_s
    return TwoWays(gather=plan.gather, iteration_s=plan.require_predicted().iteration_s, other_s=other_s)


def together(plan: Plan, model: ModelProfile, hardware: HardwareProfile) -> dict[str, str]:
    """Lines on all devices and on each; none for one; arguments as for :func:`all_devices`."""
    found = all_devices(plan, model, hardware)
    if found is None:
        return {}
    speed, disk = count(found.tokens_per_s, "tokens/s"), f", {format_bytes(found.disk_bytes)} of disk" if found.disk_bytes else ""
    if found.ranks == 1:
        why = "the plan has a placement that devices do not share"
        return {"all devices": f"at most {speed}, without the time of collectives and with a whole copy each: {why}"}
    return {
        "all devices": f"{speed}; {format_bytes(found.host_peak_bytes)} of host memory{disk}",
        "each device": f"{format_bytes(found.weight_bytes)} of weights and {format_bytes(found.state_bytes)} of optimizer state "
        f"are its own; all sizes and rates below are those of one",
    }
