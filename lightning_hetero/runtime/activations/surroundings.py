"""What a forward finds beside its arguments and buffers, for when it runs once more.

[Note: Surroundings]
A forward may read plain attributes of its modules (``training``, a count of calls) and draw from
Python's and NumPy's random numbers, or from generators that its modules hold (torch's own random
numbers are kept with the operators). A recomputation finds
all of these as forward found them, and leaves them as it found them itself.

Attributes are plain if they are numbers, strings or ``None``; a reference to anything else could
keep memory. The state of a generator is large, so only generators that the block's first forward
has used are followed. Everything else that makes a forward do something else is found by its
results ([Note: Samples]).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from lightning_hetero.untyped import Value

_PLAIN = frozenset({bool, int, float, complex, str, type(None)})


@dataclass(frozen=True, slots=True)
class _Generator:
    """A generator on the host: how its state is read and set."""

    get: Callable[[], Value]
    put: Callable[[Value], object]

    @classmethod
    def of(cls, value: Value) -> _Generator | None:
        """That of an attribute's value; ``None`` if this is no generator."""
        if isinstance(value, torch.Generator):
            return cls(value.get_state, value.set_state)
        if isinstance(value, random.Random):
            return None if isinstance(value, random.SystemRandom) else cls(value.getstate, value.setstate)
        numpy: Value = sys.modules.get("numpy.random")
        if numpy is not None and isinstance(value, numpy.RandomState):
            return cls(value.get_state, value.set_state)
        if numpy is not None and isinstance(value, numpy.Generator):
            inner = value.bit_generator
            return cls(lambda: inner.state, lambda state: setattr(inner, "state", state))
        return None


def _generators(module: nn.Module) -> list[_Generator]:
    """Python's and NumPy's global generators, and those that the modules of a block hold."""
    found = [_Generator(random.getstate, random.setstate)]
    numpy: Value = sys.modules.get("numpy.random")
    if numpy is not None:
        found.append(_Generator(numpy.get_state, numpy.set_state))
    held = {id(value): value for each in module.modules() for value in vars(each).values()}
    return found + [generator for generator in map(_Generator.of, held.values()) if generator is not None]


class Surroundings:
    """The surroundings of one block's forwards; see [Note: Surroundings]."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._used: list[_Generator] | None = None  # by the first forward; ``None`` before it has ended

    def now(self) -> FoundSurroundings:
        """The surroundings as a forward that begins now finds them."""
        generators = _generators(self._module) if self._used is None else self._used
        plain = [(m, {k: v for k, v in vars(m).items() if type(v) in _PLAIN}) for m in self._module.modules()]
        return FoundSurroundings(self, plain, [(generator, generator.get()) for generator in generators])

    def learn(self, used: list[_Generator]) -> None:
        """A forward has ended, which has used these of the generators that were followed."""
        if self._used is None:
            self._used = used


class FoundSurroundings:
    """The surroundings of one forward, as it has found them."""

    def __init__(
        self, block: Surroundings, plain: list[tuple[nn.Module, dict[str, object]]], generators: list[tuple[_Generator, Value]]
    ) -> None:
        self._block, self._plain, self._generators = block, plain, generators

    def forward_ended(self) -> None:
        """Keeps the generators that forward has used."""
        self._generators = [(generator, state) for generator, state in self._generators if not _same(generator.get(), state)]
        self._block.learn([generator for generator, _ in self._generators])

    def forget(self) -> None:
        """Nothing needs them any more."""
        self._plain, self._generators = [], []

    @contextmanager
    def as_they_were(self) -> Iterator[None]:
        """Inside, attributes and generators are as the forward found them."""
        after = [(module, dict(vars(module))) for module, _ in self._plain]
        later = [(generator, generator.get()) for generator, _ in self._generators]
        for module, found in self._plain:
            _set_attributes(module, {k: v for k, v in vars(module).items() if type(v) not in _PLAIN} | found)
        for generator, state in self._generators:
            generator.put(state)
        try:
            yield
        finally:
            for module, attributes in after:
                _set_attributes(module, attributes)
            for generator, state in later:
                generator.put(state)


def _set_attributes(module: nn.Module, attributes: dict[str, object]) -> None:
    """Gives a module exactly these attributes."""
    own = vars(module)
    for key in [key for key in own if key not in attributes]:
        del own[key]
    own.update(attributes)


def _same(one: Value, other: Value) -> bool:
    """Whether two states of a generator are equal; they have tensors or NumPy's arrays in them."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)
