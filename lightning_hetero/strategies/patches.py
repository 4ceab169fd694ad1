"""Replaces attributes of single objects of Lightning and torch, and puts back what was there.

Which ones, and why, is listed in :mod:`lightning_hetero.borrowed`.
"""

from __future__ import annotations

from collections.abc import Callable

_ABSENT = object()


class Patches:
    """Attributes of instances that stand replaced until :meth:`restore`."""

    def __init__(self) -> None:
        self._replaced: list[tuple[object, str, object]] = []

    def replace(self, owner: object, name: str, value: Callable[..., object]) -> None:
        """Gives one instance another method, in front of the one of its class."""
        attributes = vars(owner)
        self._replaced.append((owner, name, attributes.get(name, _ABSENT)))
        attributes[name] = value

    def restore(self) -> None:
        """Puts back what was there, the latest first. Calling it twice does no harm."""
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is _ABSENT:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before
