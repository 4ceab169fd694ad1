"""The public strategies. Each is written once, and made for a namespace of Lightning on demand.

Those of parallel training are found here too, by name: they are written in a package that imports
this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_hetero.strategies.namespaces import Lightning, public_names

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


def strategy_class(namespace: str) -> type[HeteroOffloadStrategy]:
    """The subclass of the namespace's ``SingleDeviceStrategy``.

    Args:
        namespace: ``"lightning.pytorch"`` or ``"pytorch_lightning"``.

    Raises:
        ConfigError: Another namespace.
    """
    from lightning_hetero.strategies.hetero_offload import class_for

    return class_for(Lightning(namespace))


def parallel_class(namespace: str) -> type[HeteroParallelStrategy]:
    """The subclass of the namespace's ``DDPStrategy``; as :func:`strategy_class`."""
    from lightning_hetero.parallel.strategies.hetero_parallel import class_for

    return class_for(Lightning(namespace))


def parallel_offload_class(namespace: str) -> type[HeteroParallelOffloadStrategy]:
    """The class of ``HeteroParallelStrategy(offload=...)``; as :func:`strategy_class`."""
    from lightning_hetero.parallel.strategies.hetero_parallel_offload import class_for

    return class_for(Lightning(namespace))


def parallel_fsdp_class(namespace: str) -> type[HeteroParallelFsdpStrategy]:
    """The subclass of the namespace's ``ModelParallelStrategy``; as :func:`strategy_class`."""
    from lightning_hetero.parallel.strategies.hetero_parallel_fsdp import class_for

    return class_for(Lightning(namespace))


def local_first_class(namespace: str) -> type[LocalFirst]:
    """The namespace's checkpoint IO that saves to several tiers; as :func:`strategy_class`."""
    from lightning_hetero.parallel.strategies.local_first import class_for

    return class_for(Lightning(namespace))


def make(namespace: str, **options: Any) -> Strategy:
    """Makes the strategy for ``Trainer(strategy="hetero_offload")``.

    Args:
        namespace: As for :func:`strategy_class`.
        options: Those of :class:`~lightning_hetero.strategies.hetero_offload.HeteroOffload`.
    """
    return strategy_class(namespace)(**options)


def make_parallel(namespace: str, **options: Any) -> Strategy:
    """Makes the strategy for ``Trainer(strategy="hetero_parallel")``."""
    strategy: Strategy = parallel_class(namespace)(**options)
    return strategy


def make_parallel_fsdp(namespace: str, **options: Any) -> Strategy:
    """Makes the strategy for ``Trainer(strategy="hetero_parallel_fsdp")``."""
    return parallel_fsdp_class(namespace)(**options)


_CLASSES: dict[str, Callable[[str], type[object]]] = {
    "HeteroOffloadStrategy": strategy_class,
    "HeteroParallelStrategy": parallel_class,
    "HeteroParallelOffloadStrategy": parallel_offload_class,
    "HeteroParallelFsdpStrategy": parallel_fsdp_class,
    "LocalFirst": local_first_class,
}


def __getattr__(name: str) -> Any:
    """Makes a class by its public name, such as ``PytorchLightningLocalFirst``."""
    for known, class_of in _CLASSES.items():
        if (lightning := public_names(known).get(name)) is not None:
            return class_of(lightning.name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
