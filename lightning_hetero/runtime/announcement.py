"""Says in the log where a plan has put everything, and why; and what a fit took in the end."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_hetero.clock import now_s
from lightning_hetero.ir.plan import BlockPlan, Plan, Tier, UpdateLane
from lightning_hetero.lowering.needs import total_bytes
from lightning_hetero.runtime.placement import Placement, Placer, least_bytes
from lightning_hetero.store.live.blocks import Block
from lightning_hetero.units import format_bytes

log = logging.getLogger(__name__)

_PATIENCE_S = 5.0  # without a line about a placement that takes long
_HEAD = ("tier", "weights", "optimizer state", "needed", "allowed")


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a plan may use of each tier, in bytes.

    Attributes:
        device: Of a device with memory of its own; ``None`` without one.
        host: Of host memory.
        is_given: The user has said how much of host memory; otherwise it is what was free.
        files: That the plan's files take.
        disk: Of the disk, with these files.
        ranks: That hold the model together. The rest is for one of them.
    """

    device: int | None
    host: int
    is_given: bool
    files: int
    disk: int
    ranks: int


def placing(blocks: Sequence[Block]) -> Iterator[Block]:
    """The blocks one by one. Every few seconds a line says how far the placement is."""
    sizes = [sum(part.weight_bytes for part in block.parts) for block in blocks]
    total, done, begin_s = sum(sizes), 0, now_s()
    said_s = begin_s
    for block, size in zip(blocks, sizes, strict=True):
        yield block
        done += size
        if now_s() - said_s >= _PATIENCE_S and 0 < done < total:
            said_s = now_s()
            left_s = (said_s - begin_s) * (total - done) / done
            log.info("placed %s of %s of weights; about %.0f s to go.", format_bytes(done), format_bytes(total), left_s)


def announce(
    placement: Placement, placer: Placer, blocks: Sequence[Block], allowed: Allowed, *, trains: bool, disk: str, begin_s: float
) -> None:
    """Logs where everything lives, and the time since ``begin_s``; ``disk``: the files in words."""
    of_device = "in memory" if allowed.device is None else "on the device"
    what = [f"weights of {_by_tier((b.plan.weights for b in blocks), of_device)}"]
    if trains:
        trained = [b.plan.state for b in blocks if any(p.requires_grad for p in b.params())]
        what.append(f"optimizer state of {_by_tier(trained, of_device)}" if trained else "no optimizer state")
    if disk:
        what.append(disk)
    if placement.cache_bytes and any(b.weights_on_disk for b in blocks):
        what.append(f"{format_bytes(placement.cache_bytes)} of memory to cache weights from there")
    where = f"plan {placement.plan.name!r}, in place after {now_s() - begin_s:.2g} s: {'; '.join(what)}."
    log.info("%s\n\n%s\n\n%s", where, _table(placement, placer, allowed), _reason(placement, placer, allowed))
    if trains and placement.rules.deferred:
        when = (
            "are tried during backward, and done again where they were wrong,"
            if placement.rules.speculates
            else "run after optimizer.step() in forward order,"
        )
        log.info("updates %s because %s.", when, placement.rules.deferred)


def _by_tier(tiers: Iterable[Tier], of_device: str) -> str:
    """Such as ``"2 blocks on the device, of 24 blocks on disk"``."""
    places = {Tier.DEVICE: of_device, Tier.HOST: "in memory", Tier.DISK: "on disk"}
    counts = Counter(places[tier] for tier in tiers)
    return ", of ".join(f"{counts[p]} block{'s' * (counts[p] > 1)} {p}" for p in dict.fromkeys(places.values()) if counts[p])


