"""What each rank does with files: an error of one is that of all, and has a public class."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, cast

import pytest

from lightning_hetero import errors
from lightning_hetero.errors import ConfigError, DeviceMemoryError, HeteroError, OutOfDiskError
from lightning_hetero.lanes.collectives import Collectives
from lightning_hetero.runtime.of_each import of_each


class _PrivateError(ConfigError):
    """A class that users cannot import."""


class _Pair:
    """Two ranks, as threads, that tell each other values."""

    def __init__(self, told: dict[int, Any], all_have: Barrier, rank: int) -> None:
        self.rank, self._told, self._all_have = rank, told, all_have

    def tell_all(self, value: Any) -> list[Any]:
        self._told[self.rank] = value
        self._all_have.wait(timeout=5)
        return [self._told[rank] for rank in sorted(self._told)]


def _ends(second: Callable[[], str]) -> list[Any]:
    """What two ranks get, or the errors that they end with; the second one does something else."""
    told, all_have = dict[int, Any](), Barrier(2)

    def run(rank: int) -> Any:
        try:
            return of_each(cast("Collectives", _Pair(told, all_have, rank)), second if rank else lambda: "first")
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def test_all_get_what_each_has_found() -> None:
    assert _ends(lambda: "second") == [["first", "second"]] * 2


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (OutOfDiskError("full"), OutOfDiskError, "full"),
        (_PrivateError("no"), ConfigError, "no"),
        (DeviceMemoryError("full", needed_bytes=2), DeviceMemoryError, "full"),
        (PermissionError(13, "denied"), HeteroError, "rank 1 has failed: PermissionError: [Errno 13] denied"),
        (MemoryError(), HeteroError, "rank 1 has failed: MemoryError: "),
    ],
)
def test_an_error_of_one_rank_ends_the_other_with_its_public_class(raised: Exception, kind: type, text: str) -> None:
    def fail() -> str:
        raise raised

    other, own = _ends(fail)
    assert own is raised
    assert (type(other), str(other)) == (kind, text)
    assert vars(errors)[kind.__name__] is kind
