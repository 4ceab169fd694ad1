"""Replaces methods of single objects of Lightning and torch, and restores them.

:mod:`lightning_hetero.borrowed` lists which ones, and why.
"""

from __future__ import annotations

from lightning_hetero.untyped import Function

_ABSENT = object()


class Patches:
    """Methods of instances that stay replaced until :meth:`restore`."""

    def __init__(self) -> None:
        self._replaced: list[tuple[object, str, object]] = []

    def replace(self, owner: object, name: str, value: Function) -> None:
        """Gives one instance another method than its class."""
        attributes = vars(owner)
        self._replaced.append((owner, name, attributes.get(name, _ABSENT)))
        attributes[name] = value

    def restore(self) -> None:
        """Restores the methods, the latest first. A second call does nothing."""
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is _ABSENT:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before
