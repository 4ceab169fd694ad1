"""Why a rank has ended, as the others find it."""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

from torch.distributed.distributed_c10d import Store

_KEY = "lightning_hetero.ended"


class NotePlace(Protocol):
    """Where ranks leave a note."""

    def note(self, text: str) -> None:
        """Says why a rank ends. The first word counts."""

    def noted(self) -> str:
        """What a rank has said; empty if none has."""


class Notes:
    """The places that a rank knows. Ranks that have one in common find each other's notes."""

    def __init__(self, *places: NotePlace) -> None:
        self._places = list(places)

    def add(self, place: NotePlace) -> None:
        """Another one, which is asked first."""
        self._places.insert(0, place)

    def note(self, text: str) -> None:
        """Says why this rank ends, in all places."""
        for place in self._places:
            place.note(text)

    def noted(self) -> str:
        """What a rank has said; empty if none has."""
        return next(filter(None, (place.noted() for place in self._places)), "")


class GroupNotes:
    """In the store with which ranks have found each other, which all nodes see.

    It is in the process of the first rank, or of torchrun, and is gone with that.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def note(self, text: str) -> None:
        """Says why this rank ends. The first word counts."""
        with suppress(RuntimeError):  # the store is gone
            self._store.compare_set(_KEY, "", text)

    def noted(self) -> str:
        """What a rank has said; empty if none has, or the store is gone."""
        with suppress(RuntimeError):
            return self._store.get(_KEY).decode() if self._store.check([_KEY]) else ""
        return ""
