"""Ranks that share a model change the plan together, to the same one."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_hetero.errors import ConfigError, OutOfMemoryBudgetError
from lightning_hetero.ir.plan import Plan
from lightning_hetero.lanes.collectives import Collectives

_KNOBS = ("prefetch_depth", "gradient_depth", "update_order", "priority", "micro_batches", "device_cache_bytes", "host_cache_bytes")


@contextmanager
def all_or_none(collectives: Collectives | None) -> Iterator[None]:
    """What one rank refuses in the context no rank does.

    Raises:
        OutOfMemoryBudgetError: Another rank refuses it; its own error says why.
    """
    refusal: OutOfMemoryBudgetError | None = None
    try:
        yield
    except OutOfMemoryBudgetError as error:
        if collectives is None:
            raise
        refusal = error
    if collectives is None:
        return
    refused = [rank for rank, row in enumerate(collectives.agree([refusal is not None])) if row[0]]
    if refusal is not None:
        raise refusal
    if refused:
        raise OutOfMemoryBudgetError(f"the plan does not fit rank {refused[0]} of {collectives.ranks}, whose log says why.")


def check_same_plan(collectives: Collectives | None, plan: Plan) -> None:
    """Refuses a plan that is not the same on all ranks.

    Args:
        collectives: Those of the ranks; ``None``: there is one.
        plan: The resolved plan.

    Raises:
        ConfigError: Names the first difference, and what this rank has there.
    """
    if collectives is None:
        return
    parts: list[tuple[str, object]] = [(key, getattr(plan, key)) for key in _KNOBS]
    parts += [(f"block {rule.name!r}", rule) for rule in plan.blocks]
    rows = collectives.agree([zlib.crc32(repr(part).encode()) for _, part in parts])
    for (what, mine), *numbers in zip(parts, *rows, strict=True):
        others = [rank for rank, number in enumerate(numbers) if number != numbers[collectives.rank]]
        if others:
            raise ConfigError(
                f"rank {collectives.rank} of {collectives.ranks}: the ranks have other plans. Of {what} this rank has {mine!r}, "
                f"and rank {others[0]} something else. Pass the same plan on all ranks."
            )
