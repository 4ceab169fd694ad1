"""Writes since the last record: whether another one is due, and whether the step is the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_hetero.store.live.blocks import Part


class Unrecorded:
    """Writes that no record names yet.

    Attributes:
        changed: Something was written that is no move, since the last step was kept.
        mirrored: A mirror was written since the last record.
    """

    def __init__(self) -> None:
        self.changed = self.mirrored = False
        self._moving = False
        self._parts: set[Part] = set()

    def __bool__(self) -> bool:
        return self.mirrored or bool(self._parts)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """What is written in the context was there before: it only moves."""
        before, self._moving = self._moving, True
        try:
            yield
        finally:
            self._moving = before

    def changes(self) -> None:
        """A write begins, be it to memory or to files."""
        self.changed |= not self._moving

    def begin(self, part: Part) -> None:
        """A write of the part's files begins."""
        part.uncommitted += 1
        self._parts.add(part)

    def undo(self, part: Part) -> None:
        """One of them is taken back."""
        if part.uncommitted:
            part.uncommitted -= 1
        if not part.uncommitted:
            self._parts.discard(part)

    def recorded(self) -> None:
        """A record is about to name all of them."""
        self.mirrored = False
        for part in self._parts:
            part.uncommitted = 0
        self._parts.clear()
