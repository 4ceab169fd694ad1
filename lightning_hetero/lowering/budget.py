"""What a plan needs on each tier, before anything is loaded; refusals name what, where, how much and the knob."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hetero.errors import OutOfMemoryBudgetError
from lightning_hetero.ir.model import ModelProfile, ModelShape
from lightning_hetero.ir.plan import Plan, Tier, UpdateOrder
from lightning_hetero.units import KIB, MIB, format_bytes, round_up

_STAGED_CHUNKS, _CHUNK_ELEMENTS, _CHUNK_ALIGN, _CHUNK_FOOTERS = 8, 256 * KIB, 4096, 4 * 4096  # store.tiers, which stages them
_LEAST_CHUNK = 64 * KIB
_READ_AHEAD_BYTES = 512 * MIB  # the state of the largest block of most models, an embedding; more than that gains little


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeeds:
    """Bytes of host memory that a plan needs, by purpose.

    Attributes:
        weights: Weights that stay in memory.
        state: Optimizer state that stays in memory.
        gradients: Gradients that exist at the same time.
        staging: Buffers through which state streams.
        smallest_cache: The largest block with weights on disk: at least it must fit.
        all_cached: All weights that live on disk.
        streamed: All optimizer state that lives on disk.
    """

    weights: int
    state: int
    gradients: int
    staging: int
    smallest_cache: int
    all_cached: int
    streamed: int

    @property
    def fixed(self) -> int:
        """What is needed whatever is cached."""
        return self.weights + self.state + self.gradients + self.staging

    def table(self) -> str:
        """The needs in words."""
        rows = {
            "weights that stay in memory": self.weights,
            "optimizer state in memory": self.state,
            "gradients in flight": self.gradients,
            "staging for state on disk": self.staging,
            "largest block with weights on disk": self.smallest_cache,
        }
        return ", ".join(f"{name} {format_bytes(value)}" for name, value in rows.items() if value)


def host_needs(plan: Plan, model: ModelShape, *, staging: int, all_gradients: bool) -> HostNeeds:
    """Sums up a resolved plan.

    Args:
        plan: The resolved plan.
        model: The blocks.
        staging: Staging bytes of the engine.
        all_gradients: All gradients exist at once: updates wait for a verdict, or gradients accumulate over batches.
    """
    all_gradients |= plan.update_order is UpdateOrder.AFTER_BACKWARD
    pairs = list(zip(model.blocks, plan.blocks, strict=True))
    gradients = sorted((b.gradient_bytes for b, _ in pairs), reverse=True)
    on_disk = [b.weight_bytes for b, p in pairs if p.weights is Tier.DISK]
    return HostNeeds(
        weights=sum(b.weight_bytes for b, p in pairs if p.weights is not Tier.DISK),
        state=sum(b.state_bytes for b, p in pairs if p.state is not Tier.DISK),
        gradients=sum(gradients if all_gradients else gradients[: plan.gradient_depth]),
        staging=staging,
        smallest_cache=max(on_disk, default=0),
        all_cached=sum(on_disk),
        streamed=sum(b.state_bytes for b, p in pairs if p.state is Tier.DISK),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShares:
    """What the memory beyond the fixed needs is used for.

    Attributes:
        cache: Bytes for weights that live on disk.
        read_ahead: Bytes of staging beyond the least: state that is read while backward computes need not be waited for after it.
    """

    cache: int
    read_ahead: int


def share_out(plan: Plan, needs: HostNeeds, *, host_memory: int, source: str) -> HostShares:
    """Shares a budget out.

    Args:
        plan: The plan, for its name.
        needs: What it needs.
        host_memory: The budget.
        source: Where the budget comes from, for the error.

    Raises:
        OutOfMemoryBudgetError: The budget is too small.
    """
    if needs.fixed + needs.smallest_cache > host_memory:
        raise OutOfMemoryBudgetError(
            f"plan {plan.name!r} needs {format_bytes(needs.fixed + needs.smallest_cache)} of host memory, {source} allows "
            f'{format_bytes(host_memory)}: {needs.table()}. Raise host_memory, place more on disk (plan="disk"), or, where '
            f"gradients dominate, train without gradient_clip_val by norm and without accumulation, so that backward uses "
            f"them up.",
            needed_bytes=needs.fixed + needs.smallest_cache,
        )
    ahead = read_ahead(host_memory - needs.fixed - needs.smallest_cache, needs.streamed)
    cache = min(host_memory - needs.fixed - ahead, needs.all_cached)
    if plan.host_cache_bytes is not None:
        cache = min(cache, max(plan.host_cache_bytes, needs.smallest_cache))
    return HostShares(cache=cache, read_ahead=ahead)


def read_ahead(spare: int, streamed: int) -> int:
    """Bytes of staging beyond the least, of ``spare`` bytes that no need takes, for ``streamed`` bytes of state on disk."""
    return min(spare // 4, _READ_AHEAD_BYTES, streamed)


def least_staging(model: ModelProfile) -> int:
    """The engine's staging for weights and state: eight chunks, none larger than the largest block."""
    largest = max((block.num_params for block in model.blocks), default=0)
    elements = min(_CHUNK_ELEMENTS, round_up(largest, _CHUNK_ALIGN))
    chunk = elements * (model.compute_itemsize + model.state_itemsize) + _CHUNK_FOOTERS
    return _STAGED_CHUNKS * max(_LEAST_CHUNK, chunk)


def check_device(plan: Plan, model: ModelShape, device_memory: int | None) -> None:
    """Refuses a plan whose device tier exceeds ``device_memory``.

    Raises:
        OutOfMemoryBudgetError: It does.
    """
    if device_memory is None:
        return
    need = 0
    for block, placed in zip(model.blocks, plan.blocks, strict=True):
        need += block.weight_bytes + block.gradient_bytes if placed.weights is Tier.DEVICE else 0
        need += block.state_bytes if placed.state is Tier.DEVICE else 0
    if need > device_memory:
        raise OutOfMemoryBudgetError(
            f"plan {plan.name!r} puts {format_bytes(need)} of weights, gradients and optimizer state on the device; device_memory "
            f'allows {format_bytes(device_memory)}. Raise device_memory, or choose plan="host" or plan="disk".'
        )
