"""The outer face: Lightning strategies, one class per namespace (``lightning.pytorch``, ``pytorch_lightning``), made on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_hetero.strategies.factory import (
    find,
    local_first_class,
    make,
    make_parallel,
    make_parallel_fsdp,
    parallel_class,
    parallel_fsdp_class,
    parallel_offload_class,
    strategy_class,
)

if TYPE_CHECKING:
    from lightning_hetero.parallel.strategies.hetero_parallel import HeteroParallel as HeteroParallelStrategy
    from lightning_hetero.parallel.strategies.hetero_parallel_fsdp import HeteroParallelFsdp as HeteroParallelFsdpStrategy
    from lightning_hetero.parallel.strategies.hetero_parallel_offload import HeteroParallelOffload as HeteroParallelOffloadStrategy
    from lightning_hetero.parallel.strategies.local_first import _LocalFirst as LocalFirst
    from lightning_hetero.strategies.hetero_offload import HeteroOffload as HeteroOffloadStrategy

__all__ = [
    "HeteroOffloadStrategy",
    "HeteroParallelFsdpStrategy",
    "HeteroParallelOffloadStrategy",
    "HeteroParallelStrategy",
    "LocalFirst",
    "local_first_class",
    "make",
    "make_parallel",
    "make_parallel_fsdp",
    "parallel_class",
    "parallel_fsdp_class",
    "parallel_offload_class",
    "strategy_class",
]


def __getattr__(name: str) -> Any:
    if (found := find(name)) is not None:
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
