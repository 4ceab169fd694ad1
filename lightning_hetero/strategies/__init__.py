"""The outer face: Lightning strategies, one class per namespace (``lightning.pytorch``, ``pytorch_lightning``), made on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_hetero.strategies.factory import (
    FSDP_NAMESPACES,
    GROUP_NAMESPACES,
    NAMESPACES,
    PARALLEL_NAMESPACES,
    make,
    make_parallel,
    make_parallel_fsdp,
    parallel_class,
    parallel_fsdp_class,
    parallel_offload_class,
    strategy_class,
)
from lightning_hetero.strategies.local_first import NAMESPACES as LOCAL_FIRST_NAMESPACES
from lightning_hetero.strategies.local_first import local_first_class

if TYPE_CHECKING:
    from lightning_hetero.strategies.hetero_offload import HeteroOffload as HeteroOffloadStrategy
    from lightning_hetero.strategies.hetero_parallel_fsdp import HeteroParallelFsdp as HeteroParallelFsdpStrategy
    from lightning_hetero.strategies.hetero_parallel_offload import HeteroParallelOffload as HeteroParallelOffloadStrategy
    from lightning_hetero.strategies.hetero_pipelines import HeteroPipelines as HeteroParallelStrategy
    from lightning_hetero.strategies.local_first import _LocalFirst as LocalFirst

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

_CLASSES = (
    (NAMESPACES, strategy_class),
    (PARALLEL_NAMESPACES, parallel_class),
    (GROUP_NAMESPACES, parallel_offload_class),
    (FSDP_NAMESPACES, parallel_fsdp_class),
    (LOCAL_FIRST_NAMESPACES, local_first_class),
)


def __getattr__(name: str) -> Any:
    for names, make_class in _CLASSES:
        for namespace, class_name in names.items():
            if name == class_name:
                return make_class(namespace)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
