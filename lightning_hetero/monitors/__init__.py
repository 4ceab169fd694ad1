"""Callbacks that show a run while it trains: its speed, its drives' wear, a trace on demand.

Each is written once, and made for a namespace of Lightning on demand, like the strategies.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_hetero.strategies.namespaces import public_names

if TYPE_CHECKING:
    from lightning_hetero.monitors.disk_wear import DiskWear
    from lightning_hetero.monitors.offload_monitor import OffloadMonitor
    from lightning_hetero.monitors.trace_on_demand import TraceOnDemand

__all__ = ["DiskWear", "OffloadMonitor", "TraceOnDemand"]

_HOMES = {
    "DiskWear": "lightning_hetero.monitors.disk_wear",
    "OffloadMonitor": "lightning_hetero.monitors.offload_monitor",
    "TraceOnDemand": "lightning_hetero.monitors.trace_on_demand",
}


def __getattr__(name: str) -> object:
    """Makes a class by its public name, such as ``PytorchLightningOffloadMonitor``."""
    for known, home in _HOMES.items():
        if (lightning := public_names(known).get(name)) is not None:
            written = getattr(import_module(home), known)
            return lightning.subclass(written, "callbacks.Callback", name=known, home=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
