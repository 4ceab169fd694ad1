"""Things of exact sizes that are used again and again: host buffers, files."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Lease(Generic[_T]):
    """Something lent. It goes back to its pool when nobody holds the lease any more."""

    __slots__ = ("_free", "value")

    def __init__(self, value: _T, free: deque[_T]) -> None:
        self.value, self._free = value, free

    def __del__(self) -> None:
        self._free.append(self.value)


class Pool(Generic[_T]):
    """Makes things of exact sizes, and keeps those that are free. Thread-safe.

    It has as many of a size as were ever in use at once, which the schedule bounds.

    ``make`` makes one of a size in bytes, and ``discard`` ends one.
    """

    def __init__(self, make: Callable[[int], _T], discard: Callable[[_T], object] = lambda thing: None) -> None:
        self._make, self._discard = make, discard
        self._free: dict[int, deque[_T]] = {}
        self._taken: set[int] = set()

    def take(self, num_bytes: int) -> _T:
        """One of this size, with any content, until :meth:`give`."""
        self._taken.add(num_bytes)
        try:
            return self._free.setdefault(num_bytes, deque()).pop()
        except IndexError:
            return self._make(num_bytes)

    def give(self, num_bytes: int, thing: _T) -> None:
        """Gives one of this size back."""
        self._free[num_bytes].append(thing)

    def lend(self, num_bytes: int) -> Lease[_T]:
        """One of this size, which goes back by itself."""
        return Lease(self.take(num_bytes), self._free[num_bytes])

    def trim(self) -> None:
        """Ends those that are free, of sizes that were not requested since the last call."""
        if self._taken:
            self._end(num_bytes for num_bytes in list(self._free) if num_bytes not in self._taken)
            self._taken.clear()

    def close(self) -> None:
        """Ends all that are free."""
        self._end(list(self._free))

    def _end(self, sizes: Iterable[int]) -> None:
        for num_bytes in sizes:
            free = self._free[num_bytes]
            while free:
                self._discard(free.pop())
