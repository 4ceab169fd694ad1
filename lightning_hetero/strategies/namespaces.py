"""Lightning's two namespaces, ``lightning.pytorch`` and ``pytorch_lightning``.

A Trainer takes strategies, callbacks and plugins of its own namespace only. Each class of this
package is written once, without a base class. :meth:`Lightning.subclass` derives it from a base
class of one namespace.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from lightning_hetero.errors import ConfigError
from lightning_hetero.untyped import Value

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import Strategy

T = TypeVar("T")

HOME = "lightning_hetero.strategies"  # where strategies and plugins are found by name
_FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
_PREFIX = {"lightning.pytorch": "", "pytorch_lightning": "PytorchLightning"}  # of our classes' names


@dataclass(frozen=True, slots=True)
class Lightning:
    """One of the two namespaces; refuses another name."""

    name: str  # "lightning.pytorch" or "pytorch_lightning"

    def __post_init__(self) -> None:
        if self.name not in _FABRIC:
            raise ConfigError(f"namespace={self.name!r}; allowed: {', '.join(_FABRIC)}.")

    def module(self, path: str = "") -> ModuleType:
        """A module of the namespace, such as ``"trainer.call"``; without a path the namespace."""
        return importlib.import_module(f"{self.name}.{path}" if path else self.name)

    def fabric(self, path: str) -> ModuleType:
        """A module of the Fabric that belongs to the namespace."""
        return importlib.import_module(f"{_FABRIC[self.name]}.{path}")

    @property
    def version(self) -> str:
        """Lightning's version."""
        return str(self.module().__version__)

    def is_overridden(self, hook: str, owner: pl.LightningModule | pl.LightningDataModule | pl.Callback) -> bool:
        """Whether a module or a callback has its own version of a hook."""
        return bool(self.module("utilities.model_helpers").is_overridden(hook, owner))

    def is_fit(self, trainer: pl.Trainer) -> bool:
        """Whether the Trainer fits, and does not validate, test or predict."""
        return bool(trainer.state.fn == self.module("trainer.states").TrainerFn.FITTING)

    def subclass(self, written: type[T], base: str, *, name: str, home: str = HOME) -> type[T]:
        """The class ``written``, which has no base class at run time, with one of the namespace.

        ``base`` is such as ``"strategies.DDPStrategy"``; with ``fabric.`` before it, of Fabric.
        ``name`` gets a prefix for the namespace
        that is not ``lightning.pytorch``. Configuration files and pickles find it in ``home``.
        """
        key = home, _PREFIX[self.name] + name
        if key not in _made:
            path, _, attribute = base.rpartition(".")
            ours, body = _ours(written)
            body |= {"__module__": home, "__doc__": written.__doc__, "namespace": self.name}
            home_of_base = self.fabric(path.removeprefix("fabric.")) if path.startswith("fabric.") else self.module(path)
            _made[key] = type(key[1], (ours, getattr(home_of_base, attribute)), body)
        made: type[T] = _made[key]
        return made


NAMESPACES = tuple(map(Lightning, _FABRIC))
_made: dict[tuple[str, str], Value] = {}  # classes by home and name
_known: dict[type[object], Lightning] = {}


def _ours(written: type[object]) -> tuple[type[object], dict[str, object]]:
    """Which class of ours becomes a base of the class that is made, and which attributes it gets.

    If ``written`` derives from another class of ours, that one is the base, and the attributes of
    ``written`` are copied. So at most two classes of ours stand above Lightning's. The copied
    methods name the class whose method they extend: ``super()`` without arguments would look for
    ``written``.
    """
    (parent,) = written.__bases__
    if parent is object:
        return written, {}
    body = {name: value for name, value in vars(written).items() if name not in ("__dict__", "__weakref__")}
    return parent, body


def lightning_of_class(kind: type[object]) -> Lightning:
    """The namespace that a class derives from; ``lightning.pytorch`` if it derives from neither."""
    if kind not in _known:
        homes = [f"{cls.__module__}." for cls in kind.__mro__]
        roots = [(f"{root}.", lightning) for lightning in NAMESPACES for root in (lightning.name, _FABRIC[lightning.name])]
        among = (lightning for home in homes for root, lightning in roots if home.startswith(root))
        _known[kind] = next(among, NAMESPACES[0])
    return _known[kind]


def lightning_of(instance: object) -> Lightning:
    """The namespace of a Trainer, module, strategy, callback or plugin, by its class."""
    return lightning_of_class(type(instance))


def module_of(strategy: Strategy) -> pl.LightningModule:
    """The strategy's LightningModule, which the Trainer connects before it calls the strategy."""
    if (module := strategy.lightning_module) is None:
        raise RuntimeError("the strategy has no module: no Trainer has connected one")
    return module


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """The Trainer's own list of callbacks, which a connector gives it."""
    found: list[pl.Callback] = vars(trainer)["callbacks"]
    return found


def public_names(name: str) -> dict[str, Lightning]:
    """The names under which :meth:`Lightning.subclass` makes a class, with their namespaces."""
    return {prefix + name: Lightning(namespace) for namespace, prefix in _PREFIX.items()}
