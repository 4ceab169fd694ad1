"""Makes the strategy classes: each is written once, and made for each of Lightning's two namespaces on demand."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_hetero.strategies.namespaces import Lightning, public_names

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

_HOME = "lightning_hetero.strategies"  # where the classes are found by name
# The class for ``lightning.pytorch``: where it is written, and the base class that it gets.
_WRITTEN = {
    "HeteroOffloadStrategy": ("strategies.hetero_offload.HeteroOffload", "strategies.SingleDeviceStrategy"),
    "HeteroParallelStrategy": ("parallel.strategies.hetero_parallel.HeteroParallel", "strategies.DDPStrategy"),
    "HeteroParallelOffloadStrategy": (
        "parallel.strategies.hetero_parallel_offload.HeteroParallelOffload",
        "strategies.DDPStrategy",
    ),
    "HeteroParallelFsdpStrategy": (
        "parallel.strategies.hetero_parallel_fsdp.HeteroParallelFsdp",
        "strategies.ModelParallelStrategy",
    ),
    "LocalFirst": ("parallel.strategies.local_first._LocalFirst", "plugins.io.TorchCheckpointIO"),
}


def made(name: str, lightning: Lightning) -> Any:
    """One of the classes for a namespace, by its name for ``lightning.pytorch``."""
    written, base = _WRITTEN[name]
    module, _, attribute = written.rpartition(".")
    kind: Any = getattr(importlib.import_module(f"lightning_hetero.{module}"), attribute)
    found: Any = lightning.subclass(kind, base, name=name, home=_HOME)
    if name == "HeteroParallelOffloadStrategy":  # what HeteroParallelStrategy makes of `offload` is one, too
        made("HeteroParallelStrategy", lightning).register(found)
    return found


def find(name: str) -> Any:
    """A class by its public name, such as ``"PytorchLightningLocalFirst"``; ``None`` if there is none of that name."""
    for known in _WRITTEN:
        if (lightning := public_names(known).get(name)) is not None:
            return made(known, lightning)
    return None


def make(namespace: str, **options: Any) -> Strategy:
    """Creates the strategy for ``Trainer(strategy="hetero_offload")``.

    Args:
        namespace: ``"lightning.pytorch"`` or ``"pytorch_lightning"``: whose ``Trainer`` it is for.
        options: Those of :class:`~lightning_hetero.strategies.hetero_offload.HeteroOffload`.

    Raises:
        ConfigError: Another namespace; likewise the others.
    """
    strategy: Strategy = strategy_class(namespace)(**options)
    return strategy


def make_parallel(namespace: str, **options: Any) -> Any:
    """The same for ``Trainer(strategy="hetero_parallel")``."""
    return parallel_class(namespace)(**options)


def make_parallel_fsdp(namespace: str, **options: Any) -> Any:
    """The same for ``Trainer(strategy="hetero_parallel_fsdp")``."""
    return parallel_fsdp_class(namespace)(**options)


def strategy_class(namespace: str) -> Any:
    """The strategy class that subclasses the namespace's ``SingleDeviceStrategy``."""
    return made("HeteroOffloadStrategy", Lightning(namespace))


def parallel_class(namespace: str) -> Any:
    """The strategy class that subclasses the namespace's ``DDPStrategy``."""
    return made("HeteroParallelStrategy", Lightning(namespace))


def parallel_offload_class(namespace: str) -> Any:
    """The class of the namespace's ``HeteroParallelStrategy`` with ``offload``."""
    return made("HeteroParallelOffloadStrategy", Lightning(namespace))


def parallel_fsdp_class(namespace: str) -> Any:
    """The strategy class that subclasses the namespace's ``ModelParallelStrategy``."""
    return made("HeteroParallelFsdpStrategy", Lightning(namespace))


def local_first_class(namespace: str) -> Any:
    """The checkpoint IO of :class:`LocalFirst` for Trainers of the namespace."""
    return made("LocalFirst", Lightning(namespace))
