"""Train models that do not fit the accelerator, or even RAM, from ordinary PyTorch Lightning code.

``Trainer(strategy="hetero_offload")`` works without importing this package; import it for plans,
errors and the strategy class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_hetero import _autoload
from lightning_hetero.errors import HeteroError

if TYPE_CHECKING:
    from lightning_hetero.convert.exporting import export_weights
    from lightning_hetero.ir.plan import BlockPlan, Gather, Plan, Tier, UpdateLane
    from lightning_hetero.lanes import EmulatedDevice
    from lightning_hetero.loops.plain import offload
    from lightning_hetero.monitors import DiskWear, OffloadMonitor, TraceOnDemand
    from lightning_hetero.strategies import HeteroOffloadStrategy, HeteroParallelFsdpStrategy, HeteroParallelStrategy, LocalFirst

__version__ = "0.1.0"
__all__ = [
    "BlockPlan",
    "DiskWear",
    "EmulatedDevice",
    "Gather",
    "HeteroError",
    "HeteroOffloadStrategy",
    "HeteroParallelFsdpStrategy",
    "HeteroParallelStrategy",
    "LocalFirst",
    "OffloadMonitor",
    "Plan",
    "Tier",
    "TraceOnDemand",
    "UpdateLane",
    "export_weights",
    "offload",
]

_HOMES = dict.fromkeys(("BlockPlan", "Gather", "Plan", "Tier", "UpdateLane"), "lightning_hetero.ir.plan")
_STRATEGIES = ("HeteroOffloadStrategy", "HeteroParallelFsdpStrategy", "HeteroParallelStrategy", "LocalFirst")
_HOMES |= dict.fromkeys(_STRATEGIES, "lightning_hetero.strategies")
_HOMES["EmulatedDevice"] = "lightning_hetero.lanes"
_HOMES |= dict.fromkeys(("DiskWear", "OffloadMonitor", "TraceOnDemand"), "lightning_hetero.monitors")
_HOMES["offload"] = "lightning_hetero.loops.plain"
_HOMES["export_weights"] = "lightning_hetero.convert.exporting"


def __getattr__(name: str) -> Any:
    """Loads the public names on first use, so that importing the package does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


_autoload.install()