def _table(placement: Placement, placer: Placer, allowed: Allowed) -> str:
    """Bytes by tier: what lives there, what the plan needs at its peak, and what it may use."""
    plan, needs = placement.plan, placer.needs(placement.plan, placement.rules)
    rows = list(zip(plan.blocks, placer.model.blocks, strict=True))

    def lives(*tiers: Tier) -> tuple[str, str]:
        weights = sum(shape.weight_bytes for placed, shape in rows if placed.weights in tiers)
        state = sum(shape.state_bytes for placed, shape in rows if placed.state in tiers)
        return format_bytes(weights), format_bytes(state)

    free = " (free)" if allowed.ranks == 1 else " (a rank's share of what is free)"
    size = f"{format_bytes(allowed.host)}{'' if allowed.is_given else free}"
    host = format_bytes(least_bytes(needs)), "" if placer.is_unified else size
    if allowed.device is None:
        table = [_HEAD, ("memory", *lives(Tier.DEVICE, Tier.HOST), *host)]
    else:
        device = format_bytes(total_bytes(needs.device) + max(needs.device_caches, default=0))
        table = [_HEAD, ("device", *lives(Tier.DEVICE), device, format_bytes(allowed.device)), ("host", *lives(Tier.HOST), *host)]
    if placer.is_unified:
        table.append(("one memory", "", "", format_bytes(placer.least_bytes(plan, needs)), size))
    if allowed.files:
        table.append(("disk", *lives(Tier.DISK), format_bytes(allowed.files), format_bytes(allowed.disk)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        " " + "   ".join([row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))])
        for row in table
    )


def _reason(placement: Placement, placer: Placer, allowed: Allowed) -> str:
    """Why not everything is in the fastest memory; or that it is."""
    if allowed.ranks > 1:
        return f" why: {allowed.ranks} ranks hold the model together. This is the share of one of them."
    if allowed.device is None:
        where, most = "memory", allowed.host
        everywhere = BlockPlan(name="*")
    else:
        where, most = "the device's memory", min(allowed.device, allowed.host) if placer.is_unified else allowed.device
        everywhere = BlockPlan(name="*", weights=Tier.DEVICE, state=Tier.DEVICE, update=UpdateLane.DEVICE)
    plan, there = placement.plan, {Tier.DEVICE, everywhere.weights}
    if all(placed.weights in there and placed.state in there for placed in plan.blocks):
        return f" why: everything fits {where}, so offloading has nothing to gain here."
    every = Plan(name="all", blocks=(everywhere,)).resolve(placed.name for placed in plan.blocks)
    needs = placer.needs(every)
    least = placer.least_bytes(every, needs) if allowed.device is None or placer.is_unified else total_bytes(needs.device)
    if least > most:
        return f" why: all of it needs {format_bytes(least)} of {where}, {format_bytes(least - most)} more than allowed."
    return f" why: the plan says so. Everything would fit {where}: {format_bytes(least)}."


def summarize(plan: str, *, steps: int, seconds: float, report: Mapping[str, int], error: float | None, ranks: int = 1) -> str:
    """One line about a fit that has ended.

    Args:
        plan: The name of the last plan.
        steps: Optimizer steps of this process.
        seconds: Between the first batch and the end, validations included.
        report: What ``memory_report`` says.
        error: The mean relative error of predicted step times, if there were any.
        ranks: That hold the model together; the line is about the first one.
    """
    took = f"{seconds / steps:.3g} s a step with all that came between" if steps else "no step"
    what = [f"{steps} step{'s' * (steps != 1)} in {seconds:.3g} s, {took}", f"the last plan was {plan!r}"]
    if error is not None:
        what.append(f"predicted step times were off by {100 * error:.0f} % on average")
    who = "the process" if ranks == 1 else f"the first of {ranks} processes"
    what.append(f"{who} had {format_bytes(report['host_peak_bytes'])} at its peak")
    if "device_peak_bytes" in report:
        what.append(f"{'the' if ranks == 1 else 'its'} device {format_bytes(report['device_peak_bytes'])}")
    if report.get("disk_bytes"):
        read = report.get("bytes_read", 0) + report.get("bytes_read_beyond", 0)
        moved = f"{format_bytes(read)} read, {format_bytes(report.get('bytes_written', 0))} written"
        what.append(f"{'' if ranks == 1 else 'it has '}{format_bytes(report['disk_bytes'])} of files, {moved}")
    return f"the fit is over: {'; '.join(what)}."
