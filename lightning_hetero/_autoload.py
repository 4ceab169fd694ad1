"""Makes ``Trainer(strategy="hetero_offload")`` work without importing this package.

The ``torch.backends`` entry point calls ``install`` at the end of ``import torch``. It puts a
finder on ``sys.meta_path`` that registers lazy factories as soon as Lightning's strategy modules
have been executed. Standard library only, about a millisecond, and unable to raise: an exception
here would break ``import torch`` for everyone on the machine. Off with
``TORCH_DEVICE_BACKEND_AUTOLOAD=0``; ``import lightning_hetero`` then does the same.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_OFFLOAD = "Trains models that do not fit memory, out of core: lightning_hetero.HeteroOffloadStrategy"
# Names, as in an entry point: these are imported when a strategy is made.
_STRATEGIES, _FABRIC = "lightning_hetero.strategies", "lightning_hetero.loops.fabric"
# Name: (its maker there, what `Trainer --help` and the like say).
NAMES = {
    "hetero_offload": ("make", _OFFLOAD),
    "hetero": ("make", _OFFLOAD),  # `fabric run --strategy` drops names that contain "offload"
    "hetero_parallel": (
        "make_parallel",
        "Devices of different speed: uneven batches, or pipelines by plan: lightning_hetero.HeteroParallelStrategy",
    ),
    "hetero_parallel_fsdp": ("make_parallel_fsdp", "The same with FSDP2: lightning_hetero.HeteroParallelFsdpStrategy"),
}

# Module: (its registry, the Trainer's namespace, whether it is Fabric's).
_REGISTRIES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "lightning.pytorch", False),
    "pytorch_lightning.strategies": ("StrategyRegistry", "pytorch_lightning", False),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "lightning.pytorch", True),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "pytorch_lightning", True),
}


def install() -> None:
    """Registers the strategy's names in imported and later imported Lightning; never raises."""
    with contextlib.suppress(Exception):
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
        for name in _REGISTRIES:
            if name in sys.modules:
                _register(sys.modules[name])


class _Finder(MetaPathFinder):
    """Leaves finding to other finders, and registers after Lightning's modules are executed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in _REGISTRIES:
            return None
        for finder in sys.meta_path:
            find = None if isinstance(finder, _Finder) else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find else None
            if spec is not None:
                with contextlib.suppress(Exception):
                    _register_after(spec.loader)
                return spec
        return None


def _register_after(loader: Loader | None) -> None:
    # The loader itself stays in place (inspect and pkgutil ask it for source and data); only this
    # instance's method changes.
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return

    @functools.wraps(execute)
    def exec_module(module: ModuleType) -> None:
        execute(module)
        _register(module)

    vars(loader)["exec_module"] = exec_module


def _register(module: ModuleType) -> None:
    try:
        registry_name, namespace, is_fabric = _REGISTRIES[module.__name__]
        registry: Any = getattr(module, registry_name)
        for name, (maker, description) in NAMES.items():
            if name not in registry:
                home = _FABRIC if is_fabric else _STRATEGIES
                refuse = functools.partial(_refuse_fabric, name)
                factory = refuse if is_fabric and maker != "make" else functools.partial(_make, home, namespace, maker)
                registry.register(name, factory, description=description)
    except Exception as error:
        with contextlib.suppress(Exception):  # `-W error` must not reach the importing module
            warnings.warn(f"lightning_hetero could not register its strategies with {module.__name__}: {error!r}", stacklevel=2)


def _make(home: str, namespace: str, maker: str, /, **options: Any) -> Any:
    return getattr(importlib.import_module(home), maker)(namespace, **options)


def _refuse_fabric(name: str, **_: Any) -> Any:
    from lightning_hetero.errors import UnsupportedError

    raise UnsupportedError(
        f'strategy="{name}" was given to Fabric; it works with Trainer, of lightning.pytorch or pytorch_lightning. '
        f'Use Trainer(strategy="{name}"), or another strategy with Fabric.'
    )
