"""The memory that a plan leaves on each tier for caches and staging.

One account for both (``needs``): planners, with a profile and a machine, refuse with a
:class:`PlanError`; the runtime, with what it knows of a model and a budget, with an
:class:`OutOfMemoryBudgetError`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import ModelProfile
from lightning_hetero.ir.plan import Plan
from lightning_hetero.ir.schedule import Updates
from lightning_hetero.lowering.memory_errors import device_too_small, plan_error, too_small
from lightning_hetero.lowering.needs import Needs, Purpose, Rows, needs_of, summed, total_bytes
from lightning_hetero.lowering.placed_blocks import updates_in_backward
from lightning_hetero.lowering.rank_needs import whole_bytes
from lightning_hetero.lowering.staging import read_ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRoom:
    """Device memory for weights that live below the device.

    Attributes:
        resident: Blocks of which the device holds a valid copy as the step begins: of those with
            weights below the device, and of those with weights on the device that the CPU updates.
        capacity_bytes: Bytes for copies of weights that live below the device.
        ranks: Ranks that share the model: this is for whole weights of which a rank has a slice.
            See [Note: Ranks] in ``ir.schedule``.
        shared_memory: The devices of several ranks are the host's own CPU, so this is host memory.
        gathers_in_place: The ranks have whole weights in the same host memory, where their slices
            are: GATHER moves nothing.
    """

    resident: frozenset[int] = frozenset()
    capacity_bytes: int
    ranks: int = 1
    shared_memory: bool = False
    gathers_in_place: bool = False

    @property
    def copies(self) -> int:
        """How many slices need memory of their own on a rank that has whole weights."""
        return 0 if self.gathers_in_place and self.shared_memory else self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """Memory that a plan leaves for what comes and goes during a step.

    Attributes:
        host_cache_bytes: Host memory for weights that live on disk.
        device_cache_bytes: Device memory for weights that live below the device; ``None`` where the
            device is the host's own CPU.
        staging_bytes: Host memory through which state on disk streams.
        ranks: Ranks that share the model; ``device_cache_bytes`` is for whole weights then.
        shared_memory: Their devices are the host's own CPU.
        gathers_in_place: They have whole weights in the same host memory, where their slices are.
    """

    host_cache_bytes: int
    device_cache_bytes: int | None
    staging_bytes: int
    ranks: int = 1
    shared_memory: bool = False
    gathers_in_place: bool = False


def cache_sizes(
    plan: Plan, model: ModelProfile, hardware: HardwareProfile, *, updates: Updates = Updates.IN_BACKWARD
) -> CacheSizes:
    """Shares the memory of a machine out.

    Caches get what the plan gives them, at least their largest block; where the plan says nothing,
    what the needs leave, at most all that could be in them. A quarter of what the host has left, up
    to 512 MiB, reads state ahead.

    Args:
        plan: The resolved plan.
        model: The model.
        hardware: The machine.
        updates: When updates may run: during backward, or only once all gradients are known.

    Raises:
        PlanError: A tier is too small even for the least; names the one with the largest shortfall,
            and the cheapest remedy.
    """
    needs = needs_of(
        plan, model, shared_memory=hardware.shared_memory, updates=updates, ranks=hardware.ranks,
        gathers_in_place=hardware.gathers_in_place,
    )  # fmt: skip
    device_memory, host_memory = hardware.device_memory_bytes, hardware.host_memory_bytes
    if hardware.unified_memory:
        device_memory, host_memory = divided(plan, needs, device_memory=device_memory, memory=host_memory, profiled=True)
    device, host = _device(plan, needs, device_memory), _host(plan, needs, host_memory)
    disk = _Tier("disk", needs.disk, (), None, hardware.disk_capacity_bytes)
    tiers = [host, disk] if hardware.shared_memory else [host, device, disk] if hardware.unified_memory else [device, host, disk]
    worst = max(tiers, key=lambda tier: tier.shortfall_bytes)
    if worst.shortfall_bytes > 0:
        fewest = plan.micro_batches == 1 and (worst.name == "device" or plan.gradient_depth == 1)
        all_needed = updates_in_backward(plan, updates) and fewest  # there are no fewer gradients
        beside = device.all_rows if hardware.unified_memory and worst is host else {}
        raise plan_error(
            plan.name, worst.name, summed(worst.all_rows, beside), machine=hardware.name,
            capacity_bytes=worst.capacity_bytes + total_bytes(beside),
            shared_memory=hardware.shared_memory, has_disk=hardware.disk_capacity_bytes > 0, spare={
                Purpose.CACHE: worst.least_bytes - worst.largest_bytes, **({Purpose.GRADIENTS: 0} if all_needed else {})
            },
        )  # fmt: skip
    cache_bytes, staging_bytes = _shared_out(host, needs)
    copies = None if hardware.shared_memory else device.cache_bytes(device.capacity_bytes - total_bytes(device.rows))
    if hardware.shared_memory and hardware.ranks > 1:
        copies = whole_bytes(plan, model.shape(), hardware.ranks, in_place=hardware.gathers_in_place)
    return CacheSizes(
        host_cache_bytes=cache_bytes, device_cache_bytes=copies, staging_bytes=staging_bytes, ranks=hardware.ranks,
        shared_memory=hardware.shared_memory and hardware.ranks > 1, gathers_in_place=hardware.gathers_in_place,
    )  # fmt: skip


def divided(plan: Plan, needs: Needs, *, device_memory: int, memory: int, profiled: bool) -> tuple[int, int]:
    """Divides a memory that device and host share, as one plan needs it.

    Both get what they need. Of the rest the device gets what comes ahead of its use. Next come the
    host's caches, because they save reads from disk, and then the device's, which save copies. What
    nobody asks for goes to both. Until activations are known, half of the rest is kept for them.

    Args:
        plan: The resolved plan.
        needs: What it needs.
        device_memory: The most that the device may have, bytes.
        memory: What both have together, bytes.
        profiled: Activations are known.

    Returns:
        Bytes of the device and of the host; the host has too few if both together have.
    """
    device, host = _device(plan, needs, device_memory), _host(plan, needs, memory)
    least = total_bytes(device.all_rows)
    left = memory - least - total_bytes(host.all_rows)
    if left <= 0 or least >= device_memory:
        return min(least, device_memory), memory - least
    ahead = min(left, max(0, _ahead(plan, needs) - device.least_bytes))
    left -= ahead
    of_host = min(left if profiled else left // 2, host.most_bytes - host.least_bytes + read_ahead(left, needs.streamed_bytes))
    left -= of_host
    cached = min(left, max(0, device.most_bytes - device.least_bytes - ahead)) if profiled else 0
    share = min(device_memory, least + ahead + cached + (left - cached) // 2)
    return share, memory - share


def device_rows(plan: Plan, needs: Needs) -> Rows:
    """What a plan needs of the device, the least cache among it."""
    return _device(plan, needs, 0).all_rows


def cache_sizes_in_budget(
    plan: Plan,
    needs: Needs,
    *,
    host_memory: int,
    given: bool,
    profiled: bool,
    device_memory: int | None = None,
    beside: Rows | None = None,
    less_on_disk: Callable[[], bool],
    tied_to_device: bool,
    ranks: int = 1,
) -> CacheSizes:
    """As :func:`cache_sizes`, for a budget of host memory and, if given, one of device memory.

    Until activations are known the device's cache gets no more than the blocks that come ahead of
    their use: the rest is theirs.

    Args:
        plan: The resolved plan.
        needs: What it needs, without the constant part.
        host_memory: The budget in bytes.
        given: It is the user's; else what the machine has free.
        profiled: Activations are known.
        device_memory: Device memory in bytes; ``None``: the device is the host's own CPU.
        beside: For the error: what the device needs of the same memory, beside ``host_memory``;
            ``None``: it has memory of its own.
        less_on_disk: Asked for the error: whether plan "disk" would run here, and needs less.
        tied_to_device: For the error: an optimizer finds weights and state only on the device.
        ranks: For the error: ranks that share the model, each of which has such a budget.

    Raises:
        OutOfMemoryBudgetError: It is too small even for the least; what is needed, where, how much
            and what would need less.
    """
    host = _host(plan, needs, host_memory)
    if host.shortfall_bytes > 0:
        beside = beside or {}
        raise too_small(
            plan.name, summed(host.all_rows, beside), host_memory=host_memory + total_bytes(beside), given=given,
            profiled=profiled, less_on_disk=less_on_disk(), ranks=ranks,
        )  # fmt: skip
    cache_bytes, staging_bytes = _shared_out(host, needs)
    device_cache_bytes = None
    if device_memory is not None:
        device = _device(plan, needs, device_memory)
        if device.shortfall_bytes > 0:
            raise device_too_small(
                plan.name, device.all_rows, device_memory=device_memory, profiled=profiled, tied_to_device=tied_to_device
            )
        left = device_memory - total_bytes(device.rows)
        device_cache_bytes = device.cache_bytes(left if profiled else min(left, _ahead(plan, needs)))
    return CacheSizes(host_cache_bytes=cache_bytes, device_cache_bytes=device_cache_bytes, staging_bytes=staging_bytes)


def _ahead(plan: Plan, needs: Needs) -> int:
    """Bytes of the blocks on the device ahead of their use, and of the one in use; the largest."""
    return sum(sorted(needs.device_caches)[-plan.prefetch_depth - 1 :])


def _device(plan: Plan, needs: Needs, capacity_bytes: int) -> _Tier:
    return _Tier("device", needs.device, needs.device_caches, plan.device_cache_bytes, capacity_bytes)


def _host(plan: Plan, needs: Needs, capacity_bytes: int) -> _Tier:
    return _Tier("host", needs.host, needs.host_caches, plan.host_cache_bytes, capacity_bytes)


def _shared_out(host: _Tier, needs: Needs) -> tuple[int, int]:
    """Bytes for the cache and for staging."""
    left = host.capacity_bytes - total_bytes(host.rows)
    ahead = min(read_ahead(left - host.largest_bytes, needs.streamed_bytes), left - host.least_bytes)
    return host.cache_bytes(left - ahead), needs.host[Purpose.STAGING] + ahead


@dataclass(frozen=True, slots=True)
class _Tier:
    """One tier under a plan: its needs, the cache's blocks and size, and the capacity."""

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
    def most_bytes(self) -> int:
        """What the cache can use."""
        return self.least_bytes if self.given_bytes is not None else sum(self.caches)

    @property
    def all_rows(self) -> Rows:
        """The rows, the least cache among them."""
        return {**self.rows, Purpose.CACHE: self.least_bytes}

    @property
    def shortfall_bytes(self) -> int:
        return total_bytes(self.rows) + self.least_bytes - self.capacity_bytes

    def cache_bytes(self, left: int) -> int:
        """What the cache gets of ``left`` bytes."""
        return self.least_bytes if self.given_bytes is not None else min(self.most_bytes, left)
