"""State of dataloaders besides their position: generators, ``state_dict``, attributes.

[Note: State of loaders]
docs/durability.md lists what a record carries, as the main process has it. It is taken before an
iterator is made, and set before a resume makes it again. Other attributes of a dataset are not set:
a number may be a file descriptor of the process that died. If others are seen to change, a warning
names them.
"""

from __future__ import annotations

import copy
import functools
import io
import random
import struct
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_hetero.errors import ConfigError
from lightning_hetero.store.format.encoding import dumps
from lightning_hetero.untyped import Options, Value

_WORDS = 625  # of Python's generator: 624 and an index
_DEPTH, _OBJECTS, _ITEMS = 6, 2000, 64  # limits of the search for generators
_SAMPLES = 256  # items of a container that show a change of its order
_PLAIN = (bool, int, float, str)
_EPOCHS = ("epoch", "_epoch")
_NOT_LOOKED_INTO = ("builtins", "torch", "numpy", "lightning", "pytorch_lightning", "logging", "threading")


# ---- description of a dataloader -------------------------------------------------------------


def described(loaders: Iterable[object]) -> list[dict[str, object]]:
    """For each dataloader, what decides the samples of an epoch's batches; ``None`` if unknown."""
    rows = []
    for loader in loaders:
        dataset, batches = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
        size = getattr(loader, "batch_size", None)
        rows.append(
            {
                "dataset length": _length(dataset),
                "number of batches": _length(loader),
                "batch_size": _plain(getattr(batches, "batch_size", None) if size is None else size),
                "drop_last": _plain(getattr(loader, "drop_last", None) or getattr(batches, "drop_last", None) or False),
                "sampler": _class_name(getattr(batches, "sampler", None) or getattr(loader, "sampler", None)),
                "batch sampler": _class_name(batches),
            }
        )
    return rows


def _length(value: Value) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, _PLAIN) else str(value)


def _class_name(value: object) -> str | None:
    return None if value is None else type(value).__qualname__


# ---- generators ------------------------------------------------------------------------------


def python_state(generator: Value) -> list[Value]:
    """The state of one of Python's generators, or of the ``random`` module."""
    version, words, gauss = generator.getstate()
    return [version, struct.pack(f"<{_WORDS}I", *words), gauss]


def set_python_state(generator: Value, state: list[Value]) -> None:
    """Sets the result of :func:`python_state`."""
    version, words, gauss = state
    generator.setstate((version, struct.unpack(f"<{_WORDS}I", words), gauss))


def _numpy_types() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy.random")
    return () if numpy is None else (numpy.Generator, numpy.RandomState)


def _is_generator(value: object) -> bool:
    python = isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)
    return python or isinstance(value, (torch.Generator, *_numpy_types()))


def _is_global(value: object) -> bool:
    numpy: Value = sys.modules.get("numpy.random")
    shared = [torch.default_generator, getattr(random, "_inst", None)]
    shared += [] if numpy is None else [getattr(numpy.mtrand, "_rand", None)]
    return any(value is one for one in shared)


