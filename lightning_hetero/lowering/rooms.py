"""The memory of a machine, shared out: what a plan leaves on each tier for caches and staging."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hetero.errors import PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.lowering.budget import read_ahead
from lightning_hetero.lowering.needs import Purpose, Rows, needs_of, total_bytes
from lightning_hetero.lowering.placement import updates_in_backward
from lightning_hetero.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRoom:
    """Device memory for weights that live below the device.

    Attributes:
        resident: Blocks of which the device holds a valid copy as the step begins: of those with weights below the device, and of
            those with weights on the device that the CPU updates.
        capacity_bytes: Bytes for copies of weights that live below the device.
    """

    resident: frozenset[int] = frozenset()
    capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rooms:
    """Memory that a plan leaves for what comes and goes during a step.

    Attributes:
        host_cache_bytes: Host memory for weights that live on disk.
        device_cache_bytes: Device memory for weights that live below the device; ``None`` where the device is the host's own CPU.
        staging_bytes: Host memory through which state on disk streams.
    """

    host_cache_bytes: int
    device_cache_bytes: int | None
    staging_bytes: int


def rooms(plan: Plan, model: ModelProfile, hardware: HardwareProfile, *, updates: Updates = Updates.IN_BACKWARD) -> Rooms:
    """Shares the memory of a machine out.

    Caches get what the plan gives them, at least their largest block; where the plan says nothing, what the needs leave, at most
    all that could be in them. A quarter of what the host has left, up to 512 MiB, reads state ahead.

    Args:
        plan: The resolved plan.
        model: The model.
        hardware: The machine.
        updates: When updates may run: during backward, or only once all gradients are known.

    Raises:
        PlanError: A tier is too small even for the least; names the one with the largest shortfall, and the cheapest remedy.
    """
    needs = needs_of(plan, model, shared_memory=hardware.shared_memory, updates=updates)
    device = _Tier("device", needs.device, needs.device_caches, plan.device_cache_bytes, hardware.device_memory_bytes)
    host = _Tier("host", needs.host, needs.host_caches, plan.host_cache_bytes, hardware.host_memory_bytes)
    disk = _Tier("disk", needs.disk, (), None, hardware.disk_capacity_bytes)
    worst = max([host, disk] if hardware.shared_memory else [device, host, disk], key=lambda tier: tier.shortfall_bytes)
    if worst.shortfall_bytes > 0:
        raise _refusal(worst, plan, hardware, in_backward=updates_in_backward(plan, updates))
    left = host.capacity_bytes - total_bytes(host.rows)
    ahead = min(read_ahead(left - host.largest_bytes, needs.streamed_bytes), left - host.least_bytes)
    return Rooms(
        host_cache_bytes=host.cache_bytes(left - ahead),
        device_cache_bytes=None if hardware.shared_memory else device.cache_bytes(device.capacity_bytes - total_bytes(device.rows)),
        staging_bytes=needs.host[Purpose.STAGING] + ahead,
    )


@dataclass(frozen=True, slots=True)
class _Tier:
    """One tier under a plan: its rows, the blocks that its cache serves, what the plan gives the cache, and its capacity."""

    name: str
    rows: Rows
    caches: tuple[int, ...]
    given_bytes: int | None
    capacity_bytes: int

    @property
    def largest_bytes(self) -> int:
        return max(self.caches, default=0)

    @property
    def least_bytes(self) -> int:
        """What the cache has to have."""
        return max(self.largest_bytes, min(self.given_bytes or 0, sum(self.caches)))

    @property
    def shortfall_bytes(self) -> int:
        return total_bytes(self.rows) + self.least_bytes - self.capacity_bytes

    def cache_bytes(self, left: int) -> int:
        """What the cache gets of ``left`` bytes."""
        return self.least_bytes if self.given_bytes is not None else min(sum(self.caches), left)


def _refusal(tier: _Tier, plan: Plan, hardware: HardwareProfile, *, in_backward: bool) -> PlanError:
    """Names the shortfall, and the first remedy, cheapest first, for something that can become as much smaller."""
    rows = {purpose: size for purpose, size in {**tier.rows, Purpose.CACHE: tier.least_bytes}.items() if size}
    need, short = tier.capacity_bytes + tier.shortfall_bytes, tier.shortfall_bytes
    spare = {**rows, Purpose.CACHE: tier.least_bytes - tier.largest_bytes}
    if in_backward and plan.micro_batches == 1 and (tier.name == "device" or plan.gradient_depth == 1):
        spare[Purpose.GRADIENTS] = 0  # no fewer than there are
    remedies = {purpose: text for (name, purpose), text in _REMEDIES.items() if name == tier.name and purpose in rows}
    helps = [text for purpose, text in remedies.items() if spare[purpose] >= short]
    largest = remedies.get(max(rows, key=lambda purpose: rows[purpose]), f"more {tier.name} memory")
    return PlanError(
        f"plan {plan.name!r} needs {format_bytes(need)} of {tier.name} memory; {hardware.name!r} has "
        f"{format_bytes(tier.capacity_bytes)}, {format_bytes(short)} too little: "
        f"{', '.join(f'{purpose} {format_bytes(size)}' for purpose, size in rows.items())}. "
        f"Cheapest remedy: {(*helps, largest)[0]}.",
        tier=tier.name,
        shortfall_bytes=short,
    )


_REMEDIES = {  # cheapest first
    ("device", Purpose.CACHE): "a smaller device_cache_bytes",
    ("device", Purpose.GRADIENTS): "update during backward (no clipping by norm, one micro-batch)",
    ("device", Purpose.MOVING): "update the largest blocks on the 'cpu'",
    ("device", Purpose.STATE): "place state on 'host', with updates on the 'cpu'",
    ("device", Purpose.WEIGHTS): "place weights on 'host'",
    ("device", Purpose.ACTIVATIONS): "recompute or swap more of what forward saves (saved), or use a smaller batch",
    ("host", Purpose.CACHE): "a smaller host_cache_bytes",
    ("host", Purpose.GRADIENTS): "a smaller gradient_depth, or update during backward (no clipping by norm, one micro-batch)",
    ("host", Purpose.ACTIVATIONS): "recompute more of what forward saves (saved), or use a smaller batch",
    ("host", Purpose.STATE): "place state on 'disk'",
    ("host", Purpose.WEIGHTS): "place weights on 'disk'",
    ("disk", Purpose.ACTIVATIONS): "swap activations to the host, or recompute them (saved)",
    ("disk", Purpose.WEIGHTS): "place weights on 'host'",
    ("disk", Purpose.STATE): "place state on 'host'",
}
