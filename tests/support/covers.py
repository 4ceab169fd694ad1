"""Products of options that are too large to try whole in every run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import TypeVar

from hypothesis import settings

from support.properties import DEEP_EXAMPLES

T = TypeVar("T")


def is_deep() -> bool:
    """Whether ``HYPOTHESIS_PROFILE=deep`` asks for everything."""
    return settings.default.max_examples >= DEEP_EXAMPLES


def paired(
    rows: Iterable[T], options: Callable[[T], Sequence[Hashable]], also: Callable[[T], Iterable[Hashable]] = lambda _: ()
) -> list[T]:
    """Some of the rows that have every two options together that any row has; all of them in the
    deep profile.

    ``options`` gives a row's options, one of each kind; ``also``, what else of any row they have.
    """
    left = list(rows)
    if is_deep():
        return left
    wanted = [(row, frozenset([*combinations(enumerate(options(row)), 2), *also(row)])) for row in left]
    missing = frozenset[object]().union(*(pairs for _, pairs in wanted))
    found: list[T] = []
    while missing:
        row, pairs = max(wanted, key=lambda one: len(one[1] & missing))
        found.append(row)
        missing -= pairs
    return found
