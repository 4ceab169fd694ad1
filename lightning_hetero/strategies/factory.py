"""Makes the strategy classes: one engine, a thin class for each of Lightning's two namespaces."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from lightning_hetero.errors import ConfigError

# Whose Trainer, and under which name the class is found in ``lightning_hetero.strategies`` (configs and pickles need one).
NAMESPACES = {"lightning.pytorch": "HeteroOffloadStrategy", "pytorch_lightning": "PytorchLightningHeteroOffloadStrategy"}


def make(namespace: str, **options: Any) -> Any:
    """Creates the strategy for ``Trainer(strategy="hetero_offload")``.

    Args:
        namespace: ``"lightning.pytorch"`` or ``"pytorch_lightning"``: whose ``Trainer`` it is for.
        options: Those of :class:`~lightning_hetero.strategies.hetero_offload.HeteroOffloadStrategy`.
    """
    return strategy_class(namespace)(**options)


@functools.cache
def strategy_class(namespace: str) -> type[Any]:
    """The strategy class that subclasses the given namespace's ``SingleDeviceStrategy``.

    Raises:
        ConfigError: Unknown namespace.
    """
    if namespace not in NAMESPACES:
        raise ConfigError(f"namespace={namespace!r}; allowed: {', '.join(NAMESPACES)}.")
    from lightning_hetero.strategies import hetero_offload

    base = importlib.import_module(f"{namespace}.strategies").SingleDeviceStrategy
    body = {
        "namespace": namespace,
        "__module__": "lightning_hetero.strategies",
        "__doc__": hetero_offload.HeteroOffload.__doc__,
    }
    return type(NAMESPACES[namespace], (hetero_offload.HeteroOffload, base), body)
