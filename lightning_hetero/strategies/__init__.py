"""The outer face: Lightning strategies, one class per namespace (``lightning.pytorch``, ``pytorch_lightning``), made on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_hetero.strategies.factory import (
    NAMESPACES,
    PARALLEL_NAMESPACES,
    make,
    make_parallel,
    parallel_class,
    strategy_class,
)

if TYPE_CHECKING:
    from lightning_hetero.strategies.hetero_offload import HeteroOffload as HeteroOffloadStrategy
    from lightning_hetero.strategies.hetero_parallel import HeteroParallel as HeteroParallelStrategy

__all__ = ["HeteroOffloadStrategy", "HeteroParallelStrategy", "make", "make_parallel", "parallel_class", "strategy_class"]


def __getattr__(name: str) -> Any:
    for names, make_class in ((NAMESPACES, strategy_class), (PARALLEL_NAMESPACES, parallel_class)):
        for namespace, class_name in names.items():
            if name == class_name:
                return make_class(namespace)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
