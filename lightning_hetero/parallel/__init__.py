"""Training on different devices: cluster plans and their execution.

Offloading does not import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_hetero.parallel.pipeline.module import StagedSteps

__all__ = ["StagedSteps"]


def __getattr__(name: str) -> Any:
    """Loads names on first use, because planners do not need torch."""
    if name != "StagedSteps":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_hetero.parallel.pipeline.module import StagedSteps

    return StagedSteps
