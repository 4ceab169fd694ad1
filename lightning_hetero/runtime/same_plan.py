"""Ranks that share a model have the same plan, which they change together, and the same files."""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from lightning_hetero.errors import ConfigError, OutOfMemoryBudgetError
from lightning_hetero.ir.plan import Plan
from lightning_hetero.lanes.collectives import Collectives
from lightning_hetero.store.format.in_place import SourceFile

_KNOBS = (
    "prefetch_depth",
    "gradient_depth",
    "update_order",
    "priority",
    "micro_batches",
    "device_cache_bytes",
    "host_cache_bytes",
    "gather",
)


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


def check_same_files(collectives: Collectives | None, files: Collection[SourceFile]) -> None:
    """Refuses files with frozen weights that are not the same on all ranks, such as those of nodes.

    Args:
        collectives: Those of the ranks; ``None``: there is one.
        files: Those that this rank reads in place; other ranks may have them at another path.

    Raises:
        ConfigError: Names a rank with other ones.
    """
    if collectives is None:
        return
    rows = collectives.agree([zlib.crc32(repr(sorted((file.num_bytes, file.digest) for file in files)).encode())])
    others = [rank for rank, row in enumerate(rows) if row != rows[collectives.rank]]
    if others:
        where = ", ".join(sorted({repr(os.path.dirname(file.path)) for file in files})) or "nowhere"
        raise ConfigError(
            f"rank {collectives.rank} of {collectives.ranks} reads frozen weights in place from {where}, and rank {others[0]} "
            f"finds other files with other weights. Give all nodes the same files."
        )
