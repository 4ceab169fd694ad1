"""What each of several ranks does with files, where an error of one is that of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lightning_hetero import errors
from lightning_hetero.errors import HeteroError
from lightning_hetero.lanes.collectives import Collectives

_Found = TypeVar("_Found")


def of_first(collectives: Collectives | None, decide: Callable[[], _Found]) -> _Found:
    """What the first rank decides. Its errors are those of all."""
    is_first = collectives is None or collectives.rank == 0
    return of_each(collectives, lambda: [decide()] if is_first else [])[0][0]


def of_each(collectives: Collectives | None, decide: Callable[[], _Found]) -> list[_Found]:
    """What each rank finds, which can be pickled. An error of one is that of all."""
    if collectives is None:
        return [decide()]
    found, raised, refusal = list[_Found](), None, ("", "")
    try:
        found.append(decide())
    except Exception as error:
        raised, refusal = error, _told(error, collectives.rank)
    told = collectives.tell_all((found, refusal))
    if raised is not None:
        raise raised
    for kind, text in (refused for _, refused in told if refused[0]):
        raise getattr(errors, kind)(text)
    return [value for values, _ in told for value in values]


def _told(error: Exception, rank: int) -> tuple[str, str]:
    """The public class of an error, and its text, with the rank if it is not of this library."""
    name = next(kind.__name__ for kind in (*type(error).__mro__, HeteroError) if vars(errors).get(kind.__name__) is kind)
    return name, str(error) if isinstance(error, HeteroError) else f"rank {rank} has failed: {type(error).__name__}: {error}"
