"""The outer face: Lightning strategies, one class per namespace (``lightning.pytorch``, ``pytorch_lightning``), made on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_hetero.strategies.factory import NAMESPACES, make, strategy_class

if TYPE_CHECKING:
    from lightning_hetero.strategies.hetero_offload import HeteroOffload as HeteroOffloadStrategy

__all__ = ["HeteroOffloadStrategy", "make", "strategy_class"]


def __getattr__(name: str) -> Any:
    for namespace, class_name in NAMESPACES.items():
        if name == class_name:
            return strategy_class(namespace)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
