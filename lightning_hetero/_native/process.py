"""Which process owns an object. A child of fork has all memory and none of the threads."""

from __future__ import annotations

import os

from lightning_hetero.errors import ForkedProcessError


class Owner:
    """The process that has made something with threads of its own; made as that is made.

    Code that waits for these threads calls :meth:`check` first: in a child of fork they would never
    answer.
    """

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._pid

    def check(self, what: str) -> None:
        """Refuses a forked child.

        Args:
            what: What it has tried to use, for the message.

        Raises:
            ForkedProcessError: This is another process.
        """
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                f"{what} belongs to process {self._pid}; this is process {os.getpid()}, a fork of it, without the threads that "
                f"read, update and write weights. Nothing was changed. Read what the child needs before the fork (within "
                f"strategy.materialize(...)), or start the child with multiprocessing's 'spawn'; end a fork with os._exit."
            )
