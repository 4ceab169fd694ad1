"""Training on devices that differ: plans of clusters, and what runs them. Separate from offloading; nothing there imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_hetero.parallel.pipeline.module import StagedSteps

__all__ = ["StagedSteps"]


def __getattr__(name: str) -> Any:
    """Loads it on first use: planners do without torch."""
    if name != "StagedSteps":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_hetero.parallel.pipeline.module import StagedSteps

    return StagedSteps
