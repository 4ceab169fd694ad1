"""Things that are used again and again: host buffers, files."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

_T = TypeVar("_T")

_KEPT = 16  # batches in which a thing has to be of use
_PARTS = 16  # size classes between a power of two and the next


class Pool(Generic[_T]):
    """Makes things of exact sizes, and keeps those that are free. Thread-safe.

    It has as many of a size as were ever in use at once, which the schedule bounds.
    """

    def __init__(self, make: Callable[[int], _T]) -> None:
        self._make = make
        self._free: dict[int, deque[_T]] = {}
        self._out: set[int] = set()  # those in use, by ``id``

    def take(self, num_bytes: int) -> _T:
        """One of this size, with any content, until :meth:`give`."""
        try:
            thing = self._free.setdefault(num_bytes, deque()).pop()
        except IndexError:
            thing = self._make(num_bytes)
        self._out.add(id(thing))
        return thing

    def give(self, num_bytes: int, thing: _T) -> None:
        """Gives one of this size back."""
        try:
            self._out.remove(id(thing))
        except KeyError:
            return  # it is from before the last :meth:`renew`
        self._free[num_bytes].append(thing)

    def renew(self) -> None:
        """Drops all: those that are free now, and those in use once they come back."""
        self._out.clear()
        self.close()

    def close(self) -> None:
        """Drops all that are free."""
        for free in list(self._free.values()):
            free.clear()


class Lease(Generic[_T]):
    """Something lent. It goes back to its pool when nobody holds the lease any more."""

    __slots__ = ("_back", "_sizes", "value")

    def __init__(self, value: _T, sizes: tuple[int, int], back: deque[tuple[tuple[int, int], _T]]) -> None:
        self.value, self._sizes, self._back = value, sizes, back

    def __del__(self) -> None:
        self._back.append((self._sizes, self.value))


class LeasePool(Generic[_T]):
    """Lends things of at least a given size. Thread-safe.

    [Note: Sizes that vary]
    To make one is slow, and batches of many lengths want many sizes. So sizes are rounded up, by at
    most a sixteenth. The smallest free thing that is large enough is lent, if ``larger`` allows one
    of a larger class. A new one takes the place of those that were not used for the longest time:
    all together are at most a quarter larger than the most that the last batches had at once.

    ``make`` makes one of a size in bytes, and ``discard`` ends one.
    """

    def __init__(
        self, make: Callable[[int], _T], discard: Callable[[_T], object] = lambda thing: None, *, larger: bool = True
    ) -> None:
        self._make, self._discard, self._larger = make, discard, larger
        self._free: list[tuple[int, int, _T]] = []  # size, the batch of its last use; the longest unused first
        # A deque, because the garbage collector may end a lease in a thread that holds the lock.
        self._back: deque[tuple[tuple[int, int], _T]] = deque()  # with its size, and the size that was needed
        self._total_bytes = self._lent_bytes = self._batch = 0
        self._peaks: deque[int] = deque([0], maxlen=_KEPT)  # the most that was lent at once in each of the last batches
        self._lock = Lock()

    def lend(self, num_bytes: int) -> Lease[_T]:
        """One of at least this size, with any content, which goes back by itself."""
        needed = size_class(num_bytes)
        with self._lock:
            self._collect()
            fitting = [row[0] for row in self._free if row[0] == needed or (self._larger and row[0] > needed)]
            size = min(fitting, default=needed)
            self._peaks[-1] = max(self._peaks[-1], self._lent_bytes + needed)
            if fitting:
                place = next(i for i in reversed(range(len(self._free))) if self._free[i][0] == size)
                thing = self._free.pop(place)[2]
            else:
                self._end_oldest(self._most_bytes - size)
                thing = self._make(size)
                self._total_bytes += size
            self._lent_bytes += needed
        return Lease(thing, (size, needed), self._back)

    def trim(self) -> None:
        """A batch has ended: ends things that the last batches have not used."""
        with self._lock:
            self._collect()
            self._batch += 1
            self._peaks.append(self._lent_bytes)
            while self._free and self._free[0][1] <= self._batch - _KEPT:
                self._end_first()
            self._end_oldest(self._most_bytes)

    def close(self) -> None:
        """Ends all that are free."""
        with self._lock:
            self._collect()
            while self._free:
                self._end_first()

    @property
    def _most_bytes(self) -> int:
        return max(self._peaks) * 5 // 4

    def _collect(self) -> None:
        while self._back:
            (size, needed), thing = self._back.popleft()
            self._lent_bytes -= needed
            self._free.append((size, self._batch, thing))

    def _end_oldest(self, most_bytes: int) -> None:
        while self._free and self._total_bytes > most_bytes:
            self._end_first()

    def _end_first(self) -> None:
        size, _, thing = self._free.pop(0)
        self._total_bytes -= size
        self._discard(thing)


def size_class(num_bytes: int) -> int:
    """The size in whole sixteenths of the power of two below, or in pages of 4 KiB; rounded up."""
    step = max(4096, (1 << max(0, num_bytes.bit_length() - 1)) // _PARTS)
    return -(-num_bytes // step) * step
