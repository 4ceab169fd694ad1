"""Makes the strategy classes: one engine, a thin class for each of Lightning's two namespaces."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from lightning_hetero.errors import ConfigError

# Whose Trainer, and under which name the class is found in ``lightning_hetero.strategies`` (configs and pickles need one).
NAMESPACES = {"lightning.pytorch": "HeteroOffloadStrategy", "pytorch_lightning": "PytorchLightningHeteroOffloadStrategy"}
PARALLEL_NAMESPACES = {
    "lightning.pytorch": "HeteroParallelStrategy",
    "pytorch_lightning": "PytorchLightningHeteroParallelStrategy",
}
GROUP_NAMESPACES = {  # of ``HeteroParallelStrategy(offload=...)``
    "lightning.pytorch": "HeteroParallelOffloadStrategy",
    "pytorch_lightning": "PytorchLightningHeteroParallelOffloadStrategy",
}
FSDP_NAMESPACES = {
    "lightning.pytorch": "HeteroParallelFsdpStrategy",
    "pytorch_lightning": "PytorchLightningHeteroParallelFsdpStrategy",
}


def make(namespace: str, **options: Any) -> Any:
    """Creates the strategy for ``Trainer(strategy="hetero_offload")``.

    Args:
        namespace: ``"lightning.pytorch"`` or ``"pytorch_lightning"``: whose ``Trainer`` it is for.
        options: Those of :class:`~lightning_hetero.strategies.hetero_offload.HeteroOffloadStrategy`.
    """
    return strategy_class(namespace)(**options)


def make_parallel(namespace: str, **options: Any) -> Any:
    """Creates the strategy for ``Trainer(strategy="hetero_parallel")``.

    Args:
        namespace: As in :func:`make`.
        options: Those of :class:`~lightning_hetero.strategies.hetero_pipelines.HeteroPipelines`.
    """
    return parallel_class(namespace)(**options)


def make_parallel_fsdp(namespace: str, **options: Any) -> Any:
    """Creates the strategy for ``Trainer(strategy="hetero_parallel_fsdp")``.

    Args:
        namespace: As in :func:`make`.
        options: Those of :class:`~lightning_hetero.strategies.hetero_parallel_fsdp.HeteroParallelFsdp`.
    """
    return parallel_fsdp_class(namespace)(**options)


@functools.cache
def strategy_class(namespace: str) -> type[Any]:
    """The strategy class that subclasses the given namespace's ``SingleDeviceStrategy``.

    Raises:
        ConfigError: Unknown namespace.
    """
    from lightning_hetero.strategies import hetero_offload

    return _class(hetero_offload.HeteroOffload, "SingleDeviceStrategy", NAMESPACES, namespace)


@functools.cache
def parallel_class(namespace: str) -> type[Any]:
    """The strategy class that subclasses the given namespace's ``DDPStrategy``.

    Raises:
        ConfigError: Unknown namespace.
    """
    from lightning_hetero.strategies import hetero_pipelines

    engine = hetero_pipelines.HeteroPipelines
    return _class(engine, "DDPStrategy", PARALLEL_NAMESPACES, namespace, __new__=_with_tiers_or_not)


@functools.wraps(object.__new__)  # whoever reads signatures, as jsonargparse does, is to read that of __init__
def _with_tiers_or_not(cls: type[Any], *args: Any, offload: Any = None, **options: Any) -> Any:
    """``HeteroParallelStrategy.__new__``: with ``offload``, of the class that has tiers; DDP's wraps models that are in memory."""
    tiered = offload not in (None, False) and cls is parallel_class(cls.namespace)
    return object.__new__(parallel_offload_class(cls.namespace) if tiered else cls)


@functools.cache
def parallel_offload_class(namespace: str) -> type[Any]:
    """The class of the given namespace's ``HeteroParallelStrategy`` with ``offload``.

    Raises:
        ConfigError: Unknown namespace.
    """
    from lightning_hetero.strategies import hetero_parallel_offload

    engine, parent = hetero_parallel_offload.HeteroParallelOffload, parallel_class(namespace)
    return _made(engine, parent, GROUP_NAMESPACES[namespace], namespace)


@functools.cache
def parallel_fsdp_class(namespace: str) -> type[Any]:
    """The strategy class that subclasses the given namespace's ``ModelParallelStrategy``.

    Raises:
        ConfigError: Unknown namespace.
    """
    from lightning_hetero.strategies import hetero_parallel_fsdp

    return _class(hetero_parallel_fsdp.HeteroParallelFsdp, "ModelParallelStrategy", FSDP_NAMESPACES, namespace)


def _class(engine: type[Any], base: str, names: dict[str, str], namespace: str, **more: Any) -> type[Any]:
    if namespace not in names:
        raise ConfigError(f"namespace={namespace!r}; allowed: {', '.join(names)}.")
    parent = getattr(importlib.import_module(f"{namespace}.strategies"), base)
    return _made(engine, parent, names[namespace], namespace, **more)


def _made(engine: type[Any], parent: type[Any], name: str, namespace: str, **more: Any) -> type[Any]:
    body = {"namespace": namespace, "__module__": "lightning_hetero.strategies", "__doc__": engine.__doc__}
    return type(name, (engine, parent), body | more)