def _take(generator: Value) -> Value:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return python_state(generator)
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def _set(generator: Value, state: Value) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        set_python_state(generator, state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def generators(loaders: Iterable[object]) -> Options:
    """The dataloaders' generators besides the global ones, by the place where they were found."""
    found: Options = {}
    seen: set[int] = set()
    for name, value, _ in _objects(loaders):
        if _is_generator(value) and not _is_global(value) and id(value) not in seen:
            seen.add(id(value))
            found[name] = value
    return found


def take_generators(found: Mapping[str, Value]) -> Options:
    """The states of generators, by their names."""
    return {name: _take(generator) for name, generator in found.items()}


def set_generators(found: Mapping[str, Value], states: Mapping[str, Value]) -> None:
    """Sets the result of :func:`take_generators`.

    Raises:
        ConfigError: The dataloaders have other generators, or generators of another kind.
    """
    if found.keys() != states.keys():
        there, kept = (", ".join(sorted(names)) or "none" for names in (found, states))
        raise ConfigError(
            f"the dataloaders have these random number generators of their own: {there}; those of the store: {kept}. Resume with "
            f"the dataloaders that training began with."
        )
    for name, generator in found.items():
        try:
            _set(generator, states[name])
        except (TypeError, ValueError, KeyError, RuntimeError, struct.error) as error:
            raise ConfigError(f"the generator {name} cannot take its state of the store: {error}.") from error


# ---- states and attributes -------------------------------------------------------------------


class LoaderState:
    """State of samplers and datasets, except generators; made before the first iterator."""

    def __init__(self, loaders: Iterable[object]) -> None:
        self._stateful: Options = {}
        self._others: dict[str, _Object] = {}
        for name, value, role in _objects(loaders):
            if role and not _is_generator(value) and _is_looked_into(value):
                if _has_state(value):
                    self._stateful[name] = value
                else:
                    self._others[name] = _Object(value, is_sampler=role == "sampler")
        self._made = {name: copy.deepcopy(value.state_dict()) for name, value in self._stateful.items()}

    def take(self, warn: Callable[[str], None]) -> Options:
        """The record's entry before an iterator is made. Warns of state that is not in it."""
        states = {}
        for name, value in self._stateful.items():
            state = copy.deepcopy(value.state_dict())
            try:
                dumps(state, f"the state of {name}")
            except ConfigError as error:
                warn(f"{error} It is not kept with the steps")
            else:
                states[name] = state
        changed = {}
        for name, other in self._others.items():
            if more := other.changed():
                changed[name] = more
            kind = type(other.value).__name__
            for key in other.remembers():
                warn(
                    f"{name}.{key} of {kind} changes as the training data is iterated, and is not kept with the steps: a resume "
                    f"begins with what it is when the object is made. Give {kind} state_dict and load_state_dict"
                )
        return {"states": states, "attributes": changed}

    def set(self, memory: Mapping[str, Value]) -> None:
        """Sets the result of :meth:`take`."""
        for name, state in memory["states"].items():
            self._find(name, self._stateful).load_state_dict(state)
        self.set_attributes(memory)

    def set_attributes(self, memory: Mapping[str, Value]) -> None:
        """Sets only the attributes."""
        for name, attributes in memory["attributes"].items():
            vars(self._find(name, self._others).value).update(attributes)

    def forget(self) -> bool:
        """Restores the states with which the objects were made. Returns false if there are none."""
        for name, state in self._made.items():
            self._stateful[name].load_state_dict(state)
        return bool(self._made)

    @staticmethod
    def _find(name: str, among: Options) -> Value:
        if name not in among:
            raise ConfigError(
                f"the store has the state of {name}, which these dataloaders do not have. Resume with the dataloaders that "
                f"training began with."
            )
        return among[name]


def _has_state(value: object) -> bool:
    both = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return both and not isinstance(value, torch.nn.Module)


class _Object:
    """A sampler or dataset without ``state_dict``, and its attributes before its first iteration.

    All plain attributes of a sampler are carried. Of a dataset only ``set_epoch``'s epoch is.
    """

    def __init__(self, value: Value, *, is_sampler: bool) -> None:
        self.value, self._is_sampler = value, is_sampler
        self._first, self._prints = self._carried(), self._fingerprints()

    def _carried(self) -> Options:
        told = callable(getattr(self.value, "set_epoch", None))
        found = {key: v for key, v in vars(self.value).items() if v is None or type(v) in _PLAIN}
        return found if self._is_sampler else {key: found[key] for key in _EPOCHS if told and key in found}

    def changed(self) -> Options:
        """The attributes that a resume sets."""
        return {key: v for key, v in self._carried().items() if key not in self._first or self._first[key] != v}

    def remembers(self) -> list[str]:
        """Other numbers and lists that have changed, except growing lists, which may be caches."""
        now, before = self._fingerprints(), self._prints
        return sorted(k for k in now.keys() & before.keys() if now[k][:2] == before[k][:2] and now[k][2] != before[k][2])

    def _fingerprints(self) -> dict[str, tuple[type, int, object]]:
        """Type, length and some content of each number and each sequence of numbers or strings."""
        prints: dict[str, tuple[type, int, object]] = {}
        carried = self._carried()
        for key, v in vars(self.value).items():
            if type(v) in (int, float) and key not in carried:
                prints[key] = (type(v), 1, v)
            elif (items := _items(v)) is not None:
                picked = [items[i] for i in range(0, len(items), max(1, len(items) // _SAMPLES))]
                numbers = [_number(p) for p in picked]
                if all(type(n) in _PLAIN for n in numbers):
                    prints[key] = (type(v), len(items), numbers)
        return prints


def _items(value: Value) -> Value:
    if isinstance(value, list):
        return value
    if isinstance(value, torch.Tensor):
        return value.view(-1) if value.device.type == "cpu" and value.layout is torch.strided and value.is_contiguous() else None
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in "biufU" and value.flags.c_contiguous:
        return value.reshape(-1)
    return None


def _number(value: Value) -> Value:
    """The number in a tensor or array of one element; any other value unchanged."""
    numpy = sys.modules.get("numpy")
    arrays = (torch.Tensor,) if numpy is None else (torch.Tensor, numpy.generic, numpy.ndarray)
    return value.item() if isinstance(value, arrays) and value.ndim == 0 else value


def early_warnings(loaders: Iterable[object]) -> list[str]:
    """Warnings about training dataloaders before they are iterated."""
    found = []
    for loader in loaders:
        kind = type(loader).__name__
        if has_persistent_workers(loader):
            found.append(
                f"the training {kind} has persistent_workers=True: random numbers that are drawn in its workers, and what the "
                f"dataset remembers there, cannot be replayed after their first epoch, so a resume in a later one goes on with "
                f"others. Leave persistent_workers out if the dataset or collate_fn draws random numbers"
            )
        if getattr(loader, "num_workers", 0) > 1 and not getattr(loader, "in_order", True):
            found.append(f"the training {kind} has in_order=False: batches come as they are ready, in a resume in another order")
        dataset = getattr(loader, "dataset", None)
        if isinstance(dataset, IterableDataset) and not _has_state(loader) and not _has_state(dataset):
            found.append(
                f"the training dataset {type(dataset).__name__} is an IterableDataset without state_dict: a resume iterates it "
                f"from its beginning, and drops what was used, which is right only if it gives the same samples again"
            )
    for name, value, role in _objects(loaders):
        if role and isinstance(value, Iterator) and not isinstance(value, io.IOBase) and not _is_generator(value):
            found.append(
                f"{name} of the training data is an iterator ({type(value).__name__}), which goes on where it is; a resume begins "
                f"with it as it is when it is made. Make it in __iter__, or give its owner state_dict and load_state_dict"
            )
    return found


def has_persistent_workers(loader: object) -> bool:
    """Whether a dataloader keeps its workers from one epoch to the next."""
    return isinstance(loader, DataLoader) and loader.persistent_workers and loader.num_workers > 0


# ---- the search ---------------------------------------------------------------------------


def _objects(loaders: Iterable[object]) -> Iterator[tuple[str, Value, str]]:
    """All objects of dataloaders that may have state: place, object and role.

    The role is ``"sampler"``, ``"data"``, or empty for objects that torch makes.
    """
    seen: set[int] = set()
    for number, loader in enumerate(loaders):
        if _has_state(loader):
            continue  # its state has everything
        at = f"dataloader {number}: "
        if isinstance(loader, DataLoader):
            yield f"{at}generator", loader.generator, ""
            roots = [("dataset", "data"), ("collate_fn", "data"), ("sampler", "sampler"), ("batch_sampler", "sampler")]
            for key, role in roots:
                yield from _walk(getattr(loader, key, None), f"{at}{key}", role, seen, 0)
        else:
            yield from _walk(loader, f"{at}loader", "data", seen, 0)


def _walk(value: object, name: str, role: str, seen: set[int], depth: int) -> Iterator[tuple[str, object, str]]:
    if value is None or type(value) in _PLAIN or id(value) in seen or len(seen) > _OBJECTS or depth > _DEPTH:
        return
    seen.add(id(value))
    if isinstance(value, Sampler):
        role = "sampler"
    elif role == "sampler" and depth and not isinstance(value, Sampler):
        role = "data"
    yield name, value, role
    for key, inner in _inner(value):
        yield from _walk(inner, f"{name}{key}", role, seen, depth + 1)


def _inner(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict | list | tuple):
        if len(value) <= _ITEMS:
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((f"[{key!r}]", inner) for key, inner in list(pairs))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield "", value.__self__
    elif isinstance(value, types.FunctionType):
        for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            try:
                yield f".{key}", cell.cell_contents
            except ValueError:  # not yet filled
                continue
    elif _is_looked_into(value):
        yield from ((f".{key}", inner) for key, inner in list(vars(value).items()))


def _is_looked_into(value: object) -> bool:
    if isinstance(value, types.ModuleType | type | torch.Tensor | torch.nn.Module) or not hasattr(value, "__dict__"):
        return False
    module = type(value).__module__ or ""
    if isinstance(value, Sampler | Dataset):
        return True
    return module.partition(".")[0] not in _NOT_LOOKED_INTO
