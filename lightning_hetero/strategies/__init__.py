"""The public strategies. Each is written once, and made for a namespace of Lightning on demand.

Those of parallel training are found here too, by name: they are written in a package that imports
this one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from lightning_hetero.strategies.namespaces import Lightning, public_names
from lightning_hetero.untyped import Value

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

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


_HOMES = {  # the modules in which the public classes are written
    "HeteroOffloadStrategy": "lightning_hetero.strategies.hetero_offload",
    "HeteroOffloadRanksStrategy": "lightning_hetero.strategies.offload_ranks",
    "HeteroParallelStrategy": "lightning_hetero.parallel.strategies.hetero_parallel",
    "HeteroParallelOffloadStrategy": "lightning_hetero.parallel.strategies.hetero_parallel_offload",
    "HeteroParallelFsdpStrategy": "lightning_hetero.parallel.strategies.hetero_parallel_fsdp",
    "LocalFirst": "lightning_hetero.parallel.strategies.local_first",
}


def _class_of(name: str, namespace: str) -> Value:
    """A public class for ``"lightning.pytorch"`` or ``"pytorch_lightning"``.

    Raises:
        ConfigError: Another namespace.
    """
    return import_module(_HOMES[name]).class_for(Lightning(namespace))


# Each of these takes the name of a namespace and returns a class, as :func:`_class_of`.
strategy_class: Callable[[str], type[HeteroOffloadStrategy]] = partial(_class_of, "HeteroOffloadStrategy")
parallel_class: Callable[[str], type[HeteroParallelStrategy]] = partial(_class_of, "HeteroParallelStrategy")
parallel_offload_class: Callable[[str], type[HeteroParallelOffloadStrategy]] = partial(_class_of, "HeteroParallelOffloadStrategy")
parallel_fsdp_class: Callable[[str], type[HeteroParallelFsdpStrategy]] = partial(_class_of, "HeteroParallelFsdpStrategy")
local_first_class: Callable[[str], type[LocalFirst]] = partial(_class_of, "LocalFirst")


def make(namespace: str, **options: Value) -> Strategy:
    """Makes the strategy for ``Trainer(strategy="hetero_offload")``.

    Args:
        namespace: As for :func:`strategy_class`.
        options: Those of :class:`~lightning_hetero.strategies.hetero_offload.HeteroOffload`.
    """
    return strategy_class(namespace)(**options)


def make_parallel(namespace: str, **options: Value) -> Strategy:
    """Makes the strategy for ``Trainer(strategy="hetero_parallel")``."""
    strategy: Strategy = parallel_class(namespace)(**options)
    return strategy


def make_parallel_fsdp(namespace: str, **options: Value) -> Strategy:
    """Makes the strategy for ``Trainer(strategy="hetero_parallel_fsdp")``."""
    return parallel_fsdp_class(namespace)(**options)


def __getattr__(name: str) -> Value:
    """Makes a class by its public name, such as ``PytorchLightningLocalFirst``."""
    for known in _HOMES:
        if (lightning := public_names(known).get(name)) is not None:
            return _class_of(known, lightning.name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
